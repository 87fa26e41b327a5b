"""The endpoints of one upstream: choose one for each request, and eject those that fail.

An endpoint is chosen by model, then by health, then by the session's preference (see `affinity`). A request without a session
goes to the less loaded of two random endpoints.

- An ejected endpoint gets no requests. When its ejection ends, `watch` sends it a probe, so no caller's request is risked.
- Endpoints that answer with a status such as 503 are ejected only while at least half of the endpoints remain. Otherwise, an
  overload of the whole upstream would direct all requests to its last endpoint.
- If all endpoints are ejected, they are tried in the order in which their ejections end. The only endpoint of an upstream
  therefore always gets requests. Its ejection only pauses background responses.
- A connection timeout may be the fault of this process, if it is busy. Only the second one in a row ejects an endpoint.
- Unless `watch` runs, no endpoint is ejected.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import httpx

from ..network import failure_reason, is_shortage
from ..protocol.dialects import DIALECTS, Dialect
from ..settings.upstreams import DEFAULT
from ..telemetry.endpoints import outcome_of, start_series
from ..telemetry.metrics import EndpointOutcome
from . import affinity
from .discovery import Address
from .endpoint import Endpoint

UNAVAILABLE = frozenset({502, 503, 504})
"""Statuses with which a gateway reports that the server behind it is unavailable."""
MAX_CONNECT_TIMEOUTS = 2
"""Number of consecutive connection timeouts after which an endpoint is ejected."""
PROBE_INTERVAL = 0.25
"""Seconds between checks of the ejected endpoints, while there are any."""
PROBE_TIMEOUT = 2.0


class Wanted(NamedTuple):
    """Requirements of a request for its endpoint. If no endpoint meets them, any endpoint may get the request."""

    model: str | None = None
    """The model that the endpoint must serve."""
    dialect: Dialect | None = None
    """The dialect of the request's body."""
    only: Endpoint | None = None
    """The only endpoint that may get the request."""


ANY = Wanted()


class Pool:
    """The endpoints of an upstream."""

    def __init__(self, dialect: str = "auto", upstream: str = DEFAULT) -> None:
        """`dialect` is the name of the dialect of all endpoints, or `auto` to detect it. `upstream` is a label in metrics."""
        self.upstream = upstream
        start_series(upstream)
        self._dialect = DIALECTS.get(dialect)
        self._is_watched = False
        self._ejection = asyncio.Event()
        self.endpoints: tuple[Endpoint, ...] = ()

    @classmethod
    def of(cls, url: str, dialect: str = "auto", upstream: str = DEFAULT) -> Pool:
        """Return a pool with a single endpoint at `url`."""
        pool = cls(dialect, upstream)
        pool.update([Address(url, httpx.URL(url).netloc.decode(), "")])
        return pool

    def update(self, addresses: Sequence[Address]) -> list[Endpoint]:
        """Replace the addresses, and return the endpoints that were removed. The other endpoints keep their state."""
        known = {endpoint.address: endpoint for endpoint in self.endpoints}
        new = (known.get(address) or Endpoint(address, self._dialect, self.upstream) for address in addresses)
        self.endpoints = tuple(new)
        removed = [endpoint for address, endpoint in known.items() if address not in addresses]
        for endpoint in removed:
            endpoint.meter.close()
        return removed

    def close(self) -> None:
        """Remove the metrics of the endpoints."""
        for endpoint in self.endpoints:
            endpoint.meter.close()

    def facts(self, upstream: str) -> list[dict[str, Any]]:
        """Return the state of each endpoint for the inspector. `upstream` is the name that it displays."""
        return [
            {"upstream": upstream, "url": one.address.url, "ejected": one.is_ejected, "in_flight": one.in_flight}
            for one in self.endpoints
        ]

    @property
    def is_available(self) -> bool:
        """Whether at least one endpoint is not ejected."""
        return any(not endpoint.is_ejected for endpoint in self.endpoints)

    def candidates(self, wanted: Wanted = ANY) -> Sequence[Endpoint]:
        """Return the endpoints that may get a request. If all are ejected, return them in the order in which to try them."""
        if wanted.only is not None:
            return (wanted.only,)
        found: Sequence[Endpoint] = self.endpoints
        if len(found) < 2:
            return found
        if wanted.model is not None:
            found = [one for one in found if one.serves(wanted.model)] or found
        if wanted.dialect is not None:
            found = [one for one in found if one.dialect is None or one.dialect is wanted.dialect] or found
        return [one for one in found if not one.is_ejected] or sorted(found, key=lambda one: one.readmitted_from)

    def choose(self, session: str = "", wanted: Wanted = ANY) -> Endpoint | None:
        """Return the endpoint that would get a request now, or None if there are no endpoints (see `choose`)."""
        candidates = self.candidates(wanted)
        return choose(candidates, session) if candidates else None

    def record_status(self, endpoint: Endpoint, status: int) -> None:
        """Record the status of a response of `endpoint`."""
        endpoint.connect_timeouts = 0
        if status in UNAVAILABLE:
            self.fail(endpoint, f"it answers with status {status}", is_unreachable=False)
        elif endpoint.is_ejected:
            endpoint.succeed()

    def record_error(self, endpoint: Endpoint, error: BaseException) -> None:
        """Record the error of a request to `endpoint` that got no answer or an incomplete one."""
        if not isinstance(error, httpx.TransportError) or is_shortage(error) or isinstance(error, httpx.LocalProtocolError):
            return  # not the fault of the endpoint
        if isinstance(error, httpx.ConnectTimeout):
            endpoint.connect_timeouts += 1
            if endpoint.connect_timeouts < MAX_CONNECT_TIMEOUTS:
                return
        self.fail(endpoint, failure_reason(error) or type(error).__name__, is_unreachable=True)

    def fail(self, endpoint: Endpoint, reason: str, *, is_unreachable: bool) -> None:
        """Record a failure of `endpoint`, and eject it if allowed.

        Set `is_unreachable` if the connection failed or was lost.
        """
        if not self._is_watched:
            return
        others = sum(not one.is_ejected for one in self.endpoints if one is not endpoint)
        if is_unreachable or endpoint.is_ejected or 2 * others >= len(self.endpoints) or not others:
            endpoint.fail(reason)
            self._ejection.set()

    async def watch(self, probe: Callable[[Endpoint], Awaitable[bool]]) -> None:
        """Probe endpoints when their ejections end, until cancelled. `probe` returns whether an endpoint answers."""
        self._is_watched = True
        while True:
            await self._ejection.wait()
            while due := [one for one in self.endpoints if one.is_ejected]:
                now = time.monotonic()
                async with asyncio.TaskGroup() as group:
                    for endpoint in due:
                        if now >= endpoint.readmitted_from:
                            group.create_task(_probe(endpoint, probe))
                await asyncio.sleep(PROBE_INTERVAL)
            self._ejection.clear()


class Lease:
    """A request in flight at an endpoint. Release it once the answer has been read or abandoned."""

    __slots__ = ("_is_released", "_outcome", "_pool", "endpoint")

    def __init__(self, pool: Pool, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._pool = pool
        self._is_released = False
        self._outcome: EndpointOutcome = "cancelled"
        endpoint.in_flight += 1
        endpoint.meter.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.record_error(error)
        self.release()

    def record_status(self, status: int) -> None:
        """Record the status of the answer."""
        self._outcome = outcome_of(status)
        self._pool.record_status(self.endpoint, status)

    def record_error(self, error: BaseException) -> None:
        """Record that there was no answer, or an incomplete one."""
        if isinstance(error, Exception):
            self._outcome = "failed"
        self._pool.record_error(self.endpoint, error)

    def release(self) -> None:
        """End the request. Repeated calls do nothing."""
        if not self._is_released:
            self._is_released = True
            self.endpoint.in_flight -= 1
            self.endpoint.meter.end(self._outcome)


async def _probe(endpoint: Endpoint, probe: Callable[[Endpoint], Awaitable[bool]]) -> None:
    answers = False
    with suppress(TimeoutError):
        async with asyncio.timeout(PROBE_TIMEOUT):
            answers = await probe(endpoint)
    if answers:
        endpoint.succeed()
    else:
        endpoint.fail("it does not answer a probe")


def choose(candidates: Sequence[Endpoint], session: str, first: Endpoint | None = None) -> Endpoint:
    """Return the endpoint among `candidates` for a request. `session` is the key of its session, or "".

    `first` is the `favourite` of the session, if it is already known.
    """
    if len(candidates) == 1 or candidates[0].is_ejected:
        return candidates[0]
    if session:
        return preferred(candidates, session, first)
    return min(random.sample(candidates, 2), key=lambda one: one.in_flight)


def preferred(endpoints: Sequence[Endpoint], session: str, first: Endpoint | None = None) -> Endpoint:
    """Return the endpoint with the highest score for `session` among those that are not overloaded."""
    capacity = affinity.capacity(one.in_flight for one in endpoints)
    first = first or favourite(endpoints, session)
    if first.in_flight < capacity:
        return first
    return favourite([one for one in endpoints if one.in_flight < capacity], session)


def favourite(endpoints: Sequence[Endpoint], session: str) -> Endpoint:
    """Return the endpoint with the highest score for `session`, regardless of its load."""
    point, score = int(session[:16], 16), affinity.score
    return max(endpoints, key=lambda one: score(point, one.hash))
