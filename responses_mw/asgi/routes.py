"""Route requests to the endpoints, convert exceptions to responses, and serve the OpenAPI document.

The OpenAPI 3.1 document describes what this server checks: methods, parameters, the members of bodies, and errors. Of OpenAI's
objects, it describes only the members that identify their types. After changing the code, run `scripts/openapi` to update it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import orjson
from starlette.requests import Request
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import MethodNotAllowed, NotFound
from ..settings.groups import ServerSettings
from ..version import VERSION
from . import conversations, responses
from .http_responses import ErrorResponse, EventResponse, JSONResponse, error_response
from .requests import HOST_SCOPE, EndpointContext
from .websocket import WebSockets

Endpoint = Callable[[EndpointContext, Request], Awaitable[ASGIApp]]

_ONE = "/v1/conversations/{conversation_id}"

ROUTES: dict[str, dict[str, Endpoint]] = {
    "/v1/responses": {"POST": responses.create, "GET": responses.connect},
    "/v1/responses/compact": {"POST": responses.compact},
    "/v1/responses/input_tokens": {"POST": responses.count_tokens},
    "/v1/responses/{response_id}": {"GET": responses.retrieve, "DELETE": responses.delete},
    "/v1/responses/{response_id}/cancel": {"POST": responses.cancel},
    "/v1/responses/{response_id}/input_items": {"GET": responses.input_items},
    "/v1/conversations": {"POST": conversations.create},
    _ONE: {"GET": conversations.retrieve, "POST": conversations.update, "DELETE": conversations.delete},
    f"{_ONE}/items": {"POST": conversations.create_items, "GET": conversations.items},
    f"{_ONE}/items/{{item_id}}": {"GET": conversations.item, "DELETE": conversations.delete_item},
}
"""Maps each path to its HTTP methods and their endpoints."""

_PATTERNS = {compile_path(route)[0]: route for route in ROUTES}


def route_of(path: str) -> str:
    """Return the route in `ROUTES` that matches `path`, or "" if there is none."""
    return next((route for pattern, route in _PATTERNS.items() if pattern.match(path)), "")


class Routes:
    """An ASGI application that serves all paths under `/v1/responses` and `/v1/conversations`.

    `scope["responses_mw.path"]` must be the path from `/v1` on. An unknown path gets a 404 in OpenAI's format.
    """

    def __init__(self, context: EndpointContext) -> None:
        routes: list[BaseRoute] = [Route(path, _Resource(endpoints, context)) for path, endpoints in ROUTES.items()]
        routes.append(WebSocketRoute("/v1/responses", WebSockets(context)))
        self._router = Router(routes, redirect_slashes=False, default=_unknown)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("root_path", "") + scope["responses_mw.path"]
        await self._router({**scope, "path": path, HOST_SCOPE: scope}, receive, send)


@dataclass(frozen=True)
class _Resource:
    """The ASGI application of one path. It calls the endpoint for the HTTP method, and responds to exceptions with errors."""

    endpoints: Mapping[str, Endpoint]
    context: EndpointContext

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: ASGIApp | None = None
        try:
            try:
                response = await self._respond(Request(scope, receive))
            except Exception as error:  # noqa: BLE001 (error_response logs it)
                response = error_response(error)
            if response is not None:
                await response(scope, receive, send)
        except asyncio.CancelledError:
            is_unanswered = response is None or (isinstance(response, EventResponse) and not response.has_started)
            drain = self.context.runner.drain
            if drain.is_over and is_unanswered:
                await ErrorResponse(drain.error())(scope, receive, send)
            raise
        finally:
            await self.context.limits.end_stream(scope)

    async def _respond(self, request: Request) -> ASGIApp:
        method = request.method
        if method not in ("GET", "HEAD", "OPTIONS"):
            self.context.origins.check(request.headers)
        endpoint = self.endpoints.get(method)
        if endpoint is None:
            message = f"Method {method} is not allowed for {request.scope['responses_mw.path']}."
            raise MethodNotAllowed(message, headers={"allow": ", ".join(sorted(self.endpoints))})
        return await endpoint(self.context, request)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        message = "This path does not accept WebSockets."
    else:
        message = f"Unknown request URL: {scope['method']} {scope['responses_mw.path']}."
    await ErrorResponse(NotFound(message, code="unknown_url"))(scope, receive, send)


# -- the OpenAPI document ------------------------------------------------------------------------------------------


def describe(base_path: str = "", *, needs_key: bool = False, closed: bool = False) -> dict[str, Any]:
    """Return the OpenAPI document. `needs_key` requires credentials. `closed` forbids unknown members of `CreateResponse`."""
    document: dict[str, Any] = orjson.loads((files("responses_mw") / "asgi" / "openapi.json").read_bytes())
    document["info"]["version"] = VERSION
    document["servers"] = [{"url": base_path or "/"}]
    document["security"] = [{"key": []}] if needs_key else [{}, {"key": []}]  # the upstream may require no credential
    if closed:
        document["components"]["schemas"]["CreateResponse"]["additionalProperties"] = False
    return document


class DescriptionMiddleware:
    """ASGI middleware that serves the OpenAPI document at `/openapi.json` below the base path. `app` serves other requests."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, *, needs_key: bool) -> None:
        self._app = app
        self._path = settings.base_path + "/openapi.json"
        closed = settings.unknown_fields == "refuse"
        self._response = JSONResponse(describe(settings.base_path, needs_key=needs_key, closed=closed))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        is_ours = path == self._path and scope["method"] in ("GET", "HEAD")
        await (self._response if is_ours else self._app)(scope, receive, send)
