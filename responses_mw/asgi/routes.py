"""The routes of the Responses API, the conversion of exceptions to responses, and the OpenAPI document.

The router and the OpenAPI 3.1 document are made from the same table. The document describes what this server checks: methods,
parameters, the members of bodies, and errors. Of OpenAI's objects, it describes only the members that identify their types.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ..cache import Cache
from ..engine.run import Drain
from ..engine.runner import Runner
from ..errors import MethodNotAllowed, NotFound
from ..jobs import JobService
from ..protocol.request.create import INCLUDABLE, METADATA, create_schema
from ..protocol.response.compaction import COMPACT_MEMBERS
from ..settings import ServerSettings, Settings
from ..state import State
from ..telemetry.context import annotate
from ..upstream import Upstream
from ..version import VERSION
from .access import Origins, RateLimits
from .conversations import MAX_NEW_ITEMS, ConversationRoutes
from .http_responses import ErrorResponse, EventResponse, JSONResponse, error_response
from .requests import DEFAULT_LIMIT, HOST_SCOPE, MAX_LIMIT, Reader
from .responses import ResponseRoutes
from .websocket import WebSockets


@dataclass(frozen=True, slots=True)
class Operation:
    """An HTTP method of a path: its endpoint, its input and its output.

    `answer` and `body` are the schema names of the response and the request body. `query` and `headers` are parameter names.
    `streams` is true if the response may be a stream of events.
    """

    endpoint: Callable[..., Any]
    summary: str
    answer: str | None = None
    status: int = 200
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    body: str | None = None
    streams: bool = False


_ONE = "/v1/conversations/{conversation_id}"

_RESPONSES = {
    "/v1/responses": {
        "POST": Operation(
            ResponseRoutes.create,
            "Create a response.",
            "Response",
            body="CreateResponse",
            headers=("Idempotency-Key", "X-Responses-Cache"),
            streams=True,
        ),
        "GET": Operation(ResponseRoutes.connect, "Open a WebSocket; 405 without an upgrade.", status=101),
    },
    "/v1/responses/compact": {
        "POST": Operation(ResponseRoutes.compact, "Summarize a history.", "Compaction", body="CompactResponse")
    },
    "/v1/responses/input_tokens": {
        "POST": Operation(ResponseRoutes.count_tokens, "Count the input tokens.", "InputTokens", body="CreateResponse")
    },
    "/v1/responses/{response_id}": {
        "GET": Operation(
            ResponseRoutes.retrieve,
            "Retrieve a stored response.",
            "Response",
            query=("include", "stream", "starting_after", "include_obfuscation"),
            streams=True,
        ),
        "DELETE": Operation(ResponseRoutes.delete, "Delete a response; cancel it if it is running.", "Deleted"),
    },
    "/v1/responses/{response_id}/cancel": {
        "POST": Operation(ResponseRoutes.cancel, "Cancel a background response.", "Response")
    },
    "/v1/responses/{response_id}/input_items": {
        "GET": Operation(
            ResponseRoutes.input_items,
            "List the input items of a response.",
            "ItemList",
            query=("include", "after", "before", "limit", "order"),
        )
    },
}
_CONVERSATIONS = {
    "/v1/conversations": {
        "POST": Operation(ConversationRoutes.create, "Create a conversation.", "Conversation", body="CreateConversation")
    },
    _ONE: {
        "GET": Operation(ConversationRoutes.retrieve, "Retrieve a conversation.", "Conversation"),
        "POST": Operation(ConversationRoutes.update, "Replace the metadata.", "Conversation", body="UpdateConversation"),
        "DELETE": Operation(ConversationRoutes.delete, "Delete a conversation and its items.", "Deleted"),
    },
    f"{_ONE}/items": {
        "POST": Operation(
            ConversationRoutes.create_items,
            "Append items to a conversation.",
            "ItemList",
            query=("include",),
            body="CreateItems",
        ),
        "GET": Operation(
            ConversationRoutes.items,
            "List the items of a conversation.",
            "ItemList",
            query=("include", "after", "limit", "order"),
        ),
    },
    f"{_ONE}/items/{{item_id}}": {
        "GET": Operation(ConversationRoutes.item, "Retrieve an item.", "Item", query=("include",)),
        "DELETE": Operation(ConversationRoutes.delete_item, "Delete an item.", "Conversation"),
    },
}
ROUTES: dict[str, dict[str, Operation]] = {**_RESPONSES, **_CONVERSATIONS}
"""Maps each path to its HTTP methods and their operations."""


class Routes:
    """An ASGI application that serves all paths under `/v1/responses` and `/v1/conversations`.

    `scope["responses_mw.path"]` must be the path from `/v1` on. An unknown path gets a 404 in OpenAI's format.
    """

    def __init__(
        self,
        runner: Runner,
        upstream: Upstream,
        state: State | None,
        jobs: JobService | None,
        settings: Settings,
        cache: Cache | None,
        limits: RateLimits,
    ) -> None:
        server, caching = settings.server, settings.cache
        reader = Reader(settings.limits, settings.auth, server, settings.upstream.forward_headers)
        origins = Origins(server.cors_origins)
        websockets = WebSockets(
            runner, upstream, state, reader, origins, limits, server, settings.limits, caching, settings.state.required
        )
        responses = ResponseRoutes(runner, upstream, state, jobs, reader, limits, server, caching, cache)
        conversations = ConversationRoutes(upstream, state, reader)
        routes: list[BaseRoute] = []
        for owner, operations in ((responses, _RESPONSES), (conversations, _CONVERSATIONS)):
            for path, methods in operations.items():
                endpoints = {method: partial(one.endpoint, owner) for method, one in methods.items()}
                routes.append(Route(path, _Resource(path, endpoints, origins, limits, runner.drain)))
        routes.append(WebSocketRoute("/v1/responses", websockets))
        self._router = Router(routes, redirect_slashes=False, default=_unknown)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("root_path", "") + scope["responses_mw.path"]
        await self._router({**scope, "path": path, HOST_SCOPE: scope}, receive, send)


@dataclass(frozen=True)
class _Resource:
    """One path. `endpoints` maps HTTP methods to endpoints, whose exceptions are converted to error responses."""

    path: str
    endpoints: Mapping[str, Callable[[Request], Awaitable[ASGIApp]]]
    origins: Origins
    limits: RateLimits
    drain: Drain

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
            if self.drain.is_over and is_unanswered:
                await ErrorResponse(self.drain.error())(scope, receive, send)
            raise
        finally:
            await self.limits.end_stream(scope)

    async def _respond(self, request: Request) -> ASGIApp:
        method = request.method
        if method not in ("GET", "HEAD", "OPTIONS"):
            self.origins.check(request.headers)
        endpoint = self.endpoints.get(method)
        if endpoint is None:
            message = f"Method {method} is not allowed for {request.scope['responses_mw.path']}."
            raise MethodNotAllowed(message, headers={"allow": ", ".join(sorted(self.endpoints))})
        annotate(route=self.path)
        return await endpoint(request)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        message = "This path does not accept WebSockets."
    else:
        message = f"Unknown request URL: {scope['method']} {scope['responses_mw.path']}."
    await ErrorResponse(NotFound(message, code="unknown_url"))(scope, receive, send)


# -- the OpenAPI document ------------------------------------------------------------------------------------------

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}
_INTEGER: Schema = {"type": "integer"}
_FLAG: Schema = {"type": "boolean", "default": False}
_ITEMS: Schema = {"type": "array", "items": {"type": "object"}}
_NEW_ITEMS: Schema = {**_ITEMS, "maxItems": MAX_NEW_ITEMS}
_QUERY: dict[str, Schema] = {
    "include": {"type": "array", "items": {"type": "string", "enum": sorted(INCLUDABLE)}},
    "stream": _FLAG,
    "starting_after": {"type": "integer", "minimum": 0},
    "include_obfuscation": _FLAG,
    "after": _TEXT,
    "before": _TEXT,
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
}
_HEADERS: dict[str, Schema] = {
    "Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": 255},
    "X-Responses-Cache": _TEXT,
}


def _object(**members: Schema) -> Schema:
    """Return the schema of an object that must have `members` and may have other members."""
    return {"type": "object", "properties": members, "required": list(members)}


def _body(required: tuple[str, ...] = (), **members: Schema) -> Schema:
    return {"type": "object", "properties": members, "required": list(required), "additionalProperties": False}


def _schemas(*, closed: bool) -> dict[str, Schema]:
    create = create_schema(closed=closed)
    compacted = {name: create["properties"].get(name, {}) for name in sorted(COMPACT_MEMBERS)}
    return {
        "CreateResponse": create,
        "CompactResponse": _body(("model",), **{**compacted, "model": _TEXT, "image": {"type": ["object", "null"]}}),
        "CreateConversation": _body(items={**_NEW_ITEMS, "type": ["array", "null"]}, metadata=METADATA),
        "UpdateConversation": _body(("metadata",), metadata=METADATA),
        "CreateItems": _body(("items",), items=_NEW_ITEMS),
        "Response": _object(object={"const": "response"}, id=_TEXT, status=_TEXT, output=_ITEMS),
        "Compaction": _object(object={"const": "response.compaction"}, id=_TEXT, output=_ITEMS),
        "InputTokens": _object(object={"const": "response.input_tokens"}, input_tokens=_INTEGER),
        "Conversation": _object(object={"const": "conversation"}, id=_TEXT, created_at=_INTEGER, metadata={"type": "object"}),
        "Deleted": _object(id=_TEXT, object={"enum": ["response", "conversation.deleted"]}, deleted={"const": True}),
        "Item": _object(type=_TEXT),
        "ItemList": _object(
            object={"const": "list"},
            data={"type": "array", "items": _reference("Item")},
            first_id=_OPTIONAL_TEXT,
            last_id=_OPTIONAL_TEXT,
            has_more={"type": "boolean"},
        ),
        "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_OPTIONAL_TEXT, code=_OPTIONAL_TEXT)),
    }


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(name: str) -> Schema:
    return {"application/json": {"schema": _reference(name)}}


def describe(base_path: str = "", *, needs_key: bool = False, closed: bool = False) -> Schema:
    """Return the OpenAPI document. With `closed`, `CreateResponse` allows no unknown members."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Responses API", "version": VERSION},
        "servers": [{"url": base_path or "/"}],
        "security": [{"key": []}] if needs_key else [{}, {"key": []}],  # the upstream may require no credential
        "paths": {
            path: {method.lower(): _operation(path, one) for method, one in operations.items()}
            for path, operations in ROUTES.items()
        },
        "components": {"schemas": _schemas(closed=closed), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(path: str, operation: Operation) -> Schema:
    kind = "response" if path in _RESPONSES else "conversation"
    answer: Schema = {"description": "The connection is a WebSocket."}
    if operation.answer is not None:
        content = _content(operation.answer) | ({"text/event-stream": {"schema": _TEXT}} if operation.streams else {})
        answer = {"description": f"The {operation.answer}{', or its events' if operation.streams else ''}.", "content": content}
    described: Schema = {
        "operationId": f"{kind}_{operation.endpoint.__name__}",
        "summary": operation.summary,
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"{(\w+)}", path)),
            *({"name": name, "in": "query", "schema": _QUERY[name]} for name in operation.query),
            *({"name": name, "in": "header", "schema": _HEADERS[name]} for name in operation.headers),
        ],
        "responses": {
            str(operation.status): answer,
            "default": {"description": "An error in OpenAI's format.", "content": _content("Error")},
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.body)}
    return described


class DescriptionMiddleware:
    """ASGI middleware that serves the OpenAPI document at `/openapi.json`, and passes requests for other paths to `app`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, *, needs_key: bool) -> None:
        self._app = app
        self._path = settings.base_path + "/openapi.json"
        closed = settings.unknown_fields == "refuse"
        self._response = JSONResponse(describe(settings.base_path, needs_key=needs_key, closed=closed))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and scope["path"] == self._path and scope["method"] in ("GET", "HEAD")
        await (self._response if is_ours else self._app)(scope, receive, send)
