"""Reading an answer of the upstream: the chunks or events, their order and their limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from responses_mw.errors import UpstreamBrokeOff, UpstreamError
from responses_mw.upstream.stream import ChatStream, ResponsesStream, check_values

pytestmark = pytest.mark.anyio


class Answer(httpx.AsyncByteStream):
    """A body that arrives in these reads, followed by a connection error if `breaks_off`."""

    def __init__(self, *reads: bytes, breaks_off: bool = False) -> None:
        self._reads, self._breaks_off = reads, breaks_off

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for data in self._reads:
            yield data
        if self._breaks_off:
            raise httpx.ReadError("gone")


def opened(answer: Answer, kind: type[ChatStream] = ChatStream, media_type: str = "text/event-stream") -> ChatStream:
    response = httpx.Response(200, headers={"content-type": media_type}, stream=answer)
    return kind(response, first_byte_timeout=60, idle_timeout=60, max_bytes=1000)


async def read(stream: ChatStream, into: list[Any]) -> None:
    try:
        await stream.begin()
        async for chunks in stream:
            into += chunks
    finally:
        await stream.aclose()


async def test_buffered_chunks_are_returned_before_a_connection_error() -> None:
    text = rb'data: {"choices":[{"delta":{"content":"a\ud83d"}}]}'
    end = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}'
    got: list[Any] = []
    with pytest.raises(UpstreamBrokeOff):
        await read(opened(Answer(text + b"\n\n", end + b"\n\n", breaks_off=True)), got)
    assert got == [
        {"choices": [{"delta": {"content": "a\ufffd"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ]


async def test_responses_events_that_resemble_chat_chunks_are_passed_on_unchanged() -> None:
    events = [{"type": "theirs", "choices": [{"delta": {"content": text}}]} for text in "abc"]
    end = {"type": "response.completed", "response": {}}
    frames = [b"data: " + orjson.dumps(event) + b"\n\n" for event in [*events, end]]
    for reads in (frames, [b"".join(frames)]):
        got: list[Any] = []
        await read(opened(Answer(*reads), ResponsesStream), got)
        assert got == [*events, end]


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (ChatStream, b"[DONE]"),
        (ChatStream, b'{"id":"c"}'),
        (ChatStream, b'{"choices":[]}'),
        (ResponsesStream, b"[DONE]"),
        (ResponsesStream, b'{"type":"response.created","response":{}}'),
    ],
)
async def test_an_invalid_json_answer_is_refused(kind: type[ChatStream], document: bytes) -> None:
    got: list[Any] = []
    with pytest.raises(UpstreamError):
        await read(opened(Answer(document), kind, "application/json"), got)
    assert got == []


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (ChatStream, rb'{"choices":[{"message":{"content":"a\ud83d"}}],"delta":"a\ud83d"}'),
        (ResponsesStream, rb'{"type":"response.completed","response":{},"delta":"a\ud83d"}'),
    ],
)
async def test_lone_surrogates_in_a_json_answer_are_replaced(kind: type[ChatStream], document: bytes) -> None:
    got: list[Any] = []
    stream = opened(Answer(document), kind, "application/json")
    await read(stream, got)
    assert got[0]["delta"] == "a\ufffd"
    assert stream.done


def test_30000_tokens_with_20_top_logprobs_each_are_accepted() -> None:
    token = b'{"token":"word","logprob":-12.345678901234567,"bytes":[119,111,114,100]%b}'
    tokens = b",".join([token % (b',"top_logprobs":[%b]' % b",".join([token % b""] * 20))] * 30_000)
    check_values(b'{"content":[%b]}' % tokens)


@pytest.mark.parametrize("media_type", ["text/event-stream", "application/json"])
async def test_an_answer_with_too_many_json_values_is_an_error(monkeypatch: pytest.MonkeyPatch, media_type: str) -> None:
    monkeypatch.setattr("responses_mw.upstream.stream.MAX_VALUES", 100)
    body = b'{"choices":[{"delta":{},"x":[%b1]}]}' % (b"{}," * 50)
    frame = b"data: " + body + b"\n\n" if media_type == "text/event-stream" else body
    with pytest.raises(UpstreamError, match="more than 100 JSON values"):
        await read(opened(Answer(frame), media_type=media_type), [])
