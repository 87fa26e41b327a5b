"""A queued background response that was lost from the queue is restored when it is read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from responses_mw.ids import RunIds
from responses_mw.state import Batch, JobVerdict, State, Taken, TakeReason
from tests.support.stored import ALICE, BOB, address

if TYPE_CHECKING:
    from tests.support.valkey import Plain

LEASE = 5.0


async def queued(state: State, owner: str = ALICE) -> str:
    """Create a job like a create request, and return the id of its response."""
    response_id = RunIds().response
    document: dict[str, Any] = {"id": response_id, "status": "queued", "background": True, "output": []}
    await state.queue.reserve(response_id, owner, LEASE)
    await state.jobs.create(document, {"model": "m"}, [], owner, "sealed", Batch(0, 1, b"data: 0\n\ndata: 1\n\n"))
    await state.queue.ready(response_id)
    return response_id


async def settle(state: State, response_id: str) -> Taken:
    return await state.jobs.take(response_id, TakeReason.SETTLE, worker="", lease=LEASE, max_attempts=2)


async def claimed(state: State) -> list[str]:
    """Claim all jobs of the queue, and return them in order."""
    found = []
    while job := await state.queue.claim(LEASE, sweep=True):
        found.append(job)
    return found


def lose_queue(server: Plain) -> None:
    for key in server.keys("rmw:{q2}*"):
        server.delete(key)


def grow_old(server: Plain, response_id: str) -> None:
    """Set the time at which its place in the queue was last checked to 1970."""
    server.hset(address(response_id).record, "looked", 0)


async def test_a_job_lost_from_the_queue_can_be_restored(state: State, server: Plain) -> None:
    job = await queued(state)
    lose_queue(server)
    assert await claimed(state) == []
    grow_old(server, job)
    assert (await state.responses.get(job, ALICE)).lost
    taken = await settle(state, job)
    assert (taken.verdict, taken.unseen) == (JobVerdict.WAITING, ALICE)
    assert await state.queue.restore(job, taken.unseen)
    assert await claimed(state) == [job]


async def test_only_one_of_many_readers_checks_whether_a_waiting_job_is_in_the_queue(state: State, server: Plain) -> None:
    job = await queued(state)
    assert not (await state.responses.get(job, ALICE)).lost
    assert (await settle(state, job)).unseen == ""
    grow_old(server, job)
    takes = await asyncio.gather(*(settle(state, job) for _ in range(10)))
    assert sorted(taken.unseen for taken in takes) == [*[""] * 9, ALICE]
    assert not (await state.responses.get(job, ALICE)).lost


async def test_restoring_a_queued_or_claimed_job_changes_nothing(state: State) -> None:
    first, second = await queued(state), await queued(state)
    assert not await state.queue.restore(first, ALICE)
    assert not await state.queue.restore(second, ALICE)
    assert sorted(await claimed(state)) == sorted([first, second])
    assert not await state.queue.restore(first, ALICE)  # it has just been claimed
    assert await claimed(state) == []


async def test_restored_jobs_take_turns_with_the_jobs_of_other_owners(state: State, server: Plain) -> None:
    lost = [await queued(state) for _ in range(3)]
    lose_queue(server)
    waiting = [await queued(state, BOB) for _ in range(2)]
    for job in lost:
        await state.queue.restore(job, ALICE)
    order = [job in lost for job in await claimed(state)]
    assert sorted(order[:4]) == [False, False, True, True]
    assert len(order) == len(lost) + len(waiting)


async def test_a_job_with_an_expired_lease_and_lost_from_the_queue_can_be_restored(state: State, server: Plain) -> None:
    job = await queued(state)
    assert await claimed(state) == [job]
    await state.jobs.take(job, TakeReason.RUN, worker="w", lease=0.001, max_attempts=2)
    lose_queue(server)
    grow_old(server, job)
    await asyncio.sleep(0.01)
    taken = await settle(state, job)
    assert (taken.verdict, taken.unseen) == (JobVerdict.WAITING, ALICE)
    assert await state.queue.restore(job, taken.unseen)
    assert await claimed(state) == [job]


async def test_a_deleted_job_is_not_restored(state: State, server: Plain) -> None:
    job = await queued(state)
    grow_old(server, job)
    await state.responses.delete(job, ALICE)
    taken = await settle(state, job)
    assert (taken.verdict, taken.unseen) == (JobVerdict.MISSING, "")
