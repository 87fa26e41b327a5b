"""What holds for the demo models' answers whatever the text is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from responses_mw.demo.request import MODELS, RequestError
from responses_mw.demo.upstream import Answer, answer

TEXTS = st.one_of(
    st.text(),
    st.lists(st.sampled_from(["Rome", "weather", "12", "*", "0", "/", "3.5", "my", "is", "?", "\n", "count to"])).map(" ".join),
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


def body(text: str, **extra: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **extra}).encode()


def answer_or_refusal(request: bytes) -> Answer | RequestError:
    try:
        return answer(request)
    except RequestError as refused:
        return refused


@given(TEXTS, st.sampled_from(MODELS), st.booleans())
@example("count to 0", MODELS[0], False)
def test_every_text_gets_an_answer_whose_tokens_add_up(text: str, model: str, with_tool: bool) -> None:
    given_answer = answer(body(text, model=model, **({"tools": [TOOL]} if with_tool else {})))
    message = given_answer.completion()["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in given_answer.chunks()]
    for kind in ("content", "reasoning"):
        assert "".join(delta.get(kind) or "" for delta in deltas) == (message[kind] or "")
    assert message["content"] or message.get("tool_calls")
    for call in message.get("tool_calls", []):
        assert isinstance(json.loads(call["function"]["arguments"])["city"], str)


@given(st.dictionaries(st.sampled_from(["messages", "tools", "response_format", "tool_choice", "n"]), JSON))
def test_any_body_is_answered_or_refused(fields: dict[str, Any]) -> None:
    outcome = answer_or_refusal(body("Hello", **fields))
    if isinstance(outcome, RequestError):
        assert outcome.status == 400
    else:
        assert outcome.completion()["usage"]["completion_tokens"] == len(outcome.deltas)


@given(JSON, st.dictionaries(st.sampled_from(["type", "properties", "items", "enum", "required", "anyOf", "$ref"]), JSON))
def test_any_schema_is_filled_or_refused(format_name: Any, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": str(format_name), "schema": schema}}
    outcome = answer_or_refusal(body("Ada is 36", response_format=wanted))
    if isinstance(outcome, RequestError):
        assert str(outcome).startswith("The request is malformed: ")
    else:
        json.loads(outcome.completion()["choices"][0]["message"]["content"])


def test_an_endless_count_ends_at_the_context_length() -> None:
    given_answer = answer(body("Count to 9999"))
    assert given_answer.finish_reason == "length"
    assert len(given_answer.deltas) == 4096 - 3


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match="JSONDecodeError"):
        answer(b'{"messages": [{"role": "user", "content": "\\ud800"}]}')


def test_a_question_is_searched_for_and_the_best_sentence_is_cited() -> None:
    question = "How many days of leave do I have?"
    parameters = {"properties": {"queries": {"type": "array", "items": {"type": "string"}}}, "required": ["queries"]}
    tools = [{"type": "function", "function": {"name": "file_search", "parameters": parameters}}]
    [call] = answer(body(question, tools=tools)).completion()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"queries": [question]}
    listing = '<result cite="【1】" file="a">\nPay is late.\n</result>\n<result cite="【2】">\nIt is hot. Leave has 28 days.\n</result>'
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": listing},
    ]
    said = answer(json.dumps({"messages": messages, "tools": tools}).encode()).completion()["choices"][0]["message"]["content"]
    assert said == "Leave has 28 days. 【2】"
