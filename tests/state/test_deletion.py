"""Deletion erases every text that no stored response needs any longer. The tests inspect all keys."""

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


async def test_a_deleted_response_is_missing_in_every_operation(state: State) -> None:
    response = await respond(state, Chain.new(), "x")
    await state.responses.delete(response, ALICE)
    responses = state.responses
    for asked in (responses.get, responses.chain, responses.input_items, responses.delete):
        with pytest.raises(Missing) as missing:
            await asked(response, ALICE)
        assert missing.value.status == 404


async def test_continuations_of_a_deleted_response_stay_readable(state: State) -> None:
    root = await respond(state, Chain.new(), "root")
    child = await continued(state, root, "child")
    await state.responses.delete(root, ALICE)
    grandchild = await continued(state, child, "grandchild")
    assert await history(state, grandchild) == ["root", "root!", "child", "child!", "grandchild", "grandchild!"]


async def test_a_text_is_erased_with_the_last_response_that_includes_it(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    child = await continued(state, root, "child")
    await state.responses.delete(root, ALICE)
    assert list(turns(server).values()) == [2]
    await state.responses.delete(child, ALICE)
    assert kept(server) == []


async def test_deleting_the_last_response_erases_only_its_own_text(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    child = await continued(state, root, "child")
    await state.responses.delete(child, ALICE)
    assert list(turns(server).values()) == [1]
    assert await history(state, root) == ["root", "root!"]


@pytest.mark.parametrize("order", list(permutations(range(4))))
async def test_deleting_a_tree_of_responses_in_any_order_leaves_no_text(
    state: State, server: Plain, order: tuple[int, ...]
) -> None:
    root = await respond(state, Chain.new(), "root")
    child = await continued(state, root, "child")
    responses = [root, child, await continued(state, root, "fork"), await continued(state, child, "tip")]
    for position in order:
        await state.responses.delete(responses[position], ALICE)
    assert kept(server) == []


async def test_deleted_forks_leave_no_trace_in_the_history_they_forked_from(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    await continued(state, root, "tip")
    before = everything(server)
    for number in range(5):
        await state.responses.delete(await continued(state, root, f"fork {number}"), ALICE)
    assert {key: value for key, value in everything(server).items() if b":x:" not in key} == before


async def test_the_text_of_a_deleted_failed_response_is_erased(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    failed = await respond(state, await state.responses.chain(root, ALICE), "failed", status="failed")
    await state.responses.delete(failed, ALICE)
    assert list(turns(server).values()) == [1]
    await state.responses.delete(root, ALICE)
    assert kept(server) == []


async def test_deleting_a_response_also_erases_the_texts_of_expired_neighbours(state: State, server: Plain) -> None:
    short = State(state.client, StateOptions(ttl_seconds=1))
    root = await respond(state, Chain.new(), "root")
    await continued(short, root, "tip")
    await continued(short, root, "fork")
    await asyncio.sleep(1.1)
    assert list(turns(server).values()) == [2]
    await state.responses.delete(root, ALICE)
    assert kept(server) == []


async def test_a_commit_replaces_the_turn_of_an_expired_response(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    await continued(State(state.client, StateOptions(ttl_seconds=1)), root, "tip")
    await asyncio.sleep(1.1)
    other = await continued(state, root, "other")
    assert list(turns(server).values()) == [2]
    assert await history(state, other) == ["root", "root!", "other", "other!"]


async def test_continuing_a_branch_erases_the_expired_text_of_another(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    await continued(State(state.client, StateOptions(ttl_seconds=1)), root, "the tip")
    fork = await continued(state, root, "fork")
    await asyncio.sleep(1.1)
    assert sorted(turns(server).values()) == [1, 2]
    await continued(state, fork, "on")
    assert sorted(turns(server).values()) == [1, 2]
    assert b"the tip" not in repr(everything(server)).encode()
    assert await history(state, fork) == ["root", "root!", "fork", "fork!"]


async def test_a_history_deleted_during_a_run_is_erased_with_the_response_of_that_run(state: State, server: Plain) -> None:
    root = await respond(state, Chain.new(), "root")
    running = await state.responses.chain(root, ALICE)
    await state.responses.delete(root, ALICE)
    late = await respond(state, running, "late")
    assert list(turns(server).values()) == [2]
    await state.responses.delete(late, ALICE)
    assert kept(server) == []


async def test_a_tombstone_has_no_text_of_the_response_and_expires(state: State, server: Plain) -> None:
    chain = Chain.new()
    document, given = made(chain, "my secret")
    await state.responses.commit(chain, document, given, ALICE, random_part())
    await state.responses.delete(document["id"], ALICE)
    (tombstone,) = server.keys("*")
    assert b"secret" not in server.get(tombstone)
    assert 0 < server.ttl(tombstone) <= 24 * 60 * 60
