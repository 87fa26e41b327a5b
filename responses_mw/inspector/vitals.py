"""Measure the queue and Redis, and repeat the readiness checks, periodically for the overview."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from itertools import count
from typing import NamedTuple, Protocol

from ..state import State, StateUnavailable
from ..state.schema import QUEUE
from ..tasks import in_background

INTERVAL = 10.0
"""Seconds between measurements."""
CHECK_EVERY = 3
"""Number of measurements after which the checks are repeated. They send requests to the upstream."""
MAX_SAMPLES = 360
"""Number of measurements to keep: those of the last hour."""
MAX_START_CHECKS = 10
"""Maximum number of rounds of checks at the start, if some fail."""


class Finding(Protocol):
    """The result of a check (see `asgi.admin.Finding`)."""

    @property
    def fault(self) -> str: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...


Checks = Mapping[str, Callable[[], Awaitable[Finding]]]


class Sample(NamedTuple):
    """A measurement. `latency` is that of a round trip to Redis, and `age` that of the oldest waiting job, in seconds."""

    time: float
    latency: float
    age: float


class Vitals:
    """The measurements by this process in the last hour, and the latest results of its checks."""

    def __init__(self, state: State, checks: Checks) -> None:
        """`checks` must not raise errors."""
        self._state = state
        self._checks = checks
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self.findings: dict[str, Finding] = {}
        self.checked = 0.0
        """The time of the latest checks."""

    def watching(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which measurements and checks are repeated."""
        return in_background(self._watch())

    async def _start(self) -> None:
        """Check every second until all checks succeed, as this begins before the server listens."""
        for _ in range(MAX_START_CHECKS):
            await self.check()
            if not any(found.fault for found in self.findings.values()):
                break
            await asyncio.sleep(1)

    async def _watch(self) -> None:
        await self.measure()
        await self._start()
        for number in count(1):
            await asyncio.sleep(INTERVAL)
            await self.measure()
            if number % CHECK_EVERY == 0:
                await self.check()

    async def measure(self) -> None:
        """Add a sample, unless Redis fails."""
        try:
            _, age = await self._state.queue.backlog()  # may connect first
            began = time.perf_counter()
            await self._state.client.command("ZCARD", QUEUE)
        except StateUnavailable:
            return
        self.samples.append(Sample(time.time(), time.perf_counter() - began, age))

    async def check(self) -> None:
        """Run all checks, and store their results."""
        results = await asyncio.gather(*(check() for check in self._checks.values()))
        self.findings, self.checked = dict(zip(self._checks, results, strict=True)), time.time()
