"""Delays between the attempts of a loop."""

from __future__ import annotations

import asyncio
import math
import random


class Backoff:
    """Delays in seconds that grow with each attempt: `first`, then `factor` times the previous one, up to `maximum`.

    With `jitter`, a delay is longer by a random share of itself up to `jitter`, so that clients do not return all at once.
    """

    def __init__(self, first: float, maximum: float = math.inf, *, factor: float = 2.0, jitter: float = 0.0) -> None:
        self._first = self._next = first
        self._maximum = maximum
        self._factor = factor
        self._jitter = jitter

    def next(self, minimum: float = 0.0) -> float:
        """Return the next delay, but at least `minimum`."""
        delay = max(minimum, self._next)
        self._next = min(self._factor * self._next, self._maximum)
        return delay * random.uniform(1, 1 + self._jitter)  # noqa: S311 (jitter)

    def reset(self) -> None:
        """Begin again with the first delay, because an attempt succeeded."""
        self._next = self._first

    async def wait(self) -> None:
        """Sleep for the next delay."""
        await asyncio.sleep(self.next())
