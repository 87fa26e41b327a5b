"""The captures of responses in Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from responses_mw.ids import RunIds
from responses_mw.state import Damaged, NewerRecord
from responses_mw.state.schema import CAPTURE_LIST, response_address

if TYPE_CHECKING:
    from responses_mw.state import State


@pytest.mark.parametrize(
    "value",
    [
        b"J[]",
        b'J{"turns":5}',
        b'J{"turns":[5]}',
        b'J{"turns":[{"number":"1"}]}',
        b'J{"turns":[],"events":[[1,1,0,null,"a"]]}',
        b'J{"turns":[],"events":[[1,"1",0,null,"a","{}"]]}',
        b"J{",
        b"x",
    ],
)
async def test_a_damaged_capture_is_reported(state: State, value: bytes) -> None:
    made = RunIds().response
    await state.client.command("SET", response_address(made).capture, value)
    with pytest.raises((Damaged, NewerRecord)):
        await state.captures.read(made)


async def test_no_capture_of_a_deleted_response_is_written(state: State) -> None:
    deleted, other = RunIds().response, RunIds().response
    await state.client.command("SET", response_address(deleted).tombstone, "x", "PX", 60_000)
    for one in (deleted, other):
        await state.captures.add(one, b'{"turns":[]}', maximum=10, seconds=60)
    assert await state.captures.read(deleted) is None
    assert await state.captures.read(other) == {"turns": []}
    assert response_address(deleted).capture.encode() not in await state.client.command("ZRANGE", CAPTURE_LIST, 0, -1)
