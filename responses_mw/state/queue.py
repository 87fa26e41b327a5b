"""The queue of background responses: whose turn is next, and who has which job. The truth about a job is in its record."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from .keys import Partition
from .scripts import script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .client import Client
    from .limits import Usage

__all__ = ["Queue"]

_RESERVE, _READY, _CLAIM = script("queue_reserve"), script("queue_ready"), script("queue_claim")
_RENEW, _DROP, _RESTORE = script("queue_renew"), script("queue_drop"), script("queue_restore")


class Queue:
    """Fair between owners within each of its ``partitions``; a job is the id of a response. Raises StateUnavailable."""

    def __init__(self, client: Client, usage: Usage, *, partitions: int) -> None:
        self._client = client
        self._usage = usage
        self.partitions = [Partition(number) for number in range(partitions)]

    async def reserve(self, job: str, owner: str, seconds: float) -> None:
        """Enters a job before its record is written. Not ready in so many seconds, a claimer looks what became of it."""
        await self._client.script(_RESERVE, [self._partition(job).ready], [job, owner, _ms(seconds)])

    async def ready(self, job: str, *, first: bool = False) -> None:
        """Has the job wait for a worker; ``first``: before all others."""
        await self._client.script(_READY, [self._partition(job).ready], [job, "1" if first else ""])

    async def restore(self, job: str, owner: str) -> bool:
        """Has a job wait for a worker if it is nowhere in the queue: a fail-over lost it, or ``partitions`` was changed.

        For a job that by its record waits; one that has ended meanwhile is dropped by who claims it. Whether it was lost.
        """
        entered: int = await self._client.script(_RESTORE, [self._partition(job).ready], [job, owner])
        return entered == 1

    async def claim(self, partition: Partition, lease: float, *, sweep: bool, fresh: bool = True) -> str | None:
        """Leases a job for so many seconds: with ``sweep`` one whose lease is over, else (if ``fresh``) the next in turn. None:
        there is none."""
        args = [_ms(lease), "1" if sweep else "", "1" if fresh else ""]
        job: bytes | None = await self._client.script(_CLAIM, [partition.ready], args)
        return job.decode() if job is not None else None

    async def renew(self, jobs: Sequence[str], lease: float) -> None:
        """Leases the jobs for so many seconds from now."""
        by_partition: dict[str, list[str]] = {}
        for job in jobs:
            by_partition.setdefault(self._partition(job).ready, []).append(job)
        await self._client.scripts(_RENEW, [([ready], [_ms(lease), *some]) for ready, some in by_partition.items()])

    async def drop(self, job: str) -> None:
        """Forgets a job that has ended; it counts for its owner's limit no more."""
        owner: bytes | None = await self._client.script(_DROP, [self._partition(job).ready], [job])
        if owner is not None:
            await self._usage.leave("background", owner.decode(), job)

    def _partition(self, job: str) -> Partition:
        return self.partitions[crc32(job.encode()) % len(self.partitions)]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
