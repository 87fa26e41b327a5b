"""The history of a response, and that branches never leak into each other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from responses_mw.errors import BadRequest
from responses_mw.ids import RANDOM_LENGTH, TAG_LENGTH, random_part
from responses_mw.state import Chain, Missing, State
from responses_mw.state.models import Pointer
from tests.support.stored import ALICE, BOB, address, continued, history, kept, made, respond, turns
from tests.support.valkey import wire

if TYPE_CHECKING:
    from tests.support.valkey import OpenState, Plain, Server


async def test_a_history_has_the_input_and_output_of_every_response_in_order(state: State) -> None:
    first = await respond(state, Chain.new(), "one")
    last = await continued(state, await continued(state, first, "two"), "three")
    assert await history(state, last) == ["one", "one!", "two", "two!", "three", "three!"]
    assert await history(state, first) == ["one", "one!"]


async def test_a_new_history_is_empty() -> None:
    chain = Chain.new()
    assert (chain.items, chain.call_ids) == ([], frozenset())


async def test_the_call_ids_of_a_history_are_those_of_calls_and_not_of_outputs(state: State) -> None:
    chain = Chain.new()
    document, _ = made(chain, "call")
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}"}
    document["output"] = [call]
    answer = {"type": "function_call_output", "id": "fco_1", "call_id": "call_0", "output": "x"}
    await state.responses.commit(chain, document, [answer], ALICE, random_part())
    assert (await state.responses.chain(document["id"], ALICE)).call_ids == {"call_1"}


async def test_concurrent_continuations_of_a_response_both_succeed(open_state: OpenState, valkey: Server, state: State) -> None:
    other = open_state(valkey.url)
    parent = await continued(state, await respond(state, Chain.new(), "root"), "parent")
    left, right = await asyncio.gather(continued(state, parent, "left"), continued(other, parent, "right"))
    common = ["root", "root!", "parent", "parent!"]
    assert await history(other, left) == [*common, "left", "left!"]
    assert await history(state, right) == [*common, "right", "right!"]
    assert await history(state, parent) == common


async def test_a_fork_does_not_copy_stored_turns(state: State, server: Plain) -> None:
    parent = await continued(state, await respond(state, Chain.new(), "one"), "two")
    for number in range(5):
        await continued(state, parent, f"branch {number}")
    assert sorted(turns(server).values()) == [1, 1, 1, 1, 3]


async def test_a_run_that_continues_a_deleted_response_does_not_join_the_branch_that_replaced_it(state: State) -> None:
    root = await respond(state, Chain.new(), "root")
    tip = await continued(state, root, "tip")
    running = await state.responses.chain(tip, ALICE)
    await state.responses.delete(tip, ALICE)
    other = await continued(state, root, "other")
    late = await respond(state, running, "late")
    assert await history(state, late) == ["root", "root!", "tip", "tip!", "late", "late!"]
    assert await history(state, other) == ["root", "root!", "other", "other!"]


async def test_a_run_whose_parent_expires_is_stored_with_its_whole_history(state: State, server: Plain) -> None:
    parent = await continued(state, await respond(state, Chain.new(), "one"), "two")
    running = await state.responses.chain(parent, ALICE)
    server.flushall()
    late = await respond(state, running, "three")
    assert await history(state, late) == ["one", "one!", "two", "two!", "three", "three!"]
    assert list(turns(server).values()) == [3]


async def test_a_run_whose_parents_turns_are_lost_is_stored_with_its_whole_history(state: State, server: Plain) -> None:
    parent = await continued(state, await respond(state, Chain.new(), "one"), "two")
    running = await state.responses.chain(parent, ALICE)
    server.rpop(next(iter(turns(server))))
    late = await respond(state, running, "three")
    assert await history(state, late) == ["one", "one!", "two", "two!", "three", "three!"]


async def test_deeply_nested_forks_are_readable_and_their_paths_have_a_maximum_length(state: State, server: Plain) -> None:
    tip = await respond(state, Chain.new(), "0")
    expected = ["0", "0!"]
    for number in range(1, 40):
        parent = tip
        tip = await continued(state, parent, str(number))
        await continued(state, parent, "aside")
        tip = await continued(state, parent, f"fork {number}")
        expected += [f"fork {number}", f"fork {number}!"]
    assert await history(state, tip) == expected
    assert max(len(path.split(b",")) for path in paths(server)) == 16


def paths(server: Plain) -> list[bytes]:
    return [server.hget(key, "path") or b"" for key in server.keys("*:r:*")]


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_a_failed_or_cancelled_response_cannot_be_continued(state: State, status: str) -> None:
    response = await respond(state, Chain.new(), "x", status=status)
    with pytest.raises(BadRequest) as refused:
        await state.responses.chain(response, ALICE)
    assert f"'{response}' has status '{status}'" in refused.value.message


@pytest.mark.parametrize("status", ["queued", "in_progress"])
async def test_a_queued_or_running_response_cannot_be_continued(state: State, server: Plain, status: str) -> None:
    document, _ = made(Chain.new(), "x")
    server.hset(address(document["id"]).record, mapping={"v": 1, "owner": ALICE, "status": status, "token": "t"})
    with pytest.raises(BadRequest, match="cannot be continued"):
        await state.responses.chain(document["id"], ALICE)


async def test_an_incomplete_response_can_be_continued(state: State) -> None:
    response = await respond(state, Chain.new(), "x", status="incomplete")
    assert await history(state, await continued(state, response, "y")) == ["x", "x!", "y", "y!"]


async def test_a_failed_attempt_does_not_occupy_the_next_place_in_its_parents_segment(state: State, server: Plain) -> None:
    parent = await respond(state, Chain.new(), "parent")
    chain = await state.responses.chain(parent, ALICE)
    attempt = await respond(state, chain, "attempt", status="failed")
    success = await respond(state, chain, "success")
    assert server.hget(address(attempt).record, "path") != b""
    assert server.hget(address(success).record, "path") == b""


LETTERS = TAG_LENGTH + RANDOM_LENGTH
NO_IDS = ["", "resp_", "resp_1", "x", "conv_" + "a" * TAG_LENGTH, "resp_" + "A" * LETTERS, "msg_" + "a" * LETTERS]
NO_IDS += ["resp_" + "a" * (LETTERS - 1), "resp_" + "a" * (LETTERS - 1) + "}", "resp_" + "a" * (LETTERS + 1)]


@pytest.mark.parametrize("response_id", [*NO_IDS, "resp_" + "a" * LETTERS])
async def test_an_unknown_response_id_is_missing_and_named_in_every_operation(state: State, response_id: str) -> None:
    responses = state.responses
    for asked in (responses.chain, responses.get, responses.delete, responses.input_items):
        with pytest.raises(Missing) as missing:
            await asked(response_id, ALICE)
        assert missing.value.message == f"Response with id '{response_id}' not found."


async def test_a_response_of_another_owner_is_missing_in_every_operation(state: State, server: Plain) -> None:
    response = await respond(state, Chain.new(), "secret", ALICE)
    before = kept(server)
    responses = state.responses
    for asked in (responses.chain, responses.get, responses.delete, responses.input_items):
        with pytest.raises(Missing) as missing:
            await asked(response, BOB)
        assert missing.value.message == f"Response with id '{response}' not found."
    assert kept(server) == before
    assert await history(state, response, ALICE) == ["secret", "secret!"]


async def test_a_history_that_redis_lost_in_part_is_missing_and_not_shortened(state: State, server: Plain) -> None:
    tip = await continued(state, await respond(state, Chain.new(), "one"), "two")
    segment = next(iter(turns(server)))
    server.lpop(segment)
    with pytest.raises(Missing):
        await state.responses.chain(tip, ALICE)
    server.delete(segment)
    for asked in (state.responses.chain, state.responses.get):
        with pytest.raises(Missing):
            await asked(tip, ALICE)


async def test_branches_are_not_mixed_when_redis_has_lost_the_references_to_segments(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    tip = await continued(state, root, "tip")
    fork = await continued(state, await continued(state, root, "fork"), "on")
    server.delete(*server.keys("*:refs"))
    other = await continued(state, tip, "other")
    assert await history(state, other) == ["root", "root!", "tip", "tip!", "other", "other!"]
    await state.responses.delete(other, ALICE)
    again = await continued(state, root, "again")
    assert await history(state, again) == ["root", "root!", "again", "again!"]
    assert await history(state, tip) == ["root", "root!", "tip", "tip!"]
    assert await history(state, fork) == ["root", "root!", "fork", "fork!", "on", "on!"]
    await state.responses.delete(root, ALICE)
    for lost in (tip, fork):
        with pytest.raises(Missing):
            await history(state, lost)


async def test_a_history_of_any_length_is_read_in_two_round_trips(open_state: OpenState, valkey: Server, state: State) -> None:
    chain, tip = Chain.new(), ""
    for number in range(500):
        tip = await respond(state, chain, str(number))
        chain = await state.responses.chain(tip, ALICE) if number < 3 else await grown(state, chain, tip)
    fork = await continued(state, await continued(state, tip, "on"), "and on")
    async with wire(valkey.port) as line:
        distant = open_state(line.url)
        await distant.client.pipeline([("PING",)])  # connecting takes round trips too
        line.trips = 0
        assert len(await history(distant, tip)) == 1000
        assert line.trips == 2
        assert len(await history(distant, fork)) == 1004
        assert line.trips == 4
        await respond(distant, chain, "a fork")
        assert line.trips == 5


async def grown(state: State, chain: Chain, tip: str) -> Chain:
    """Return the chain that ends in `tip` without its items, because reading 500 growing histories would be slow."""
    at = address(tip)
    segment, length, path = await state.client.redis.execute_command("HMGET", at.record, "segment", "length", "path")
    return Chain(chain.tag, [], Pointer(at.random, segment.decode(), int(length), path.decode()))


async def test_a_committed_response_can_be_continued_on_another_replica_immediately(
    open_state: OpenState, valkey: Server, state: State
) -> None:
    other = open_state(valkey.url)

    async def relay(number: int) -> None:
        first = await respond(state, Chain.new(), f"{number}")
        second = await continued(other, first, "next")
        assert await history(state, second) == [f"{number}", f"{number}!", "next", "next!"]

    for batch in range(10):
        await asyncio.gather(*(relay(batch * 100 + number) for number in range(100)))
