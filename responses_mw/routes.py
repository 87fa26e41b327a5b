"""The operations of the Responses API, each a thin endpoint: read, check, run, reply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from .config import Settings
from .errors import APIError, BadRequest, MethodNotAllowed, NotFound, TooLarge, UpgradeRequired
from .protocol.request import Limits, parse
from .replies import JSONReply, StreamReply, send_json
from .runner import Runner
from .upstream import Caller

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class Routes:
    """An ASGI application for everything under ``/v1/responses`` and ``/v1/conversations``: what it does not know is a 404 in
    OpenAI's shape, never the host's own."""

    def __init__(self, runner: Runner, settings: Settings) -> None:
        self._runner = runner
        self._settings = settings
        self._limits = Limits(settings.max_input_items, settings.max_tools, settings.max_depth)
        self._forwarded = frozenset(["authorization", *settings.forward_headers])
        table: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/responses", self.create),
            ("GET", "/v1/responses", self.connect),
        ]
        self._table = [(method, compile_path(path)[0], endpoint) for method, path, endpoint in table]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._endpoint(scope)(Request(scope, receive))
        except ClientDisconnect:
            return
        except APIError as error:
            await send_json(send, error.status, error.body(), error.headers)
            return
        await answer(scope, receive, send)

    def _endpoint(self, scope: Scope) -> Endpoint:
        method, path = scope["method"], scope["responses_mw.path"]
        allowed = set()
        for known_method, pattern, endpoint in self._table:
            match = pattern.match(path)
            if match and known_method == method:
                scope["path_params"] = match.groupdict()
                return endpoint
            if match:
                allowed.add(known_method)
        if allowed:
            raise MethodNotAllowed(f"Method {method} is not allowed for {path}.", headers={"allow": ", ".join(sorted(allowed))})
        raise NotFound(f"Unknown request URL: {method} {path}.", code="unknown_url")

    # -- operations --------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> ASGIApp:
        """``POST /v1/responses``"""
        parsed = parse(await self._json(request), self._limits)
        grace = self._settings.status_grace if parsed.stream else None
        run = self._runner.run(parsed, self._caller(request), grace=grace)
        return (StreamReply if parsed.stream else JSONReply)(run, self._settings)

    async def connect(self, request: Request) -> ASGIApp:
        """``GET /v1/responses``: the WebSocket's upgrade, where the server in front of us takes it for a plain request."""
        if request.headers.get("upgrade", "").lower() == "websocket":
            raise UpgradeRequired("WebSockets are not served yet; use HTTP.", headers={"upgrade": "HTTP/1.1"})
        raise MethodNotAllowed("Method GET is not allowed for /v1/responses.", headers={"allow": "POST"})

    # -- what they share ---------------------------------------------------------------------------------------------

    def _caller(self, request: Request) -> Caller:
        headers = {name: value for name, value in request.headers.items() if name in self._forwarded}
        return Caller(headers=headers, scope=dict(request.scope))

    async def _json(self, request: Request) -> Any:
        body = await self._body(request)
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            message = f"We could not parse the JSON body of your request: {error}."
            raise BadRequest(message, code="invalid_json") from None

    async def _body(self, request: Request) -> bytes:
        longest = self._settings.max_body_bytes
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise BadRequest(
                f"The content-encoding '{encoding}' of the request body is not supported.", code="unsupported_encoding"
            )
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > longest:
                raise TooLarge(f"The request body is larger than {longest} bytes.")
            chunks.append(chunk)
        return b"".join(chunks)
