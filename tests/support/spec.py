"""Validate values against the Open Responses specification: required members, types, and nulls where none are allowed.

`open_responses.txt` is the table: `## Schema` with a line for each member (`*` for the required ones), `Name :: type`
for an alias. A type is a word, `[type]` for a list, `enum[...]`, or `any/one/all(type | type)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
    "null": type(None),
    "any": object,
}

Schema = dict[str, tuple[bool, str]]


def _read() -> tuple[dict[str, Schema], dict[str, str]]:
    schemas: dict[str, Schema] = {}
    names: dict[str, str] = {}
    current: Schema = {}
    for line in (Path(__file__).parent / "open_responses.txt").read_text().splitlines():
        if line.startswith("## "):
            current = schemas[line[3:].strip()] = {}
        elif " :: " in line:
            name, _, expression = line.partition(" :: ")
            names[name] = expression.strip()
        elif not line.startswith("#"):
            name, _, expression = line.partition(" : ")
            current[name.strip(" *")] = ("*" in name, expression.partition(" default=")[0].strip())
    return schemas, names


SCHEMAS, NAMES = _read()
# OpenAI's annotation for a citation of a file, which the specification lacks.
SCHEMAS["FileCitationBody"] = {
    "type": (True, 'enum["file_citation"]'),
    **dict.fromkeys(("file_id", "filename"), (True, "string")),
    "index": (True, "integer"),
}
NAMES["Annotation"] = "one(UrlCitationBody | FileCitationBody)"
EVENTS = {
    json.loads(schema["type"][1].removeprefix("enum"))[0]: name
    for name, schema in SCHEMAS.items()
    if name.endswith("StreamingEvent")
}


def faults(value: Any, expression: str, path: str = "") -> list[str]:
    """Return the faults of `value` as an `expression` of the table, each with its path."""
    if expression.startswith(("any(", "one(", "all(")):
        inner = expression[4:-1]
        found = [
            faults(value, one, path) for one in _alternatives(inner) if not (one == "any" and expression.startswith("all("))
        ]
        return min(found, key=len)
    if expression.startswith("["):
        if not isinstance(value, list):
            return [f"{path} is no list"]
        return [fault for n, member in enumerate(value) for fault in faults(member, expression[1:-1], f"{path}[{n}]")]
    if expression.startswith("enum["):
        return [] if value in json.loads(expression[4:]) else [f"{path} is {value!r}, not of {expression}"]
    if expression in WORDS:
        fits = isinstance(value, WORDS[expression]) and not (expression in ("integer", "number") and isinstance(value, bool))
        return [] if fits else [f"{path} is {value!r}, not {expression}"]
    if expression in NAMES:
        return faults(value, NAMES[expression], path)
    return _of_schema(value, SCHEMAS[expression], path)


def _of_schema(value: Any, schema: Schema, path: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{path} is {value!r}, no object"]
    if faults(value.get("type"), schema["type"][1] if "type" in schema else "any"):
        return [f"{path} is of type {value.get('type')!r}"] * 100  # another alternative is meant
    found = [f"{path}.{name} is missing" for name, (required, _) in schema.items() if required and name not in value]
    for name, (_, expression) in schema.items():
        if name in value:
            found += faults(value[name], expression, f"{path}.{name}")
    return found


def _alternatives(inner: str) -> list[str]:
    parts, depth, begin = [], 0, 0
    for position, letter in enumerate(inner):
        depth += (letter in "([") - (letter in ")]")
        if letter == "|" and depth == 0:
            parts.append(inner[begin:position].strip())
            begin = position + 1
    return [*parts, inner[begin:].strip()]
