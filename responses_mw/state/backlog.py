"""How much waits in the queue of background responses, for those who watch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .scripts import script

if TYPE_CHECKING:
    from .client import Client
    from .queue import Queue

__all__ = ["Backlog", "backlog"]

_DEPTH = script("queue_depth")


@dataclass(frozen=True, slots=True)
class Backlog:
    """The number of ``jobs`` that wait, and the ``seconds`` that the oldest of them has waited."""

    jobs: int
    seconds: float


async def backlog(client: Client, queue: Queue) -> Backlog:
    """Of all partitions. Raises StateUnavailable."""
    replies = await client.scripts(_DEPTH, [([partition.ready], []) for partition in queue.partitions])
    return Backlog(sum(jobs for jobs, _ in replies), max(waited for _, waited in replies) / 1000)
