"""Subscriptions that end at any moment, in whatever way, leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

from responses_mw.state import State, connect

if TYPE_CHECKING:
    from .servers import Server


def test_a_subscription_that_ends_while_it_connects_leaves_nothing_behind(valkey: Server) -> None:
    faults: list[Any] = []

    async def subscribe(seconds: float, *, close: bool) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        state = State(connect(valkey.url))
        with state.wakeups.on("rmw:{a}:ev", lambda _: None):
            await asyncio.sleep(seconds)
        closing = asyncio.create_task(state.aclose())
        await asyncio.sleep(seconds)
        if close:
            await closing

    for number in range(60):
        asyncio.run(subscribe(number * 0.00005, close=number % 2 == 0))  # what goes on still is cancelled at its end
    gc.collect()
    assert faults == []
