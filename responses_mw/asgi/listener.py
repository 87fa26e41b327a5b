"""The standalone server: uvicorn, with a drain, and with three gaps of its protocols closed.

- httptools skips the body of a request for an upgrade, and uvicorn goes on reading: a body that arrives in a later segment is
  parsed as another request, which no proxy in front has seen. Such a request is refused and its connection closed.
- uvicorn appends the trailers of a chunked body to the request's headers, where a proxy in front has not checked them. They are
  dropped (RFC 9110, section 6.5.1).
- uvicorn bounds the message that one WebSocket receives, but not the messages of all WebSockets together.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ..errors import BadRequest, Unavailable
from ..http import require_bodiless_get
from .inbound import Inbound

if TYPE_CHECKING:
    from .middleware import Dispatcher

logger = logging.getLogger(__name__)

__all__ = ["END_TIMEOUT", "DrainingServer", "HTTPProtocol", "websocket_protocol"]

END_TIMEOUT = 12.0
"""Seconds from the end of the drain until open connections are closed. Failed responses are stored and sent meanwhile, which
takes up to 10 s while Redis is away."""

_TRY_AGAIN_LATER = 1013


class DrainingServer(uvicorn.Server):
    """Give the requests in progress `drain_timeout` seconds at the end, then fail their responses.

    Proxied streams are cut then. uvicorn itself cancels requests, and logs errors, `config.timeout_graceful_shutdown` seconds
    after the signal; set it to `drain_timeout + END_TIMEOUT`. A second signal ends the drain, a third one the process.
    """

    def __init__(self, config: uvicorn.Config, app: Dispatcher, drain_timeout: float, on_start: Callable[[], None]) -> None:
        """`on_start` is called in the event loop when the server listens."""
        super().__init__(config)
        self._app = app
        self._drain_timeout = drain_timeout
        self._on_start = on_start
        self._hurry = asyncio.Event()

    @property
    def address(self) -> Any:
        """The address of the socket that listens."""
        return self.servers[0].sockets[0].getsockname()

    def stop(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's method would raise the signal again after the shutdown: the exit status would not be 0.
        if not self.should_exit:
            self.stop()
        elif not self._hurry.is_set():
            self._hurry.set()
        else:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if in_progress := self._in_progress():
            seconds = f"{self._drain_timeout:g} s"
            logger.info("stopping: waiting up to %s for %s; a second signal ends them now", seconds, in_progress)
        self._app.stop()
        draining = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        draining.cancel()

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout):
                await self._hurry.wait()
        if in_progress := self._in_progress():
            logger.warning("stopping now: %s did not end in time", in_progress)
        for connection in list(self.server_state.connections):
            answered = connection.answered if isinstance(connection, HTTPProtocol) else None
            if answered is not None and not self._app.serves(answered):
                connection.transport.abort()
        await self._app.fail_runs()

    def _in_progress(self) -> str:
        """Return what has not ended, in words; "" if there is nothing."""
        counts = {"requests": len(self.server_state.tasks), "background responses": self._app.running_jobs}
        return " and ".join(f"{count} {kind if count > 1 else kind[:-1]}" for kind, count in counts.items() if count)


class HTTPProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, restricted to upgrades to WebSocket by a GET without a body.

    An upgrade to another protocol is ignored, and the connection closed after the answer. A refused upgrade and invalid HTTP
    get a 400 in OpenAI's shape.
    """

    _refusal: BadRequest | None = None

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self.headers = []  # uvicorn appends trailers to this list, which would otherwise be the application's headers
            return
        before = self.cycle
        try:
            self._check_upgrade()
        except BadRequest as error:
            self._refusal = error
            raise  # the parser reports it as an error of the request
        super().on_headers_complete()
        if self.cycle is not before:  # the application gets it as a plain request
            self.cycle.keep_alive = False

    def _check_upgrade(self) -> None:
        method = self.parser.get_method().decode("ascii")
        if not self._is_idle():
            raise BadRequest(
                "A connection cannot be upgraded before its earlier requests are answered.", code="invalid_upgrade"
            )
        require_bodiless_get(method, self.headers)

    @property
    def answered(self) -> dict[str, Any] | None:
        """The scope of the request whose response has begun and not ended."""
        return None if self._is_idle() or not self.cycle.response_started else dict(self.cycle.scope)

    def send_400_response(self, msg: str) -> None:
        """Answer and close the connection, after the answers to earlier requests and never within one of them."""
        if self._is_idle() or self._is_first_and_unanswered():
            self.transport.write(self._answer_to(msg))
            self.transport.close()
        elif self.cycle.more_body:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def _is_idle(self) -> bool:
        """Whether no request is being answered or waits for its answer."""
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # at first it is None

    def _is_first_and_unanswered(self) -> bool:
        """Whether the error is in the body of the only request, and its answer has not started."""
        return self.cycle.more_body and not self.cycle.response_started and not self.pipeline

    def _answer_to(self, message: str) -> bytes:
        error = self._refusal or BadRequest(message, code="invalid_http")
        body = orjson.dumps(error.body())
        fields = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        return b"%b%b\r\n%b" % (STATUS_LINE[400], b"".join(b"%b: %b\r\n" % field for field in fields), body)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol, with the memory of incomplete messages bounded by `inbound`."""

    inbound: ClassVar[Inbound]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receiving = self.inbound.receiving()

    def data_received(self, data: bytes) -> None:
        try:
            self._receiving.add(len(data))
        except Unavailable as error:
            self.conn.fail(_TRY_AGAIN_LATER, error.message)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
        else:
            super().data_received(data)

    async def receive(self) -> Any:
        # uvicorn stops reading after a complete message until the application has received it.
        message = await super().receive()
        self._receiving.clear()
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        self._receiving.clear()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Leave it to the application to close the WebSocket, after its last response. uvicorn would close it at once."""
        if not self.handshake_complete:
            super().shutdown()


def websocket_protocol(inbound: Inbound) -> type[WebSocketProtocol]:
    return type("WebSocketProtocol", (WebSocketProtocol,), {"inbound": inbound})
