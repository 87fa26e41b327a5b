"""Decode the upstream's answer from network reads to chat chunks."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import httpx

from ..errors import UpstreamBrokeOff, UpstreamError
from ..http import MAX_BODY, BodyRefused, check_uncompressed
from ..protocol.chat.chunks import DeltaFastPath, SurrogateHalves, Text, as_chunk
from ..protocol.sse import DONE, SSEDecoder
from ..protocol.types import Chunk
from ..tasks import MAX_INLINE_BYTES, by_size
from .decoding import MAX_TEXT, NotAnObject, NotJSON, Scalar, check_text, json_object
from .endpoint import Endpoint
from .errors import find_error, from_frame
from .idle_timeout import IdleTimeout
from .pool import Lease

logger = logging.getLogger(__name__)

_EVENT_STREAM = "text/event-stream"
_BEGINS_EVENTS = re.compile(rb"(?:data|event|id|retry|error)?:")
_MIN_BEGINNING = 6  # minimum number of bytes that show whether a body is a stream of events
_SPACE = b"\xef\xbb\xbf \t\r\n"  # with the byte order mark
_MIN_GRANT = 256 * 1024  # bytes after which the text is measured again if it may exceed `MAX_TEXT`
_END_TIMEOUT = 0.1  # seconds to wait for the end of the body after [DONE]


class ChatStream:
    """The answer to one chat request. Its first bytes determine whether it is a stream of chunks or one document.

    Call `begin` first. Each iteration step then returns the chunks completed by one network read. At the end, `done` is true if
    the answer is complete: `[DONE]` or a whole document has arrived.

    Raises `UpstreamError` if the connection fails, or if the answer is missing, malformed or longer than `max_bytes`.
    """

    _reads_texts: ClassVar[bool] = True  # whether a chunk that holds only text is returned as `Text`

    def __init__(
        self, response: httpx.Response, lease: Lease, *, first_chunk_timeout: float, idle_timeout: float, max_bytes: int
    ) -> None:
        """`lease` is the request in flight. Closing the stream releases it."""
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._response = response
        self._lease = lease
        self._body = response.stream
        self._source = aiter(response.stream)
        self._first_chunk_timeout = first_chunk_timeout  # vLLM sends its status earlier
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
        self._is_over = self._is_read = self._has_begun = self._is_finished = False
        self._max_bytes = max_bytes
        self._granted = self._left = min(max_bytes, MAX_TEXT)  # the bytes up to which the text need not be measured; those left
        self._text_size: Callable[[], int] = lambda: 0
        self.done = False

    async def begin(self) -> None:
        """Wait until the answer has begun or ended."""
        try:
            check_uncompressed(self._response)
        except BodyRefused as error:
            raise UpstreamError(f"The upstream sent {error}.") from None
        self._idle.watch(self._first_chunk_timeout)
        beginning, is_stream = await self._beginning()
        if is_stream:
            await self._begin_stream(beginning)
            self._first = self._first or await anext(self, [])
        else:
            body = beginning + await self._read_all()
            await by_size(len(body), self._take_document, body)
        if self.done and not self._first:
            raise UpstreamError("The upstream ended its answer without any output.")
        self.head = next((chunk for chunk in self._first if isinstance(chunk, dict)), {})

    async def _beginning(self) -> tuple[bytes, bool]:
        """Read the beginning of the body. Return it without white space, and whether the body is a stream of events.

        The content type alone does not tell. Gateways send streams as plain text, and errors without framing as streams.
        """
        is_declared = self._response.headers.get("content-type", "").lower().startswith(_EVENT_STREAM)
        minimum = 1 if is_declared else _MIN_BEGINNING
        data = b""
        while not self._is_read and len(data) < minimum:
            data = (data + await self._read_some()).lstrip(_SPACE)
        return data, not data.startswith(b"{") if is_declared else _BEGINS_EVENTS.match(data) is not None

    async def _begin_stream(self, beginning: bytes) -> None:
        try:
            self._first = await self._take(beginning) if beginning else []
            if self._is_read and not self._is_over:
                self._first += await self._take(b"")
        except UpstreamError as fault:
            self._fault, self._is_over = fault, True

    def _take_document(self, body: bytes) -> None:
        """Decode a body that is one document or, at the end of the body, several ones and events."""
        self._is_over = True
        try:
            self._first = [self._whole(whole) for whole in (*self._halves.feed(body), *self._halves.flush())]
            self.done = True
        except NotJSON:
            self._is_over = False
            self._first = self._decode_frames([*self._decoder.feed(body), *self._decoder.flush()]) + self._flush()
            if not (self._first or self._fault or self.done):
                raise
            if self._fault and not self._first:
                raise self._fault from None
            self._is_over = True

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> list[Chunk | Text]:
        if self._first:
            if not self._is_over:
                self._idle.watch(self._idle_timeout)
            first, self._first = self._first, []
            return first
        while not self._is_over:
            try:
                data = await self._read()
                text = self._fast_path.text(data, is_read=True) if self._begins_frame else None
                chunks: list[Chunk | Text] = [text] if text else await self._take(data)
            except UpstreamError as fault:
                chunks = self._flush()
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
            self._lease.record_error(error)
            message = f"The upstream closed the connection before its answer was complete ({type(error).__name__})."
            raise UpstreamBrokeOff(message) from error
        idle.is_waiting = False
        idle.ticks = 0
        self._left -= len(data)
        if self._left < 0:
            self._grant()
        return data

    def _grant(self) -> None:
        """Allow as many further bytes as the text may grow, because the text does not grow faster than the bytes received."""
        received = self.received
        if received > self._max_bytes:
            raise UpstreamError(f"The upstream sent more than {self._max_bytes} bytes.")
        size = self._text_size()
        check_text(size)
        self._granted = min(received + max(MAX_TEXT - size, _MIN_GRANT), self._max_bytes)
        self._left = self._granted - received

    async def _read_all(self) -> bytes:
        parts: list[bytes] = []
        while not self._is_read:
            parts.append(await self._read_some())
        return b"".join(parts)

    async def _read_some(self) -> bytes:
        data = await self._read()
        if self.received > MAX_BODY:
            raise UpstreamError(f"The upstream sent an answer of more than {MAX_BODY} bytes.")
        return data

    def limit_text(self, size: Callable[[], int]) -> None:
        """Fail if the text of the response exceeds `MAX_TEXT`. `size` measures it. It is called rarely, not for each token."""
        self._text_size = size

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
    def endpoint(self) -> Endpoint:
        """The endpoint that sends the answer."""
        return self._lease.endpoint

    @property
    def received(self) -> int:
        """Number of bytes of the answer received so far."""
        return self._granted - self._left

    async def aclose(self) -> None:
        """Stop the idle timeout and close the response, even if the answer is incomplete."""
        self._idle.close()
        self._lease.release()
        self._fault = None  # its traceback refers to this object
        await self._body.aclose()

    async def _take(self, data: bytes) -> list[Chunk | Text]:
        """Return the chunks completed by `data`. Empty `data` marks the end of the body."""
        frames = self._decoder.feed(data) if data else self._decoder.flush()
        if frames and len(frames[0]) > MAX_INLINE_BYTES:  # only the first one can have arrived in several reads
            chunks = await by_size(len(frames[0]), self._decode_frames, frames)
        else:
            chunks = self._decode_frames(frames)
        if not data:
            chunks += self._flush()
            self._is_over = True
            if isinstance(self._fault, NotJSON):  # the last frame is incomplete
                self._fault = UpstreamBrokeOff("The upstream closed the connection before its answer was complete.")
        # A frame that may contain the other half of a character must be parsed.
        self._begins_frame = self._reads_texts and self._decoder.is_between_frames and not self._halves.is_holding
        return chunks

    def _decode_frames(self, frames: list[bytes]) -> list[Chunk | Text]:
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

    def _flush(self) -> list[Chunk | Text]:
        chunks: list[Chunk | Text] = []
        for frame in self._halves.flush():
            self._decode(frame, chunks)
        return chunks

    def _decode(self, frame: bytes, chunks: list[Chunk | Text]) -> None:
        """Add the chunk in `frame` to `chunks`, unless the answer is over."""
        if self._is_over:
            return
        try:
            chunk = None if _is_done(frame) else self._parsed(frame)
        except UpstreamError as fault:
            if not self._is_junk(fault):
                self._fault, self._is_over = fault, True
            return
        if chunk is not None:
            chunks.append(chunk)
            self._has_begun = True
            if self._reads_texts:
                self._fast_path.learn(frame, chunk)
            self._is_finished = self._is_finished or _has_finish_reason(chunk)
        self.done = self._is_last(chunk)
        self._is_over = self.done or chunk is None

    def _is_junk(self, fault: UpstreamError) -> bool:
        """Return whether a frame can be ignored: a scalar or, after the finish reason, anything but an object."""
        is_junk = isinstance(fault, Scalar) or (self._is_finished and isinstance(fault, NotAnObject))
        if is_junk:
            logger.debug("ignored a frame of the upstream that is not an object")
        return is_junk

    def _parsed(self, frame: bytes) -> Chunk:
        chunk = json_object(frame)
        if (not chunk.get("choices") or b'"error"' in frame) and (error := find_error(chunk)):
            raise from_frame(error, is_first=not self._has_begun)
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


def _is_done(frame: bytes) -> bool:
    return frame[:1] != b"{" and frame.strip(b' \t"').upper().startswith(DONE)


def _has_finish_reason(chunk: Chunk) -> bool:
    choices = chunk.get("choices")
    return isinstance(choices, list) and any(isinstance(one, dict) and one.get("finish_reason") for one in choices)
