"""JSON responses, errors in OpenAI's shape, and headers that every response to a request carries."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson
from starlette import responses
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..errors import APIError
from ..telemetry import annotate

__all__ = ["ErrorResponse", "JSONResponse", "add_headers", "collect_headers", "error_response"]

logger = logging.getLogger(__name__)

_HEADERS = "responses_mw.headers"
_DENIAL = "websocket.http.response"
_TRY_AGAIN_LATER = 1013


class JSONResponse(responses.JSONResponse):
    """Starlette's response, encoded by orjson."""

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class ErrorResponse(JSONResponse):
    """Answer with an error, or refuse a WebSocket that has not been accepted.

    A server without the extension for refusals with a body closes the WebSocket, which its client sees as a 403.
    """

    def __init__(self, error: APIError, cause: Exception | None = None) -> None:
        """`cause` is what has failed, if that is not for the client to see."""
        super().__init__(error.body(), error.status, error.headers)
        self._cause = cause or error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        annotate(error=self._cause)
        if scope["type"] == "websocket":
            await receive()
            if _DENIAL not in scope.get("extensions", {}):
                await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER})
                return
        await super().__call__(scope, receive, send)


def error_response(error: Exception) -> ErrorResponse | None:
    """Return the response to a request that failed with `error`, or None if the client has left."""
    if isinstance(error, APIError):
        return ErrorResponse(error)
    if isinstance(error, ClientDisconnect):
        return None
    logger.error("a request failed", exc_info=error)
    return ErrorResponse(APIError("The server had an error while processing your request."), error)


def collect_headers(scope: Scope, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return a list of `headers`, to which `add_headers` appends until the response starts."""
    scope[_HEADERS] = collected = _encoded(headers)
    return collected


def add_headers(scope: Scope, headers: Mapping[str, str]) -> None:
    """Add headers to the response to the request with this ASGI `scope`, whether it succeeds or fails."""
    scope[_HEADERS] += _encoded(headers)


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
