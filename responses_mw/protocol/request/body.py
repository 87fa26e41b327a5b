"""Decode JSON from a client within limits.

1. Decoded JSON can take forty times the memory of its text (``[[],[],...]``), and decoding cannot be interrupted. If a
   body is long enough to hold too many values, they are counted in the text first, in a hundredth of the time.
2. Nesting is limited, because later code may recurse, here and in the upstream.
3. The decoder refuses invalid JSON and Unicode (``NaN``, infinite numbers, lone surrogates). Integers over 64 bits become
   decimals. If a member is repeated, the last one counts.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import orjson

from ...errors import BadRequest, TooLarge
from . import checks

_CHUNK_SIZE = 1 << 20
_LARGE = 64 * 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request.

    ``tools`` includes nested tools and the tools in input items. ``values`` counts all members and elements.
    """

    items: int = 10_000
    tools: int = 1024
    depth: int = 64
    values: int = 1_000_000


def decode(data: bytes, limits: RequestLimits, what: str = "the JSON body of your request") -> Any:
    """Decode ``data``. Raise ``BadRequest`` if it is not JSON, ``TooLarge`` if it exceeds the limits."""
    if len(data) > limits.values and has_more_values(data, limits.values):
        raise TooLarge(f"The request has more than {limits.values} values.", code="request_too_many_values")
    try:
        value = loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"We could not parse {what}: {error}.", code="invalid_json") from None
    if isinstance(value, dict | list):
        checks.depth(value, limits.depth)
    return value


def loads(data: bytes) -> Any:
    """Decode JSON, with the garbage collector off for large documents.

    While it decodes, the collector would traverse all objects several times, which takes ten times as long as decoding.
    Decoded JSON has no cycles to collect.
    """
    if len(data) <= _LARGE:
        return orjson.loads(data)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(data)
    finally:
        if was_enabled:
            gc.enable()


def has_more_values(data: bytes, maximum: int) -> bool:
    """Whether the JSON text has more than ``maximum`` members and elements. Empty lists and objects count as one."""
    if _openings(data) <= maximum:
        return False  # even if none of these bytes is in a string
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    count, in_string = 0, 0
    for begin in range(0, len(data), _CHUNK_SIZE):
        pieces = data[begin : begin + _CHUNK_SIZE].split(b'"')
        count += _openings(b"".join(pieces[in_string::2]))
        if count > maximum:
            return True
        in_string ^= (len(pieces) - 1) & 1
    return False


def _openings(data: bytes) -> int:
    """Count the bytes that begin a value or precede one."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")
