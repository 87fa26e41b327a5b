"""Decode the JSON of upstreams. Its numbers may be infinite or not a number, as Python's `json` and C++ write them."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import orjson

from ..errors import UpstreamError
from ..protocol.json_limits import has_more_values
from ..tasks import loads

MAX_VALUES = 6_000_000
"""Maximum number of JSON values in a frame or a body, as in 30,000 tokens with 20 alternatives. Each takes 64 bytes."""
MAX_TEXT = 8 * 1024 * 1024
"""Maximum number of characters that a model may write in a turn: two million tokens. Encoding more would block others."""
_WRITTEN = ("choices", "output", "item", "part", "delta", "text", "arguments")
"""Members of chat chunks, responses and events that the model has written."""
NULL = b"null"
_LARGEST = b"9999.0"
"""The replacement for infinity. In OpenAI's log probabilities, -9999.0 stands for "very unlikely"."""
_NUMBERS = re.compile(
    rb"""
      " (?> (?: [^"\\]++ | \\. )* ) "
    | (?P<number> -? (?: infinity | inf | nan | [0-9][0-9.]*+ e \+? [0-9]{3,}+ ) \b )
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


class NotAnObject(UpstreamError):
    """A frame or a whole body is not a JSON object."""


class NotJSON(NotAnObject):
    """A frame or a whole body is not JSON."""


class Scalar(NotAnObject):
    """A frame or a whole body is null, a number, a string or a boolean."""


def check_values(data: bytes) -> None:
    """Raise `UpstreamError` if a JSON text has more than `MAX_VALUES` values. Decoding it would take too much memory."""
    if has_more_values(data, MAX_VALUES):
        raise UpstreamError(f"The upstream sent more than {MAX_VALUES} JSON values at once.")


def decoded(data: bytes, *, largest: bytes = _LARGEST) -> Any:
    """Decode the JSON in `data`. Infinite numbers become `largest` or its negative; with `null`, they become None, like NaN.

    Raises `NotJSON` if `data` is no JSON, and `UpstreamError` if it has too many values.
    """
    check_values(data)
    try:
        return loads(data)
    except orjson.JSONDecodeError as error:
        finite = _NUMBERS.sub(partial(_finite, largest), data)
        if finite == data:
            raise NotJSON("The upstream sent data that is not JSON.") from error
    try:
        return loads(finite)
    except orjson.JSONDecodeError as error:
        raise NotJSON("The upstream sent data that is not JSON.") from error


def check_text(size: int) -> None:
    """Raise `UpstreamError` if a model has written more than `MAX_TEXT` characters."""
    if size > MAX_TEXT:
        raise UpstreamError(f"The upstream's answer has more than {MAX_TEXT} characters of text.")


def _text_size(value: Any) -> int:
    """Return the number of characters of the strings in decoded JSON, without log probabilities."""
    size, left = 0, [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            left += [member for name, member in value.items() if name != "logprobs"]
        elif isinstance(value, list):
            left += value
    return size


def json_object(data: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises the errors of `decoded` and `check_text`, and `NotAnObject` if `data` is other JSON."""
    value = decoded(data)
    if not isinstance(value, dict):
        kind = NotAnObject if isinstance(value, list) else Scalar
        raise kind("The upstream sent JSON that is not an object.")
    if len(data) > MAX_TEXT:  # the text may be as long as that
        answer = value["response"] if isinstance(value.get("response"), dict) else value
        check_text(_text_size([answer.get(name) for name in _WRITTEN]))
    return value


def _finite(largest: bytes, number: re.Match[bytes]) -> bytes:
    """Replace a number that is infinite or not a number. Return strings and other numbers unchanged."""
    text = number["number"]
    if text is None:
        return number[0]
    value = float(text)
    if math.isnan(value) or (math.isinf(value) and largest == NULL):
        return NULL
    if math.isinf(value):
        return b"-" + largest if value < 0 else largest
    return text
