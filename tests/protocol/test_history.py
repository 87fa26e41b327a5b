"""From items to chat messages: nothing that the model needs is lost, and what cannot be said is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.errors import BadRequest
from responses_mw.protocol.dialects import OPENAI, VLLM
from responses_mw.protocol.history import to_messages
from responses_mw.protocol.items import parse_input


def messages(*items: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    return to_messages(parse_input(list(items)), options.pop("dialect", VLLM), **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(call_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", **more}


def output(call_id: str, said: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": said}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def shape(result: list[dict[str, Any]]) -> list[str]:
    return [
        f"calls {' '.join(one['id'] for one in message['tool_calls'])}"
        if message.get("tool_calls")
        else f"tool {message['tool_call_id']}"
        if message["role"] == "tool"
        else str(message["role"])
        for message in result
    ]


def test_what_the_assistant_did_in_one_go_is_one_message() -> None:
    result = messages(user("x"), reasoning("Hm."), assistant("Look."), call("a"), call("b"), output("a"), output("b"))
    assert shape(result) == ["user", "calls a b", "tool a", "tool b"]
    assert (result[1]["reasoning"], result[1]["content"]) == ("Hm.", "Look.")


def test_outputs_follow_their_calls_wherever_they_stood() -> None:
    result = messages(call("a"), call("b"), user("wait"), output("b"), output("a"))
    assert shape(result) == ["calls a b", "tool a", "tool b", "user"]


def test_a_later_round_is_a_message_of_its_own() -> None:
    assert shape(messages(call("a"), output("a"), call("b"), output("b"))) == ["calls a", "tool a", "calls b", "tool b"]


def test_ids_that_are_used_again_pair_in_order() -> None:
    result = messages(call("0"), output("0", "first"), user("x"), call("0"), output("0", "second"))
    assert [message["content"] for message in result if message["role"] == "tool"] == ["first", "second"]


def test_a_call_that_was_cut_is_left_out() -> None:
    assert shape(messages(user("x"), call("a", status="incomplete", arguments='{"a'), user("go on"))) == ["user", "user"]


def test_a_call_without_an_output_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="No tool output found for function call a") as raised:
        messages(user("x"), call("a"), user("y"))
    assert raised.value.param == "input[1]"


def test_an_output_without_a_call_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="No tool call found for function call output with call_id zz") as raised:
        messages(user("x"), output("zz"))
    assert raised.value.param == "input[1]"


def test_images_that_a_tool_returned_follow_it() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    result = messages(call("a"), output("a", [{"type": "input_text", "text": "see"}, image]))
    assert shape(result) == ["calls a", "tool a", "user"]
    assert result[1]["content"] == "see"
    assert result[2]["content"][1]["type"] == "image_url"


def test_reasoning_goes_back_within_the_tool_loop_only() -> None:
    items = [user("x"), reasoning("old"), assistant("y"), user("z"), reasoning("new"), call("a"), output("a")]
    said = [message.get("reasoning") for message in messages(*items)]
    assert said == [None, None, None, "new", None]
    assert [message.get("reasoning") for message in messages(*items, all_reasoning=True)][1] == "old"


def test_reasoning_at_the_end_is_accepted_and_says_nothing() -> None:
    assert shape(messages(user("x"), reasoning("Hm."))) == ["user"]


def test_instructions_stand_first() -> None:
    result = messages(user("x"), {"role": "developer", "content": "y"}, instructions="Be brief.", dialect=OPENAI)
    assert [message["role"] for message in result] == ["system", "user", "developer"]


STEPS = st.lists(
    st.one_of(
        st.builds(lambda text: [user(text)], st.text(min_size=1)),
        st.builds(lambda text: [assistant(text)], st.text(min_size=1)),
        st.builds(
            lambda texts: [call(f"c{n}") for n in range(len(texts))] + [output(f"c{n}", text) for n, text in enumerate(texts)],
            st.lists(st.text(), min_size=1, max_size=3),
        ),
    ),
    max_size=8,
)


@given(STEPS)
def test_nothing_that_was_said_is_lost_and_its_order_holds(steps: list[list[dict[str, Any]]]) -> None:
    items = [item for step in steps for item in step]
    result = messages(*items)
    texts = [str(item.get("content", item.get("output"))) for item in items if item.get("type") != "function_call"]
    said = [message["content"] for message in result if "content" in message]
    assert "\n".join(said).split("\n") == "\n".join(texts).split("\n")
    assert sum(len(message.get("tool_calls", ())) for message in result) == sum("arguments" in item for item in items)
    for before, after in pairwise(result):
        if after["role"] == "tool":
            assert before["role"] == "tool" or "tool_calls" in before
