"""Usage of each owner that this process has counted and not yet written to Redis. Owners are too many for metric labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from itertools import islice
from typing import Any

MAX_OWNERS = 10_000
"""Maximum number of owners that are counted separately. Further ones share ``OTHERS``."""
OTHERS = "_OTHER"


@dataclass(slots=True)
class OwnerUsage:
    """The responses of an owner and their tokens. Answers of the cache have none."""

    responses: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    """Input tokens that the upstream had cached; they are among the input tokens."""
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
    """Counts for the whole process, as the metrics do."""

    def __init__(self) -> None:
        self._owners: dict[str, OwnerUsage] = {}

    def count(self, owner: str, usage: Mapping[str, Any]) -> None:
        """Count one response with this ``usage``."""
        if owner not in self._owners and len(self._owners) >= MAX_OWNERS:
            owner = OTHERS
        self._owners.setdefault(owner, OwnerUsage()).count(usage)

    def take(self, maximum: int = MAX_OWNERS) -> dict[str, OwnerUsage]:
        """Remove and return what was counted, of up to ``maximum`` owners."""
        taken = dict(islice(self._owners.items(), maximum))
        for owner in taken:
            del self._owners[owner]
        return taken


USAGE = UsageMeter()
