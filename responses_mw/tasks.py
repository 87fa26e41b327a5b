"""Background tasks, a thread pool for large messages, and the signals that stop a process.

The event loop keeps running while a thread runs Python code, compresses or hashes. It is still blocked by a single C call that
holds the GIL. For example, decoding or encoding 32 MiB of JSON blocks it for about 100 ms.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import cache
from typing import Any, ParamSpec, TypeVar

import orjson

logger = logging.getLogger(__name__)


@cache
def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a process gracefully. SIGHUP is omitted if it is ignored, as under `nohup`."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # not on Windows
        numbers.append(signal.SIGHUP)
    return tuple(numbers)


P = ParamSpec("P")
T = TypeVar("T")

MAX_INLINE_BYTES = 256 * 1024
"""Maximum size in bytes of data that is processed on the event loop. Processing this much JSON takes a few milliseconds."""


class Garbage:
    """Runs the garbage collector each time `by_size` has processed `maximum` bytes of large messages.

    Reference cycles, such as those of the MCP SDK, keep large requests in memory. `serve` makes automatic collections rare, and
    therefore sets `maximum`. By default, it is infinite.
    """

    def __init__(self) -> None:
        self.maximum = math.inf
        self._size = 0

    def add(self, size: int) -> None:
        self._size += size
        if self._size >= self.maximum:
            self._size = 0
            gc.collect()


GARBAGE = Garbage()
_LARGE_JSON = 64 * 1024


def loads(data: bytes) -> Any:
    """Decode JSON. The garbage collector is off while large `data` is decoded. Otherwise, it would take most of the time."""
    if len(data) <= _LARGE_JSON:
        return orjson.loads(data)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(data)
    finally:
        if was_enabled:
            gc.enable()


async def by_size(size: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, which processes `size` bytes, and return its result.

    If `size` is greater than `MAX_INLINE_BYTES`, the call runs in a thread. Cancellation does not stop the thread.
    """
    if size <= MAX_INLINE_BYTES:
        return work(*args, **kwargs)
    GARBAGE.add(size)
    context = copy_context()
    return await asyncio.get_running_loop().run_in_executor(_executor(), lambda: context.run(work, *args, **kwargs))


@cache
def _executor() -> ThreadPoolExecutor:
    # More than two threads would only contend for the GIL. asyncio's default pool is left to DNS lookups.
    return ThreadPoolExecutor(2, thread_name_prefix="responses-mw")


async def concurrently(work: Iterable[Coroutine[Any, Any, T]], rank: Callable[[Exception], int] = lambda error: 0) -> list[T]:
    """Run coroutines concurrently, and return their results in order. If one fails, cancel the others and raise its error.

    If several fail, raise the error with the lowest `rank`, or the first of these.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failures:
        failure = min(failures.exceptions, key=rank)
    else:
        return [task.result() for task in tasks]
    try:
        raise failure  # not in an `except` clause, which would replace the error's cause or context
    finally:
        del failure  # its traceback refers to this frame


def background_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run a coroutine in a task. Log an error as soon as the task fails, not only when the task is garbage-collected."""
    task = asyncio.create_task(work)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task failed", exc_info=error)


@asynccontextmanager
async def in_background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run each coroutine in a task. On exit, cancel the tasks. If a task fails, the error is logged and not raised."""
    tasks = [background_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            # If this wait is cancelled, `gather` would raise the cancellation of a task, which no cancel scope recognizes.
            await asyncio.wait(tasks)
