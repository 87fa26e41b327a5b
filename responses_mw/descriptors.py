"""File descriptors: how many this process may open, and the report that none are left."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

logger = logging.getLogger(__name__)

REPORT_INTERVAL = 60.0
"""Minimum number of seconds between two reports."""
_UNLIMITED = 1_000_000

_next_report = float("-inf")


def max_descriptors() -> int:
    """Return the maximum number of descriptors that this process may open."""
    with suppress(ImportError):
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return _UNLIMITED if soft == resource.RLIM_INFINITY else soft
    return _UNLIMITED


def report_shortage(victim: str) -> None:
    """Log as an error, at most once a minute, that `victim` failed because no descriptors are left."""
    global _next_report  # noqa: PLW0603 (the limit applies to the process)
    now = time.monotonic()
    if now >= _next_report:
        _next_report = now + REPORT_INTERVAL
        advice = "raise the limit (ulimit -n, LimitNOFILE), or add replicas"
        logger.error("%s failed: this process may open only %d files and connections; %s", victim, max_descriptors(), advice)
