"""Process large messages in a thread, so that one request does not block the event loop for all others.

While a thread runs Python code, compression or hashing, the event loop gets the GIL every few milliseconds. A single call into
C that holds the GIL still blocks the loop: decoding or encoding 32 MiB of JSON takes about 100 ms.
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
"""Maximum size in bytes of JSON that is processed on the event loop, which takes a few milliseconds."""
_THREADS = 2


async def by_size(size: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, which processes `size` bytes; in a thread if `size` is over `MAX_INLINE_BYTES`.

    Cancellation does not stop the thread.
    """
    if size <= MAX_INLINE_BYTES:
        return work(*args, **kwargs)
    context = copy_context()
    return await asyncio.get_running_loop().run_in_executor(_executor(), lambda: context.run(work, *args, **kwargs))


@cache
def _executor() -> ThreadPoolExecutor:
    """Return our own small pool. More threads would only contend for the GIL, and asyncio's pool is needed for DNS lookups."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="responses-mw")
