"""How JSON is laid down in Redis.

    J<json>             as it is
    Z<size>:<deflated>  deflated; <size> is the length of the JSON in decimal
    <random><either>    a turn: the random part of its response's id, then {"input": [...], "output": [...]}

Only what has 4 KiB or more is deflated (zlib, level 1). Large texts halve at least, and it is they that fill a Redis; a short
turn would save half a kilobyte and cost a long chain more time to read than all its round trips. The size stands in front, so
that the scripts can hold bounds on JSON, not on what it was deflated to: a thousandfold of one letter deflates to nothing.
"""

from __future__ import annotations

import zlib
from typing import Any

import orjson

from responses_mw.ids import RANDOM_LENGTH
from responses_mw.state.errors import NewerRecord

__all__ = ["json_size", "pack", "pack_turn", "turn_owner", "unpack", "unpack_turn"]

DEFLATE_FROM = 4096


def pack(text: bytes) -> bytes:
    """The stored form of a JSON text."""
    if len(text) < DEFLATE_FROM:
        return b"J" + text
    return b"Z%d:" % len(text) + zlib.compress(text, 1)


def unpack(blob: bytes, start: int = 0) -> Any:
    """The value whose JSON is stored in ``blob`` from ``start`` on; NewerRecord if it is in a form that is not known."""
    form, text = blob[start : start + 1], memoryview(blob)[start + 1 :]
    if form == b"J":
        return orjson.loads(text)
    if form == b"Z":
        deflated = memoryview(blob)[blob.index(b":", start) + 1 :]
        return orjson.loads(zlib.decompress(deflated, bufsize=json_size(blob, start)))
    raise NewerRecord


def pack_turn(random: str, text: bytes) -> bytes:
    """The stored form of a turn of the response whose id ends in ``random``; ``text`` is the turn's JSON."""
    return random.encode() + pack(text)


def turn_owner(turn: bytes) -> str:
    """The random part of the id of the response that wrote ``turn``."""
    return turn[:RANDOM_LENGTH].decode()


def unpack_turn(turn: bytes) -> dict[str, list[dict[str, Any]]]:
    """A stored turn's ``input`` and ``output``."""
    value: dict[str, list[dict[str, Any]]] = unpack(turn, RANDOM_LENGTH)
    return value


def json_size(blob: bytes, start: int = 0) -> int:
    """The length of the JSON that is stored in ``blob`` from ``start`` on."""
    if blob[start : start + 1] == b"Z":
        return int(blob[start + 1 : start + 16].partition(b":")[0])
    return len(blob) - start - 1
