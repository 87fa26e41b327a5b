"""The protocols of the standalone server: uvicorn's, with what it leaves open closed.

HTTP/1.1: two ways to be misled about what a request is.

httptools hands no body to a request that asks for an upgrade, and uvicorn goes on reading: what comes in a later segment is
parsed as a request of its own, which no proxy in front has seen. Here such a request is refused, and its connection closed.

uvicorn puts the trailers of a chunked body among the request's headers, where no proxy in front has looked at them. Here they
are dropped, as RFC 9110 (section 6.5.1) demands of fields that nobody knows to be safe to merge.

WebSocket: uvicorn bounds the message that a connection receives, but not those of all connections together.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ..errors import BadRequest, Unavailable
from ..http import require_bodiless_get
from .inbound import Inbound

__all__ = ["HTTPProtocol", "websocket_protocol"]

_TRY_AGAIN_LATER = 1013


class HTTPProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, whose connections change to no other protocol but a WebSocket's.

    An upgrade must be a GET without a body. One to anything but a WebSocket is ignored, and the connection closed after the
    answer. What is refused, and what is not HTTP, gets a 400 in OpenAI's shape.
    """

    _refusal: BadRequest | None = None

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self.headers = []  # for trailers: uvicorn adds them to the list that the application has as its headers
            return
        before = self.cycle
        try:
            self._check_upgrade()
        except BadRequest as error:
            self._refusal = error
            raise  # the parser takes it for an error in the request
        super().on_headers_complete()
        if self.cycle is not before:  # it goes to the application as if it had not asked
            self.cycle.keep_alive = False

    def _check_upgrade(self) -> None:
        method = self.parser.get_method().decode("ascii")
        if not self._is_idle():
            raise BadRequest("A connection cannot be upgraded before the requests on it are answered.", code="invalid_upgrade")
        require_bodiless_get(method, self.headers)

    def send_400_response(self, msg: str) -> None:
        """Answer and close; but not within another answer, nor before the answers to the requests before this one."""
        if self._is_idle() or self._is_first_and_unanswered():
            self.transport.write(self._answer_to(msg))
            self.transport.close()
        elif self.cycle.more_body:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def _is_idle(self) -> bool:
        """Whether no request is being answered, nor waits to be."""
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # at first it is None

    def _is_first_and_unanswered(self) -> bool:
        """Whether the error is within the body of the only request there is, and nothing of its answer has been sent."""
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


def websocket_protocol(inbound: Inbound) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with the memory for messages that are not whole yet bounded by ``inbound``."""

    class WebSocketProtocol(WebSocketsSansIOProtocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._receiving = inbound.receiving()

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
            # uvicorn reads nothing after a whole message until the application has taken it.
            message = await super().receive()
            self._receiving.clear()
            return message

        def connection_lost(self, exc: Exception | None) -> None:
            self._receiving.clear()
            super().connection_lost(exc)

    return WebSocketProtocol
