"""`text.format` together with tools: a call bypasses the format, and the answer has it, whatever the upstream can do."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.mcp_servers import weather
from tests.support.oracle import check, stream, whole
from tests.support.scripted import (
    Answer,
    BrokenOff,
    ScriptedUpstream,
    Signal,
    call,
    completion,
    error,
    finish,
    json_answer,
    reasoning,
    stream_answer,
    text,
    usage,
)

if TYPE_CHECKING:
    from tests.support.servers import Ours, Serve, Start

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
BODY = {"text": {"format": FORMAT}, "tools": [FUNCTION]}
JSON_TEXT = '{"city": "Paris", "n": 7}'
STREAMED = pytest.mark.parametrize("streamed", [True, False])
FORMATS = pytest.mark.parametrize("wanted", [FORMAT, {"type": "json_object"}], ids=lambda one: str(one["type"]))


@pytest.fixture
def apart(start: Start) -> Ours:
    """A server whose upstream cannot combine tools with a format."""
    return start(upstream__dialect="ollama", tools__allow_private_urls=True)


def answer(upstream: ScriptedUpstream, streamed: bool, content: str, *, thinking: str = "", completion_tokens: int = 2) -> None:
    if streamed:
        thoughts = [reasoning(thinking)] if thinking else []
        upstream.stream(*thoughts, text(content[:3]), text(content[3:]), finish(), usage(completion=completion_tokens))
    else:
        message = {"content": content, **({"reasoning": thinking} if thinking else {})}
        upstream.whole(completion(message, counts=usage(completion=completion_tokens)["usage"]))


def calls(upstream: ScriptedUpstream, streamed: bool, arguments: str = "{}", content: str = "") -> None:
    if streamed:
        texts = [text(content)] if content else []
        upstream.stream(*texts, call(arguments, name="get_weather", call_id="c"), finish("tool_calls"), usage())
    else:
        function = {"name": "get_weather", "arguments": arguments}
        message = {"content": content, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        upstream.whole(completion(message, "tool_calls"))


async def respond(ours: Ours, streamed: bool, **body: Any) -> dict[str, Any]:
    if not streamed:
        return await whole(ours, **BODY | body)
    events = await stream(ours, **BODY | body)
    shown = "".join(event["delta"] for event in events.events if event["type"] == "response.output_text.delta")
    assert shown == "".join(part["text"] for item in messages_of(events.response) for part in item["content"])
    return events.response


def messages_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in response["output"] if item["type"] == "message"]


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def asked(upstream: ScriptedUpstream) -> list[list[str]]:
    """Return which of the members `tools` and `response_format` each chat request had, and whether it prevented calls."""
    bodies = [request.json for request in upstream.requests]
    none = [["none"] if body.get("tool_choice") == "none" else [] for body in bodies]
    return [sorted({"tools", "response_format"} & body.keys()) + more for body, more in zip(bodies, none, strict=True)]


# -- an upstream that cannot combine them --------------------------------------------------------------------------------


@STREAMED
@FORMATS
@pytest.mark.both_mounts
async def test_a_call_bypasses_the_format(
    apart: Ours, upstream: ScriptedUpstream, streamed: bool, wanted: dict[str, Any]
) -> None:
    calls(upstream, streamed)
    response = await respond(apart, streamed, text={"format": wanted})
    assert kinds(response) == ["function_call"]
    assert asked(upstream) == [["tools"]]


@STREAMED
@FORMATS
@pytest.mark.both_mounts
async def test_an_answer_is_requested_again_in_the_format(
    apart: Ours, upstream: ScriptedUpstream, streamed: bool, wanted: dict[str, Any]
) -> None:
    answer(upstream, streamed, "It is Paris, number seven.", completion_tokens=10)
    answer(upstream, streamed, JSON_TEXT, completion_tokens=20)
    response = await respond(apart, streamed, text={"format": wanted}, max_output_tokens=30)
    assert kinds(response) == ["message"]
    assert response["output"][0]["content"][0]["text"] == JSON_TEXT
    assert response["usage"]["output_tokens"] == 30
    assert response["status"] == "completed"
    assert asked(upstream) == [["tools"], ["response_format"]]
    first, second = (request.json for request in upstream.requests)
    assert first["messages"] == second["messages"]
    assert first["max_tokens"] == second["max_tokens"] == 30


@STREAMED
async def test_the_text_beside_a_call_is_not_shown(apart: Ours, upstream: ScriptedUpstream, streamed: bool) -> None:
    """Clients parse each text as an answer."""
    calls(upstream, streamed, content="I look it up.")
    assert kinds(await respond(apart, streamed)) == ["function_call"]


@STREAMED
async def test_the_reasoning_of_a_draft_is_shown_but_not_sent_again(
    apart: Ours, upstream: ScriptedUpstream, streamed: bool
) -> None:
    answer(upstream, streamed, "Paris.", thinking="Which city?")
    answer(upstream, streamed, JSON_TEXT, thinking="As JSON.")
    response = await respond(apart, streamed)
    assert kinds(response) == ["reasoning", "reasoning", "message"]
    assert [item["status"] for item in response["output"]] == ["completed"] * 3
    first, second = (request.json for request in upstream.requests)
    assert first["messages"] == second["messages"]


@STREAMED
async def test_a_server_side_tool_is_called_before_the_answer_is_requested(
    apart: Ours, upstream: ScriptedUpstream, serve: Serve, streamed: bool
) -> None:
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    tools = [{"type": "mcp", "server_label": "w", "server_url": url, "require_approval": "never"}]
    calls(upstream, streamed, json.dumps({"city": "Paris"}))
    answer(upstream, streamed, "It is sunny.")
    answer(upstream, streamed, JSON_TEXT)
    response = await respond(apart, streamed, tools=tools)
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]
    assert response["output"][-1]["content"][0]["text"] == JSON_TEXT
    assert asked(upstream) == [["tools"], ["tools"], ["response_format"]]
    assert "Sunny in Paris." in json.dumps(upstream.requests[2].json["messages"])


@STREAMED
async def test_a_chain_continues_after_both_kinds_of_turns(apart: Ours, upstream: ScriptedUpstream, streamed: bool) -> None:
    calls(upstream, streamed)
    first = await respond(apart, streamed)
    answer(upstream, streamed, "Sunny.")
    answer(upstream, streamed, JSON_TEXT)
    output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "sunny"}
    second = await respond(apart, streamed, input=[output], previous_response_id=first["id"])
    assert kinds(second) == ["message"]
    answer(upstream, streamed, "Again.")
    answer(upstream, streamed, JSON_TEXT)
    await respond(apart, streamed, previous_response_id=second["id"])
    contents = [message.get("content") for message in upstream.requests[-1].json["messages"]]
    assert contents[-2:] == [JSON_TEXT, "Hi"]
    assert "Sunny." not in contents


async def test_forced_calls_get_no_format(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__dialect="llamacpp")
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        calls(upstream, False)
        assert kinds(await whole(ours, **BODY, tool_choice=choice)) == ["function_call"]
    assert asked(upstream) == [["tools"], ["tools"]]


async def test_without_tools_or_with_tool_choice_none_the_format_is_requested_at_once(
    apart: Ours, upstream: ScriptedUpstream
) -> None:
    bodies: list[dict[str, Any]] = [{"tools": []}, {"tool_choice": "none"}]
    for body in bodies:
        answer(upstream, False, JSON_TEXT)
        assert kinds(await respond(apart, False, **body)) == ["message"]
    assert asked(upstream) == [["response_format"], ["response_format"]]


@STREAMED
@pytest.mark.parametrize("reason", ["length", "content_filter"])
async def test_a_draft_that_was_cut_is_an_empty_answer(
    apart: Ours, upstream: ScriptedUpstream, streamed: bool, reason: str
) -> None:
    """Without `stream`, vLLM returns a call that was cut as text, so this text may be a call."""
    if streamed:
        upstream.stream(text("Paris is"), finish(reason), usage())
    else:
        upstream.whole(completion({"content": '<tool_call>{"name"'}, reason))
    response = await respond(apart, streamed)
    assert response["status"] == "incomplete"
    assert [item["content"][0]["text"] for item in response["output"]] == [""]
    assert len(upstream.requests) == 1


@pytest.mark.parametrize(
    "pieces",
    [[reasoning("Which?")], [call('{"a', name="get_weather", call_id="c")], [text("So"), call("{", name="get_weather")]],
    ids=["reasoning", "call", "text and call"],
)
async def test_reasoning_or_a_call_that_was_cut_is_incomplete(
    apart: Ours, upstream: ScriptedUpstream, pieces: list[dict[str, Any]]
) -> None:
    upstream.stream(*pieces, finish("length"), usage())
    response = await respond(apart, True)
    assert response["status"] == "incomplete"
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert not messages_of(response)


@STREAMED
async def test_calls_that_are_left_out_are_followed_by_an_answer_in_the_format(
    apart: Ours, upstream: ScriptedUpstream, serve: Serve, streamed: bool
) -> None:
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    server = {"type": "mcp", "server_label": "w", "server_url": url, "require_approval": "never"}
    tools = [server, {**FUNCTION, "name": "other"}]
    for _ in range(2):  # the second call exceeds the maximum
        calls(upstream, streamed, json.dumps({"city": "Paris"}))
    answer(upstream, streamed, JSON_TEXT)
    response = await respond(apart, streamed, tools=tools, max_tool_calls=1)
    assert [(item["type"], item.get("status", "completed")) for item in response["output"][1:]] == [
        ("mcp_call", "completed"),
        ("message", "completed"),
    ]
    assert response["output"][-1]["content"][0]["text"] == JSON_TEXT


async def test_an_interrupted_draft_is_requested_again(apart: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(reasoning("Which?"), text("Paris"), BrokenOff(), done=False)
    answer(upstream, True, "Paris.")
    answer(upstream, True, JSON_TEXT)
    response = await respond(apart, True)
    assert [(item["type"], item["status"]) for item in response["output"]] == [
        ("reasoning", "incomplete"),
        ("message", "completed"),
    ]
    assert asked(upstream) == [["tools"], ["tools"], ["response_format"]]


async def test_a_refusal_in_a_draft_is_the_answer(apart: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"refusal": "No."}))
    response = await respond(apart, False)
    assert [part["type"] for part in response["output"][0]["content"]] == ["refusal"]
    assert len(upstream.requests) == 1


async def test_an_unfinished_answer_is_continued_in_the_format(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__dialect="sglang")
    said = {
        "role": "assistant",
        "status": "incomplete",
        "content": [{"type": "output_text", "text": "So: ", "annotations": []}],
    }
    answer(upstream, False, JSON_TEXT)
    response = await respond(ours, False, input=[{"role": "user", "content": "Hi"}, {"type": "message", "id": "msg_1", **said}])
    assert response["output"][0]["content"][0]["text"] == JSON_TEXT
    assert asked(upstream) == [["response_format"]]


async def test_an_error_of_the_answer_is_reported(apart: Ours, upstream: ScriptedUpstream) -> None:
    answer(upstream, False, "Paris.")
    upstream.whole(error("Grammar error: Invalid type", 400), 400)
    response = await apart.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", **BODY})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "Grammar error: Invalid type")


async def test_a_draft_with_log_probabilities_and_tags_shows_nothing(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__dialect="sglang", upstream__think_tag="think")
    upstream.stream(text("<think>Hm.</think>Paris"), text(" it is."), finish(), usage())
    upstream.stream(text("<think>So.</think>"), text(JSON_TEXT), finish(), usage())
    response = await respond(ours, True, top_logprobs=0)
    assert kinds(response) == ["reasoning", "reasoning", "message"]
    assert response["output"][-1]["content"][0]["text"] == JSON_TEXT


# -- vLLM, which combines them if a function is strict -------------------------------------------------------------------

APART = [["tools"], ["tools"], ["response_format", "tools", "none"]]
TRIAL = "What is the weather in Paris?"


class GrammarUpstream(ScriptedUpstream):
    """A vLLM that composes grammars, or not, and refuses those in `refused`, which have the names of functions or formats."""

    def __init__(self) -> None:
        super().__init__()
        self.pages["/version"] = {"version": "0.32.0"}
        self.composes = True
        self.reasons = self.loops = False
        self.refused: set[str] = set()
        self.samples: list[dict[str, Any]] = []

    def unscripted(self, asked: Any) -> Answer:
        body = asked.json
        functions = [tool["function"] for tool in body.get("tools", [])]
        strict = {one["name"] for one in functions if one.get("strict")} if self.composes else set()
        wanted = body.get("response_format", {}).get("json_schema", {}).get("name")
        asks = [message["content"] for message in body["messages"] if message["role"] == "user"]
        is_trial = asks == [TRIAL]
        if is_trial:
            self.requests.pop()
            self.samples.append(body)
        if (strict | {wanted}) & self.refused and not is_trial:
            refusal = error("Invalid grammar specification: 'triggers'")
            return stream_answer(refusal) if body.get("stream") else json_answer(refusal, 400)
        can_call = bool(functions) and not ("response_format" in body and not strict) and body.get("tool_choice") != "none"
        is_asked = asks[-1] in ("weather", TRIAL) and (body["messages"][-1]["role"] == "user" or self.loops)
        return self._said(body, is_call=can_call and is_asked, content='{"weather": "sunny"}' if is_trial else JSON_TEXT)

    def _said(self, body: dict[str, Any], *, is_call: bool, content: str) -> Answer:
        thought = {"reasoning": "Hm."} if self.reasons else {}
        if is_call:
            chunks = [call("{}", name="get_weather", call_id="c"), finish("tool_calls"), usage()]
            function = {"name": "get_weather", "arguments": "{}"}
            message = {"tool_calls": [{"id": "c", "type": "function", "function": function}], **thought}
            return stream_answer(*chunks) if body.get("stream") else json_answer(completion(message, "tool_calls"))
        said = content if "response_format" in body else "Sunny."
        whole = completion({"content": said, **thought})
        return stream_answer(text(said), finish(), usage()) if body.get("stream") else json_answer(whole)


@pytest.fixture
def upstream() -> ScriptedUpstream:
    return GrammarUpstream()


async def ask(ours: Ours, streamed: bool, **body: Any) -> tuple[list[str], list[str]]:
    """Return the kinds of items that the inputs `weather` and `json` result in."""
    called, answered = [await respond(ours, streamed, input=word, **body) for word in ("weather", "json")]
    assert all(item["content"][0]["text"] == JSON_TEXT for item in messages_of(answered))
    return kinds(called), kinds(answered)


BOTH = (["function_call"], ["message"])


@STREAMED
@FORMATS
@pytest.mark.both_mounts
async def test_vllm_gets_strict_functions_with_the_format(
    ours: Ours, upstream: GrammarUpstream, streamed: bool, wanted: dict[str, Any]
) -> None:
    assert await ask(ours, streamed, text={"format": wanted}) == BOTH
    assert asked(upstream) == [["response_format", "tools"]] * 2
    assert [request.json["tools"][0]["function"]["strict"] for request in upstream.requests] == [True, True]
    assert [len(sample["messages"]) for sample in upstream.samples] == [1, 3]


@STREAMED
async def test_a_vllm_that_does_not_compose_grammars_gets_tools_and_format_apart(
    ours: Ours, upstream: GrammarUpstream, streamed: bool
) -> None:
    upstream.composes = False
    assert await ask(ours, streamed) == BOTH
    assert asked(upstream) == APART
    draft, answer = (request.json for request in upstream.requests[-2:])
    assert (draft["messages"], draft["tools"]) == (answer["messages"], answer["tools"])  # for the prefix cache
    assert not any("strict" in request.json.get("tools", [{}])[0].get("function", {}) for request in upstream.requests)
    assert len(upstream.samples) == 1


async def test_a_model_that_calls_again_after_the_result_gets_tools_and_format_apart(
    ours: Ours, upstream: GrammarUpstream
) -> None:
    upstream.loops = True
    assert await ask(ours, False) == BOTH
    assert asked(upstream) == APART
    assert len(upstream.samples) == 2


async def test_a_model_is_tested_with_each_setting_of_its_reasoning(ours: Ours, upstream: GrammarUpstream) -> None:
    """What else a request sets for the chat template does not lead to a test, because it may differ in each request."""
    upstream.reasons = True
    await whole(ours, **BODY, input="json")
    upstream.reasons = False
    await whole(ours, **BODY, input="json", reasoning={"effort": "none"}, chat_template_kwargs={"day": "Monday"})
    await whole(ours, **BODY, input="json", reasoning={"effort": "none"}, chat_template_kwargs={"day": "Tuesday"})
    both = ["response_format", "tools"]
    assert asked(upstream) == [*APART[1:], both, both]
    settings = [sample.get("chat_template_kwargs") for sample in upstream.samples]
    assert settings == [None, {"enable_thinking": False}, {"enable_thinking": False}]
    assert upstream.requests[-1].json["chat_template_kwargs"] == {"enable_thinking": False, "day": "Tuesday"}


async def test_requests_during_the_test_of_a_model_do_not_wait_for_it(ours: Ours, upstream: GrammarUpstream) -> None:
    held = Signal()
    trial = upstream.queue(replace(json_answer(completion({"content": "no"})), before=held))
    first = asyncio.create_task(whole(ours, **BODY, input="weather"))
    await trial.asked.wait()
    assert kinds(await whole(ours, **BODY, input="weather")) == ["function_call"]
    held.set()
    assert kinds(await first) == ["function_call"]
    assert asked(upstream)[1:] == [["tools"], ["tools"]]


@pytest.mark.parametrize("version", ["0.31.2", "0.9.1.dev3+gabc", "nightly"])
async def test_an_old_vllm_gets_tools_and_format_apart(ours: Ours, upstream: GrammarUpstream, version: str) -> None:
    upstream.pages["/version"] = {"version": version}
    assert await ask(ours, False) == BOTH
    assert asked(upstream) == APART
    assert not upstream.samples


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1rc2", "1.0.0"])
async def test_a_newer_vllm_gets_both(ours: Ours, upstream: GrammarUpstream, version: str) -> None:
    upstream.pages["/version"] = {"version": version}
    assert await ask(ours, False) == BOTH
    assert asked(upstream) == [["response_format", "tools"]] * 2


@STREAMED
async def test_a_refused_schema_of_a_function_is_remembered(ours: Ours, upstream: GrammarUpstream, streamed: bool) -> None:
    upstream.refused = {"get_weather"}
    assert await ask(ours, streamed) == BOTH
    assert asked(upstream) == [["response_format", "tools"], *APART]
    assert len(upstream.samples) == 2  # of the model
    other = {**FUNCTION, "name": "get_time"}
    await respond(ours, streamed, input="json", tools=[other])
    assert asked(upstream)[-1] == ["response_format", "tools"]  # other tools are not affected


@STREAMED
async def test_a_refused_format_is_an_error(ours: Ours, upstream: GrammarUpstream, streamed: bool) -> None:
    upstream.refused = {"answer"}
    response = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "json", "stream": streamed, **BODY})
    assert "Invalid grammar specification" in response.text
    if streamed:
        assert check(response.content).terminal == "response.failed"
    else:
        assert response.status_code == 400


async def test_a_400_for_another_reason_is_passed_on_and_not_remembered(ours: Ours, upstream: GrammarUpstream) -> None:
    await ask(ours, False)
    both = ["response_format", "tools"]
    for why, times in (("The image is broken.", 1), ("The message has no schema.", 2)):
        upstream.requests.clear()
        for _ in range(times):
            upstream.whole(error(why), 400)
        response = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "weather", **BODY})
        assert (response.status_code, response.json()["error"]["message"]) == (400, why)
        assert await ask(ours, False) == BOTH
        assert asked(upstream) == [both, *[["tools"]] * (times - 1), both, both]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 3}}},
        {"type": "array", "items": {"anyOf": [{"type": "string", "format": "phone"}]}},
        {"$defs": {"a": {"type": "string", "pattern": "^a", "maxLength": 3}}, "$ref": "#/$defs/a"},
    ],
    ids=["keyword", "format", "pattern and length"],
)
async def test_a_format_that_vllm_cannot_compose_is_requested_apart(
    ours: Ours, upstream: GrammarUpstream, schema: dict[str, Any]
) -> None:
    assert await ask(ours, False, text={"format": {**FORMAT, "schema": schema}}) == BOTH
    assert asked(upstream) == APART


async def test_a_format_with_usual_keywords_is_requested_together(ours: Ours, upstream: GrammarUpstream) -> None:
    schema = {
        "type": "object",
        "title": "Answer",
        "properties": {"at": {"type": "string", "format": "date-time"}, "format": {"type": "string", "maxLength": 3}},
    }
    assert await ask(ours, False, text={"format": {**FORMAT, "schema": schema}}) == BOTH
    assert asked(upstream) == [["response_format", "tools"]] * 2


@pytest.mark.parametrize("strict", [True, False])
async def test_the_clients_value_of_strict_is_kept(ours: Ours, upstream: GrammarUpstream, strict: bool) -> None:
    assert await ask(ours, False, tools=[{**FUNCTION, "strict": strict}]) == BOTH
    expected = [["response_format", "tools"]] * 2 if strict else APART
    assert asked(upstream) == expected
    said = [request.json["tools"][0]["function"]["strict"] for request in upstream.requests if "tools" in request.json]
    assert set(said) == {strict}


async def test_strictness_is_not_changed_without_a_format(ours: Ours, upstream: GrammarUpstream) -> None:
    assert kinds(await whole(ours, tools=[FUNCTION], input="weather")) == ["function_call"]
    assert "strict" not in upstream.requests[0].json["tools"][0]["function"]
    assert not upstream.samples


@pytest.mark.parametrize(("status", "is_remembered"), [(429, False), (401, False), (500, True), (400, True)])
async def test_a_failed_test_of_a_model_does_not_fail_the_request(
    ours: Ours, upstream: GrammarUpstream, status: int, is_remembered: bool
) -> None:
    upstream.whole(error("no", status), status)
    for _ in range(2):
        assert kinds(await respond(ours, False, input="weather")) == ["function_call"]
    both = ["response_format", "tools"]
    assert asked(upstream) == [both, ["tools"], ["tools"] if is_remembered else both]


async def test_a_cancelled_test_of_a_model_is_not_remembered(ours: Ours, upstream: GrammarUpstream) -> None:
    trial = upstream.queue(replace(json_answer(error("no")), before=Signal()))
    task = asyncio.create_task(whole(ours, **BODY, input="weather"))
    await trial.asked.wait()
    task.cancel()
    async with asyncio.timeout(60):
        while asked(upstream)[-1] != ["response_format", "tools"] or len(upstream.requests) == 1:
            await respond(ours, False, input="weather")


async def test_a_vllm_whose_version_is_hidden_gets_both(ours: Ours, upstream: GrammarUpstream) -> None:
    del upstream.pages["/version"]
    assert await ask(ours, False) == BOTH
    assert asked(upstream) == [["response_format", "tools"]] * 2
    assert not upstream.samples
