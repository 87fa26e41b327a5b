"""Periodic measurements of the queue, Redis's memory, the upstream and the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from ..state import StateUnavailable
from ..telemetry.metrics import EVENT_LOOP_LAG, QUEUE_AGE, QUEUE_DEPTH, UPSTREAM_UP

if TYPE_CHECKING:
    from ..state import State

logger = logging.getLogger(__name__)

INTERVAL = 10.0
"""Seconds between two measurements of Redis and of the upstream."""
LAG_INTERVAL = 0.5
"""Seconds between two measurements of the event loop."""


@asynccontextmanager
async def monitoring(state: State | None, is_upstream_up: Callable[[], Awaitable[bool]] | None) -> AsyncIterator[None]:
    """Measure until the context exits."""
    measuring = [_measure_lag()]
    if state is not None:
        measuring.append(_repeat(partial(_measure_state, state)))
    if is_upstream_up is not None:
        measuring.append(_repeat(partial(_measure_upstream, is_upstream_up)))
    tasks = [asyncio.create_task(each) for each in measuring]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _repeat(measure: Callable[[], Awaitable[None]]) -> None:
    while True:
        await measure()
        await asyncio.sleep(INTERVAL)


async def _measure_state(state: State) -> None:
    try:
        found = await state.queue.backlog()
        QUEUE_DEPTH.set(found.jobs)
        QUEUE_AGE.set(found.seconds)
        await state.check()  # records the memory
    except StateUnavailable as error:  # the state has counted the failure
        logger.debug("could not measure Redis: %s", error.message)


async def _measure_upstream(is_up: Callable[[], Awaitable[bool]]) -> None:
    UPSTREAM_UP.set(int(await is_up()))


async def _measure_lag() -> None:
    """Measure how late a timer fires. Every other task of this process is delayed as much."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL
        await asyncio.sleep(LAG_INTERVAL)
        EVENT_LOOP_LAG.record(max(0.0, loop.time() - due), {})
