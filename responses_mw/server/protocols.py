"""uvicorn's protocol classes, with fixes for their weaknesses.

- With httptools, the heads of requests and the trailers of their bodies may have any size. This server limits them.
- uvicorn queues pipelined requests, and messages and fragments of WebSockets, without a limit, and answers any number of pings.
  This server limits their number.
- uvicorn does not cancel the response in progress if a client disconnects while further requests wait. This server does.
- httptools skips the body of an upgrade request. If the body arrives in a later segment, uvicorn parses it as another request.
  No proxy in front of the server has checked that request. This server refuses upgrade requests with a body.
- uvicorn appends the trailers of a chunked body to the request's headers. This server discards trailers (RFC 9110, section
  6.5.1).
- uvicorn keeps responses and messages until their clients have read them. This server limits the total size of large ones. A
  connection's next request or message is not processed until its client has read most of the earlier ones.
- uvicorn does not see that a client has left while data waits to be sent to it, or while reading is paused. This server does.
- uvicorn waits forever for the rest of a head, and for any number of connections. This server limits the time and the number.
- uvicorn limits the size of each WebSocket message. This server also limits the total size of all incomplete messages.
- uvicorn logs an error for each refused WebSocket upgrade. This server does not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, ClassVar, cast

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from ..asgi.http_responses import BODY_WRITER, TRY_AGAIN_LATER, BodyWriter
from ..asgi.requests import MESSAGE_TIMEOUT, UNCOUNTED, Inbound
from ..errors import APIError, BadRequest, RequestTimeout, Unavailable
from ..http import require_bodiless_get
from .client_connections import LINGER, Connections, CountedProtocol, Unread

MAX_HEAD = 64 * 1024
"""A request is refused if its head or its trailers are still incomplete after this number of bytes."""
MAX_PIPELINED = 32
"""Maximum number of requests that wait for the responses to earlier requests of their connection."""
MAX_FRAMES = 10_000
"""Maximum number of frames (fragments, pings and pongs) that a WebSocket may receive before the application reads a message.

A fragment of one byte takes 50 bytes of memory. Each frame takes about 3 us of CPU time.
"""
MAX_QUEUED = 1000
"""Maximum number of messages of a WebSocket that arrived in one read of the socket and wait for the application."""


class HTTPProtocol(CountedProtocol, HttpToolsProtocol):
    """uvicorn's httptools protocol with checks of upgrade requests, and with limits on heads, trailers and pipelined requests.

    A connection is closed if a head does not arrive in time, or if its address has too many connections (see `Connections`).

    An upgrade request must be a GET without a body. An upgrade to a protocol other than WebSocket is served as a plain request,
    and the connection is closed after the response. Invalid requests are refused with a 400 in OpenAI's format.
    """

    _refusal: BadRequest | None = None
    _head_size = 0
    """Bytes received since the last complete head or piece of a body."""
    _deadline: asyncio.TimerHandle | None = None
    """Ends a connection that is refused, or that waits for a head. An idle one has uvicorn's timer instead."""
    _is_refused = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._served, self.app = self.app, self._serve
        self._unanswered: deque[RequestResponseCycle] = deque()
        """The requests whose responses have not ended, in the order of the responses."""

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L101
    # uvicorn accepts any number of connections, and sets no deadline for the first head.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        error = self.open_connections.open(transport)
        if error is None:
            self.open_connections.wait(transport)
            self._start_deadline(self.open_connections.head_timeout)
            return
        self._is_refused = True
        self._write_error(error)
        transport.write_eof()  # closing now would reset the connection when the request arrives, and discard the error
        self._start_deadline(LINGER)

    def _start_deadline(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(seconds, self._end_waiting)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_waiting(self) -> None:
        if self._head_size and not self._is_refused:
            self._write_error(RequestTimeout("The head of the request arrives too slowly."))
        self.transport.close()

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L341
    # uvicorn starts the next pipelined request although the client has not read the last response.
    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if self.flow.write_paused:
            # A response that waits to be sent would take memory that `unread` does not count.
            await self.flow.drain()
            if self.transport.is_closing():
                return
        await self._served(scope, receive, send)

    def _expects_more(self) -> bool:
        return bool(self._unanswered)  # a client may send an EOF after its request, and then read a complete response

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L327
    # uvicorn keeps no list of requests without a response, which `connection_lost` and `answered` need.
    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if not (self._unanswered or self.transport.is_closing()):
            self.open_connections.wait(self.transport)

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L126
    # uvicorn marks only the newest request as disconnected, not the one whose response is being sent.
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        for cycle in self._unanswered:  # uvicorn tells only the last one
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self.app = self._served  # otherwise, a cycle keeps the protocol until the garbage collector runs

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L174
    # httptools has no limit on the size of a head or of trailers, nor on the time that they take.
    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._head_size += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._deadline is None and not self._unanswered and self.transport.get_protocol() is self:
            # The data, which has stopped uvicorn's timer, begins a head, or continues a body whose response has ended.
            self._start_deadline(self.open_connections.head_timeout)
        if self._head_size > MAX_HEAD:
            self.send_400_response(f"The headers of the request have more than {MAX_HEAD} bytes.")
            self.transport.close()

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L313
    # A piece of a body ends the count of bytes of a head or of trailers.
    def on_body(self, body: bytes) -> None:
        self._head_size = 0
        super().on_body(body)

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L294
    # uvicorn queues all pipelined requests, appends trailers to the headers, and does not refuse a body of an upgrade.
    def on_headers_complete(self) -> None:
        self._head_size = 0
        self._stop_deadline()
        self.open_connections.stop_waiting(self.transport)
        if len(self.pipeline) >= MAX_PIPELINED:  # uvicorn would queue all, even while it has paused reading
            raise BadRequest("Too many requests wait for a response on this connection.")
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self._unanswered.append(self.cycle)
            cast("dict[str, Any]", self.scope)[BODY_WRITER] = BodyWriter(self.transport, self.flow)
            self.headers = []  # uvicorn appends trailers to this list, which must no longer be the list in the scope
            return
        before = self.cycle
        try:
            self._check_upgrade()
        except BadRequest as error:
            self._refusal = error
            raise  # the parser passes the error to uvicorn, which calls send_400_response
        super().on_headers_complete()
        if self.cycle is not before:  # not a WebSocket, so uvicorn serves a plain request
            self._unanswered.append(self.cycle)
            self.cycle.keep_alive = False

    def _check_upgrade(self) -> None:
        if self._unanswered or self.flow.write_paused:  # the WebSocket would not know that it must wait for the client
            message = "A connection cannot be upgraded before its earlier responses are sent."
            raise BadRequest(message, code="invalid_upgrade")
        require_bodiless_get(self.parser.get_method().decode("ascii"), self.headers)

    @property
    def answered(self) -> dict[str, Any] | None:
        """The scope of the request whose response is being sent, or None if no response is being sent."""
        return dict(self._unanswered[0].scope) if self._unanswered and self._unanswered[0].response_started else None

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/http/httptools_impl.py#L206
    # uvicorn writes its text even into a response that has started, or before earlier responses (RFC 9112, 9.3.2).
    def send_400_response(self, msg: str) -> None:
        """Answer invalid data with a 400, and close the connection.

        No 400 is sent if an earlier request is unanswered or a response has started. The connection is then closed after the
        response, or immediately if the invalid data is in a body.
        """
        cycle = self.cycle
        is_unanswered = len(self._unanswered) == 1 and cycle.more_body and not cycle.response_started
        if not self._unanswered or is_unanswered:
            self._write_error(self._refusal or BadRequest(msg, code="invalid_http"))
            self.transport.close()
        elif cycle.more_body:
            self.transport.close()
        else:
            cycle.keep_alive = False

    def _write_error(self, error: APIError) -> None:
        """Write an error response that ends the connection, for a request that the application does not see."""
        body = orjson.dumps(error.body())
        fields = [
            *self.server_state.default_headers,
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % field for field in fields)
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[error.status], lines, body))


class WebSocketProtocol(CountedProtocol, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol with a limit on the incomplete messages of all connections together (see `Inbound`).

    If a large message exceeds the limit, its connection is closed with the code 1013. A connection is aborted if such a message
    takes more than `MESSAGE_TIMEOUT` seconds, or if the connection exceeds `MAX_FRAMES` or `MAX_QUEUED`.
    """

    inbound: ClassVar[Inbound]
    _overdue: asyncio.TimerHandle | None = None
    _size = _frames = 0
    """Bytes and frames received since the last message was read."""

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/websockets/websockets_sansio_impl.py#L407
    # uvicorn calls `app`, so the wrapper `_serve` must replace it.
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._served, self.app = self.app, self._serve

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        await self._served(scope, receive, send)
        if self.close_sent:  # after a complete refusal of the upgrade, uvicorn would log an error of the application
            self.handshake_complete = True  # as in https://github.com/Kludex/uvicorn/pull/3138

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/websockets/websockets_sansio_impl.py#L194
    # uvicorn limits each message, but not the sum of all incomplete messages.
    def data_received(self, data: bytes) -> None:
        try:
            self._size = self.inbound.resize(self._size, self._size + len(data))
        except Unavailable as error:
            self.conn.fail(TRY_AGAIN_LATER, error.message)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
        else:
            if self._overdue is None and self._size > UNCOUNTED:
                self._overdue = self.loop.call_later(MESSAGE_TIMEOUT, self.transport.abort)
            super().data_received(data)
            if self._frames > MAX_FRAMES or self.queue.qsize() > MAX_QUEUED:
                self.transport.abort()

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/websockets/websockets_sansio_impl.py#L201
    # uvicorn handles any number of frames per read, and the parser keeps their data.
    def handle_events(self) -> None:
        self._frames += len(self.conn.events)
        if self._frames <= MAX_FRAMES:
            events = self.conn.events
            super().handle_events()
            for event in events:
                if isinstance(event, Frame):
                    event.data = b""  # the parser keeps the last frame until the next one arrives

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/websockets/websockets_sansio_impl.py#L551
    # uvicorn passes messages on while earlier answers wait to be sent.
    async def receive(self) -> Any:
        # After a complete message, uvicorn stops reading until the application has received it.
        await self.writable.wait()  # an answer that waits to be sent would take memory that `unread` does not count
        message = await super().receive()
        self._clear()
        return message

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/websockets/websockets_sansio_impl.py#L141
    # uvicorn leaves the connection, the application and the parser in a reference cycle.
    def connection_lost(self, exc: Exception | None) -> None:
        self._clear()
        super().connection_lost(exc)
        # Otherwise, cycles keep the received data until the garbage collector runs.
        self.app = self._served
        self.conn.parser.close()

    def _clear(self) -> None:
        self._size = self.inbound.resize(self._size, 0)
        self._frames = 0
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/protocols/websockets/websockets_sansio_impl.py#L177
    # uvicorn closes each WebSocket at once, also in the middle of a response.
    def shutdown(self) -> None:
        """Do nothing, because the application closes the WebSocket when the last response has ended."""


def http_protocol(
    unread: Unread = CountedProtocol.unread, connections: Connections = CountedProtocol.open_connections
) -> type[HTTPProtocol]:
    """Return a subclass of `HTTPProtocol` whose connections share `unread` and `connections`."""
    return type("HTTPProtocol", (HTTPProtocol,), {"unread": unread, "open_connections": connections})


def websocket_protocol(
    inbound: Inbound, unread: Unread = CountedProtocol.unread, connections: Connections = CountedProtocol.open_connections
) -> type[WebSocketProtocol]:
    """Return a subclass of `WebSocketProtocol` whose connections share `inbound`, `unread` and `connections`."""
    members = {"inbound": inbound, "unread": unread, "open_connections": connections}
    return type("WebSocketProtocol", (WebSocketProtocol,), members)
