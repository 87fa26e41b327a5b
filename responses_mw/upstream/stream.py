"""One chat completion as it comes in: reads of the network in, chat chunks out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import httpx
import orjson

from ..errors import UpstreamError, UpstreamTimeout
from ..protocol.chunks import as_chunk
from ..protocol.sse import DONE, Decoder, FrameTooLong
from ..protocol.types import Chunk
from .faults import from_frame, is_error


class ChatStream:
    """The answer to one chat request, streamed or whole: the content type tells, not what was asked for.

    Nothing is sent before it is iterated. An iteration gives, for each read of the network, the chunks that it completed;
    ``done`` is then True if the end was one: ``[DONE]`` came, or a whole answer. Closing the iterator closes the connection.
    Raises ``UpstreamError`` where the answer is none, breaks off, or is not what it should be.
    """

    def __init__(self, send: Callable[[], Awaitable[httpx.Response]], idle_timeout: float) -> None:
        self._send = send
        self._idle_timeout = idle_timeout
        self.done = False

    async def __aiter__(self) -> AsyncGenerator[list[Chunk], None]:
        response = await self._send()
        streamed = response.headers.get("content-type", "").startswith("text/event-stream")
        reads = _reads(response, self._idle_timeout)
        try:
            async with aclosing(reads), aclosing(self._streamed(reads) if streamed else self._whole(reads)) as chunks:
                async for read in chunks:
                    yield read
        except FrameTooLong as error:
            raise UpstreamError(f"The upstream sent {error}.") from error
        except httpx.HTTPError as error:
            raise UpstreamError(f"The upstream broke off its answer ({type(error).__name__}).") from error
        finally:
            await response.aclose()

    async def _whole(self, reads: AsyncGenerator[bytes, None]) -> AsyncGenerator[list[Chunk], None]:
        completion = _decoded(b"".join([data async for data in reads]))
        self.done = True
        yield [as_chunk(completion)]

    async def _streamed(self, reads: AsyncGenerator[bytes, None]) -> AsyncGenerator[list[Chunk], None]:
        decoder = Decoder()
        async for data in reads:
            chunks = self._chunks(decoder.feed(data))
            if chunks:
                yield chunks
            if self.done:
                return
        chunks = self._chunks(decoder.flush())
        if chunks:
            yield chunks

    def _chunks(self, frames: list[bytes]) -> list[Chunk]:
        chunks = []
        for frame in frames:
            if frame == DONE:
                self.done = True
                break
            chunks.append(_decoded(frame))
        return chunks


async def _reads(response: httpx.Response, idle_timeout: float) -> AsyncGenerator[bytes, None]:
    """What the network gives, as it comes. Raises ``UpstreamTimeout`` after a silence of ``idle_timeout`` seconds."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    silence = _Silence(idle_timeout)
    try:
        reads = aiter(response.stream)
        while True:
            silence.begin()
            try:
                data = await anext(reads)
            except StopAsyncIteration:
                return
            silence.end()
            yield data
    except asyncio.CancelledError:
        if silence.broken():
            raise UpstreamTimeout(f"The upstream was silent for {idle_timeout:g} seconds.") from None
        raise
    finally:
        silence.close()


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        decoded = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UpstreamError("The upstream sent something that is not JSON.") from error
    if not isinstance(decoded, dict):
        raise UpstreamError("The upstream sent JSON that is no object.")
    if is_error(decoded):
        raise from_frame(decoded)
    return decoded


class _Silence:
    """Cancels the task that waits for a read too long. One timer for the whole answer: arming one for each read would cost more
    than the read. Time that our own reader takes between two reads does not count."""

    __slots__ = ("_cancelled", "_longest", "_loop", "_since", "_task", "_timer")

    def __init__(self, longest: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._longest = longest
        self._since: float | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._timer = self._loop.call_later(longest, self._check)

    def begin(self) -> None:
        self._since = self._loop.time()
        self._task = asyncio.current_task()

    def end(self) -> None:
        self._since = None

    def _check(self) -> None:
        now = self._loop.time()
        left = self._longest if self._since is None else self._since + self._longest - now
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        elif self._task:
            self._cancelled = self._task.cancel()

    def broken(self) -> bool:
        """Whether the cancellation was ours, and nobody else's."""
        return self._cancelled and self._task is not None and self._task.uncancel() == 0

    def close(self) -> None:
        self._timer.cancel()
