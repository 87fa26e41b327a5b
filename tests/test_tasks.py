"""Background tasks and large messages."""

from __future__ import annotations

import asyncio
import gc
import weakref

import anyio
import orjson
import pytest

from responses_mw.tasks import GARBAGE, MAX_INLINE_BYTES, by_size, in_background, loads


async def test_a_failed_background_task_is_logged_at_once_and_affects_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("unexpected")

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    async with in_background(fail(), tick()):
        while ticks < 3:
            await asyncio.sleep(0)
        assert "KeyError: 'unexpected'" in caplog.text
    before = ticks
    await asyncio.sleep(0)
    assert (ticks, len(caplog.records)) == (before, 1)  # a cancelled task has not failed


async def test_a_scope_that_is_cancelled_while_background_tasks_end_catches_its_cancellation() -> None:
    with anyio.CancelScope() as scope:
        async with in_background(asyncio.sleep(60)):
            await asyncio.sleep(0)  # until the task has begun
            asyncio.get_running_loop().call_soon(scope.cancel)
    assert scope.cancelled_caught


async def test_large_messages_lead_to_a_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GARBAGE, "maximum", 4 * MAX_INLINE_BYTES)
    gc.disable()
    try:
        cycle: set[object] = set()
        left = weakref.ref(cycle)
        cycle.add(cycle.clear)  # a bound method refers to the set
        del cycle
        for _ in range(8):
            await by_size(MAX_INLINE_BYTES, list)
        assert left() is not None
        for _ in range(4):
            await by_size(MAX_INLINE_BYTES + 1, list)
        assert left() is None
    finally:
        gc.enable()


def test_the_garbage_collectors_settings_are_restored() -> None:
    large = orjson.dumps([[]] * 50_000)
    loads(large)
    assert gc.isenabled()
    gc.disable()
    try:
        loads(large)
        assert not gc.isenabled()
    finally:
        gc.enable()
