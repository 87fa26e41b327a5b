"""Storage quotas: the data of an owner is counted and limited, and frees its quota when it is deleted or expires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.ids import RunIds, new_tag, random_part
from responses_mw.lua import Script, load
from responses_mw.state import (
    Batch,
    Chain,
    Conversation,
    Missing,
    OverQuota,
    State,
    StateOptions,
    StateUnavailable,
    TakeReason,
    connect,
)
from responses_mw.state.client import Args
from responses_mw.state.writes import UNSETTLED, Write, Writer
from tests.support.stored import ALICE, BOB, accounts, address, continued, made, message, respond, turn_sizes, used
from tests.support.valkey import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.valkey import Plain, Server

RateLimitMiddleware = Callable[..., State]
MANY = 10**9
# Bytes that the tombstone of a deleted response counts for.
REST = 256


@pytest.fixture
async def limited(valkey: Server, server: Plain) -> AsyncIterator[RateLimitMiddleware]:
    """Return a function that opens a state on the emptied server with a quota in bytes. Close it after the test."""
    async with AsyncExitStack() as stack:

        def limited(owner_bytes: int, *, url: str = valkey.url, **options: Any) -> State:
            state = State(connect(url), StateOptions(owner_bytes=owner_bytes, **options))
            stack.push_async_callback(state.aclose)
            return state

        yield limited


@pytest.fixture
def counting(limited: RateLimitMiddleware) -> State:
    """A state with a quota that no test reaches."""
    return limited(MANY)


async def assert_segments_are_counted(server: Plain) -> None:
    """Assert that the stored size of each segment is correct."""
    sizes = turn_sizes(server)
    assert {key: int(server.get(key + b":bytes")) for key in sizes} == sizes
    assert len(server.keys("*:bytes")) == len(sizes)


async def test_nothing_is_counted_without_a_quota(state: State, server: Plain) -> None:
    first = await respond(state, Chain.new(), "one")
    await state.responses.delete(await continued(state, first, "two"), ALICE)
    assert not accounts(server)
    assert not server.keys("*:bytes")


async def test_stored_data_counts_only_for_its_owner(counting: State, server: Plain) -> None:
    response = await respond(counting, Chain.new(), "x" * 10_000)
    assert 20_000 < await used(counting) < 26_000
    assert await used(counting, BOB) == 0
    before = await used(counting)
    await continued(counting, response, "y" * 10_000)
    assert 20_000 < await used(counting) - before < 26_000
    await assert_segments_are_counted(server)


async def test_small_objects_count_for_more_than_their_text(counting: State) -> None:
    await respond(counting, Chain.new(), "")
    assert await used(counting) > 2_000
    tag = new_tag()
    await counting.conversations.create(Conversation(f"conv_{tag}", 1, {}), [], BOB)
    assert await used(counting, BOB) > 1_000


async def test_a_repeated_commit_counts_once(counting: State, limited: RateLimitMiddleware, valkey: Server) -> None:
    document, given = made(Chain.new(), "x" * 5_000)
    async with wire(valkey.port) as line:
        distant = limited(MANY, url=line.url)
        token, chain = random_part(), Chain.new()
        await distant.responses.commit(chain, document, given, ALICE, token)
        once = await used(counting)
        await distant.responses.commit(chain, document, given, ALICE, token)
        assert await used(counting) == once
        line.cut_replies = 2  # to the reservation, and to the commit
        document, given = made(Chain.new(), "x" * 5_000)
        await distant.responses.commit(Chain.new(), document, given, ALICE, random_part())
        assert line.cut_replies == 0
        assert await used(counting) == pytest.approx(2 * once, abs=100)


async def test_deleting_a_response_frees_the_quota_of_the_erased_texts(counting: State, server: Plain) -> None:
    empty = await used(counting)
    first = await respond(counting, Chain.new(), "x" * 10_000)
    second = await continued(counting, first, "y" * 10_000)
    both = await used(counting)
    await counting.responses.delete(first, ALICE)  # the second continues it, and needs its text
    assert await used(counting) > both - 4_000
    await assert_segments_are_counted(server)
    await counting.responses.delete(second, ALICE)
    assert await used(counting) == empty + 2 * REST
    assert not turn_sizes(server)


async def test_a_fork_and_its_history_count_until_the_last_response_is_deleted(counting: State, server: Plain) -> None:
    root = await respond(counting, Chain.new(), "x" * 10_000)
    left, right = [await continued(counting, root, side * 1_000) for side in ("left", "right")]
    await assert_segments_are_counted(server)
    for response in (root, left):
        await counting.responses.delete(response, ALICE)
        assert await used(counting) > 20_000
        await assert_segments_are_counted(server)
    await counting.responses.delete(right, ALICE)
    assert await used(counting) == 3 * REST


async def test_expired_data_no_longer_counts(limited: RateLimitMiddleware, server: Plain) -> None:
    state = limited(MANY, ttl_seconds=1)
    first = await respond(state, Chain.new(), "x" * 10_000)
    assert await used(state) > 20_000
    async with asyncio.timeout(60):
        while await used(state):
            await asyncio.sleep(0.1)
    with pytest.raises(Missing):
        await state.responses.get(first, ALICE)
    assert not accounts(server)


async def test_a_text_whose_life_a_continuation_extends_still_counts(counting: State, server: Plain) -> None:
    first = await respond(counting, Chain.new(), "x" * 10_000)
    where = address(first)
    segment = where.segment(where.random)
    for key in (segment, f"{segment}:refs", f"{segment}:bytes"):
        server.pexpire(key, 5_000)
    server.zadd(f"rmw:{{b{ALICE}}}:expires", {f"{where.tag}s{where.random}": 1}, xx=True)
    await continued(counting, first, "y")
    assert server.pttl(segment) > 60_000
    assert await used(counting) > 20_000


async def test_a_conversation_counts_with_its_items_until_it_is_deleted(counting: State) -> None:
    tag = new_tag()
    conversation = Conversation(f"conv_{tag}", 1, {"k": "v" * 500})
    ids = RunIds(tag)
    await counting.conversations.create(conversation, [message(ids.item("msg"), "user", "x" * 5_000)], ALICE)
    created = await used(counting)
    assert 6_000 < created < 8_500
    more = message(ids.item("msg"), "user", "y" * 5_000)
    await counting.conversations.append(conversation.id, [more], ALICE)
    await counting.conversations.append(conversation.id, [more], ALICE)  # already stored
    appended = await used(counting)
    assert 5_000 < appended - created < 6_000
    response = await respond(counting, await counting.conversations.chain(conversation.id, ALICE), "z" * 5_000)
    assert 20_000 < await used(counting) - appended < 26_000  # in its own turn and in the conversation
    await counting.conversations.delete_item(conversation.id, more["id"], ALICE)
    await counting.conversations.update(conversation.id, {}, ALICE)
    assert 14_500 < await used(counting) - appended < 20_000
    await counting.conversations.delete(conversation.id, ALICE)
    await counting.responses.delete(response, ALICE)
    assert await used(counting) == REST


async def test_a_background_response_counts_with_its_log(counting: State, server: Plain) -> None:
    ids = RunIds()
    document: dict[str, Any] = {"id": ids.response, "status": "queued", "background": True, "output": []}
    start = Batch(0, 1, b"data: 0\n\ndata: 1\n\n")
    body = {"model": "m", "instructions": "x" * 5_000}
    await counting.jobs.create(document, body, [], ALICE, "sealed", start)
    created = await used(counting)
    assert created > 5_000
    job = (await counting.jobs.take(ids.response, TakeReason.RUN, worker="w", lease=5, max_attempts=2)).job
    assert job is not None
    batch = Batch(2, 2, b"data: " + b"y" * 5_000 + b"\n\n")
    for _ in range(2):
        assert await counting.jobs.append([(ids.response, job.token, batch)], 5) == [True]
    await counting.jobs.count_log(job, len(batch.data))
    assert await used(counting) == created + len(batch.data)
    last = Batch(3, 3, b"data: 3\n\n", final=True)
    done = {**document, "status": "completed"}
    await counting.responses.commit(Chain.new(), done, [], ALICE, job.token, last=last)
    log = sum(len(entry[1][b"b"]) for entry in server.xrange(address(ids.response).log))
    assert log < await used(counting) < log + 3_500
    await counting.responses.delete(ids.response, ALICE)
    assert await used(counting) == REST


async def test_a_write_beyond_the_quota_is_a_429_and_nothing_is_written(limited: RateLimitMiddleware, server: Plain) -> None:
    state = limited(20_000)
    await state.quota.check(ALICE, 1_000)
    kept = await respond(state, Chain.new(), "x" * 5_000)
    before = {key: server.dump(key) for key in server.keys("*") if key not in accounts(server)}
    tag, stored = new_tag(), await used(state)
    refused = [
        respond(state, Chain.new(), "x" * 5_000),
        continued(state, kept, "y" * 5_000),
        state.conversations.create(Conversation(f"conv_{tag}", 1, {}), [message("m", "user", "x" * 10_000)], ALICE),
        state.jobs.create(made(Chain.new(), "")[0], {"x": "x" * 10_000}, [], ALICE, "sealed", Batch(0, 0, b"")),
    ]
    for attempt in refused:
        with pytest.raises(OverQuota) as caught:
            await attempt
        assert (caught.value.status, caught.value.code) == (429, "storage_quota_exceeded")
    assert {key: server.dump(key) for key in server.keys("*") if key not in accounts(server)} == before
    assert await used(state) == stored
    await respond(state, Chain.new(), "x" * 5_000, BOB)
    await state.responses.delete(kept, ALICE)
    await respond(state, Chain.new(), "x" * 5_000)


async def test_the_quota_check_refuses_an_owner_who_has_reached_the_quota(limited: RateLimitMiddleware, server: Plain) -> None:
    state = limited(8_000)
    await respond(state, Chain.new(), "x")
    await state.quota.check(ALICE, 1_000)
    filler = limited(MANY)
    await respond(filler, Chain.new(), "x" * 5_000)
    with pytest.raises(OverQuota):
        await state.quota.check(ALICE, 1_000)
    await state.quota.check(BOB, 1_000)


async def test_concurrent_commits_do_not_exceed_the_quota_together(limited: RateLimitMiddleware, server: Plain) -> None:
    states = [limited(100_000) for _ in range(2)]
    attempts = [respond(states[number % 2], Chain.new(), "x" * 5_000) for number in range(20)]
    done = await asyncio.gather(*attempts, return_exceptions=True)
    assert 6 < sum(isinstance(one, str) for one in done) < 10
    assert all(isinstance(one, str | OverQuota) for one in done)
    assert await used(states[0]) <= 110_000


async def test_an_older_size_report_does_not_replace_a_newer_one(counting: State) -> None:
    quota = counting.quota
    await quota.settle(ALICE, "t", [2_000_000_000_000_001, b"s1", 500, 60_000])
    await quota.settle(ALICE, "t", [2_000_000_000_000_000, b"s1", 9_000, 60_000])
    assert await used(counting) == 500
    await quota.settle(ALICE, "t", [2_000_000_000_000_002, b"s1", 0, 0])
    await quota.settle(ALICE, "t", [2_000_000_000_000_001, b"s1", 500, 60_000])  # from a commit before the deletion
    assert await used(counting) == 0


async def test_a_history_stored_without_a_quota_is_counted_when_it_is_continued(
    state: State, counting: State, server: Plain
) -> None:
    first = await respond(state, Chain.new(), "x" * 10_000)
    assert await used(counting) == 0
    second = await continued(counting, first, "y")
    assert await used(counting) > 20_000
    await continued(state, second, "z" * 5_000)  # by a replica without a quota
    await assert_segments_are_counted(server)


async def test_conversation_items_copied_into_a_history_are_counted(counting: State, limited: RateLimitMiddleware) -> None:
    tag = new_tag()
    conversation = Conversation(f"conv_{tag}", 1, {})
    await counting.conversations.create(conversation, [message(RunIds(tag).item("msg"), "user", "x" * 20_000)], ALICE)
    response = await respond(counting, await counting.conversations.chain(conversation.id, ALICE), "in it")
    before = await used(counting)
    strict = limited(before)
    with pytest.raises(OverQuota):
        await continued(strict, response, "on")
    assert await used(counting) == before
    await continued(counting, response, "on")
    assert await used(counting) > before + 20_000


async def test_the_reservation_for_a_background_response_that_was_not_created_expires_in_an_hour(
    limited: RateLimitMiddleware, valkey: Server, server: Plain
) -> None:
    async with wire(valkey.port) as line:
        distant = limited(MANY, url=line.url, patience=0)
        await distant.quota.check(ALICE, 0)  # to connect and to load the script
        line.cut_replies = MANY  # the reservation is executed, and nothing after it
        document = {"id": RunIds().response, "status": "queued"}
        with pytest.raises(StateUnavailable):
            await distant.jobs.create(document, {"model": "m"}, [], ALICE, "sealed", Batch(0, 0, b"data: 0\n\n"))
    [(_, expiry)] = server.zrange(f"rmw:{{b{ALICE}}}:expires", 0, -1, withscores=True)
    assert expiry - 1000 * server.time()[0] <= UNSETTLED + 1000


async def test_undoing_a_commit_that_was_never_executed_frees_its_reservation(counting: State) -> None:
    place = address(made(Chain.new(), "never")[0]["id"])
    commit, delete = load("state", "commit", "delete")
    keys = [place.record, place.tombstone]
    undo: tuple[Script, Args] = delete, [ALICE, "token", 1000, "token"]
    write = Write(commit, place, keys, [], ALICE, f"r{place.random}", size=500, undo=undo)
    await counting.quota.reserve(write)
    assert await used(counting) > 500
    writer = Writer(counting.client, counting.options)
    writer.undo(write)
    async with asyncio.timeout(60):
        while await used(counting):
            await asyncio.sleep(0.01)
    await writer.aclose()


async def test_requests_are_admitted_when_the_account_cannot_be_read(limited: RateLimitMiddleware, server: Plain) -> None:
    state = limited(10_000)
    for part in ("expires", "sizes"):
        server.set(f"rmw:{{b{ALICE}}}:{part}", "spoilt")
    await state.quota.check(ALICE, 1_000)
    await state.responses.get(await respond(state, Chain.new(), "x" * 10_000), ALICE)


async def test_an_event_log_that_grows_beyond_the_quota_is_refused_but_its_response_can_end(
    limited: RateLimitMiddleware, server: Plain
) -> None:
    state = limited(10_000)
    ids = RunIds()
    document: dict[str, Any] = {"id": ids.response, "status": "queued", "background": True, "output": []}
    await state.jobs.create(document, {}, [], ALICE, "sealed", Batch(0, 0, b"data: 0\n\n"))
    job = (await state.jobs.take(ids.response, TakeReason.RUN, worker="w", lease=5, max_attempts=2)).job
    assert job is not None
    await state.jobs.count_log(job, 5_000)
    with pytest.raises(OverQuota):
        await state.jobs.count_log(job, 10_000)
    # The end of the response is stored in any case.
    done = {**document, "status": "failed", "instructions": "x" * 20_000}
    last = Batch(1, 1, b"data: 1\n\n", final=True)
    await state.responses.commit(Chain.new(), done, [], ALICE, job.token, last=last)
    assert await used(state) > 20_000
