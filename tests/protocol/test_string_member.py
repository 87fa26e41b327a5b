"""Reading a text within a call's arguments while they are streamed."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.protocol.response.items import StringMember


def read(whole: str, cuts: list[int] | None = None) -> tuple[str, str]:
    """Return the text in the pieces, and the text that was missing at the end."""
    member = StringMember("input")
    places = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts or ())})
    given = "".join(member.feed(whole[start:end]) for start, end in pairwise(places))
    return given, member.rest(whole)


CUTS = st.lists(st.integers(0, 1000), max_size=8)
JSON_LIKE = st.text(st.sampled_from('{}":,\\u0d8Dcn input[]1\n\t😀'), max_size=40)


@given(st.text(), CUTS, st.booleans(), st.sampled_from([None, 2]))
def test_the_text_is_decoded_however_it_is_split(text: str, cuts: list[int], escaped: bool, indent: int | None) -> None:
    whole = json.dumps({"input": text, "more": [1]}, ensure_ascii=escaped, indent=indent)
    assert read(whole, cuts) == (text, "")


@given(JSON_LIKE | JSON_LIKE.map('{{"input": "{}'.format), CUTS)
def test_invalid_json_is_read_the_same_however_it_is_split(whole: str, cuts: list[int]) -> None:
    given, rest = read(whole, cuts)
    assert (given, rest) == read(whole)
    assert (given + rest).encode().decode() == given + rest  # no half of a pair is left


@given(st.text(min_size=1))
def test_every_piece_of_the_text_is_returned_at_once(text: str) -> None:
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
        pytest.param('{"patch": "a"}', "", "a", id="another member"),
        pytest.param('{"input": "", "patch": "a"}', "", "a", id="another member after an empty text"),
        pytest.param('{"input": ""}', "", "", id="an empty text"),
        pytest.param('{"input": {"patch": "a"}}', "", "a", id="a member of an object"),
        pytest.param('{"input": {"input": "a", "why": "b"}}', "", "a", id="the member of an object"),
        pytest.param('{"arguments": {"input": "a"}, "n": 1}', "", "a", id="the only text"),
        pytest.param('{"patch": "a", "dry_run": true}', "", "a", id="the only text beside other values"),
        pytest.param('{"input": "", "patch": "", "n": 1}', "", "", id="two empty texts"),
        pytest.param('"a\\nb"', "", "a\nb", id="a JSON string"),
        pytest.param('"a" + "b"', "", '"a" + "b"', id="no JSON string"),
        pytest.param('{"input": ["a"]}', "", "a", id="a list"),
        pytest.param('{"input": ["a", "b\\n", "c"]}', "", "a\nb\nc", id="a list of lines"),
        pytest.param('["a", "b"]', "", "a\nb", id="only a list of lines"),
        pytest.param('{"input": [{"text": "a"}]}', "", "a", id="a list of parts"),
        pytest.param('{"patch": "a", "path": "b"}', "", '{"patch": "a", "path": "b"}', id="two texts"),
        pytest.param('{"input": [1, "a", "b"]}', "", '{"input": [1, "a", "b"]}', id="a list of texts and others"),
        pytest.param("[1, 2]", "", "[1, 2]", id="no text in a list"),
        pytest.param("42", "", "42", id="a number"),
        pytest.param('{"patch": "a\nb\\d\\\\"}', "", "a\nb\\d\\", id="another member with raw line breaks"),
        pytest.param('{"patch": "a\\ud83d"}', "", "a\ufffd", id="another member with half a pair"),
        pytest.param("[" * 5000 + '"a"' + "]" * 5000, "", "[" * 5000 + '"a"' + "]" * 5000, id="too deep"),
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
def test_common_mistakes_of_models_are_tolerated(whole: str, given: str, rest: str) -> None:
    assert read(whole) == (given, rest)
