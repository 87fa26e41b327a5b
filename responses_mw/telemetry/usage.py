"""Usage by owner, counted by this process and not yet written to Redis. There are too many owners for metric labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from itertools import islice
from typing import Any

MAX_OWNERS = 10_000
"""Maximum number of owners that are counted separately. All others are counted as ``OTHERS``."""
OTHERS = "_OTHER"


@dataclass(slots=True)
class OwnerUsage:
    """The number of an owner's responses and of their tokens. Cached answers count without tokens."""

    responses: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    """Input tokens that the upstream had cached. They are included in ``input_tokens``."""
    output_tokens: int = 0

    def count(self, usage: Mapping[str, Any]) -> None:
        """Add one response with this ``usage``."""
        self.responses += 1
        if usage.get("cache"):
            return  # its tokens were counted when the answer was made
        self.input_tokens += usage.get("input_tokens", 0)
        self.output_tokens += usage.get("output_tokens", 0)
        self.cached_tokens += (usage.get("input_tokens_details") or {}).get("cached_tokens", 0)

    def values(self) -> tuple[int, ...]:
        return astuple(self)


class UsageMeter:
    """Counts usage for the whole process, like the metrics."""

    def __init__(self) -> None:
        self._owners: dict[str, OwnerUsage] = {}

    def count(self, owner: str, usage: Mapping[str, Any]) -> None:
        """Count one response with this ``usage``."""
        if owner not in self._owners and len(self._owners) >= MAX_OWNERS:
            owner = OTHERS
        self._owners.setdefault(owner, OwnerUsage()).count(usage)

    def take(self, maximum: int = MAX_OWNERS) -> dict[str, OwnerUsage]:
        """Remove and return the counts of up to ``maximum`` owners."""
        taken = dict(islice(self._owners.items(), maximum))
        for owner in taken:
            del self._owners[owner]
        return taken


USAGE = UsageMeter()
