"""What the stream of an answer returns, and when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from responses_mw.upstream.stream import ChatStream, ResponsesStream

pytestmark = pytest.mark.anyio


class Answer(httpx.AsyncByteStream):
    """A body that arrives in these reads, and then breaks off if `breaks_off`."""

    def __init__(self, *reads: bytes, breaks_off: bool = False) -> None:
        self._reads, self._breaks_off = reads, breaks_off

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for data in self._reads:
            yield data
        if self._breaks_off:
            raise httpx.ReadError("gone")


def opened(answer: Answer, kind: type[ChatStream] = ChatStream, media_type: str = "text/event-stream") -> ChatStream:
    async def send() -> httpx.Response:
        return httpx.Response(200, headers={"content-type": media_type}, stream=answer)

    return kind(send, first_byte_timeout=60, idle_timeout=60, max_bytes=1000)


async def read(stream: ChatStream, into: list[Any]) -> None:
    try:
        await stream.open()
        async for chunks in stream:
            into += chunks
    finally:
        await stream.aclose()


async def test_an_event_is_never_taken_for_a_chat_chunk() -> None:
    events = [{"type": "theirs", "choices": [{"delta": {"content": text}}]} for text in "abc"]
    end = {"type": "response.completed", "response": {}}
    frames = [b"data: " + orjson.dumps(event) + b"\n\n" for event in [*events, end]]
    for reads in (frames, [b"".join(frames)]):
        got: list[Any] = []
        await read(opened(Answer(*reads), ResponsesStream), got)
        assert got == [*events, end]
