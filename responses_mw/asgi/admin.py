"""The admin port: `/livez`, `/readyz` and `/metrics`, separate from the public port.

`/livez` answers 200 while the event loop runs. `/readyz` answers 200 if every check passes, else 503, so that load balancers
skip replicas that cannot serve. No credential is needed, and no answer contains data of a request.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import PlainTextResponse, Response

from .. import telemetry
from ..errors import APIError, StartupError, UpstreamError
from ..state import StateUnavailable, server_group
from ..upstream import Caller
from .json import JSONResponse

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from ..engine.drain import Drain
    from ..settings import ServerSettings
    from ..state import State
    from ..upstream import Upstream

__all__ = ["Admin", "Check", "checks", "open_admin"]

logger = logging.getLogger(__name__)

Check = Callable[[], Awaitable[str | None]]
"""Return why the replica cannot serve, as a short sentence, or None."""

CHECK_TIMEOUT = 3.0
"""Seconds until a check fails, less than the timeout of the Kubernetes probes in the Helm chart."""

QUEUE_INTERVAL = 10.0
"""Seconds between two measurements of the queue."""

_GONE = frozenset({502, 503, 504})


class Admin:
    """The port's ASGI application."""

    def __init__(self, checks: Mapping[str, Check]) -> None:
        """`checks` are named by what they check."""
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
            response = PlainTextResponse("not found: use /livez, /readyz or /metrics\n", 404)
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
        async with asyncio.timeout(CHECK_TIMEOUT):
            return await check()
    except APIError as error:
        return error.message
    except TimeoutError:
        return "It did not answer in time."


# -- checks --------------------------------------------------------------------------------------------------------------


def checks(
    upstream: Upstream, state: State | None, is_working: Callable[[], bool] | None, drain: Drain | None = None
) -> dict[str, Check]:
    """Return the checks for what a replica needs: the upstream, and the state and a worker if it has them. During the `drain`,
    a server is not ready."""
    found: dict[str, Check] = {"upstream": partial(_upstream_fault, upstream)}
    if state is not None:
        found["redis"] = partial(_state_fault, state)
    if is_working is not None:
        found["worker"] = partial(_worker_fault, is_working)
    if drain is not None:
        found["server"] = partial(_drain_fault, drain)
    return found


async def _upstream_fault(upstream: Upstream) -> str | None:
    """Call the upstream with the operator's key or none. A refusal of the credential proves that it is alive."""
    try:
        await upstream.models(Caller())
    except UpstreamError as error:
        return error.message if error.status in _GONE else None
    return None


async def _state_fault(state: State) -> str | None:
    health = await state.check()
    return " ".join(health.errors) or None


async def _worker_fault(is_working: Callable[[], bool]) -> str | None:
    return None if is_working() else "It is not taking background responses."


async def _drain_fault(drain: Drain) -> str | None:
    return "It is shutting down." if drain.begun.is_set() else None


# -- the port ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_admin(settings: ServerSettings, checks: Mapping[str, Check], state: State | None) -> AsyncIterator[None]:
    """Serve the admin port, if configured, and measure the queue, if metrics are exposed. Raises `StartupError`."""
    async with AsyncExitStack() as stack:
        if state is not None and (settings.admin_port or telemetry.is_measuring()):
            await stack.enter_async_context(_measuring_queue(state))
        listener = _listener(settings.admin_host, settings.admin_port) if settings.admin_port else None
        if listener is not None:
            await stack.enter_async_context(_serving(Admin(checks), listener))
        yield


@asynccontextmanager
async def _measuring_queue(state: State) -> AsyncIterator[None]:
    """Measure the queue until the context exits."""

    async def measure() -> None:
        while True:
            with suppress(StateUnavailable):
                found = await state.queue.backlog()
                telemetry.QUEUE_DEPTH.set(found.jobs)
                telemetry.QUEUE_AGE.set(found.seconds)
            await asyncio.sleep(QUEUE_INTERVAL)

    task = asyncio.create_task(measure())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _listener(host: str, port: int) -> socket.socket | None:
    """Open the port, or return None if another worker of the same server has it. Raises `StartupError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and server_group() is not None:
            logger.warning("another process has the admin port %s:%s: it shows nothing of this one", host, port)
            return None
        raise StartupError(f"the admin port {host}:{port} cannot be opened: {error.strerror}") from None


@asynccontextmanager
async def _serving(admin: Admin, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `admin` in this event loop. The server of the public port handles signals and sets up logging."""
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
