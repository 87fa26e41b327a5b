"""Encrypt the responses that are kept only for a short time: background responses with `store: false`.

Their records and event logs contain no readable data. They expire `KEPT_SECONDS` after the last sign of life of their worker,
or after their end. No other response can continue them, and their items are not added to conversations.
"""

from __future__ import annotations

from typing import Any

from ..crypto import InvalidEnvelope, Sealer
from .errors import Damaged

KEPT_SECONDS = 600
"""Time to live of such a response in seconds. While a worker runs the response, its time to live starts again and again."""
_SEALED = b"E"
"""First byte of a sealed value. Values of other forms begin with another byte (see `schema`)."""


def is_temporary(document: dict[str, Any]) -> bool:
    """Return whether the background response of `document` is kept only for a short time."""
    return document.get("store") is False


class Vault:
    """Seals and opens the values of temporary responses. `sealer` must be set before the first use."""

    def __init__(self) -> None:
        self.sealer: Sealer | None = None

    def seal(self, response_id: str, value: bytes) -> bytes:
        assert self.sealer is not None
        return _SEALED + self.sealer.seal(value, purpose=_purpose(response_id), owner="").encode()

    def open(self, response_id: str, value: bytes) -> bytes:
        """Return `value` in readable form, unchanged if it is not sealed. Raises Damaged if it cannot be opened."""
        if value[:1] != _SEALED:
            return value
        try:
            assert self.sealer is not None
            return self.sealer.open(value[1:].decode(), purpose=_purpose(response_id), owner="")
        except (InvalidEnvelope, UnicodeDecodeError):
            raise Damaged("response") from None


def _purpose(response_id: str) -> str:
    return f"temporary response {response_id}"
