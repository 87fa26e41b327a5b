"""What the tests of subscriptions hear."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from responses_mw.state import State


async def assert_heard(state: State, messages: asyncio.Queue[bytes], worker: str, text: str) -> None:
    """Assert that what is told to a worker arrives, though messages may be lost while a connection is down."""
    async with asyncio.timeout(20):
        while True:
            await state.jobs.tell(worker, text)
            try:
                async with asyncio.timeout(0.5):
                    while await messages.get() != text.encode():
                        pass
                    return
            except TimeoutError:
                continue


async def assert_confirmed(messages: asyncio.Queue[bytes]) -> None:
    """Assert that the subscription is confirmed (again)."""
    async with asyncio.timeout(20):
        while await messages.get() != b"":
            pass
