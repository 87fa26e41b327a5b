"""Find the text of a custom tool or a program in the arguments of a call, wherever the model has put it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import orjson

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_HALF = re.compile("[\ud800-\udfff]")


def text_in(arguments: str, name: str) -> str:
    """Return the text in `arguments`, which should be a JSON object with the string `name`.

    If there is only one other string, or only a list of lines, that is the text. A JSON string is the text, too. Other
    arguments are the text themselves, so that nothing the model wrote is lost. The text of an empty object is empty.

    >>> text_in('{"patch": "a"}', "input")
    'a'
    """
    value = _parse(arguments)
    if value == {}:
        return ""
    text = _text_of(_value_of(value, name))
    return arguments if text is None else _HALF.sub("\ufffd", text)


def _value_of(value: Any, name: str) -> Any:
    """Return the value of the member `name`, or of the only member, also in objects within objects."""
    while isinstance(value, dict) and (value.get(name) or len(value) == 1):
        value = value.get(name) or next(iter(value.values()))
    return value


def _text_of(value: Any) -> str | None:
    if isinstance(value, list) and value and all(isinstance(line, str) for line in value):
        return "\n".join(line.removesuffix("\n") for line in value)
    texts = list(_strings(value))
    filled = [text for text in texts if text]
    if len(filled) == 1 or (texts and not filled):
        return (filled or texts)[0]
    return None


def _strings(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, (dict, list)):
            waiting.extend(one.values() if isinstance(one, dict) else one)


def _parse(arguments: str) -> Any:
    """Parse JSON in which strings may contain raw line breaks, and backslashes that begin no escape. Return None for others."""
    if arguments.lstrip()[:1] not in ("{", "[", '"'):
        return None if arguments else {}
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(_ESCAPE.sub(_repaired, arguments), strict=False)
    except (ValueError, RecursionError):
        return None


def _repaired(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] in '"\\/bfnrtu' else "\\" + escape[0]
