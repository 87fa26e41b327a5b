"""Record when a response waits for the model, for tools and for Redis. The inspector shows this as a timeline."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_PHASES = 40
"""Maximum number of turns and tool calls of a response that are recorded."""


class Phase(NamedTuple):
    """A turn (`turn`), a summary of the history (`summary`) or the call of a tool (its kind)."""

    kind: str
    began: float  # as `time.perf_counter()`
    seconds: float


@dataclass(slots=True)
class Phases:
    """The phases of one request in the order of their ends, and its round trips to Redis."""

    listed: list[Phase] = field(default_factory=list)
    round_trips: int = 0
    redis_seconds: float = 0.0

    def add(self, kind: str, began: float) -> None:
        """Add a phase that ends now."""
        if len(self.listed) < MAX_PHASES:
            self.listed.append(Phase(kind, began, time.perf_counter() - began))

    def add_round_trip(self, seconds: float) -> None:
        self.round_trips += 1
        self.redis_seconds += seconds

    def since(self, started: float) -> list[tuple[str, int, int]] | None:
        """Return the kind, start and duration in milliseconds of each phase. Starts are relative to `started`."""
        return [(one.kind, round(1000 * (one.began - started)), round(1000 * one.seconds)) for one in self.listed] or None

    def redis(self) -> tuple[int, int] | None:
        """Return the number of round trips and their total duration in milliseconds, or None if there were none."""
        return (self.round_trips, round(1000 * self.redis_seconds)) if self.round_trips else None
