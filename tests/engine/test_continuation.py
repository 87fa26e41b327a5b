"""Continuation of an answer that breaks off: the client sees no text twice, and no text is lost."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.engine import turns
from responses_mw.errors import UpstreamTimeout
from responses_mw.telemetry.instruments import REGISTRY
from responses_mw.upstream import Caller, Upstream
from responses_mw.upstream.continuation import PrefillProof
from responses_mw.upstream.pool import Pool
from responses_mw.upstream.transports.asgi import ASGITransport
from tests.support.configured import make_settings
from tests.support.continuing import PIECE, Continuing
from tests.support.garbage import nothing_left
from tests.support.mcp_servers import weather
from tests.support.oracle import stream
from tests.support.scripted import Answer, Asked, BrokenOff, Signal, error, frame
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from tests.support.servers import Ours, Serve, Start

SAID = "Die Antwort: 42\n\n  und noch etwas mehr Text, mit Ümläuten 🎉."
THOUGHT = "Let me think about it."
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "FIRST_PAUSE", 0.01)


@pytest.fixture
def begin(serve: Serve, start_at: Start) -> Start:
    """Start a proxy in front of a `Continuing`, with a status grace of 0."""

    def start(upstream: Continuing, **settings: Any) -> Ours:
        url = serve(upstream)
        return start_at("proxy", upstream=url, upstream__status_grace=0, tools__allow_private_urls=True, **settings)

    return start


def said(response: dict[str, Any]) -> list[Any]:
    """Return the type and text of each item, and the status of items that are not completed."""
    told = []
    for item in response["output"]:
        content = "".join(part["text"] for part in item.get("content") or ())
        told.append((item["type"], content) if item["status"] == "completed" else (item["type"], content, item["status"]))
    return told


@pytest.mark.parametrize("thought", ["", THOUGHT], ids=["plain", "reasoning"])
async def test_a_text_continued_after_a_break_at_any_chunk_equals_an_unbroken_one(begin: Start, thought: str) -> None:
    upstream = Continuing(SAID, thought)
    ours = begin(upstream)
    unbroken = await stream(ours)
    before = len(thought) // PIECE + bool(len(thought) % PIECE)
    for cut in range(before + 1, before + -(-len(SAID) // PIECE) + 1):
        upstream.cuts = deque([cut])
        broken = await stream(ours)
        assert said(broken.response) == said(unbroken.response)
        assert broken.deltas == unbroken.deltas
        assert broken.response["usage"] == unbroken.response["usage"]
    assert not upstream.cuts
    assert all(asked.json["continue_final_message"] for asked in upstream.requests[3::2])


async def test_a_continued_answer_leaves_nothing_to_the_garbage_collector(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.cuts = deque([5])
    ours = begin(upstream)
    async with nothing_left():
        assert said((await stream(ours)).response) == [("message", SAID)]
    assert not upstream.cuts


async def test_an_answer_of_llama_cpp_is_continued_after_a_proof_with_apply_template(begin: Start) -> None:
    upstream = Continuing(SAID)
    ours = begin(upstream, upstream__dialect="llamacpp")
    unbroken = await stream(ours)
    for cut in (1, 5, 9):
        upstream.cuts = deque([cut])
        broken = await stream(ours)
        assert (said(broken.response), broken.response["usage"]) == (said(unbroken.response), unbroken.response["usage"])
    assert {asked.path for asked in upstream.visits} == {"/apply-template", "/tokenize"}


async def test_an_answer_of_llama_cpp_is_not_continued_if_the_prefill_cannot_be_proved(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.hides, upstream.cuts = True, deque([4])
    streamed = await stream(begin(upstream, upstream__dialect="llamacpp"))
    assert said(streamed.response) == [("message", SAID[: 4 * PIECE], "incomplete")]


async def test_a_response_is_continued_at_most_three_times(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.cuts = deque([4, 4, 4])
    ours = begin(upstream)
    streamed = await stream(ours)
    assert said(streamed.response) == [("message", SAID)]
    assert streamed.response["usage"]["output_tokens"] == len(SAID)
    upstream.cuts = deque([4, 4, 4, 4])
    streamed = await stream(ours)
    assert said(streamed.response) == [("message", SAID[: 16 * PIECE], "incomplete")]
    assert streamed.response["error"]["message"].startswith("The upstream closed the connection before its answer was complete")


@pytest.mark.parametrize(
    ("cuts", "body", "expected"),
    [([4], {}, 1), ([4, 4, 4, 4], {}, 3), ([4], {"text": SCHEMA}, 0), ([0], {}, 1)],
    ids=["once", "too often", "not possible", "before the first output"],
)
async def test_the_access_line_the_log_and_the_metric_have_the_same_number_of_continuations(
    begin: Start, caplog: pytest.LogCaptureFixture, cuts: list[int], body: dict[str, Any], expected: int
) -> None:
    caplog.set_level("INFO", "responses_mw")
    upstream = Continuing(SAID)
    upstream.cuts = deque(cuts)
    ours, before = begin(upstream), counted_continuations()
    response = (await stream(ours, **body)).response
    async with asyncio.timeout(PATIENCE):
        while not (lines := [one for one in caplog.records if one.name == "responses_mw.access"]):
            await asyncio.sleep(0.01)
    logged = [one for one in caplog.records if one.message.startswith(f"response {response['id']} continued")]
    assert lines[0].facts.get("continuations", 0) == expected  # type: ignore[attr-defined]
    assert (len(logged), counted_continuations() - before) == (expected, expected)


def counted_continuations() -> float:
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "responses_mw_continuations_total")


async def test_open_items_of_a_failed_response_are_incomplete_and_have_no_done_event(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.cuts = deque([4])
    streamed = await stream(begin(upstream, upstream__overload_timeout=0))
    assert said(streamed.response) == [("message", SAID[: 4 * PIECE], "incomplete")]
    assert not [event for event in streamed.events if event["type"].endswith(".done")]


async def test_an_overload_timeout_of_0_turns_continuation_off(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.cuts = deque([4])
    streamed = await stream(begin(upstream, upstream__overload_timeout=0))
    assert said(streamed.response) == [("message", SAID[: 4 * PIECE], "incomplete")]
    assert len(upstream.requests) == 1


async def test_a_response_with_a_seed_is_continued_with_the_same_seed(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.cuts = deque([4])
    streamed = await stream(begin(upstream), seed=7)
    assert (streamed.response["output_text"], streamed.response["status"]) == (SAID, "completed")
    assert all(asked.json["seed"] == 7 for asked in upstream.requests if asked.json.get("stream"))


@pytest.mark.parametrize(
    "broken",
    [
        BrokenOff(),
        b"",
        b'data: {"choices": [{"ind',
        frame(error("The engine is dead.", 500)),
        frame({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}),
    ],
    ids=["reset", "end", "within a frame", "error frame", "abort"],
)
async def test_an_answer_is_continued_after_every_kind_of_break(begin: Start, broken: Any) -> None:
    upstream = Continuing(SAID)
    upstream.cuts, upstream.broken = deque([5]), broken
    assert said((await stream(begin(upstream))).response) == [("message", SAID)]


async def test_an_answer_is_continued_after_a_timeout(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.cuts, upstream.broken = deque([5]), Signal()
    assert said((await stream(begin(upstream, upstream__timeout=1.5))).response) == [("message", SAID)]


async def test_a_400_error_in_the_stream_ends_the_response(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.cuts, upstream.broken = deque([5]), frame(error("Not like this.", 400))
    streamed = await stream(begin(upstream))
    assert streamed.response["error"]["message"] == "Not like this."
    assert len(upstream.requests) == 1


async def test_an_answer_that_breaks_off_before_any_text_is_requested_again_unchanged(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.cuts = deque([0])
    streamed = await stream(begin(upstream), text=SCHEMA)
    assert said(streamed.response) == [("message", SAID)]
    assert [asked.json for asked in upstream.requests[:1]] == [asked.json for asked in upstream.requests[1:]]


async def test_a_turn_that_breaks_off_before_any_output_is_retried_only_once(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.cuts = deque([0, 0, 0, 0])
    streamed = await stream(begin(upstream))
    assert (streamed.terminal, streamed.response["output"]) == ("response.failed", [])
    assert len(upstream.requests) == 2


async def test_broken_reasoning_is_closed_as_incomplete_and_the_model_thinks_again(begin: Start) -> None:
    upstream = Continuing(SAID, THOUGHT)
    ours = begin(upstream)
    usage = (await stream(ours)).response["usage"]
    upstream.cuts = deque([2, 12])
    streamed = await stream(ours)
    assert said(streamed.response) == [
        ("reasoning", THOUGHT[: 2 * PIECE], "incomplete"),
        ("reasoning", THOUGHT),
        ("message", SAID),
    ]
    assert streamed.response["usage"] == usage
    assert upstream.requests[-1].json["messages"][-1]["reasoning"] == THOUGHT, "the model sees what it thought last"


async def test_constrained_output_is_not_continued(begin: Start) -> None:
    upstream = Continuing('{"n": 123456789}')
    upstream.cuts = deque([2])
    ours = begin(upstream)
    assert (await stream(ours, text=SCHEMA)).terminal == "response.failed"
    upstream.cuts = deque([2])
    assert (await stream(ours, structured_outputs={"regex": ".*"})).terminal == "response.failed"
    assert all("continue_final_message" not in asked.json for asked in upstream.requests)


async def test_a_break_in_a_function_call_for_the_client_fails_the_response(begin: Start) -> None:
    upstream = Continuing("Wait.", calls=(("weather", '{"city": "Paris"}'),))
    ours = begin(upstream)
    for cut in (4, 6, 9):
        upstream.cuts = deque([cut])
        streamed = await stream(ours, tools=[FUNCTION])
        assert streamed.terminal == "response.failed"
        assert [item["type"] for item in streamed.response["output"]] == ["message", "function_call"]


async def test_a_break_in_the_text_before_a_function_call_is_continued(begin: Start) -> None:
    upstream = Continuing("Wait a moment.", calls=(("weather", '{"city": "Paris"}'),))
    ours = begin(upstream)
    upstream.cuts = deque([3])
    streamed = await stream(ours, tools=[FUNCTION])
    assert streamed.terminal == "response.completed"
    assert [item["type"] for item in streamed.response["output"]] == ["message", "function_call"]
    assert streamed.response["output"][0]["content"][0]["text"] == "Wait a moment."
    assert streamed.response["output"][1]["arguments"] == '{"city": "Paris"}'


async def test_a_broken_mcp_call_is_closed_as_incomplete_and_made_again(
    begin: Start, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = Continuing("Sunny.", calls=(("get_weather", '{"city": "Paris"}'),))
    upstream.cuts = deque([5])
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    monkeypatch.setattr(turns, "MAX_TURNS", 2)
    ours = begin(upstream)
    tools = [{"type": "mcp", "server_label": "w", "server_url": url, "require_approval": "never"}]
    streamed = await stream(ours, tools=tools, max_tool_calls=1)
    assert streamed.terminal == "response.completed", streamed.response["error"]
    output = [item for item in streamed.response["output"] if item["type"] != "mcp_list_tools"]
    assert [(item["type"], item["status"]) for item in output] == [
        ("message", "completed"),
        ("mcp_call", "incomplete"),
        ("mcp_call", "completed"),
        ("message", "completed"),
    ]
    assert output[2]["output"] == "Sunny in Paris."
    assert "output" not in output[1] or output[1]["output"] is None


async def test_a_response_completes_without_usage_if_a_break_loses_the_usage(begin: Start, serve: Serve) -> None:
    upstream = Continuing(SAID, calls=(("get_weather", '{"city": "Paris"}'),))
    upstream.cuts = deque([-1, 4])
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    tools = [{"type": "mcp", "server_label": "w", "server_url": url, "require_approval": "never"}]
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}  # tokens of images are not counted
    message = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, image]}
    streamed = await stream(begin(upstream), tools=tools, input=[message], max_tool_calls=1)
    assert (streamed.response["status"], streamed.response["usage"]) == ("completed", None), streamed.response["error"]


@pytest.mark.parametrize("reason", ["hides", "unknown"])
async def test_a_response_fails_if_the_prefill_cannot_be_proved(
    begin: Start, serve: Serve, start_at: Start, reason: str
) -> None:
    upstream = Continuing(SAID)
    upstream.cuts = deque([4])
    if reason == "hides":
        upstream.hides = True
        ours = begin(upstream)
    else:
        ours = begin(upstream, upstream__dialect="openai")
    streamed = await stream(ours)
    assert said(streamed.response) == [("message", SAID[: 4 * PIECE], "incomplete")]
    assert streamed.response["error"]["message"].startswith("The upstream closed the connection before its answer was complete")


each_chunk = pytest.mark.parametrize("counts_each_chunk", [True, False], ids=["usage in each chunk", "usage at the end"])
REFRAIN = "Ein Hut, drei Ecken\n\n"  # 21 characters, so that a break falls between two of them


@each_chunk
@pytest.mark.parametrize("text", [REFRAIN * 2, REFRAIN * 2 + "hat mein Hut", REFRAIN * 4, "-" * 24, "ab" * 9])
async def test_new_text_that_equals_all_text_so_far_is_kept(begin: Start, text: str, counts_each_chunk: bool) -> None:
    upstream = Continuing(text)
    upstream.counts_each_chunk = counts_each_chunk
    ours = begin(upstream)
    unbroken = await stream(ours)
    for cut in range(1, len(text) // PIECE):
        upstream.cuts = deque([cut])
        broken = await stream(ours)
        assert said(broken.response) == said(unbroken.response) == [("message", text.rstrip() if text.isspace() else text)]
        assert broken.response["usage"] == unbroken.response["usage"]


@each_chunk
@pytest.mark.parametrize("text", [SAID, REFRAIN * 2 + "hat mein Hut"])
async def test_a_message_that_the_upstream_sends_again_before_it_continues_is_dropped(
    begin: Start, text: str, counts_each_chunk: bool
) -> None:
    upstream = Continuing(text)
    ours = begin(upstream)
    unbroken = await stream(ours)
    upstream.echoes, upstream.counts_each_chunk = True, counts_each_chunk
    for cut in (2, 6, 7):
        upstream.cuts = deque([cut])
        broken = await stream(ours)
        assert said(broken.response) == [("message", text)]
        assert broken.response["usage"] == unbroken.response["usage"]


@each_chunk
@pytest.mark.parametrize("text", [SAID, REFRAIN * 2 + "hat mein Hut"])
async def test_an_answer_that_the_upstream_starts_again_is_not_sent_twice(
    begin: Start, text: str, counts_each_chunk: bool
) -> None:
    upstream = Continuing(text, THOUGHT)
    ours = begin(upstream)
    unbroken = await stream(ours)
    upstream.begins_anew, upstream.counts_each_chunk = text, counts_each_chunk
    for cut in (9, 14, 15):
        upstream.cuts = deque([cut])
        broken = await stream(ours)
        assert said(broken.response) == said(unbroken.response)
        assert broken.response["usage"] == unbroken.response["usage"]


@each_chunk
@pytest.mark.parametrize("shared", [0, 30, 100])
async def test_a_response_fails_if_the_upstream_starts_a_different_answer(
    begin: Start, counts_each_chunk: bool, shared: int
) -> None:
    upstream = Continuing(" ".join(map(str, range(200))))
    upstream.counts_each_chunk = counts_each_chunk
    upstream.begins_anew = upstream.said[:shared] + "otherwise." * 20
    upstream.cuts = deque([50])
    streamed = await stream(begin(upstream))
    assert streamed.response["error"]["message"].startswith("The upstream started a new answer")
    is_noticed_late = not counts_each_chunk and shared < 64
    assert said(streamed.response) == [
        ("message", upstream.said[: 50 * PIECE] + (upstream.begins_anew if is_noticed_late else ""), "incomplete")
    ]


async def test_another_server_gets_the_request_after_one_that_starts_a_new_answer(begin: Start) -> None:
    class Routed(Continuing):
        def unscripted(self, asked: Asked) -> Answer:
            streamed = sum(bool(one.json.get("stream")) for one in self.requests)
            self.begins_anew = "I am another server." if streamed == 2 else None
            return super().unscripted(asked)

    upstream = Routed(SAID)
    upstream.cuts = deque([5])
    assert said((await stream(begin(upstream))).response) == [("message", SAID)]
    assert len([asked for asked in upstream.requests if asked.json.get("stream")]) == 3


async def test_a_new_answer_cut_by_the_reduced_limit_is_not_taken_for_the_whole(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.begins_anew, upstream.cuts = SAID, deque([4])
    streamed = await stream(begin(upstream), max_output_tokens=30)
    (item,) = said(streamed.response)
    assert SAID[:30].startswith(item[1])
    assert streamed.terminal == "response.failed"


async def test_the_text_and_the_calls_after_it_wait_together_for_the_usage(begin: Start) -> None:
    upstream = Continuing(REFRAIN * 2, calls=(("weather", '{"city": "Paris"}'),))
    upstream.counts_each_chunk, upstream.cuts = False, deque([7])
    streamed = await stream(begin(upstream), tools=[FUNCTION])
    assert streamed.terminal == "response.completed"
    assert [item["type"] for item in streamed.response["output"]] == ["message", "function_call"]
    assert streamed.response["output_text"] == REFRAIN * 2
    assert streamed.response["output"][1]["arguments"] == '{"city": "Paris"}'


async def test_reasoning_that_the_chat_template_hides_counts_towards_the_limit_and_the_usage(begin: Start) -> None:
    upstream = Continuing(SAID, THOUGHT)
    upstream.hides_thought = True
    ours = begin(upstream)
    for cut in (10, 14):
        upstream.cuts = deque([cut])
        streamed = await stream(ours, max_output_tokens=60)
        assert said(streamed.response) == [("reasoning", THOUGHT), ("message", SAID[: 60 - len(THOUGHT)], "incomplete")]
        assert streamed.response["usage"]["output_tokens"] == 60
        assert streamed.response["usage"]["output_tokens_details"] == {"reasoning_tokens": len(THOUGHT)}


@pytest.mark.parametrize("text", ["one \n two three four five", "one  two"])
async def test_white_space_at_the_break_appears_once(begin: Start, text: str) -> None:
    upstream = Continuing(text)
    upstream.trims = True
    ours = begin(upstream)
    for cut in (1, 2):
        upstream.cuts = deque([cut])
        assert said((await stream(ours)).response) == [("message", text)]


async def test_continued_text_that_arrives_as_reasoning_is_text_if_there_are_no_tools(begin: Start) -> None:
    upstream = Continuing(SAID)
    upstream.as_reasoning = True
    upstream.cuts = deque([5])
    ours = begin(upstream)
    assert said((await stream(ours)).response) == [("message", SAID)]
    upstream.cuts = deque([5])
    streamed = await stream(ours, tools=[FUNCTION])
    assert streamed.terminal == "response.failed", "calls would come as text"


async def test_max_output_tokens_limits_the_text_before_and_after_the_break_together(begin: Start) -> None:
    upstream = Continuing(SAID)
    ours = begin(upstream)
    unbroken = await stream(ours, max_output_tokens=30)
    for cut in (4, 10):
        upstream.cuts = deque([cut])
        broken = await stream(ours, max_output_tokens=30)
        assert said(broken.response) == said(unbroken.response) == [("message", SAID[:30], "incomplete")]
        assert broken.response["usage"] == unbroken.response["usage"]
        assert broken.response["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/chat/completions"])
async def test_an_overload_during_the_proof_of_the_prefill_is_retried(begin: Start, path: str) -> None:
    upstream = Continuing(SAID)
    upstream.cuts = deque([5])
    upstream.overloaded = [path] * 2
    assert said((await stream(begin(upstream))).response) == [("message", SAID)]
    assert upstream.overloaded == []


async def test_concurrent_responses_wait_together_for_a_server_that_hangs_during_the_proof() -> None:
    class Hanging(Continuing):
        def unscripted(self, asked: Asked) -> Answer:
            return Answer([], before=Signal())

    server = Hanging()
    settings = make_settings(upstream__dialect="vllm", upstream__timeout=0.2).upstream
    proof = PrefillProof(Upstream(ASGITransport(server), Pool.of("http://upstream"), settings))
    results = await asyncio.gather(*(proof.holds("tiny", Caller()) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [UpstreamTimeout] * 3
    assert len(server.requests) == 1
    with pytest.raises(UpstreamTimeout):
        await proof.holds("tiny", Caller())
    assert len(server.requests) == 2, "a later response tries again"
