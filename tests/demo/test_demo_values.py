"""Values for JSON schemas: right in type whatever the schema, and from the text where the text has them."""

from __future__ import annotations

from typing import Any

import pytest

from responses_mw.demo.model import fill


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"const": 7}, "", 7),
        ({"enum": ["red", "blue"]}, "I like Blue", "blue"),
        ({"enum": ["red", "blue"]}, "I like green", "red"),
        ({"type": "integer"}, "there are 12 of them", 12),
        ({"type": "integer", "minimum": 5, "maximum": 9}, "there are 12", 9),
        ({"type": "integer", "exclusiveMinimum": 5}, "none", 6),
        ({"type": "number"}, "it is -2.5 degrees", -2.5),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "none", 0.5),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, "there are 12", 1),
        ({"type": "boolean"}, "It works", True),
        ({"type": "null"}, "anything", None),
        ({"type": ["string", "null"]}, "in Rome", "Rome"),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "4 words", 4),
        ({"type": "string", "maxLength": 3}, "we met Alexandra", "Ale"),
        ({"type": "string", "minLength": 6}, "we met Al", "Al...."),
        ({"type": "array", "items": {"type": "integer"}}, "1, 2 and 3", [1, 2, 3]),
        ({"type": "array", "items": {"type": "string"}, "minItems": 2}, "only Rome", ["Rome", "Rome"]),
        ({"type": "array", "items": {"enum": ["a1", "b2"]}, "minItems": 1}, "b2", ["b2"]),
        ({"type": "array", "items": {"type": "string"}}, "", []),
    ],
)
def test_a_value_has_the_schema_s_type_and_comes_from_the_text(schema: dict[str, Any], text: str, value: Any) -> None:
    assert fill(schema, text) == value


def test_only_required_properties_are_filled_where_the_schema_names_them() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["b"]}
    assert fill(schema, "1 2") == {"b": 1}


def test_a_recursive_schema_ends_where_it_may() -> None:
    node = {
        "type": "object",
        "properties": {
            "value": {"type": "integer"},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
        },
        "required": ["value", "next", "children"],
    }
    value = fill({"$ref": "#/$defs/node", "$defs": {"node": node}}, "1 2 3")
    assert value["next"]["value"] == 2
    assert value["children"][0]["value"] in (1, 2, 3)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#"},
        {"type": "object", "properties": {"self": {"$ref": "#"}}},
        {"enum": []},
        {"anyOf": "text"},
        {"type": "object", "properties": [1]},
        {"type": "string", "maxLength": "three"},
        {"type": "array", "items": 3},
    ],
)
def test_a_schema_without_a_value_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises((AttributeError, LookupError, TypeError, ValueError)):
        fill(schema, "some text")
