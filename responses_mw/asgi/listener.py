"""The standalone server: uvicorn with a graceful shutdown, and with fixes for three weaknesses of its protocol classes.

- httptools skips the body of an upgrade request. If the body arrives in a later segment, uvicorn parses the body as another
  request, which no proxy in front of the server has checked. This server refuses an upgrade request with a body and closes its
  connection.
- uvicorn appends the trailers of a chunked body to the request's headers, although no proxy has checked them as headers. This
  server discards trailers (RFC 9110, section 6.5.1).
- uvicorn limits the size of each WebSocket message, but not the total size of the messages of all WebSockets. This server also
  limits the total.
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
from .requests import Inbound, Receiving

if TYPE_CHECKING:
    from .middleware import Dispatcher

logger = logging.getLogger(__name__)

END_TIMEOUT = 12.0
"""Number of seconds from the end of the drain until open connections are closed.

During this time, failed responses are stored and sent. Storing them takes up to 10 s if Redis is unavailable.
"""

_TRY_AGAIN_LATER = 1013


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains before it exits.

    After the first signal, requests in progress have `drain_timeout` seconds to finish. Then the remaining responses fail, and
    proxied streams are closed. A second signal ends the drain immediately. A third signal ends the process.

    uvicorn itself cancels requests and logs errors `config.timeout_graceful_shutdown` seconds after the first signal. Set this
    option to `drain_timeout + END_TIMEOUT`.
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
        # uvicorn's own method raises the signal again after the shutdown, so the exit status would not be 0.
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
        """Return the numbers of unfinished requests and background responses as text, or "" if there are none."""
        counts = {"requests": len(self.server_state.tasks), "background responses": self._app.running_jobs}
        return " and ".join(f"{count} {kind if count > 1 else kind[:-1]}" for kind, count in counts.items() if count)


class HTTPProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol with checks of upgrade requests.

    An upgrade request must be a GET without a body. An upgrade to a protocol other than WebSocket is ignored, and the
    connection is closed after the response. Invalid upgrade requests and invalid HTTP get a 400 in OpenAI's format.
    """

    _refusal: BadRequest | None = None

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self.headers = []  # uvicorn appends trailers to this list, which must no longer be the list in the scope
            return
        before = self.cycle
        try:
            self._check_upgrade()
        except BadRequest as error:
            self._refusal = error
            raise  # the parser passes the error to uvicorn, which calls send_400_response
        super().on_headers_complete()
        if self.cycle is not before:  # not a WebSocket, so the request is passed to the application as a plain request
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
        """The scope of the request whose response has started but not ended, or None if there is no such request."""
        return None if self._is_idle() or not self.cycle.response_started else dict(self.cycle.scope)

    def send_400_response(self, msg: str) -> None:
        """Send a 400 and close the connection.

        If the response to an earlier request has not ended, no 400 is sent. The connection is then closed after that response,
        or immediately if the body of the earlier request is incomplete.
        """
        if self._is_idle() or self._is_first_and_unanswered():
            self.transport.write(self._answer_to(msg))
            self.transport.close()
        elif self.cycle.more_body:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def _is_idle(self) -> bool:
        """Return whether the responses to all requests on the connection have ended."""
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # at first it is None

    def _is_first_and_unanswered(self) -> bool:
        """Return whether the body of the only request is incomplete and its response has not started."""
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
    """uvicorn's WebSocket protocol with a limit on the total size of incomplete messages.

    `inbound` is shared by all connections.
    """

    inbound: ClassVar[Inbound]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receiving = Receiving(self.inbound)

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
        # After a complete message, uvicorn stops reading until the application has received it.
        message = await super().receive()
        self._receiving.clear()
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        self._receiving.clear()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection only if its handshake is incomplete.

        Otherwise the application closes the WebSocket after its last response. uvicorn's own method closes it immediately.
        """
        if not self.handshake_complete:
            super().shutdown()


def websocket_protocol(inbound: Inbound) -> type[WebSocketProtocol]:
    """Return a subclass of `WebSocketProtocol` whose connections share `inbound`."""
    return type("WebSocketProtocol", (WebSocketProtocol,), {"inbound": inbound})
