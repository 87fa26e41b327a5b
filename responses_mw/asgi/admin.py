"""The admin port: ``/livez``, ``/readyz`` and ``/metrics``, apart from the public one.

``/livez`` answers 200 for as long as the event loop turns. ``/readyz`` answers 200 where every check passes, else 503: by it a
load balancer finds the replicas that can serve now. Nobody is asked for a credential, and nothing tells of a request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse, Response

from .. import telemetry
from ..errors import APIError, StartupError, UpstreamError
from ..state import StateUnavailable
from ..upstream import Caller
from .json import JSONResponse

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from ..settings import ServerSettings
    from ..state import State
    from ..upstream import Upstream

__all__ = ["Admin", "Check", "PortTaken", "checks", "open_admin"]

Check = Callable[[], Awaitable[str | None]]
"""What keeps the replica from serving, as a short sentence; None: nothing."""

PATIENCE = 3.0
"""Seconds after which a check has failed. Kubernetes' probes wait for 5."""

WATCHED_EVERY = 10.0
"""Seconds between two looks into the queue, for its metrics."""

_GONE = frozenset({502, 503, 504})


class PortTaken(StartupError):
    """The admin port cannot be had; the message says why."""


class Admin:
    """The port's ASGI application."""

    def __init__(self, checks: Mapping[str, Check]) -> None:
        """``checks`` by the names of what they look at."""
        self._checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await receive()
        if scope["method"] not in ("GET", "HEAD"):
            response = Response(status_code=405, headers={"allow": "GET, HEAD"})
        elif scope["path"] == "/livez":
            response = PlainTextResponse("ok\n")
        elif scope["path"] == "/readyz":
            response = await self._ready()
        elif scope["path"] == "/metrics":
            body, content_type = telemetry.exposition(_accept(scope))
            response = Response(body, headers={"content-type": content_type})
        else:
            response = PlainTextResponse("there are /livez, /readyz and /metrics\n", 404)
        await response(scope, receive, send)

    async def _ready(self) -> Response:
        faults = await asyncio.gather(*(_fault(check) for check in self._checks.values()))
        results = {name: fault or "ok" for name, fault in zip(self._checks, faults, strict=True)}
        ready = not any(faults)
        return JSONResponse({"ready": ready, "checks": results}, 200 if ready else 503)


def _accept(scope: Scope) -> str:
    return ",".join(value.decode("latin-1") for name, value in scope["headers"] if name == b"accept")


async def _fault(check: Check) -> str | None:
    try:
        async with asyncio.timeout(PATIENCE):
            return await check()
    except APIError as error:
        return error.message
    except TimeoutError:
        return "It does not answer in time."


# -- checks --------------------------------------------------------------------------------------------------------------


def checks(upstream: Upstream, state: State | None, is_working: Callable[[], bool] | None) -> dict[str, Check]:
    """What a replica needs to serve: all of these, of which it may have no ``state`` and no worker."""
    found: dict[str, Check] = {"upstream": partial(_upstream_fault, upstream)}
    if state is not None:
        found["redis"] = partial(_state_fault, state)
    if is_working is not None:
        found["worker"] = partial(_worker_fault, is_working)
    return found


async def _upstream_fault(upstream: Upstream) -> str | None:
    """One that wants a credential lives: it is asked without one, or with the operator's."""
    try:
        await upstream.models(Caller())
    except UpstreamError as error:
        return error.message if error.status in _GONE else None
    return None


async def _state_fault(state: State) -> str | None:
    health = await state.check()
    return " ".join(health.errors) or None


async def _worker_fault(is_working: Callable[[], bool]) -> str | None:
    return None if is_working() else "It takes no background responses now."


# -- the port ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_admin(settings: ServerSettings, checks: Mapping[str, Check], state: State | None) -> AsyncIterator[None]:
    """Serves the admin port meanwhile, if one is set, and measures the queue, if anybody wants to know.

    Raises ``PortTaken``."""
    async with AsyncExitStack() as stack:
        if state is not None and (settings.admin_port or telemetry.is_measuring()):
            await stack.enter_async_context(_watching(state))
        if settings.admin_port:
            await stack.enter_async_context(_serving(Admin(checks), _listener(settings.admin_host, settings.admin_port)))
        yield


@asynccontextmanager
async def _watching(state: State) -> AsyncIterator[None]:
    """Measures the queue meanwhile."""

    async def watch() -> None:
        while True:
            with suppress(StateUnavailable):
                found = await state.queue.backlog()
                telemetry.QUEUE_DEPTH.set(found.jobs)
                telemetry.QUEUE_AGE.set(found.seconds)
            await asyncio.sleep(WATCHED_EVERY)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise PortTaken(f"the admin port {host}:{port} cannot be opened: {error.strerror}") from None


@asynccontextmanager
async def _serving(admin: Admin, listener: socket.socket) -> AsyncIterator[None]:
    """Serves beside the server of the public port, to which signals and the set-up of logs belong."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    options: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_config": None, "access_log": False, "server_header": False}
    server = Server(uvicorn.Config(admin, timeout_graceful_shutdown=1, **options))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
