"""Compression of the event log of a response that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import redis

from responses_mw.jobs import service
from responses_mw.protocol import sse
from responses_mw.protocol.types import Event
from responses_mw.state import Batch, Damaged, Job, State, connect
from responses_mw.state.jobs import CHUNK, PAGE_BYTES, PLAIN_PAGE
from responses_mw.state.schema import decompress
from tests.jobs.test_background import create as create_response
from tests.jobs.test_background import ended, follow, streamed
from tests.jobs.test_follower import following, keys, rest
from tests.jobs.test_records import ALICE, append, batch, create, end, taken
from tests.support.scripted import Signal, finish, text

if TYPE_CHECKING:
    from tests.jobs.conftest import Replica
    from tests.support.scripted import ScriptedUpstream

DELTA = {"item_id": "msg_" + "x" * 55, "output_index": 0, "content_index": 0, "delta": " word", "logprobs": []}


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[State]:
    state = State(connect(redis_url, timeout=20.0))
    yield state
    await state.aclose()


async def finished(state: State, tokens: int = 3000, delta: str = " word") -> Job:
    """Return a job that has ended. Its log has two events, `tokens` deltas in a batch each, and a terminal event."""
    job = await taken(state, await create(state), lease=600)
    record, log = keys(job)
    entries = []
    for number in range(2, tokens + 2):
        event = Event("response.output_text.delta", {**DELTA, "delta": delta, "sequence_number": number})
        entries.append(("XADD", log, f"{number + 1}-0", "b", sse.encode([event])))
    await state.client.pipeline([*entries, ("HSET", record, "next_seq", tokens + 2)])
    await end(state, job, tokens + 2)
    return job


def test_a_frame_that_declares_a_huge_size_is_refused() -> None:
    huge = b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little") + b"\x01\0\0"  # the head of a frame of an exabyte
    with pytest.raises(ValueError, match="size"):
        decompress(huge)


async def test_a_compressed_log_uses_a_twentieth_of_the_memory_and_is_readable_from_any_event(state: State) -> None:
    job = await finished(state)
    _, log = keys(job)
    async with following(state) as followers:
        whole = b"".join([one.data async for one in followers.follow(job.document, -1)])
        before, ttl = await state.client.command("MEMORY", "USAGE", log), await state.client.command("PTTL", log)
        assert await state.jobs.compress(job.response_id)
        assert await state.client.command("MEMORY", "USAGE", log) < before / 20
        assert ttl - 60_000 < await state.client.command("PTTL", log) <= ttl
        assert await state.client.command("XLEN", log) < 2 * len(whole) / CHUNK + 3000 / PLAIN_PAGE
        frames = whole.split(b"\n\n")[:-1]
        for after in (-1, 0, 1, 500, 2999, 3001, 3002, 9000):
            read = b"".join([one.data async for one in followers.follow(job.document, after)])
            assert read.split(b"\n\n")[:-1] == frames[after + 1 :]


async def test_a_follower_continues_in_a_log_that_is_compressed_meanwhile(state: State) -> None:
    job = await finished(state)
    async with following(state) as followers:
        stream = followers.follow(job.document, -1)
        assert (await anext(stream)).last == 1
        assert await state.jobs.compress(job.response_id)
        numbers = await rest(stream)
    assert numbers[0][0] == 2
    assert all(one[1] + 1 == other[0] for one, other in pairwise(numbers))
    assert numbers[-1][1:] == (3002, True)


@pytest.mark.parametrize("after", [200, 1500])
async def test_a_reader_misses_no_events_if_the_log_is_compressed_between_two_pages(state: State, after: int) -> None:
    job = await finished(state)
    read: list[Batch] = []
    while not read or not read[-1].final:
        number = read[-1].last if read else -1
        if number >= after:
            await state.jobs.compress(job.response_id)
        read += await state.jobs.log(job.response_id, number)
    assert read[-1].last == 3002
    assert all(other.first <= one.last + 1 <= other.last for one, other in pairwise(read))
    assert b"z" in (await state.client.command("XRANGE", keys(job)[1], "-", "+", "COUNT", 1))[0][1]


async def test_a_page_of_a_compressed_log_is_limited_in_size(state: State) -> None:
    job = await finished(state, 8000)
    await state.jobs.compress(job.response_id)
    page = await state.jobs.log(job.response_id, -1)
    assert PAGE_BYTES <= sum(len(one.data) for one in page) < PAGE_BYTES + 2 * CHUNK


async def test_a_compressed_log_is_streamed_without_waiting_for_a_poll(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "POLL", 1000.0)
    job = await finished(state, 8000)
    assert await state.jobs.compress(job.response_id)
    async with following(state) as followers, asyncio.timeout(20):
        numbers = await rest(followers.follow(job.document, -1))
    assert numbers[-1][1:] == (8002, True)


async def test_redis_sends_each_uncompressed_entry_only_once(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await finished(state, 600, delta=5000 * "x")
    sent, command = list[int](), state.client.command

    async def counted(*words: Any) -> Any:
        reply = await command(*words)
        if words[0] == "XRANGE":
            sent.append(len(reply))
        return reply

    monkeypatch.setattr(state.client, "command", counted)
    async with following(state) as followers:
        assert (await rest(followers.follow(job.document, -1)))[-1][1:] == (602, True)
    read = sum(sent)
    assert await state.jobs.compress(job.response_id)
    assert (read, sum(sent) - read) == (602, 602)


async def test_compressing_a_log_again_does_not_change_it(state: State) -> None:
    job = await finished(state, 100)
    assert await state.jobs.compress(job.response_id)
    before = await state.client.command("DUMP", keys(job)[1])
    assert await state.jobs.compress(job.response_id)
    assert await state.client.command("DUMP", keys(job)[1]) == before


async def test_the_log_of_a_running_response_and_a_short_log_are_not_compressed(state: State) -> None:
    job = await taken(state, await create(state))
    await append(state, job, batch(2, 900))
    assert not await state.jobs.compress(job.response_id)
    assert await state.client.command("XLEN", keys(job)[1]) == 2
    short = await finished(state, 2)
    assert not await state.jobs.compress(short.response_id)  # too short to be worth it


async def test_a_log_whose_worker_was_lost_before_compression_is_compressed_later(state: State, replica: Replica) -> None:
    job = await finished(state, 100)
    await state.queue.reserve(job.response_id, ALICE, 0)
    replica()
    async with asyncio.timeout(30):
        while await state.client.command("XLEN", keys(job)[1]) > 1:
            await asyncio.sleep(0.05)
    assert (await state.queue.backlog())[0] == 0


async def test_a_log_with_a_gap_is_not_compressed(state: State) -> None:
    job = await finished(state, 100)
    await state.client.command("XDEL", keys(job)[1], "50-0")
    assert not await state.jobs.compress(job.response_id)


async def test_the_compressed_log_of_a_deleted_response_expires(state: State) -> None:
    job = await finished(state, 100)
    assert await state.jobs.compress(job.response_id)
    await state.responses.delete(job.response_id, ALICE)
    assert await state.client.command("PTTL", keys(job)[1]) <= 10_000
    assert not await state.jobs.compress(job.response_id)


@pytest.mark.parametrize("fields", [("z", b"no frame"), ("y", b"of a later release")])
async def test_an_entry_of_an_unknown_form_is_reported_as_damaged_and_not_removed(
    state: State, fields: tuple[str, bytes]
) -> None:
    job = await finished(state, 100)
    await state.client.command("DEL", keys(job)[1])
    await state.client.command("XADD", keys(job)[1], "103-0", *fields, "final", 1)
    with pytest.raises(Damaged):
        await state.jobs.log(job.response_id, -1)
    assert await state.client.command("XLEN", keys(job)[1]) == 1


@pytest.mark.parametrize("how", ["completed", "cancelled"])
async def test_the_log_is_compressed_when_the_job_completes_or_is_cancelled(
    replica: Replica, upstream: ScriptedUpstream, redis_url: str, how: str
) -> None:
    ours, go = replica(), Signal()
    upstream.stream(*[text("word") for _ in range(200)], go, text("last"), finish())
    response_id = (await create_response(ours))["id"]
    follower = follow(ours, response_id)
    await follower.until(b'"sequence_number":150')
    if how == "completed":
        go.set()
    else:
        await ours.http.post(f"/v1/responses/{response_id}/cancel")
    assert (await ended(ours, response_id))["status"] == how
    await follower.task
    with redis.Redis.from_url(redis_url) as client:
        log = f"rmw:{{{response_id[5:30]}}}:e:{response_id[30:]}"
        async with asyncio.timeout(60):
            while b"z" not in client.xrange(log, count=1)[0][1]:
                await asyncio.sleep(0.02)
    assert orjson.dumps(await streamed(ours, response_id)) == orjson.dumps(follower.events)
