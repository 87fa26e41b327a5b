"""Background tasks and large messages."""

from __future__ import annotations

import asyncio
import gc
import weakref

import anyio
import orjson
import pytest

from responses_mw.tasks import GARBAGE, MAX_INLINE_BYTES, by_size, concurrently, in_background, loads


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


async def test_concurrent_work_returns_its_results_in_order() -> None:
    async def after(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    assert await concurrently(after(seconds) for seconds in (0.02, 0, 0.01)) == [0.02, 0, 0.01]


async def test_a_failure_of_concurrent_work_cancels_the_rest_and_is_raised_with_its_cause() -> None:
    cancelled = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("outer") from ValueError("inner")

    with pytest.raises(KeyError, match="outer") as failure:
        await concurrently([wait(), fail()])
    assert cancelled == [True]
    assert isinstance(failure.value.__cause__, ValueError)


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
