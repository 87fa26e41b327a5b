"""Background tasks."""

from __future__ import annotations

import asyncio

import pytest

from responses_mw.threads import in_background


async def test_a_background_task_that_fails_is_logged_at_once_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
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
