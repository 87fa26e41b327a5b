"""Decode JSON within limits on its values, its depth and the memory that the result takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from ..errors import BadRequest, TooLarge

_CHUNK_SIZE = 1 << 20
_MEMBER, _HOLDER = 64, 136  # memory in bytes of a member, and additional memory of an array or object


# Limits on the contents of a request, so that checking and converting a request is never too expensive.
MAX_ITEMS = 10_000  # items in `input`, and also messages and resulting items in `previous_input_messages`
MAX_TOOLS = 1024  # tools, including namespaces, nested tools, and tools in input items
MAX_DEPTH = 64  # nesting levels below the outermost array or object
MAX_VALUES = 1_000_000  # object members and array elements


def decode(data: bytes, what: str = "the JSON body of your request", *, loads: Callable[[bytes], Any] = orjson.loads) -> Any:
    """Decode JSON. Integers of more than 64 bits become floats. If the JSON is invalid, the error refers to it as `what`.

    `loads` decodes valid JSON.
    Raises `BadRequest` for invalid JSON, including `NaN` and lone surrogates, and `TooLarge` for too many values or levels.
    """
    # Decoding cannot be interrupted, and the result can take forty times the memory of the text. Counting is 100 times faster.
    if has_more_values(data, MAX_VALUES):
        raise TooLarge(f"The request has more than {MAX_VALUES} values.", code="request_too_many_values")
    try:
        value = loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"We could not parse {what}: {error}.", code="invalid_json") from None
    if isinstance(value, dict | list):
        depth(value, MAX_DEPTH)
    return value


def has_more_values(data: bytes, maximum: int) -> bool:
    """Return whether a JSON text has more than `maximum` values (see `count_values`)."""
    # The first two conditions are quick upper bounds. The exact count excludes brackets and commas in strings.
    return len(data) > maximum and _openings(data) > maximum and count_values(data) > maximum


def count_values(data: bytes) -> int:
    """Return the number of members and elements of a JSON text. An empty array or object counts as if it had one."""
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    count, in_string = 0, 0
    for begin in range(0, len(data), _CHUNK_SIZE):
        pieces = data[begin : begin + _CHUNK_SIZE].split(b'"')
        count += _openings(b"".join(pieces[in_string::2]))
        in_string ^= (len(pieces) - 1) & 1
    return count


def _openings(data: bytes) -> int:
    return len(data) - len(data.translate(None, b",[{"))  # twice as fast as three calls of `count`


def depth(value: Any, limit: int) -> None:
    """Raise `TooLarge` if an array or object is more than `limit` levels below `value`. Deep nesting breaks recursive code."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            member
            for holder in level
            for member in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(member, dict | list)
        ]
        if not level:
            return
    raise TooLarge(f"The request is nested deeper than {limit} levels.", code="request_too_deep")


def memory_bound(value: Any, text: bytes) -> int:
    """Return an upper bound on `memory(value, len(text))`.

    The bound is computed from the brackets and commas in `text`. If it exceeds four times the length of `text`, return the
    exact value instead.
    """
    bound = len(text) + (_HOLDER + _MEMBER) * _openings(text)
    return bound if bound <= 4 * len(text) else memory(value, len(text))  # brackets and commas may be in strings


def memory(value: Any, size: int) -> int:
    """Estimate the memory in bytes of `value`, an array or object decoded from `size` bytes of JSON."""
    level = [value]
    while level:
        members = [member for holder in level for member in (holder.values() if isinstance(holder, dict) else holder)]
        size += _HOLDER * len(level) + _MEMBER * len(members)
        level = [member for member in members if isinstance(member, dict | list)]
    return size
