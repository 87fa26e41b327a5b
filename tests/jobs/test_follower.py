"""Followers of event logs: the work that they share, and the end of a stream whose log is lost or damaged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from responses_mw.crypto import Sealer
from responses_mw.errors import BadRequest
from responses_mw.jobs import JobService, service
from responses_mw.protocol import sse
from responses_mw.settings.groups import JobSettings, RedisSettings
from responses_mw.state import Batch, Damaged, Job, State, connect
from responses_mw.state.jobs import PAGE
from tests.jobs.test_records import append, batch, create, document, end, taken
from tests.support.valkey import Server

Stream = AsyncGenerator[Batch, None]


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[State]:
    state = State(connect(redis_url, timeout=20.0))
    yield state
    await state.aclose()


class Following(JobService):
    async def settle(self, response_id: str) -> None:
        """Do nothing: no job is lost."""


@asynccontextmanager
async def following(state: State) -> AsyncIterator[JobService]:
    async with aclosing(Following(state, Sealer(), JobSettings(), RedisSettings())) as followers:
        yield followers


async def rest(stream: Stream) -> list[tuple[int, int, bool]]:
    """Return the sequence numbers of the remaining batches, and whether each batch is final."""
    async with asyncio.timeout(60):
        return [(one.first, one.last, one.final) async for one in stream]


def keys(job: Job) -> tuple[str, str]:
    """Return the keys of the record and of the log."""
    slot, random = f"rmw:{{{job.response_id[5:30]}}}:", job.response_id[30:]
    return f"{slot}r:{random}", f"{slot}e:{random}"


async def test_a_log_that_expires_before_a_slow_reader_has_read_it_ends_without_a_terminal_event(state: State) -> None:
    job = await taken(state, await create(state))
    await append(state, job, batch(2, 2))
    async with following(state) as followers:
        stream = followers.follow(job.document, -1)
        assert (await anext(stream)).last == 1
        await end(state, job, 3)
        await state.client.command("DEL", keys(job)[1])
        assert await rest(stream) == [(2, 2, False)]


async def test_a_follower_of_events_that_redis_then_loses_gets_a_failure(state: State) -> None:
    job = await taken(state, await create(state))
    async with following(state) as followers:
        stream = followers.follow(document(job.response_id), -1)
        assert (await anext(stream)).last == 1
        record, log = keys(job)
        before = await state.client.command("DUMP", log)
        await append(state, job, batch(2, 4))
        assert (await anext(stream)).last == 4
        await state.client.command("RESTORE", log, 0, before, "REPLACE")
        await state.client.command("HSET", record, "next_seq", 2)
        reading = asyncio.create_task(anext(stream))
        await end(state, job, 2)
        last = await asyncio.wait_for(reading, 60)
        assert (last.first, last.last, last.final) == (5, 5, True)
        assert b"response.failed" in last.data
        assert b"lost" in last.data
        assert await rest(stream) == []


@pytest.mark.parametrize("number", [2, 3, 4])
async def test_a_stream_that_resumes_from_an_event_that_redis_then_loses_gets_a_failure(state: State, number: int) -> None:
    job = await taken(state, await create(state))
    async with following(state) as followers:
        record, log = keys(job)
        before = await state.client.command("DUMP", log)
        await append(state, job, batch(2, 4))
        stream = followers.follow(document(job.response_id), 4)
        assert (await anext(stream)).data == b""
        await state.client.command("RESTORE", log, 0, before, "REPLACE")
        await state.client.command("HSET", record, "next_seq", 2)
        if number > 2:
            await append(state, job, batch(2, number - 1))
        await end(state, job, number)
        assert await rest(stream) == [(5, 5, True)]


@pytest.mark.parametrize("number", [2, 3, 4])
async def test_a_stream_does_not_join_two_runs_after_redis_lost_events(
    state: State, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = await taken(state, await create(state))
    async with following(state) as followers:
        stream = followers.follow(document(job.response_id), -1)
        assert (await anext(stream)).last == 1
        record, log = keys(job)
        before = await state.client.command("DUMP", log)
        await append(state, job, batch(2, 4))
        assert (await anext(stream)).last == 4
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)  # it waits for a notification
        await state.client.command("RESTORE", log, 0, before, "REPLACE")
        await state.client.command("HSET", record, "next_seq", 2)
        if number > 2:  # another worker has already begun, with other tokens
            await append(state, job, batch(2, number - 1))
        last = await asyncio.wait_for(reading, 60)
        assert (last.first, last.last, last.final) == (5, 5, True)
        assert b"lost" in last.data
        assert "cannot be followed beyond event 4: Redis lost its last events" in caplog.text


async def test_a_log_with_a_gap_is_streamed_up_to_the_gap_and_ends_with_a_failure(
    state: State, caplog: pytest.LogCaptureFixture
) -> None:
    job = await taken(state, await create(state))
    for number in (2, 3, 4):
        await append(state, job, batch(number, number))
    await end(state, job, 5)
    await state.client.command("XDEL", keys(job)[1], "4-0")
    async with following(state) as followers:
        events = [event async for one in followers.follow(job.document, -1) for event in sse.decode(one.data)]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "failed")
    assert "cannot be followed beyond event 2" in caplog.text


async def test_a_damaged_log_fails_only_its_own_followers(state: State) -> None:
    healthy = [await taken(state, await create(state)) for _ in range(3)]
    damaged = await taken(state, await create(state))
    for job in healthy:
        await end(state, job, 2)
    await state.client.command("SET", keys(damaged)[1], "another program's")
    async with following(state) as followers:
        reading = [rest(followers.follow(job.document, -1)) for job in (*healthy, damaged)]
        *logs, error = await asyncio.gather(*reading, return_exceptions=True)
        assert logs == [[(0, 1, False), (2, 2, True)]] * 3
        assert isinstance(error, Damaged)


async def test_a_log_that_is_damaged_while_it_is_read_ends_its_stream_with_a_failure(state: State) -> None:
    job = await taken(state, await create(state))
    async with following(state) as followers:
        stream = followers.follow(job.document, -1)
        assert (await anext(stream)).last == 1
        await state.client.command("SET", keys(job)[1], "another program's")
        assert await rest(stream) == [(2, 2, True)]  # at the next poll at the latest


async def test_a_stream_does_not_wait_while_another_response_is_settled(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {job.response_id: job for job in [await taken(state, await create(state)) for _ in range(2)]}
    settled: list[str] = []

    async def settle(_: JobService, response_id: str) -> None:
        settled.append(response_id)
        if response_id == settled[0]:
            await asyncio.Event().wait()
        await end(state, jobs[response_id], 2)

    monkeypatch.setattr(Following, "settle", settle)
    async with following(state) as followers:
        reading = [asyncio.create_task(rest(followers.follow(job.document, -1))) for job in jobs.values()]
        done, pending = await asyncio.wait(reading, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [[(0, 1, False), (2, 2, True)]]
        for task in pending:
            task.cancel()
        await asyncio.wait(pending)


async def test_followers_of_a_silent_response_share_its_checks(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "POLL", 0.5)
    loop, settled = asyncio.get_running_loop(), list[float]()

    async def settle(_: JobService, response_id: str) -> None:
        settled.append(loop.time())

    monkeypatch.setattr(Following, "settle", settle)
    job = await taken(state, await create(state))
    async with following(state) as followers, asyncio.timeout(60):
        reading = []
        for _ in range(20):
            reading.append(asyncio.create_task(rest(followers.follow(job.document, -1))))
            await asyncio.sleep(0.01)  # so that they do not wake at the same time
        while len(settled) < 3:
            await asyncio.sleep(0.01)
        assert settled[2] - settled[0] > 1.8 * 0.5
        await end(state, job, 2)
        assert await asyncio.gather(*reading) == [[(0, 1, False), (2, 2, True)]] * 20


async def test_an_invalid_next_sequence_number_is_reported_as_damaged(state: State) -> None:
    response_id = await create(state)
    job = await taken(state, response_id)
    await state.client.command("HSET", keys(job)[0], "next_seq", "x", "lease_until", 1)
    with pytest.raises(Damaged):
        await state.jobs.progress(response_id)
    with pytest.raises(Damaged):
        await taken(state, response_id)


async def test_starting_after_an_unknown_event_is_a_400_during_the_run_and_an_empty_stream_afterwards(
    state: State, caplog: pytest.LogCaptureFixture
) -> None:
    job = await taken(state, await create(state))
    async with following(state) as followers:
        with pytest.raises(BadRequest) as refused:
            await anext(followers.follow(job.document, 5000))
        assert refused.value.param == "starting_after"
        await end(state, job, 2)
        [nothing] = [one async for one in followers.follow(job.document, 5000)]
        assert (nothing.data, nothing.final) == (b"", True)
    assert "cannot be followed" not in caplog.text  # the caller has chosen the position


async def test_a_follower_that_joins_as_the_run_ends_reads_the_final_event(state: State) -> None:
    async with following(state) as followers:
        for wait in range(30):
            job = await taken(state, await create(state))
            ending = asyncio.create_task(end(state, job, 2))
            for _ in range(wait):
                await asyncio.sleep(0)
            assert (await rest(followers.follow(job.document, 0)))[-1] == (2, 2, True)
            await ending


async def test_a_stream_ends_if_redis_stays_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PATIENCE", 0.2)
    server = Server(tmp_path)
    server.start()
    state = State(connect(server.url, timeout=0.5))
    try:
        job = await taken(state, await create(state))
        async with following(state) as followers:
            stream = followers.follow(job.document, -1)
            assert (await anext(stream)).last == 1
            server.kill()
            assert await rest(stream) == []
    finally:
        server.kill()
        await state.aclose()


async def test_a_long_log_is_read_without_waiting_for_notifications(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "POLL", 3600.0)
    job = await taken(state, await create(state))
    for number in range(2, 3 * PAGE):
        await append(state, job, batch(number, number))
    async with following(state) as followers:
        running = followers.follow(job.document, -1)
        numbers: list[int] = []
        async with asyncio.timeout(60):
            while not numbers or numbers[-1] < 3 * PAGE - 1:
                numbers.append((await anext(running)).last)
        assert numbers == [1, *range(2, 3 * PAGE)]
        await running.aclose()
        await end(state, job, 3 * PAGE)
        assert len(await rest(followers.follow(job.document, -1))) == 3 * PAGE
