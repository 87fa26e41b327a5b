"""Check the framing and the size of HTTP messages, in the server and in the HTTP clients.

Ambiguous framing is refused to prevent request smuggling (RFC 9112, section 11.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import httpx

from .errors import BadRequest, MethodNotAllowed

MAX_ERROR_BODY = 1024 * 1024
MAX_BODY = 64 * MAX_ERROR_BODY
"""Default maximum size in bytes of a response body that is read completely into memory."""

_CLOSE = {"connection": "close"}
_DIGITS = re.compile(rb"[0-9]{1,18}")


class InvalidFraming(ValueError):
    """The framing headers are ambiguous, malformed or unsupported. The exception's text is a clause without a full stop."""


class BodyFraming(NamedTuple):
    """The framing of a message's body. `length` is the value of Content-Length in bytes, or None if the header is missing."""

    length: int | None
    chunked: bool

    @property
    def has_body(self) -> bool:
        return self.chunked or bool(self.length)


def body_framing(headers: Iterable[tuple[bytes, bytes]]) -> BodyFraming:
    """Return the framing that `headers` announce. Raises `InvalidFraming` if they are ambiguous, malformed or unsupported."""
    fields = [(name.lower(), value) for name, value in headers]
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value for name, value in fields if name == b"transfer-encoding"]
    if len(lengths) + len(codings) > 1:
        raise InvalidFraming("there is more than one Content-Length or Transfer-Encoding")
    if codings and codings[0].lower() != b"chunked":
        raise InvalidFraming("its Transfer-Encoding is not 'chunked'")
    if lengths and not _DIGITS.fullmatch(lengths[0]):
        raise InvalidFraming("its Content-Length is not a number of bytes")
    return BodyFraming(int(lengths[0]) if lengths else None, bool(codings))


def check_upgrade(method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse CONNECT, and upgrade requests other than a GET without a body. The names in `headers` must be in lower case.

    Raises `MethodNotAllowed` for CONNECT, otherwise `BadRequest`. Both close the connection, because servers based on httptools
    may parse the body of an upgrade request as another request.
    """
    if method == "CONNECT":
        raise MethodNotAllowed("CONNECT is not supported.", headers={"allow": "GET, HEAD, OPTIONS, POST", **_CLOSE})
    fields = list(headers)
    if any(name == b"upgrade" for name, _ in fields):
        # Like llhttp, accept Proxy-Connection in place of Connection.
        options = b",".join(value.lower() for name, value in fields if name in (b"connection", b"proxy-connection"))
        if b"upgrade" in options:
            require_bodiless_get(method, fields)


def require_bodiless_get(method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check that an upgrade request is a GET without a body. Raises `BadRequest` if it is not."""
    try:
        is_valid = method == "GET" and not body_framing(headers).has_body
    except InvalidFraming:
        is_valid = False
    if not is_valid:
        raise BadRequest(
            "A request for a connection upgrade must be a GET without a body. Send it over HTTP/1.1 without an Upgrade header.",
            code="invalid_upgrade",
            headers=_CLOSE,
        )


class BodyRefused(Exception):
    """A response body is compressed or too large. The message completes the sentence "The server sent ..."."""


def check_uncompressed(response: httpx.Response) -> None:
    """Raise `BodyRefused` if the body is compressed, because a small compressed body could expand without limit."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise BodyRefused(f"a body with the content-encoding '{encoding[:32]}', which was not requested")


async def read_body(response: httpx.Response, maximum: int = MAX_BODY) -> bytes:
    """Read and return the body of a streamed response. The caller must close the response.

    Raises `BodyRefused` if the body is compressed or longer than `maximum` bytes, and `httpx.HTTPError` if reading fails.
    """
    check_uncompressed(response)
    parts: list[bytes] = []
    size = 0
    async for data in response.aiter_raw():
        size += len(data)
        if size > maximum:
            raise BodyRefused(f"more than {maximum} bytes")
        parts.append(data)
    return b"".join(parts)
