"""The HTTP/1.1 transport of the upstream client and the proxy, based on httptools.

This transport is used because it needs less CPU than that of httpx-aiohttp: the whole server takes 43 us per token instead of
60 us (benchmark `steady`, three interleaved rounds on two busy cores). Remove this transport if it saves less than 20 %.

1. Each read from the socket runs the parser (in C) and wakes one future, without a lock, queue, timer or task. A reader can
   *divert* data: a function then gets the data instead of the reader.
2. An *exchange* is one request and its response. Until the exchange is over, it is the asyncio protocol of its connection.
3. A connection is reused after a complete response, even if nobody has read the response. The request must have been sent in
   full, nothing may follow the response, and both sides must keep the connection open.
4. A reused connection is *stale* if the server closed it while it was idle. A request is sent a second time only if the
   connection was stale and the body is in memory.
5. If the reader falls behind, reading from the socket is paused. If it closes the response early, the connection is aborted.
6. A response is complete only if it ends as its headers announced. Any other end and any protocol error raises an exception.

The only timeout is the connect timeout. Callers limit the time that they wait for a response.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

import httptools
import httpx

from ...network import system_tls
from .base import UpstreamTransport
from .connections import ConnectionPool, PooledConnection, origin_of
from .outgoing import OutgoingRequest, chunk, fields

_MAX_BUFFERED = 64 * 1024
# Seconds after the first write. A reused connection that is closed within this time without a response was stale, because the
# close of an idle connection arrives within a round trip. A server that closes it later may have processed the request, or
# crashed because of it. Sending that request again could crash the next server.
_STALE_WINDOW = 0.05


class NetworkTransport(UpstreamTransport):
    """Sends requests over pooled connections. Bodies are streamed in both directions, and responses are not decompressed.

    The request extension `timeout["connect"]` is in seconds. The extension `target` (bytes) replaces the URL's path and query.
    The extension `sni_hostname` (str) replaces the URL's host as the server name of TLS, which the certificate must contain.

    Raises `httpx.ConnectError` or `ConnectTimeout` if no connection can be made, and `ReadError`, `WriteError` or
    `RemoteProtocolError` if the exchange fails afterwards. Raises `LocalProtocolError` if the request is invalid, and
    `UnsupportedProtocol` if its scheme is not http or https. Errors raised by the request's body are passed on unchanged.
    """

    def __init__(self, ssl_context: ssl.SSLContext | None = None) -> None:
        """If `ssl_context` is None, the system's CA certificates are used."""
        self._pool = ConnectionPool()
        self._ssl_context = ssl_context

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        connect_timeout = request.extensions.get("timeout", {}).get("connect")
        outgoing = OutgoingRequest.of(request)
        origin = origin_of(request.url, request.extensions.get("sni_hostname"))
        context = (self._ssl_context or system_tls()) if request.url.scheme == "https" else None
        connection = await self._pool.acquire(origin, context, connect_timeout)
        try:
            return await Exchange(connection).answer(outgoing)
        except StaleConnection:
            if not isinstance(outgoing.body, bytes):
                raise
        # Do not reuse another idle connection. It may be stale too, and a second close would make the request fail.
        connection = await self._pool.acquire(origin, context, connect_timeout, reuse=False)
        return await Exchange(connection).answer(outgoing)

    def retire(self, url: str, server_name: str = "") -> None:
        self._pool.retire(origin_of(httpx.URL(url), server_name))

    async def aclose(self) -> None:
        """Abort all exchanges and wait until every connection is closed."""
        await self._pool.aclose()


class StaleConnection(httpx.ReadError):
    """The server had closed the reused connection before the request arrived."""


class Exchange(asyncio.Protocol, httpx.AsyncByteStream):
    """One request and its response.

    Each iteration step yields all data of the response body that has arrived since the previous step.
    """

    def __init__(self, connection: PooledConnection) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._loop = connection.loop
        self._began = 0.0
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._until_close = False
        self._is_head = self._keeps_connection = False
        self._complete = False  # the whole response has arrived
        self._over = False  # the response is complete, or the exchange failed
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._sender: asyncio.Task[None] | None = None
        self._is_written = False  # the whole announced request has been written
        self.on_body = self._chunks.append
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data

    async def answer(self, request: OutgoingRequest) -> httpx.Response:
        """Send `request`, and return the response once its headers have arrived. The request may not be fully sent yet.

        Raises `StaleConnection` if the server had already closed the connection, and the other errors of `NetworkTransport`.
        """
        self._transport.set_protocol(self)
        self._began = time.monotonic()  # not the loop's time, which may be from the start of this iteration
        self._begin_sending(request)
        try:
            while not self._status:
                await self._more()
        except BaseException:
            await self.aclose()
            raise
        return httpx.Response(self._status, headers=self._headers, stream=self, extensions={"divert": self.divert})

    def divert(self, take: Callable[[bytes], bool]) -> None:
        """While the reader waits, pass each read that contains one piece of the body, but not its end, to `take`.

        If `take` returns false, the reader gets the data. If `take` raises an exception, the reader gets the exception.
        """
        if not self._over:
            self._take = take

    def __aiter__(self) -> Exchange:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._complete:
                raise StopAsyncIteration
            await self._more()
        if self._paused:
            await asyncio.sleep(0)  # anyio cannot cancel a task whose data always arrives before it waits
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def aclose(self) -> None:
        """Stop reading. If the response is incomplete, close the connection at once."""
        if not self._over:
            self._end(httpx.StreamClosed())
        if self._sender is not None:
            await asyncio.wait({self._sender})
        self._failure, self._sender = httpx.StreamClosed(), None  # the old ones keep frames, which refer to this exchange

    # -- the reader ----------------------------------------------------------------------------------------------------

    def _more(self) -> asyncio.Future[None]:
        """Return a future for the next data or the end of the exchange. Raises the failure of the exchange, if any."""
        if self._failure is not None:
            raise self._failure
        self._reader = self._loop.create_future()
        return self._reader

    def _is_taken(self, take: Callable[[bytes], bool]) -> bool:
        if self._reader is None or self._reader.done():
            return False
        try:
            if not take(self._chunks[0]):
                return False
        except Exception as failure:  # noqa: BLE001 (the reader gets it)
            self._end(failure)
        self._chunks.clear()
        self._buffered = 0
        return True

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- callbacks of the connection -------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._buffered += len(data)
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._reject_data(error)
        if self._complete:
            self._end()
        elif not self._chunks and self._buffered > _MAX_BUFFERED and not self._over:
            self._status = 0  # if nobody has seen the status yet, the error takes its place
            self._reject_data(ValueError("its headers, trailers or chunk extensions are too long"))
        elif self._take is not None and len(self._chunks) == 1 and self._is_taken(self._take):
            return
        elif self._buffered > _MAX_BUFFERED and not self._over:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if not self._over:  # TLS may report an end even after the connection was aborted
            self._complete = self._until_close
            self._end(self._end_failure(None))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over:
            self._end(self._end_failure(exc or ConnectionAbortedError("The transport was closed")))
        self._connection.connection_lost(exc)

    def _reject_data(self, error: Exception) -> None:
        self._keeps_connection = False  # after a complete response, this is the only effect of invalid data
        if not self._complete:
            failure = httpx.RemoteProtocolError(f"The server's response is not HTTP/1.1: {error}")
            failure.__cause__ = error
            self._end(failure)

    def _end_failure(self, cause: Exception | None) -> Exception | None:
        """Return the failure of an exchange whose connection was closed, or None if the response is complete.

        `cause` is None if the server closed the connection in the regular way.
        """
        if self._complete:
            return None
        failure: Exception
        is_unanswered = self._connection.was_used and not self._status and not self._buffered
        if is_unanswered and time.monotonic() - self._began < _STALE_WINDOW:
            failure = StaleConnection("The server closed the connection before the request reached it")
        elif cause is None:
            failure = httpx.RemoteProtocolError("The server closed the connection before its response was complete")
        else:
            is_sending = self._sender is not None and not self._sender.done()
            kind = httpx.WriteError if is_sending else httpx.ReadError
            failure = kind(str(cause) or type(cause).__name__)
        failure.__cause__ = cause
        return failure

    def _end(self, failure: Exception | None = None) -> None:
        if self._over:
            return
        self._over = True
        self._failure = failure
        is_reusable = self._complete and self._keeps_connection and self._is_written
        if is_reusable and self._transport.get_write_buffer_size() == 0:
            if self._paused:
                self._transport.resume_reading()
            self._connection.release()
        else:
            self._transport.abort()
        self._paused = False
        self._take = None
        del self._parser, self._feed  # break the reference cycle, which would keep large bodies until a garbage collection
        if self._sender is not None:
            self._sender.cancel()
        self._wake()

    # -- callbacks of the parser -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("unexpected second response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:  # otherwise a trailer
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status < 600:
            raise ValueError("invalid status code")
        if status < 200:
            self._headers.clear()
            return
        self._status, self._keeps_connection = status, self._keeps_connection and self._parser.should_keep_alive()
        self._until_close = _ends_with_connection(self._headers)
        if self._is_head:
            # The parser cannot be configured to expect no body, so stop it here and ignore further data.
            self._complete = True
            raise ValueError("unexpected response body")

    def on_message_complete(self) -> None:
        self._complete = bool(self._status)  # not set for an interim response (1xx)

    # -- the request ---------------------------------------------------------------------------------------------------

    def _begin_sending(self, request: OutgoingRequest) -> None:
        self._is_head, self._keeps_connection = request.is_head, request.keeps_connection  # keep no reference to the body
        head, body = request.head, request.body
        if not isinstance(body, bytes):
            self._transport.write(head)
            self._sender = self._loop.create_task(self._send(body, request.length))
            self._sender.add_done_callback(self._sent)
            return
        if request.length is None:
            body = (chunk(body) if body else b"") + chunk(b"")
        self._transport.write(head + body)
        self._is_written = True

    async def _send(self, body: httpx.AsyncByteStream, left: int | None) -> None:
        async for data in body:
            if left is not None and (left := left - len(data)) < 0:
                raise httpx.LocalProtocolError("The request's body is longer than its Content-Length")
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

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None


def _ends_with_connection(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether only the end of the connection marks the end of the response body (RFC 9112, section 6.3)."""
    named = fields(headers)
    if b"transfer-encoding" in named:
        return not named[b"transfer-encoding"].endswith(b"chunked")
    return b"content-length" not in named
