"""Regular expressions of grammars as JSON Schema patterns."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_mw.protocol.tool_kinds.client_defined import MAX_LENGTH, as_pattern

TIMESTAMP = (
    r"^(?P<month>January|February)\s+(?P<day>\d{1,2})(?:st|nd|rd|th)?\s+(?P<year>\d{4})\s+at\s+"
    r"(?P<hour>0?[1-9]|1[0-2])(?P<ampm>AM|PM)$"
)


@pytest.mark.parametrize(
    ("expression", "pattern"),
    [
        ("[a-z]+", "^([a-z]+)$"),
        ("a|b", "^(a|b)$"),
        ("^a|b$", "^(a|b)$"),
        (r"a\$", r"^(a\$)$"),
        (r"\d+(?:\.\d{2})?", r"^([0-9]+(\.[0-9]{2})?)$"),
        (r"[\w.-]+@[\w-]+", "^([0-9A-Za-z_.-]+@[0-9A-Za-z_-]+)$"),
        (r"[\d\s+*/()^-]+", "^([0-9 +*/()^-]+)$"),
        (r"[a\-z\]]", r"^([az\]-])$"),
        ("[|a||]", "^([|a])$"),
        ("é{2}", "^(é{2})$"),
        (
            TIMESTAMP,
            "^((January|February) +([0-9]{1,2})(st|nd|rd|th)? +([0-9]{4}) +at +(0?[1-9]|1[0-2])(AM|PM))$",
        ),
    ],
)
def test_a_regular_expression_is_converted_to_a_portable_pattern(expression: str, pattern: str) -> None:
    assert as_pattern(expression) == pattern


@pytest.mark.parametrize("expression", [".*", "[^a]", 'a"b', r"a\\b", r"\n", "a\nb", "[A-z]", "[!-~]", r"[\x00-\x1f]", "[ -~]"])
def test_expressions_that_match_characters_escaped_in_json_have_no_pattern(expression: str) -> None:
    assert as_pattern(expression) is None


@pytest.mark.parametrize(
    "expression",
    ["(?i)a", "a*?", "a++", r"\bfoo", r"\p{L}", "(?=a)b", "(?<=a)b", "[a--b]", "[a&&b]", "[[:alpha:]]", r"(a)\1", "a^b", "[^]"],
)
def test_expressions_that_engines_read_differently_have_no_pattern(expression: str) -> None:
    assert as_pattern(expression) is None


@pytest.mark.parametrize(
    "expression", ["(a", "a)", "a**", "{3}", "[z-a]", "[", "a\\", "(" * 500 + ")" * 500, "a" * (MAX_LENGTH + 1)]
)
def test_malformed_or_too_long_expressions_have_no_pattern(expression: str) -> None:
    assert as_pattern(expression) is None


PIECES = [*"ab1 -^|()[]{}+*?.,$\\", r"\d", r"\s", "[a-f]", "(?:", "{2}", "{1,3}", "[^", '"', "&&"]


@given(expression=st.lists(st.sampled_from(PIECES), max_size=12).map("".join), data=st.data())
def test_text_that_matches_the_pattern_matches_the_expression_and_needs_no_escape(expression: str, data: st.DataObject) -> None:
    pattern = as_pattern(expression)
    if pattern is not None:
        text = data.draw(st.from_regex(pattern, fullmatch=True))
        assert re.fullmatch(expression, text.removesuffix("\n"))  # Python's $ lets a line end behind it
        assert not set(text.removesuffix("\n")) & set('"\\\n')
