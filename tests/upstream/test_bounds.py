"""Limits on what an upstream may send: the size of its answers, their encoding and their calls."""

from __future__ import annotations

import gzip
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.errors import UpstreamError
from responses_mw.settings.upstreams import UpstreamSettings
from responses_mw.upstream import Caller, Upstream
from responses_mw.upstream.pool import Pool
from responses_mw.upstream.transports.asgi import ASGITransport
from tests.support.mcp_servers import weather
from tests.support.oracle import stream, whole
from tests.support.scripted import HELLO, SSE, call, completion, delta, finish, text

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

pytestmark = pytest.mark.both_mounts

Ask = Callable[[Upstream], Awaitable[object]]
StartBounded = Callable[..., "Ours"]


@pytest.fixture
def start_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> StartBounded:
    """Return a function that starts the server with a maximum number of bytes from the upstream and tools for a response."""

    def start_bounded(maximum: int, **settings: Any) -> Ours:
        for module in ("upstream.client", "engine.run"):
            monkeypatch.setattr(f"responses_mw.{module}.MAX_ANSWER_BYTES", maximum)
        return start(**settings)

    return start_bounded


class Endless:
    """An application with endless or compressed answers."""

    def __init__(self, piece: bytes = b" " * (1 << 20), *, status: int = 200, **headers: str) -> None:
        self.piece, self.status, self.headers = piece, status, headers
        self.left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in self.headers.items()]
        await receive()
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        try:
            for _ in range(1000):
                await send({"type": "http.response.body", "body": self.piece, "more_body": True})
        finally:
            self.left = True


async def _chat(upstream: Upstream) -> None:
    async with aclosing(await upstream.chat({"model": "tiny", "messages": []}, Caller())) as answer:
        async for _ in answer:
            pass


async def _native(upstream: Upstream) -> None:
    async with aclosing(await upstream.responses({"model": "tiny", "input": []}, Caller())) as answer:
        async for _ in answer:
            pass


ASKS: dict[str, Ask] = {
    "chat": _chat,
    "responses": _native,
    "models": lambda upstream: upstream.models(Caller()),
    "tokenize": lambda upstream: upstream.post("/tokenize", {}, Caller()),
    "props": lambda upstream: upstream.get("/props", Caller()),
}


async def _refused(app: Endless, ask: Ask) -> UpstreamError:
    upstream = Upstream(ASGITransport(app), Pool.of("http://upstream"), UpstreamSettings(dialect="vllm"))
    with pytest.raises(UpstreamError) as caught:
        await ask(upstream)
    return caught.value


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
async def test_an_endless_answer_is_aborted(ask: Ask) -> None:
    app = Endless(content_type="application/json")
    error = await _refused(app, ask)
    assert error.message.endswith("more than 67108864 bytes.")
    assert error.status == 502
    assert app.left


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_a_compressed_answer_is_refused_without_reading_it(ask: Ask, kind: str) -> None:
    app = Endless(gzip.compress(b" " * (1 << 24)), content_type=kind, content_encoding="gzip")
    error = await _refused(app, ask)
    assert error.message == "The upstream sent a body with the content-encoding 'gzip', which was not requested."


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_an_error_with_an_endless_or_compressed_body_is_reported_by_its_status(ask: Ask, encoding: str) -> None:
    app = Endless(gzip.compress(b" " * (1 << 24)), status=500, content_encoding=encoding)
    error = await _refused(app, ask)
    assert (error.status, error.message) == (502, "The upstream answered with status 500.")


async def test_an_endless_stream_fails_the_response(start_bounded: StartBounded, upstream: ScriptedUpstream) -> None:
    ours = start_bounded(100_000)
    upstream.stream(*[text("word " * 20)] * 2000)
    failed = await stream(ours)
    assert failed.terminal == "response.failed"
    assert failed.response["error"] == {"code": "server_error", "message": "The upstream sent more than 100000 bytes."}
    assert 20_000 < len(failed.response["output"][0]["content"][0]["text"]) <= 100_000
    upstream.stream(*HELLO)
    assert (await stream(ours)).terminal == "response.completed"


async def test_the_maximum_includes_reasoning_calls_and_refusals(
    start_bounded: StartBounded, upstream: ScriptedUpstream
) -> None:
    ours = start_bounded(10_000)
    for piece in (delta(reasoning='"' * 1000), call('"' * 1000, name="f", call_id="c"), delta(refusal="no" * 500)):
        upstream.stream(*[piece] * 20)
        assert (await stream(ours)).response["error"]["message"] == "The upstream sent more than 10000 bytes."


async def test_a_non_streamed_answer_over_the_maximum_size_is_a_502(
    start_bounded: StartBounded, upstream: ScriptedUpstream
) -> None:
    upstream.whole(completion({"content": "a" * 20_000}))
    response = await start_bounded(10_000).http.post("/v1/responses", json={"model": "tiny", "input": "Hi"})
    assert (response.status_code, response.json()["error"]["message"]) == (502, "The upstream sent more than 10000 bytes.")


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model write at most 1000 characters in a turn."""
    for module in ("upstream.stream", "upstream.decoding"):
        monkeypatch.setattr(f"responses_mw.{module}.MAX_TEXT", 1000)
    monkeypatch.setattr("responses_mw.upstream.stream._MIN_GRANT", 10)


TOO_LONG = "The upstream's answer has more than 1000 characters of text."


async def test_a_text_that_is_too_long_fails_the_response(short_texts: None, ours: Ours, upstream: ScriptedUpstream) -> None:
    begun = call('{"q": "', name="f", call_id="c")
    arguments = delta(tool_calls=[{"index": 0, "function": {"arguments": "a" * 100}}])
    for beginning, piece in ((text("a"), text("a" * 100)), (text("a"), delta(reasoning="a" * 100)), (begun, arguments)):
        upstream.stream(beginning, *[piece] * 100)
        failed = await stream(ours, tools=[{"type": "function", "name": "f"}])
        assert (failed.terminal, failed.response["error"]["message"]) == ("response.failed", TOO_LONG)
        assert len(json.dumps(failed.response["output"])) < 3000


async def test_the_maximum_length_applies_to_the_text_of_all_items_together(
    short_texts: None, ours: Ours, upstream: ScriptedUpstream
) -> None:
    upstream.stream(delta(reasoning="a" * 600), *[text("a" * 50)] * 40)
    assert (await stream(ours)).response["error"]["message"] == TOO_LONG


async def test_only_the_total_length_of_chunks_is_limited(short_texts: None, ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*[text("a")] * 900, finish())
    done = await stream(ours)
    assert (done.terminal, done.response["output"][0]["content"][0]["text"]) == ("response.completed", "a" * 900)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_text_that_is_too_long_in_its_first_chunk_is_a_502(
    short_texts: None, patient: Ours, upstream: ScriptedUpstream, streamed: bool
) -> None:
    if streamed:
        upstream.stream(text("a" * 1001), finish())
    else:
        upstream.whole(completion({"content": "a" * 1001}))
    response = await patient.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "stream": streamed})
    assert (response.status_code, response.json()["error"]["message"]) == (502, TOO_LONG)


async def test_log_probabilities_do_not_count_towards_the_length_of_a_text(
    short_texts: None, ours: Ours, upstream: ScriptedUpstream
) -> None:
    token = {"token": "a" * 30, "logprob": -0.1, "bytes": [97] * 30, "top_logprobs": []}
    body = completion({"content": "a" * 900})
    body["choices"][0]["logprobs"] = {"content": [token] * 30}
    upstream.whole(body)
    assert (await whole(ours))["output"][0]["content"][0]["text"] == "a" * 900


async def test_the_maximum_includes_all_turns_and_tool_results(
    start_bounded: StartBounded, upstream: ScriptedUpstream, serve: Serve
) -> None:
    ours = start_bounded(4000, tools__allow_private_urls=True)
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    tool = {"type": "mcp", "server_label": "w", "server_url": url, "require_approval": "never"}
    for _ in range(20):
        upstream.stream(call('{"city": "Rome"}', name="get_weather", call_id="c"), finish("tool_calls"))
    failed = await stream(ours, tools=[tool])
    assert failed.terminal == "response.failed"
    assert failed.response["error"]["message"] == "The response exceeds the maximum of 4000 bytes."
    assert 2 < len(upstream.requests) < 20


@pytest.mark.parametrize("streamed", [True, False])
async def test_more_calls_than_a_turn_may_have_fail_the_response(
    ours: Ours, upstream: ScriptedUpstream, streamed: bool
) -> None:
    calls = [{"index": index, "id": f"c{index}", "function": {"name": "f", "arguments": "{}"}} for index in range(600)]
    upstream.stream(delta(tool_calls=calls), finish("tool_calls"), headers=SSE)
    response = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "stream": streamed})
    assert "more than 512 calls" in response.text


async def test_the_index_of_a_call_may_be_any_number(ours: Ours, upstream: ScriptedUpstream) -> None:
    fragment: dict[str, Any] = {"index": 10**9, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    upstream.whole(completion({"content": "ok"}))
    upstream.stream(delta(tool_calls=[fragment]), finish("tool_calls"))
    await whole(ours)
    tool = {"type": "function", "name": "f"}
    assert [item["type"] for item in (await stream(ours, tools=[tool])).response["output"]] == ["function_call"]
