"""A task that is cancelled during a round trip ends, even if redis-py swallows the cancellation."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import anyio
import pytest

from benchmarks.processes import free_port
from responses_mw.state import StateUnavailable, connect

if TYPE_CHECKING:
    from responses_mw.state import Client, State


async def asks_on(client: Client) -> None:
    while True:
        try:
            await client.pipeline([("PING",)])
        except StateUnavailable:
            await asyncio.sleep(0)


async def assert_ends(client: Client, times: int) -> None:
    for steps in range(times):  # of the event loop before the cancellation, which then hits different points of a round trip
        task = asyncio.create_task(asks_on(client))
        for _ in range(steps % 40):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=60)
        assert task.cancelled()


async def test_one_cancellation_ends_a_task_that_sends_commands_continuously(state: State) -> None:
    await assert_ends(state.client, 200)


async def test_a_cancellation_ends_a_task_while_redis_is_unreachable() -> None:
    client = connect(f"redis://127.0.0.1:{free_port()}")
    await assert_ends(client, 100)
    await client.aclose()


@pytest.mark.parametrize("error", [None, ConnectionError(), TimeoutError()], ids=["reply", "error", "timeout"])
async def test_a_cancellation_that_a_round_trip_swallowed_is_raised_after_its_end(
    state: State, error: Exception | None
) -> None:
    asking = asyncio.Event()

    async def ask() -> str:
        asking.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # like `asyncio.wait_for` before Python 3.12
            if error is not None:
                raise error from None
        return "reply"

    task = asyncio.create_task(state.client.round_trip(ask, "GET"))
    await asking.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_a_cancel_scope_ends_the_task_and_catches_the_cancellation(state: State) -> None:
    for steps in range(100):
        async with anyio.create_task_group() as group:
            group.start_soon(asks_on, state.client)
            for _ in range(steps % 40):
                await asyncio.sleep(0)
            group.cancel_scope.cancel()
        assert group.cancel_scope.cancelled_caught


async def test_a_timeout_of_the_caller_is_raised_as_timeout_error(state: State) -> None:
    for _ in range(20):
        try:
            async with asyncio.timeout(0.002):
                await asks_on(state.client)
        except TimeoutError:
            continue
        raise AssertionError("nothing ended it")


async def test_a_cancelled_inspection_leaves_no_connection_open(state: State, caplog: pytest.LogCaptureFixture) -> None:
    for steps in range(100):
        async with anyio.create_task_group() as group:
            group.start_soon(state.inspect)
            for _ in range(steps % 25):
                await asyncio.sleep(0)
            group.cancel_scope.cancel()
    gc.collect()
    assert "Unclosed" not in caplog.text
