"""Filters on the attributes of files: which files pass, and which filters are invalid."""

from __future__ import annotations

from typing import Any

import pytest

from responses_mw.errors import BadRequest
from responses_mw.files.filters import MAX_PARTS, parse_filter

FILE: dict[str, str | float | bool] = {"region": "eu", "year": 2024, "draft": True, "score": 0.5}


def compare(kind: str, key: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "key": key, "value": value}


@pytest.mark.parametrize(
    ("given", "passes"),
    [
        (compare("eq", "region", "eu"), True),
        (compare("eq", "region", "us"), False),
        (compare("eq", "draft", True), True),
        (compare("eq", "draft", 1), False),
        (compare("eq", "year", "2024"), False),
        (compare("eq", "none", "x"), False),
        (compare("ne", "region", "us"), True),
        (compare("ne", "none", "x"), True),
        (compare("gt", "year", 2023), True),
        (compare("gt", "year", 2024), False),
        (compare("gte", "year", 2024), True),
        (compare("lt", "score", 1), True),
        (compare("lte", "score", 0.4), False),
        (compare("gt", "region", "de"), True),
        (compare("gt", "region", 1), False),
        (compare("lt", "draft", 5), False),
        (compare("lt", "none", 5), False),
        (compare("in", "region", ["us", "eu"]), True),
        (compare("in", "year", [1, "2024"]), False),
        (compare("nin", "region", ["us"]), True),
        (compare("nin", "none", ["us"]), True),
        ({"type": "and", "filters": [compare("eq", "region", "eu"), compare("gt", "year", 2030)]}, False),
        ({"type": "or", "filters": [compare("eq", "region", "us"), compare("eq", "year", 2024)]}, True),
        ({"type": "and", "filters": []}, True),
    ],
)
def test_a_filter_accepts_exactly_the_files_that_match(given: dict[str, Any], *, passes: bool) -> None:
    assert parse_filter(given, "filters")(FILE) is passes


def nested(depth: int) -> dict[str, Any]:
    one = compare("eq", "a", 1)
    for _ in range(depth):
        one = {"type": "and", "filters": [one]}
    return one


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "filters"),
        ({}, "filters.type"),
        ({"type": "like", "key": "a", "value": 1}, "filters.type"),
        ({"type": "eq", "value": 1}, "filters.key"),
        ({"type": "eq", "key": "a"}, "filters.value"),
        (compare("eq", "a", [1]), "filters.value"),
        (compare("gt", "a", True), "filters.value"),
        (compare("in", "a", 1), "filters.value"),
        (compare("in", "a", [{}]), "filters.value[0]"),
        ({"type": "or", "filters": [compare("eq", "a", 1), 5]}, "filters.filters[1]"),
        (nested(8), "filters" + ".filters[0]" * 8),
        ({"type": "or", "filters": [compare("eq", "a", 1)] * MAX_PARTS}, f"filters.filters[{MAX_PARTS - 1}]"),
        ({"type": "or", "filters": [{"type": "and", "filters": []}] * MAX_PARTS}, f"filters.filters[{MAX_PARTS - 1}]"),
    ],
)
def test_an_invalid_filter_is_refused(given: Any, param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_filter(given, "filters")
    assert raised.value.param == param


def test_the_time_of_an_in_filter_does_not_depend_on_the_number_of_values() -> None:
    compared = 0

    class Counted(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    passes = parse_filter(compare("in", "region", [f"region {number}" for number in range(256)]), "filters")
    assert not passes({"region": Counted("none")})
    assert passes({"region": Counted("region 7")})
    assert compared <= 2
