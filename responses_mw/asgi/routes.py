"""Which endpoint serves which method and path."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from ..cache import Cache
from ..engine.prompt_templates import Prompts
from ..engine.run import limits_of
from ..engine.runner import Runner
from ..errors import APIError, MethodNotAllowed, NotFound
from ..jobs import Background
from ..protocol.request.create import CreateResponse, parse
from ..settings import Settings
from ..state import State
from ..telemetry import annotate
from ..upstream import Upstream
from .conversations import ConversationRoutes
from .limits import admitted
from .origins import SAFE_METHODS, Origins
from .requests import Reader
from .responses import CompactRoutes, ResponseRoutes, TokenRoutes
from .sse import INTERNAL_ERROR, send_json
from .websocket import WebSockets, refuse

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class Routes:
    """An ASGI application for everything under ``/v1/responses`` and ``/v1/conversations``: what it does not know is a 404 in
    OpenAI's shape, never the host's own. ``scope["responses_mw.path"]`` is the path from ``/v1`` on."""

    def __init__(
        self,
        runner: Runner,
        upstream: Upstream,
        state: State | None,
        background: Background | None,
        settings: Settings,
        cache: Cache | None = None,
    ) -> None:
        self._reader = reader = Reader(settings)
        self._origins = origins = Origins(settings.cors_origins)
        self._verify = upstream.verify
        prompts = Prompts(settings.prompts_dir)
        limits = limits_of(settings)

        def parsed(body: Any, size: int) -> CreateResponse:
            return parse(prompts.resolve(body), limits, size)

        self._websockets = WebSockets(runner, upstream, state, parsed, origins, settings)
        responses = ResponseRoutes(runner, upstream, state, background, reader, prompts, settings, cache)
        tokens = TokenRoutes(runner, upstream, reader, parsed)
        compact = CompactRoutes(runner, upstream, reader, parsed, settings)
        conversations = ConversationRoutes(upstream, state, reader, settings)
        table: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/responses", responses.create),
            ("GET", "/v1/responses", responses.connect),
            ("POST", "/v1/responses/compact", compact.compact),
            ("POST", "/v1/responses/input_tokens", tokens.count),
            ("GET", "/v1/responses/{response_id}", responses.retrieve),
            ("DELETE", "/v1/responses/{response_id}", responses.delete),
            ("POST", "/v1/responses/{response_id}/cancel", responses.cancel),
            ("GET", "/v1/responses/{response_id}/input_items", responses.input_items),
            ("POST", "/v1/conversations", conversations.create),
            ("GET", "/v1/conversations/{conversation_id}", conversations.retrieve),
            ("POST", "/v1/conversations/{conversation_id}", conversations.update),
            ("DELETE", "/v1/conversations/{conversation_id}", conversations.delete),
            ("POST", "/v1/conversations/{conversation_id}/items", conversations.create_items),
            ("GET", "/v1/conversations/{conversation_id}/items", conversations.items),
            ("GET", "/v1/conversations/{conversation_id}/items/{item_id}", conversations.item),
            ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}", conversations.delete_item),
        ]
        self._table = [(method, path, compile_path(path)[0], endpoint) for method, path, endpoint in table]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
            return
        try:
            if scope["method"] not in SAFE_METHODS:
                self._origins.check(Headers(scope=scope))
            endpoint = self._endpoint(scope)
            answer = await endpoint(Request(scope, receive))
        except ClientDisconnect:
            return
        except APIError as error:
            await send_json(send, error.status, error.body(), error.headers)
            return
        except Exception:
            logger.exception("a request failed")
            await send_json(send, 500, INTERNAL_ERROR)
            return
        await answer(scope, receive, send)

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["responses_mw.path"] != "/v1/responses":
            await receive()
            await refuse(NotFound("There are no WebSockets at this path.", code="unknown_url"), scope, send)
            return
        # what the upstream is asked in this process is no WebSocket
        asking = {**scope, "scheme": "https" if scope.get("scheme") == "wss" else "http"}
        try:
            caller = self._reader.caller(HTTPConnection(asking))
        except APIError as error:
            await receive()
            await refuse(error, scope, send)
            return
        await self._websockets.serve(caller, scope, receive, send, partial(admitted, scope, self._verify))

    def _endpoint(self, scope: Scope) -> Endpoint:
        method, path = scope["method"], scope["responses_mw.path"]
        allowed = set()
        for known_method, template, pattern, endpoint in self._table:
            match = pattern.match(path)
            if match and known_method == method:
                scope["path_params"] = match.groupdict()
                annotate(route=template)
                return endpoint
            if match:
                allowed.add(known_method)
        if allowed:
            raise MethodNotAllowed(f"Method {method} is not allowed for {path}.", headers={"allow": ", ".join(sorted(allowed))})
        raise NotFound(f"Unknown request URL: {method} {path}.", code="unknown_url")
