"""Assertions about the messages of subscriptions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from responses_mw.state import StateUnavailable

if TYPE_CHECKING:
    from responses_mw.state import State


async def assert_heard(state: State, messages: asyncio.Queue[bytes], worker: str, text: str) -> None:
    """Assert that a message to a worker arrives. Repeat it, because messages may be lost while a connection is down."""
    async with asyncio.timeout(60):
        while True:
            try:
                await state.jobs.tell(worker, text)
                async with asyncio.timeout(0.5):
                    while await messages.get() != text.encode():
                        pass
                    return
            except (TimeoutError, StateUnavailable):
                await asyncio.sleep(0.05)


async def assert_confirmed(messages: asyncio.Queue[bytes]) -> None:
    """Assert that the subscription is confirmed, or confirmed again."""
    async with asyncio.timeout(60):
        while await messages.get() != b"":
            pass


def subscriber_tasks() -> int:
    """Return the number of subscriber tasks."""
    return sum("_Subscriber" in str(task.get_coro()) for task in asyncio.all_tasks())
