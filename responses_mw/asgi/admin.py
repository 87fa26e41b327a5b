"""The admin port (`/livez`, `/readyz`, `/metrics` and `/usage`), and periodic measurements.

The admin port requires no credential, so its responses never contain text from requests, except for names of models that have
answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from datetime import UTC, date, datetime
from functools import partial
from typing import NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine.drain import Drain
from ..errors import APIError
from ..state import State, StateUnavailable
from ..tasks import in_background
from ..telemetry.instruments import exposition
from ..telemetry.metrics import EVENT_LOOP_LAG, INGESTION_QUEUE_AGE, INGESTION_QUEUE_DEPTH, QUEUE_AGE, QUEUE_DEPTH, UPSTREAM_UP
from ..upstream import KeyCheck
from .http_responses import JSONResponse
from .web_pages import Hosts

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
    """Whether the fault is one of a shared server: it did not answer, or refused a command or a key that it accepted before."""


Check = Callable[[], Awaitable[Finding]]


class Inspector(Protocol):
    """An application that serves its own paths of the admin port."""

    def serves(self, path: str) -> bool: ...

    def watching(self) -> AbstractAsyncContextManager[None]: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Admin:
    """The ASGI application of the admin port."""

    def __init__(
        self,
        checks: Mapping[str, Check],
        state: State | None = None,
        keys: Mapping[str, str] = {},
        hosts: Hosts | None = None,
        inspector: Inspector | None = None,
    ) -> None:
        """`checks` maps names to readiness checks. `state` provides the owners' usage. If None, `/usage` responds with 404.

        `keys` maps owners to the names of their API keys. `hosts` are the accepted host names, by default all. `inspector`
        serves its own paths.
        """
        self._hosts = hosts or Hosts()
        self._inspector = inspector
        self._keys = keys
        self._checks = checks
        self._state = state
        self._reached: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        response: ASGIApp
        try:
            self._hosts.check(scope["headers"])
            if self._inspector is not None and self._inspector.serves(scope["path"]):
                response = self._inspector
            else:
                await receive()
                response = await self._respond(Request(scope))
        except APIError as error:
            response = PlainTextResponse(error.message + "\n", error.status)
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
        named = {owner: {"key": self._keys[owner]} if owner in self._keys else {} for owner in owners}
        shown = {owner: {**named[owner], **asdict(used)} for owner, used in owners.items()}
        return JSONResponse({"day": day.isoformat(), "owners": shown})

    async def _ready(self, query: list[tuple[str, str]]) -> Response:
        """Run all checks. Respond with a 503 if one fails, unless the fault is shared and `require` does not name the check."""
        required = {name for _, value in query for name in value.split(",")}
        if any(name != "require" for name, _ in query) or not required <= self._checks.keys():
            return PlainTextResponse(f"use /readyz?require= with names of checks: {', '.join(self._checks)}\n", 400)
        found = dict(zip(self._checks, await asyncio.gather(*map(_finding, self._checks.values())), strict=True))
        self._reached.update(name for name, finding in found.items() if not finding.fault)
        # An outage of Redis or the upstream affects all replicas. If Redis was never reached, its URL may be wrong.
        reached = {"upstream", *self._reached}
        shared = {name for name, finding in found.items() if finding.away and name in reached}
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


def contained(checks: Mapping[str, Check]) -> dict[str, Check]:
    """Return checks that report errors and timeouts as faults."""
    return {name: partial(_finding, check) for name, check in checks.items()}


async def _finding(check: Check) -> Finding:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT):
            return await check()
    except APIError as error:
        return Finding(error.message, away=True)
    except TimeoutError:
        return Finding("It did not answer in time.", away=True)


# -- checks --------------------------------------------------------------------------------------------------------------


def upstream_checks(check_keys: Mapping[str, Callable[[], Awaitable[KeyCheck]]]) -> dict[str, Check]:
    """Return a check for each upstream. `check_keys` maps their names to `Upstream.check_key` with a caller."""
    return {name: partial(_check_upstream, check_key) for name, check_key in check_keys.items()}


def checks(
    upstreams: Mapping[str, Check],
    state: State | None,
    is_working: Callable[[], bool] | None,
    drain: Drain | None = None,
    is_listening: Callable[[], bool] = lambda: True,
) -> dict[str, Check]:
    """Return the readiness checks by name: `upstream`, `redis`, `worker` and `server`.

    `upstreams` are the checks of the upstreams. `redis` is omitted if `state` is None, `worker` if `is_working` is None, and
    `server` if `drain` is None. `is_working` returns whether the worker is claiming jobs. `is_listening` returns whether the
    HTTP server accepts connections.
    """
    found: dict[str, Check] = {"upstream": partial(_check_upstreams, upstreams)}
    if state is not None:
        found["redis"] = partial(_check_state, state)
    if is_working is not None:
        found["worker"] = partial(_check_that, is_working, "It takes no background responses and no files for vector stores.")
    if drain is not None:
        found["server"] = partial(_check_server, drain, is_listening)
    return found


async def _check_server(drain: Drain, is_listening: Callable[[], bool]) -> Finding:
    if drain.begun.is_set():
        return Finding("It is shutting down.")
    return Finding("" if is_listening() else "It is not listening yet.")


async def _check_that(is_so: Callable[[], bool], fault: str) -> Finding:
    return Finding("" if is_so() else fault)


async def _check_upstreams(upstreams: Mapping[str, Check]) -> Finding:
    """Check that each upstream has an endpoint that answers. With several upstreams, the fault names those that have none."""
    found = dict(zip(upstreams, await asyncio.gather(*map(_finding, upstreams.values())), strict=True))
    if len(found) == 1:
        return next(iter(found.values()))
    failed = {name: finding for name, finding in found.items() if finding.fault}
    fault = " ".join(f"{name}: {finding.fault}" for name, finding in failed.items())
    return Finding(fault, away=all(finding.away for finding in failed.values()))


async def _check_upstream(check_key: Callable[[], Awaitable[KeyCheck]]) -> Finding:
    result = await check_key()
    return Finding(result.fault, away=result.was_accepted)


async def _check_state(state: State) -> Finding:
    health = await state.check()
    if health.errors:
        return Finding(" ".join(health.errors), health.warnings)
    refused = await state.ability.check()
    return Finding(refused, health.warnings, away=bool(refused))


# -- measurements --------------------------------------------------------------------------------------------------------


def monitoring(state: State | None, upstreams: Mapping[str, Check]) -> AbstractAsyncContextManager[None]:
    """Record metrics of the event loop, the queue, Redis and the upstreams periodically until the context exits.

    If `state` is None, the queue and Redis are not measured. `upstreams` are the checks of the upstreams by name.
    """
    measuring = [_measure_lag(), *(_measure_upstream(name, check) for name, check in upstreams.items())]
    if state is not None:
        measuring.append(_measure_state(state))
    return in_background(*measuring)


async def _measure_state(state: State) -> None:
    while True:
        try:
            await state.inspect()  # also records the memory
            await state.ability.check()  # logs what Redis refuses
            jobs, seconds = await state.queue.backlog()
            QUEUE_DEPTH.set(jobs)
            QUEUE_AGE.set(seconds)
            files, seconds = await state.ingestion_queue.backlog()
            INGESTION_QUEUE_DEPTH.set(files)
            INGESTION_QUEUE_AGE.set(seconds)
        except StateUnavailable as error:  # the state has counted the failure
            logger.debug("could not measure Redis: %s", error.message)
        await asyncio.sleep(INTERVAL)


async def _measure_upstream(name: str, check: Check) -> None:
    while True:
        UPSTREAM_UP.set(int(not (await _finding(check)).fault), {"upstream": name})
        await asyncio.sleep(INTERVAL)


async def _measure_lag() -> None:
    """Record how late a timer fires. All other tasks of this process are delayed by the same time."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL
        await asyncio.sleep(LAG_INTERVAL)
        EVENT_LOOP_LAG.record(max(0.0, loop.time() - due), {})
