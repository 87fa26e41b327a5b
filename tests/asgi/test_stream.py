"""The event stream: its beginning, its events, and its end."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.processes import running
from benchmarks.upstream import MODEL
from responses_mw.asgi.http_responses import EventResponse, EventStreamResponse, RunJSONResponse
from responses_mw.protocol.sse import encode
from responses_mw.protocol.types import Event
from responses_mw.server.protocols import HTTPProtocol
from responses_mw.settings.groups import ServerSettings
from responses_mw.tasks import MAX_INLINE_BYTES
from tests.support.oracle import Streamed, check, stream
from tests.support.scripted import HELLO, BrokenOff, Signal, call, delta, error, finish, frame, reasoning, text, usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.types import Message

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

BODY = {"input": "Hi", "model": "tiny", "stream": True}


def _ascii_frame(chunk: dict[str, Any]) -> bytes:
    """A frame of a server that escapes all non-ASCII characters, also half of a surrogate pair."""
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


HALVES = ("Hi ", "\ud83d", "\ude00 and \ud83d", "\ude01", "!")


# -- start and content ---------------------------------------------------------------------------------------------------


@pytest.mark.both_mounts
async def test_text_is_streamed_as_it_arrives(ours: Ours, upstream: ScriptedUpstream) -> None:
    more = Signal()
    upstream.stream(text("Hel"), more, text("lo"), finish())
    async with ours.http.stream("POST", "/v1/responses", json=BODY) as response:
        raw = b""
        async for data in response.aiter_raw():
            raw += data
            if b'"delta":"Hel"' in raw:
                more.set()
    assert check(raw).deltas == ["Hel", "lo"]


@pytest.mark.parametrize("http", [HTTPProtocol, "h11"], ids=["HTTPProtocol", "h11"])
@pytest.mark.parametrize("kind", [text, reasoning])
async def test_each_token_arrives_before_the_next_with_either_http_server(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream, http: Any, kind: Callable[[str], dict[str, Any]]
) -> None:
    ours = start_at("proxy", uvicorn={"http": http})
    tokens = ["Hel", "lo", ' "wor', "ld", "\\", " \u00e9", "!", " ", "x" * 70_000, "y"]
    steps = [Signal() for _ in tokens]
    upstream.stream(*(piece for pair in zip(map(kind, tokens), steps, strict=True) for piece in pair), text("end"), finish())
    async with ours.http.stream("POST", "/v1/responses", json=BODY) as response:
        raw = b""
        async for data in response.aiter_raw():
            raw += data
            for step in steps[: raw.count(b".delta\ndata: ")]:
                step.set()
    streamed = check(raw)
    assert "".join(streamed.deltas) == "".join(tokens) + "end"
    assert streamed.response["status"] == "completed"


async def test_held_back_white_space_is_emitted_as_separate_deltas(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*[text(" ")] * 5, text("Hello"), text("!"), finish())
    assert (await stream(ours)).deltas == [" "] * 5 + ["Hello", "!"]


async def test_a_client_that_does_not_read_pauses_the_upstream(
    ours: Ours, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.upstream.stream.MAX_TEXT", 1 << 30)
    tokens = 4_000
    answer = upstream.stream(*[text("x" * 8_000) for _ in range(tokens)], finish())
    async with ours.http.stream("POST", "/v1/responses", json=BODY) as response:
        before = 0
        async with asyncio.timeout(60):
            while not before or answer.sent != before:
                before = answer.sent
                await asyncio.sleep(0.3)
        assert before < tokens
        raw = b"".join([data async for data in response.aiter_raw()])
    assert raw.count(b"x" * 8_000) >= tokens
    assert b"event: response.completed" in raw


@pytest.mark.parametrize("member", ["content", "reasoning"])
async def test_a_surrogate_pair_split_across_chunks_is_joined(ours: Ours, upstream: ScriptedUpstream, member: str) -> None:
    upstream.stream(*(_ascii_frame(delta(**{member: piece})) for piece in HALVES), text("end"), finish())
    streamed = await stream(ours)
    assert streamed.response["output"][0]["content"][0]["text"].removesuffix("end") == "Hi \U0001f600 and \U0001f601!"


async def test_a_surrogate_pair_split_within_the_arguments_of_a_call_is_joined(ours: Ours, upstream: ScriptedUpstream) -> None:
    pieces = ['{"q": "', *HALVES, '"}']
    upstream.stream(*(_ascii_frame(call(piece, name="f", call_id="c")) for piece in pieces), finish("tool_calls"))
    streamed = await stream(ours, tools=[{"type": "function", "name": "f"}])
    assert json.loads(streamed.response["output"][0]["arguments"]) == {"q": "Hi \U0001f600 and \U0001f601!"}


async def test_a_lone_surrogate_is_replaced(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*map(_ascii_frame, [delta(content="a\ud83d"), delta(content="b"), delta(content="\ude00c")]), finish())
    assert (await stream(ours)).response["output_text"] == "a\ufffdb\ufffdc"


@pytest.mark.parametrize(
    "ending", [[finish()], [finish(), {"choices": [], "usage": None}], []], ids=["finish", "usage", "none"]
)
async def test_a_lone_surrogate_at_the_end_is_replaced(ours: Ours, upstream: ScriptedUpstream, ending: list[Any]) -> None:
    upstream.stream(_ascii_frame(delta(content="a\ud83d")), *ending, done=bool(ending))
    assert (await stream(ours)).response["output_text"] == "a\ufffd"


async def test_a_lone_surrogate_at_the_end_of_the_arguments_is_replaced(ours: Ours, upstream: ScriptedUpstream) -> None:
    half = _ascii_frame(call('{"q": "\ud83d', name="f", call_id="c", index=0))
    upstream.stream(half, call('"}'), call("{}", name="f", call_id="d", index=1), finish("tool_calls"))
    output = (await stream(ours, tools=[{"type": "function", "name": "f"}])).response["output"]
    assert [item["arguments"] for item in output] == ['{"q": "\ufffd"}', "{}"]


async def test_a_lone_surrogate_at_the_end_of_the_reasoning_is_replaced_there(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(_ascii_frame(delta(reasoning="a\ud83d")), delta(reasoning="", content="b"), text("c"), finish())
    streamed = await stream(ours)
    assert streamed.response["output"][0]["content"][0]["text"] == "a\ufffd"
    assert streamed.deltas[-2:] == ["b", "c"]


async def test_a_surrogate_pair_is_joined_across_chunks_without_text(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*map(_ascii_frame, [delta(content="\ud83d"), delta(content=""), delta(content="\ude00")]), finish())
    assert (await stream(ours)).response["output_text"] == "\U0001f600"


@pytest.mark.both_mounts
async def test_a_stream_is_not_compressed_and_its_headers_forbid_caching_and_buffering(
    ours: Ours, upstream: ScriptedUpstream
) -> None:
    upstream.stream(*HELLO)
    response = await ours.http.post("/v1/responses", json=BODY, headers={"accept-encoding": "gzip"})
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers


@pytest.mark.both_mounts
async def test_response_created_is_sent_before_the_upstream_answers(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    await stream(ours)  # the dialect of the upstream is known from now on
    begin = Signal()
    upstream.stream(*HELLO, before=begin)
    async with ours.http.stream("POST", "/v1/responses", json=BODY) as response:
        chunks = response.aiter_raw()
        raw = await anext(chunks)
        assert raw.startswith(b"event: response.created\n")
        begin.set()
        raw += b"".join([data async for data in chunks])
    assert check(raw).terminal == "response.completed"


@pytest.mark.both_mounts
async def test_response_created_waits_for_the_upstreams_status_within_the_grace(
    start: Start, upstream: ScriptedUpstream
) -> None:
    ours = start(upstream__status_grace=60)
    begin = Signal()
    upstream.whole(error("too late?", 400), 400, before=begin)
    request = asyncio.create_task(ours.http.post("/v1/responses", json=BODY))
    await asyncio.sleep(0.2)
    begin.set()
    assert (await request).status_code == 400


async def test_comments_of_the_upstream_do_not_start_the_response(patient: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(b": ping\n\n", b": ping\n\n", frame(error("no", 429)))
    response = await patient.http.post("/v1/responses", json=BODY)
    assert response.status_code == 429


# -- keep-alive and names of events --------------------------------------------------------------------------------------


@pytest.mark.both_mounts
@pytest.mark.usefixtures("impatient")
async def test_a_silent_stream_is_kept_alive_by_comments(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start()
    more = Signal()
    upstream.stream(text("Hel"), more, text("lo"), finish())
    raw = await _until(ours, b": keep-alive\n\n", more)
    assert check(raw).deltas == ["Hel", "lo"]


@pytest.mark.usefixtures("impatient")
async def test_the_keepalive_event_repeats_the_last_sequence_number(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(server__keep_alive="event")
    more = Signal()
    upstream.stream(text("Hel"), more, text("lo"), finish())
    raw = await _until(ours, b"event: keepalive\n", more)
    assert check(raw).deltas == ["Hel", "lo"]
    before, _, after = raw.decode().partition("event: keepalive\ndata: ")
    last = json.loads(before.rstrip("\n").rpartition("data: ")[2])
    assert json.loads(after.split("\n")[0]) == {"type": "keepalive", "sequence_number": last["sequence_number"]}


def test_a_server_process_keeps_a_silent_stream_alive() -> None:
    """anyio can detect more about an event loop run by pytest than about that of a server."""
    body = {**BODY, "model": MODEL, "max_output_tokens": 2}
    with (
        running("benchmarks.upstream", "--tokens-per-second=1") as upstream,
        running("tests.support.impatient", "serve", f"--upstream={upstream.url}") as server,
    ):
        raw = httpx.post(f"{server.url}/v1/responses", json=body, verify=False, timeout=60).content
    assert b": keep-alive\n\n" in raw
    assert check(raw).terminal == "response.completed"


async def _until(ours: Ours, awaited: bytes, more: Signal) -> bytes:
    """Read a stream whose second part the upstream sends once `awaited` has been received."""
    raw = b""
    async with ours.http.stream("POST", "/v1/responses", json=BODY) as response:
        async for data in response.aiter_raw():
            raw += data
            if awaited in raw:
                more.set()
    return raw


async def test_reasoning_events_can_have_their_open_responses_names(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(server__reasoning_events="open_responses")
    upstream.stream(reasoning("Hm."), *HELLO)
    response = await ours.http.post("/v1/responses", json=BODY)
    thoughts = [line for line in response.text.splitlines() if line.startswith("event: response.reasoning")]
    assert thoughts == ["event: response.reasoning.delta", "event: response.reasoning.done"]


# -- clean ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "done"),
    [
        pytest.param([text("Hello"), finish()], False, id="finish_reason"),
        pytest.param([text("Hello"), finish(), BrokenOff()], False, id="finish_reason, then a break: the answer is complete"),
        pytest.param([text("Hello")], True, id="[DONE]"),
        pytest.param([text("Hello"), usage()], False, id="usage on an empty chunk"),
        pytest.param([text("Hello"), {**delta(), "usage": usage()["usage"]}], False, id="usage on the last chunk"),
        pytest.param([text("Hello"), frame(finish())[:-2]], False, id="the last frame without a blank line"),
    ],
)
@pytest.mark.both_mounts
async def test_a_clean_end_completes_the_response(
    ours: Ours, upstream: ScriptedUpstream, pieces: list[Any], done: bool
) -> None:
    upstream.stream(*pieces, done=done)
    streamed = await stream(ours)
    assert streamed.terminal == "response.completed"
    assert streamed.response["output"][0]["content"][0]["text"] == "Hello"


@pytest.mark.both_mounts
async def test_the_upstream_stream_is_read_to_its_end(ours: Ours, upstream: ScriptedUpstream) -> None:
    """Otherwise it would see a disconnected client, and its connection could not be reused."""
    answer = upstream.stream(*HELLO)
    await stream(ours)
    await answer.played.wait()
    await asyncio.sleep(0.05)
    assert not answer.left.is_set()


# -- broken ends ---------------------------------------------------------------------------------------------------------

CUT = [
    pytest.param([text("Hel")], False, id="end of the connection"),
    pytest.param([text("Hel"), BrokenOff()], False, id="break in the connection"),
    pytest.param([text("Hel"), error("engine died", 500)], True, id="error frame of vLLM"),
    pytest.param([text("Hel"), error("engine died", 500)], False, id="error frame, then the end"),
    pytest.param([text("Hel"), {"object": "error", "message": "no", "code": 500}], True, id="flat error frame of SGLang"),
    pytest.param([text("Hel"), {"error": "overloaded", "error_type": "overloaded"}], True, id="error frame of old TGI"),
    pytest.param([text("Hel"), {"error": {"message": "no", "http_status_code": 424}}], True, id="error frame of TGI"),
    pytest.param([text("Hel"), b'error: {"code": 500, "message": "no"}\n\n'], True, id="error field of llama.cpp"),
    pytest.param([text("Hel"), b"data: {not json\n\n"], True, id="invalid JSON"),
    pytest.param([text("Hel"), b"data: [1, 2]\n\n"], True, id="JSON that is not an object"),
    pytest.param([text("Hel"), b'data: {"choices": ["x"]}\n\n'], True, id="an invalid chunk"),
    pytest.param([text("Hel"), finish("abort")], True, id="aborted"),
    pytest.param(
        [text(""), {**text("Hel"), "usage": usage()["usage"]}, error("died", 500)], True, id="error frame after the usage"
    ),
    pytest.param([text("Hel"), finish("insufficient_system_resource")], True, id="out of resources"),
    pytest.param([text("Hel"), b"event: error\n: died\n\n"], True, id="error event with a comment, as of Dynamo"),
    pytest.param([text("Hel"), b"event: error\ndata: died\n\n"], True, id="error event with a text"),
    pytest.param([text("Hel"), b'{"error": {"message": "died"}}\n\n'], True, id="error without framing"),
    pytest.param([text("Hel"), {"detail": "died"}], True, id="detail without choices"),
    pytest.param([text("Hel"), {"choices": None, "base_resp": {"status_code": 1000}}], True, id="error of MiniMax"),
    pytest.param([{**text("Hel"), "usage": usage()["usage"]}], False, id="usage on every chunk, without an end"),
]


@pytest.mark.parametrize(("pieces", "done"), CUT)
@pytest.mark.both_mounts
async def test_a_broken_stream_is_a_failed_response(
    ours: Ours, upstream: ScriptedUpstream, pieces: list[Any], done: bool
) -> None:
    upstream.stream(*pieces, done=done)
    _assert_cut(await stream(ours))


@pytest.mark.parametrize(("pieces", "done"), CUT)
async def test_a_broken_stream_that_arrives_in_one_read_fails_the_same_way(
    ours: Ours, upstream: ScriptedUpstream, pieces: list[Any], done: bool
) -> None:
    """The content before the fault is emitted even if one read contained both."""
    framed = [frame(piece) if isinstance(piece, dict) else piece for piece in pieces]
    at_once = b"".join(piece for piece in framed if isinstance(piece, bytes))
    upstream.stream(b": ping\n\n", at_once, *[p for p in framed if not isinstance(p, bytes)], done=done)
    _assert_cut(await stream(ours))


def _assert_cut(streamed: Streamed) -> None:
    assert streamed.terminal == "response.failed"
    assert streamed.deltas == ["Hel"]
    assert "response.output_item.done" not in streamed.types
    [item] = streamed.response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hel")


async def test_a_truncated_call_has_no_done_event(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(call('{"ci', name="get_weather", call_id="call_1"), done=False)
    streamed = await stream(ours, tools=[{"type": "function", "name": "get_weather"}])
    assert "response.function_call_arguments.done" not in streamed.types
    assert streamed.response["output"][0]["status"] == "incomplete"


async def test_items_before_the_truncated_one_stay_completed(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(delta(reasoning="Hm."), text("Hel"), BrokenOff())
    streamed = await stream(ours)
    assert [item["status"] for item in streamed.response["output"]] == ["completed", "incomplete"]
    assert streamed.types.count("response.output_item.done") == 1


@pytest.mark.both_mounts
async def test_a_stalled_upstream_is_a_failed_response(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__timeout=0.5)
    answer = upstream.stream(text("Hel"), Signal())
    streamed = await stream(ours)
    _assert_cut(streamed)
    assert "silent" in streamed.response["error"]["message"]
    await answer.left.wait()


@pytest.mark.both_mounts
async def test_an_upstream_that_never_starts_is_a_failed_response(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__timeout=1)
    answer = upstream.stream(*HELLO, before=Signal())
    streamed = await stream(ours)
    assert streamed.terminal == "response.failed"
    assert streamed.response["output"] == []
    await answer.left.wait()


@pytest.mark.both_mounts
async def test_the_first_chunk_may_take_longer_than_the_idle_timeout(start: Start, upstream: ScriptedUpstream) -> None:
    """vLLM sends its status immediately, and its first chunk after queueing and prefill."""
    ours = start(upstream__timeout=5)
    begin = Signal()
    upstream.stream(begin, *HELLO)
    request = asyncio.create_task(stream(ours))
    await asyncio.sleep(1.2)
    begin.set()
    assert (await request).terminal == "response.completed"


@pytest.mark.both_mounts
async def test_pauses_shorter_than_the_idle_timeout_are_accepted(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__timeout=7.5)
    pauses = [Signal() for _ in range(4)]
    upstream.stream(*[piece for pause in pauses for piece in (text("x"), pause)], finish())
    request = asyncio.create_task(stream(ours))
    for pause in pauses:
        await asyncio.sleep(0.4)
        pause.set()
    assert (await request).deltas == ["x"] * 4


@pytest.mark.parametrize("field", ["a", "b" * 300_000])
@pytest.mark.both_mounts
async def test_long_and_short_texts_are_streamed_unchanged(ours: Ours, upstream: ScriptedUpstream, field: str) -> None:
    upstream.stream(text(field), finish())
    assert (await stream(ours)).deltas == [field]


@pytest.mark.parametrize("kind", [EventStreamResponse, RunJSONResponse])
async def test_a_receive_that_fails_ends_the_run(kind: type[EventResponse], caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the run would continue for a client that has disconnected."""
    caplog.set_level(logging.INFO)
    has_ended = False

    async def batches() -> AsyncGenerator[list[Event], None]:
        nonlocal has_ended
        try:
            yield [Event("response.created", {"response": {}})]
            await asyncio.Event().wait()
        finally:
            has_ended = True

    async def receive() -> Message:
        raise RuntimeError("the connection is gone")

    async def send(message: Message) -> None:
        pass

    async with asyncio.timeout(30):
        await kind(batches(), ServerSettings())({"type": "http"}, receive, send)
    assert has_ended
    assert "the connection is gone" in caplog.text


async def test_a_large_batch_is_sent_in_parts_and_a_small_one_at_once() -> None:
    sent: list[bytes] = []
    turns_of_others: list[int] = []

    def events(size: int) -> list[Event]:
        return [Event("response.made_up", {"number": number, "text": "x" * size}) for number in range(5)]

    async def batches() -> AsyncGenerator[list[Event], None]:
        yield events(1)
        yield events(1)
        yield events(MAX_INLINE_BYTES)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            turn = len(sent)
            asyncio.get_running_loop().call_soon(lambda: turns_of_others.append(turn) if turn == len(sent) else None)

    async with asyncio.timeout(30):
        await EventStreamResponse(batches(), ServerSettings())({"type": "http"}, receive, send)
    small, large = encode(events(1)), [encode((event,)) for event in events(MAX_INLINE_BYTES)]
    assert sent[:-1] == [small, small, *large]
    assert set(turns_of_others) >= {3, 4, 5, 6, 7}  # other requests are served after each part
