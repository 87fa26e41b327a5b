"""A limit on the memory of messages that are being received: bodies of HTTP requests, and frames of WebSockets."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from ..errors import Unavailable

__all__ = ["BODY_TIMEOUT", "Inbound", "Receiving"]

# The first bytes of each message are not counted, so that large messages never block small ones.
UNCOUNTED = 64 * 1024

BODY_TIMEOUT = 60.0
"""Maximum seconds between two pieces of a request body. A slower client has vanished, or holds the connection on purpose."""


class Inbound:
    """Limits the total size of the messages that are being received to `maximum` bytes."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.size = 0

    def receiving(self) -> Receiving:
        """Return a context manager that counts one message until it exits."""
        return Receiving(self)


class Receiving:
    """The bytes of one message that count against the limit."""

    __slots__ = ("_inbound", "_size")

    def __init__(self, inbound: Inbound) -> None:
        self._inbound = inbound
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()

    def add(self, size: int) -> None:
        """Count another `size` bytes of the message. Raises `Unavailable` beyond the maximum."""
        inbound, counted = self._inbound, self._counted
        self._size += size
        inbound.size += self._counted - counted
        if self._counted and inbound.size > inbound.maximum:
            raise Unavailable("The server is receiving too many large requests.")

    def clear(self) -> None:
        """Stop counting the bytes received so far."""
        self._inbound.size -= self._counted
        self._size = 0

    @property
    def _counted(self) -> int:
        return max(0, self._size - UNCOUNTED)
