"""Replicas whose secret keys differ are told, and those that are in the middle of a rotation are not."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from responses_mw.state import State

if TYPE_CHECKING:
    from tests.support.valkey import Plain


async def test_the_first_replica_agrees_and_one_with_the_same_key_too(state: State) -> None:
    assert await state.check_keys(["a"])
    assert await state.check_keys(["a"])


async def test_a_replica_with_another_key_disagrees_and_changes_nothing(state: State) -> None:
    await state.check_keys(["a"])
    for _ in range(2):
        assert not await state.check_keys(["b"])
    assert await state.check_keys(["a"])


async def test_every_step_of_a_rotation_agrees_with_the_step_before(state: State) -> None:
    steps = [["old"], ["old", "new"], ["new", "old"], ["new"]]
    for before, after in pairwise(steps):
        for keys in (before, after, before, after):  # while it is rolled out, both run and restart
            assert await state.check_keys(keys)


async def test_a_replica_that_missed_a_rotation_disagrees(state: State) -> None:
    for keys in (["old"], ["old", "new"], ["new", "old"], ["new"]):
        await state.check_keys(keys)
    assert not await state.check_keys(["old"])
    assert await state.check_keys(["new"])


async def test_a_replica_that_cannot_open_what_the_others_seal_disagrees(state: State) -> None:
    await state.check_keys(["a", "b"])
    assert not await state.check_keys(["b", "c"])


async def test_keys_that_were_given_up_long_ago_bind_nobody(state: State, server: Plain) -> None:
    await state.check_keys(["a"])
    (key,) = server.keys("*")
    assert 0 < server.ttl(key) <= 7 * 24 * 60 * 60
    server.delete(key)  # as when it has expired
    assert await state.check_keys(["b"])
