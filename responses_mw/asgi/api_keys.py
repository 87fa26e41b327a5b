"""Middleware that admits requests with one of our API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from ..auth import API_KEY
from ..errors import Unauthorized
from .json import ErrorResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from ..auth import APIKeys

_REFUSAL = ErrorResponse(
    Unauthorized(
        "Incorrect API key provided, or none: use 'Authorization: Bearer KEY'.", headers={"www-authenticate": "Bearer"}
    )
)


class APIKeyMiddleware:
    """Pass requests that carry one of our API keys to `app`, and refuse all others.

    The key goes no further: the upstream gets the operator's `upstream.api_key`, or none.
    """

    def __init__(self, app: ASGIApp, keys: APIKeys, *, upstream_key: str | None = None) -> None:
        """`upstream_key` replaces the key in the headers, for an `app` that passes them on unchanged."""
        self._app = app
        self._keys = keys
        self._instead = [(b"authorization", f"Bearer {upstream_key}".encode("latin-1"))] if upstream_key else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        name = self._keys.name(Headers(scope=scope).get("authorization", ""))
        if name is None:
            await _REFUSAL(scope, receive, send)
            return
        others = [(key, value) for key, value in scope["headers"] if key.lower() != b"authorization"]
        scope["headers"] = [*others, *self._instead]
        scope[API_KEY] = name
        await self._app(scope, receive, send)
