"""The record and the log of a background response: fenced writers and idempotent writes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakeredis import FakeAsyncRedis

from responses_mw.errors import BadRequest
from responses_mw.ids import RunIds
from responses_mw.jobs.event_log import ClaimedJob, EventLogWriter
from responses_mw.protocol.types import Event
from responses_mw.state import (
    Batch,
    Chain,
    Client,
    Damaged,
    Deleted,
    Fenced,
    Job,
    JobVerdict,
    Missing,
    State,
    StateOptions,
    Taken,
    TakeReason,
    connect,
)
from responses_mw.state.schema import Address, kind_of, response_address, stop_channel
from tests.support.cluster import cluster_url
from tests.support.metrics import sample_value
from tests.support.valkey import Server, wire

ALICE = "a" * 32
LEASE = 60.0


@pytest.fixture(params=["valkey", "cluster", "fakeredis"])
async def state(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[State]:
    if request.param == "cluster":
        client = connect(cluster_url(request.getfixturevalue("cluster")))
    elif request.param == "valkey":
        client = connect(redis_url)
    else:
        client = Client(FakeAsyncRedis(), timeout=2.0, max_connections=64)
    state = State(client)
    yield state
    await state.aclose()


def batch(first: int, last: int, *, final: bool = False) -> Batch:
    data = b"".join(b'event: e\ndata: {"sequence_number":%d}\n\n' % number for number in range(first, last + 1))
    return Batch(first, last, data, final)


def document(response_id: str) -> dict[str, Any]:
    links = {"previous_response_id": None, "conversation": None}
    return {"id": response_id, "status": "queued", "background": True, "output": [], **links}


async def create(state: State) -> str:
    ids = RunIds()
    given = [{"type": "message", "id": ids.item("msg"), "role": "user", "content": "Hi"}]
    await state.jobs.create(document(ids.response), {"model": "m"}, given, ALICE, "sealed", batch(0, 1))
    return ids.response


async def take(
    state: State, response_id: str, why: TakeReason = TakeReason.RUN, *, lease: float = LEASE, owner: str = ""
) -> Taken:
    return await state.jobs.take(response_id, why, worker="w", lease=lease, max_attempts=2, owner=owner)


async def taken(state: State, response_id: str, why: TakeReason = TakeReason.RUN, *, lease: float = LEASE) -> Job:
    job = (await take(state, response_id, why, lease=lease)).job
    assert job is not None
    return job


async def append(state: State, job: Job, one: Batch) -> bool | None:
    return (await state.jobs.append([(job.response_id, job.token, one)], LEASE))[0]


async def end(state: State, job: Job, number: int, status: str = "completed") -> None:
    done = {**job.document, "status": status}
    await state.responses.commit(Chain.new(), done, job.input, ALICE, job.token, last=batch(number, number, final=True))


async def numbers(state: State, response_id: str, after: int = -1) -> list[tuple[int, int]]:
    return [(one.first, one.last) for one in await state.jobs.log(response_id, after)]


async def damage(state: State, key: str) -> None:
    """Put a value of the wrong type under a key."""
    await state.client.command("SET", key, "another program's")


async def test_take_returns_the_values_that_a_job_was_created_with(state: State) -> None:
    response_id = await create(state)
    job = await taken(state, response_id)
    assert (job.owner, job.body, job.credential, job.next_number) == (ALICE, {"model": "m"}, "sealed", 2)
    assert job.document == document(response_id)
    assert job.input[0]["content"] == "Hi"


async def test_a_job_is_held_by_one_worker_at_a_time(state: State) -> None:
    response_id = await create(state)
    await taken(state, response_id)
    again = await take(state, response_id)
    assert again.verdict == JobVerdict.HELD
    assert LEASE / 2 < again.left <= LEASE


async def test_a_worker_that_lost_its_job_cannot_write(state: State) -> None:
    response_id = await create(state)
    stalled = await taken(state, response_id, lease=0.05)
    await asyncio.sleep(0.1)
    job = await taken(state, response_id)
    assert not await append(state, stalled, batch(2, 2))
    assert await state.jobs.renew([(response_id, stalled.token), (response_id, job.token)], 5.0) == [False, True]
    with pytest.raises(Fenced):
        await end(state, stalled, 2)
    assert await append(state, job, batch(2, 2))
    await end(state, job, 3)
    assert await numbers(state, response_id) == [(0, 1), (2, 2), (3, 3)]


async def test_an_append_renews_the_lease(state: State) -> None:
    response_id = await create(state)
    job = await taken(state, response_id, lease=0.1)
    assert await append(state, job, batch(2, 2))
    await asyncio.sleep(0.2)
    assert (await take(state, response_id)).verdict == JobVerdict.HELD


async def test_a_repeated_append_changes_nothing(state: State) -> None:
    job = await taken(state, await create(state))
    assert await append(state, job, batch(2, 4))
    assert await append(state, job, batch(2, 4))
    assert await numbers(state, job.response_id) == [(0, 1), (2, 4)]


async def test_a_write_that_would_leave_a_gap_in_the_log_is_refused(state: State) -> None:
    job = await taken(state, await create(state))
    assert not await append(state, job, batch(3, 4))
    with pytest.raises(Fenced):
        await end(state, job, 5)
    assert await numbers(state, job.response_id) == [(0, 1)]


async def test_ending_a_response_twice_writes_one_final_batch(state: State) -> None:
    job = await taken(state, await create(state))
    await end(state, job, 2)
    await end(state, job, 2)
    assert await numbers(state, job.response_id) == [(0, 1), (2, 2)]
    assert await state.jobs.progress(job.response_id) == (2, True)
    assert (await take(state, job.response_id)).verdict == JobVerdict.DONE
    assert not await append(state, job, batch(3, 3))


async def test_logs_are_read_from_the_batch_that_holds_the_next_event(state: State) -> None:
    job = await taken(state, await create(state))
    await append(state, job, batch(2, 4))
    await append(state, job, batch(5, 5))
    assert await numbers(state, job.response_id, 3) == [(2, 4), (5, 5)]
    assert await numbers(state, job.response_id, 4) == [(5, 5)]
    assert await numbers(state, job.response_id, 5) == []


async def test_a_lost_job_without_output_is_run_again_up_to_a_maximum(state: State) -> None:
    response_id = await create(state)
    job = await taken(state, response_id, lease=0.01)
    await state.jobs.append([(response_id, job.token, batch(2, 2))], 0.01)
    await asyncio.sleep(0.05)
    again = await take(state, response_id, lease=0.01)
    assert (again.verdict, again.job and again.job.next_number) == (JobVerdict.RUN, 3)
    await asyncio.sleep(0.05)
    assert (await take(state, response_id)).verdict == JobVerdict.LOST


async def progress(state: State, response_id: str) -> None:
    """Take the job with a lease that expires at once, and append output."""
    job = await taken(state, response_id, lease=0.0)
    first = job.next_number
    assert await state.jobs.append([(response_id, job.token, batch(first, first + 3))], 0.0) == [True]


async def test_a_lost_job_with_output_is_run_by_another_worker_up_to_a_maximum(state: State) -> None:
    response_id = await create(state)
    await progress(state, response_id)
    for _ in range(2):
        assert (await state.responses.get(response_id, ALICE)).lost
        assert (await take(state, response_id, TakeReason.SETTLE)).verdict == JobVerdict.WAITING
        await taken(state, response_id, lease=0.0)
    lost = await take(state, response_id, TakeReason.SETTLE)
    assert lost.verdict == JobVerdict.LOST
    assert lost.job is not None
    assert lost.job.next_number == 6


async def test_the_time_for_retries_restarts_once_a_job_has_made_progress(state: State) -> None:
    response_id = await create(state)
    error = {"code": "server_error", "message": "away"}
    await state.jobs.retry(await taken(state, response_id), error, seconds=0.01, is_attempt=False)
    await asyncio.sleep(0.05)
    assert (await take(state, response_id, TakeReason.SETTLE)).verdict == JobVerdict.FAILED
    response_id = await create(state)
    await state.jobs.retry(await taken(state, response_id), error, seconds=0.2, is_attempt=False)
    job = await taken(state, response_id)
    assert (job.retries, job.retry_seconds > 0) == (1, True)
    await state.jobs.append([(response_id, job.token, batch(2, 3))], 0.01)
    await asyncio.sleep(0.3)
    job = await taken(state, response_id)
    assert job.retries == 0
    await state.jobs.retry(job, error, seconds=60, is_attempt=False)
    assert (await state.responses.get(response_id, ALICE)).document["status"] == "in_progress"
    job = await taken(state, response_id)
    assert (job.retries, job.retry_seconds > 50) == (1, True)


async def test_releasing_a_job_does_not_count_as_an_attempt(state: State) -> None:
    response_id = await create(state)
    for _ in range(5):
        await state.jobs.release(await taken(state, response_id))
    assert (await take(state, response_id, TakeReason.SETTLE)).verdict == JobVerdict.WAITING


async def test_a_cancel_takes_the_job_from_its_worker(state: State) -> None:
    response_id = await create(state)
    job = await taken(state, response_id)
    cancelled = await take(state, response_id, TakeReason.CANCEL)
    assert (cancelled.verdict, cancelled.worker) == (JobVerdict.CANCELLED, "w")
    assert not await append(state, job, batch(2, 2))
    assert cancelled.job is not None
    await end(state, cancelled.job, 2, "cancelled")
    with pytest.raises(Fenced):
        await end(state, job, 2)
    assert (await state.responses.get(response_id, ALICE)).document["status"] == "cancelled"


async def test_only_a_worker_whose_lease_expired_is_counted_as_lost(state: State) -> None:
    def counted() -> float:
        return sample_value("responses_mw_leases_lost_total") or 0.0

    before = counted()
    drained, cancelled, stalled = [await create(state) for _ in range(3)]
    await state.jobs.release(await taken(state, drained))
    assert (await take(state, drained)).worker == ""
    await taken(state, cancelled)
    await take(state, cancelled, TakeReason.CANCEL)
    assert counted() == before
    await taken(state, stalled, lease=0.01)
    await asyncio.sleep(0.05)
    assert (await take(state, stalled)).worker == "w"
    assert counted() == before + 1


async def test_a_job_stays_cancelled_if_the_process_that_cancels_it_dies(state: State) -> None:
    response_id = await create(state)
    await taken(state, response_id, TakeReason.CANCEL, lease=0.01)
    await asyncio.sleep(0.05)
    assert (await take(state, response_id)).verdict == JobVerdict.CANCELLED


async def test_a_second_cancel_waits_for_the_first_for_a_limited_time(state: State) -> None:
    response_id = await create(state)
    first = await taken(state, response_id, TakeReason.CANCEL)
    held = await take(state, response_id, TakeReason.CANCEL)
    assert (held.verdict, 0 < held.left <= LEASE) == (JobVerdict.HELD, True)
    await state.client.command("HINCRBY", address_of(first).record, "lease_until", -11_000)  # as if that was long ago
    assert (await take(state, response_id, TakeReason.CANCEL)).verdict == JobVerdict.CANCELLED


async def test_another_owner_cannot_cancel(state: State) -> None:
    response_id = await create(state)
    assert (await take(state, response_id, TakeReason.CANCEL, owner="b" * 32)).verdict == JobVerdict.MISSING
    assert (await take(state, response_id)).verdict == JobVerdict.RUN


async def test_a_job_cannot_be_created_after_its_id_was_reported_missing(state: State) -> None:
    ids = RunIds()
    assert (await take(state, ids.response)).verdict == JobVerdict.MISSING
    with pytest.raises(Deleted):
        await state.jobs.create(document(ids.response), {}, [], ALICE, "sealed", batch(0, 1))


async def test_a_running_response_cannot_be_continued(state: State) -> None:
    response_id = await create(state)
    with pytest.raises(BadRequest, match="cannot be continued"):
        await state.responses.chain(response_id, ALICE)


async def test_a_running_response_lists_its_input(state: State) -> None:
    response_id = await create(state)
    assert [item["content"] for item in (await state.responses.input_items(response_id, ALICE)).items] == ["Hi"]


async def test_the_credential_is_gone_when_the_response_has_ended(state: State) -> None:
    job = await taken(state, await create(state))
    key = f"rmw:{{{job.response_id[5:30]}}}:k:{job.response_id[30:]}"
    assert await state.client.command("EXISTS", key)
    await end(state, job, 2)
    assert not await state.client.command("EXISTS", key)


async def test_a_worker_cannot_write_to_a_deleted_response(state: State) -> None:
    job = await taken(state, await create(state))
    await state.responses.delete(job.response_id, ALICE)
    assert not await append(state, job, batch(2, 2))
    with pytest.raises(Deleted):
        await end(state, job, 2)
    with pytest.raises(Missing):
        await state.jobs.progress(job.response_id)


async def test_an_append_wakes_the_followers(state: State) -> None:
    job = await taken(state, await create(state))
    address = response_address(job.response_id)
    stands, told = asyncio.Event(), asyncio.Event()

    def wake(_: bytes) -> None:
        (told if stands.is_set() else stands).set()

    with state.wakeups.on(address.events, wake):
        await asyncio.wait_for(stands.wait(), 60)
        await append(state, job, batch(2, 2))
        await asyncio.wait_for(told.wait(), 60)


@pytest.mark.parametrize("last", [2, 1500])
async def test_a_batch_is_published_whole_unless_it_is_long(state: State, last: int) -> None:
    job = await taken(state, await create(state))
    address = response_address(job.response_id)
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with state.wakeups.on(address.events, messages.put_nowait):
        assert state.jobs.announced(job.response_id, await asyncio.wait_for(messages.get(), 60)) is None
        await append(state, job, batch(2, last))
        assert state.jobs.announced(job.response_id, await asyncio.wait_for(messages.get(), 60)) == (
            batch(2, 2) if last == 2 else None
        )
        await end(state, job, last + 1)
        assert state.jobs.announced(job.response_id, await asyncio.wait_for(messages.get(), 60)) == batch(
            last + 1, last + 1, final=True
        )


async def test_a_message_to_a_worker_arrives(state: State) -> None:
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    with state.wakeups.on(stop_channel("w1"), messages.put_nowait):
        assert await asyncio.wait_for(messages.get(), 60) == b""
        await state.jobs.tell("w1", "resp_1")
        assert await asyncio.wait_for(messages.get(), 60) == b"resp_1"


async def test_a_creation_whose_reply_is_lost_is_repeated_and_creates_one_job(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    try:
        async with wire(server.port) as line, aclosing(State(connect(line.url), StateOptions(patience=20))) as distant:
            with pytest.raises(Missing):
                await distant.jobs.progress(RunIds().response)  # so that it is connected
            line.cut_replies = 1
            response_id = await create(distant)
            assert line.cut_replies == 0
            assert await numbers(distant, response_id) == [(0, 1)]
    finally:
        server.kill()


# -- retries after an upstream error ---------------------------------------------------------------------------------------

BUSY = {"code": "server_error", "message": "busy"}


async def test_a_job_to_be_retried_is_queued_and_keeps_its_error(state: State) -> None:
    response_id = await create(state)
    for number in range(5):  # more often than it may lose its worker
        job = await taken(state, response_id)
        assert (job.retries, job.error, job.retry_seconds > 0) == (number, BUSY if number else None, number > 0)
        assert await state.jobs.retry(job, BUSY, seconds=60, is_attempt=False)
        assert (await state.responses.get(response_id, ALICE)).document["status"] == "queued"
    # Its worker may die before it updates the queue: then the lease in the queue returns the job.
    assert (await take(state, response_id)).verdict == JobVerdict.RUN


async def test_a_job_fails_when_its_time_for_retries_is_over(state: State) -> None:
    response_id = await create(state)
    assert await state.jobs.retry(await taken(state, response_id), BUSY, seconds=0, is_attempt=False)
    found = await take(state, response_id, TakeReason.SETTLE)
    assert found.verdict == JobVerdict.FAILED
    assert found.job is not None
    assert (found.job.error, found.job.credential) == (BUSY, "sealed")


async def test_a_job_whose_retries_count_as_attempts_fails_after_the_last_one(state: State) -> None:
    response_id = await create(state)
    for _ in range(2):
        assert await state.jobs.retry(await taken(state, response_id), BUSY, seconds=60, is_attempt=True)
    assert (await take(state, response_id)).verdict == JobVerdict.FAILED


async def test_only_attempts_that_added_no_output_count_towards_the_maximum(state: State) -> None:
    response_id = await create(state)
    for _ in range(6):  # the maximum is 2
        await progress(state, response_id)
    for _ in range(2):
        await taken(state, response_id, lease=0.0)
    assert (await take(state, response_id)).verdict == JobVerdict.LOST


async def test_the_first_event_of_a_worker_is_no_output(state: State) -> None:
    response_id = await create(state)
    job = await taken(state, response_id, lease=0.0)
    assert await state.jobs.append([(response_id, job.token, batch(2, 2))], 0.0) == [True]
    await taken(state, response_id, lease=0.0)
    assert (await take(state, response_id)).verdict == JobVerdict.LOST


async def test_the_total_number_of_attempts_is_limited(state: State) -> None:
    response_id = await create(state)
    for _ in range(20):
        await progress(state, response_id)
    assert (await take(state, response_id)).verdict == JobVerdict.LOST


async def test_a_worker_that_hands_over_does_not_count_towards_the_total_number_of_attempts(state: State) -> None:
    response_id = await create(state)
    for _ in range(25):
        await state.jobs.release(await taken(state, response_id))
    assert (await take(state, response_id)).verdict == JobVerdict.RUN


async def test_a_requeued_job_is_taken_from_its_worker_without_counting_the_attempt(state: State) -> None:
    response_id = await create(state)
    stalled = await taken(state, response_id)
    assert await append(state, stalled, batch(2, 3))
    for _ in range(3):  # more often than the maximum of attempts
        assert await state.jobs.requeue(response_id) == (ALICE, "w")
        assert await append(state, stalled, batch(4, 4)) is False
        with pytest.raises(Fenced):
            await end(state, stalled, 4)
        again = await taken(state, response_id)
        assert (again.next_number, again.attempts) == (4, 0)
        stalled = again
    assert await append(state, stalled, batch(4, 4))


async def test_a_requeued_job_gets_the_whole_time_for_retries_again(state: State) -> None:
    response_id = await create(state)
    job = await taken(state, response_id)
    await state.jobs.retry(job, {"code": "x", "message": "busy"}, seconds=0.0, is_attempt=False)
    assert await state.jobs.requeue(response_id) == (ALICE, "")
    again = await take(state, response_id)
    assert (again.verdict, again.job is not None and again.job.retries) == (JobVerdict.RUN, 0)


async def test_an_attempt_whose_worker_is_lost_counts_although_the_job_is_requeued(state: State) -> None:
    response_id = await create(state)
    await taken(state, response_id, lease=0.0)
    assert await state.jobs.requeue(response_id) == (ALICE, "")
    assert (await taken(state, response_id)).attempts == 1


async def test_a_job_that_has_ended_or_is_being_cancelled_cannot_be_requeued(state: State) -> None:
    response_id = await create(state)
    await take(state, response_id, TakeReason.CANCEL)
    assert await state.jobs.requeue(response_id) is None
    ended = await create(state)
    await end(state, await taken(state, ended), 2)
    assert await state.jobs.requeue(ended) is None
    with pytest.raises(Missing):
        await state.jobs.requeue(RunIds().response)


async def test_a_retried_job_keeps_its_number_of_continuations(state: State) -> None:
    response_id = await create(state)
    job = await taken(state, response_id)
    await state.jobs.retry(replace(job, continuations=job.continuations + 2), BUSY, seconds=60, is_attempt=False)
    await state.jobs.release(await taken(state, response_id))
    assert (await taken(state, response_id)).continuations == 2


async def test_a_job_that_lost_its_workers_is_lost_despite_an_earlier_error(state: State) -> None:
    response_id = await create(state)
    job = await taken(state, response_id)
    await state.jobs.retry(job, {"code": "server_error", "message": "away"}, seconds=60, is_attempt=False)
    for _ in range(2):
        assert (await take(state, response_id, lease=0.0)).verdict == JobVerdict.RUN
    assert (await take(state, response_id)).verdict == JobVerdict.LOST


async def test_a_cancelled_job_cannot_be_retried(state: State) -> None:
    response_id = await create(state)
    job = await taken(state, response_id)
    await take(state, response_id, TakeReason.CANCEL)
    assert not await state.jobs.retry(job, BUSY, seconds=60, is_attempt=False)


async def test_a_log_of_the_wrong_type_does_not_stop_the_other_jobs_of_its_worker(
    state: State, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [await taken(state, await create(state)) for _ in range(3)]
    await damage(state, address_of(jobs[1]).log)
    for number in (2, 3):
        batches = [(job.response_id, job.token, batch(number, number)) for job in jobs]
        assert await state.jobs.append(batches, 5.0) == [True, False, True]
    assert caplog.text.count("event log at rmw:") == 1


async def test_a_log_that_cannot_be_read_is_reported_as_damaged(state: State) -> None:
    jobs = [await taken(state, await create(state)) for _ in range(2)]
    await damage(state, address_of(jobs[0]).log)
    await state.client.command("XADD", address_of(jobs[1]).log, "7-0", "another", "entry")
    for job in jobs:
        with pytest.raises(Damaged):
            await state.jobs.log(job.response_id, -1)


async def test_a_record_of_the_wrong_type_does_not_stop_the_renewal_of_other_leases(state: State) -> None:
    jobs = [await taken(state, await create(state)) for _ in range(3)]
    await damage(state, address_of(jobs[1]).record)
    assert await state.jobs.renew([(job.response_id, job.token) for job in jobs], 5.0) == [True, False, True]
    with pytest.raises(Damaged) as damaged:
        await state.responses.get(jobs[1].response_id, ALICE)
    assert (damaged.value.status, damaged.value.code) == (500, "state_damaged")


async def test_a_log_that_is_started_again_expires_with_its_record(state: State) -> None:
    job = await taken(state, await create(state))
    await state.client.command("DEL", address_of(job).log)
    assert await append(state, job, batch(2, 2))
    record, log = [await state.client.command("PTTL", key) for key in (address_of(job).record, address_of(job).log)]
    assert 0 < log <= record + 1


async def test_a_response_whose_log_is_damaged_can_end(state: State) -> None:
    job = await taken(state, await create(state))
    await append(state, job, batch(2, 2))
    await damage(state, address_of(job).log)
    await end(state, job, 3, "failed")
    assert (await state.responses.get(job.response_id, ALICE)).document["status"] == "failed"
    assert await numbers(state, job.response_id) == [(3, 3)]


async def test_a_document_with_invalid_json_is_reported_as_damaged(state: State) -> None:
    job = await taken(state, await create(state))
    await state.client.command("HSET", address_of(job).record, "document", "Jx")
    with pytest.raises(Damaged):
        await state.responses.get(job.response_id, ALICE)


@pytest.mark.parametrize(("field", "value"), [("error", "{"), ("document", "J1"), ("job", "J{}")])
async def test_a_job_with_a_foreign_value_is_reported_as_damaged(state: State, field: str, value: str) -> None:
    response_id = await create(state)
    await state.client.command("HSET", response_address(response_id).record, field, value)
    with pytest.raises(Damaged):
        await take(state, response_id)


async def test_events_written_during_an_outage_are_appended_when_it_is_over(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    state = State(connect(server.url, timeout=0.5))
    writer = EventLogWriter(state.jobs, LEASE)
    running = asyncio.create_task(writer.run())
    try:
        claimed = ClaimedJob(await taken(state, await create(state)), 0.0)
        server.signal(signal.SIGSTOP)
        for number in (2, 3):
            writer.write(claimed, [Event("e", {"sequence_number": number})])
            async with asyncio.timeout(60):
                while state.client.away_for < number - 1:  # the first batch cannot be appended
                    await asyncio.sleep(0.05)
        server.signal(signal.SIGCONT)
        await asyncio.wait_for(writer.wait_until_written(claimed), 60)
        assert await numbers(state, claimed.job.response_id) == [(0, 1), (2, 2), (3, 3)]
    finally:
        running.cancel()
        server.kill()
        await state.aclose()


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("rmw:{q2}:leases", "queue"),
        ("rmw:{l0ab1}:rate", "account of an owner"),
        (f"rmw:{{q{'a' * 24}}}:r:b", "response"),
        (f"rmw:{{q{'a' * 24}}}:k:b", "value"),  # a response's tag may begin with any letter
        (f"rmw:{{l{'a' * 24}}}:x:b", "value"),
    ],
)
def test_the_log_names_the_kind_of_a_damaged_key(key: str, kind: str) -> None:
    assert kind_of(key) == kind


def address_of(job: Job) -> Address:
    return response_address(job.response_id)
