"""Calls in a stream: when their arguments are complete, which call a fragment belongs to, and how many there may be."""

from __future__ import annotations

import itertools

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.errors import UpstreamError
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
def test_arguments_are_whole_as_soon_as_they_are_an_object_however_they_are_cut(text: str, cuts: list[int], rest: str) -> None:
    text += rest
    calls = ToolCalls()
    calls.feed({"index": 0, "function": {"name": "f"}})
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for begin, end in itertools.pairwise(places):
        calls.feed({"index": 0, "function": {"arguments": text[begin:end]}})
        assert calls.calls[0].is_whole() == (parse_arguments(text[:end]) is not None)


def test_an_index_may_be_any_number() -> None:
    calls = ToolCalls()
    for index in (10**9, 2**63, -1, 10**9):
        calls.feed({"index": index, "id": f"c{index}", "function": {"name": "f", "arguments": "1"}})
    assert [call.arguments for call in calls.calls] == ["11", "1", "1"]


def test_a_turn_has_only_so_many_calls() -> None:
    fragments = [{"index": index, "function": {"name": "f"}} for index in range(MAX_CALLS + 1)]
    assert len(ToolCalls().feed(fragments[:-1])) == MAX_CALLS
    with pytest.raises(UpstreamError, match="more than 512 calls"):
        ToolCalls().feed(fragments)
