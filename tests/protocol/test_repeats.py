"""Items that a request repeats although its history contains them."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.errors import BadRequest
from responses_mw.protocol.request.items import parse_input
from responses_mw.protocol.request.repeats import without_repeats
from tests.protocol.test_history import PAIRS, REQUEST, approval, assistant, call, mcp, output, reasoning, user

Items = list[dict[str, Any]]


def stored(*items: dict[str, Any]) -> Items:
    """Return the items with ids and statuses, as in a history."""
    return [{"id": f"item_{number}", "status": "completed"} | item for number, item in enumerate(parse_input(list(items)))]


def kept(history: Items, *items: dict[str, Any], in_conversation: bool = False) -> Items:
    given = parse_input(list(items))
    left = without_repeats(given, history, in_conversation=in_conversation)
    return [items[given.index(item)] for item in left]


@pytest.mark.parametrize("kind", PAIRS)
def test_repeated_calls_and_outputs_of_any_kind_are_omitted(kind: str) -> None:
    asked, answered, _ = PAIRS[kind]
    asked, answered = {**asked, "call_id": "a"}, {**answered, "call_id": "a"}
    assert kept(stored(user("x"), asked), asked, answered) == [answered]
    assert kept(stored(user("x"), asked), user("x"), asked, answered) == [answered]
    assert kept(stored(user("x"), asked, answered), asked, answered, user("y")) == [user("y")]
    assert kept(stored(user("x"), asked, answered), answered) == []


def test_arguments_and_outputs_are_compared_by_their_meaning() -> None:
    history = stored(call("a", arguments='{"x": 1, "y": [2]}'), output("a", '{"ok": true}'))
    assert kept(history, call("a", arguments='{"y":[2],"x":1}')) == []
    assert kept(history, output("a", '{"ok":true}')) == []
    assert kept(history, output("a", [{"type": "input_text", "text": '{"ok":true}'}])) == []
    for other in (output("a", '{"ok": 1}'), output("a", "ok"), output("a", [])):
        assert kept(history, other) == [other]
    other = call("a", arguments='{"x": 2, "y": [2]}')
    assert kept(history, other, output("a", "no")) == [other, output("a", "no")]


def test_a_failed_output_is_no_repetition_of_a_successful_one() -> None:
    asked, answered, _ = PAIRS["apply patch"]
    history = stored({**asked, "call_id": "a"}, {**answered, "call_id": "a"})
    other = {**answered, "call_id": "a", "status": "completed"}
    assert kept(history, other) == [other]


def test_messages_before_an_output_are_omitted_if_they_repeat_those_before_the_call() -> None:
    history = stored({"role": "developer", "content": "s"}, user("x"), reasoning("Hm."), assistant("Look."), call("a"))
    new = output("a")
    assert kept(history, user("x"), new) == [new]
    assert kept(history, {"role": "developer", "content": "s"}, user("x"), new) == [new]
    assert kept(history, user("x"), reasoning("Hm."), assistant("Look."), call("a"), new, user("x")) == [new, user("x")]
    assert kept(history, user("other"), new) == [user("other"), new]
    assert kept(history, user("x"), user("x"), new) == [user("x"), new]


def test_a_message_without_a_later_output_is_never_omitted() -> None:
    history = stored(user("x"), call("a"), output("a"), assistant("y"))
    assert kept(history, user("x")) == [user("x")]
    assert kept(history, user("x"), assistant("y"), user("x")) == [user("x"), assistant("y"), user("x")]
    assert kept(history, user("x"), call("a"), output("a"), user("x")) == [user("x")]


def test_the_answer_after_a_repeated_output_is_omitted_as_well() -> None:
    history = stored(user("x"), call("a"), output("a"), reasoning("Hm."), assistant("y"), user("z"), assistant("w"))
    again = [user("x"), call("a"), output("a"), reasoning("Hm."), assistant("y"), user("z"), assistant("w")]
    assert kept(history, *again, user("v")) == [user("v")]
    assert kept(history[:5], *again[:5], user("z")) == [user("z")]
    assert kept(history[:5], *again[:4], assistant("other"), user("z")) == [assistant("other"), user("z")]
    assert kept(history, *again[:2], {**assistant("y"), "id": "item_4"}, user("v")) == [user("v")]
    assert kept(history[:2], *again, user("v")) == [*again[2:], user("v")]


def test_the_last_answer_of_the_history_is_omitted_at_the_beginning_of_the_input() -> None:
    history = stored(user("x"), assistant("y"), user("x"), reasoning("Hm."), assistant("z"))
    assert kept(history, assistant("z"), user("v")) == [user("v")]
    assert kept(history, reasoning("Hm."), assistant("z"), user("v")) == [user("v")]
    looped = stored(user("x"), assistant("y"), call("a"), output("a"), assistant("z"))
    assert kept(looped, assistant("z"), user("v")) == [user("v")]
    for other in ([assistant("y"), user("v")], [user("v"), assistant("z")], [user("x"), assistant("z"), user("v")]):
        assert kept(history, *other) == other


def test_repeated_messages_before_an_item_with_a_known_id_are_omitted() -> None:
    history = stored(user("x"), assistant("y"), user("z"), assistant("w"))
    again = [user("x"), {**assistant("y"), "id": "item_1"}, user("z"), {**assistant("w"), "id": "item_3"}, user("z")]
    assert kept(history, *again, in_conversation=True) == [user("z")]


def test_each_round_of_a_tool_loop_may_repeat_all_earlier_ones() -> None:
    history = stored(user("x"), call("a"), call("b"), output("a", "1"), output("b", "2"), call("c"))
    everything = [user("x"), call("a"), call("b"), output("a", "1"), output("b", "2"), call("c"), output("c", "3")]
    assert kept(history, *everything) == [output("c", "3")]
    assert kept(history, user("x"), output("a", "1"), output("b", "2"), output("c", "3")) == [output("c", "3")]


def test_repeated_approvals_are_omitted() -> None:
    history = stored(user("x"), REQUEST, approval(True), mcp("i", output="1", approval_request_id="q"))
    assert kept(history, user("x"), REQUEST, approval(True), user("y")) == [user("y")]
    assert kept(history[:2], user("x"), REQUEST, approval(True)) == [approval(True)]
    assert kept(history[:3], approval(True)) == [approval(True)]  # the call has not been executed
    declined = stored(REQUEST, approval(False, reason="No."))
    assert kept(declined, approval(False)) == []
    with pytest.raises(BadRequest, match="The approval request q already has a response") as raised:
        kept(history, user("y"), approval(False))
    assert (raised.value.param, raised.value.code) == ("input[1]", "duplicate_item")
    with pytest.raises(BadRequest, match="The approval request q differs"):
        kept(history, {**REQUEST, "arguments": '{"a":2}'})


KNOWN = (
    user("x"),
    assistant("y"),
    reasoning("Hm."),
    call("a"),
    output("a"),
    mcp("i", output="1"),
    {"type": "code_interpreter_call", "id": "i", "code": "1", "container_id": "c", "outputs": [{"type": "logs", "logs": "1"}]},
)


@pytest.mark.parametrize("item", KNOWN, ids=lambda item: item.get("type", item.get("role")))
@pytest.mark.parametrize("in_conversation", [True, False])
def test_an_unchanged_item_with_a_known_id_is_omitted(item: dict[str, Any], in_conversation: bool) -> None:
    history = stored(call("a"), {**item, "id": "known"})
    again = {**item, "id": "known"}
    if in_conversation or "call_id" not in item:
        assert kept(history, again, in_conversation=in_conversation) == []
        assert kept(history, again, user("z"), in_conversation=in_conversation) == [user("z")]
        return
    with pytest.raises(BadRequest, match="Duplicate item found with id known") as raised:
        kept(history, user("z"), again)
    assert (raised.value.param, raised.value.code) == ("input[1]", "duplicate_item")


@pytest.mark.parametrize("other", [user("z"), assistant("x"), reasoning("x"), mcp("i")], ids=lambda item: str(item)[:20])
def test_a_different_item_with_a_known_id_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="The item with id known differs") as raised:
        kept(stored({**user("x"), "id": "known"}), {**other, "id": "known"}, in_conversation=True)
    assert (raised.value.param, raised.value.code) == ("input[0]", "duplicate_item")


def test_members_hidden_in_responses_do_not_make_an_item_different() -> None:
    code = KNOWN[-1]
    history = stored({**code, "id": "known"})
    assert kept(history, {**code, "id": "known", "outputs": None}, in_conversation=True) == []


def test_reasoning_is_compared_by_its_text_and_encrypted_content() -> None:
    text = [{"type": "reasoning_text", "text": "\nHm.\n"}]
    history = stored({"type": "reasoning", "id": "known", "summary": [], "content": text, "encrypted_content": "e"})
    for again in (reasoning("Hm."), {"type": "reasoning", "summary": []}, reasoning("other") | {"encrypted_content": "e"}):
        assert kept(history, {**again, "id": "known"}) == []
    with pytest.raises(BadRequest, match="The item with id known differs"):
        kept(history, {**reasoning("other"), "id": "known"})


TURNS = st.lists(st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 3), st.booleans()), min_size=1, max_size=4)


@given(TURNS, st.data())
def test_repeating_the_history_or_a_part_of_it_changes_nothing(turns: list[Any], data: st.DataObject) -> None:
    """A client may start anywhere, and omit the model's output."""
    ids, items = count(), Items()
    for said, calls, has_text in turns:
        items.append(user(said))
        items += [assistant("Look.")] if has_text else []
        names = [f"c{next(ids)}" for _ in range(calls)]
        items += [*map(call, names), *map(output, names)]
    items += [call("last")]
    new = [output("last"), user("x")]
    begin = data.draw(st.integers(0, len(items)))
    again = [item for item in items[begin:] if item.get("role") != "assistant" or data.draw(st.booleans())]
    assert kept(stored(*items), *again, *new) == new
