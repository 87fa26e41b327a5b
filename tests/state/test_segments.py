"""Readers see the current turns while other replicas write and delete."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import pytest

from responses_mw.ids import random_part
from responses_mw.state import Chain, Missing, OverBound, State, StateOptions
from tests.support.stored import ALICE, BOB, continued, history, made, respond, turns

if TYPE_CHECKING:
    from tests.support.valkey import OpenState, Plain, Server

LONG = "a long text " * 120  # short enough to be stored uncompressed


async def grow(state: State, response: str, number: int) -> str:
    for _ in range(number):
        response = await continued(state, response, LONG)
    return response


async def test_turns_appended_by_another_replica_are_read(open_state: OpenState, valkey: Server, state: State) -> None:
    other = open_state(valkey.url)
    tip = await respond(state, Chain.new(), "0")
    for number in range(1, 6):
        tip = await continued(other if number % 2 else state, tip, str(number))
    expected = [text for number in range(6) for text in (str(number), f"{number}!")]
    assert await history(state, tip) == await history(other, tip) == expected


async def test_turns_that_replaced_deleted_ones_are_read(open_state: OpenState, valkey: Server, state: State) -> None:
    other = open_state(valkey.url)
    root = await respond(state, Chain.new(), "root")
    gone = [await continued(state, root, "gone")]
    gone.append(await continued(state, gone[0], "gone too"))
    assert len(await history(state, gone[1])) == 6
    for response in reversed(gone):
        await other.responses.delete(response, ALICE)
    tip = await continued(other, await continued(other, root, "new"), "tip")
    assert await history(state, tip) == ["root", "root!", "new", "new!", "tip", "tip!"]
    for response in gone:
        with pytest.raises(Missing):
            await state.responses.chain(response, ALICE)


async def test_a_response_deleted_by_another_replica_is_missing_even_after_an_earlier_read(
    open_state: OpenState, valkey: Server, state: State
) -> None:
    other = open_state(valkey.url)
    tip = await continued(state, await respond(state, Chain.new(), "root"), "tip")
    await history(state, tip)
    await other.responses.delete(tip, ALICE)
    with pytest.raises(Missing):
        await state.responses.chain(tip, ALICE)
    with pytest.raises(Missing):
        await state.responses.chain(tip, BOB)


async def test_a_history_lost_by_redis_is_missing_even_after_an_earlier_read(state: State, server: Plain) -> None:
    tip = await continued(state, await respond(state, Chain.new(), "one"), "two")
    await history(state, tip)
    server.lpop(next(iter(turns(server))))
    with pytest.raises(Missing):
        await state.responses.chain(tip, ALICE)
    server.delete(*turns(server))
    with pytest.raises(Missing):
        await state.responses.chain(tip, ALICE)


async def test_a_run_stores_the_whole_history_if_redis_lost_it_during_the_run(state: State, server: Plain) -> None:
    tip = await grow(state, await respond(state, Chain.new(), "naïve 🙂"), 3)
    before = {random: server.lrange(random, 0, -1) for random in turns(server)}
    await history(state, tip)
    running = await state.responses.chain(tip, ALICE)
    server.flushall()
    late = await respond(state, running, "late")
    (stored,) = (server.lrange(segment, 0, -1) for segment in turns(server))
    assert stored[:-1] == next(iter(before.values()))
    assert len(await history(state, late)) == 10


async def test_a_history_read_by_its_owner_is_missing_for_another_owner(state: State) -> None:
    tip = await continued(state, await respond(state, Chain.new(), "secret"), "secret")
    await history(state, tip)
    with pytest.raises(Missing):
        await state.responses.chain(tip, BOB)


async def test_decoding_a_history_of_many_small_values_stops_at_its_memory_limit(state: State, server: Plain) -> None:
    bounded = State(state.client, StateOptions(chain_memory=5_000_000))
    tip = await respond(state, Chain.new(), "hi")
    for _ in range(10):  # fork, so that there are several segments
        parent = await state.responses.chain(tip, ALICE)
        document, given = made(parent, "more")
        given[0]["more"] = [[]] * 20_000
        await state.responses.commit(parent, document, given, ALICE, random_part())
        await respond(state, await state.responses.chain(tip, ALICE), "a sibling")
        tip = document["id"]
    before = len(gc.get_objects())
    with pytest.raises(OverBound):
        await bounded.responses.chain(tip, ALICE)
    with pytest.raises(OverBound):
        await bounded.responses.input_items(tip, ALICE, limit=1)
    assert len(gc.get_objects()) - before < 120_000
    assert (await bounded.responses.get(tip, ALICE)).input == given


async def test_a_call_removes_a_limited_number_of_expired_forks(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    (segment,) = turns(server)
    refs = segment + b":refs"
    server.zadd(refs, {f"s{number}": 1 for number in range(2500)})  # references of expired segments
    left = []
    for _ in range(3):
        await state.responses.delete(await continued(state, root, "one more"), ALICE)
        left.append(server.zcard(refs))
    assert left[0] > 1
    assert left[-1] == 1
    assert await history(state, root) == ["root", "root!"]
    await state.responses.delete(root, ALICE)
    assert not turns(server)


async def test_concurrent_readers_of_growing_branches_read_the_correct_history(state: State) -> None:
    root = await respond(state, Chain.new(), "root")

    async def branch(name: str) -> None:
        tip, expected = root, ["root", "root!"]
        for number in range(10):
            text = f"{name}{number}"
            tip = await continued(state, tip, text)
            expected += [text, f"{text}!"]
            assert await history(state, tip) == expected

    await asyncio.gather(*(branch(name) for name in "abcde"))
