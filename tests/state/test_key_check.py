"""The check that all replicas have compatible secret keys, also during a rotation."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from responses_mw.state import State

if TYPE_CHECKING:
    from tests.support.valkey import Plain


async def test_replicas_with_the_same_key_agree(state: State) -> None:
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
        for keys in (before, after, before, after):  # replicas with either keys run and restart during the rollout
            assert await state.check_keys(keys)


async def test_a_replica_that_missed_a_rotation_disagrees(state: State) -> None:
    for keys in (["old"], ["old", "new"], ["new", "old"], ["new"]):
        await state.check_keys(keys)
    assert not await state.check_keys(["old"])
    assert await state.check_keys(["new"])


async def test_a_replica_without_the_key_that_others_encrypt_with_disagrees(state: State) -> None:
    await state.check_keys(["a", "b"])
    assert not await state.check_keys(["b", "c"])


async def test_the_check_values_of_unused_keys_expire(state: State, server: Plain) -> None:
    await state.check_keys(["a"])
    (key,) = server.keys("*")
    assert 0 < server.ttl(key) <= 7 * 24 * 60 * 60
    server.delete(key)  # as if it had expired
    assert await state.check_keys(["b"])
