"""Decode the upstream's answer from network reads to chat chunks, or to the events of its own Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import orjson

from ..errors import UpstreamBrokeOff, UpstreamError, UpstreamTimeout
from ..http import MAX_BODY, BodyRefused, check_uncompressed
from ..protocol.chat.chunks import DeltaFastPath, SurrogateHalves, Text, as_chunk
from ..protocol.request.checks import loads
from ..protocol.response.events import TERMINAL
from ..protocol.sse import DONE, FrameTooLong, SSEDecoder
from ..protocol.types import Chunk
from .errors import from_frame, is_error

_TICKS = 8
_END_TIMEOUT = 0.1  # seconds to wait for the end of the body after [DONE]


class ChatStream:
    """The answer to one chat request, streamed or whole depending on its content type.

    `open` sends the request. Each iteration step then returns the chunks completed by one network read. At the end, `done` is
    true if the answer is complete, which means that `[DONE]` or a whole document has arrived.

    Raises `UpstreamError` if the answer is missing, interrupted, malformed or longer than `max_bytes`.
    """

    def __init__(
        self,
        send: Callable[[], Awaitable[httpx.Response]],
        *,
        first_byte_timeout: float,
        idle_timeout: float,
        max_bytes: int,
    ) -> None:
        self._send = send
        self._first_byte_timeout = first_byte_timeout  # until the first chunk, because vLLM sends its status earlier
        self._idle_timeout = idle_timeout
        self._idle = IdleTimeout()
        self._response: httpx.Response | None = None
        self._decoder: SSEDecoder | _Whole = SSEDecoder()
        self._fast_path = DeltaFastPath()
        self._halves = SurrogateHalves()
        self._begins_frame = True
        self._fault: UpstreamError | None = None
        self._first: list[Chunk | Text] = []
        self.head: Chunk = {}
        """The first chunk, with the completion's id and model, or an empty dict if no chunk has arrived."""
        self._is_over = self._is_read = False
        self._max_bytes = self._left = max_bytes
        self.done = False

    async def open(self) -> None:
        """Send the request, and wait until the answer has begun or ended. Raises `UpstreamError`."""
        self._response = response = await self._send()
        try:
            check_uncompressed(response)
        except BodyRefused as error:
            raise UpstreamError(f"The upstream sent {error}.") from None
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            self._decoder = _Whole()
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._source = aiter(response.stream)
        self._idle.watch(self._first_byte_timeout)
        self._first = await anext(self, [])
        self.head = next((chunk for chunk in self._first if isinstance(chunk, dict)), {})

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> list[Chunk | Text]:
        if self._first:
            self._idle.watch(self._idle_timeout)
            first, self._first = self._first, []
            return first
        idle = self._idle
        while not self._is_over:
            idle.is_waiting = True
            try:
                data = await anext(self._source)
            except StopAsyncIteration:
                self._is_read, data = True, b""
            except asyncio.CancelledError:
                idle.check()
                raise
            except httpx.HTTPError as error:
                message = f"The upstream closed the connection before its answer was complete ({type(error).__name__})."
                raise UpstreamBrokeOff(message) from error
            idle.is_waiting = False
            idle.ticks = 0
            text = self._fast_path.text(data, is_read=True) if self._begins_frame else None
            self._left -= len(data)
            if self._left < 0:
                raise UpstreamError(f"The upstream sent more than {self._max_bytes} bytes.")
            chunks: list[Chunk | Text] = [text] if text else self._take(data)
            if chunks:
                return chunks
        await self._end()
        raise StopAsyncIteration

    def divert(self, take: Callable[[Text], bool]) -> None:
        """Call `take` with each text that arrives alone in one read while the reader waits.

        If `take` returns false, the reader gets the text. This has an effect only if the transport supports it.
        """

        def take_text(data: bytes) -> bool:
            idle = self._idle
            if not (idle.is_waiting and self._begins_frame) or len(data) > self._left:
                return False
            text = self._fast_path.text(data, is_read=True)
            if text is None or not take(text):
                return False
            self._left -= len(data)
            idle.ticks = 0
            return True

        if self._response is not None and "divert" in self._response.extensions:
            self._response.extensions["divert"](take_text)

    @property
    def received(self) -> int:
        """Number of bytes of the answer received so far."""
        return self._max_bytes - self._left

    async def aclose(self) -> None:
        """Stop the idle timeout and close the response, even if the answer is incomplete."""
        self._idle.close()
        if self._response is not None:
            await self._response.aclose()

    def _take(self, data: bytes) -> list[Chunk | Text]:
        """Return the chunks completed by `data`. Empty `data` marks the end of the body."""
        chunks = self._decoded(self._frames(data))
        # A chunk that may contain the other half of a character must be parsed.
        self._begins_frame = self._decoder.is_between_frames and not self._halves.is_holding
        if not data:
            self._is_over = True
            if isinstance(self._fault, _NotJSON) and isinstance(self._decoder, SSEDecoder):
                # The last frame is incomplete.
                self._fault = UpstreamBrokeOff("The upstream closed the connection before its answer was complete.")
        if isinstance(self._decoder, _Whole):
            self.done = self._is_over
            completions = [chunk for chunk in chunks if isinstance(chunk, dict)]
            if not all(completion.get("choices") for completion in completions):
                raise UpstreamError("The upstream's answer is not a chat completion.")
            return [as_chunk(completion) for completion in completions]
        return chunks

    def _frames(self, data: bytes) -> list[bytes]:
        try:
            return self._decoder.feed(data) if data else self._decoder.flush()
        except FrameTooLong as error:
            raise UpstreamError(f"The upstream sent {error}.") from error

    def _decoded(self, frames: list[bytes]) -> list[Chunk | Text]:
        """Decode `frames` up to `[DONE]` or the first fault. The fault is raised after the chunks before it are read."""
        chunks: list[Chunk | Text] = []
        for frame in frames:
            text = None if self._halves.is_holding else self._fast_path.text(frame)
            if text:
                chunks.append(text)
                continue
            if frame == DONE:
                self.done = self._is_over = True
                break
            try:
                chunk = _chunk(frame, self._halves)
            except UpstreamError as fault:
                self._fault, self._is_over = fault, True
                break
            chunks.append(chunk)
            if not self._halves.is_holding:
                self._fast_path.learn(frame, chunk)
        return chunks

    async def _end(self) -> None:
        """Raise a pending fault, or wait briefly for the end of the body after `[DONE]`.

        Closing earlier would prevent the connection from being reused, and cancel an in-process application in its last steps.
        """
        if self._fault:
            raise self._fault
        if self.done and not self._is_read:
            with suppress(TimeoutError, httpx.HTTPError):  # the answer itself is complete
                async with asyncio.timeout(_END_TIMEOUT):
                    async for _ in self._source:
                        pass


class _NotJSON(UpstreamError):
    """A frame or a whole body is not JSON."""


class _Whole:
    """A decoder for a body that is one JSON document."""

    is_between_frames = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        self._parts.append(data)
        self._size += len(data)
        if self._size > MAX_BODY:
            raise FrameTooLong(f"an answer of more than {MAX_BODY} bytes")
        return []

    def flush(self) -> list[bytes]:
        return [b"".join(self._parts)]


def _json_object(data: bytes, halves: SurrogateHalves) -> dict[str, Any]:
    try:
        decoded = halves.join(loads(data)) if halves.is_holding else loads(data)
    except orjson.JSONDecodeError:
        try:
            decoded = halves.decode(data)
        except ValueError as error:
            raise _NotJSON("The upstream sent data that is not JSON.") from error
    if not isinstance(decoded, dict):
        raise UpstreamError("The upstream sent JSON that is not an object.")
    return decoded


def _chunk(data: bytes, halves: SurrogateHalves) -> dict[str, Any]:
    decoded = _json_object(data, halves)
    if ("choices" not in decoded or "error" in decoded) and is_error(decoded):
        raise from_frame(decoded)
    return decoded


class IdleTimeout:
    """Cancels a reader that waits too long for the network.

    One periodic timer watches the whole answer and counts how many ticks in a row find the reader waiting. A timer for each
    read, or even reading the clock, would cost more than the read itself.
    """

    __slots__ = ("_is_cancelled", "_task", "_timeout", "_timer", "is_waiting", "ticks")

    def __init__(self) -> None:
        self.is_waiting = False
        """Whether the reader waits for the network. False while the reader's consumer processes the data."""
        self.ticks = 0
        """Number of consecutive ticks at which the reader was waiting. The reader resets this number after each read."""
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_cancelled = False

    def watch(self, timeout: float) -> None:
        """Limit each wait of the current task to `timeout` seconds. The limit may be up to an eighth longer."""
        self._task = asyncio.current_task()
        self._timeout = timeout
        self.ticks = 0
        self._arm()

    def check(self) -> None:
        """Raise `UpstreamTimeout` if this timeout alone cancelled the reader."""
        if self._is_cancelled and self._task is not None and self._task.uncancel() == 0:
            raise UpstreamTimeout(f"The upstream was silent for {self._timeout:g} seconds.") from None

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _arm(self) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(self._timeout / _TICKS, self._tick)

    def _tick(self) -> None:
        if self.is_waiting:
            self.ticks += 1
        if self.ticks <= _TICKS:
            self._arm()
        elif self._task:
            self._is_cancelled = self._task.cancel()


_FINISHED = {"completed": "response.completed", "incomplete": "response.incomplete"}


class ResponsesStream(ChatStream):
    """A `ChatStream` that returns the events of a Responses API instead of chat chunks.

    A whole document is returned as a terminal event. After a terminal event, `done` is true and nothing more is read.
    """

    def _take(self, data: bytes) -> list[Chunk | Text]:
        if not data:
            self._is_over = True
        return self._decoded(self._frames(data))

    def _decoded(self, frames: list[bytes]) -> list[Chunk | Text]:
        events: list[Chunk | Text] = []
        for frame in frames:
            if frame == DONE:
                self._is_over = True
                break
            try:
                event = _event(frame, self._halves)
            except UpstreamError as fault:
                self._fault, self._is_over = fault, True
                break
            events.append(event)
            if event.get("type") in TERMINAL:
                self.done = self._is_over = True
                break
        return events


def _event(data: bytes, halves: SurrogateHalves) -> dict[str, Any]:
    decoded = _json_object(data, halves)
    kind = decoded.get("type")
    if decoded.get("object") == "response" and kind is None:
        return {"type": _FINISHED.get(str(decoded.get("status")), "response.failed"), "response": decoded}
    if kind == "error" or (kind is None and is_error(decoded)):
        raise from_frame(decoded)
    if not isinstance(kind, str):
        raise UpstreamError("The upstream's answer is not a response.")
    return decoded
