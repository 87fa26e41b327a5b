"""The admin port, which is separate from the public port and serves `/livez`, `/readyz`, `/metrics` and `/usage`.

`/livez` returns 200 while the event loop runs. `/readyz` runs all checks and returns 503 if a required check fails, so that
load balancers skip the replica. The checks of the replica itself and of Redis's configuration are always required. An outage of
Redis or of the upstream affects all replicas, so these checks are required only by `/readyz?require=redis,upstream`. The
`warnings` in the response are for the operator.

The admin port requires no credential. Its responses never contain text from requests.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from datetime import UTC, date, datetime
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ..engine.run import Drain
from ..errors import APIError, StartupError, UpstreamError
from ..network import address_family
from ..settings import ServerSettings
from ..state import State, StateUnavailable, server_group
from ..telemetry.instruments import exposition, is_shared
from ..telemetry.metrics import EVENT_LOOP_LAG, QUEUE_AGE, QUEUE_DEPTH, UPSTREAM_UP
from ..telemetry.tracing import is_measuring
from ..upstream import Caller, Upstream
from .http_responses import JSONResponse

logger = logging.getLogger(__name__)

CHECK_TIMEOUT = 3.0
"""Timeout of a check in seconds. It is shorter than the timeout of the Kubernetes probes in the Helm chart."""
INTERVAL = 10.0
"""Seconds between two measurements of Redis and of the upstream."""
LAG_INTERVAL = 0.5
"""Seconds between two measurements of the event loop."""


class Finding(NamedTuple):
    """The result of a check. `fault` and `warnings` are short sentences."""

    fault: str = ""
    """The reason why the check failed, or "" if it succeeded."""
    warnings: tuple[str, ...] = ()
    away: bool = False
    """Whether the check failed because the service returned an error or did not answer in time."""


Check = Callable[[], Awaitable[Finding]]


class Admin:
    """The ASGI application of the admin port."""

    def __init__(self, checks: Mapping[str, Check], state: State | None = None) -> None:
        """`checks` maps names, such as `redis`, to checks. `state` provides the usage by owner.

        `state` is None if the server has no stored state.
        """
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
        """Return the usage of all owners on the day in `query`, by default today (UTC)."""
        try:
            [(name, value)] = query or [("day", datetime.now(UTC).date().isoformat())]
            day = date.fromisoformat(value)
        except ValueError:
            name = ""
        if name != "day":
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
        required = {name for _, value in query for name in value.split(",")}
        if any(name != "require" for name, _ in query) or not required <= self._checks.keys():
            return PlainTextResponse(f"use /readyz?require= with names of checks: {', '.join(self._checks)}\n", 400)
        found = dict(zip(self._checks, await asyncio.gather(*map(_finding, self._checks.values())), strict=True))
        self._reached.update(name for name, finding in found.items() if not finding.fault)
        ready = not any(self._blocks(name, finding, required) for name, finding in found.items())
        results = {name: finding.fault or "ok" for name, finding in found.items()}
        warnings = [warning for finding in found.values() for warning in finding.warnings]
        return JSONResponse({"ready": ready, "checks": results, "warnings": warnings}, 200 if ready else 503)

    def _blocks(self, name: str, finding: Finding, required: set[str]) -> bool:
        """Return whether a finding makes the replica unready.

        An outage of the upstream or of Redis does so only if the check is in `required`. However, a Redis that this process has
        never reached makes the replica unready, because its URL may be wrong.
        """
        is_shared_fault = name == "upstream" or (finding.away and name in self._reached)
        return bool(finding.fault) and (name in required or not is_shared_fault)


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
    upstream: Upstream,
    state: State | None,
    is_working: Callable[[], bool] | None,
    drain: Drain | None = None,
    is_listening: Callable[[], bool] = lambda: True,
) -> dict[str, Check]:
    """Return the replica's health checks by name.

    The upstream is always checked, Redis if there is a `state`, the worker if there is an `is_working`, and the HTTP server if
    there is a `drain`. `is_working` returns whether the worker is claiming jobs, and `is_listening` whether the HTTP server
    accepts connections.
    """
    found: dict[str, Check] = {"upstream": partial(_check_upstream, upstream)}
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


async def _check_upstream(upstream: Upstream) -> Finding:
    """Request the upstream's models, with `upstream.api_key` if it is set.

    The check fails only if the status is 502, 503 or 504, because an upstream that refuses the credential is available.
    """
    try:
        await upstream.models(Caller())
    except UpstreamError as error:
        return Finding(error.message if error.status in (502, 503, 504) else "")
    return Finding()


async def _check_state(state: State) -> Finding:
    health = await state.check()
    return Finding(" ".join(health.errors), health.warnings)


# -- measurements --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def monitoring(state: State | None, check_upstream: Check | None) -> AsyncIterator[None]:
    """Record metrics of the queue, Redis's memory, the upstream and the event loop periodically until the context exits."""
    measuring = [_measure_lag()]
    if state is not None:
        measuring.append(_measure_state(state))
    if check_upstream is not None:
        measuring.append(_measure_upstream(check_upstream))
    tasks = [asyncio.create_task(each) for each in measuring]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _measure_state(state: State) -> None:
    while True:
        try:
            found = await state.queue.backlog()
            QUEUE_DEPTH.set(found.jobs)
            QUEUE_AGE.set(found.seconds)
            await state.check()  # records the memory
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
    """Serve the admin port until the context exits, if the port is configured.

    If metrics are exposed, by the admin port or by OpenTelemetry, also record periodic metrics. Raises `StartupError` if the
    port cannot be opened.
    """
    async with AsyncExitStack() as stack:
        if settings.admin_port or is_measuring():
            await stack.enter_async_context(monitoring(state, checks.get("upstream")))
        listener = _listener(settings.admin_host, settings.admin_port) if settings.admin_port else None
        if listener is not None:
            await stack.enter_async_context(_serving(Admin(checks, state), listener))
        yield


def _listener(host: str, port: int) -> socket.socket | None:
    """Open the port, or return None if another process of the same server uses it.

    Processes that share their metrics also share the port, because each of them can serve the metrics of all. Raises
    `StartupError` if the port cannot be opened for another reason.
    """
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
    """Serve `admin` in this event loop until the context exits.

    Signals and logging are left to the server of the public port.
    """
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
