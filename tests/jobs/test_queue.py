"""The queue of background responses: turns of the owners, leases and reservations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from responses_mw.ids import random_part
from responses_mw.state import Damaged, State, connect
from responses_mw.state.queue import IngestionJob, ResponseQueue
from responses_mw.state.schema import QUEUE

LEASE = 60.0


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[State]:
    """An empty state."""
    state = State(connect(redis_url, timeout=20.0))
    yield state
    await state.aclose()


@pytest.fixture
def queue(state: State) -> ResponseQueue:
    return state.queue


async def enter(queue: ResponseQueue, owner: str, count: int = 1) -> list[str]:
    jobs = [f"{owner}-{number}-{random_part()}" for number in range(count)]
    for job in jobs:
        await queue.reserve(job, owner, LEASE)
        await queue.ready(job)
    return jobs


async def claim(queue: ResponseQueue, *, sweep: bool = True, lease: float = LEASE) -> str | None:
    return await queue.claim(lease, sweep=sweep)


async def test_jobs_of_one_owner_are_claimed_in_order(queue: ResponseQueue) -> None:
    jobs = await enter(queue, "alice", 5)
    assert [await claim(queue) for _ in jobs] == jobs
    assert await claim(queue) is None


async def test_an_owner_with_one_job_does_not_wait_for_the_thousand_of_another(queue: ResponseQueue) -> None:
    await enter(queue, "alice", 300)
    for _ in range(100):
        await claim(queue)
    bobs = await enter(queue, "bob", 3)
    owners = [str(await claim(queue)).partition("-")[0] for _ in range(6)]
    assert owners.count("bob") == 3
    assert owners.count("alice") == len(bobs)


async def test_a_job_is_claimed_again_when_its_lease_has_expired(queue: ResponseQueue) -> None:
    (job,) = await enter(queue, "alice")
    assert await claim(queue) == job
    assert await claim(queue) is None
    await queue.renew([job], 0.01)
    await asyncio.sleep(0.05)
    assert await claim(queue, sweep=False) is None
    assert await claim(queue) == job


async def test_a_job_with_a_renewed_lease_is_not_claimed_again(queue: ResponseQueue) -> None:
    (job,) = await enter(queue, "alice")
    assert await claim(queue, lease=0.05) == job
    await queue.renew([job], LEASE)
    await asyncio.sleep(0.1)
    assert await claim(queue) is None


async def test_a_job_whose_creator_died_is_claimed_when_its_reservation_has_expired(queue: ResponseQueue) -> None:
    await queue.reserve("job", "alice", LEASE)
    await queue.reserve("other", "alice", 0.01)
    await asyncio.sleep(0.05)
    assert await claim(queue) == "other"
    assert await claim(queue) is None


async def test_a_job_that_is_returned_to_the_queue_is_claimed_first(queue: ResponseQueue) -> None:
    first, second, third = await enter(queue, "alice", 3)
    assert await claim(queue) == first
    await queue.ready(first, first=True)
    assert [await claim(queue) for _ in range(3)] == [first, second, third]


async def test_repeating_a_queue_operation_changes_nothing(queue: ResponseQueue) -> None:
    for _ in range(2):
        await queue.reserve("job", "alice", LEASE)
    for _ in range(2):
        await queue.ready("job")
    assert await claim(queue) == "job"
    assert await claim(queue) is None
    for _ in range(2):
        await queue.drop("job")
    await queue.ready("job")
    await queue.renew(["job"], 0.0)
    assert await claim(queue) is None


@pytest.mark.parametrize("part", ["ready", "leases", "since", "jobs", "owners", "clock", "turns:alice"])
async def test_no_job_is_lost_while_a_key_of_the_queue_is_damaged(queue: ResponseQueue, state: State, part: str) -> None:
    key, command = f"rmw:{{q2}}:{part}", state.client.command
    jobs = await enter(queue, "alice", 4)
    held = str(await claim(queue))
    await command("RENAME", key, "{q2}kept")
    await command("SET" if part != "clock" else "LPUSH", key, "another program's")
    for step in (
        queue.ready(held, first=True),
        claim(queue, sweep=False),
        claim(queue),
        queue.reserve("new", "alice", LEASE),
        queue.ready("new"),
    ):
        with suppress(Damaged):
            await step
    await command("RENAME", "{q2}kept", key)
    entered = {job.decode() for job in await command("HKEYS", "rmw:{q2}:jobs")}
    await queue.renew([*entered], 0.0)
    await asyncio.sleep(0.05)
    claimed = {await claim(queue) for _ in range(2 * len(entered))} - {None}
    assert claimed == entered >= set(jobs)


@pytest.mark.parametrize("part", ["ready", "leases", "since", "jobs", "owners", "turns:alice"])
async def test_a_job_that_ends_while_a_key_of_the_queue_is_damaged_is_dropped_later(
    queue: ResponseQueue, state: State, part: str
) -> None:
    key, command = f"rmw:{{q2}}:{part}", state.client.command
    jobs = await enter(queue, "alice", 3)
    assert await claim(queue) == jobs[0]
    await command("RENAME", key, "{q2}kept")
    await command("SET", key, "another program's")
    for job in jobs[:2]:  # one that runs, and one that waits
        await queue.drop(job)
    await command("RENAME", "{q2}kept", key)
    await queue.renew(jobs, 0.0)
    await asyncio.sleep(0.05)
    assert {await claim(queue) for _ in jobs} == set(jobs)
    for job in jobs:
        await queue.drop(job)
    assert await command("HLEN", "rmw:{q2}:jobs") == 0


async def test_cancelled_jobs_do_not_count_against_their_owner(queue: ResponseQueue) -> None:
    await enter(queue, "bob", 40)
    for job in await enter(queue, "alice", 60):
        await queue.drop(job)
    (next_one,) = await enter(queue, "alice")
    assert next_one in [await claim(queue) for _ in range(2)]


async def test_a_job_moves_up_when_earlier_ones_of_its_owner_are_cancelled(queue: ResponseQueue) -> None:
    await enter(queue, "bob", 40)
    jobs = await enter(queue, "alice", 60)
    for job in jobs[:30] + jobs[40:]:
        await queue.drop(job)
    jobs = jobs[30:40] + await enter(queue, "alice", 2)
    claimed = [str(await claim(queue)) for _ in range(2 * len(jobs))]
    assert [job for job in claimed if job.startswith("alice")] == jobs


async def test_the_turn_of_a_running_job_that_ends_is_not_reused(queue: ResponseQueue) -> None:
    await enter(queue, "bob", 4)
    jobs = await enter(queue, "alice", 3)
    while (job := await claim(queue)) != jobs[0]:
        assert job is not None
    await queue.drop(jobs[0])
    owners = [str(await claim(queue)).partition("-")[0] for _ in range(4)]
    assert owners.count("alice") == 2


async def test_a_job_that_was_claimed_while_its_turn_was_damaged_is_not_queued_again(
    state: State, queue: ResponseQueue
) -> None:
    jobs = await enter(queue, "alice", 3)
    await state.client.command("ZREM", QUEUE, jobs[1])  # its turn remains
    await queue.drop(jobs[0])
    assert [await claim(queue) for _ in range(2)] == [jobs[2], None]
    for job in jobs[1:]:
        await queue.drop(job)
    await enter(queue, "bob")
    (next_one,) = await enter(queue, "alice")
    assert next_one in [await claim(queue) for _ in range(2)]


async def test_jobs_with_an_expired_lease_count_as_waiting(queue: ResponseQueue) -> None:
    """Otherwise, no worker might be started for a job that was lost or waits for its upstream."""
    (job,) = await enter(queue, "alice")
    await claim(queue)
    assert await queue.backlog() == (0, 0.0)
    await queue.renew([job], 0.0)
    await asyncio.sleep(0.1)
    jobs, seconds = await queue.backlog()
    assert jobs == 1
    assert seconds >= 0.1


async def test_jobs_in_the_queue_of_an_older_release_are_taken_over_in_their_order(queue: ResponseQueue, state: State) -> None:
    waiting = await enter(queue, "alice", 230)
    leased = str(await claim(queue))
    command = state.client.command
    for key in await command("KEYS", "rmw:{q2}:*"):
        await command("RENAME", key, key.replace(b"q2", b"q1p5"))
    assert await claim(queue) is None
    assert await queue.take_over() == len(waiting)
    assert [await claim(queue, sweep=False) for _ in waiting] == [*waiting[1:], None]
    await queue.renew([leased], 0.0)
    assert await claim(queue) == leased
    assert await queue.take_over() == 0
    assert not await command("KEYS", "rmw:{q1p5}:jobs")
    for key in await command("KEYS", "rmw:{q1p5}:*"):
        assert await command("PTTL", key) > 0


async def test_files_to_ingest_have_a_queue_of_their_own(state: State) -> None:
    queue = state.ingestion_queue
    jobs = [IngestionJob(owner, "vs_1", f"file-{number}", "g1") for owner in ("alice", "bob") for number in range(3)]
    await queue.enqueue(jobs)
    await queue.enqueue(jobs[::-1])  # as by another process, which does not know that they are in the queue
    assert await claim(state.queue) is None
    claimed = [IngestionJob.of(str(await queue.claim(LEASE, sweep=True))) for _ in jobs]
    assert sorted(claimed) == sorted(jobs)
    assert [job.owner for job in claimed] == ["alice", "bob"] * 3
    await queue.enqueue(jobs)
    assert await queue.claim(LEASE, sweep=True) is None


async def test_the_attempts_of_a_file_are_counted_until_it_is_ingested(state: State) -> None:
    queue, job = state.ingestion_queue, IngestionJob("alice", "vs_1", "file-1", "g1")
    await queue.enqueue([job])
    assert [await queue.count_attempt(job.name, number) for number in (1, 1, -1)] == [1, 2, 1]
    assert await queue.drop(job.name) == "alice"
    assert await queue.drop(job.name) is None
    assert await queue.count_attempt(job.name) == 1
