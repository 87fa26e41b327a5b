"""`truncation: auto`: the remaining items are a valid history, and as many as fit."""

from __future__ import annotations

from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.protocol.chat.messages import to_messages
from responses_mw.protocol.chat.truncation import Truncation, is_kept, truncated
from responses_mw.protocol.dialects import DIALECTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from responses_mw.protocol.types import Item


def message(role: str, text: str = "x") -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def reasoning() -> Item:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def call(call_id: str) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def output(call_id: str) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": "done"}


USER, ASSISTANT, SYSTEM, DEVELOPER = (message(role) for role in ("user", "assistant", "system", "developer"))


# -- histories ----------------------------------------------------------------------------------------------------------------

IDS = st.sampled_from(["a", "b", "c"])  # few: some models number their calls anew in each turn


@st.composite
def steps(draw: st.DrawFn) -> list[Item]:
    """Draw a message of the assistant with calls, and the results."""
    calls = draw(st.lists(IDS, max_size=3, unique=True))
    said = [reasoning()] * draw(st.integers(0, 1)) + [message("assistant")] * draw(st.integers(0, 0 if calls else 2))
    between = [message(draw(st.sampled_from(["developer", "user"])))] * draw(st.integers(0, 1))
    return [*said, *map(call, calls), *(between if calls else []), *map(output, draw(st.permutations(calls)))]


@st.composite
def histories(draw: st.DrawFn) -> list[Item]:
    """Draw a history that `to_messages` accepts."""
    items: list[Item] = []
    for _ in range(draw(st.integers(0, 6))):
        items += draw(st.lists(st.sampled_from([USER, SYSTEM, DEVELOPER]), max_size=3))
        for step in draw(st.lists(steps(), max_size=3)):
            items += step
    numbers = count()
    return [{**item, "id": f"item_{next(numbers)}"} for item in items]


def ids(items: Sequence[Item]) -> list[str]:
    return [item["id"] for item in items]


@given(histories(), st.integers(0, 40))
def test_the_remaining_items_are_a_valid_history_in_every_dialect(items: list[Item], most: int) -> None:
    left = truncated(items, lambda some: len(some) <= most)
    for dialect in DIALECTS.values():
        to_messages(items, dialect)
        to_messages(left, dialect)


@given(histories(), st.integers(0, 40))
def test_truncating_twice_changes_nothing_more(items: list[Item], most: int) -> None:
    left = truncated(items, lambda some: len(some) <= most)
    assert truncated(left, lambda some: len(some) <= most) == left


@given(histories(), st.integers(0, 40))
def test_the_order_instructions_last_user_message_and_last_item_are_kept(items: list[Item], most: int) -> None:
    left = ids(truncated(items, lambda some: len(some) <= most))
    assert left == [item for item in ids(items) if item in set(left)]
    kept = [item["id"] for item in items if is_kept(item)]
    assert set(kept) <= set(left)
    users = [item["id"] for item in items if item.get("role") == "user"]
    assert set(users[-1:]) <= set(left)
    assert set(ids([item for item in items if not is_kept(item)][-1:])) <= set(left)


@given(histories(), st.integers(0, 40))
def test_no_more_is_dropped_than_necessary(items: list[Item], most: int) -> None:
    left = truncated(items, lambda some: len(some) <= most)
    cuts = Truncation(items)
    tried = [cuts.without(number) for number in range(len(cuts) + 1)]
    assert all(len(more) > len(fewer) for more, fewer in pairwise(tried))
    fitting = [some for some in tried if len(some) <= most]
    assert left == (fitting[0] if fitting else tried[-1])


@given(histories(), st.integers(0, 40))
def test_a_call_and_its_output_are_dropped_together(items: list[Item], most: int) -> None:
    left = truncated(items, lambda some: len(some) <= most)
    for call_id in "abc":
        of_it = [item["type"] for item in left if item.get("call_id") == call_id]
        assert of_it.count("function_call") == of_it.count("function_call_output")


# -- by example ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "least"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([USER], [USER], id="one message"),
        pytest.param([USER, ASSISTANT, USER], [USER], id="an exchange goes whole"),
        pytest.param([ASSISTANT, USER], [USER], id="what stands before the first user goes"),
        pytest.param([SYSTEM, USER, DEVELOPER, ASSISTANT, USER], [SYSTEM, DEVELOPER, USER], id="instructions stay"),
        pytest.param([USER, ASSISTANT, USER, DEVELOPER, USER], [USER, DEVELOPER, USER], id="a turn of several messages stays"),
        pytest.param(
            [USER, call("1"), output("1"), reasoning(), call("2"), output("2")],
            [USER, reasoning(), call("2"), output("2")],
            id="the oldest step of the tool loop goes, with its reasoning",
        ),
        pytest.param(
            [USER, call("1"), call("2"), output("2"), output("1")],
            [USER, call("1"), call("2"), output("2"), output("1")],
            id="the last step stays whole",
        ),
        pytest.param(
            [USER, ASSISTANT, USER, call("1"), USER, output("1")],
            [USER, call("1"), USER, output("1")],
            id="a call whose output comes after the next message",
        ),
        pytest.param([call("1"), output("1"), call("1"), output("1")], [call("1"), output("1")], id="one id for two calls"),
        pytest.param(
            [{"type": "compaction", "encrypted_content": "x"}, USER, ASSISTANT, USER],
            [{"type": "compaction", "encrypted_content": "x"}, USER],
            id="a summary of what was before stays",
        ),
        pytest.param(
            [
                USER,
                {"type": "mcp_approval_request", "id": "r"},
                USER,
                {"type": "mcp_approval_response", "approval_request_id": "r"},
            ],
            [
                USER,
                {"type": "mcp_approval_request", "id": "r"},
                USER,
                {"type": "mcp_approval_response", "approval_request_id": "r"},
            ],
            id="a request for approval stays with its answer",
        ),
    ],
)
def test_if_nothing_fits_only_the_required_items_are_kept(items: list[dict[str, Any]], least: list[dict[str, Any]]) -> None:
    assert truncated(items, lambda _: False) == least


def test_a_history_that_fits_is_unchanged() -> None:
    items = [USER, ASSISTANT, USER]
    assert truncated(items, lambda _: True) == items


def test_the_oldest_items_are_dropped_first() -> None:
    items = [message("user", "1"), ASSISTANT, message("user", "2"), ASSISTANT, message("user", "3")]
    assert truncated(items, lambda some: len(some) <= 3) == items[2:]
