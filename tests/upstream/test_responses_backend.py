"""Upstreams with a Responses API: this server still handles state, background mode, ids and sequence numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest

from responses_mw import create_app
from responses_mw.auth import ANONYMOUS
from responses_mw.crypto import Sealer
from responses_mw.telemetry.instruments import exposition
from responses_mw.upstream.backends.base import ORIGINS
from tests.support import oracle, scripted
from tests.support.configured import make_settings
from tests.support.scripted import BrokenOff, ScriptedUpstream
from tests.support.scripted_responses import ScriptedResponses, answer, item, response

if TYPE_CHECKING:
    from tests.support.servers import Ours, Serve, Start

pytestmark = pytest.mark.anyio


@pytest.fixture
def upstream() -> ScriptedResponses:
    return ScriptedResponses()


@pytest.fixture
def relaying(start: Start) -> Ours:
    return start(upstream__api="responses")


@pytest.mark.both_mounts
async def test_a_stream_of_the_upstream_is_relayed_with_new_ids(relaying: Ours, upstream: ScriptedResponses) -> None:
    upstream.stream(*answer(), done=False)
    streamed = await oracle.stream(relaying, temperature=0.5, metadata={"a": "b"})
    assert "".join(streamed.deltas) == "Hello"
    assert b"theirs" not in streamed.raw
    assert streamed.response["service_tier"] == "flex"
    assert (streamed.response["model"], streamed.response["metadata"]) == ("tiny", {"a": "b"})
    assert upstream.requests[0].json == {
        "model": "tiny",
        "input": [
            {"type": "message", "role": "user", "status": "completed", "content": [{"type": "input_text", "text": "Hi"}]}
        ],
        "store": False,
        "stream": True,
        "temperature": 0.5,
    }


async def test_a_text_that_is_too_long_fails_the_response(
    relaying: Ours, upstream: ScriptedResponses, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("stream", "decoding"):
        monkeypatch.setattr(f"responses_mw.upstream.{module}.MAX_TEXT", 1000)
    events = answer("a" * 99)
    is_delta = [event["type"] == "response.output_text.delta" for event in events]
    begin, end = is_delta.index(True), len(is_delta) - is_delta[::-1].index(True)
    upstream.stream(*events[:begin], *events[begin:end] * 50, *events[end:], done=False)
    failed = await oracle.stream(relaying)
    assert failed.terminal == "response.failed"
    assert failed.response["error"]["message"] == "The upstream's answer has more than 1000 characters of text."


@pytest.mark.both_mounts
async def test_a_non_streamed_answer_is_stored_and_can_be_retrieved(relaying: Ours, upstream: ScriptedResponses) -> None:
    upstream.whole(response(item()))
    document = await oracle.whole(relaying)
    assert "stream" not in upstream.requests[0].json
    assert document["output_text"] == "Hello"
    assert (await relaying.http.get(f"/v1/responses/{document['id']}")).json() == document


async def test_a_response_is_continued_by_sending_its_history_to_the_upstream(
    relaying: Ours, upstream: ScriptedResponses
) -> None:
    upstream.stream(*answer("One"), done=False)
    first = (await oracle.stream(relaying)).response
    upstream.whole(response(item("Two")))
    second = await oracle.whole(relaying, input="And?", previous_response_id=first["id"])
    body = upstream.requests[1].json
    assert second["previous_response_id"] == first["id"]
    assert body["store"] is False
    assert "previous_response_id" not in body
    assert [(one["role"], one["content"][0]["text"]) for one in body["input"]] == [
        ("user", "Hi"),
        ("assistant", "One"),
        ("user", "And?"),
    ]


async def test_tools_are_called_by_the_upstream_and_their_secrets_are_not_returned(
    relaying: Ours, upstream: ScriptedResponses
) -> None:
    tool = {"type": "mcp", "server_label": "s", "server_url": "https://mcp.example/mcp", "authorization": "secret-token"}
    call = {"id": "mcp_theirs", "type": "mcp_call", "server_label": "s", "name": "f", "arguments": "{}", "output": "4"}
    upstream.whole(response(call, item("4"), tools=[tool]))
    answered = await relaying.http.post("/v1/responses", json={"input": "2+2?", "model": "tiny", "tools": [tool]})
    document = answered.json()
    assert upstream.requests[0].json["tools"] == [tool]
    assert "secret-token" not in answered.text
    assert [one["type"] for one in document["output"]] == ["mcp_call", "message"]
    stored = await relaying.http.get(f"/v1/responses/{document['id']}")
    assert "secret-token" not in stored.text
    assert stored.json()["output"][0]["output"] == "4"


@pytest.mark.parametrize("url", [5, "http://[::1", "https://user:secret@mcp.example/secret"])
async def test_the_url_of_a_tool_called_by_the_upstream_is_redacted_and_not_validated(
    relaying: Ours, upstream: ScriptedResponses, url: Any
) -> None:
    tool = {"type": "mcp", "server_label": "s", "server_url": url}
    upstream.whole(response(item(), tools=[tool]))
    answered = await relaying.http.post("/v1/responses", json={"input": "Hi", "model": "tiny", "tools": [tool]})
    assert answered.status_code == 200
    assert "redacted" in answered.json()["tools"][0]["server_url"]
    assert "secret" not in answered.text


async def test_the_error_code_of_the_upstream_is_not_a_metric_label(relaying: Ours, upstream: ScriptedResponses) -> None:
    code = f"made up {'x' * 300}"
    upstream.whole(response(status="failed", error={"code": code, "message": "No."}))
    answered = await relaying.http.post("/v1/responses", json={"input": "Hi", "model": "tiny"})
    assert answered.json()["error"] == {"code": code, "message": "No."}
    assert b"made up" not in exposition("")[0]


async def test_this_server_can_be_mounted_as_its_own_upstream_in_one_process(serve: Serve, start_at: Start) -> None:
    chat, words = ScriptedUpstream(), [f"{number}, " for number in range(30)]
    chat.stream(*map(scripted.text, words), scripted.finish())
    inner = create_app(make_settings(upstream__url=serve(chat)))
    outer = start_at("mounted", upstream=inner, upstream__api="responses")
    assert (await oracle.stream(outer)).deltas == words


@pytest.mark.both_mounts
async def test_background_responses_run_in_this_server_and_not_in_the_upstream(
    start_at: Start, mount: str, upstream: ScriptedResponses
) -> None:
    ours = start_at(mount, upstream__api="responses", auth__secret_keys=["s" * 40])
    upstream.stream(*answer(), done=False)
    created = await ours.http.post("/v1/responses", json={"input": "Hi", "model": "tiny", "background": True})
    assert created.json().get("status") == "queued", created.text
    url = f"/v1/responses/{created.json()['id']}"
    followed = await ours.http.get(url, params={"stream": "true"})
    assert followed.text.count("event: response.output_text.delta") == 5
    stored = (await ours.http.get(url)).json()
    assert (stored["status"], stored["background"], stored["output_text"]) == ("completed", True, "Hello")
    assert not upstream.requests[0].json.keys() & {"background", "metadata"}


@pytest.mark.parametrize("status", [400, 404, 429, 503])
async def test_the_status_of_an_upstream_error_is_passed_on(start: Start, upstream: ScriptedResponses, status: int) -> None:
    relaying = start(upstream__api="responses", upstream__status_grace=2)
    for _ in range(10):  # for retries
        upstream.whole({"error": {"message": "no good", "type": "t", "param": None, "code": None}}, status)
    answered = await relaying.http.post("/v1/responses", json={"input": "Hi", "model": "tiny", "stream": True})
    assert (answered.status_code, answered.json()["error"]["message"]) == (status, "no good")


@pytest.mark.parametrize(
    "end",
    [b"", BrokenOff(), b"data: [DONE]\n\n", scripted.frame({"type": "error", "code": None, "message": "Out of memory."})],
    ids=["eof", "reset", "done", "error"],
)
async def test_a_stream_without_a_terminal_event_is_a_failed_response(
    relaying: Ours, upstream: ScriptedResponses, end: Any
) -> None:
    upstream.stream(*answer()[:6], end, done=False)
    streamed = await oracle.stream(relaying)
    assert streamed.terminal == "response.failed"
    assert streamed.response["output"][0]["content"][0]["text"] == "He"
    if isinstance(end, bytes) and b"error" in end:
        assert streamed.response["error"]["message"] == "Out of memory."


@pytest.mark.parametrize("kind", [None, "", "realtime.response"])
@pytest.mark.parametrize("status", ["completed", "incomplete", "failed"])
async def test_a_json_answer_without_an_object_member_is_accepted(
    relaying: Ours, upstream: ScriptedResponses, kind: str | None, status: str
) -> None:
    error = {"code": "server_error", "message": "Out of memory."} if status == "failed" else None
    upstream.whole({**response(item(), status=status, error=error), "object": kind})
    document = await oracle.whole(relaying)
    assert (document["object"], document["status"], document["output_text"]) == ("response", status, "Hello")
    assert document["error"] == error


async def test_an_error_without_an_output_is_a_502(relaying: Ours, upstream: ScriptedResponses) -> None:
    upstream.whole({"error": {"message": "Out of memory."}, "output": None})
    answered = await relaying.http.post("/v1/responses", json={"input": "Hi", "model": "tiny"})
    assert (answered.status_code, answered.json()["error"]["message"]) == (502, "Out of memory.")


async def test_an_answer_that_is_not_a_response_is_a_502(relaying: Ours, upstream: ScriptedResponses) -> None:
    upstream.whole(scripted.completion({"content": "Hello"}))
    answered = await relaying.http.post("/v1/responses", json={"input": "Hi", "model": "tiny"})
    assert (answered.status_code, answered.json()["error"]["message"]) == (502, "The upstream's answer is not a response.")


@pytest.mark.parametrize("kind", [None, [], {}, 5])
async def test_an_event_without_a_valid_type_is_a_502(start: Start, upstream: ScriptedResponses, kind: Any) -> None:
    relaying = start(upstream__api="responses", upstream__status_grace=60)
    upstream.stream({"type": kind}, answer()[-1], done=False)
    answered = await relaying.http.post("/v1/responses", json={"input": "Hi", "model": "tiny", "stream": True})
    assert (answered.status_code, answered.json()["error"]["message"]) == (502, "The upstream's answer is not a response.")


async def test_unknown_events_are_relayed_even_with_unusual_member_names(relaying: Ours, upstream: ScriptedResponses) -> None:
    strange = {"type": "vendor.progress", "event_type": "x", "self": 1, "percent": 50}
    upstream.stream(strange, answer()[-1], done=False)
    answered = await relaying.http.post("/v1/responses", json={"input": "Hi", "model": "tiny", "stream": True})
    frame = answered.text.split("\n\n")[2]
    assert orjson.loads(frame.partition("\ndata: ")[2]) == {**strange, "sequence_number": 2}


async def test_this_server_can_be_its_own_upstream_over_the_network(start_at: Start, serve: Serve, redis_url: str) -> None:
    """The inner server converts chat chunks, and the outer server relays its items and continues its responses."""
    model = ScriptedUpstream()
    inner = serve(create_app(make_settings(upstream__url=serve(model), redis__url=redis_url)))
    outer = start_at("proxy", upstream=inner, upstream__api="responses")
    function = {"type": "function", "name": "get_time", "parameters": {"type": "object"}}
    model.stream(
        scripted.reasoning("Hm."), scripted.call("{}", name="get_time", call_id="call_1"), scripted.finish("tool_calls")
    )
    first = await oracle.stream(outer, input="What time is it?", tools=[function])
    assert [one["type"] for one in first.response["output"]] == ["reasoning", "function_call"]
    model.stream(*scripted.HELLO)
    output = {"type": "function_call_output", "call_id": "call_1", "output": "Noon."}
    second = await oracle.stream(outer, input=[output], tools=[function], previous_response_id=first.response["id"])
    assert second.response["output"][0]["content"][0]["text"] == "Hello"
    messages = model.requests[1].json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "get_time"


async def test_answers_of_a_responses_upstream_are_cached(start: Start, upstream: ScriptedResponses) -> None:
    ours = start(upstream__api="responses", cache__mode="exact")
    upstream.stream(*answer(), done=False)
    question = f"Who is there, {ours.url}?"
    first = await oracle.stream(ours, input=question)
    again = await oracle.stream(ours, input=question)
    assert len(upstream.requests) == 1
    assert again.response["output"][0]["content"] == first.response["output"][0]["content"]
    assert again.response["id"] != first.response["id"]


# -- plain-text and encrypted reasoning ----------------------------------------------------------------------------------------

THOUGHT = {"id": "rs_theirs", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CARRIED: Any = {"include": ["reasoning.encrypted_content"], "store": False}


def carried(document: dict[str, Any], **members: Any) -> dict[str, Any]:
    """Return the reasoning item of a response as sent back by a client that keeps only the encrypted content."""
    return {"type": "reasoning", "summary": [], "encrypted_content": document["output"][0]["encrypted_content"], **members}


@pytest.mark.parametrize("plain", [{}, {"content": [{"type": "reasoning_text", "text": "Hm."}]}], ids=["envelope", "both"])
async def test_reasoning_encrypted_here_is_sent_back_decrypted(
    start: Start, upstream: ScriptedResponses, plain: dict[str, Any]
) -> None:
    ours = start(upstream__api="responses", auth__secret_keys=["k" * 40])
    upstream.whole(response(THOUGHT, item()))
    thought = carried(await oracle.whole(ours, **CARRIED), **plain)
    upstream.whole(response(item()))
    await oracle.whole(ours, input=[{"role": "user", "content": "Hi"}, thought, {"role": "user", "content": "And?"}])
    sent = upstream.requests[1].json["input"][1]
    assert (sent["content"][0]["text"], "encrypted_content" in sent) == ("Hm.", False)


async def test_encrypted_copies_of_calls_are_not_sent(start: Start, upstream: ScriptedResponses) -> None:
    """Another replica made them for a call of a chat server."""
    ours = start(upstream__api="responses", auth__secret_keys=["k" * 40])
    envelope = Sealer(["k" * 40]).seal(b'{"call_1": {"id": "0"}}', purpose=ORIGINS, owner=ANONYMOUS)
    copies = {"type": "reasoning", "summary": [], "encrypted_content": envelope}
    upstream.whole(response(item()))
    await oracle.whole(ours, input=[{"role": "user", "content": "Hi"}, copies, {"role": "user", "content": "And?"}], **CARRIED)
    assert [one.get("type") for one in upstream.requests[0].json["input"]] == ["message", "message"]


async def test_reasoning_encrypted_by_the_upstream_is_sent_back_unchanged(relaying: Ours, upstream: ScriptedResponses) -> None:
    theirs = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    upstream.whole(response(item()))
    await oracle.whole(relaying, input=[theirs, {"role": "user", "content": "And?"}])
    assert upstream.requests[0].json["input"][0] == theirs


@pytest.mark.parametrize(("dialect", "goes_back"), [("vllm", True), ("openai", False)])
async def test_reasoning_is_sent_back_only_to_dialects_with_plain_text_reasoning(
    start: Start, upstream: ScriptedResponses, dialect: str, goes_back: bool
) -> None:
    ours = start(upstream__api="responses", upstream__dialect=dialect)
    upstream.whole(response(THOUGHT, item()))
    first = await oracle.whole(ours, reasoning={"summary": "auto"})
    assert first["output"][0]["summary"] == [{"type": "summary_text", "text": "Hm."}]
    upstream.whole(response(item()))
    await oracle.whole(ours, input="And?", previous_response_id=first["id"])
    thoughts = [one for one in upstream.requests[1].json["input"] if one["type"] == "reasoning"]
    assert [one["content"] for one in thoughts] == ([THOUGHT["content"]] if goes_back else [])


# -- token counts and compaction -------------------------------------------------------------------------------------------------

KEYS = ["k" * 40]
TALK: Any = [{"role": "user", "content": "Tell me of ducks."}, {"role": "assistant", "content": "Ducks swim."}]
COUNTED = {"object": "response.input_tokens", "input_tokens": 41}


@pytest.mark.both_mounts
async def test_input_tokens_are_counted_by_the_endpoint_of_the_upstream(relaying: Ours, upstream: ScriptedResponses) -> None:
    upstream.pages["/v1/responses/input_tokens"] = COUNTED
    body = {"input": "Hi", "model": "tiny", "truncation": "auto", "metadata": {"a": "b"}, "temperature": 0, "of_theirs": 1}
    counted = await relaying.http.post("/v1/responses/input_tokens", json=body)
    assert counted.json() == COUNTED
    asked = [visit.json for visit in upstream.visits if visit.path.endswith("/input_tokens")]
    assert [sorted(one) for one in asked] == [["input", "model", "of_theirs", "truncation"]]
    assert not upstream.requests


async def test_without_a_counting_endpoint_tokens_are_counted_by_a_short_response(
    relaying: Ours, upstream: ScriptedResponses
) -> None:
    upstream.whole(response(item("H"), status="incomplete"))
    counted = await relaying.http.post("/v1/responses/input_tokens", json={"input": "Hi", "model": "tiny", "stream": True})
    assert counted.json()["input_tokens"] == 3
    asked = upstream.requests[0].json
    assert (asked["max_output_tokens"], asked.get("stream")) == (16, None)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"input_tokens": -3}, None),
        ({"output_tokens": 2**63}, None),
        ({"total_tokens": -1, "input_tokens_details": {"cached_tokens": "many"}}, (3, 0, 2, 0, 5)),
        ({"output_tokens_details": {"reasoning_tokens": [1]}}, (3, 0, 2, 0, 5)),
        ({"input_tokens_details": {"cached_tokens": 1e300}}, (3, 0, 2, 0, 5)),
    ],
)
async def test_invalid_token_counts_do_not_fail_the_response(
    relaying: Ours, upstream: ScriptedResponses, counts: dict[str, Any], expected: Any
) -> None:
    upstream.whole(response(item("H"), usage={"input_tokens": 3, "output_tokens": 2, **counts}))
    document = await oracle.whole(relaying)
    told = document["usage"]
    if told is not None:
        cached, reasoning = told["input_tokens_details"]["cached_tokens"], told["output_tokens_details"]["reasoning_tokens"]
        told = (told["input_tokens"], cached, told["output_tokens"], reasoning, told["total_tokens"])
    assert (document["status"], document["output_text"], told) == ("completed", "H", expected)


async def test_counting_tokens_by_a_short_response_disables_tool_calls(relaying: Ours, upstream: ScriptedResponses) -> None:
    upstream.whole(response(item("H"), status="incomplete"))
    tool = {"type": "mcp", "server_label": "s", "server_url": "https://mcp.example/mcp", "require_approval": "never"}
    body = {"input": "Delete it.", "model": "tiny", "tools": [tool], "tool_choice": "required"}
    await relaying.http.post("/v1/responses/input_tokens", json=body)
    asked = upstream.requests[0].json
    assert (asked["tools"], asked["tool_choice"]) == ([tool], "none")


async def test_a_compaction_fails_if_the_upstream_fails_its_summary(start: Start, upstream: ScriptedResponses) -> None:
    client = start(upstream__api="responses", auth__secret_keys=KEYS).client.with_options(max_retries=0)
    fault = {"code": "rate_limit_exceeded", "message": "Slow down."}
    upstream.whole(response(item("Of du"), status="failed", error=fault))
    with pytest.raises(openai.APIStatusError, match=r"Slow down\."):
        await client.responses.compact(model="tiny", input=TALK)


async def test_the_usage_of_a_summary_is_reported_if_the_answer_has_none(start: Start, upstream: ScriptedResponses) -> None:
    ours = start(upstream__api="responses", auth__secret_keys=KEYS)
    upstream.pages["/v1/responses/input_tokens"] = COUNTED
    upstream.whole(response(item("Of ducks.")))
    upstream.whole(response(item(), usage=None))
    above: Any = [{"type": "compaction", "compact_threshold": 40}]
    document = await oracle.whole(ours, input=[*TALK, {"role": "user", "content": "And geese?"}], context_management=above)
    assert document["usage"]["total_tokens"] == 5


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # for user messages of a compaction
async def test_a_history_is_compacted_by_the_model_of_the_upstream(start: Start, upstream: ScriptedResponses) -> None:
    client = start(upstream__api="responses", auth__secret_keys=KEYS, compaction__prompt="Sum it up.").client
    upstream.whole(response(item("Of ducks.")))
    compacted = await client.responses.compact(model="tiny", input=TALK)
    assert upstream.requests[0].json["input"][-1]["content"][0]["text"] == "Sum it up."
    assert compacted.usage.total_tokens == 5
    upstream.whole(response(item()))
    window: Any = [one.model_dump() for one in compacted.output]
    await client.responses.create(model="tiny", input=[*window, {"role": "user", "content": "And geese?"}])
    _, summary, question = upstream.requests[1].json["input"]
    assert "Of ducks." in summary["content"][0]["text"]
    assert question["content"][0]["text"] == "And geese?"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_history_above_the_threshold_is_compacted_before_the_answer(
    start: Start, upstream: ScriptedResponses, stream: bool
) -> None:
    ours = start(upstream__api="responses", auth__secret_keys=KEYS)
    upstream.pages["/v1/responses/input_tokens"] = COUNTED
    if stream:
        upstream.stream(*answer("Of ducks."), done=False)
        upstream.stream(*answer(), done=False)
    else:
        upstream.whole(response(item("Of ducks.")))
        upstream.whole(response(item()))
    body: Any = {
        "input": [*TALK, {"role": "user", "content": "And geese?"}],
        "context_management": [{"type": "compaction", "compact_threshold": 40}],
    }
    document = (await oracle.stream(ours, **body)).response if stream else await oracle.whole(ours, **body)
    assert [one["type"] for one in document["output"]] == ["compaction", "message"]
    assert document["output"][1]["content"][0]["text"] == "Hello"
    assert document["usage"]["total_tokens"] == 10
    assert "context_management" not in upstream.requests[1].json
    assert "Of ducks." in str(upstream.requests[1].json["input"])
    assert "Ducks swim." not in str(upstream.requests[1].json["input"])

    upstream.whole(response(item()))
    await oracle.whole(ours, input="Go on.", previous_response_id=document["id"])
    assert "Of ducks." in str(upstream.requests[2].json["input"])


async def test_a_compaction_trigger_is_answered_with_only_the_compaction(start: Start, upstream: ScriptedResponses) -> None:
    ours = start(upstream__api="responses", auth__secret_keys=KEYS)
    upstream.stream(*answer("Of ducks."), done=False)
    streamed = await oracle.stream(ours, input=[*TALK, {"type": "compaction_trigger"}])
    assert [one["type"] for one in streamed.response["output"]] == ["compaction"]
    assert len(upstream.requests) == 1


async def test_a_compaction_item_of_the_upstream_is_sent_back_unchanged(relaying: Ours, upstream: ScriptedResponses) -> None:
    upstream.whole(response(item()))
    theirs: Any = {"type": "compaction", "encrypted_content": "sealed elsewhere"}
    await relaying.client.responses.create(model="tiny", input=[*TALK, theirs])
    assert [one["type"] for one in upstream.requests[0].json["input"]] == ["message", "message", "compaction"]


async def test_the_upstreams_own_file_search_is_relayed(relaying: Ours, upstream: ScriptedResponses) -> None:
    found = {"file_id": "file_theirs", "filename": "a.md", "score": 0.5, "attributes": {}, "text": "28 days"}
    searched = {"id": "fs_theirs", "type": "file_search_call", "status": "completed", "queries": ["leave"], "results": [found]}
    cited = {"type": "file_citation", "index": 7, "file_id": "file_theirs", "filename": "a.md"}
    message = item("28 days【9】")
    message["content"][0]["annotations"] = [cited]
    tool = {"type": "file_search", "vector_store_ids": ["vs_theirs"]}
    upstream.whole(response(searched, message))
    document = await oracle.whole(relaying, tools=[tool], include=["file_search_call.results"])
    asked = upstream.requests[0].json
    assert (asked["tools"], asked["include"]) == ([tool], ["file_search_call.results"])
    relayed, answered = document["output"]
    assert relayed == {**searched, "id": relayed["id"]}
    assert relayed["id"].startswith("fs_")
    assert answered["content"][0]["annotations"] == [cited]
    assert answered["content"][0]["text"] == "28 days【9】"
