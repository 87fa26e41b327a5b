"""A request as bytes."""

from __future__ import annotations

from dataclasses import dataclass

import httpx


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request as it is sent."""

    head: bytes
    body: bytes | httpx.AsyncByteStream
    chunked: bool
    is_head: bool
    keeps_connection: bool

    @classmethod
    def of(cls, request: httpx.Request) -> OutgoingRequest:
        """Raises ``httpx.LocalProtocolError`` where a line break would let a header begin another, or another request."""
        headers = request.headers.raw
        fields = fields_of(headers)
        body = b"".join(request.stream) if isinstance(request.stream, httpx.ByteStream) else request.stream
        assert isinstance(body, bytes | httpx.AsyncByteStream)
        if not isinstance(body, bytes) and not fields.keys() & {b"content-length", b"transfer-encoding"}:
            headers = [*headers, (b"Transfer-Encoding", b"chunked")]
            fields[b"transfer-encoding"] = b"chunked"
        target = request.extensions.get("target", request.url.raw_path)
        lines = [b"%b %b HTTP/1.1" % (request.method.encode(), target), *(b"%b: %b" % header for header in headers)]
        head = b"\r\n".join([*lines, b"", b""])
        if not head.count(b"\r") == head.count(b"\n") == len(lines) + 1:
            raise httpx.LocalProtocolError("The request's head has a line break within a line")
        chunked = fields.get(b"transfer-encoding", b"").endswith(b"chunked")
        return cls(head, body, chunked, request.method == "HEAD", fields.get(b"connection") != b"close")


def fields_of(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The headers, in lower case, to look them up; the last one of a name."""
    return {name.lower(): value.lower() for name, value in headers}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
