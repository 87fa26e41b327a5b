"""The window of recent summaries that the inspector's pages add up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.ids import RunIds
from responses_mw.state import StateUnavailable, recent_window
from responses_mw.state.recent import ALL, RecentFilter
from responses_mw.state.schema import RECENT_SHARDS, recent_key
from tests.state import test_recent
from tests.state.test_recent import MANY

if TYPE_CHECKING:
    from responses_mw.state import State
    from tests.support.valkey import Plain

KEYS = [recent_key(shard) for shard in range(RECENT_SHARDS)]


FIRST = RunIds()


def made(number: int, **facts: Any) -> tuple[str, bytes]:
    """Return the summary of a response. All are in the same shard, whose order is certain."""
    name = RunIds(FIRST.tag).response
    return name, test_recent.made(number, id=name, **facts)[1]


async def read(state: State, wanted: RecentFilter = ALL) -> tuple[list[float], bool]:
    """Return when the responses of the window ended, and whether it is cut."""
    summaries, is_cut = await state.recent_window.read(wanted)
    return [summary["ended"] for summary in summaries], is_cut


async def test_summaries_are_read_only_once(state: State, server: Plain) -> None:
    await state.recent.add([made(number) for number in range(1, 4)], MANY)
    assert await read(state) == ([3, 2, 1], False)
    ends = await state.recent.ends()
    server.delete(*KEYS)
    for key, end in zip(KEYS, ends, strict=True):  # so that later entries have higher ids
        server.execute_command("XGROUP", "CREATE", key, "g", "0", "MKSTREAM")
        server.execute_command("XSETID", key, end)
    await state.recent.add([made(4)], MANY)
    assert await read(state) == ([4, 3, 2, 1], False)


async def test_summaries_that_are_added_during_a_reading_are_in_the_window(state: State) -> None:
    added = [made(number) for number in range(1, 30)]
    await state.recent.add(added[:9], MANY)
    readings = await asyncio.gather(*(read(state) for _ in range(3)), state.recent.add(added[9:], MANY), read(state))
    assert all(len(reading[0]) == len(set(reading[0])) for reading in readings if reading is not None)
    assert await read(state) == ([*range(29, 0, -1)], False)


async def test_filters_and_times_select_summaries(state: State) -> None:
    await state.recent.add([made(number, status="failed" if number % 2 else "completed") for number in range(1, 7)], MANY)
    assert await read(state, RecentFilter(since=4)) == ([6, 5, 4], False)
    assert await read(state, RecentFilter(statuses=frozenset({"failed"}), since=2)) == ([5, 3], False)


async def test_a_filter_finds_older_summaries_than_those_of_the_window(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_window, "MAX", 5)
    await state.recent.add([made(number, model=f"model-{number}") for number in range(1, 9)], MANY)
    assert await read(state) == ([8, 7, 6, 5, 4], True)
    assert await read(state, RecentFilter(since=5)) == ([8, 7, 6, 5], False)
    assert await read(state, RecentFilter(model="model-2")) == ([2], False)
    await state.recent.add([made(9)], MANY)
    assert await read(state) == ([9, 8, 7, 6, 5], True)


async def test_if_very_many_were_added_only_the_latest_are_read(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_window, "MAX", 5)
    monkeypatch.setattr(recent_window, "MAX_ROUNDS", 1)
    await state.recent.add([made(1)], MANY)
    assert await read(state) == ([1], False)
    await state.recent.add([made(number) for number in range(2, 100)], MANY)
    assert await read(state) == ([99, 98, 97, 96, 95], True)


async def test_the_window_is_emptied_after_its_last_use(state: State, server: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_window, "KEEP", 0.0)
    await state.recent.add([made(1)], MANY)
    assert await read(state) == ([1], False)
    is_emptied = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, is_emptied.set)  # after the window's timer
    await is_emptied.wait()
    server.delete(*KEYS)
    assert await read(state) == ([], False)


async def test_a_failed_reading_is_retried(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    await state.recent.add([made(1)], MANY)
    assert await read(state) == ([1], False)

    async def fail(*_: object) -> None:
        raise StateUnavailable("it is away")

    await state.recent.add([made(2)], MANY)
    with monkeypatch.context() as broken:
        broken.setattr(state.recent, "after", fail)
        with pytest.raises(StateUnavailable):
            await read(state)
    assert await read(state) == ([2, 1], False)
