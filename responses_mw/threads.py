"""A thread pool for large messages, so that one request does not block the event loop for all other requests.

While a thread runs Python code, compression or hashing, the event loop gets the GIL every few milliseconds. A single call into
C that holds the GIL still blocks the event loop. For example, decoding or encoding 32 MiB of JSON takes about 100 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_INLINE_BYTES = 256 * 1024
"""Maximum size in bytes of data that is processed on the event loop. Processing this much JSON takes a few milliseconds."""
_THREADS = 2


async def by_size(size: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, which processes `size` bytes, and return its result.

    If `size` is greater than `MAX_INLINE_BYTES`, the call runs in a thread. Cancellation does not stop the thread.
    """
    if size <= MAX_INLINE_BYTES:
        return work(*args, **kwargs)
    context = copy_context()
    return await asyncio.get_running_loop().run_in_executor(_executor(), lambda: context.run(work, *args, **kwargs))


@cache
def _executor() -> ThreadPoolExecutor:
    """Return the thread pool, which is created on the first call.

    The pool is small, because more threads would only contend for the GIL. asyncio's default pool is left to DNS lookups.
    """
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="responses-mw")
