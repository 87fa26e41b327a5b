"""Checks of the framing and the size of HTTP messages, for the server and the HTTP clients.

Ambiguous framing is refused. If two servers disagree about where a request ends, an attacker can hide a second request in its
body (request smuggling; RFC 9112, section 11.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import httpx

from .errors import BadRequest, MethodNotAllowed

__all__ = [
    "MAX_BODY",
    "MAX_ERROR_BODY",
    "BodyFraming",
    "BodyRefused",
    "InvalidFraming",
    "body_framing",
    "check_uncompressed",
    "check_upgrade",
    "read_body",
    "require_bodiless_get",
]

MAX_ERROR_BODY = 1024 * 1024
MAX_BODY = 64 * MAX_ERROR_BODY
"""Maximum size in bytes of a response body that is read completely into memory. Legitimate bodies are far smaller."""

_CONNECTION_FIELDS = frozenset({b"connection", b"proxy-connection"})
_CLOSE = {"connection": "close"}
_DIGITS = re.compile(rb"[0-9]{1,18}")


class InvalidFraming(ValueError):
    """The headers do not define unambiguously where the body ends.

    The error's message is a clause without a full stop, for use inside a sentence.
    """


class BodyFraming(NamedTuple):
    """The framing that the headers of a message announce: a `length` in bytes, or chunks, or no body."""

    length: int | None
    chunked: bool

    @property
    def has_body(self) -> bool:
        return self.chunked or bool(self.length)


def body_framing(headers: Iterable[tuple[bytes, bytes]]) -> BodyFraming:
    """Return the framing that `headers` announce.

    Raises `InvalidFraming` if there is more than one Content-Length or Transfer-Encoding, or if one of them is malformed or
    unsupported.
    """
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
    return BodyFraming(int(lengths[0]) if lengths else None, bool(codings))


def check_upgrade(method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check that the request is not a CONNECT, and that a request for an upgrade is a GET without a body.

    The names in `headers` must be in lower case. Raises `MethodNotAllowed` for a CONNECT, and `BadRequest` for an invalid
    request for an upgrade.

    Servers based on httptools skip the body of an upgrade request. If the body arrives in a later segment, they parse the body
    as another request. The responses to refused requests therefore close the connection.
    """
    fields = list(headers)
    if method == "CONNECT":
        raise MethodNotAllowed(
            "CONNECT is not supported.", headers={"allow": "GET, HEAD, OPTIONS, POST", "connection": "close"}
        )
    if _requests_upgrade(fields):
        require_bodiless_get(method, fields)


def require_bodiless_get(method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check that an upgrade request is a GET without a body. Raises `BadRequest` if not."""
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


def _requests_upgrade(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether the headers request an upgrade. Like llhttp, accept Proxy-Connection in place of Connection."""
    has_upgrade, options = False, b""
    for name, value in headers:
        if name == b"upgrade":
            has_upgrade = True
        elif name in _CONNECTION_FIELDS:
            options += value.lower() + b","
    return has_upgrade and b"upgrade" in options


class BodyRefused(Exception):
    """A response body is compressed or too large. The error's message completes "The server sent ..."."""


def check_uncompressed(response: httpx.Response) -> None:
    """Raise `BodyRefused` if the body is compressed.

    Our requests never accept compression, and a small compressed body could expand without limit.
    """
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
