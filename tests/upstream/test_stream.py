"""Reading an answer of the upstream: the chunks or events, their order and their limits."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import httpx
import orjson
import pytest

from responses_mw.errors import UpstreamBrokeOff, UpstreamError
from responses_mw.protocol.types import Chunk
from responses_mw.tasks import MAX_INLINE_BYTES
from responses_mw.upstream.decoding import check_values
from responses_mw.upstream.pool import Pool
from responses_mw.upstream.responses_stream import ResponsesStream
from responses_mw.upstream.stream import ChatStream
from tests.support.leases import lease

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


def opened(
    answer: Answer, kind: type[ChatStream] = ChatStream, media_type: str = "text/event-stream", max_bytes: int = 1000
) -> ChatStream:
    response = httpx.Response(200, headers={"content-type": media_type}, stream=answer)
    return kind(response, lease(Pool.of("http://upstream")), first_chunk_timeout=60, idle_timeout=60, max_bytes=max_bytes)


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
    monkeypatch.setattr("responses_mw.upstream.decoding.MAX_VALUES", 100)
    body = b'{"choices":[{"delta":{},"x":[%b1]}]}' % (b"{}," * 50)
    frame = b"data: " + body + b"\n\n" if media_type == "text/event-stream" else body
    with pytest.raises(UpstreamError, match="more than 100 JSON values"):
        await read(opened(Answer(frame), media_type=media_type), [])


HI = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1}}'
DONE = b"data: [DONE]"
TYPES = [
    "text/event-stream",
    "text/plain; charset=utf-8",
    "application/octet-stream",
    "application/x-ndjson",
    "application/json",
    "",
]


def lines(*frames: bytes) -> bytes:
    return b"".join(frame + b"\n\n" for frame in frames)


def chunks_of(*frames: bytes) -> list[Any]:
    return [orjson.loads(frame.removeprefix(b"data: ")) for frame in frames]


@pytest.mark.parametrize("media_type", TYPES)
@pytest.mark.parametrize("opening", [b"", b": ping\n\n", b"event: message\n", b"id: 1\n", b"\xef\xbb\xbf\r\n", b"retry: 5\n"])
async def test_events_are_read_whatever_their_content_type_is(media_type: str, opening: bytes) -> None:
    body = opening + lines(HI, STOP, DONE)
    for reads in ((body,), (body[:3], body[3:9], body[9:]), [body[n : n + 1] for n in range(len(body))]):
        got: list[Any] = []
        stream = opened(Answer(*reads), media_type=media_type)
        await read(stream, got)
        assert got == chunks_of(HI, STOP)
        assert stream.done


@pytest.mark.parametrize("media_type", TYPES)
@pytest.mark.parametrize("opening", [b"", b" \r\n", b"\xef\xbb\xbf"])
async def test_a_document_is_read_whatever_its_content_type_is(media_type: str, opening: bytes) -> None:
    body = opening + b'{"choices":[{"index":0,"message":{"content":"Hi"},"finish_reason":"stop"}]}'
    for reads in ((body,), (body[:2], body[2:])):
        got: list[Any] = []
        stream = opened(Answer(*reads), media_type=media_type)
        await read(stream, got)
        assert got[0]["choices"][0]["delta"]["content"] == "Hi"
        assert stream.done


@pytest.mark.parametrize("media_type", TYPES)
async def test_documents_without_framing_are_read_one_after_the_other(media_type: str) -> None:
    body = b"\n".join(frame.removeprefix(b"data: ") for frame in (HI, STOP, USAGE))
    got: list[Any] = []
    await read(opened(Answer(body), media_type=media_type), got)
    assert got == chunks_of(HI, STOP, USAGE)


@pytest.mark.parametrize("media_type", TYPES)
@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"boom"}}\n' + DONE + b"\n\n",
        b'{"error":{"message":"boom"}}' + b"\n\n" + DONE + b"\n\n",
        b'{\n  "error": {\n    "message": "boom"\n  }\n}\n' + lines(DONE),
        b'{"error":{"message":"boom"}}',
        b'{"message":"boom"}',
        b"event: error\n: boom\n\n" + lines(DONE),
        b"event: error\ndata: boom\n\n" + lines(DONE),
        b'event: error\ndata: "boom"\n\n',
        b'event: error\ndata: {"error":{"message":"boom"}}\n\n',
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"boom"}}\n\n',
        b'event: error\ndata: {"detail":"boom"}\n\n',
        b"error: boom\n\n" + lines(DONE),
        b'data: {"message":"boom","code":"1302"}\n\n' + lines(DONE),
        b'data: {"choices":null,"base_resp":{"status_code":1008,"status_msg":"boom"}}\n\n' + lines(DONE),
    ],
)
async def test_an_error_is_recognized_in_every_framing(media_type: str, body: bytes) -> None:
    with pytest.raises(UpstreamError, match=r"^boom$"):
        await read(opened(Answer(body), media_type=media_type), [])
    if body.startswith(b"{\n") or media_type == "":
        return
    got: list[Any] = []
    with pytest.raises(UpstreamError, match=r"^boom$"):
        await read(opened(Answer(lines(HI), body)), got)
    assert got == chunks_of(HI)


@pytest.mark.parametrize("body", [lines(DONE), b": ping\n\n" + lines(DONE), lines(b"data: null", DONE), b"data: [DONE]"])
async def test_a_stream_that_consists_only_of_done_is_an_error(body: bytes) -> None:
    with pytest.raises(UpstreamError, match="without any output") as caught:
        await read(opened(Answer(body)), [])
    assert not isinstance(caught.value, UpstreamBrokeOff)


@pytest.mark.parametrize("done", [b"[DONE] ", b" [DONE]", b"[DONE]\t", b'"[DONE]"', b"[done]", b"[DONE] bye"])
async def test_variants_of_the_done_marker_are_recognized(done: bytes) -> None:
    for body in ((lines(HI, STOP, b"data: " + done),), (lines(HI), lines(STOP), lines(b"data: " + done))):
        got: list[Any] = []
        stream = opened(Answer(*body))
        await read(stream, got)
        assert got == chunks_of(HI, STOP)
        assert stream.done


@pytest.mark.parametrize("scalar", [b"null", b"5", b'"ping"', b"true", b"-Infinity"])
async def test_scalar_frames_are_ignored(scalar: bytes) -> None:
    frame = b"data: " + scalar
    got: list[Any] = []
    await read(opened(Answer(lines(frame, HI, frame, STOP, frame, USAGE, DONE))), got)
    assert got == chunks_of(HI, STOP, USAGE)


@pytest.mark.parametrize("junk", [b"bye", b"{", b"[]", b"<html>", b'{"choices":'])
async def test_junk_after_the_finish_reason_is_ignored_and_before_it_is_an_error(junk: bytes) -> None:
    frame = b"data: " + junk
    got: list[Any] = []
    await read(opened(Answer(lines(HI, STOP, frame, USAGE), frame)), got)
    assert got == chunks_of(HI, STOP, USAGE)
    with pytest.raises(UpstreamError):
        await read(opened(Answer(lines(HI, frame, STOP, DONE))), [])


async def test_numbers_that_are_not_finite_are_replaced() -> None:
    text = (
        rb'data: {"choices":[{"delta":{"content":"NaN -Infinity \" NaN"},"logprob":[-Infinity,Infinity,NaN,-inf,1e999,-2e1]}]}'
    )
    expected = {"delta": {"content": 'NaN -Infinity " NaN'}, "logprob": [-9999.0, 9999.0, None, -9999.0, 9999.0, -20.0]}
    for body, media_type in ((lines(text, DONE), TYPES[0]), (text.removeprefix(b"data: "), "application/json")):
        got: list[Any] = []
        await read(opened(Answer(body), media_type=media_type), got)
        assert got == [{"choices": [expected]}]
    got = []
    await read(opened(Answer(b'data: {"type":"response.completed","response":{"x":NaN}}\n\n'), ResponsesStream), got)
    assert got == [{"type": "response.completed", "response": {"x": None}}]


async def test_a_chunk_with_a_whole_message_is_passed_on() -> None:
    body = b'data: {"choices":[{"index":0,"message":{"content":"Hi"},"finish_reason":"stop"}]}'
    got: list[Any] = []
    await read(opened(Answer(lines(body, DONE))), got)
    assert got == chunks_of(body)


class Recording(ChatStream):
    """A stream that records for each decoded frame whether this was done in the main thread."""

    in_main_thread: ClassVar[list[bool]] = []

    def _parsed(self, frame: bytes) -> Chunk:
        self.in_main_thread.append(threading.current_thread() is threading.main_thread())
        return super()._parsed(frame)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("size", [1, MAX_INLINE_BYTES])
async def test_large_frames_and_documents_are_not_decoded_on_the_event_loop(is_stream: bool, size: int) -> None:
    Recording.in_main_thread.clear()
    part = {"role": "assistant", "content": "x" * size}
    body = orjson.dumps({"choices": [{"delta" if is_stream else "message": part, "finish_reason": "stop"}]})
    reads = [b"data: " + body, b"\n\n", b"data: [DONE]\n\n"] if is_stream else [body[:10], body[10:]]
    kind = "text/event-stream" if is_stream else "application/json"
    got: list[Any] = []
    await read(opened(Answer(*reads), Recording, kind, max_bytes=2 * len(body) + 100), got)
    assert got[0]["choices"][0]["delta"]["content"] == "x" * size
    assert Recording.in_main_thread == [size == 1]
