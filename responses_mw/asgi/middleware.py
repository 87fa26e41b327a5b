"""The ASGI middleware: the Responses API in front of any application that serves Chat Completions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine.run import Drain
from ..errors import APIError, StartupError, UpgradeRequired
from ..http import check_upgrade
from ..jobs import JobService
from ..settings import ServerSettings
from ..upstream import Upstream
from .http_responses import ErrorResponse
from .telemetry import TelemetryMiddleware

_OURS = re.compile(r"/v1/(responses|conversations)(/|\Z)")
_END_TIMEOUT = 5.0
"""Maximum seconds for storing failed responses when the lifespan ends."""


@dataclass(frozen=True, slots=True)
class Application:
    """The application for our paths, and the objects that the middleware needs from it. `jobs` is None without stored state."""

    routes: ASGIApp
    drain: Drain
    jobs: JobService | None
    upstream: Upstream


class Dispatcher:
    """Pass requests for our paths to the application, and all others to `app`. The application is open during the lifespan."""

    def __init__(
        self,
        app: ASGIApp,
        server: ServerSettings,
        open_application: Callable[[MutableMapping[str, Any]], AbstractAsyncContextManager[Application]],
    ) -> None:
        """`open_application` takes the members of the host's scope that are passed to calls outside a request."""
        self.app = app
        self._server = server
        self._open_application = open_application
        self._opening = asyncio.Lock()
        self._opened = AsyncExitStack()
        self.application: Application | None = None
        """The application, while it is open."""
        self.is_listening = True
        """Whether the server accepts connections. A server that opens its port after the lifespan has started sets it."""
        self._closing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        try:
            self._check(scope)
        except APIError as error:
            await TelemetryMiddleware(ErrorResponse(error))(scope, receive, send)
            return
        path = self._our_path(scope)
        if path is None:
            await self.app(scope, receive, send)
        else:
            application = self.application or await self._open_late(scope)
            try:
                await application.routes({**scope, "responses_mw.path": path}, receive, send)
            except asyncio.CancelledError:
                if not application.drain.ends_cancelled():
                    raise

    def _check(self, scope: Scope) -> None:
        """Refuse upgrade requests that the host's server may have misread, and WebSockets if they are turned off."""
        if scope["type"] == "http":
            check_upgrade(scope["method"], scope["headers"])
        elif not self._server.max_websockets and self.serves(scope):
            raise UpgradeRequired("This server does not accept WebSockets; use HTTP.", headers={"upgrade": "HTTP/1.1"})

    def serves(self, scope: Scope) -> bool:
        """Return whether the request with this ASGI `scope` is for the application."""
        return self._our_path(scope) is not None

    def _our_path(self, scope: Scope) -> str | None:
        """Return the path from `/v1` on, or None if it is not ours. Some hosts include their `root_path` in the path."""
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        if root and path.startswith(root + "/"):
            path = path[len(root) :]
        if not path.startswith(self._server.base_path):
            return None
        path = path[len(self._server.base_path) :]
        return path.rstrip("/") if _OURS.match(path) else None

    # -- opening and closing -----------------------------------------------------------------------------------------

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open before the wrapped application starts, and close after it has stopped. Background jobs run in between."""

        async def receive_and_open() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._open(scope)
            elif message["type"] == "lifespan.shutdown":
                await self._drain()
            return message

        async def close_and_send(message: Message) -> None:
            if message["type"] != "lifespan.startup.complete":
                await self._close()
            elif self.application and self.application.jobs:
                self.application.jobs.work()
            await send(message)

        try:
            await self.app(scope, receive_and_open, close_and_send)
        except StartupError as error:  # the server logs the message instead of a traceback
            await send({"type": "lifespan.startup.failed", "message": f"responses_mw: {error}"})
        finally:
            await self._close()  # for an application that raises instead of sending a message

    async def _open(self, scope: Scope) -> Application:
        async with self._opening:
            if self.application is None:
                offered = {name: scope[name] for name in ("app", "state") if name in scope}
                self.application = await self._opened.enter_async_context(self._open_application(offered))
            return self.application

    async def _open_late(self, scope: Scope) -> Application:
        """Open the application on the first request if the host runs no lifespan. It is closed when the event loop ends."""
        opened = await self._open(scope)
        if opened.jobs:
            opened.jobs.work()
        if self._closing is None or self._closing.done():  # done: it belonged to an earlier event loop
            self._closing = asyncio.create_task(self._close_with_the_loop())
        return opened

    async def _close_with_the_loop(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()  # asyncio.run cancels this task at its end
        finally:
            await self._close()

    @property
    def running_jobs(self) -> int:
        """The number of background responses running in this process."""
        jobs = self.application.jobs if self.application else None
        return jobs.running if jobs else 0

    def stop(self) -> None:
        """Begin the drain: claim no more jobs, end the streams of background responses, and close idle WebSockets."""
        if self.application:
            self.application.drain.begun.set()
            if self.application.jobs:
                self.application.jobs.stop()

    async def fail_runs(self) -> None:
        """End the drain: fail the foreground responses that are still in progress."""
        if self.application:
            await self.application.drain.fail_runs()

    async def _drain(self) -> None:
        """Drain when the lifespan ends, for hosts that do not call `stop`. Their requests have ended or been cancelled."""
        self.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT):
                await self.fail_runs()
        if self.application and self.application.jobs:
            await self.application.jobs.drain()

    async def _close(self) -> None:
        self.application = None
        await self._opened.aclose()
