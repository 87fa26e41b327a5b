"""Check for objects that only the garbage collector would free: `serve` runs it rarely."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from responses_mw.errors import APIError
from responses_mw.protocol.request.create import CreateResponse
from tests.support.servers import PATIENCE


@asynccontextmanager
async def nothing_left(count: Callable[[], int] | None = None) -> AsyncIterator[None]:
    """Check that `count`, by default of requests and errors with a traceback, soon returns to its value before the block."""
    count = count or _requests_and_errors
    gc.collect()
    before = count()
    gc.disable()
    try:
        yield
        deadline = time.monotonic() + PATIENCE
        while count() > before and time.monotonic() < deadline:  # the server may still be ending a request
            await asyncio.sleep(0.05)
        assert count() <= before
    finally:
        gc.enable()


def count_of(*kinds: type[object]) -> int:
    return sum(isinstance(one, kinds) for one in gc.get_objects())


def _requests_and_errors() -> int:
    made = (one for one in gc.get_objects() if isinstance(one, CreateResponse | APIError))
    return sum(not isinstance(one, APIError) or one.__traceback__ is not None for one in made)
