"""Accept or refuse WebSockets. A refusal has an HTTP status and a body if the ASGI server can send them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from ...engine.runner import Runner
from ...errors import APIError, RateLimited, Unavailable
from ...settings import CacheSettings, LimitSettings, ServerSettings
from ...state import State
from ...telemetry.metrics import WEBSOCKETS_OPEN
from ...upstream import Caller, Upstream
from ..access import Origins
from ..http_responses import ErrorResponse
from ..limits import admitted
from ..requests import HOST_SCOPE, Reader, RequestParser
from .connection import WebSocketConnection
from .memory import ConnectionHistory, Memory


class WebSockets:
    """An ASGI application that serves the WebSockets of this process."""

    def __init__(
        self,
        runner: Runner,
        upstream: Upstream,
        state: State | None,
        reader: Reader,
        parser: RequestParser,
        origins: Origins,
        server: ServerSettings,
        limits: LimitSettings,
        caching: CacheSettings,
        *,
        storage_required: bool,
    ) -> None:
        self._runner = runner
        self._upstream = upstream
        self._state = state
        self._reader = reader
        self._parser = parser
        self._origins = origins
        self._max_connections = server.max_websockets
        self._max_frame_bytes = limits.max_request_bytes
        self._caching = caching
        self._storage_required = storage_required
        self._open: Counter[str] = Counter()
        """The number of open connections of each owner."""
        self._memory = Memory(owner_bytes=limits.memory_bytes // 4, total_bytes=limits.memory_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = scope.get(HOST_SCOPE, scope)
        with ExitStack() as stack:
            try:
                caller = await self._admitted(scope)
                stack.enter_context(self._counted(caller.owner))
            except APIError as error:
                await ErrorResponse(error)(scope, receive, send)
                return
            await WebSocket(scope, receive, send).accept()
            await self._serve(caller, scope, receive, send)

    async def _admitted(self, scope: Scope) -> Caller:
        """Return the caller, once the credential is accepted. Raises `APIError`."""
        self._origins.check(Headers(scope=scope))
        # The upstream is always called over HTTP, even if it is an application in this process.
        http_scope = {**scope, "scheme": "https" if scope.get("scheme") == "wss" else "http"}
        caller = self._reader.caller(HTTPConnection(http_scope))
        # With `generate: false`, a response is created without a call of the upstream that would check the credential.
        await self._upstream.verify(caller)
        return caller

    async def _serve(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        admission = partial(admitted, scope, self._upstream.verify)
        with self._memory.share(caller.owner) as share:
            held = ConnectionHistory(self._state, share, required=self._storage_required)
            connection = WebSocketConnection(
                self._runner,
                held,
                share,
                self._parser.parse,
                admission,
                caller,
                self._caching,
                self._max_frame_bytes,
                receive,
                send,
            )
            await connection.run()

    @contextmanager
    def _counted(self, owner: str) -> Iterator[None]:
        maximum = max(1, self._max_connections // 5)
        if self._open[owner] >= maximum:
            raise RateLimited(f"You already have {maximum} open WebSocket connections.")
        if self._open.total() >= self._max_connections:
            raise Unavailable("This server has too many open WebSocket connections.", retry_after=5)
        self._open[owner] += 1
        WEBSOCKETS_OPEN.add(1)
        try:
            yield
        finally:
            WEBSOCKETS_OPEN.add(-1)
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]
