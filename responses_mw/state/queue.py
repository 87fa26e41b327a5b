"""The queue of background responses. It is only a hint: a job's record is authoritative."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from .errors import Damaged
from .schema import Partition
from .scripts import script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .client import Call, Client
    from .limits import Usage

__all__ = ["Backlog", "Queue"]

_RESERVE, _READY, _CLAIM = script("queue_reserve"), script("queue_ready"), script("queue_claim")
_RENEW, _DROP, _RESTORE = script("queue_renew"), script("queue_drop"), script("queue_restore")
_DEPTH = script("queue_depth")


@dataclass(frozen=True, slots=True)
class Backlog:
    """The number of waiting ``jobs``, and for how many ``seconds`` the oldest has waited."""

    jobs: int
    seconds: float


class Queue:
    """A queue that is fair between owners within each of its ``partitions``. A job is the id of a response.

    Every method raises StateUnavailable; ``reserve``, ``restore`` and ``claim`` raise Damaged for a damaged partition.
    """

    def __init__(self, client: Client, usage: Usage, *, partitions: int) -> None:
        self._client = client
        self._usage = usage
        self.partitions = [Partition(number) for number in range(partitions)]

    async def reserve(self, job: str, owner: str, seconds: float) -> None:
        """Add a job before its record is written. If it is not ready within ``seconds``, a worker claims and checks it."""
        await self._client.script(_RESERVE, [self._partition(job).ready], [job, owner, _ms(seconds)])

    async def ready(self, job: str, *, first: bool = False) -> None:
        """Put the job in the queue; with ``first``, ahead of all others.

        If the partition is damaged, do nothing: the job becomes available again when its lease expires.
        """
        with suppress(Damaged):
            await self._client.script(_READY, [self._partition(job).ready], [job, "1" if first else ""])

    async def restore(self, job: str, owner: str) -> bool:
        """Queue a job again if a failover, or a change of ``partitions``, lost it; return whether it was lost.

        Call this for a job whose record says that it is waiting. If it has ended since, the worker that claims it drops it.
        """
        entered: int = await self._client.script(_RESTORE, [self._partition(job).ready], [job, owner])
        return entered == 1

    async def claim(self, partition: Partition, lease: float, *, sweep: bool, fresh: bool = True) -> str | None:
        """Lease a job for ``lease`` seconds and return it; None if there is none.

        With ``sweep``, take a job whose lease has expired, if there is one. Otherwise, with ``fresh``, take the next in turn.
        """
        args = [_ms(lease), "1" if sweep else "", "1" if fresh else ""]
        job: bytes | None = await self._client.script(_CLAIM, [partition.ready], args)
        return job.decode() if job is not None else None

    async def renew(self, jobs: Sequence[str], lease: float) -> None:
        """Extend the leases of jobs to ``lease`` seconds from now."""
        by_partition: dict[str, list[str]] = {}
        for job in jobs:
            by_partition.setdefault(self._partition(job).ready, []).append(job)
        calls: list[Call] = [([ready], [_ms(lease), *some]) for ready, some in by_partition.items()]
        await self._client.scripts(_RENEW, calls, contained=True)

    async def drop(self, job: str) -> None:
        """Remove a job that has ended, and release it from its owner's usage.

        If the partition is damaged, do nothing: the worker that claims the job next removes it.
        """
        owner: bytes | None = None
        with suppress(Damaged):
            owner = await self._client.script(_DROP, [self._partition(job).ready], [job])
        if owner is not None:
            await self._usage.leave("background", owner.decode(), job)

    async def backlog(self) -> Backlog:
        """Return the backlog of all partitions together, without damaged ones."""
        asked: list[Call] = [([partition.ready], []) for partition in self.partitions]
        told = await self._client.scripts(_DEPTH, asked, contained=True)
        replies = [reply for reply in told if not isinstance(reply, Damaged)]
        return Backlog(sum(jobs for jobs, _ in replies), max((waited for _, waited in replies), default=0) / 1000)

    def _partition(self, job: str) -> Partition:
        return self.partitions[crc32(job.encode()) % len(self.partitions)]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
