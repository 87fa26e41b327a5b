"""The standalone server: uvicorn with a graceful shutdown, and with fixes for weaknesses of its protocol classes.

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
- uvicorn limits the size of each WebSocket message. This server also limits the total size of all incomplete messages.
- uvicorn logs an error for each refused WebSocket upgrade. This server does not.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar, cast

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from ..errors import BadRequest, Unavailable
from ..http import require_bodiless_get
from ..telemetry.context import WarningLimit
from ..telemetry.metrics import LIMITS_REFUSED
from .http_responses import BODY_WRITER, TRY_AGAIN_LATER, BodyWriter
from .middleware import Dispatcher
from .requests import MESSAGE_TIMEOUT, UNCOUNTED, Inbound

logger = logging.getLogger(__name__)

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
MAX_STREAM_BUFFER = 320 * 1024
"""Maximum number of unread bytes of a connection that `Unread` does not count.

A slow stream has no more: 64 KiB, at which uvicorn waits for the client, and one read of the upstream's connection, which has
at most 256,000 bytes.
"""
END_TIMEOUT = 12.0
"""Seconds after the drain timeout to store and send failed responses. With the default `redis.timeout`, storing is retried for
up to 10 s while Redis is unavailable."""


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets requests in progress finish before it exits.

    After the first signal, requests have `drain_timeout` seconds to finish. Then the remaining responses fail, and the
    connections of proxied responses are closed. A second signal skips the wait. A third signal kills the process.

    uvicorn cancels requests after `config.timeout_graceful_shutdown` seconds. Set it to `drain_timeout + END_TIMEOUT`.
    """

    def __init__(self, config: uvicorn.Config, app: Dispatcher, drain_timeout: float, on_start: Callable[[], None]) -> None:
        """`on_start` is called in the event loop when the server is listening."""
        super().__init__(config)
        self._app = app
        self._drain_timeout = drain_timeout
        self._on_start = on_start
        self._hurry = asyncio.Event()
        app.is_listening = False

    @property
    def address(self) -> Any:
        """The address of the listening socket, as returned by `getsockname`."""
        return self.servers[0].sockets[0].getsockname()

    def stop(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's method would raise the signal again after the shutdown, so the exit status would not be 0.
        if not self.should_exit:
            self.stop()
        elif not self._hurry.is_set():
            self._hurry.set()
        else:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._app.is_listening = True
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if in_progress := self._in_progress():
            seconds = f"{self._drain_timeout:g} s"
            logger.info("stopping: waiting up to %s for %s; a second signal stops them now", seconds, in_progress)
        self._app.stop()
        draining = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        draining.cancel()

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout):
                await self._hurry.wait()
        if in_progress := self._in_progress():
            logger.warning("stopping now: %s did not finish in time", in_progress)
        for connection in list(self.server_state.connections):
            scope = connection.answered if isinstance(connection, HTTPProtocol) else None
            if scope is not None and self._app.our_path(scope) is None:
                connection.transport.abort()
        await self._app.fail_runs()

    def _in_progress(self) -> str:
        """Return the numbers of unfinished requests and background responses as text, or "" if there are none."""
        counts = {"requests": len(self.server_state.tasks), "background responses": self._app.running_jobs}
        return " and ".join(f"{count} {kind if count > 1 else kind[:-1]}" for kind, count in counts.items() if count)


class Unread:
    """The large responses and messages that clients have not read yet. Their total is limited to `maximum` bytes.

    If a new one exceeds the total, the connections that have waited longest are aborted. A single connection may exceed it.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._waiting: dict[asyncio.Transport, None] = {}  # an ordered set
        self._warnings = WarningLimit()

    def add(self, transport: asyncio.Transport) -> None:
        """Count the data that `transport` has buffered, unless it is as little as for any slow stream."""
        if transport.get_write_buffer_size() > MAX_STREAM_BUFFER:
            self._waiting[transport] = None
            while len(self._waiting) > 1 and sum(one.get_write_buffer_size() for one in self._waiting) > self._maximum:
                self._abort(next(iter(self._waiting)))

    def remove(self, transport: asyncio.Transport) -> None:
        self._waiting.pop(transport, None)

    def _abort(self, transport: asyncio.Transport) -> None:
        self.remove(transport)
        LIMITS_REFUSED.add(1, {"limit": "memory"})
        level = logging.WARNING if self._warnings.is_due() else logging.DEBUG
        reason = f"the data that clients have not read exceeds limits.memory_bytes ({self._maximum})"
        client, size = transport.get_extra_info("peername"), transport.get_write_buffer_size()
        logger.log(level, "closing the connection of %s, which has not read %d bytes: %s", client, size, reason)
        transport.abort()


class _Buffering(asyncio.Protocol):
    """A protocol that counts what its client has not read yet."""

    unread: ClassVar = Unread(256 * 1024**2)
    transport: asyncio.Transport

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread.add(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread.remove(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.unread.remove(self.transport)
        super().connection_lost(exc)


class HTTPProtocol(_Buffering, HttpToolsProtocol):
    """uvicorn's httptools protocol with checks of upgrade requests, and with limits on heads, trailers and pipelined requests.

    An upgrade request must be a GET without a body. An upgrade to a protocol other than WebSocket is served as a plain request,
    and the connection is closed after the response. Invalid requests are refused with a 400 in OpenAI's format.
    """

    _refusal: BadRequest | None = None
    _head_size = 0
    """Bytes received since the last complete head or piece of a body."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._served, self.app = self.app, self._serve
        self._unanswered: deque[RequestResponseCycle] = deque()
        """The requests whose responses have not ended, in the order of the responses."""

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if self.flow.write_paused:
            # A response that waits to be sent would take memory that `unread` does not count.
            await self.flow.drain()
            if self.transport.is_closing():
                return
        await self._served(scope, receive, send)

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:  # uvicorn tells only the last one
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self.app = self._served  # otherwise, a cycle keeps the protocol until the garbage collector runs

    def data_received(self, data: bytes) -> None:
        self._head_size += len(data)
        super().data_received(data)
        if self._head_size > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The headers of the request have more than {MAX_HEAD} bytes.")
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._head_size = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._head_size = 0
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

    def send_400_response(self, msg: str) -> None:
        """Answer invalid data with a 400, and close the connection.

        No 400 is sent if an earlier request is unanswered or a response has started. The connection is then closed after the
        response, or immediately if the invalid data is in a body.
        """
        cycle = self.cycle
        is_unanswered = len(self._unanswered) == 1 and cycle.more_body and not cycle.response_started
        if not self._unanswered or is_unanswered:
            body = orjson.dumps((self._refusal or BadRequest(msg, code="invalid_http")).body())
            fields = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            lines = b"".join(b"%b: %b\r\n" % field for field in fields)
            self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[400], lines, body))
            self.transport.close()
        elif cycle.more_body:
            self.transport.close()
        else:
            cycle.keep_alive = False


class WebSocketProtocol(_Buffering, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol with a limit on the incomplete messages of all connections together (see `Inbound`).

    If a large message exceeds the limit, its connection is closed with the code 1013. A connection is aborted if such a message
    takes more than `MESSAGE_TIMEOUT` seconds, or if the connection exceeds `MAX_FRAMES` or `MAX_QUEUED`.
    """

    inbound: ClassVar[Inbound]
    _overdue: asyncio.TimerHandle | None = None
    _size = _frames = 0
    """Bytes and frames received since the last message was read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._served, self.app = self.app, self._serve

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        await self._served(scope, receive, send)
        if self.close_sent:  # after a complete refusal of the upgrade, uvicorn would log an error of the application
            self.handshake_complete = True  # as in https://github.com/Kludex/uvicorn/pull/3138

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

    def handle_events(self) -> None:
        self._frames += len(self.conn.events)
        if self._frames <= MAX_FRAMES:
            events = self.conn.events
            super().handle_events()
            for event in events:
                if isinstance(event, Frame):
                    event.data = b""  # the parser keeps the last frame until the next one arrives

    async def receive(self) -> Any:
        # After a complete message, uvicorn stops reading until the application has received it.
        await self.writable.wait()  # an answer that waits to be sent would take memory that `unread` does not count
        message = await super().receive()
        self._clear()
        return message

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

    def shutdown(self) -> None:
        """Do nothing, because the application closes the WebSocket when the last response has ended."""


def http_protocol(unread: Unread) -> type[HTTPProtocol]:
    """Return a subclass of `HTTPProtocol` whose connections share `unread`."""
    return type("HTTPProtocol", (HTTPProtocol,), {"unread": unread})


def websocket_protocol(inbound: Inbound, unread: Unread = _Buffering.unread) -> type[WebSocketProtocol]:
    """Return a subclass of `WebSocketProtocol` whose connections share `inbound` and `unread`."""
    return type("WebSocketProtocol", (WebSocketProtocol,), {"inbound": inbound, "unread": unread})
