"""List the jobs of background responses that wait or run, for the operator."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .client import Client, Value
from .errors import Missing
from .schema import OLD_QUEUES, QUEUE, response_address

_JOBS, _LEASES, _SINCE = (QUEUE.replace(":ready", f":{name}") for name in ("jobs", "leases", "since"))
MAX_COUNTED = 20_000
"""Number of jobs whose owners are counted."""
_SCANNED = 2000  # number of jobs whose owners are read at a time
_FIELDS = ("status", "worker", "token", "lease_until", "attempts", "retries", "continuations", "next_seq")


@dataclass(frozen=True, slots=True)
class JobFacts:
    """A job that waits or runs.

    state           `waiting` for a worker, `running`, `paused` until the next attempt, or `lost`: its worker does not report
    waited          seconds for which a waiting job has been in the queue
    worker          name of the worker that runs the job, or ""
    lease           seconds until the lease of the job expires, negative if it has expired
    attempt         number of the current attempt, or of attempts so far
    events          number of events in the log
    """

    id: str
    owner: str
    state: str
    waited: float = 0.0
    worker: str = ""
    lease: float = 0.0
    attempt: int = 0
    retries: int = 0
    continuations: int = 0
    events: int = 0


@dataclass(frozen=True, slots=True)
class JobList:
    """The jobs in the order in which they are claimed, after those that a worker has claimed.

    waiting, claimed   the numbers of all jobs
    jobs               the first jobs of each kind, or only those of the given owner
    owners             the number of jobs by owner, the largest first, from the first `MAX_COUNTED` jobs
    older              the numbers of jobs in the queues of older releases, which a worker has not taken over yet, by queue
    """

    waiting: int
    claimed: int
    jobs: list[JobFacts]
    owners: dict[str, int] = field(default_factory=dict)
    older: dict[str, int] = field(default_factory=dict)


async def list_jobs(client: Client, limit: int = 500, owner: str = "") -> JobList:
    """Return the jobs, up to `limit` that wait and up to `limit` that are claimed, or only those of `owner` among these.

    Raises StateUnavailable if Redis fails.
    """
    waiting, claimed, ready, leased, *older = await client.pipeline(
        [
            ("ZCARD", QUEUE),
            ("ZCARD", _LEASES),
            ("ZRANGE", QUEUE, 0, limit - 1),
            ("ZRANGE", _LEASES, 0, limit - 1, "WITHSCORES"),
            *(("ZCARD", old) for old in OLD_QUEUES),
        ]
    )
    owners = dict((await _count_owners(client)).most_common())
    left = {old.split("{")[1].split("}")[0]: count for old, count in zip(OLD_QUEUES, older, strict=True) if count}
    jobs = await _read_jobs(client, ready, _pairs(leased))
    return JobList(waiting, claimed, [job for job in jobs if not owner or job.owner == owner], owners, left)


async def _count_owners(client: Client) -> Counter[str]:
    counts, cursor, counted = Counter[str](), b"0", 0
    while counted < MAX_COUNTED:
        cursor, found = await client.command("HSCAN", _JOBS, cursor, "COUNT", _SCANNED)
        owners = _flat(found)[1::2]
        counts.update(owner.decode(errors="replace") for owner in owners)
        counted += len(owners)
        if int(cursor) == 0:
            break
    return counts


async def _read_jobs(client: Client, ready: Sequence[bytes], leases: dict[bytes, float]) -> list[JobFacts]:
    names: list[bytes] = [*leases, *ready]
    if not names:
        return []
    commands: list[tuple[Value, ...]] = [("HMGET", _JOBS, *names), ("ZMSCORE", _SINCE, *names)]
    owners, since = await client.pipeline(commands)
    records = await _records(client, [*leases])
    now = time.time() * 1000
    jobs = []
    for place, name in enumerate(names):
        job_id, owner = name.decode(errors="replace"), (owners[place] or b"").decode(errors="replace")
        if name in leases:
            jobs.append(_claimed(job_id, owner, leases[name] - now, records.get(name), now))
        else:
            waited = (now - float(since[place])) / 1000 if since[place] is not None else 0.0
            jobs.append(JobFacts(job_id, owner, "waiting", waited=max(0.0, waited)))
    return jobs


def _pairs(reply: Sequence[Any]) -> dict[bytes, float]:
    """Return members with their scores. RESP3 replies have pairs, RESP2 replies are flat."""
    flat = _flat(reply)
    return {name: float(score) for name, score in zip(flat[::2], flat[1::2], strict=True)}


def _flat(reply: Any) -> list[Any]:
    """Return the members of a reply in a row: a mapping, pairs, or a list that is flat already."""
    pairs = reply.items() if isinstance(reply, dict) else reply
    return [part for one in pairs for part in (one if isinstance(one, list | tuple) else [one])]


async def _records(client: Client, names: list[bytes]) -> dict[bytes, list[bytes | None]]:
    addresses = {}
    for name in names:
        try:
            addresses[name] = response_address(name.decode(errors="replace")).record
        except Missing:
            continue
    if not addresses:
        return {}
    replies = await client.pipeline([("HMGET", record, *_FIELDS) for record in addresses.values()])
    return dict(zip(addresses, replies, strict=True))


def _claimed(job_id: str, owner: str, queue_lease: float, record: list[bytes | None] | None, now: float) -> JobFacts:
    if record is None or record[0] is None:
        return JobFacts(job_id, owner, "lost" if queue_lease < 0 else "paused", lease=queue_lease / 1000)
    fields = dict(zip(_FIELDS, ((value or b"").decode(errors="replace") for value in record), strict=True))
    lease = _number(fields["lease_until"]) - now
    is_held = bool(fields["token"]) and lease > 0
    state = "running" if is_held else "paused" if queue_lease > 0 else "lost"
    return JobFacts(
        job_id,
        owner,
        state,
        worker=fields["worker"] if is_held else "",
        lease=(lease if is_held else queue_lease) / 1000,
        attempt=int(_number(fields["attempts"])),
        retries=int(_number(fields["retries"])),
        continuations=int(_number(fields["continuations"])),
        events=int(_number(fields["next_seq"])),
    )


def _number(text: str) -> float:
    try:
        return float(text or 0)
    except ValueError:  # a damaged record
        return 0.0
