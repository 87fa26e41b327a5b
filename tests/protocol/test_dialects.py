"""Requests for each kind of server: a test for each column of the table of dialects, with the quirk that it is for."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from responses_mw.errors import BadRequest, NotSupported
from responses_mw.protocol.chat.combination import Combination
from responses_mw.protocol.chat.request import Prefill, to_chat
from responses_mw.protocol.dialects import DIALECTS, VLLM
from responses_mw.protocol.request.create import parse
from responses_mw.protocol.request.tools import offered

ALL = sorted(DIALECTS)
TOOL = {"type": "function", "name": "f", "description": None, "parameters": {"type": "object"}, "strict": True}
OTHER = {"type": "function", "name": "g"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


def chat(dialect: str, **body: Any) -> dict[str, Any]:
    request = parse({"input": "Hi", **body})
    return to_chat(request, request.items, DIALECTS[dialect], model="m", offered=offered(request.tools, request.items))


def refused(dialect: str, param: str, **body: Any) -> None:
    with pytest.raises(NotSupported) as raised:
        chat(dialect, **body)
    assert raised.value.param == param
    assert dialect in raised.value.message


def test_a_request_without_anything_to_answer_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        to_chat(parse({"input": []}), [], VLLM, model="m")
    assert (caught.value.param, caught.value.code) == ("input", "missing_required_parameter")
    assert to_chat(parse({"input": [], "instructions": "Greet."}), [], VLLM, model="m")["messages"]


@pytest.mark.parametrize("dialect", ALL)
def test_parameters_that_are_not_set_are_not_sent(dialect: str) -> None:
    assert chat(dialect) == {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("dialect", ALL)
def test_a_stream_requests_usage_if_the_server_supports_it(dialect: str) -> None:
    options = {} if dialect == "transformers" else {"stream_options": {"include_usage": True}}
    assert chat(dialect, stream=True) == {**chat(dialect), "stream": True, **options}


@pytest.mark.parametrize("dialect", ALL)
def test_the_maximum_output_is_sent_once_under_the_servers_name(dialect: str) -> None:
    name = "max_completion_tokens" if dialect in ("openai", "vllm", "litellm") else "max_tokens"
    assert {key: value for key, value in chat(dialect, max_output_tokens=9).items() if "tokens" in key} == {name: 9}


@pytest.mark.parametrize("dialect", ALL)
def test_empty_tools_and_tools_with_choice_none_are_not_sent(dialect: str) -> None:
    assert chat(dialect, tools=[]) == chat(dialect)
    if dialect != "openai":
        assert chat(dialect, tools=[TOOL], tool_choice="none") == chat(dialect)


def test_tools_with_choice_none_are_sent_if_the_server_prevents_calls() -> None:
    body = chat("openai", tools=[TOOL], tool_choice="none")
    assert body == {**chat("openai", tools=[TOOL]), "tool_choice": "none"}


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("choice", [{"type": "mcp", "server_label": "x", "name": "nope"}, {"type": "mcp", "server_label": "x"}])
def test_the_choice_of_a_tool_that_its_server_does_not_list_is_refused(dialect: str, choice: dict[str, str]) -> None:
    server = {"type": "mcp", "server_label": "x", "server_url": "https://x.example/mcp"}
    with pytest.raises(BadRequest) as refused:
        chat(dialect, tools=[TOOL, server], tool_choice=choice)
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize("dialect", ALL)
def test_tools_are_sent_without_nulls_and_without_the_default_choice(dialect: str) -> None:
    body = chat(dialect, tools=[TOOL])
    assert body["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]
    assert "tool_choice" not in body


def test_tgi_needs_the_parameters_of_every_tool() -> None:
    assert chat("tgi", tools=[OTHER])["tools"][0]["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("openai", {"type": "function", "function": {"name": "f"}}),
        ("vllm", {"type": "function", "function": {"name": "f"}}),
        ("sglang", {"type": "function", "function": {"name": "f"}}),
        ("litellm", {"type": "function", "function": {"name": "f"}}),
        ("tgi", "f"),
        ("llamacpp", "required"),
    ],
)
def test_a_forced_function_is_sent_in_the_servers_form(dialect: str, expected: Any) -> None:
    body = chat(dialect, tools=[TOOL, OTHER], tool_choice={"type": "function", "name": "f"})
    assert body["tool_choice"] == expected
    assert len(body["tools"]) == (1 if dialect == "llamacpp" else 2)


@pytest.mark.parametrize("dialect", ["ollama", "transformers"])
def test_forcing_a_call_is_refused_if_the_server_cannot_do_it(dialect: str) -> None:
    refused(dialect, "tool_choice", tools=[TOOL], tool_choice="required")


@pytest.mark.parametrize("dialect", ALL)
def test_only_allowed_tools_are_offered(dialect: str) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    assert [tool["function"]["name"] for tool in chat(dialect, tools=[TOOL, OTHER], tool_choice=choice)["tools"]] == ["g"]


def test_a_forced_call_applies_only_to_the_first_turn() -> None:
    request = parse({"input": "Hi", "tools": [TOOL], "tool_choice": "required"})
    assert "tool_choice" not in to_chat(request, request.items, DIALECTS["vllm"], model="m", first_turn=False)


@pytest.mark.parametrize("dialect", ALL)
def test_parallel_tool_calls_is_sent_only_to_servers_that_accept_it(dialect: str) -> None:
    sent = dialect in ("openai", "vllm", "sglang", "litellm")
    assert ("parallel_tool_calls" in chat(dialect, tools=[TOOL], parallel_tool_calls=False)) is sent


def test_a_schema_is_sent_in_the_servers_form() -> None:
    wanted = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    inner = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat("vllm", text={"format": wanted})["response_format"] == {"type": "json_schema", "json_schema": inner}
    tgi = {"type": "json_schema", "value": {"name": "n", "schema": {"type": "object"}}}
    assert chat("tgi", text={"format": wanted})["response_format"] == tgi
    assert chat("tgi", text={"format": {"type": "json_object"}})["response_format"]["value"] == {"type": "object"}
    assert "response_format" not in chat("tgi", text={"format": {"type": "text"}})
    refused("transformers", "text.format", text={"format": wanted})


def test_the_effort_is_sent_in_the_servers_form() -> None:
    none = chat("vllm", reasoning={"effort": "none"})
    assert (none["reasoning_effort"], none["chat_template_kwargs"]) == ("none", {"enable_thinking": False})
    given = chat("vllm", reasoning={"effort": "low"}, chat_template_kwargs={"enable_thinking": False, "x": 1})
    assert given["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}
    for dialect in ("openai", "sglang", "llamacpp", "ollama", "litellm"):
        assert chat(dialect, reasoning={"effort": "none"}) == {**chat(dialect), "reasoning_effort": "none"}
    for dialect in ("tgi", "transformers"):
        refused(dialect, "reasoning.effort", reasoning={"effort": "low"})


def test_the_verbosity_is_sent_if_the_server_supports_it() -> None:
    assert chat("openai", text={"verbosity": "low"})["verbosity"] == "low"
    assert chat("vllm", text={"verbosity": "low"})["chat_template_kwargs"] == {"verbosity": "low"}
    assert chat("tgi", text={"verbosity": "medium"}) == chat("tgi")
    refused("ollama", "text.verbosity", text={"verbosity": "low"})


@pytest.mark.parametrize("given", [5, "x", ["x"]])
def test_template_arguments_that_are_no_object_are_replaced(given: Any) -> None:
    request = parse({"input": "Hi", "chat_template_kwargs": given})
    body = to_chat(request, request.items, VLLM, model="m", prefill=Prefill(without_thinking=True))
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert chat("vllm", text={"verbosity": "low"}, chat_template_kwargs=given)["chat_template_kwargs"] == {"verbosity": "low"}


def test_tgi_does_not_get_defaults_that_it_treats_differently() -> None:
    assert chat("tgi", presence_penalty=0, top_p=1) == chat("tgi")
    assert chat("tgi", stop="x")["stop"] == ["x"]
    with pytest.raises(NotSupported, match="presence_penalty"):
        chat("tgi", presence_penalty=0.5)


@pytest.mark.parametrize("dialect", ALL)
def test_hints_are_sent_only_to_servers_that_accept_them(dialect: str) -> None:
    body = chat(dialect, user="u", safety_identifier="s", prompt_cache_key="k", metadata={"a": "b"}, service_tier="flex")
    known = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "flex"}
    assert body == {**chat(dialect), **(known if dialect in ("openai", "litellm") else {})}


@pytest.mark.parametrize("dialect", ALL)
def test_log_probabilities_are_requested_with_both_parameters(dialect: str) -> None:
    """vLLM and llama.cpp refuse `top_logprobs` alone."""
    if dialect == "transformers":
        refused(dialect, "top_logprobs", top_logprobs=2)
        return
    assert chat(dialect, top_logprobs=2) == {**chat(dialect), "logprobs": True, "top_logprobs": 2}
    assert chat(dialect, include=["message.output_text.logprobs"]) == {**chat(dialect), "logprobs": True}
    assert chat(dialect, top_logprobs=0) == chat(dialect)


def test_a_penalty_is_refused_if_the_server_does_not_support_it() -> None:
    refused("transformers", "presence_penalty", presence_penalty=0.5)
    assert chat("vllm", presence_penalty=0.5, frequency_penalty=0)["presence_penalty"] == 0.5
    assert chat("vllm", presence_penalty=0.5, frequency_penalty=0)["frequency_penalty"] == 0


def test_parameters_that_the_server_would_ignore_are_refused() -> None:
    refused("vllm", "prompt_cache_retention", prompt_cache_retention="24h")
    assert chat("openai", prompt_cache_retention="24h")["prompt_cache_retention"] == "24h"


@pytest.mark.parametrize("dialect", ALL)
def test_developer_messages_become_system_messages_if_the_server_lacks_the_role(dialect: str) -> None:
    messages = chat(dialect, instructions="A", input=[{"role": "user", "content": "x"}, {"role": "developer", "content": "B"}])
    roles = [message["role"] for message in messages["messages"]]
    if dialect in ("openai", "vllm", "litellm"):
        assert roles == ["system", "user", "developer"]
    elif dialect in ("tgi", "llamacpp", "transformers"):
        assert messages["messages"] == [{"role": "system", "content": "A\n\nB"}, {"role": "user", "content": "x"}]
    else:
        assert roles == ["system", "user", "system"]


@pytest.mark.parametrize("dialect", ALL)
def test_earlier_reasoning_is_sent_if_the_server_has_a_member_for_it(dialect: str) -> None:
    items = [{"role": "user", "content": "x"}, REASONING, CALL, OUTPUT]
    assistant = chat(dialect, input=items)["messages"][1]
    place = {"vllm": "reasoning", "ollama": "reasoning", "sglang": "reasoning_content", "llamacpp": "reasoning_content"}
    place["litellm"] = "reasoning_content"
    assert {key: value for key, value in assistant.items() if key.startswith("reasoning")} == (
        {place[dialect]: "Hm."} if dialect in place else {}
    )


def test_tgi_gets_calls_without_text_and_with_object_arguments() -> None:
    items = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Look:"}, CALL, OUTPUT]
    _, text, calls, _ = chat("tgi", input=items)["messages"]
    assert text == {"role": "assistant", "content": "Look:"}
    assert "content" not in calls
    assert calls["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize("dialect", ALL)
def test_invalid_arguments_are_repaired_if_the_server_parses_them(dialect: str) -> None:
    items = [{**CALL, "arguments": "{not json"}, OUTPUT]
    arguments = chat(dialect, input=items)["messages"][0]["tool_calls"][0]["function"]["arguments"]
    if dialect in ("openai", "litellm"):
        assert arguments == "{not json"
    elif dialect == "tgi":
        assert arguments == {"malformed_arguments": "{not json"}
    else:
        assert arguments == '{"malformed_arguments":"{not json"}'


def part(**content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [content]}]


def test_ollama_accepts_only_images_in_data_urls() -> None:
    refused("ollama", "input[0].content[0].image_url", input=part(type="input_image", image_url="https://x/y.png"))
    data = "data:image/png;base64,AAAA"
    message = chat("ollama", input=part(type="input_image", image_url=data, detail="low"))["messages"][0]
    assert message["content"] == [{"type": "image_url", "image_url": {"url": data, "detail": "low"}}]


@pytest.mark.parametrize("dialect", ALL)
def test_audio_video_and_pdf_are_sent_only_to_servers_that_accept_them(dialect: str) -> None:
    pdf = base64.b64encode(b"%PDF-1.7").decode()
    kinds = {
        "type": (part(type="input_audio", input_audio={"data": "AA", "format": "wav"}), "openai vllm llamacpp litellm"),
        "type ": (part(type="input_video", video_url="https://x/y.mp4"), "vllm sglang"),
        "file_data": (part(type="input_file", file_data=pdf, filename="a.pdf"), "openai litellm"),
    }
    for name, (items, able) in kinds.items():
        if dialect in able.split():
            assert len(chat(dialect, input=items)["messages"][0]["content"]) == 1
        else:
            refused(dialect, f"input[0].content[0].{name.strip()}", input=items)


def test_a_text_file_is_inlined_under_its_name() -> None:
    data = "data:text/plain;base64," + base64.b64encode("Grüße".encode()).decode()
    message = chat("vllm", input=part(type="input_file", file_data=data, filename="a.txt"))["messages"][0]
    assert message["content"] == "a.txt:\nGrüße"


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_an_unfinished_last_message_is_continued(dialect: str) -> None:
    items = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once", "status": "incomplete"}]
    body = chat(dialect, input=items)
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat(dialect, input=items[:1])


# -- tools with a format ---------------------------------------------------------------------------------------------------

FORMAT = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}


def combined(dialect: str, combination: Combination, **body: Any) -> dict[str, Any]:
    request = parse({"input": "Hi", "text": {"format": FORMAT}, **body})
    functions = offered(request.tools, request.items)
    return to_chat(request, request.items, DIALECTS[dialect], model="m", offered=functions, combination=combination)


@pytest.mark.parametrize("dialect", sorted(DIALECTS.keys() - {"transformers"}))
def test_each_combination_of_tools_and_format_sets_its_members(dialect: str) -> None:
    both = {"tools", "response_format"}
    for combination, members in ((Combination.TOGETHER, both), (Combination.DRAFT, {"tools"}), (Combination.STRICT, both)):
        assert combined(dialect, combination, tools=[TOOL, OTHER]).keys() & both == members
        assert combined(dialect, combination).keys() & both == {"response_format"}
    answer = combined(dialect, Combination.ANSWER, tools=[TOOL], parallel_tool_calls=False)
    if dialect == "vllm":
        assert (answer["tool_choice"], answer.keys() & both) == ("none", both)
    else:
        assert not answer.keys() & {"tools", "tool_choice", "parallel_tool_calls"}


def test_functions_become_strict_unless_the_client_sets_strict() -> None:
    tools = [TOOL, {**OTHER, "strict": False}, {**OTHER, "name": "h"}]
    for combination, strict in ((Combination.STRICT, [True, False, True]), (Combination.DRAFT, [True, False, None])):
        body = combined("vllm", combination, tools=tools)
        assert [tool["function"].get("strict") for tool in body["tools"]] == strict


def test_a_format_is_not_sent_if_the_offered_functions_are_not_strict() -> None:
    tools = [{**OTHER, "strict": False}, TOOL]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    assert "response_format" in combined("vllm", Combination.STRICT, tools=tools)
    assert "response_format" not in combined("vllm", Combination.STRICT, tools=tools, tool_choice=choice)
