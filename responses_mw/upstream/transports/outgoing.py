"""The head and the body of a request of `http11`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx

from ...http import InvalidFraming, body_framing

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(rb"[^\x00-\x20\x7f]+")


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request whose headers are encoded. `length` is the body's length in bytes, or None if the body is sent in chunks."""

    head: bytes
    body: bytes | httpx.AsyncByteStream
    length: int | None
    is_head: bool
    keeps_connection: bool

    @classmethod
    def of(cls, request: httpx.Request) -> OutgoingRequest:
        """Encode the request line and the headers of `request`.

        Raises `httpx.LocalProtocolError` if the method is CONNECT, or if the method, the target or a header is invalid. Framing
        headers that are ambiguous or do not match the body are also refused, because they allow request smuggling.
        """
        headers = list(request.headers.raw)
        body = b"".join(request.stream) if isinstance(request.stream, httpx.ByteStream) else request.stream
        assert isinstance(body, bytes | httpx.AsyncByteStream)
        length = _framed(headers, body)
        if request.method == "CONNECT":
            raise httpx.LocalProtocolError("CONNECT is not supported over pooled connections")
        target = request.extensions.get("target", request.url.raw_path)
        method, names = request.method.encode(), [name for name, _ in headers]
        if not (_TARGET.fullmatch(target) and _TOKEN.fullmatch(b"".join([method, *names])) and method and all(names)):
            raise httpx.LocalProtocolError("The request's method, target or a header name is invalid")
        lines = [b"%b %b HTTP/1.1" % (method, target), *(b"%b: %b" % header for header in headers)]
        head = b"\r\n".join([*lines, b"", b""])
        if b"\x00" in head or not head.count(b"\r") == head.count(b"\n") == len(lines) + 1:
            raise httpx.LocalProtocolError("The request line or a header contains a line break or a null")
        return cls(head, body, length, request.method == "HEAD", fields(headers).get(b"connection") != b"close")


def _framed(headers: list[tuple[bytes, bytes]], body: bytes | httpx.AsyncByteStream) -> int | None:
    """Return the length of the body, or None if it is sent in chunks. A missing framing header is added to `headers`."""
    try:
        framing = body_framing(headers)
    except InvalidFraming as error:
        raise httpx.LocalProtocolError(f"The request's framing is invalid: {error}") from error
    if framing.chunked:
        return None
    if isinstance(body, bytes):
        if framing.length is None and body:
            headers.append((b"Content-Length", b"%d" % len(body)))
        elif (framing.length or 0) != len(body):
            raise httpx.LocalProtocolError(f"The request announces {framing.length} bytes but has {len(body)}")
        return len(body)
    if framing.length is None:
        headers.append((b"Transfer-Encoding", b"chunked"))
    return framing.length


def fields(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Map the names of headers to their values, both in lower case. If a name is repeated, the last value is used."""
    return {name.lower(): value.lower() for name, value in headers}


def chunk(data: bytes) -> bytes:
    """Return `data` as one chunk of a body. Without data, it is the last chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)
