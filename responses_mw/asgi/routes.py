"""Route requests to the endpoints, convert exceptions to responses, and serve the OpenAPI document.

The OpenAPI 3.1 document describes what this server checks: methods, parameters, the members of bodies, and errors. Of OpenAI's
objects, it describes only the members that identify their types. After changing the code, run `scripts/openapi` to update it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files as package_files
from typing import Any

import orjson
from starlette.requests import Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import MethodNotAllowed, NotFound
from ..settings.groups import ServerSettings
from ..version import VERSION
from . import conversations, responses, vector_stores
from . import files as file_endpoints
from .http_responses import ErrorResponse, EventResponse, JSONResponse, error_response
from .requests import EndpointContext
from .telemetry import ROUTE_SCOPE
from .websocket import WebSockets

Endpoint = Callable[[EndpointContext, Request], Awaitable[ASGIApp]]

_ONE = "/v1/conversations/{conversation_id}"
_STORE = "/v1/vector_stores/{vector_store_id}"

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
    "/v1/files": {"POST": file_endpoints.create, "GET": file_endpoints.list_files},
    "/v1/files/{file_id}": {"GET": file_endpoints.retrieve, "DELETE": file_endpoints.delete},
    "/v1/files/{file_id}/content": {"GET": file_endpoints.content},
    "/v1/uploads": {"POST": file_endpoints.refuse_upload},
    "/v1/uploads/{upload_id}/{action}": {"POST": file_endpoints.refuse_part},
    "/v1/vector_stores": {"POST": vector_stores.create, "GET": vector_stores.list_stores},
    _STORE: {"GET": vector_stores.retrieve, "POST": vector_stores.update, "DELETE": vector_stores.delete},
    f"{_STORE}/search": {"POST": vector_stores.search},
    f"{_STORE}/files": {"POST": vector_stores.add_file, "GET": vector_stores.list_files},
    f"{_STORE}/files/{{file_id}}": {
        "GET": vector_stores.retrieve_file,
        "POST": vector_stores.update_file,
        "DELETE": vector_stores.delete_file,
    },
    f"{_STORE}/files/{{file_id}}/content": {"GET": vector_stores.file_content},
    f"{_STORE}/file_batches": {"POST": vector_stores.add_batch},
    f"{_STORE}/file_batches/{{batch_id}}": {"GET": vector_stores.retrieve_batch},
    f"{_STORE}/file_batches/{{batch_id}}/cancel": {"POST": vector_stores.cancel_batch},
    f"{_STORE}/file_batches/{{batch_id}}/files": {"GET": vector_stores.list_batch_files},
}
"""Maps each path to its HTTP methods and their endpoints."""

_FILE_PATHS = frozenset(path for path in ROUTES if path.startswith(("/v1/files", "/v1/uploads", "/v1/vector_stores")))
_PATTERNS = {compile_path(route)[0]: route for route in ROUTES}


def match(path: str) -> tuple[str, dict[str, str]]:
    """Return the route in `ROUTES` that matches `path`, and the parameters in the path. Without a match, return "" and {}."""
    for pattern, route in _PATTERNS.items():
        if found := pattern.match(path):
            return route, found.groupdict()
    return "", {}


class Routes:
    """An ASGI application that calls the endpoint of each request, and responds to exceptions with errors.

    `Dispatcher` has stored the path from `/v1` on, the route and the path parameters in the scope. An unknown path gets a 404.
    """

    def __init__(self, context: EndpointContext) -> None:
        self._context = context
        self._websockets = WebSockets(context)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: ASGIApp | None = None
        try:
            try:
                response = await self._respond(scope, receive)
                await response(scope, receive, send)
            except Exception as error:
                if _has_started(response):
                    raise  # the server closes the connection, so that the client sees an incomplete response
                response = error_response(error)
                if response is not None:
                    await response(scope, receive, send)
        except asyncio.CancelledError:
            drain = self._context.runner.drain
            if drain.is_over and not _has_started(response):
                await ErrorResponse(drain.error())(scope, receive, send)
            raise
        finally:
            await self._context.limits.end_stream(scope)

    async def _respond(self, scope: Scope, receive: Receive) -> ASGIApp:
        route, path = scope[ROUTE_SCOPE], scope["responses_mw.path"]
        if scope["type"] == "websocket" and route == "/v1/responses":
            return self._websockets
        if scope["type"] == "websocket":
            raise NotFound("This path does not accept WebSockets.", code="unknown_url")
        request, method = Request(scope, receive), scope["method"]
        if not route:
            raise NotFound(f"Unknown request URL: {method} {path}.", code="unknown_url")
        if method not in ("GET", "HEAD", "OPTIONS"):
            self._context.origins.check(request.headers)
        return await _endpoint(ROUTES[route], method, path)(self._context, request)


def _endpoint(endpoints: dict[str, Endpoint], method: str, path: str) -> Endpoint:
    if method not in endpoints:
        allowed = ", ".join(sorted(endpoints))
        raise MethodNotAllowed(f"Method {method} is not allowed for {path}.", headers={"allow": allowed})
    return endpoints[method]


def _has_started(response: ASGIApp | None) -> bool:
    """Return whether `response` may have been sent, so that an error response can no longer replace it."""
    return response.has_started if isinstance(response, EventResponse) else response is not None


# -- the OpenAPI document ------------------------------------------------------------------------------------------


def describe(base_path: str = "", *, needs_key: bool = False, closed: bool = False, files: bool = True) -> dict[str, Any]:
    """Return the OpenAPI document.

    `needs_key` requires credentials. `closed` forbids unknown members of `CreateResponse`. `files` includes the paths of files
    and vector stores.
    """
    document: dict[str, Any] = orjson.loads((package_files("responses_mw") / "asgi" / "openapi.json").read_bytes())
    document["info"]["version"] = VERSION
    document["servers"] = [{"url": base_path or "/"}]
    document["security"] = [{"key": []}] if needs_key else [{}, {"key": []}]  # the upstream may require no credential
    if not files:
        document["paths"] = {path: one for path, one in document["paths"].items() if path not in _FILE_PATHS}
    if closed:
        document["components"]["schemas"]["CreateResponse"]["additionalProperties"] = False
    return document


class DescriptionMiddleware:
    """ASGI middleware that serves the OpenAPI document at `/openapi.json` below the base path. `app` serves other requests."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, *, needs_key: bool, files: bool = True) -> None:
        self._app = app
        self._path = settings.base_path + "/openapi.json"
        closed = settings.unknown_fields == "refuse"
        self._response = JSONResponse(describe(settings.base_path, needs_key=needs_key, closed=closed, files=files))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        paths = (self._path, scope.get("root_path", "") + self._path)  # some hosts include `root_path` in the path
        is_ours = scope["type"] == "http" and scope["path"] in paths and scope["method"] in ("GET", "HEAD")
        await (self._response if is_ours else self._app)(scope, receive, send)
