"""The partition: everything that shapes an answer, except the last user text."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.cache.entry import NEUTRAL, Key, key_of
from responses_mw.protocol.request.create import CreateResponse, parse
from tests.cache.asking import ALICE, BOB, asked

if TYPE_CHECKING:
    from collections.abc import Callable

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}

SHAPING: dict[str, Any] = {
    "extra": {"seed": 1},
    "frequency_penalty": 0.5,
    "include": frozenset({"reasoning.encrypted_content"}),
    "instructions": "Be brief.",
    "max_output_tokens": 5,
    "max_tool_calls": 3,
    "model": "n",
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "prompt_cache_key": "customer 7",
    "reasoning": {"effort": "low"},
    "safety_identifier": "somebody",
    "temperature": 0.0,
    "text": {"format": {"type": "json_object"}},
    "tool_choice": "none",
    "tools": [FUNCTION],
    "top_logprobs": 0,
    "top_p": 0.5,
    "truncation": "auto",
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "user": "somebody",
}
"""Of each member of a request that is part of the partition, a value that is not its default."""

OTHERS: dict[str, Any] = {
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "metadata": {"a": "b"},
    "store": False,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "prompt": {"id": "p"},
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
}


def made(request: CreateResponse, items: list[dict[str, Any]] | None = None, **told: Any) -> Key | None:
    key = key_of(request, request.items if items is None else items, **{"owner": ALICE, "model": "m", **told})
    return key if isinstance(key, Key) else None


def partition(request: CreateResponse, items: list[dict[str, Any]] | None = None, **told: Any) -> str:
    key = made(request, items, **told)
    assert key is not None
    return key.partition


def test_every_request_parameter_is_classified_as_shaping_or_neutral() -> None:
    members = {field.name for field in fields(CreateResponse)}
    assert SHAPING.keys() == members - NEUTRAL
    assert OTHERS.keys() | {"items", "background", "background_options", "cache", "enable_response_messages", "size"} == NEUTRAL


def test_the_size_of_a_request_does_not_change_the_partition() -> None:
    body = {"model": "m", "input": "Hi"}
    assert partition(parse(body, size=30)) == partition(parse(body, size=40))


@pytest.mark.parametrize("name", SHAPING)
def test_each_shaping_parameter_changes_the_partition(name: str) -> None:
    request = asked()
    if name == "tools":  # a request that offers tools is not cacheable
        request = replace(request, tool_choice="none")
    changed = replace(request, **{name: SHAPING[name]})
    assert changed != request
    assert partition(changed) != partition(request)


@pytest.mark.parametrize("name", OTHERS)
def test_neutral_parameters_do_not_change_the_partition(name: str) -> None:
    changed = replace(asked(), **{name: OTHERS[name]})
    assert changed != asked()
    assert partition(changed) == partition(asked())


@pytest.mark.parametrize(
    "told",
    [{"owner": BOB}, {"model": "other"}, {"deployment": "other"}, {"headers": {"x-variant": "b"}}],
    ids=lambda told: next(iter(told)),
)
def test_owner_model_deployment_and_forwarded_headers_change_the_partition(told: dict[str, Any]) -> None:
    assert partition(asked(), **told) != partition(asked())


def test_tracing_headers_and_credentials_do_not_change_the_partition() -> None:
    assert partition(asked(), headers={"traceparent": "00-1", "authorization": "Bearer x"}) == partition(asked())


def text(words: str, role: str = "user", kind: str = "input_text", **members: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": words}], **members}


HISTORY = [text("Hello", id="msg_1"), text("Hi!", "assistant", "output_text"), text("And you?")]
HISTORIES = {
    "a text": [text("Hallo"), *HISTORY[1:]],
    "a role": [text("Hello", "developer"), *HISTORY[1:]],
    "the order": [HISTORY[1], HISTORY[0], HISTORY[2]],
    "one item less": HISTORY[1:],
    "reasoning": [HISTORY[0], {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}, *HISTORY[1:]],
    "a call": [HISTORY[0], {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, *HISTORY[1:]],
    "a member that is not known": [HISTORY[0], {**HISTORY[1], "phase": "commentary"}, HISTORY[2]],
    "a member of the last turn": [*HISTORY[:2], text("And you?", name="Bob")],
}


@pytest.mark.parametrize("changed", HISTORIES)
def test_a_changed_history_changes_the_partition(changed: str) -> None:
    assert partition(asked(), HISTORIES[changed]) != partition(asked(), HISTORY)


def test_item_ids_and_statuses_do_not_change_the_partition() -> None:
    again = [{**item, "id": f"msg_{n}", "status": "completed"} for n, item in enumerate(HISTORY)]
    assert partition(asked(), again) == partition(asked(), HISTORY)


def test_a_stored_history_and_the_same_items_as_input_have_the_same_key() -> None:
    chained = replace(asked(), previous_response_id="resp_1")
    assert made(chained, HISTORY) == made(asked(), HISTORY)


def test_the_last_user_text_changes_the_entry_but_not_the_partition() -> None:
    one, other = made(asked("One?")), made(asked("Other?"))
    assert one is not None
    assert other is not None
    assert one.partition == other.partition
    assert (one.text, one.exact) != (other.text, other.exact)


IMAGE = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/a.png"}]}
BRINGING = {"type": "tool_search_output", "call_id": "c", "tools": [FUNCTION]}
TWO_PARTS = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 2}


@pytest.mark.parametrize(
    "items",
    [
        [],
        [text("Hi", "assistant", "output_text")],
        [text("Be brief", "system")],
        [text("Hi"), {"type": "function_call_output", "call_id": "c", "output": "1"}],
        [TWO_PARTS],
        [text("   ")],
        [IMAGE],
        [IMAGE, text("What is it?")],
        [{"type": "item_reference", "id": "msg_1"}, text("And you?")],
        [BRINGING, text("And you?")],
        [{**BRINGING, "type": "additional_tools", "role": "developer"}, text("And you?")],
        [{"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}, text("And you?")],
        [text("Hi"), {"type": "function_call_output", "call_id": "c", "output": IMAGE["content"]}, text("And you?")],
    ],
)
def test_input_that_is_not_text_ending_with_a_user_message_is_not_cacheable(
    items: list[dict[str, Any]],
) -> None:
    assert made(asked(), items) is None


@pytest.mark.parametrize(
    "members",
    [
        {"tools": [FUNCTION]},
        {"tools": [FUNCTION], "tool_choice": "required"},
        {"top_logprobs": 2},
        {"include": frozenset({"message.output_text.logprobs"})},
    ],
)
def test_requests_with_tools_or_log_probabilities_are_not_cacheable(members: dict[str, Any]) -> None:
    assert made(replace(asked(), **members)) is None


def test_tools_in_the_history_are_cacheable_if_tool_choice_is_none() -> None:
    items = [BRINGING, text("And you?")]
    assert made(replace(asked(), tool_choice="none"), items) is not None


SCHEMAS = [{"type": "object", "properties": {name: {"type": "string"} for name in names}} for names in ("ab", "ba")]


@pytest.mark.parametrize(
    "members",
    [
        lambda schema: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        lambda schema: {"extra": {"guided_json": schema}},
        lambda schema: {"tools": [{**FUNCTION, "parameters": schema}], "tool_choice": "none"},
    ],
    ids=["text", "extra", "tools"],
)
def test_the_order_of_members_of_a_schema_changes_the_partition(members: Callable[[Any], dict[str, Any]]) -> None:
    one, other = (replace(asked(), **members(schema)) for schema in SCHEMAS)
    assert partition(one) != partition(other)


def test_the_order_of_extra_parameters_does_not_change_the_partition() -> None:
    one, other = replace(asked(), extra={"seed": 1, "top_k": 2}), replace(asked(), extra={"top_k": 2, "seed": 1})
    assert partition(one) == partition(other)


def test_the_cache_parameter_does_not_change_the_partition() -> None:
    assert partition(asked(cache="exact")) == partition(asked(cache={"mode": "semantic"})) == partition(asked())
