"""The ASGI middleware: the Responses API in front of any application that serves Chat Completions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine.drain import Drain
from ..errors import APIError, NotFound, StartupError, Unavailable, UpgradeRequired
from ..http import check_upgrade
from ..jobs import JobService
from ..redaction import NO_SECRETS, Redactor, activate
from ..settings.groups import ServerSettings
from ..upstream.routing import Upstreams
from .access import RateLimits
from .http_responses import ErrorResponse
from .requests import PARAMETERS_SCOPE
from .routes import match
from .spellings import OurPaths
from .telemetry import DEFAULT_HEADERS, ROUTE_SCOPE, STARTED_SCOPE, HeaderOptions, TelemetryMiddleware
from .unknown_paths import pass_on
from .web_pages import Hosts

logger = logging.getLogger(__name__)

_END_TIMEOUT = 5.0
"""Timeout in seconds for storing failed responses when the lifespan ends."""


@dataclass(frozen=True, slots=True)
class Application:
    """The Responses API between startup and shutdown. `routes` serves it. `jobs` is None if the server has no stored state."""

    routes: ASGIApp
    drain: Drain
    jobs: JobService | None
    upstreams: Upstreams
    limits: RateLimits


OpenApplication = Callable[[MutableMapping[str, Any]], AbstractAsyncContextManager[Application]]


class Dispatcher:
    """ASGI middleware that serves the Responses API with the application, and passes all other requests to `app`.

    The application is opened when the host's lifespan starts. If the host has no lifespan, it is opened by the first request
    that it serves.
    """

    def __init__(
        self,
        app: ASGIApp,
        server: ServerSettings,
        open_application: OpenApplication,
        redactor: Redactor = NO_SECRETS,
        hosts: Hosts | None = None,
        paths: OurPaths | None = None,
        header_options: HeaderOptions = DEFAULT_HEADERS,
    ) -> None:
        """`open_application` opens the application. Its argument contains the members `app` and `state` of the host's scope.

        `redactor` removes the secrets of the settings from texts of other servers. `hosts` are the accepted host names, by
        default all. `paths` are the paths that are not passed on, by default without those of files. `header_options` are for
        refusals; other responses have those of the application.
        """
        self._redactor = redactor
        self._hosts = hosts or Hosts()
        self._paths = paths or OurPaths()
        self._header_options = header_options
        self.app = app
        self._server = server
        self._open_application = open_application
        self._opening = asyncio.Lock()
        self._opened = AsyncExitStack()
        self.application: Application | None = None
        """The application, while it is open."""
        self.is_listening = True
        """Whether the server accepts connections. `DrainingServer` sets this to false until it has opened its port."""
        self._closing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        activate(self._redactor)
        path = self.our_path(scope)
        route, parameters = match(path or "")
        found = {"responses_mw.path": path, ROUTE_SCOPE: route, PARAMETERS_SCOPE: parameters}
        ours = {**scope, **found, STARTED_SCOPE: time.perf_counter()}
        try:
            self._check(scope, path)
            application = None if path is None else await self.opened(scope)
        except APIError as error:
            await TelemetryMiddleware(ErrorResponse(error), options=self._header_options)(ours, receive, send)
            return
        if application is None:
            await pass_on(self.app, self._path(scope), scope, receive, send)
        else:
            try:
                await application.routes(ours, receive, send)
            except asyncio.CancelledError:
                if not application.drain.ends_cancelled():
                    raise

    def _check(self, scope: Scope, path: str | None) -> None:
        """Check the host and the spelling of the path. For HTTP, call `check_upgrade`.

        Raises `UpgradeRequired` for a WebSocket if they are off.
        """
        self._hosts.check(scope["headers"])
        if path is None and self._paths.has_other_spelling(self._path(scope) or ""):
            raise NotFound("Unknown request URL. Paths of this API are spelled exactly as documented.", code="unknown_url")
        if scope["type"] == "http":
            check_upgrade(scope["method"], scope["headers"])
        elif not self._server.max_websockets and path is not None:
            raise UpgradeRequired("This server does not accept WebSockets; use HTTP.")

    def our_path(self, scope: Scope) -> str | None:
        """Return the path from `/v1` on, without slashes at the end. Return None if the wrapped `app` serves the path."""
        path = self._path(scope)
        return path.rstrip("/") if path is not None and path in self._paths else None

    def _path(self, scope: Scope) -> str | None:
        """Return the path below the base path, or None if it has another beginning."""
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        if root and path.startswith(root + "/"):  # some hosts include `root_path` in the path
            path = path[len(root) :]
        base_path = self._server.base_path
        if path.startswith(base_path):
            return path[len(base_path) :]
        return path if root.rstrip("/").endswith(base_path) else None  # the host has mounted us at the base path

    # -- opening and closing -----------------------------------------------------------------------------------------

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the lifespan to `app`. Open the application before `app` starts, and run the worker while `app` runs."""

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
            elif self._jobs:
                self._jobs.work()
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

    async def opened(self, scope: Scope) -> Application:
        """Return the application. If the host has no lifespan, open it for a request, and close it when the event loop ends.

        Raises `Unavailable` if opening raises `StartupError`. The next request tries again.
        """
        return self.application or await self._open_late(scope)

    async def _open_late(self, scope: Scope) -> Application:
        try:
            opened = await self._open(scope)
        except StartupError as error:
            logger.error("responses_mw cannot start: %s", error)  # noqa: TRY400 (the message names the wrong setting)
            raise Unavailable("This server cannot start. Its log says why.") from error
        if opened.jobs:
            opened.jobs.work()
        if self._closing is None or self._closing.done():  # a task that is done belonged to an earlier event loop
            self._closing = asyncio.create_task(self._close_with_the_loop())
        return opened

    async def _close_with_the_loop(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()  # asyncio.run cancels this task at its end
        finally:
            await self._close()

    @property
    def _jobs(self) -> JobService | None:
        return self.application.jobs if self.application else None

    @property
    def running_jobs(self) -> int:
        """The number of background responses running in this process."""
        return self._jobs.running if self._jobs else 0

    def stop(self) -> None:
        """Begin the shutdown. Stop claiming jobs, close the streams of background responses, and close idle WebSockets."""
        if self.application:
            self.application.drain.begun.set()
        if self._jobs:
            self._jobs.stop()

    async def fail_runs(self) -> None:
        """Fail the foreground responses that are still in progress, and wait until they are stored. New ones fail too."""
        if self.application:
            await self.application.drain.fail_runs()

    async def _drain(self) -> None:
        # Not every host calls `stop`. The host has already completed or cancelled its requests.
        self.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT):
                await self.fail_runs()
        if self._jobs:
            await self._jobs.drain()

    async def _close(self) -> None:
        self.application = None
        await self._opened.aclose()
