"""One chat completion as it comes in: reads of the network in, chat chunks out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import orjson

from ..errors import UpstreamError, UpstreamTimeout
from ..protocol.chunks import as_chunk
from ..protocol.sse import DONE, Decoder, FrameTooLong
from ..protocol.types import Chunk
from .faults import from_frame, is_error

_LAST_WORD = 0.1  # seconds between [DONE] and the end of the connection, at most


class ChatStream:
    """The answer to one chat request, streamed or whole: the content type tells, not what was asked for.

    Nothing is sent before it is iterated. An iteration gives, for each read of the network, the chunks that it completed;
    ``done`` is then True if the end was one: ``[DONE]`` came, or a whole answer. Closing the iterator closes the connection.
    Raises ``UpstreamError`` where the answer is none, breaks off, or is not what it should be.
    """

    def __init__(
        self, send: Callable[[], Awaitable[httpx.Response]], *, first_byte_timeout: float, idle_timeout: float
    ) -> None:
        self._send = send
        self._first_byte_timeout = first_byte_timeout
        self._idle_timeout = idle_timeout
        self.done = False

    async def __aiter__(self) -> AsyncGenerator[list[Chunk], None]:
        response = await self._send()
        assert isinstance(response.stream, httpx.AsyncByteStream)
        streamed = response.headers.get("content-type", "").startswith("text/event-stream")
        decoder = Decoder() if streamed else _Whole()
        reads = _Reads(response.stream, self._first_byte_timeout, self._idle_timeout)
        try:
            while not self.done:
                data = await reads.next()
                chunks, fault = self._chunks(decoder.feed(data) if data else decoder.flush())
                if chunks:
                    yield chunks if streamed else [_completion(chunks[0])]
                if fault:
                    raise fault
                if not data:
                    self.done = not streamed
                    return
            await reads.drain()
        except FrameTooLong as error:
            raise UpstreamError(f"The upstream sent {error}.") from error
        except httpx.HTTPError as error:
            raise UpstreamError(f"The upstream broke off its answer ({type(error).__name__}).") from error
        finally:
            reads.close()
            await response.aclose()

    def _chunks(self, frames: list[bytes]) -> tuple[list[Chunk], UpstreamError | None]:
        """The chunks in ``frames``, and the fault after them: what came before it counts, also where one read held both."""
        chunks: list[Chunk] = []
        for frame in frames:
            if frame == DONE:
                self.done = True
                break
            try:
                chunks.append(_decoded(frame))
            except UpstreamError as fault:
                return chunks, fault
        return chunks, None


class _Whole:
    """In place of a decoder: a body that is one JSON document."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        self._parts.append(data)
        return []

    def flush(self) -> list[bytes]:
        return [b"".join(self._parts)]


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        decoded = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UpstreamError("The upstream sent something that is not JSON.") from error
    if not isinstance(decoded, dict):
        raise UpstreamError("The upstream sent JSON that is no object.")
    if ("choices" not in decoded or "error" in decoded) and is_error(decoded):
        raise from_frame(decoded)
    return decoded


def _completion(decoded: dict[str, Any]) -> Chunk:
    if not decoded.get("choices"):
        raise UpstreamError("The upstream's answer is no chat completion.")
    return as_chunk(decoded)


class _Reads:
    """What the network gives, as it comes, but no silence that is too long: of more than ``idle_timeout`` seconds, before the
    first read ``first_byte_timeout`` (some servers send their status before they have begun: vLLM).

    One timer watches over the whole answer: arming one for each read would cost more than the read. Time that our own reader
    takes between two reads does not count.
    """

    __slots__ = ("_cancelled", "_has_begun", "_idle_timeout", "_longest", "_loop", "_since", "_source", "_task", "_timer")

    def __init__(self, stream: httpx.AsyncByteStream, first_byte_timeout: float, idle_timeout: float) -> None:
        self._source = aiter(stream)
        self._loop = asyncio.get_running_loop()
        self._longest = first_byte_timeout
        self._idle_timeout = idle_timeout
        self._since: float | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._has_begun = False
        self._timer = self._loop.call_later(first_byte_timeout, self._check)

    async def next(self) -> bytes:
        """The next read; empty at the end. Raises ``UpstreamTimeout``."""
        self._since = self._loop.time()
        if self._task is None:
            self._task = asyncio.current_task()
        try:
            data = await anext(self._source)
        except StopAsyncIteration:
            return b""
        except asyncio.CancelledError:
            if self._is_ours():
                raise UpstreamTimeout(f"The upstream was silent for {self._longest:g} seconds.") from None
            raise
        self._since = None
        if not self._has_begun:
            self._begun()
        return data

    async def drain(self) -> None:
        """Waits a moment for the end that follows ``[DONE]``. Closed before it, a connection cannot be used again, and an
        application in this process is cancelled in its last steps."""
        with suppress(TimeoutError, httpx.HTTPError, UpstreamError):  # the answer itself is complete
            async with asyncio.timeout(_LAST_WORD):
                while await self.next():
                    pass

    def close(self) -> None:
        self._timer.cancel()

    def _begun(self) -> None:
        self._task = None  # another task may read from here on, but one and the same
        self._has_begun = True
        self._longest = self._idle_timeout
        self._timer.cancel()
        self._timer = self._loop.call_later(self._longest, self._check)

    def _check(self) -> None:
        left = self._longest if self._since is None else self._since + self._longest - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        elif self._task:
            self._cancelled = self._task.cancel()

    def _is_ours(self) -> bool:
        """Whether the cancellation came from the timer, and from nobody else."""
        return self._cancelled and self._task is not None and self._task.uncancel() == 0
