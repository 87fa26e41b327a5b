"""Arguments of calls that servers and gateways repeat, encode twice, or put into one fragment with others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.protocol.chat.call_arguments import CallArguments
from responses_mw.protocol.tool_kinds.form import parse_arguments
from tests.protocol.manners import Cut, cuts, json_values
from tests.protocol.runs import chunk, fragment, output, run
from tests.support.replay import decoded

PARIS = '{"city":"Paris"}'
ROME = '{"city": "Rome"}'
ENCODED = json.dumps(PARIS)
TWICE = json.dumps(ENCODED)
NESTED = '{"not":{"not":1}}'

FUNCTION = {"type": "function", "name": "f", "parameters": None}


def said(*fragments: dict[str, Any], finish: str = "tool_calls") -> list[Any]:
    """Return the calls of a turn. Check that the deltas of each call add up to its arguments."""
    chunks = [*(chunk(tool_calls=[one]) for one in fragments), chunk(finish_reason=finish)]
    deltas: dict[str, str] = {}
    for event in decoded(run(chunks, tools=[FUNCTION])):
        if event["type"] == "response.function_call_arguments.delta":
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    calls = output(*chunks, tools=[FUNCTION])
    assert list(deltas.values()) == [arguments for _, arguments in calls]
    assert all(name == "f" for name, _ in calls)
    return [arguments for _, arguments in calls]


def first(arguments: str | None = None, **members: Any) -> dict[str, Any]:
    return fragment(0, arguments, name="f", **{"id": "a", **members})


@pytest.mark.parametrize(
    "summary", [PARIS, '{ "city" : "Paris" }', ENCODED, TWICE, PARIS + ENCODED, "<|eot_id|>", "}", "\n", "{}"]
)
@pytest.mark.parametrize(
    "members", [{}, {"id": "a"}, {"id": "a", "name": "f"}, {"name": "f"}], ids=["bare", "id", "id and name", "name"]
)
def test_a_repetition_of_complete_arguments_is_dropped(summary: str, members: dict[str, Any]) -> None:
    streamed = first('{"ci'), fragment(arguments='ty":"Pa'), fragment(arguments='ris"}')
    assert said(*streamed, fragment(arguments=summary, **members)) == [PARIS]
    assert said(first(PARIS), fragment(arguments=summary, **members)) == [PARIS]


@pytest.mark.parametrize("summary", [PARIS, ENCODED, {"city": "Paris"}])
def test_a_final_summary_is_dropped_even_if_no_fragment_has_an_id(summary: Any) -> None:
    assert said(first('{"ci', id=None), fragment(arguments='ty":"Paris"}'), fragment(arguments=summary, name="f")) == [PARIS]


def test_a_final_summary_that_is_first_to_have_the_id_is_dropped() -> None:
    assert said(first(PARIS, id=None), fragment(arguments=PARIS, name="f", id="late")) == [PARIS]


def test_a_summary_in_the_final_chunk_is_dropped() -> None:
    last = chunk(tool_calls=[fragment(arguments=ENCODED, name="f", id="a")], finish_reason="tool_calls")
    assert output(chunk(tool_calls=[first(PARIS)]), last, tools=[FUNCTION]) == [("f", PARIS)]


def test_a_summary_of_several_calls_is_dropped() -> None:
    streamed = first(PARIS), fragment(1, ROME, name="f", id="b")
    again = chunk(tool_calls=[fragment(0, PARIS, name="f"), fragment(1, json.dumps(ROME), name="f")])
    chunks = [*(chunk(tool_calls=[one]) for one in streamed), again, chunk(finish_reason="tool_calls")]
    assert output(*chunks, tools=[FUNCTION]) == [("f", PARIS), ("f", ROME)]


def test_a_summary_of_several_calls_with_the_index_zero_is_dropped() -> None:
    again = [fragment(0, PARIS, name="f", id="a"), fragment(0, ROME, name="f", id="b")]
    assert said(first(PARIS), fragment(1, ROME, name="f", id="b"), *again) == [PARIS, ROME]


def test_a_summary_in_pieces_is_dropped() -> None:
    assert said(first(PARIS), fragment(arguments='{"city"'), fragment(arguments=':"Paris"}')) == [PARIS]


@pytest.mark.parametrize("placeholder", ["{}", "{ }", " {}", "{}{}", '"{}"'])
@pytest.mark.parametrize(
    "pieces", [[PARIS], ['{"city":', '"Paris"}'], ["{", '"city":"Paris"}'], [ENCODED], ['"{\\"ci', 'ty\\":\\"Paris\\"}"']]
)
def test_an_empty_object_before_the_arguments_is_dropped(placeholder: str, pieces: list[str]) -> None:
    expected = [json.loads(PARIS)]
    assert [json.loads(one) for one in said(first(placeholder), *(fragment(arguments=piece) for piece in pieces))] == expected


def test_an_empty_object_in_pieces_before_the_arguments_is_dropped() -> None:
    assert said(first("{"), fragment(arguments="}"), fragment(arguments='{"city":"Par'), fragment(arguments='is"}')) == [PARIS]


@pytest.mark.parametrize(
    "pieces", [["{}"], ["{", "}"], ["{}", "{}"], ["{}", '"{}"'], ["{}", "\n"], ["{}", "<|end|>"], ['"{}"']]
)
def test_a_single_empty_object_is_the_arguments(pieces: list[str]) -> None:
    assert said(first(pieces[0]), *(fragment(arguments=piece) for piece in pieces[1:])) == ["{}"]


def test_empty_arguments_end_when_another_call_has_arguments() -> None:
    streamed = [first("{}"), fragment(1, name="f", id="b"), fragment(1, '{"city":'), fragment(1, '"Paris"}')]
    assert said(*streamed) == ["{}", PARIS]
    types = [event["type"] for event in decoded(run([chunk(tool_calls=[one]) for one in streamed[:3]], tools=[FUNCTION]))]
    assert types.index("response.output_item.done") < types.index("response.function_call_arguments.delta", 5)


def test_calls_announced_with_empty_objects_get_their_real_arguments() -> None:
    announced = [first("{}"), fragment(1, "{}", name="f", id="b")]
    assert said(*announced, fragment(0, PARIS), fragment(1, ROME)) == [PARIS, ROME]


@pytest.mark.parametrize(
    "pieces", [[PARIS + ROME], [PARIS, ROME], [PARIS + '{"city"', ': "Rome"}'], [PARIS + "\n" + ROME + PARIS]]
)
def test_a_second_different_object_is_another_call(pieces: list[str]) -> None:
    assert said(first(pieces[0]), *(fragment(arguments=piece) for piece in pieces[1:])) == [PARIS, ROME]


def test_a_second_different_object_in_a_whole_answer_is_another_call() -> None:
    function = {"name": "f", "arguments": PARIS + ROME}
    assert output(chunk(tool_calls=[{"id": "a", "function": function}]), chunk(finish_reason="stop"), tools=[FUNCTION]) == [
        ("f", PARIS),
        ("f", ROME),
    ]


@pytest.mark.parametrize("ends", [range(1, len(PARIS) + 1), [3, 8, len(PARIS)], [8, 8, len(PARIS)], [9, len(PARIS)]])
@pytest.mark.parametrize("text", [PARIS, ENCODED])
def test_fragments_that_repeat_the_arguments_so_far_add_only_the_rest(text: str, ends: Any) -> None:
    pieces = [text[:end] for end in ends if end < len(text)] + [text]
    members: dict[str, Any] = {"name": "f", "id": "a"}
    assert said(first(pieces[0]), *(fragment(arguments=piece) for piece in pieces[1:])) == [PARIS]
    assert said(first(pieces[0]), *(fragment(arguments=piece, **members) for piece in pieces[1:])) == [PARIS]


@pytest.mark.parametrize("text", [NESTED, '{"a":[{"a":[{"b":1}]}]}', '{"{":1}'])
def test_repetitive_arguments_are_kept_however_they_are_split(text: str) -> None:
    for one in range(1, len(text)):
        for two in range(one, len(text)):
            pieces = [piece for piece in (text[:one], text[one:two], text[two:]) if piece]
            assert said(first(pieces[0]), *(fragment(arguments=piece) for piece in pieces[1:])) == [text], pieces


@pytest.mark.parametrize("text", [ENCODED, TWICE])
def test_an_object_encoded_as_a_string_is_decoded_however_it_is_split(text: str) -> None:
    for cut in range(1, len(text)):
        assert said(first(text[:cut]), fragment(arguments=text[cut:])) == [PARIS]


@pytest.mark.parametrize("text", ['"Paris"', "Paris", '"{not json}"', '"{', "{not json}{", "[1]", " "])
def test_arguments_that_are_no_object_are_left_unchanged(text: str) -> None:
    assert said(first(text)) == [text]
    assert said(first(text[:1]), *([fragment(arguments=text[1:])] if text[1:] else [])) == [text]


def test_a_truncated_call_is_not_completed_by_buffered_fragments() -> None:
    assert said(first('{"city":'), fragment(arguments='{"city":"Pa'), finish="length") == ['{"city":{"city":"Pa']


@given(st.dictionaries(st.text(max_size=5), json_values, min_size=1, max_size=3), cuts(), st.booleans())
def test_arguments_of_a_correct_server_are_kept_byte_for_byte(value: dict[str, Any], cut: Cut, spaced: bool) -> None:
    text = json.dumps(value, indent=1 if spaced else None)
    arguments = CallArguments()
    given = [piece for part in cut(text) for piece in (arguments.feed(part), arguments.take())[1]]
    assert arguments.end() == []
    assert "".join([*given, *arguments.take()]) == arguments.text == text
    assert arguments.is_whole


ODD = st.sampled_from(
    [*'{}"\\:,[] \nx1', "{}", '{"a":', '{"a":1}', '{"a":{"a":', PARIS, ENCODED, TWICE, '"{}"', "<|x|>", "null"]
)


@given(st.lists(st.tuples(st.booleans(), st.lists(ODD, min_size=1, max_size=3).map("".join)), max_size=7))
def test_the_deltas_add_up_to_the_arguments_and_complete_arguments_are_an_object(pieces: list[tuple[bool, str]]) -> None:
    arguments, given, written = CallArguments(), list[str](), ""
    for is_repeated, piece in pieces:
        was_whole, sent = arguments.is_whole, written + piece if is_repeated else piece
        written += sent
        assert all(map(parse_arguments, arguments.feed(sent)))
        given += arguments.take()
        assert arguments.is_whole >= was_whole
    arguments.end()
    assert "".join([*given, *arguments.take()]) == arguments.text
    assert not arguments.is_whole or parse_arguments(arguments.text) is not None
