"""The routes of our paths, and the only place where an exception becomes a response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.requests import Request
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ..cache import Cache
from ..engine.prompt_templates import Prompts
from ..engine.run import Drain
from ..engine.runner import Runner
from ..errors import MethodNotAllowed, NotFound
from ..jobs import JobService
from ..settings import Settings
from ..state import State
from ..telemetry.context import annotate
from ..upstream import Upstream
from .access import SAFE_METHODS, Origins
from .conversations import ConversationRoutes
from .http_responses import ErrorResponse, EventResponse, error_response
from .openapi import Operation
from .requests import HOST_SCOPE, Reader, RequestParser
from .responses import ResponseRoutes
from .websocket import WebSockets

Endpoint = Callable[[Request], Awaitable[ASGIApp]]

_ONE = "/v1/conversations/{conversation_id}"

ROUTES: dict[str, dict[str, Operation]] = {
    "/v1/responses": {
        "POST": Operation(
            ResponseRoutes,
            ResponseRoutes.create,
            "Create a response.",
            "Response",
            body="CreateResponse",
            headers=("Idempotency-Key", "X-Responses-Cache"),
            streams=True,
        ),
        "GET": Operation(ResponseRoutes, ResponseRoutes.connect, "Open a WebSocket; 405 without an upgrade.", status=101),
    },
    "/v1/responses/compact": {
        "POST": Operation(ResponseRoutes, ResponseRoutes.compact, "Summarize a history.", "Compaction", body="CompactResponse")
    },
    "/v1/responses/input_tokens": {
        "POST": Operation(
            ResponseRoutes, ResponseRoutes.count_tokens, "Count the input tokens.", "InputTokens", body="CreateResponse"
        )
    },
    "/v1/responses/{response_id}": {
        "GET": Operation(
            ResponseRoutes,
            ResponseRoutes.retrieve,
            "Retrieve a stored response.",
            "Response",
            query=("include", "stream", "starting_after", "include_obfuscation"),
            streams=True,
        ),
        "DELETE": Operation(ResponseRoutes, ResponseRoutes.delete, "Delete a response; cancel it if it is running.", "Deleted"),
    },
    "/v1/responses/{response_id}/cancel": {
        "POST": Operation(ResponseRoutes, ResponseRoutes.cancel, "Cancel a background response.", "Response")
    },
    "/v1/responses/{response_id}/input_items": {
        "GET": Operation(
            ResponseRoutes,
            ResponseRoutes.input_items,
            "List the input items of a response.",
            "ItemList",
            query=("include", "after", "before", "limit", "order"),
        )
    },
    "/v1/conversations": {
        "POST": Operation(
            ConversationRoutes, ConversationRoutes.create, "Create a conversation.", "Conversation", body="CreateConversation"
        )
    },
    _ONE: {
        "GET": Operation(ConversationRoutes, ConversationRoutes.retrieve, "Retrieve a conversation.", "Conversation"),
        "POST": Operation(
            ConversationRoutes, ConversationRoutes.update, "Replace the metadata.", "Conversation", body="UpdateConversation"
        ),
        "DELETE": Operation(ConversationRoutes, ConversationRoutes.delete, "Delete a conversation and its items.", "Deleted"),
    },
    f"{_ONE}/items": {
        "POST": Operation(
            ConversationRoutes,
            ConversationRoutes.create_items,
            "Append items to a conversation.",
            "ItemList",
            query=("include",),
            body="CreateItems",
        ),
        "GET": Operation(
            ConversationRoutes,
            ConversationRoutes.items,
            "List the items of a conversation.",
            "ItemList",
            query=("include", "after", "limit", "order"),
        ),
    },
    f"{_ONE}/items/{{item_id}}": {
        "GET": Operation(ConversationRoutes, ConversationRoutes.item, "Retrieve an item.", "Item", query=("include",)),
        "DELETE": Operation(ConversationRoutes, ConversationRoutes.delete_item, "Delete an item.", "Conversation"),
    },
}
"""The operations of each path, by HTTP method. The router and the OpenAPI document are made from them."""


class Routes:
    """An ASGI application that serves all paths under `/v1/responses` and `/v1/conversations`.

    An unknown path gets a 404 in OpenAI's format, never the host's. `scope["responses_mw.path"]` is the path from `/v1` on.
    """

    def __init__(
        self,
        runner: Runner,
        upstream: Upstream,
        state: State | None,
        jobs: JobService | None,
        settings: Settings,
        cache: Cache | None = None,
    ) -> None:
        reader = Reader(settings.limits, settings.auth, settings.upstream.forward_headers)
        self._drain = runner.drain
        self._origins = origins = Origins(settings.server.cors_origins)
        refuses_unknown = settings.server.unknown_fields == "refuse"
        parser = RequestParser(Prompts(settings.server.prompts_dir), refuses_unknown=refuses_unknown)
        websockets = WebSockets(
            runner,
            upstream,
            state,
            reader,
            parser,
            origins,
            settings.server,
            settings.limits,
            settings.cache,
            storage_required=settings.state.required,
        )
        responses = ResponseRoutes(runner, upstream, state, jobs, reader, parser, settings.server, settings.cache, cache)
        conversations = ConversationRoutes(upstream, state, reader)
        owners: dict[type, object] = {ResponseRoutes: responses, ConversationRoutes: conversations}
        routes: list[BaseRoute] = [self._route(path, operations, owners) for path, operations in ROUTES.items()]
        routes.append(WebSocketRoute("/v1/responses", websockets))
        self._router = Router(routes, redirect_slashes=False, default=_unknown)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("root_path", "") + scope["responses_mw.path"]
        await self._router({**scope, "path": path, HOST_SCOPE: scope}, receive, send)

    def _route(self, path: str, operations: Mapping[str, Operation], owners: Mapping[type, object]) -> Route:
        """Return the route for `path`, with an endpoint for each method."""
        endpoints: dict[str, Endpoint] = {
            method: partial(one.endpoint, owners[one.owner]) for method, one in operations.items()
        }
        return Route(path, _Resource(path, endpoints, self._origins, self._drain))


class _Resource:
    """An ASGI application that serves one path."""

    def __init__(self, path: str, endpoints: dict[str, Endpoint], origins: Origins, drain: Drain) -> None:
        self._path = path
        self._endpoints = endpoints
        self._origins = origins
        self._drain = drain

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
            if self._drain.is_over and is_unanswered:
                await ErrorResponse(self._drain.error())(scope, receive, send)
            raise

    async def _respond(self, request: Request) -> ASGIApp:
        method = request.method
        if method not in SAFE_METHODS:
            self._origins.check(request.headers)
        endpoint = self._endpoints.get(method)
        if endpoint is None:
            message = f"Method {method} is not allowed for {request.scope['responses_mw.path']}."
            raise MethodNotAllowed(message, headers={"allow": ", ".join(sorted(self._endpoints))})
        annotate(route=self._path)
        return await endpoint(request)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        message = "This path does not accept WebSockets."
    else:
        message = f"Unknown request URL: {scope['method']} {scope['responses_mw.path']}."
    await ErrorResponse(NotFound(message, code="unknown_url"))(scope, receive, send)
