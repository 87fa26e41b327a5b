"""What is deleted is gone, and with it every text that nothing living stands on. Looked at in all keys."""

from __future__ import annotations

import asyncio
from itertools import permutations
from typing import TYPE_CHECKING

import pytest

from responses_mw.ids import random_part
from responses_mw.state import Chain, Missing, State, StateOptions
from tests.support.stored import ALICE, continued, everything, history, kept, made, respond, turns

if TYPE_CHECKING:
    from tests.support.valkey import Plain


async def test_a_deleted_response_is_gone_for_every_question(state: State) -> None:
    response = await respond(state, Chain.new(), "x")
    await state.responses.delete(response, ALICE)
    responses = state.responses
    for asked in (responses.get, responses.chain, responses.input_items, responses.delete):
        with pytest.raises(Missing) as missing:
            await asked(response, ALICE)
        assert missing.value.status == 404


async def test_descendants_of_a_deleted_response_still_work(state: State) -> None:
    root = await respond(state, Chain.new(), "root")
    child = await continued(state, root, "child")
    await state.responses.delete(root, ALICE)
    grandchild = await continued(state, child, "grandchild")
    assert await history(state, grandchild) == ["root", "root!", "child", "child!", "grandchild", "grandchild!"]


async def test_a_text_is_erased_when_the_last_that_stands_on_it_is_deleted(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    child = await continued(state, root, "child")
    await state.responses.delete(root, ALICE)
    assert list(turns(server).values()) == [2]
    await state.responses.delete(child, ALICE)
    assert kept(server) == []


async def test_deleting_the_tip_erases_its_text_alone(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    child = await continued(state, root, "child")
    await state.responses.delete(child, ALICE)
    assert list(turns(server).values()) == [1]
    assert await history(state, root) == ["root", "root!"]


@pytest.mark.parametrize("order", list(permutations(range(4))))
async def test_nothing_remains_in_whatever_order_a_tree_is_deleted(state: State, server: Plain, order: tuple[int, ...]) -> None:
    root = await respond(state, Chain.new(), "root")
    child = await continued(state, root, "child")
    responses = [root, child, await continued(state, root, "fork"), await continued(state, child, "tip")]
    for position in order:
        await state.responses.delete(responses[position], ALICE)
    assert kept(server) == []


async def test_forks_that_come_and_go_leave_no_trace_in_what_they_forked_from(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    await continued(state, root, "tip")
    before = everything(server)
    for number in range(5):
        await state.responses.delete(await continued(state, root, f"fork {number}"), ALICE)
    assert {key: value for key, value in everything(server).items() if b":x:" not in key} == before


async def test_a_failed_response_is_erased_too(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    failed = await respond(state, await state.responses.chain(root, ALICE), "failed", status="failed")
    await state.responses.delete(failed, ALICE)
    assert list(turns(server).values()) == [1]
    await state.responses.delete(root, ALICE)
    assert kept(server) == []


async def test_texts_of_expired_responses_go_when_a_neighbour_is_deleted(state: State, server: Plain) -> None:
    short = State(state.client, StateOptions(ttl_seconds=1))
    root = await respond(state, Chain.new(), "root")
    await continued(short, root, "tip")
    await continued(short, root, "fork")
    await asyncio.sleep(1.1)
    assert list(turns(server).values()) == [2]
    await state.responses.delete(root, ALICE)
    assert kept(server) == []


async def test_a_commit_takes_the_place_of_an_expired_tip(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    await continued(State(state.client, StateOptions(ttl_seconds=1)), root, "tip")
    await asyncio.sleep(1.1)
    other = await continued(state, root, "other")
    assert list(turns(server).values()) == [2]
    assert await history(state, other) == ["root", "root!", "other", "other!"]


async def test_an_expired_text_does_not_live_on_with_a_branch_that_goes_on(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    await continued(State(state.client, StateOptions(ttl_seconds=1)), root, "the tip")
    fork = await continued(state, root, "fork")
    await asyncio.sleep(1.1)
    assert sorted(turns(server).values()) == [1, 2]
    await continued(state, fork, "on")
    assert sorted(turns(server).values()) == [1, 2]
    assert b"the tip" not in repr(everything(server)).encode()
    assert await history(state, fork) == ["root", "root!", "fork", "fork!"]


async def test_what_a_run_in_flight_stood_on_is_erased_with_its_own_response(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    running = await state.responses.chain(root, ALICE)
    await state.responses.delete(root, ALICE)
    late = await respond(state, running, "late")
    assert list(turns(server).values()) == [2]
    await state.responses.delete(late, ALICE)
    assert kept(server) == []


async def test_a_tombstone_holds_nothing_of_the_response_and_goes_by_itself(state: State, server: Plain) -> None:
    chain = Chain.new()
    document, given = made(chain, "my secret")
    await state.responses.commit(chain, document, given, ALICE, random_part())
    await state.responses.delete(document["id"], ALICE)
    (tombstone,) = server.keys("*")
    assert b"secret" not in server.get(tombstone)
    assert 0 < server.ttl(tombstone) <= 24 * 60 * 60
