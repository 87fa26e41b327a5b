"""When a job is tried again after an error of the upstream."""

from __future__ import annotations

import asyncio
import logging
import random

from ..errors import UpstreamBrokeOff, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from ..telemetry import kind_of_error

logger = logging.getLogger(__name__)

FIRST_DELAY, MAX_DELAY = 1.0, 30.0
"""Seconds until a job's first retry; each further one takes twice as long, up to the maximum."""
FAILURES = 3
"""Errors in a row that open the circuit."""


def reason(error: Exception | None) -> str | None:
    """Return why a job that failed with `error` should be tried again; None if it should not."""
    if not isinstance(error, UpstreamError):
        return None
    has_broken = isinstance(error, UpstreamBrokeOff | UpstreamUnreachable)
    if error.is_overload:
        return "unreachable" if has_broken or isinstance(error, UpstreamTimeout) else str(error.status)
    if has_broken:
        return "broken"
    # An upstream that hangs after it got the request is not asked to do it twice.
    return "504" if error.status == 504 and not isinstance(error, UpstreamTimeout) else None


def delay(retries: int, error: UpstreamError) -> float:
    """Return the seconds until the next try: exponential with jitter, but at least what the upstream asked for."""
    backoff = min(MAX_DELAY, FIRST_DELAY * (1 << min(retries, 16)))
    return max(backoff * random.uniform(0.5, 1), error.retry_after or 0.0)  # noqa: S311 (jitter)


class CircuitBreaker:
    """Keeps the jobs of this process from an upstream that is away.

    `FAILURES` in a row open the circuit. From then on, one job per pause probes the upstream; the pause doubles with each probe
    that fails. The first success closes the circuit. Times are those of the event loop.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._opened = 0.0
        self._next_probe = 0.0
        self._pause = FIRST_DELAY

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES

    @property
    def admits(self) -> bool:
        """Whether a job may begin now."""
        return not self.is_open or asyncio.get_running_loop().time() >= self._next_probe

    def begin(self) -> None:
        """Record that a job begins."""
        self._next_probe = asyncio.get_running_loop().time() + self._pause

    def succeed(self) -> None:
        """Record that the upstream serves requests."""
        if self.is_open:
            logger.info("the upstream is back: background responses run again")
        self._failures, self._pause = 0, FIRST_DELAY

    def fail(self, began: float, error: UpstreamError) -> None:
        """Record that the upstream was away for a job that `began` at that time."""
        was_open, now = self.is_open, asyncio.get_running_loop().time()
        self._failures += 1
        if not self.is_open or (was_open and began < self._opened):
            return  # a job from before the circuit opened says nothing new
        if was_open:
            self._pause = min(MAX_DELAY, 2 * self._pause)
        else:
            logger.warning("the upstream is away, background responses wait: %s", kind_of_error(error))
        self._opened = now
        self._next_probe = now + max(self._pause, min(MAX_DELAY, error.retry_after or 0.0))
