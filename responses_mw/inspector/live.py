"""Live views: streams of server-sent events to the inspector's pages, limited in number and duration."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from starlette.responses import Response, StreamingResponse

from ..errors import Unavailable

INTERVAL = 0.25  # with that of the summaries, a response appears within half a second
SECONDS = 60.0
"""Seconds after which a view closes its connection. The browser opens a new one, unless its session has ended."""
RETRY = b"retry: 250\n\n"
"""The first frame of a view: after how many milliseconds the browser opens a new connection."""
MAX_OPEN = 50
"""Maximum number of open views. Each one polls Redis."""


class LiveViews:
    """The open views of this process."""

    def __init__(self) -> None:
        self._open = 0

    def response(self, frames: AsyncGenerator[bytes, None]) -> Response:
        """Return a response that sends `frames` for at most `SECONDS`. Raises `Unavailable` if too many views are open."""
        if self._open >= MAX_OPEN:
            raise Unavailable(f"Too many live views are open: the maximum is {MAX_OPEN}.", retry_after=5)
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._count_open(frames), media_type="text/event-stream", headers=headers)

    async def _count_open(self, frames: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        self._open += 1
        until = time.monotonic() + SECONDS
        try:
            async with aclosing(frames):
                async for frame in frames:
                    yield frame
                    if time.monotonic() >= until:
                        return
        finally:
            self._open -= 1
