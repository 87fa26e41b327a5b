"""The OpenAPI 3.1 document of our routes, generated from the table of routes.

It describes what this server checks: methods, parameters, the members of bodies, and errors. Responses, items and events are
defined by OpenAI; the document describes them only as far as is needed to tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from ..protocol.request.create import INCLUDABLE, METADATA, create_schema
from ..protocol.response.compaction import COMPACT_MEMBERS
from ..settings import ServerSettings
from ..version import VERSION
from .conversations import MAX_NEW_ITEMS
from .http_responses import JSONResponse
from .requests import DEFAULT_LIMIT, MAX_LIMIT

__all__ = ["DescriptionMiddleware", "Operation", "describe"]

PATH = "/openapi.json"

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean", "default": False}
_ITEMS: Schema = {"type": "array", "items": {"type": "object"}}
_NEW_ITEMS: Schema = {**_ITEMS, "maxItems": MAX_NEW_ITEMS}


@dataclass(frozen=True, slots=True)
class Operation:
    """An HTTP method of a path: its `endpoint`, which is a method of the class `owner`, its input and its output.

    `answer` and `body` name schemas; `query` and `headers` name parameters.
    """

    owner: type
    endpoint: Callable[..., Any]
    summary: str
    answer: str | None = None
    status: int = 200
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    body: str | None = None
    streams: bool = False


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


def _kind(name: str, **members: Schema) -> Schema:
    """Return the schema of an object whose `object` is `name`, with these members and possibly others."""
    known = {"object": {"const": name}, **members}
    return {"type": "object", "properties": known, "required": list(known)}


def _body(required: tuple[str, ...] = (), **members: Schema) -> Schema:
    return {"type": "object", "properties": members, "required": list(required), "additionalProperties": False}


def _schemas(*, closed: bool) -> dict[str, Schema]:
    """Return the schemas of bodies and answers. If `closed`, `CreateResponse` allows no unknown members."""
    create = create_schema(closed=closed)
    compacted = {name: create["properties"].get(name, {}) for name in sorted(COMPACT_MEMBERS)}
    return {
        "CreateResponse": create,
        "CompactResponse": _body(("model",), **{**compacted, "model": _TEXT, "image": {"type": ["object", "null"]}}),
        "CreateConversation": _body(items={**_NEW_ITEMS, "type": ["array", "null"]}, metadata=METADATA),
        "UpdateConversation": _body(("metadata",), metadata=METADATA),
        "CreateItems": _body(("items",), items=_NEW_ITEMS),
        "Response": _kind("response", id=_TEXT, status=_TEXT, output=_ITEMS),
        "Compaction": _kind("response.compaction", id=_TEXT, output=_ITEMS),
        "InputTokens": _kind("response.input_tokens", input_tokens={"type": "integer"}),
        "Conversation": _kind("conversation", id=_TEXT, created_at={"type": "integer"}, metadata={"type": "object"}),
        "Deleted": {
            "type": "object",
            "properties": {"id": _TEXT, "object": {"enum": ["response", "conversation.deleted"]}, "deleted": {"const": True}},
            "required": ["id", "object", "deleted"],
        },
        "Item": {"type": "object", "properties": {"type": _TEXT}, "required": ["type"]},
        "ItemList": _kind(
            "list",
            data={"type": "array", "items": _reference("Item")},
            first_id={"type": ["string", "null"]},
            last_id={"type": ["string", "null"]},
            has_more={"type": "boolean"},
        ),
        "Error": {"type": "object", "properties": {"error": _ERROR}, "required": ["error"]},
    }


_ERROR: Schema = {
    "type": "object",
    "properties": {
        "message": _TEXT,
        "type": _TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    },
    "required": ["message", "type", "param", "code"],
}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(name: str) -> Schema:
    return {"application/json": {"schema": _reference(name)}}


def describe(
    routes: Mapping[str, Mapping[str, Operation]], base_path: str = "", *, needs_key: bool = False, closed: bool = False
) -> Schema:
    """Return the document. If `needs_key`, an API key is required; otherwise the upstream checks the credential.

    If `closed`, `CreateResponse` allows no unknown members.
    """
    security: list[Schema] = [{"key": []}] if needs_key else [{}, {"key": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Responses API", "version": VERSION},
        "servers": [{"url": base_path or "/"}],
        "security": security,
        "paths": {
            path: {method.lower(): _operation(path, one) for method, one in operations.items()}
            for path, operations in routes.items()
        },
        "components": {
            "schemas": _schemas(closed=closed),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, operation: Operation) -> Schema:
    described: Schema = {
        "operationId": f"{operation.owner.__name__.removesuffix('Routes').lower()}_{operation.endpoint.__name__}",
        "summary": operation.summary,
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"{(\w+)}", path)),
            *({"name": name, "in": "query", "schema": _QUERY[name]} for name in operation.query),
            *({"name": name, "in": "header", "schema": _HEADERS[name]} for name in operation.headers),
        ],
        "responses": {str(operation.status): _answer(operation), "default": _FAILED},
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.body)}
    return described


_FAILED: Schema = {"description": "An error in OpenAI's format.", "content": _content("Error")}


def _answer(operation: Operation) -> Schema:
    if operation.answer is None:
        return {"description": "The connection is a WebSocket."}
    content = _content(operation.answer)
    if operation.streams:
        content["text/event-stream"] = {"schema": _TEXT}
    return {"description": f"The {operation.answer}" + (", or its events." if operation.streams else "."), "content": content}


class DescriptionMiddleware:
    """Answer `GET /openapi.json` with the description of our routes; pass everything else to `app`."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, routes: Mapping[str, Mapping[str, Operation]], *, needs_key: bool
    ) -> None:
        self._app = app
        self._path = settings.base_path + PATH
        closed = settings.unknown_fields == "refuse"
        self._response = JSONResponse(describe(routes, settings.base_path, needs_key=needs_key, closed=closed))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and scope["path"] == self._path and scope["method"] in ("GET", "HEAD")
        await (self._response if is_ours else self._app)(scope, receive, send)
