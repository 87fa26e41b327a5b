"""The JSON of a client, decoded within bounds: what it costs is known before it is spent.

1. JSON grows as it is decoded: ``[[],[],...]`` takes forty times its bytes in memory, and decoding cannot be interrupted. So
   values are counted in the text first, where there could be too many of them: that takes a hundredth of the time.
2. What comes later may recurse, here and in the upstream: so the nesting is bounded.
3. The decoder refuses what is no JSON or no Unicode (``NaN``, infinite numbers, lone surrogates); integers of more than 64 bits
   become decimals; of a member that occurs twice the last counts.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import orjson

from ...errors import BadRequest, TooLarge
from . import checks

_AT_ONCE = 1 << 20
_LARGE = 64 * 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much one request may hold. ``tools`` are all of them, wherever they stand; ``values`` all members and elements."""

    items: int = 10_000
    tools: int = 1024
    depth: int = 64
    values: int = 1_000_000


def decode(data: bytes, limits: RequestLimits, what: str = "the JSON body of your request") -> Any:
    """The value that is written in ``data``. Raises ``BadRequest`` where that is no JSON, ``TooLarge`` where it is too much."""
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
    """``orjson.loads``, without the collector where much is decoded: it would go through all there is several times meanwhile,
    in ten times the time that the decoding takes, and what is decoded has no cycles."""
    if len(data) <= _LARGE:
        return orjson.loads(data)
    was_on = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(data)
    finally:
        if was_on:
            gc.enable()


def has_more_values(data: bytes, maximum: int) -> bool:
    """Whether the JSON text has more than ``maximum`` members and elements in all. Empty lists and objects count as one."""
    if _openings(data) <= maximum:
        return False  # even if none of these bytes stood in a string
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    found, within = 0, 0
    for begin in range(0, len(data), _AT_ONCE):
        pieces = data[begin : begin + _AT_ONCE].split(b'"')
        found += _openings(b"".join(pieces[within::2]))
        if found > maximum:
            return True
        within ^= (len(pieces) - 1) & 1
    return False


def _openings(data: bytes) -> int:
    """The bytes that each begin a value, or go before one."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")
