"""Calls in a stream: when their arguments are complete, which call a fragment belongs to, and how many there may be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from responses_mw.errors import UpstreamError
from responses_mw.protocol.chat.call_names import OfferedNames
from responses_mw.protocol.chat.tool_calls import MAX_CALLS, ToolCalls
from responses_mw.protocol.tool_kinds.form import parse_arguments

values = st.recursive(
    st.none() | st.text(alphabet='a"\\{}[]é\n', max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(alphabet='b"\\{}', max_size=2), inner, max_size=2),
    max_leaves=4,
)
texts = st.dictionaries(st.sampled_from("ab"), values).map(lambda value: orjson.dumps(value).decode()) | st.text(
    alphabet='{}"\\[]:, a1', max_size=12
)


@given(text=texts, cuts=st.lists(st.integers(0, 40)), rest=st.sampled_from(["", "", " \n", "}", "{}", "x"]))
def test_arguments_are_complete_as_soon_as_they_are_an_object_however_they_are_split(
    text: str, cuts: list[int], rest: str
) -> None:
    assume(not any(text[end:].strip() and parse_arguments(text[:end]) is not None for end in range(len(text))))
    calls = ToolCalls(OfferedNames())
    calls.feed({"index": 0, "function": {"name": "f"}})
    pieces = [text[begin:end] for begin, end in _cuts(text, cuts)]
    so_far = ""
    for piece in pieces:
        assume(not (so_far and piece.startswith(so_far)))  # a repetition
        calls.feed({"index": 0, "function": {"arguments": piece}})
        so_far += piece
        assert calls.calls[0].is_whole() == bool(parse_arguments(so_far))
    if parse_arguments(text):
        calls.feed({"index": 0, "function": {"arguments": rest}})
        assert calls.calls[0].is_whole()
        assert calls.calls[0].arguments == text.rstrip()


def _cuts(text: str, cuts: list[int]) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(sorted({0, len(text), *(cut for cut in cuts if cut < len(text))}))


def test_the_index_of_a_call_can_be_any_number() -> None:
    calls = ToolCalls(OfferedNames())
    for index in (10**9, 2**63, -1, 10**9):
        calls.feed({"index": index, "id": f"c{index}", "function": {"name": "f", "arguments": "1"}})
    assert [call.arguments for call in calls.calls] == ["11", "1", "1"]


def test_the_number_of_calls_in_a_turn_is_limited() -> None:
    fragments = [{"index": index, "function": {"name": "f"}} for index in range(MAX_CALLS + 1)]
    assert len(ToolCalls(OfferedNames()).feed(fragments[:-1])) == MAX_CALLS
    with pytest.raises(UpstreamError, match="more than 512 calls"):
        ToolCalls(OfferedNames()).feed(fragments)
