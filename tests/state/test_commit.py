"""Commits are atomic, idempotent and fenced by token."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson
import pytest

from responses_mw.ids import random_part
from responses_mw.state import Batch, Chain, Damaged, Deleted, Fenced, Missing, NewerRecord, OverBound, State, StateOptions
from tests.support.stored import ALICE, address, continued, everything, history, kept, made, respond, turns
from tests.support.valkey import wire

if TYPE_CHECKING:
    from tests.support.valkey import OpenState, Plain, Server


async def test_get_returns_the_stored_document_and_input(state: State) -> None:
    document, given = made(Chain.new(), "naïve 🙂")
    await state.responses.commit(Chain.new(), document, given, ALICE, random_part())
    stored = await state.responses.get(document["id"], ALICE)
    assert orjson.dumps(stored.document) == orjson.dumps(document)
    assert stored.input == given


@pytest.mark.parametrize("size", [10, 5_000, 300_000])
async def test_texts_of_any_size_can_be_read_and_large_ones_are_compressed(state: State, server: Plain, size: int) -> None:
    text = ("It is a truth universally acknowledged. " * (size // 40 + 1))[:size]
    response = await respond(state, Chain.new(), text)
    assert await history(state, response) == [text, f"{text}!"]
    if size > 4096:
        assert server.memory_usage(next(iter(turns(server)))) < size


async def test_a_repeated_commit_changes_nothing(state: State, server: Plain) -> None:
    chain = await state.responses.chain(await respond(state, Chain.new(), "one"), ALICE)
    document, given = made(chain, "two")
    token = random_part()
    await state.responses.commit(chain, document, given, ALICE, token)
    before = everything(server)
    await state.responses.commit(chain, document, given, ALICE, token)
    assert everything(server) == before


async def test_a_repeated_commit_changes_nothing_after_its_response_was_continued(state: State) -> None:
    chain = await state.responses.chain(await respond(state, Chain.new(), "one"), ALICE)
    document, given = made(chain, "two")
    token = random_part()
    await state.responses.commit(chain, document, given, ALICE, token)
    tip = await continued(state, document["id"], "three")
    await state.responses.commit(chain, document, given, ALICE, token)
    assert await history(state, tip) == ["one", "one!", "two", "two!", "three", "three!"]


async def test_a_commit_whose_reply_is_lost_is_repeated_and_stores_one_turn(
    open_state: OpenState, valkey: Server, state: State, server: Plain
) -> None:
    first = await respond(state, Chain.new(), "one")
    async with wire(valkey.port) as line:
        distant = open_state(line.url)
        chain = await distant.responses.chain(first, ALICE)
        line.cut_replies = 1
        second = await respond(distant, chain, "two")
        assert line.cut_replies == 0
        assert await history(distant, second) == ["one", "one!", "two", "two!"]
    assert list(turns(server).values()) == [2]


LAST = Batch(7, 7, b"event: e\ndata: {}\n\n", final=True)


async def test_a_commit_with_another_token_is_fenced_and_writes_nothing(state: State, server: Plain) -> None:
    chain = Chain.new()
    document, given = made(chain, "mine")
    await state.responses.commit(chain, document, given, ALICE, random_part())
    before = everything(server)
    with pytest.raises(Fenced):
        await state.responses.commit(chain, {**document, "status": "failed"}, given, ALICE, random_part())
    assert everything(server) == before


async def test_a_commit_that_ends_a_job_does_not_create_a_missing_record(state: State, server: Plain) -> None:
    document, given = made(Chain.new(), "lost")
    with pytest.raises(Fenced):
        await state.responses.commit(Chain.new(), document, given, ALICE, random_part(), last=LAST)
    assert server.keys("*") == []


async def test_a_running_record_is_completed_only_with_its_token(state: State, server: Plain) -> None:
    document, given = made(Chain.new(), "queued")
    record = {"v": 1, "owner": ALICE, "status": "in_progress", "token": "t", "lease_until": 1, "next_seq": 7}
    server.hset(address(document["id"]).record, mapping=record)
    with pytest.raises(Fenced):
        await state.responses.commit(Chain.new(), document, given, ALICE, "other", last=LAST)
    await state.responses.commit(Chain.new(), document, given, ALICE, "t", last=LAST)
    assert await history(state, document["id"]) == ["queued", "queued!"]


async def test_a_response_deleted_before_a_repeated_commit_is_not_stored_again(state: State, server: Plain) -> None:
    chain = Chain.new()
    document, given = made(chain, "gone")
    token = random_part()
    await state.responses.commit(chain, document, given, ALICE, token)
    await state.responses.delete(document["id"], ALICE)
    with pytest.raises(Deleted):
        await state.responses.commit(chain, document, given, ALICE, token)
    assert kept(server) == []


@pytest.mark.parametrize(("field", "value"), [("v", "new"), ("document", "J1"), ("length", "long"), ("path", "a:b")])
async def test_an_invalid_value_in_a_record_is_reported_as_damaged(state: State, server: Plain, field: str, value: str) -> None:
    document, given = made(Chain.new(), "x")
    await state.responses.commit(Chain.new(), document, given, ALICE, random_part())
    server.hset(address(document["id"]).record, field, value)
    reads = state.responses.get if field == "document" else state.responses.chain
    with pytest.raises(Damaged):
        await reads(document["id"], ALICE)


async def test_a_record_of_a_newer_release_is_refused_and_not_changed(state: State, server: Plain) -> None:
    chain = Chain.new()
    document, given = made(chain, "x")
    token = random_part()
    await state.responses.commit(chain, document, given, ALICE, token)
    server.hset(address(document["id"]).record, "v", 2)
    before = everything(server)
    asked = [
        state.responses.get(document["id"], ALICE),
        state.responses.chain(document["id"], ALICE),
        state.responses.delete(document["id"], ALICE),
        state.responses.commit(chain, document, given, ALICE, token),
    ]
    for asking in asked:
        with pytest.raises(NewerRecord) as refused:
            await asking
        assert refused.value.status == 503
    assert everything(server) == before


async def test_a_turn_without_a_size_is_reported_as_damaged(state: State, server: Plain) -> None:
    response = await respond(state, Chain.new(), "x")
    segment = next(iter(turns(server)))
    server.lset(segment, 0, server.lindex(segment, 0)[:25] + b"Zstandard:")
    with pytest.raises(Damaged):
        await state.responses.chain(response, ALICE)


async def test_a_segment_of_the_wrong_type_is_reported_as_damaged_and_its_key_logged(
    state: State, server: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    root = await respond(state, Chain.new(), "root")
    await continued(state, root, "left")
    right = await continued(state, root, "right")
    segment = min(turns(server), key=server.llen).decode()  # one of the two segments that `right` reads
    server.delete(segment)
    server.set(segment, "x")
    with pytest.raises(Damaged):
        await state.responses.chain(right, ALICE)
    assert segment in caplog.text
    assert state.client.away_for == 0


async def test_a_turn_in_an_unknown_format_is_reported_as_a_newer_record(state: State, server: Plain) -> None:
    response = await respond(state, Chain.new(), "x")
    segment = next(iter(turns(server)))
    turn = server.lindex(segment, 0)
    server.lset(segment, 0, turn[:25] + b"Q" + turn[26:])
    with pytest.raises(NewerRecord):
        await state.responses.get(response, ALICE)


BOUNDS = [
    StateOptions(response_bytes=1_000),
    StateOptions(chain_bytes=1_500),
    StateOptions(chain_items=3),
]


@pytest.mark.parametrize("bounds", BOUNDS)
async def test_a_commit_beyond_a_limit_is_a_413_and_writes_nothing(
    valkey: Server, state: State, server: Plain, bounds: StateOptions
) -> None:
    bounded = State(state.client, bounds)
    first = await respond(bounded, Chain.new(), "x" * 100)
    before = everything(server)
    with pytest.raises(OverBound) as refused:
        await continued(bounded, first, "y" * 600)
    assert refused.value.status == 413
    assert everything(server) == before


async def test_limits_apply_to_uncompressed_sizes(state: State, server: Plain) -> None:
    bounded = State(state.client, StateOptions(chain_bytes=150_000))
    first = await respond(bounded, Chain.new(), "x" * 50_000)
    assert server.memory_usage(next(iter(turns(server)))) < 5_000
    with pytest.raises(OverBound):
        await continued(bounded, first, "y" * 50_000)


async def test_every_stored_key_expires(state: State, server: Plain) -> None:
    short = State(state.client, StateOptions(ttl_seconds=100))
    parent = await respond(short, Chain.new(), "one")
    for text in ("two", "three"):
        await continued(short, parent, text)
    await short.responses.delete(parent, ALICE)
    lives = {key: server.pttl(key) for key in server.keys("*")}
    assert all(life > 0 for life in lives.values())
    assert all(life <= 100_000 for key, life in lives.items() if b":x:" not in key)


async def test_a_continuation_extends_the_life_of_earlier_texts_but_not_of_their_responses(state: State, server: Plain) -> None:
    short, long = State(state.client, StateOptions(ttl_seconds=2)), State(state.client, StateOptions(ttl_seconds=1000))
    root = await respond(short, Chain.new(), "root")
    middle = await continued(short, root, "middle")
    await continued(short, root, "fork")
    tip = await continued(long, await continued(long, root, "other fork"), "tip")
    await asyncio.sleep(2.1)
    assert await history(state, tip) == ["root", "root!", "other fork", "other fork!", "tip", "tip!"]
    for expired in (root, middle):
        with pytest.raises(Missing):
            await state.responses.get(expired, ALICE)


async def test_a_later_commit_does_not_shorten_the_time_to_live(state: State, server: Plain) -> None:
    short, long = State(state.client, StateOptions(ttl_seconds=2)), State(state.client, StateOptions(ttl_seconds=1000))
    root = await respond(long, Chain.new(), "root")
    await continued(short, root, "child")
    assert all(server.ttl(key) > 100 for key in turns(server))
