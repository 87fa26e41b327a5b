"""Decide whether and when a job is retried."""

from __future__ import annotations

import random

from ..errors import (
    UpstreamBrokeOff,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)

FIRST_DELAY, MAX_DELAY = 1.0, 30.0
"""Seconds until a job's first retry. The delay doubles with each retry, up to the maximum."""


def retry_reason(error: Exception | None) -> str | None:
    """Return why to retry a job that failed with `error`, such as `429` or `broken`, or None if it must not be retried."""
    if not isinstance(error, UpstreamError):
        return None
    has_broken = isinstance(error, UpstreamBrokeOff | UpstreamUnreachable)
    if error.is_overload:
        return "unreachable" if has_broken or isinstance(error, UpstreamTimeout) else str(error.status)
    if has_broken:
        return "broken"
    # A request that the upstream received but did not answer in time is not sent again.
    return "504" if error.status == 504 and not isinstance(error, UpstreamTimeout) else None


def retry_delay(retries: int, error: UpstreamError) -> float:
    """Return the delay of the next retry in seconds: exponential with jitter, but at least `error.retry_after`."""
    backoff = min(MAX_DELAY, FIRST_DELAY * (1 << min(retries, 16)))
    return max(backoff * random.uniform(0.5, 1), error.retry_after or 0.0)  # noqa: S311 (jitter)
