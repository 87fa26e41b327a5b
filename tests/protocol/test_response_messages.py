"""vLLM's `input_messages`, `output_messages` and `previous_input_messages`, checked with openai_harmony."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from openai_harmony import DeveloperContent, Message, SystemContent  # type: ignore[import-untyped]

from responses_mw.errors import BadRequest, UpstreamError
from responses_mw.protocol.chat.request import to_chat
from responses_mw.protocol.dialects import VLLM
from responses_mw.protocol.request.create import parse
from responses_mw.protocol.request.items import parse_previous
from responses_mw.protocol.request.tools import offered
from responses_mw.protocol.response.response_messages import (
    RawTurn,
    harmony_input,
    harmony_output,
    is_harmony,
    raw_messages,
)
from responses_mw.protocol.tool_kinds.form import CallForm, OfferedFunction
from tests.support import oracle, scripted

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours

GET_HOROSCOPE = {
    "type": "function",
    "name": "get_horoscope",
    "description": "Today's horoscope.",
    "parameters": {"type": "object", "properties": {"sign": {"type": "string"}}},
}
REASONING = {"id": "rs_1", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CALL = {
    "id": "fc_1",
    "type": "function_call",
    "status": "completed",
    "call_id": "call_1",
    "name": "get_horoscope",
    "arguments": '{"sign":"Aquarius"}',
}
RESULT = {"role": "tool", "name": "functions.get_horoscope", "content": [{"type": "text", "text": "An otter."}]}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def given(items: Sequence[dict[str, Any]] = (), own: Sequence[OfferedFunction] = (), **request: Any) -> list[dict[str, Any]]:
    """Return the `input_messages` of a request to gpt-oss with the history `items`."""
    parsed = parse({"model": "gpt-oss-20b", "input": "Hi", **request})
    functions = [*offered(parsed.tools, parsed.items), *own]
    chat = to_chat(parsed, [*items, *parsed.items], VLLM, model="gpt-oss-20b", offered=functions)
    return harmony_input(chat, functions)


def read(messages: list[dict[str, Any]]) -> list[Message]:
    """Return the messages as Harmony's own library parses them. Check that `author` gives the same."""
    through_json = orjson.loads(orjson.dumps(messages))
    for message in through_json:
        assert message["author"] == {name: message[name] for name in ("role", "name") if name in message}
    return [Message.from_dict(message) for message in through_json]


def heads(messages: list[Message]) -> list[tuple[str, str | None, str | None]]:
    return [(message.author.role.value, message.channel, message.recipient) for message in messages]


def text(message: Message) -> str:
    return "".join(content.to_dict()["text"] for content in message.content)


# -- Harmony -------------------------------------------------------------------------------------------------------------


def test_the_input_begins_with_the_system_and_developer_messages() -> None:
    messages = read(given(instructions="Be short.", tools=[GET_HOROSCOPE], reasoning={"effort": "low"}))
    assert heads(messages) == [("system", None, None), ("developer", None, None), ("user", None, None)]
    system, developer = messages[0].content[0], messages[1].content[0]
    assert isinstance(system, SystemContent)
    assert system.reasoning_effort == "Low"
    assert isinstance(developer, DeveloperContent)
    assert developer.instructions == "Be short."
    assert developer.tools is not None
    assert developer.tools["functions"].tools[0].model_dump() == {
        name: GET_HOROSCOPE[name] for name in ("name", "description", "parameters")
    }
    assert text(messages[2]) == "Hi"


def test_there_is_no_developer_message_without_instructions_and_functions() -> None:
    assert heads(read(given())) == [("system", None, None), ("user", None, None)]


@pytest.mark.parametrize(
    "form",
    [
        CallForm(item="code_interpreter_call", served=True),
        CallForm(item="mcp_call", members={"server_label": "code_interpreter", "name": "x"}, served=True),
    ],
)
def test_the_built_in_python_tool_needs_no_developer_message(form: CallForm) -> None:
    own = OfferedFunction({"name": "python", "parameters": {}}, form)
    messages = read(given(own=[own], instructions="Use Python."))
    assert heads(messages) == [("system", None, None), ("user", None, None)]
    assert isinstance(messages[0].content[0], SystemContent)
    assert messages[0].content[0].model_identity == "Use Python."


def test_an_earlier_call_and_its_result_name_the_function_as_recipient_and_author() -> None:
    output = {"id": "fco_1", "type": "function_call_output", "call_id": "call_1", "output": "An otter."}
    messages = read(given([said("Wait."), CALL, output], tools=[GET_HOROSCOPE]))
    assert heads(messages)[2:] == [
        ("assistant", "commentary", None),
        ("assistant", "commentary", "functions.get_horoscope"),
        ("tool", "commentary", "assistant"),
        ("user", None, None),
    ]
    assert messages[4].author.name == "functions.get_horoscope"
    assert [text(message) for message in messages[2:5]] == ["Wait.", '{"sign":"Aquarius"}', "An otter."]


def test_the_output_has_a_channel_for_each_kind_of_text() -> None:
    messages = read(harmony_output([REASONING, said("Let me see."), CALL]))
    assert heads(messages) == [
        ("assistant", "analysis", None),
        ("assistant", "commentary", None),
        ("assistant", "commentary", "functions.get_horoscope"),
    ]
    assert heads(read(harmony_output([REASONING, said("Hello")])))[1] == ("assistant", "final", None)


def test_executed_code_and_its_output_are_on_the_analysis_channel() -> None:
    interpreter = {"id": "ci_1", "type": "code_interpreter_call", "status": "completed", "code": "print(1)", "outputs": None}
    tool = {
        "id": "mcp_1",
        "type": "mcp_call",
        "status": "completed",
        "server_label": "code_interpreter",
        "name": "python",
        "arguments": '{"code":"print(1)"}',
        "output": "1",
    }
    for item in (interpreter, tool):
        messages = read(harmony_output([item, said("One.")], {"ci_1": "1"}))
        assert heads(messages)[:2] == [("assistant", "analysis", "python"), ("tool", "analysis", "assistant")]
        assert (messages[1].author.name, text(messages[0]), text(messages[1])) == ("python", "print(1)", "1")


def test_calls_of_mcp_tools_are_named_by_their_server() -> None:
    call = {"id": "mcp_1", "type": "mcp_call", "status": "failed", "server_label": "weather", "name": "get"}
    search = {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}}
    messages = read(harmony_output([{**call, "arguments": "{}", "output": None, "error": "No such town."}, search]))
    assert [message.recipient for message in messages] == ["weather.get", "assistant", "browser.search", "assistant"]
    assert [message.author.name for message in messages] == [None, "weather.get", None, "browser.search"]
    assert text(messages[1]) == "No such town."


def test_a_truncated_call_has_no_result() -> None:
    call = {"id": "ci_1", "type": "code_interpreter_call", "status": "incomplete", "code": "pri", "outputs": None}
    assert heads(read(harmony_output([call]))) == [("assistant", "analysis", "python")]


# -- the history that its caller kept --------------------------------------------------------------------------------------


def test_the_input_and_output_of_a_response_are_the_history_of_the_next_response() -> None:
    """vLLM's own test of `previous_input_messages`: one system message, one of the developer, one of the tool."""
    first = given(instructions="Be short.", tools=[GET_HOROSCOPE]) + harmony_output([REASONING, CALL])
    items = parse_previous([*first, RESULT])
    assert [item["type"] for item in items] == ["message", "reasoning", "function_call", "function_call_output"]
    assert (items[2]["call_id"], items[2]["status"]) == ("call_1", "completed")
    second = read(given(items, input="Go on.", instructions="Be short.", tools=[GET_HOROSCOPE]))
    assert [message.author.role.value for message in second] == ["system", "developer", "user", "assistant", "tool", "user"]
    assert [text(message) for message in second[2:]] == ["Hi", '{"sign":"Aquarius"}', "An otter.", "Go on."]


def test_chat_messages_are_accepted_as_previous_messages() -> None:
    function = {"name": "f", "arguments": "{}"}
    items = parse_previous(
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "a", "content": "4"},
            {"role": "assistant", "content": "Four."},
        ]
    )
    assert [item["type"] for item in items] == ["message", "function_call", "function_call_output", "message"]
    assert items[2] == {"type": "function_call_output", "call_id": "a", "output": "4"}


def test_executed_code_in_the_history_becomes_a_function_argument() -> None:
    items = parse_previous(
        [
            {"author": {"role": "assistant"}, "content": "print(1)", "recipient": "python", "channel": "analysis"},
            {"author": {"role": "tool", "name": "python"}, "content": "1"},
        ]
    )
    assert (items[0]["name"], items[0]["arguments"]) == ("python", '{"code":"print(1)"}')
    assert items[1]["output"] == "1"


def test_a_previous_call_is_sent_only_if_the_input_has_its_result() -> None:
    call = parse_previous(harmony_output([CALL]))
    output = {"type": "function_call_output", "call_id": "call_1", "output": "An otter."}
    chat = to_chat(parse({"input": [output]}), [*call, output], VLLM, model="m")
    assert [message["role"] for message in chat["messages"]] == ["assistant", "tool"]
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is it?"}]}
    chat = to_chat(parse({"input": [asked]}), [*call, asked], VLLM, model="m")
    assert [message["role"] for message in chat["messages"]] == ["user"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("text", "previous_input_messages"),
        ([3], "previous_input_messages[0]"),
        ([{"content": "x"}], "previous_input_messages[0].role"),
        ([{"author": {"role": "nobody"}}], "previous_input_messages[0].author.role"),
        ([{"role": "user", "content": 3}], "previous_input_messages[0].content"),
        ([{"role": "assistant", "content": "", "reasoning": 5}], "previous_input_messages[0].reasoning"),
        ([{"role": "assistant", "content": "", "reasoning_content": 5}], "previous_input_messages[0].reasoning_content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "previous_input_messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": [{}]}], "previous_input_messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c" * 70_000, "function": {"name": "f"}}]}],
            "previous_input_messages[0].tool_calls[0].id",
        ),
        ([{"role": "assistant", "recipient": "python", "call_id": "c" * 70_000}], "previous_input_messages[0].call_id"),
        ([RESULT], "previous_input_messages[0].name"),
        ([{"message": "x", "tokens": [], "type": "raw_message_tokens"}], "previous_input_messages[0].role"),
    ],
)
def test_invalid_messages_are_refused_with_their_path(messages: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_previous(messages)
    assert caught.value.param == param


def test_only_one_of_two_histories_can_be_parsed() -> None:
    """The message of the error is vLLM's."""
    parse({"previous_input_messages": [], "previous_response_id": "resp_1"})
    with pytest.raises(BadRequest, match="Only one of `previous_input_messages` and `previous_response_id` can be set"):
        parse({"previous_input_messages": [RESULT], "previous_response_id": "resp_1"})


# -- raw_message_tokens ----------------------------------------------------------------------------------------------------


def turn(*chunks: dict[str, Any], messages: Sequence[dict[str, Any]] = ()) -> RawTurn:
    raw = RawTurn([*messages])
    for chunk in chunks:
        raw.take(chunk)
    return raw


def test_the_prompt_and_tokens_that_vllm_reports_are_returned() -> None:
    first = {**scripted.text(""), "prompt_text": "<|im_start|>Hi", "prompt_token_ids": [7, 8]}
    more = [scripted.reasoning("Hm. "), scripted.text("Hel"), scripted.text("lo")]
    for number, chunk in enumerate(more):
        chunk["choices"][0]["token_ids"] = [number, number]
    turns = [turn(first, *more, scripted.usage())]
    prompt, answer = raw_messages(turns)
    assert prompt == [{"message": "<|im_start|>Hi", "tokens": [7, 8], "type": "raw_message_tokens"}]
    assert answer == [{"message": "Hm. Hello", "tokens": [0, 0, 1, 1, 2, 2], "type": "raw_message_tokens"}]


def test_for_other_servers_the_sent_messages_are_returned_without_tokens() -> None:
    sent = [{"role": "user", "content": "Hi"}]
    turns = [turn(*scripted.HELLO, messages=sent)]
    prompt, answer = raw_messages(turns)
    assert prompt == [{"message": '[{"role":"user","content":"Hi"}]', "tokens": [], "type": "raw_message_tokens"}]
    assert answer == [{"message": "Hello", "tokens": [], "type": "raw_message_tokens"}]


def test_prompts_of_later_turns_are_between_the_answers() -> None:
    turns = [
        turn({**scripted.call("{}", name="f", call_id="a"), "prompt_text": "one"}),
        turn({**scripted.text("Four"), "prompt_text": "two"}),
    ]
    prompt, answer = raw_messages(turns)
    assert [one["message"] for one in prompt] == ["one"]
    assert [one["message"] for one in answer] == ["f{}", "two", "Four"]


@pytest.mark.parametrize("ids", ["7", {"a": 1}, [1.5], ["7"], [True]])
def test_tokens_that_are_no_numbers_are_an_upstream_error(ids: Any) -> None:
    with pytest.raises(UpstreamError):
        turn({**scripted.text("x"), "prompt_token_ids": ids})


@pytest.mark.parametrize(
    ("model", "expected"), [("openai/gpt-oss-20b", True), ("GPT_OSS", True), ("qwen3-8b", False), ("my-alias", False)]
)
def test_harmony_is_recognized_by_the_models_name(model: str, expected: bool) -> None:
    assert is_harmony(model) is expected


def test_harmony_is_recognized_by_the_prompt_whatever_the_models_name() -> None:
    assert is_harmony("my-alias", [turn({**scripted.text(""), "prompt_token_ids": [200006, 17360]})])


# -- through the whole server ----------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_document_has_both_lists_from_the_first_event(ours: Ours, upstream: ScriptedUpstream) -> None:
    """vLLM's tests require the members in `created` and `in_progress` too, where they are still empty."""
    first = {**scripted.text("Hello"), "prompt_text": "<s>Hi", "prompt_token_ids": [1, 2]}
    first["choices"][0]["token_ids"] = [5]
    upstream.stream(first, scripted.finish(), scripted.usage())
    streamed = await oracle.stream(ours, enable_response_messages=True)
    for event in streamed.events[:2]:
        assert (event["response"]["input_messages"], event["response"]["output_messages"]) == (None, None)
    assert streamed.response["input_messages"] == [{"message": "<s>Hi", "tokens": [1, 2], "type": "raw_message_tokens"}]
    assert streamed.response["output_messages"] == [{"message": "Hello", "tokens": [5], "type": "raw_message_tokens"}]
    asked = upstream.requests[0].json
    assert (asked["return_token_ids"], asked["return_prompt_text"]) == (True, True)
    stored = (await ours.http.get(f"/v1/responses/{streamed.response['id']}")).json()
    assert stored["output_messages"] == streamed.response["output_messages"]


@pytest.mark.anyio
async def test_tokens_are_collected_from_chunks_that_differ_only_in_their_text(ours: Ours, upstream: ScriptedUpstream) -> None:
    pieces = [scripted.text(word) for word in ("tick", "tock", "tick", "tock")]
    for piece in pieces:
        piece["choices"][0]["token_ids"] = [9]
    upstream.stream(*pieces, scripted.finish(), scripted.usage())
    streamed = await oracle.stream(ours, enable_response_messages=True)
    assert streamed.response["output_messages"][0]["tokens"] == [9, 9, 9, 9]


@pytest.mark.anyio
async def test_a_history_kept_by_the_caller_is_continued(ours: Ours, upstream: ScriptedUpstream) -> None:
    """This is vLLM's own test for gpt-oss."""
    asked = scripted.call('{"sign":"Aquarius"}', name="get_horoscope", call_id="call_1")
    upstream.stream(scripted.reasoning("Hm."), asked, scripted.finish("tool_calls"))
    body: dict[str, Any] = {"model": "gpt-oss-20b", "tools": [GET_HOROSCOPE], "enable_response_messages": True}
    first = (await oracle.stream(ours, **body)).response
    previous = [*first["input_messages"], *first["output_messages"], RESULT]
    upstream.whole(scripted.completion({"content": "An otter, today."}))
    second = await oracle.whole(ours, **body, input="", previous_input_messages=previous)
    messages = upstream.requests[1].json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    roles = [message.author.role.value for message in read(second["input_messages"])]
    assert (roles.count("system"), roles.count("developer"), roles.count("tool")) == (1, 1, 1)
    assert heads(read(second["output_messages"])) == [("assistant", "final", None)]


@pytest.mark.anyio
async def test_two_histories_are_refused(ours: Ours) -> None:
    body = {"model": "tiny", "input": "Hi", "previous_input_messages": [RESULT], "previous_response_id": "resp_1"}
    answered = await ours.http.post("/v1/responses", json=body)
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, "previous_response_id")


def test_a_path_in_the_input_does_not_count_the_previous_messages() -> None:
    body = {"input": [{"type": "compaction_trigger"}, {"role": "user", "content": "x"}]}
    with pytest.raises(BadRequest) as refused:
        parse({**body, "previous_input_messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]})
    assert refused.value.param == "input[0]"
