"""Decode the upstream's answer from network reads to chat chunks, or to the events of its own Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import httpx
import orjson

from ..errors import UpstreamBrokeOff, UpstreamError, UpstreamTimeout
from ..http import MAX_BODY, BodyRefused, check_uncompressed
from ..protocol.chat.chunks import DeltaFastPath, SurrogateHalves, Text, as_chunk
from ..protocol.request.checks import has_more_values, loads
from ..protocol.response.events import TERMINAL
from ..protocol.sse import DONE, SSEDecoder
from ..protocol.types import Chunk
from .errors import from_frame, is_error

_TICKS = 8
MAX_VALUES = 6_000_000
"""Maximum number of JSON values in a frame or a body, as in 30,000 tokens with 20 alternatives. Each takes 64 bytes."""
_END_TIMEOUT = 0.1  # seconds to wait for the end of the body after [DONE]


class ChatStream:
    """The answer to one chat request. Its content type determines whether it is a stream of chunks or one document.

    Call `begin` first. Each iteration step then returns the chunks completed by one network read. At the end, `done` is true if
    the answer is complete: `[DONE]` or a whole document has arrived.

    Raises `UpstreamError` if the connection fails, or if the answer is missing, malformed or longer than `max_bytes`.
    """

    _reads_texts: ClassVar[bool] = True  # whether a chunk that holds only text is returned as `Text`

    def __init__(self, response: httpx.Response, *, first_byte_timeout: float, idle_timeout: float, max_bytes: int) -> None:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._response = response
        self._source = aiter(response.stream)
        self._first_byte_timeout = first_byte_timeout  # until the first chunk, because vLLM sends its status earlier
        self._idle_timeout = idle_timeout
        self._idle = IdleTimeout()
        self._decoder = SSEDecoder()
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

    async def begin(self) -> None:
        """Wait until the answer has begun or ended."""
        try:
            check_uncompressed(self._response)
        except BodyRefused as error:
            raise UpstreamError(f"The upstream sent {error}.") from None
        self._idle.watch(self._first_byte_timeout)
        if self._response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            self._first = await anext(self, [])
        else:
            body = await self._read_all()
            self._first = [self._whole(whole) for whole in (*self._halves.feed(body), *self._halves.flush())]
            self.done = self._is_over = True
        self.head = next((chunk for chunk in self._first if isinstance(chunk, dict)), {})

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> list[Chunk | Text]:
        if self._first:
            self._idle.watch(self._idle_timeout)
            first, self._first = self._first, []
            return first
        while not self._is_over:
            try:
                data = await self._read()
                text = self._fast_path.text(data, is_read=True) if self._begins_frame else None
                chunks: list[Chunk | Text] = [text] if text else self._take(data)
            except UpstreamError as fault:
                chunks = self._flushed()
                self._fault, self._is_over = fault, True
            if chunks:
                return chunks
        await self._end()
        raise StopAsyncIteration

    async def _read(self) -> bytes:
        """Return the data of one network read, or empty bytes at the end of the body."""
        idle = self._idle
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
        self._left -= len(data)
        if self._left < 0:
            raise UpstreamError(f"The upstream sent more than {self._max_bytes} bytes.")
        return data

    async def _read_all(self) -> bytes:
        parts: list[bytes] = []
        while not self._is_read:
            parts.append(await self._read())
            if self.received > MAX_BODY:
                raise UpstreamError(f"The upstream sent an answer of more than {MAX_BODY} bytes.")
        return b"".join(parts)

    def divert(self, take: Callable[[Text], bool]) -> None:
        """While the reader waits, pass each text that arrives alone in one read to `take` instead of the reader.

        If `take` returns false, the reader gets the text. This has no effect if the transport does not support it.
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

        if "divert" in self._response.extensions:
            self._response.extensions["divert"](take_text)

    @property
    def received(self) -> int:
        """Number of bytes of the answer received so far."""
        return self._max_bytes - self._left

    async def aclose(self) -> None:
        """Stop the idle timeout and close the response, even if the answer is incomplete."""
        self._idle.close()
        await self._response.aclose()

    def _take(self, data: bytes) -> list[Chunk | Text]:
        """Return the chunks completed by `data`. Empty `data` marks the end of the body."""
        chunks = self._decoded(self._decoder.feed(data) if data else self._decoder.flush())
        if not data:
            chunks += self._flushed()
            self._is_over = True
            if isinstance(self._fault, _NotJSON):  # the last frame is incomplete
                self._fault = UpstreamBrokeOff("The upstream closed the connection before its answer was complete.")
        # A frame that may contain the other half of a character must be parsed.
        self._begins_frame = self._reads_texts and self._decoder.is_between_frames and not self._halves.is_holding
        return chunks

    def _decoded(self, frames: list[bytes]) -> list[Chunk | Text]:
        """Decode `frames` up to the end of the answer or the first fault.

        The fault is raised after the chunks before it are read.
        """
        chunks: list[Chunk | Text] = []
        for frame in frames:
            if self._reads_texts and not self._halves.is_holding and (text := self._fast_path.text(frame)):
                chunks.append(text)
                continue
            for whole in self._halves.feed(frame):
                self._decode(whole, chunks)
            if self._is_over:
                break
        return chunks

    def _flushed(self) -> list[Chunk | Text]:
        chunks: list[Chunk | Text] = []
        for frame in self._halves.flush():
            self._decode(frame, chunks)
        return chunks

    def _decode(self, frame: bytes, chunks: list[Chunk | Text]) -> None:
        """Add the chunk in `frame` to `chunks`, unless the answer is over."""
        if self._is_over:
            return
        try:
            chunk = None if frame == DONE else self._parsed(frame)
        except UpstreamError as fault:
            self._fault, self._is_over = fault, True
            return
        if chunk is not None:
            chunks.append(chunk)
            if self._reads_texts:
                self._fast_path.learn(frame, chunk)
        self.done = self._is_last(chunk)
        self._is_over = self.done or chunk is None

    def _parsed(self, frame: bytes) -> Chunk:
        chunk = _json_object(frame)
        if ("choices" not in chunk or "error" in chunk) and is_error(chunk):
            raise from_frame(chunk)
        return chunk

    def _is_last(self, chunk: Chunk | None) -> bool:
        """Return whether `chunk` completes the answer. None stands for `[DONE]`."""
        return chunk is None

    def _whole(self, body: bytes) -> Chunk:
        """Return the chunk for an answer that is one JSON document. Raises `UpstreamError` if it is no chat completion."""
        completion = self._parsed(body)
        if not completion.get("choices"):
            raise UpstreamError("The upstream's answer is not a chat completion.")
        return as_chunk(completion)

    async def _end(self) -> None:
        """Raise a pending fault, or wait briefly for the end of the body after `[DONE]`.

        This wait lets the connection be reused, and lets an in-process application finish its last steps.
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


def check_values(data: bytes) -> None:
    """Raise `UpstreamError` if a JSON text has more than `MAX_VALUES` values. Decoding it would take too much memory."""
    if has_more_values(data, MAX_VALUES):
        raise UpstreamError(f"The upstream sent more than {MAX_VALUES} JSON values at once.")


def _json_object(data: bytes) -> dict[str, Any]:
    check_values(data)
    try:
        decoded = loads(data)
    except orjson.JSONDecodeError as error:
        raise _NotJSON("The upstream sent data that is not JSON.") from error
    if not isinstance(decoded, dict):
        raise UpstreamError("The upstream sent JSON that is not an object.")
    return decoded


class IdleTimeout:
    """Cancels a reader that waits too long for the network.

    One periodic timer runs for the whole answer, and counts the consecutive ticks at which the reader is waiting. A timer for
    each read, or even reading the clock, would cost more than the read itself.
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
        self.close()
        self._task = asyncio.current_task()
        self._timeout = timeout
        self.ticks = 0
        self._arm()

    def check(self) -> None:
        """Raise `UpstreamTimeout` if this timeout alone cancelled the reader."""
        if self._is_cancelled and self._task is not None and self._task.uncancel() == 0:
            raise UpstreamTimeout(f"The upstream was silent for {self._timeout:g} seconds.") from None

    def close(self) -> None:
        self._task = None  # a cancelled task keeps its frames, which refer to this object
        if self._timer:
            self._timer.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout / _TICKS, self._tick)

    def _tick(self) -> None:
        if self.is_waiting:
            self.ticks += 1
        if self.ticks <= _TICKS:
            self._arm()
        elif self._task:
            self._is_cancelled = self._task.cancel()


_FINISHED = {"completed": "response.completed", "incomplete": "response.incomplete"}
_NO_RESPONSE = "The upstream's answer is not a response."


class ResponsesStream(ChatStream):
    """A `ChatStream` that returns the events of a Responses API instead of chat chunks.

    If the upstream answers with one JSON document instead of a stream, the document is returned as a terminal event. After a
    terminal event, `done` is true and nothing more is read.
    """

    _reads_texts = False

    def _parsed(self, frame: bytes) -> dict[str, Any]:
        event = _json_object(frame)
        kind = event.get("type")
        if event.get("object") == "response" and kind is None:
            return {"type": _FINISHED.get(str(event.get("status")), "response.failed"), "response": event}
        if kind == "error" or (kind is None and is_error(event)):
            raise from_frame(event)
        if not isinstance(kind, str):
            raise UpstreamError(_NO_RESPONSE)
        return event

    def _is_last(self, chunk: Chunk | None) -> bool:
        return chunk is not None and chunk["type"] in TERMINAL

    def _whole(self, body: bytes) -> dict[str, Any]:
        event = self._parsed(body)
        if not self._is_last(event):
            raise UpstreamError(_NO_RESPONSE)
        return event
