"""Queue jobs that wait for a worker: background responses, and files to ingest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Self

from ..lua import load
from .client import Client
from .errors import Damaged
from .schema import (
    INGESTION_QUEUE,
    OLD_QUEUES,
    QUEUE,
    milliseconds,
)
from .usage import Usage

_RESERVE, _READY, _CLAIM, _RENEW_LEASES, _DROP, _RESTORE, _DEPTH, _LIST = load(
    "state", *(f"queue_{name}" for name in ("reserve", "ready", "claim", "renew", "drop", "restore", "depth", "list"))
)

OLD_PAGE = 100  # maximum number of jobs that are read at a time from the queue of an older release
OLD_TTL = 24 * 3600 * 1000  # lifetime of the keys of such a queue in ms
OLD_LEASE = 5000  # time in ms after which a leased job of such a queue may be claimed
FOREIGN = "an entry is not the id of a response"
_AT_ONCE = 500  # jobs that are added in one round trip


class Queue:
    """A queue of jobs that is fair between owners. A job is a text, such as the id of a response.

    Every method raises StateUnavailable if Redis fails. If the queue is damaged, `reserve`, `restore`, `claim` and `backlog`
    raise Damaged.
    """

    foreign = "an entry is not text"

    def __init__(self, client: Client, key: str) -> None:
        """`key` is that of the waiting jobs. The scripts derive the other keys."""
        self._client = client
        self._key = key

    @property
    def events(self) -> str:
        """The channel with a message for each job that becomes available."""
        return self._key.replace(":ready", ":ev")

    async def reserve(self, job: str, owner: str, seconds: float) -> None:
        """Add a job whose record is not written yet. If `ready` is not called within `seconds`, a worker claims the job."""
        await self._client.script(_RESERVE, [self._key], [job, owner, milliseconds(seconds)])

    async def ready(self, job: str, *, first: bool = False) -> None:
        """Make a reserved or claimed job available to workers in its owner's turn or, with `first`, before all other jobs."""
        with suppress(Damaged):  # the job becomes available when its lease expires
            await self._client.script(_READY, [self._key], [job, "1" if first else ""])

    async def restore(self, job: str, owner: str) -> bool:
        """Add a waiting job if a failover has removed it from the queue. Return whether the job was missing."""
        return bool(await self._client.script(_RESTORE, [self._key], [job, owner]))

    async def claim(self, lease: float, *, sweep: bool, waiting: bool = True) -> str | None:
        """Lease the next job for `lease` seconds and return it, or return None if no job is available.

        If `sweep` is true, jobs with an expired lease come first. Otherwise, such jobs are not available. If `waiting` is
        false, no other jobs are available.
        """
        job = await self._client.script(
            _CLAIM, [self._key], [milliseconds(lease), "1" if sweep else "", "1" if waiting else ""]
        )
        try:
            return None if job is None else str(job, "utf-8")
        except UnicodeDecodeError:
            await self._client.script(_DROP, [self._key], [job])
            raise self._client.damage(self._key, self.foreign) from None

    async def renew(self, jobs: Sequence[str], lease: float) -> None:
        """Extend the leases of jobs to `lease` seconds from now."""
        with suppress(Damaged):
            await self._client.script(_RENEW_LEASES, [self._key], [milliseconds(lease), *jobs])

    async def drop(self, job: str) -> str | None:
        """Remove a job from the queue, and return its owner, or None if it is not in the queue."""
        owner: bytes | None = None
        with suppress(Damaged):  # the worker that claims the job next removes it
            owner = await self._client.script(_DROP, [self._key], [job])
        return owner.decode() if owner is not None else None

    async def backlog(self) -> tuple[int, float]:
        """Return how many jobs a worker could claim now, and for how many seconds the oldest of them has waited."""
        jobs, waited = await self._client.script(_DEPTH, [self._key])
        return jobs, waited / 1000


class ResponseQueue(Queue):
    """The queue of background responses. A job is the id of a response."""

    foreign = FOREIGN

    def __init__(self, client: Client, usage: Usage) -> None:
        super().__init__(client, QUEUE)
        self._usage = usage

    async def take_over(self) -> int:
        """Move all jobs from the queues of older releases to this queue, and return their number. The old keys expire.

        A job that a worker of an older release still runs stays with this worker, because its record is leased.
        """
        moved = 0
        for old in OLD_QUEUES:
            found: list[bytes] = [b""]
            while found:
                is_waiting, *found = await self._client.script(_LIST, [old], [OLD_PAGE, OLD_TTL])
                for job, owner in zip(found[::2], found[1::2], strict=True):
                    # Add the job before it is removed. The record of a leased job may not be written yet.
                    if is_waiting:
                        await self._client.script(_RESTORE, [QUEUE], [job, owner])
                    else:
                        await self._client.script(_RESERVE, [QUEUE], [job, owner, OLD_LEASE])
                    await self._client.script(_DROP, [old], [job])
                moved += len(found) // 2
        return moved

    async def drop(self, job: str) -> str | None:
        """Remove a job from the queue, and from its owner's count of background responses."""
        owner = await super().drop(job)
        if owner is not None:
            await self._usage.leave("background", owner, job)
        return owner


class IngestionJob(NamedTuple):
    """A file to add to a vector store. The `generation` distinguishes requests to add the same file."""

    owner: str
    store_id: str
    file_id: str
    generation: str

    @property
    def name(self) -> str:
        return ":".join(self)

    @classmethod
    def of(cls, name: str) -> Self:
        """Raises ValueError if `name` is not that of a job."""
        owner, store_id, file_id, generation = name.split(":")
        return cls(owner, store_id, file_id, generation)


class IngestionQueue(Queue):
    """The queue of files to ingest. A job is the name of an `IngestionJob`."""

    def __init__(self, client: Client) -> None:
        super().__init__(client, INGESTION_QUEUE)
        self._attempts = self._key.replace(":ready", ":attempts")

    async def enqueue(self, jobs: Sequence[IngestionJob]) -> None:
        """Add jobs. Those that are in the queue already keep their turns."""
        for start in range(0, len(jobs), _AT_ONCE):
            await self._client.scripts(
                _RESTORE, [([self._key], [job.name, job.owner]) for job in jobs[start : start + _AT_ONCE]]
            )

    async def waiting(self, owner: str) -> int:
        """Return how many jobs of an owner wait."""
        return int(await self._client.command("ZCARD", self._key.replace(":ready", f":turns:{owner}")))

    async def count_attempt(self, job: str, number: int = 1) -> int:
        """Add `number` to the attempts of a claimed job, and return their new number."""
        return int(await self._client.command("HINCRBY", self._attempts, job, number))

    async def count_retry(self, job: str) -> int:
        """Count a retry of a claimed job, and return their number."""
        return await self.count_attempt(_retries(job))

    async def drop(self, job: str) -> str | None:
        """Remove a job from the queue, with its numbers of attempts and retries."""
        await self._client.command("HDEL", self._attempts, job, _retries(job))
        return await super().drop(job)


def _retries(job: str) -> str:
    return f"{job}:retries"
