"""The text within a call's arguments, read while it is being written."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.protocol.response.items import StringMember


def read(whole: str, cuts: list[int] | None = None) -> tuple[str, str]:
    """What the pieces gave, and what was missing at the end."""
    member = StringMember("input")
    places = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts or ())})
    given = "".join(member.feed(whole[start:end]) for start, end in pairwise(places))
    return given, member.rest(whole)


CUTS = st.lists(st.integers(0, 1000), max_size=8)
JSON_LIKE = st.text(st.sampled_from('{}":,\\u0d8Dcn input[]1\n\t😀'), max_size=40)


@given(st.text(), CUTS, st.booleans(), st.sampled_from([None, 2]))
def test_the_text_is_what_was_written_however_it_was_cut(text: str, cuts: list[int], escaped: bool, indent: int | None) -> None:
    whole = json.dumps({"input": text, "more": [1]}, ensure_ascii=escaped, indent=indent)
    assert read(whole, cuts) == (text, "")


@given(JSON_LIKE | JSON_LIKE.map('{{"input": "{}'.format), CUTS)
def test_what_is_no_json_is_read_the_same_however_it_was_cut(whole: str, cuts: list[int]) -> None:
    given, rest = read(whole, cuts)
    assert (given, rest) == read(whole)
    assert (given + rest).encode().decode() == given + rest  # no half of a pair is left


@given(st.text(min_size=1))
def test_every_piece_of_the_text_is_seen_at_once(text: str) -> None:
    member = StringMember("input")
    member.feed('{"input": "')
    for character in text:
        assert member.feed(json.dumps(character, ensure_ascii=False)[1:-1]) == character


@pytest.mark.parametrize(
    ("whole", "given", "rest"),
    [
        pytest.param('{"why": "x", "input": "a"}', "", "a", id="not the first member"),
        pytest.param("{not json", "", "{not json", id="no json"),
        pytest.param("print(1)", "", "print(1)", id="the text itself"),
        pytest.param('{"patch": "a"}', "", '{"patch": "a"}', id="another member"),
        pytest.param('{"input": 5}', "", '{"input": 5}', id="no text"),
        pytest.param("{}", "", "", id="nothing"),
        pytest.param("", "", "", id="nothing at all"),
        pytest.param('{"input": "a\nb"}', "a\nb", "", id="line break as it is"),
        pytest.param('{"input": "\\d+\\u12"}', "\\d+\\u12", "", id="no escapes"),
        pytest.param('{"input": "a\\ud83d"}', "a\ufffd", "", id="half a pair"),
        pytest.param('{"input": "a\\ud83d\\ud83d\\ude00"}', "a\ufffd😀", "", id="half a pair and a pair"),
        pytest.param('{"input": "a\\u00', "a", "\\u00", id="cut in an escape"),
        pytest.param('{"input": "a"} and more', "a", "", id="more after the object"),
    ],
)
def test_models_are_careless(whole: str, given: str, rest: str) -> None:
    assert read(whole) == (given, rest)
