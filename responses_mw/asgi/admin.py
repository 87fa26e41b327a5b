"""The admin port (`/livez`, `/readyz`, `/metrics` and `/usage`), and periodic measurements.

The admin port requires no credential, so its responses never contain text from requests.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from datetime import UTC, date, datetime
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ..engine.run import Drain
from ..errors import APIError, StartupError
from ..network import address_family
from ..settings.groups import ServerSettings
from ..state import State, StateUnavailable, server_group
from ..telemetry.instruments import exposition, is_shared
from ..telemetry.metrics import EVENT_LOOP_LAG, QUEUE_AGE, QUEUE_DEPTH, UPSTREAM_UP
from ..telemetry.tracing import is_measuring
from ..threads import in_background
from .http_responses import JSONResponse

logger = logging.getLogger(__name__)

CHECK_TIMEOUT = 3.0
"""Timeout of a check in seconds. It is shorter than the timeout of the Kubernetes probes in the Helm chart."""
INTERVAL = 10.0
"""Seconds between two measurements of Redis and of the upstream."""
LAG_INTERVAL = 0.5
"""Seconds between two measurements of the event loop."""


class Finding(NamedTuple):
    """The result of a check. `fault` and `warnings` are short sentences for the operator."""

    fault: str = ""
    """The reason why the check failed, or "" if it succeeded."""
    warnings: tuple[str, ...] = ()
    away: bool = False
    """Whether the check raised an error or did not end in time."""


Check = Callable[[], Awaitable[Finding]]


class Admin:
    """The ASGI application of the admin port."""

    def __init__(self, checks: Mapping[str, Check], state: State | None = None) -> None:
        """`checks` maps names to readiness checks. `state` provides the owners' usage. If None, `/usage` responds with 404."""
        self._checks = checks
        self._state = state
        self._reached: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await receive()
        response = await self._respond(Request(scope))
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return Response(status_code=405, headers={"allow": "GET, HEAD"})
        path, query = request.scope["path"], request.query_params.multi_items()
        if path == "/livez":
            return PlainTextResponse("ok\n")
        if path == "/readyz":
            return await self._ready(query)
        if path == "/metrics":
            body, content_type = exposition(",".join(request.headers.getlist("accept")))
            return Response(body, headers={"content-type": content_type})
        if path == "/usage":
            return await self._usage(query)
        return PlainTextResponse("not found: use /livez, /readyz, /metrics or /usage\n", 404)

    async def _usage(self, query: list[tuple[str, str]]) -> Response:
        """Respond with the usage of all owners on the day in `query`, by default today (UTC)."""
        day = _day_in(query)
        if day is None:
            return PlainTextResponse("use /usage?day=YYYY-MM-DD\n", 400)
        if self._state is None:
            return PlainTextResponse("usage is not recorded, because there is no Redis\n", 404)
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                owners = await self._state.ledger.read(day)
        except (APIError, TimeoutError):
            return PlainTextResponse("Redis does not answer\n", 503)
        return JSONResponse({"day": day.isoformat(), "owners": {owner: asdict(used) for owner, used in owners.items()}})

    async def _ready(self, query: list[tuple[str, str]]) -> Response:
        """Run all checks. Respond with a 503 if one fails, unless the fault is shared and `require` does not name the check."""
        required = {name for _, value in query for name in value.split(",")}
        if any(name != "require" for name, _ in query) or not required <= self._checks.keys():
            return PlainTextResponse(f"use /readyz?require= with names of checks: {', '.join(self._checks)}\n", 400)
        found = dict(zip(self._checks, await asyncio.gather(*map(_finding, self._checks.values())), strict=True))
        self._reached.update(name for name, finding in found.items() if not finding.fault)
        # An outage of Redis or the upstream affects all replicas. If Redis was never reached, its URL may be wrong.
        shared = {"upstream", *(name for name, finding in found.items() if finding.away and name in self._reached)}
        ready = not any(finding.fault and (name in required or name not in shared) for name, finding in found.items())
        results = {name: finding.fault or "ok" for name, finding in found.items()}
        warnings = [warning for finding in found.values() for warning in finding.warnings]
        return JSONResponse({"ready": ready, "checks": results, "warnings": warnings}, 200 if ready else 503)


def _day_in(query: list[tuple[str, str]]) -> date | None:
    """Return the day in `query`, by default today (UTC), or None if the query is invalid."""
    try:
        [(name, value)] = query or [("day", datetime.now(UTC).date().isoformat())]
        day = date.fromisoformat(value)
    except ValueError:
        return None
    return day if name == "day" else None


async def _finding(check: Check) -> Finding:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT):
            return await check()
    except APIError as error:
        return Finding(error.message, away=True)
    except TimeoutError:
        return Finding("It did not answer in time.", away=True)


# -- checks --------------------------------------------------------------------------------------------------------------


def checks(
    probe_upstream: Callable[[], Awaitable[None]],
    state: State | None,
    is_working: Callable[[], bool] | None,
    drain: Drain | None = None,
    is_listening: Callable[[], bool] = lambda: True,
) -> dict[str, Check]:
    """Return the readiness checks by name: `upstream`, `redis`, `worker` and `server`.

    `probe_upstream` is `Upstream.probe` with a caller. `redis` is omitted if `state` is None, `worker` if `is_working` is None,
    and `server` if `drain` is None. `is_working` returns whether the worker is claiming jobs. `is_listening` returns whether
    the HTTP server accepts connections.
    """
    found: dict[str, Check] = {"upstream": partial(_check_upstream, probe_upstream)}
    if state is not None:
        found["redis"] = partial(_check_state, state)
    if is_working is not None:
        found["worker"] = partial(_check_that, is_working, "It is not taking background responses.")
    if drain is not None:
        found["server"] = partial(_check_server, drain, is_listening)
    return found


async def _check_server(drain: Drain, is_listening: Callable[[], bool]) -> Finding:
    if drain.begun.is_set():
        return Finding("It is shutting down.")
    return Finding("" if is_listening() else "It is not listening yet.")


async def _check_that(is_so: Callable[[], bool], fault: str) -> Finding:
    return Finding("" if is_so() else fault)


async def _check_upstream(probe: Callable[[], Awaitable[None]]) -> Finding:
    await probe()
    return Finding()


async def _check_state(state: State) -> Finding:
    health = await state.check()
    return Finding(" ".join(health.errors), health.warnings)


# -- measurements --------------------------------------------------------------------------------------------------------


def monitoring(state: State | None, check_upstream: Check | None) -> AbstractAsyncContextManager[None]:
    """Record metrics of the event loop, the queue, Redis and the upstream periodically until the context exits.

    If `state` is None, the queue and Redis are not measured. If `check_upstream` is None, the upstream is not measured.
    """
    measuring = [_measure_lag()]
    if state is not None:
        measuring.append(_measure_state(state))
    if check_upstream is not None:
        measuring.append(_measure_upstream(check_upstream))
    return in_background(*measuring)


async def _measure_state(state: State) -> None:
    while True:
        try:
            await state.inspect()  # also records the memory
            jobs, seconds = await state.queue.backlog()
            QUEUE_DEPTH.set(jobs)
            QUEUE_AGE.set(seconds)
        except StateUnavailable as error:  # the state has counted the failure
            logger.debug("could not measure Redis: %s", error.message)
        await asyncio.sleep(INTERVAL)


async def _measure_upstream(check: Check) -> None:
    while True:
        UPSTREAM_UP.set(int(not (await _finding(check)).fault))
        await asyncio.sleep(INTERVAL)


async def _measure_lag() -> None:
    """Record how late a timer fires. All other tasks of this process are delayed by the same time."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL
        await asyncio.sleep(LAG_INTERVAL)
        EVENT_LOOP_LAG.record(max(0.0, loop.time() - due), {})


# -- the port ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_admin(settings: ServerSettings, checks: Mapping[str, Check], state: State | None) -> AsyncIterator[None]:
    """Serve the admin port and record periodic metrics until the context exits.

    If `settings.admin_port` is 0, no port is opened, and these metrics are recorded only if OpenTelemetry exports them. Raises
    `StartupError` if the port cannot be opened. Processes of one server that share their metrics share the port. Otherwise, the
    first process opens the port, and the others log a warning.
    """
    async with AsyncExitStack() as stack:
        if settings.admin_port or is_measuring():
            await stack.enter_async_context(monitoring(state, checks.get("upstream")))
        listener = _listener(settings.admin_host, settings.admin_port) if settings.admin_port else None
        if listener is not None:
            await stack.enter_async_context(_serving(Admin(checks, state), listener))
        yield


def _listener(host: str, port: int) -> socket.socket | None:
    """Open the port. Return None if another process of this server has opened it. Other failures raise `StartupError`."""
    # Each process that shares its metrics can serve the metrics of all processes, so these processes also share the port.
    shares = server_group() is not None and is_shared()
    try:
        return socket.create_server((host, port), family=address_family(host), reuse_port=shares)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and server_group() is not None:
            advice = "set PROMETHEUS_MULTIPROC_DIR to combine the metrics of all processes"
            logger.warning("the admin port %s:%s shows only the metrics of another process: %s", host, port, advice)
            return None
        raise StartupError(f"the admin port {host}:{port} cannot be opened: {error.strerror}") from None


@asynccontextmanager
async def _serving(admin: Admin, listener: socket.socket) -> AsyncIterator[None]:
    import uvicorn

    class AdminServer(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals are left to the server of the public port

    options: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_config": None, "access_log": False, "server_header": False}
    server = AdminServer(uvicorn.Config(admin, timeout_graceful_shutdown=1, **options))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
