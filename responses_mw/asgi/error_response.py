"""Responses to failed requests, in OpenAI's format."""

from __future__ import annotations

import logging

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from ..errors import APIError
from ..telemetry.context import annotate
from .json import JSONResponse
from .telemetry import TelemetryMiddleware

__all__ = ["ErrorResponse", "error_response"]

logger = logging.getLogger(__name__)

_DENIAL = "websocket.http.response"
_TRY_AGAIN_LATER = 1013


class ErrorResponse(JSONResponse):
    """Answer an HTTP request with an error, or refuse a WebSocket that has not been accepted.

    A refusal is observed like an HTTP request. A server without the ASGI extension for refusals with a body closes the
    WebSocket, and the client gets a 403.
    """

    def __init__(self, error: APIError, cause: Exception | None = None) -> None:
        """`cause` is the original exception, if the client must not see it."""
        super().__init__(error.body(), error.status, error.headers)
        self._cause = cause or error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            refusal = _Refusal(scope, send)
            await TelemetryMiddleware(self)({**scope, "type": "http", "method": "GET"}, receive, refusal.send)
            return
        annotate(error=self._cause)
        await super().__call__(scope, receive, send)


class _Refusal:
    """Sends an HTTP response in place of a WebSocket."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._has_body = _DENIAL in scope.get("extensions", {})
        self._send = send

    async def send(self, message: Message) -> None:
        if self._has_body:
            await self._send({**message, "type": f"websocket.{message['type']}"})
        elif message["type"] == "http.response.start":
            await self._send({"type": "websocket.close", "code": _TRY_AGAIN_LATER})


def error_response(error: Exception) -> ErrorResponse | None:
    """Return the response to a request that failed with `error`, or None if the client has disconnected."""
    if isinstance(error, APIError):
        return ErrorResponse(error)
    if isinstance(error, ClientDisconnect):
        return None
    logger.error("a request failed", exc_info=error)
    return ErrorResponse(APIError("The server had an error while processing your request."), error)
