"""Where a request's body ends, judged by its headers alone (RFC 9112, section 6).

Everything that is ambiguous is invalid here: what two servers read differently is how one request hides in another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from .errors import BadRequest, MethodNotAllowed

__all__ = ["Announced", "InvalidFraming", "announced", "check_upgrade", "require_bodiless_get"]

_CONNECTION_FIELDS = frozenset({b"connection", b"proxy-connection"})
_CLOSE = {"connection": "close"}
_DIGITS = re.compile(rb"[0-9]{1,18}")


class InvalidFraming(ValueError):
    """The headers do not say, or say twice, where the body ends."""


class Announced(NamedTuple):
    """The body that a head announces: ``length`` bytes of it, or in chunks, or none."""

    length: int | None
    chunked: bool

    @property
    def has_body(self) -> bool:
        return self.chunked or bool(self.length)


def announced(headers: Iterable[tuple[bytes, bytes]]) -> Announced:
    """The body that the headers announce. Raises ``InvalidFraming``."""
    lengths, codings = [], []
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"content-length":
            lengths.append(value)
        elif lowered == b"transfer-encoding":
            codings.append(value)
    if len(lengths) + len(codings) > 1:
        raise InvalidFraming("there is more than one Content-Length or Transfer-Encoding")
    if codings and codings[0].lower() != b"chunked":
        raise InvalidFraming("its Transfer-Encoding is not 'chunked'")
    if lengths and not _DIGITS.fullmatch(lengths[0]):
        raise InvalidFraming("its Content-Length is not a number of bytes")
    return Announced(int(lengths[0]) if lengths else None, bool(codings))


def check_upgrade(method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a request that asks for an upgrade, unless it is a GET without a body. Names are in lower case, as ASGI has them.

    Servers on httptools skip the body of such a request, and take it for another request when it comes in a later segment.
    Raises ``BadRequest``, and ``MethodNotAllowed`` for CONNECT: the connection must be closed after the answer.
    """
    fields = list(headers)
    if method == "CONNECT":
        raise MethodNotAllowed(
            "There are no tunnels here.", headers={"allow": "GET, HEAD, OPTIONS, POST", "connection": "close"}
        )
    if _asks_for_upgrade(fields):
        require_bodiless_get(method, fields)


def require_bodiless_get(method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises ``BadRequest`` where the request, which asks for an upgrade, is another one."""
    try:
        is_harmless = method == "GET" and not announced(headers).has_body
    except InvalidFraming:
        is_harmless = False
    if not is_harmless:
        raise BadRequest(
            "A request that asks for an upgrade of its connection must be a GET without a body. "
            "Send it over HTTP/1.1 without the header Upgrade.",
            code="invalid_upgrade",
            headers=_CLOSE,
        )


def _asks_for_upgrade(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a server may take the connection for another protocol's from here on. llhttp also looks at Proxy-Connection."""
    asks, options = False, b""
    for name, value in headers:
        if name == b"upgrade":
            asks = True
        elif name in _CONNECTION_FIELDS:
            options += value.lower() + b","
    return asks and b"upgrade" in options
