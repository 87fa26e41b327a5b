"""Who may open a WebSocket, and what the others are told: an HTTP status, where the server can say it."""

from __future__ import annotations

from collections import Counter

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from ...engine.runner import Runner
from ...errors import APIError, RateLimited, Unavailable
from ...settings import Settings
from ...state import State
from ...upstream import Caller, Upstream
from ..origins import Origins
from .connection import Admission, Parse, WebSocketConnection
from .held import ConnectionHistory
from .memory import Memory

_TRY_AGAIN = 1013


class WebSockets:
    """The connections of this process."""

    def __init__(
        self, runner: Runner, upstream: Upstream, state: State | None, parse: Parse, origins: Origins, settings: Settings
    ) -> None:
        self._runner = runner
        self._upstream = upstream
        self._state = state
        self._parse = parse
        self._origins = origins
        self._settings = settings
        self._open: Counter[str] = Counter()
        """How many connections each owner has."""
        self._memory = Memory(owner_bytes=settings.websocket_held_bytes, total_bytes=settings.websocket_total_held_bytes)

    async def serve(self, caller: Caller, scope: Scope, receive: Receive, send: Send, admission: Admission) -> None:
        """Serves the connection of ``caller`` that ``scope`` asks for, to its end. Each response is made within an
        ``admission``."""
        await receive()
        try:
            self._origins.check(Headers(scope=scope))
            await self._upstream.verify(caller)  # what it prepares would never reach the upstream
            self._count_in(caller.owner)
        except APIError as error:
            await refuse(error, scope, send)
            return
        try:
            await send({"type": "websocket.accept"})
            settings = self._settings
            with self._memory.share(caller.owner) as share:
                held = ConnectionHistory(self._state, share, required=settings.state_required)
                connection = WebSocketConnection(
                    self._runner, held, share, self._parse, admission, caller, settings, receive, send
                )
                await connection.run()
        finally:
            self._count_out(caller.owner)

    def _count_in(self, owner: str) -> None:
        most = self._settings.websocket_connections
        if self._open[owner] >= most:
            raise RateLimited(f"You have {most} WebSocket connections open.")
        if self._open.total() >= self._settings.websocket_total_connections:
            raise Unavailable("This server has too many WebSocket connections open.", retry_after=5)
        self._open[owner] += 1

    def _count_out(self, owner: str) -> None:
        self._open[owner] -= 1
        if not self._open[owner]:
            del self._open[owner]


async def refuse(error: APIError, scope: Scope, send: Send) -> None:
    """Refuses an upgrade that has not been accepted. Codex goes on over HTTP at once after a 426."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _TRY_AGAIN})
        return
    body = orjson.dumps(error.body())
    fields = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    headers = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
