"""Work on what a client sent, kept off the event loop where it is large: one request must not hold up all the others.

Python's own steps give way to the loop every few milliseconds, and so do compression and hashes. A single step in C does not:
decoding or encoding JSON of 32 MiB takes some 100 ms in which nothing else runs, in a thread or not.
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

AT_ONCE = 256 * 1024
"""Bytes of JSON that are worked on in place: a few milliseconds."""
_THREADS = 2


async def by_size(size: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``work`` returns, which works on ``size`` bytes: in a thread if they are many. One that nobody waits for any more
    ends by itself."""
    if size <= AT_ONCE:
        return work(*args, **kwargs)
    context = copy_context()
    return await asyncio.get_running_loop().run_in_executor(_executor(), lambda: context.run(work, *args, **kwargs))


@cache
def _executor() -> ThreadPoolExecutor:
    """Few threads of their own: more would only share the one interpreter, and names are resolved in asyncio's."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="responses-mw")
