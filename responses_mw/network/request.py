"""A request as bytes, whose head announces exactly the body that follows it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx

from ..framing import InvalidFraming, announced

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(rb"[^\x00-\x20\x7f]+")


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request as it is sent. ``length`` is that of its body; None: the body is sent in chunks."""

    head: bytes
    body: bytes | httpx.AsyncByteStream
    length: int | None
    is_head: bool
    keeps_connection: bool

    @classmethod
    def of(cls, request: httpx.Request) -> OutgoingRequest:
        """Raises ``httpx.LocalProtocolError`` where the upstream could read another request, or more than one: a line break
        within a header, a name that is none, or framing that is ambiguous or does not fit the body."""
        headers = list(request.headers.raw)
        body = b"".join(request.stream) if isinstance(request.stream, httpx.ByteStream) else request.stream
        assert isinstance(body, bytes | httpx.AsyncByteStream)
        length = _framed(headers, body)
        if request.method == "CONNECT":
            raise httpx.LocalProtocolError("A connection of the pool cannot become a tunnel")
        target = request.extensions.get("target", request.url.raw_path)
        method, names = request.method.encode(), [name for name, _ in headers]
        if not (_TARGET.fullmatch(target) and _TOKEN.fullmatch(b"".join([method, *names])) and method and all(names)):
            raise httpx.LocalProtocolError("The request's method, its target or the name of a header is not valid")
        lines = [b"%b %b HTTP/1.1" % (method, target), *(b"%b: %b" % header for header in headers)]
        head = b"\r\n".join([*lines, b"", b""])
        if b"\x00" in head or not head.count(b"\r") == head.count(b"\n") == len(lines) + 1:
            raise httpx.LocalProtocolError("The request's head has a line break or a null within a line")
        return cls(head, body, length, request.method == "HEAD", fields_of(headers).get(b"connection") != b"close")


def _framed(headers: list[tuple[bytes, bytes]], body: bytes | httpx.AsyncByteStream) -> int | None:
    """The length that is announced, by a header that is added where there was none; None: in chunks."""
    try:
        told = announced(headers)
    except InvalidFraming as error:
        raise httpx.LocalProtocolError(f"The request's framing is not valid: {error}") from error
    if told.chunked:
        return None
    if isinstance(body, bytes):
        if told.length is None and body:
            headers.append((b"Content-Length", b"%d" % len(body)))
        elif (told.length or 0) != len(body):
            raise httpx.LocalProtocolError(f"The request announces {told.length} bytes and has {len(body)}")
        return len(body)
    if told.length is None:
        headers.append((b"Transfer-Encoding", b"chunked"))
    return told.length


def fields_of(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The headers, in lower case, to look them up; the last one of a name."""
    return {name.lower(): value.lower() for name, value in headers}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
