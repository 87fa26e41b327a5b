"""One chat completion as it comes in: reads of the network in, chat chunks out.

One answer of an upstream that speaks the Responses API itself: reads of the network in, its events out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import orjson

from ..bodies import MOST, BodyRefused, check_plain
from ..errors import UpstreamError, UpstreamTimeout
from ..protocol.chat.chunks import DeltaFastPath, Text, as_chunk
from ..protocol.request.body import loads
from ..protocol.response.events import TERMINAL
from ..protocol.sse import DONE, Decoder, FrameTooLong
from ..protocol.types import Chunk
from .errors import from_frame, is_error

_TICKS = 8
_LAST_WORD = 0.1  # seconds between [DONE] and the end of the connection, at most


class ChatStream:
    """The answer to one chat request, streamed or whole: the content type tells, not what was asked for.

    Nothing is sent before ``open``. An iteration then gives, for each read of the network, the chunks that it completed;
    ``done`` is True afterwards if the end was one: ``[DONE]`` came, or a whole answer. ``aclose`` closes the connection.
    Raises ``UpstreamError`` where the answer is none, breaks off, is not what it should be, or has more than ``most_bytes``.
    """

    def __init__(
        self,
        send: Callable[[], Awaitable[httpx.Response]],
        *,
        first_byte_timeout: float,
        idle_timeout: float,
        most_bytes: int,
    ) -> None:
        self._send = send
        self._first_byte_timeout = first_byte_timeout  # some servers send their status before they have begun (vLLM)
        self._idle_timeout = idle_timeout
        self._silence = _Silence()
        self._response: httpx.Response | None = None
        self._decoder: Decoder | _Whole = Decoder()
        self._shortcut = DeltaFastPath()
        self._begins_frame = True
        self._fault: UpstreamError | None = None
        self._first: list[Chunk | Text] = []
        self.head: Chunk = {}
        """The first chunk, which names the completion and its model."""
        self._is_over = False
        self._most_bytes = self._left = most_bytes
        self.done = False

    async def open(self) -> None:
        """Returns when the answer has begun, or ended."""
        self._response = response = await self._send()
        try:
            check_plain(response)
        except BodyRefused as error:
            raise UpstreamError(f"The upstream sent {error}.") from None
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            self._decoder = _Whole()
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._source = aiter(response.stream)
        self._silence.watch(self._first_byte_timeout)
        self._first = await anext(self, [])
        self.head = next((chunk for chunk in self._first if isinstance(chunk, dict)), {})

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> list[Chunk | Text]:
        if self._first:
            self._silence.watch(self._idle_timeout)
            first, self._first = self._first, []
            return first
        silence = self._silence
        while not self._is_over:
            silence.is_kept = True
            try:
                data = await anext(self._source)
            except StopAsyncIteration:
                data = b""
            except asyncio.CancelledError:
                silence.explain()
                raise
            except httpx.HTTPError as error:
                raise UpstreamError(f"The upstream broke off its answer ({type(error).__name__}).") from error
            silence.is_kept = False
            silence.passed = 0
            text = self._shortcut.text(data) if self._begins_frame else None
            self._left -= len(text[1]) if text else len(data)  # what frames a text is the server's affair
            if self._left < 0:
                raise UpstreamError(f"The upstream sent more than {self._most_bytes} bytes.")
            chunks: list[Chunk | Text] = [text] if text else self._take(data)
            if chunks:
                return chunks
        await self._end()
        raise StopAsyncIteration

    @property
    def received(self) -> int:
        """Bytes of the answer so far; of those that only bring a text, its characters."""
        return self._most_bytes - self._left

    async def aclose(self) -> None:
        """Closes the connection, in the middle of the answer too. It is not iterated after that."""
        self._silence.close()
        if self._response is not None:
            await self._response.aclose()

    def _take(self, data: bytes) -> list[Chunk | Text]:
        """The chunks that ``data``, one read, completes."""
        began_frame = self._begins_frame
        try:
            frames = self._decoder.feed(data) if data else self._decoder.flush()
        except FrameTooLong as error:
            raise UpstreamError(f"The upstream sent {error}.") from error
        self._begins_frame = self._decoder.is_between_frames
        chunks = self._decoded(frames)
        if len(frames) == len(chunks) == 1 and began_frame and self._begins_frame:
            self._shortcut.learn(data, chunks[0])
        if not data:
            self._is_over = True
        if isinstance(self._decoder, _Whole):
            self.done = self._is_over
            return [_completion(chunk) for chunk in chunks]
        return [*chunks]

    def _decoded(self, frames: list[bytes]) -> list[Chunk]:
        """The chunks in ``frames``, up to the end or a fault: what came before it counts, also where one read held both."""
        chunks: list[Chunk] = []
        for frame in frames:
            if frame == DONE:
                self.done = self._is_over = True
                break
            try:
                chunks.append(_chunk(frame))
            except UpstreamError as fault:
                self._fault, self._is_over = fault, True
                break
        return chunks

    async def _end(self) -> None:
        """Waits a moment for the end that follows ``[DONE]``. Closed before it, a connection cannot be used again, and an
        application in this process is cancelled in its last steps. Raises the fault that ended the answer, if one did."""
        if self._fault:
            raise self._fault
        if self.done:
            with suppress(TimeoutError, httpx.HTTPError):  # the answer itself is complete
                async with asyncio.timeout(_LAST_WORD):
                    async for _ in self._source:
                        pass


class _Whole:
    """In place of a decoder: a body that is one JSON document."""

    is_between_frames = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        self._parts.append(data)
        self._size += len(data)
        if self._size > MOST:
            raise FrameTooLong(f"an answer of more than {MOST} bytes")
        return []

    def flush(self) -> list[bytes]:
        return [b"".join(self._parts)]


def json_object(data: bytes) -> dict[str, Any]:
    """What an upstream sent, decoded. Raises ``UpstreamError`` where it is no JSON object."""
    try:
        decoded = loads(data)
    except orjson.JSONDecodeError as error:
        raise UpstreamError("The upstream sent something that is not JSON.") from error
    if not isinstance(decoded, dict):
        raise UpstreamError("The upstream sent JSON that is no object.")
    return decoded


def _chunk(data: bytes) -> dict[str, Any]:
    decoded = json_object(data)
    if ("choices" not in decoded or "error" in decoded) and is_error(decoded):
        raise from_frame(decoded)
    return decoded


def _completion(decoded: dict[str, Any]) -> Chunk:
    if not decoded.get("choices"):
        raise UpstreamError("The upstream's answer is no chat completion.")
    return as_chunk(decoded)


class _Silence:
    """Ends a silence of the network that is too long.

    One timer watches over the whole answer: arming one for each read, or even asking for the time, would cost more than the
    read. The timer counts how often in a row it found the reader waiting.
    """

    __slots__ = ("_cancelled", "_longest", "_task", "_timer", "is_kept", "passed")

    def __init__(self) -> None:
        self.is_kept = False
        """Whether the network is being waited for. Time that our own reader takes does not count."""
        self.passed = 0
        """How many ticks of the timer it has lasted."""
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancelled = False

    def watch(self, longest: float) -> None:
        """From now on the current task reads, and silences end after ``longest`` seconds (an eighth more at the most)."""
        self._task = asyncio.current_task()
        self._longest = longest
        self.passed = 0
        self._arm()

    def explain(self) -> None:
        """Raises ``UpstreamTimeout`` if the cancellation that has come is ours, and nobody else's."""
        if self._cancelled and self._task is not None and self._task.uncancel() == 0:
            raise UpstreamTimeout(f"The upstream was silent for {self._longest:g} seconds.") from None

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _arm(self) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(self._longest / _TICKS, self._tick)

    def _tick(self) -> None:
        if self.is_kept:
            self.passed += 1
        if self.passed <= _TICKS:
            self._arm()
        elif self._task:
            self._cancelled = self._task.cancel()


_FINISHED = {"completed": "response.completed", "incomplete": "response.incomplete"}


class ResponsesStream(ChatStream):
    """As ``ChatStream``, with events in place of chunks. A whole answer is the one event that would have ended its stream.

    ``done`` is True after an event that ends a response; nothing is read behind it.
    """

    def _take(self, data: bytes) -> list[Chunk | Text]:
        try:
            frames = self._decoder.feed(data) if data else self._decoder.flush()
        except FrameTooLong as error:
            raise UpstreamError(f"The upstream sent {error}.") from error
        if not data:
            self._is_over = True
        return [*self._decoded(frames)]

    def _decoded(self, frames: list[bytes]) -> list[Chunk]:
        events: list[Chunk] = []
        for frame in frames:
            if frame == DONE:
                self._is_over = True
                break
            try:
                events.append(_event(frame))
            except UpstreamError as fault:
                self._fault, self._is_over = fault, True
                break
            if events[-1].get("type") in TERMINAL:
                self.done = self._is_over = True
                break
        return events


def _event(data: bytes) -> dict[str, Any]:
    decoded = json_object(data)
    if decoded.get("object") == "response" and "type" not in decoded:
        return {"type": _FINISHED.get(str(decoded.get("status")), "response.failed"), "response": decoded}
    if decoded.get("type") == "error" or ("type" not in decoded and is_error(decoded)):
        raise from_frame(decoded)
    if "type" not in decoded:
        raise UpstreamError("The upstream's answer is no response.")
    return decoded
