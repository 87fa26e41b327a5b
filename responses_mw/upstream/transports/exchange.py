"""A request as bytes, whose head announces exactly the body that follows it.

One request and its answer over a connection.

1. One read of the socket runs the parser, which is C, and wakes one future: no lock, no queue, no timer, no task.
2. An *exchange* is one request and its answer. While it lasts it is the protocol of its connection. Before and after, the
   connection is its own, and whatever arrives then ends it.
3. A connection is free for the next request once the answer is complete, read or not; but only if all that the request's head
   announced was sent, nothing came behind the answer, and both sides keep it.
4. An answer that nobody reads is held by pausing the socket; one that is left is aborted.
5. Only the end that its head announced ends an answer. Any other end breaks it off, and so does what is not HTTP.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

import httptools
import httpx

from ...framing import InvalidFraming, announced
from .pool import PooledConnection

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


_MOST_BUFFERED = 64 * 1024


class Exchange(asyncio.Protocol, httpx.AsyncByteStream):
    """One request and its answer, whose body it iterates over: what has arrived since the last read is one read.

    ``on_*`` are the parser's callbacks.
    """

    def __init__(self, connection: PooledConnection, request: OutgoingRequest, read_timeout: float | None) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._request = request
        self._read_timeout = read_timeout
        self._loop = asyncio.get_running_loop()
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._until_close = False
        self._keeps_connection = False
        self._complete = False  # the whole answer has arrived
        self._over = False  # it has, or it has been broken off by the failure
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._sender: asyncio.Task[None] | None = None
        self._is_written = False  # all that the request's head announced
        self.on_body = self._chunks.append
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data

    async def answer(self) -> httpx.Response:
        """Sends the request. Returns when the answer's head is there, even if the request's body is still on its way."""
        self._transport.set_protocol(self)
        self._begin_sending()
        try:
            while not self._status:
                await self._news()
        except BaseException:
            await self.aclose()
            raise
        return httpx.Response(self._status, headers=self._headers, stream=self)

    def __aiter__(self) -> Exchange:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._complete:
                raise StopAsyncIteration
            await self._news()
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def aclose(self) -> None:
        """The reader leaves: the connection of an answer that is not complete is closed at once."""
        if not self._over:
            self._end(httpx.StreamClosed())
        if self._sender is not None:
            await asyncio.wait({self._sender})

    # -- the reader ----------------------------------------------------------------------------------------------------

    def _news(self) -> asyncio.Future[None]:
        """Done when something more has arrived or nothing will. Raises what broke the answer off."""
        if self._failure is not None:
            raise self._failure
        self._reader = self._loop.create_future()
        if self._read_timeout is not None and not self._sending:  # while we do, the server may well wait for the rest
            self._limit(self._reader, self._read_timeout)
        return self._reader

    def _limit(self, reader: asyncio.Future[None], seconds: float) -> None:
        timer = self._loop.call_later(seconds, self._expire, reader, seconds)
        reader.add_done_callback(lambda _: timer.cancel())

    def _expire(self, reader: asyncio.Future[None], seconds: float) -> None:
        if not reader.done():
            self._end(httpx.ReadTimeout(f"The server sent nothing for {seconds:g} s"))

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- what the connection tells -------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._buffered += len(data)
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._garbled(error)
        if self._complete:
            self._end()
        elif self._buffered > _MOST_BUFFERED and not self._over:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if not self._over:  # TLS may tell an end even of a connection that has been aborted
            self._complete = self._until_close
            self._end(self._breaking_off(None))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over:
            self._end(self._breaking_off(exc or ConnectionAbortedError("The transport was closed")))
        self._connection.connection_lost(exc)

    def _garbled(self, error: Exception) -> None:
        """Bytes that are not what they should be; behind a complete answer they are not part of it."""
        self._keeps_connection = False
        if not self._complete:
            failure = httpx.RemoteProtocolError(f"The server's answer is not HTTP/1.1: {error}")
            failure.__cause__ = error
            self._end(failure)

    def _breaking_off(self, cause: Exception | None) -> Exception | None:
        """What the end of the connection is for the exchange; without a ``cause``, the server ended it."""
        if self._complete:
            return None
        failure: Exception
        if self._connection.was_used and not self._status and not self._buffered:
            failure = httpx.ConnectError("The server closed the connection before the request reached it")
        elif cause is None:
            failure = httpx.RemoteProtocolError("The server closed the connection before its answer was complete")
        else:
            kind = httpx.WriteError if self._sending else httpx.ReadError
            failure = kind(str(cause) or type(cause).__name__)
        failure.__cause__ = cause
        return failure

    def _end(self, failure: Exception | None = None) -> None:
        """The exchange is over: complete, or broken off by ``failure``."""
        if self._over:
            return
        self._over = True
        self._failure = failure
        if self._complete and self._keeps_connection and self._is_sent():
            if self._paused:
                self._transport.resume_reading()
            self._connection.release()
        else:
            self._transport.abort()
        self._paused = False
        del self._parser, self._feed  # they know our methods: a circle, and large bodies in it, would wait for the collector
        if self._sender is not None:
            self._sender.cancel()
        self._wake()

    # -- what the parser tells -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("an answer that was not asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:  # else it is a trailer
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers.clear()
            return
        self._status = status
        self._keeps_connection = self._parser.should_keep_alive() and self._request.keeps_connection
        self._until_close = _ends_with_connection(self._headers)
        if self._request.is_head:
            # The parser cannot be told that no body follows. It is stopped here, and what it leaves is not looked at.
            self._complete = True
            raise ValueError("a body that was not asked for")

    def on_message_complete(self) -> None:
        self._complete = bool(self._status)  # an interim answer (1xx) is not it

    # -- the request ---------------------------------------------------------------------------------------------------

    def _begin_sending(self) -> None:
        head, body = self._request.head, self._request.body
        if not isinstance(body, bytes):
            self._transport.write(head)
            self._sender = self._loop.create_task(self._send(body))
            self._sender.add_done_callback(self._sent)
            return
        if self._request.length is None:
            body = (chunk(body) if body else b"") + chunk(b"")
        self._transport.write(head + body)
        self._is_written = True

    async def _send(self, body: httpx.AsyncByteStream) -> None:
        """Send what the head announced, never more; raise where it was less."""
        left = self._request.length
        async for data in body:
            if left is not None:
                if len(data) > left:
                    raise httpx.LocalProtocolError("The request's body is longer than its Content-Length")
                left -= len(data)
            if data:
                self._transport.write(chunk(data) if left is None else data)
            if self._writable is not None:
                await self._writable
        if left is None:
            self._transport.write(chunk(b""))
        elif left:
            raise httpx.LocalProtocolError(f"The request's body is {left} bytes shorter than its Content-Length")
        self._is_written = True

    def _sent(self, sender: asyncio.Task[None]) -> None:
        failure = None if sender.cancelled() else sender.exception()
        if isinstance(failure, Exception):
            self._end(failure)
        if self._read_timeout is not None and self._reader is not None:
            self._limit(self._reader, self._read_timeout)

    @property
    def _sending(self) -> bool:
        return self._sender is not None and not self._sender.done()

    def _is_sent(self) -> bool:
        return self._is_written and self._transport.get_write_buffer_size() == 0

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None


def _ends_with_connection(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether an answer has no other end (RFC 9112, section 6.3), if it has a body at all."""
    fields = fields_of(headers)
    if b"transfer-encoding" in fields:
        return not fields[b"transfer-encoding"].endswith(b"chunked")
    return b"content-length" not in fields
