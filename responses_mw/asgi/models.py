"""The models of all upstreams, as `GET /v1/models` lists them (OpenAI reference, "Models").

The upstream itself answers if there is only one, with one endpoint and without aliases. An API key that is restricted to models
sees only these, and gets them from here.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..auth import ALLOWED_MODELS, API_KEY
from ..errors import APIError, NotFound
from ..upstream import Caller, Standing
from ..upstream.routing import Upstreams
from .http_responses import ErrorResponse, JSONResponse
from .proxy import OpenUpstreams
from .spellings import Paths

_PATHS = Paths("models")


class Models:
    """ASGI middleware that lists the models of all upstreams. `app` serves all other requests."""

    def __init__(self, app: ASGIApp, base_path: str, upstreams: OpenUpstreams) -> None:
        self._app = app
        self._base_path = base_path
        self._upstreams = upstreams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._app
        try:
            if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
                response = await self._respond(scope) or self._app
        except APIError as error:
            response = ErrorResponse(error)
        await response(scope, receive, send)

    async def _respond(self, scope: Scope) -> Response | None:
        """Return the response, or None if the upstream responds."""
        is_restricted = scope.get(ALLOWED_MODELS) is not None
        path: str = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")).removeprefix(self._base_path)
        if path in _PATHS:
            upstreams = await self._upstreams(scope)
            return await self._list(scope, path, upstreams) if is_restricted or upstreams.lists_models else None
        if is_restricted and _PATHS.has_other_spelling(path):
            raise NotFound("Unknown request URL. The models are at /v1/models.", code="unknown_url")
        return None

    async def _list(self, scope: Scope, path: str, upstreams: Upstreams) -> Response:
        credential = Headers(scope=scope).get("authorization")
        headers = {"authorization": credential} if credential is not None else {}
        caller = Caller("", headers, scope, Standing(API_KEY in scope, API_KEY in scope))
        await upstreams.verify(caller)
        allowed = scope.get(ALLOWED_MODELS)
        cards: list[dict[str, Any]] = [
            card for card in await upstreams.cards(caller) if allowed is None or card["id"] in allowed
        ]
        name = unquote(path.removeprefix("/v1/models").removeprefix("/"))
        if not name:
            return JSONResponse({"object": "list", "data": cards})
        card = next((card for card in cards if card["id"] == name), None)
        if card is None:
            raise NotFound(f"The model '{name[:256]}' does not exist.", param="model", code="model_not_found")
        return JSONResponse(card)
