"""Decides when to retry a job after an error of the upstream."""

from __future__ import annotations

import asyncio
import logging
import random

from ..errors import UpstreamBrokeOff, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from ..telemetry.context import kind_of_error

logger = logging.getLogger(__name__)

FIRST_DELAY, MAX_DELAY = 1.0, 30.0
"""Seconds until a job's first retry. The delay doubles with each retry, up to the maximum."""
TIMEOUT_FACTOR = 20
"""A job waits for the upstream this many times as long as a stream, `upstream.overload_timeout`."""
FAILURES = 3
"""Number of consecutive failures that open the circuit."""


def reason(error: Exception | None) -> str | None:
    """Return the reason to retry a job that failed with `error`; None if it should not be retried."""
    if not isinstance(error, UpstreamError):
        return None
    has_broken = isinstance(error, UpstreamBrokeOff | UpstreamUnreachable)
    if error.is_overload:
        return "unreachable" if has_broken or isinstance(error, UpstreamTimeout) else str(error.status)
    if has_broken:
        return "broken"
    # A request that the upstream received but did not answer in time is not sent again.
    return "504" if error.status == 504 and not isinstance(error, UpstreamTimeout) else None


def delay(retries: int, error: UpstreamError) -> float:
    """Return the seconds until the next retry: exponential with jitter, but at least as long as the upstream asked."""
    backoff = min(MAX_DELAY, FIRST_DELAY * (1 << min(retries, 16)))
    return max(backoff * random.uniform(0.5, 1), error.retry_after or 0.0)  # noqa: S311 (jitter)


class CircuitBreaker:
    """Stops the jobs of this process while the upstream is unavailable.

    `FAILURES` in a row open the circuit. From then on, one job per pause probes the upstream; the pause doubles with each probe
    that fails. The first success closes the circuit. Times are event loop times.
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
        """Record that a job begins. The next probe must wait for one pause."""
        self._next_probe = asyncio.get_running_loop().time() + self._pause

    def succeed(self) -> None:
        """Record that the upstream serves requests."""
        if self.is_open:
            logger.info("the upstream is available again: resuming background responses")
        self._failures, self._pause = 0, FIRST_DELAY

    def fail(self, began: float, error: UpstreamError) -> None:
        """Record that the upstream was unavailable for a job. `began` is the time when the job began."""
        was_open, now = self.is_open, asyncio.get_running_loop().time()
        self._failures += 1
        if not self.is_open or (was_open and began < self._opened):
            return  # a job from before the circuit opened says nothing new
        if was_open:
            self._pause = min(MAX_DELAY, 2 * self._pause)
        else:
            logger.warning("the upstream is unavailable, background responses are paused: %s", kind_of_error(error))
        self._opened = now
        self._next_probe = now + max(self._pause, min(MAX_DELAY, error.retry_after or 0.0))
