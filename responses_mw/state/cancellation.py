"""A work-around for cancellations that Python 3.11 swallows, after which a loop of ours would never end.

- ``asyncio.wait_for`` swallows one that arrives as it completes; redis-py writes with it wherever a socket timeout is set.
  Fixed in Python 3.12: https://github.com/python/cpython/issues/86296
- ``asyncio.TaskGroup`` swallows one that arrives while it ends with an error. Fixed in Python 3.13:
  https://github.com/python/cpython/issues/116720
"""

from __future__ import annotations

import asyncio

import anyio.lowlevel

__all__ = ["cancellations", "raise_lost_cancellation"]


def cancellations() -> int:
    """The number of cancellations of this task that are still pending."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def raise_lost_cancellation(before: int) -> None:
    """Raise a cancellation that arrived since ``cancellations()`` returned ``before``, and was swallowed."""
    if cancellations() > before:
        await anyio.lowlevel.checkpoint_if_cancelled()  # a cancel scope's
        raise asyncio.CancelledError
