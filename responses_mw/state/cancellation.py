"""Work around cancellations that older Pythons swallow: without this, some loops would never end.

- ``asyncio.wait_for`` swallows a cancellation that arrives as it completes. redis-py writes with it if a socket timeout is set.
  Fixed in Python 3.12: https://github.com/python/cpython/issues/86296
- ``asyncio.TaskGroup`` swallows a cancellation that arrives while it ends with an error. Fixed in Python 3.13:
  https://github.com/python/cpython/issues/116720
"""

from __future__ import annotations

import asyncio

import anyio.lowlevel

__all__ = ["cancellations", "raise_lost_cancellation"]


def cancellations() -> int:
    """Return the number of pending cancellations of the current task."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def raise_lost_cancellation(before: int) -> None:
    """Raise a cancellation again if it was swallowed since ``cancellations()`` returned ``before``."""
    if cancellations() > before:
        await anyio.lowlevel.checkpoint_if_cancelled()  # raises if it came from a cancel scope
        raise asyncio.CancelledError
