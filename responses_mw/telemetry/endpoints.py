"""Metrics of the endpoints of upstreams.

The series of an endpoint are removed when the DNS no longer returns it. At most `MAX_ENDPOINTS` endpoints have their own series
at a time, and all others share one. If processes share their metrics, the series of removed endpoints remain.
"""

from __future__ import annotations

from collections import Counter
from typing import get_args

from .instruments import OTHER, is_shared
from .metrics import (
    AFFINITY,
    ENDPOINT_REQUESTS,
    ENDPOINTS_ACTIVE,
    ENDPOINTS_EJECTED,
    FAIL_OVERS,
    UPSTREAM_EJECTIONS,
    Affinity,
    EndpointOutcome,
)

MAX_ENDPOINTS = 128

_OUTCOMES: tuple[EndpointOutcome, ...] = get_args(EndpointOutcome)
_OVERLOADED = frozenset({429, 502, 503, 504})
USED: Counter[tuple[str, str]] = Counter()
"""How many endpoints of this process have a pair of labels: the upstream and the address."""


def outcome_of(status: int) -> EndpointOutcome:
    """Return the outcome of a request that was answered with `status`."""
    if status < 400:
        return "success"
    if status in _OVERLOADED:
        return "overloaded"
    return "client_error" if status < 500 else "server_error"


class EndpointMeter:
    """Counts what happens at one endpoint. `close` removes its series."""

    __slots__ = ("_active", "_ejected", "_ejections", "_is_ejected", "_key", "_requests")

    def __init__(self, upstream: str, address: str) -> None:
        """`address` is the host and port."""
        key = upstream, address
        is_known = key in USED or len(USED) < MAX_ENDPOINTS
        self._key = key = key if is_known else (OTHER, OTHER)
        USED[key] += is_known
        labels = {"upstream": key[0], "endpoint": key[1]}
        self._requests = {one: ENDPOINT_REQUESTS.series({**labels, "outcome": one}) for one in _OUTCOMES}
        self._active = ENDPOINTS_ACTIVE.series(labels)
        self._ejections = UPSTREAM_EJECTIONS.series(labels)
        self._ejected = ENDPOINTS_EJECTED.series(labels)
        self._is_ejected = False

    def begin(self) -> None:
        """Record that a request begins."""
        self._active.inc()

    def end(self, outcome: EndpointOutcome) -> None:
        """Record that a request ends."""
        self._active.inc(-1)
        self._requests[outcome].inc()

    def eject(self) -> None:
        """Record that the endpoint is ejected."""
        self._is_ejected = True
        self._ejections.inc()
        self._ejected.inc()

    def readmit(self) -> None:
        """Record that the endpoint is no longer ejected."""
        if self._is_ejected:
            self._is_ejected = False
            self._ejected.inc(-1)

    def close(self) -> None:
        """Remove the series of the endpoint, unless other endpoints have the same labels."""
        self.readmit()
        if self._key[1] == OTHER or is_shared():
            return
        USED[self._key] -= 1
        if USED[self._key] > 0:
            return
        del USED[self._key]
        labels = {"upstream": self._key[0], "endpoint": self._key[1]}
        for outcome in _OUTCOMES:
            ENDPOINT_REQUESTS.forget({**labels, "outcome": outcome})
        for metric in (ENDPOINTS_ACTIVE, UPSTREAM_EJECTIONS, ENDPOINTS_EJECTED):
            metric.forget(labels)


def start_series(upstream: str) -> None:
    """Create the series of `upstream`, so that `rate()` sees their first increase."""
    for result in get_args(Affinity):
        AFFINITY.add(0, {"upstream": upstream, "result": result})
    for to in ("endpoint", "fallback"):
        FAIL_OVERS.add(0, {"upstream": upstream, "to": to})


def count_affinity(upstream: str, result: Affinity) -> None:
    """Count a turn by whether it went to the endpoint that its session prefers."""
    AFFINITY.add(1, {"upstream": upstream, "result": result})


def count_fail_over(upstream: str, to: str) -> None:
    """Count a request that `upstream` did not begin to answer, and that goes to another `endpoint` or to a `fallback`."""
    FAIL_OVERS.add(1, {"upstream": upstream, "to": to})
