"""Bodies of requests: every parameter of the official client is honoured or refused by name."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from openai.types.beta import BetaResponseInputItemParam
from openai.types.beta.response_create_params import ResponseCreateParamsBase as BetaCreateParams
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseInputItemParam,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from responses_mw.errors import BadRequest
from responses_mw.protocol import json_limits
from responses_mw.protocol.json_limits import MAX_ITEMS, MAX_TOOLS
from responses_mw.protocol.request.create import PARAMETERS, REFUSED, parse
from responses_mw.protocol.request.items import ITEMS, NOT_SERVED
from responses_mw.protocol.response.document import create

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def test_every_parameter_of_the_official_client_and_its_beta_is_honoured_or_refused_by_name() -> None:
    names = {*ResponseCreateParamsBase.__annotations__, *BetaCreateParams.__annotations__, "stream"}
    assert len(names) > 30
    assert names - PARAMETERS.keys() - REFUSED.keys() == {"input", "tools", "tool_choice"}


@pytest.mark.parametrize("window", ["soonest", "2h", "8h"])
def test_a_background_response_can_have_a_timeout_of_hours(window: str) -> None:
    request = parse({"input": "Hi", "background": True, "background_options": {"completion_window": window}})
    assert request.background
    assert "background_options" not in request.extra


@pytest.mark.parametrize("name", sorted({*ResponseCreateParamsBase.__annotations__} - {"input"}))
def test_null_is_treated_as_absent(name: str) -> None:
    assert parse({"input": "Hi", name: None}) == parse({"input": "Hi"})


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": 3}, "input", "invalid_type"),
        ({"input": [3]}, "input[0]", "invalid_type"),
        ({"input": [{}]}, "input[0].type", "missing_required_parameter"),
        ({"input": [{"type": "spell"}]}, "input[0].type", "invalid_value"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "invalid_type"),
        ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type", "invalid_value"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": 3}]}]},
            "input[0].content[0].file_id",
            "invalid_type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "ftp://x"}]}]},
            "input[0].content[0].image_url",
            "invalid_image_url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "eA==", "file_id": "file-1"}]}]},
            "input[0].content[0].file_id",
            "invalid_value",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "filename": "a"}]}]},
            "input[0].content[0].file_data",
            "missing_required_parameter",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "ftp://x"}]}]},
            "input[0].content[0].file_url",
            "invalid_value",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
            "input[0].arguments",
            "missing_required_parameter",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "missing_required_parameter"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c" * 65, "output": "x"}]},
            "input[0].call_id",
            "string_above_max_length",
        ),
        ({"input": "x", "temperature": "hot"}, "temperature", "invalid_type"),
        ({"input": "x", "temperature": True}, "temperature", "invalid_type"),
        ({"input": "x", "temperature": 2.1}, "temperature", "decimal_above_max_value"),
        ({"input": "x", "top_p": -0.1}, "top_p", "decimal_below_min_value"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
        ({"input": "x", "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"input": "x", "include": ["everything"]}, "include[0]", "invalid_value"),
        ({"input": "x", "metadata": {"k": 1}}, "metadata.k", "invalid_type"),
        ({"input": "x", "reasoning": {"effort": "heroic"}}, "reasoning.effort", "invalid_value"),
        ({"input": "x", "reasoning": {"mode": "turbo"}}, "reasoning.mode", "invalid_value"),
        ({"input": "x", "reasoning": {"depth": 1}}, "reasoning.depth", "unknown_parameter"),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid_value"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}},
            "text.format.schema",
            "missing_required_parameter",
        ),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"input": "x", "tools": [{"type": "function", "name": "no spaces"}]}, "tools[0].name", "invalid_value"),
        ({"input": "x", "tools": [{"type": "wand"}]}, "tools[0].type", "invalid_value"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content", "missing_required_parameter"),
        ({"input": [{"type": "compaction_trigger"}, {"role": "user", "content": "x"}]}, "input[0]", "invalid_value"),
        (
            {"input": "x", "context_management": [{"compact_threshold": 9}]},
            "context_management[0].type",
            "missing_required_parameter",
        ),
        ({"input": "x", "context_management": [{"type": "pruning"}]}, "context_management[0].type", "invalid_value"),
        (
            {"input": "x", "context_management": [{"type": "compaction", "compact_threshold": 0}]},
            "context_management[0].compact_threshold",
            "integer_below_min_value",
        ),
        ({"input": [{"type": "computer_call_output", "call_id": "c"}]}, "input[0].type", "unsupported_parameter"),
        (
            {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]},
            "input[0].input",
            "missing_required_parameter",
        ),
        ({"input": [{"type": "configuration_update"}]}, "input[0].reasoning", "missing_required_parameter"),
        ({"input": [{"type": "configuration_update", "text": None}]}, "input[0].reasoning", "missing_required_parameter"),
        (
            {"input": [{"type": "configuration_update", "reasoning": {"effort": "huge"}}]},
            "input[0].reasoning.effort",
            "invalid_value",
        ),
        (
            {"input": [{"type": "configuration_update", "reasoning": {"summary": "auto"}}]},
            "input[0].reasoning.summary",
            "unknown_parameter",
        ),
        (
            {"input": [{"type": "configuration_update", "text": {"format": {"type": "json_schema", "name": "x"}}}]},
            "input[0].text.format.schema",
            "missing_required_parameter",
        ),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "c"}]}, "input[0].output", "missing_required_parameter"),
        (
            {"input": [{"type": "tool_search_call", "call_id": "c", "arguments": "{}"}]},
            "input[0].arguments",
            "invalid_type",
        ),
        (
            {"input": [{"type": "tool_search_call", "execution": "server", "arguments": {}}]},
            "input[0].execution",
            "unsupported_parameter",
        ),
        (
            {"input": [{"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function"}]}]},
            "input[0].tools[0].name",
            "missing_required_parameter",
        ),
        ({"input": [{"type": "additional_tools", "role": "user", "tools": []}]}, "input[0].role", "invalid_value"),
        (
            {"input": [{"type": "local_shell_call", "call_id": "c", "action": {"command": "ls"}}]},
            "input[0].action.command",
            "invalid_type",
        ),
        ({"input": [{"type": "local_shell_call_output", "output": "x"}]}, "input[0].id", "missing_required_parameter"),
        (
            {"input": [{"type": "shell_call", "call_id": "c", "action": {"commands": [1]}}]},
            "input[0].action.commands[0]",
            "invalid_type",
        ),
        (
            {"input": [{"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "", "stderr": ""}]}]},
            "input[0].output[0].outcome",
            "missing_required_parameter",
        ),
        (
            {"input": [{"type": "apply_patch_call", "call_id": "c", "operation": {"type": "create_file", "path": "a"}}]},
            "input[0].operation.diff",
            "missing_required_parameter",
        ),
        (
            {"input": [{"type": "apply_patch_call_output", "call_id": "c", "status": "done"}]},
            "input[0].status",
            "invalid_value",
        ),
        ({"input": [{"type": "mcp_call", "id": "i", "name": "f"}]}, "input[0].server_label", "missing_required_parameter"),
        (
            {"input": [{"type": "mcp_approval_response", "approval_request_id": "q"}]},
            "input[0].approve",
            "missing_required_parameter",
        ),
        (
            {"input": [{"type": "code_interpreter_call", "id": "i", "outputs": [{"type": "logs"}]}]},
            "input[0].outputs[0].logs",
            "missing_required_parameter",
        ),
        ({"input": [{"type": "web_search_call", "id": "i", "action": "x"}]}, "input[0].action", "invalid_type"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            {"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice.name",
            "invalid_value",
        ),
        ({"input": "x", "tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        *(  # malformed tools do not hide a choice that is never valid
            ({"input": "x", "tools": [{"type": "function", "function": {}}, 1], "tool_choice": choice}, param, code)
            for choice, param, code in (
                ("invalid_choice", "tool_choice", "invalid_value"),
                (1, "tool_choice", "invalid_type"),
                ({}, "tool_choice.type", "missing_required_parameter"),
                ({"type": "wand"}, "tool_choice.type", "invalid_value"),
            )
        ),
        ({"input": "x", "conversation": "c1"}, "conversation", "invalid_value"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id", "mutually_exclusive_parameters"),
        ({"input": "x", "background_options": "2h"}, "background_options", "invalid_type"),
        ({"input": "x", "background_options": {"speed": 1}}, "background_options.speed", "unknown_parameter"),
        (
            {"input": "x", "background": True, "background_options": {"completion_window": "1h"}},
            "background_options.completion_window",
            "invalid_value",
        ),
        (
            {"input": "x", "background": True, "background_options": {"continuation_id": "mine"}},
            "background_options.continuation_id",
            "unsupported_parameter",
        ),
        *(
            (
                {"input": "x", "background": True, "background_options": {"completion_window": "8h"}} | otherwise,
                "background_options.completion_window",
                "unsupported_parameter",
            )
            for otherwise in ({"background": False}, {"stream": True}, {"service_tier": "priority"})
        ),
        ({"input": "x", "moderation": {}}, "moderation", "unsupported_parameter"),
        ({"input": "x", "messages": []}, "messages", "unsupported_parameter"),
        ({"input": "x", "max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"input": "x", "n": 2}, "n", "unsupported_parameter"),
        ({"input": "x", "multi_agent": {"enabled": True}}, "multi_agent", "unsupported_parameter"),
        ({"input": "x", "betas": ["responses_multi_agent=v1"]}, "betas", "unsupported_parameter"),
        *(
            ({"input": [{"type": kind, "id": "x_1"}]}, "input[0].type", "unsupported_parameter")
            for kind in ("agent_message", "multi_agent_call", "multi_agent_call_output")
        ),
        (
            {"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools[0].function",
            "unsupported_parameter",
        ),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}}},
            "text.format.json_schema",
            "unsupported_parameter",
        ),
        ({"input": [{"role": "tool", "tool_call_id": "c", "content": "42"}]}, "input[0].role", "unsupported_parameter"),
        (
            {"input": [{"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}]},
            "input[0].tool_calls",
            "unsupported_parameter",
        ),
    ],
)
def test_errors_name_the_path_of_the_invalid_value(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse(body)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, code)
    assert param in raised.value.message


@pytest.mark.parametrize("mode", ["standard", "pro"])
def test_every_reasoning_mode_is_treated_as_the_standard_mode(mode: str) -> None:
    request = parse({"input": "x", "reasoning": {"mode": mode, "effort": "high"}})
    assert request.reasoning == {"mode": "standard", "effort": "high"}


def test_values_above_the_limits_are_refused() -> None:
    with pytest.raises(BadRequest, match="array too long"):
        parse({"input": [{"role": "user", "content": "x"}] * (MAX_ITEMS + 1)})
    with pytest.raises(BadRequest, match="too many tools"):
        parse({"input": "x", "tools": [TOOL] * (MAX_TOOLS + 1)})
    previous = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}] * (MAX_ITEMS + 1)}]
    with pytest.raises(BadRequest, match="array too long"):
        parse({"input": "x", "previous_input_messages": previous})


NAMESPACE = {"type": "namespace", "name": "n", "tools": [TOOL, TOOL]}
LISTED = {"name": "t", "input_schema": {}}


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [TOOL, NAMESPACE]},
        {"input": [{"type": "additional_tools", "tools": [TOOL, NAMESPACE]}]},
        {"input": [{"type": "tool_search_output", "call_id": "c", "tools": [NAMESPACE]}], "tools": [TOOL]},
        {"input": [{"type": "mcp_list_tools", "server_label": "s", "tools": [LISTED] * 3}], "tools": [TOOL]},
        {"input": [{"type": "additional_tools", "tools": [TOOL]}] * 4},
    ],
    ids=["tools", "additional_tools", "tool_search_output", "mcp_list_tools", "many items"],
)
def test_tools_are_counted_wherever_they_appear(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"input": "x", **body}
    monkeypatch.setattr(json_limits, "MAX_TOOLS", 4)
    parse(body)
    monkeypatch.setattr(json_limits, "MAX_TOOLS", 3)
    with pytest.raises(BadRequest, match=r"too many tools. Expected at most 3, .* but got 4") as caught:
        parse(body)
    assert (caught.value.param, caught.value.code) == ("tools", "array_above_max_length")


def test_a_choice_allows_at_most_as_many_tools_as_a_request_may_have() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": TOOL["name"]}] * (MAX_TOOLS + 1)}
    with pytest.raises(BadRequest, match="array too long") as caught:
        parse({"input": "x", "tools": [TOOL], "tool_choice": choice})
    assert caught.value.param == "tool_choice.tools"


def test_unknown_parameters_are_forwarded_unchanged() -> None:
    extra = {"top_k": 5, "seed": 1, "stop": ["x"], "chat_template_kwargs": {"a": None}, "priority": -1}
    request = parse({"input": "Hi", **extra, "client_metadata": {"a": 1}, "request_id": "r", "min_p": None})
    assert request.extra == extra


def test_items_of_the_official_client_can_be_sent_back_with_all_nulls() -> None:
    text = ResponseOutputText(type="output_text", text="Hm", annotations=[], logprobs=None)
    items = [
        ResponseReasoningItem(id="rs_1", type="reasoning", summary=[]),
        ResponseOutputMessage(id="msg_1", type="message", role="assistant", status="completed", content=[text]),
        ResponseFunctionToolCall(type="function_call", call_id="c1", name="f", arguments="{}"),
    ]
    dumped = [item.model_dump() for item in items]
    output = {"type": "function_call_output", "call_id": "c1", "output": "ok", "id": None, "status": None}
    parsed = parse({"input": [*dumped, output]}).items
    assert [item["type"] for item in parsed] == ["reasoning", "message", "function_call", "function_call_output"]
    assert all(value is not None for item in parsed for value in item.values())


def test_every_item_of_the_official_client_and_its_beta_is_accepted_or_refused_by_name() -> None:
    assert len(get_args(BetaResponseInputItemParam)) > len(get_args(ResponseInputItemParam))
    types = [get_type_hints(member)["type"] for member in get_args(BetaResponseInputItemParam)]
    kinds = {str(get_args(get_args(one)[0] if type(None) in get_args(one) else one)[0]) for one in types}
    assert len(kinds) > 30
    assert kinds == ITEMS.keys() | NOT_SERVED


def test_unset_parameters_are_echoed_with_the_defaults_of_the_reference() -> None:
    request = parse({"input": "Hi", "tools": [{"type": "function", "name": "f"}]})
    document = create(request, response_id="resp_1", model="m", created_at=1)
    assert document["tools"] == [{"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}]
    assert (document["text"], document["service_tier"]) == ({"format": {"type": "text"}}, "default")
    assert (document["temperature"], document["top_p"], document["top_logprobs"]) == (1.0, 1.0, 0)
    assert (document["parallel_tool_calls"], document["tool_choice"], document["truncation"]) == (True, "auto", "disabled")


def test_the_requested_service_tier_and_cache_options_are_echoed() -> None:
    asked = {"service_tier": "flex", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}}
    document = create(parse({"input": "Hi", **asked}), response_id="resp_1", model="m", created_at=1)
    assert {name: document[name] for name in asked} == asked


def test_the_phase_of_an_item_is_kept() -> None:
    items = [
        {"role": "assistant", "content": "Hm", "phase": "commentary"},
        {"role": "assistant", "content": "Hi", "phase": None},
    ]
    assert [item.get("phase") for item in parse({"input": items}).items] == ["commentary", None]
    assert "phase" not in parse({"input": items}).items[1]


def test_a_string_as_input_is_a_user_message() -> None:
    assert parse({"input": "Hi"}).items == [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    ]


def test_an_item_with_only_an_id_is_a_reference() -> None:
    assert parse({"input": [{"id": "msg_1"}]}).items == [{"type": "item_reference", "id": "msg_1"}]
