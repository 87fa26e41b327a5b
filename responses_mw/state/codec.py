"""How JSON is stored in Redis.

    J<json>             as it is
    Z<size>:<frame>     compressed by Zstandard; <size> is the length of the JSON in decimal
    <random><either>    a turn: the random part of its response's id, then {"input": [...], "output": [...]}

A batch of events is compressed with a dictionary of what most of them have in common (``pack_events``): a delta of 240 bytes
takes 30.

Only 4 KiB or more are compressed (level 1: smaller than zlib, in a quarter of the time). Large texts shrink to half or less,
and they fill a Redis; compressing short turns would save half a kilobyte each and slow a long chain down by more than all its
round trips. The size comes first so that scripts can bound the JSON instead of its compressed form, which for repetitive text
is almost nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import orjson
import zstandard

from ..ids import RANDOM_LENGTH
from ..threads import MAX_INLINE_BYTES
from .errors import Damaged, NewerRecord
from .values import Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .values import Item

__all__ = [
    "compress",
    "decompress",
    "json_size",
    "pack",
    "pack_events",
    "pack_turn",
    "turn_owner",
    "turn_text",
    "unpack",
    "unpack_events",
    "unpack_turn",
    "unpack_turns",
]

COMPRESS_FROM = 4096
PLAIN, COMPRESSED = b"JZ"


_NO_JSON = (ValueError, LookupError, TypeError, zstandard.ZstdError)


# Stands for the common part of all ids of a response. It is in no JSON text.
_ID = b"\0"
# The beginnings and ends of frequent events, the most frequent last. Logs are read with the dictionary that they were written
# with: another one needs another name for its entries.
_FREQUENT = zstandard.ZstdCompressionDict(
    b"".join(
        b'event: response.%b.delta\ndata: {"type":"response.%b.delta","item_id":"%b_\x001",'
        b'"output_index":0,%b,"sequence_number":1' % (kind, kind, prefix, rest)
        for kind, prefix, rest in (
            (b"mcp_call_arguments", b"mcp", b'"delta":""'),
            (b"function_call_arguments", b"fc", b'"delta":""'),
            (b"reasoning_summary_text", b"rs", b'"summary_index":0,"delta":""'),
            (b"reasoning_text", b"rs", b'"content_index":0,"delta":""'),
            (b"output_text", b"msg", b'"content_index":0,"delta":"","logprobs":[]'),
        )
    ),
    zstandard.DICT_TYPE_RAWCONTENT,
)
_FREQUENT.precompute_compress(level=1)  # a tenth of the time for each batch


class _Zstandard(threading.local):
    """Compressors by thread: making one costs more than using it, and none may be shared between threads."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=1).compress
        self.decompress = zstandard.ZstdDecompressor().decompress
        self.compress_events = zstandard.ZstdCompressor(dict_data=_FREQUENT).compress
        self.decompress_events = zstandard.ZstdDecompressor(dict_data=_FREQUENT).decompress


_zstandard = _Zstandard()


def pack(text: bytes) -> bytes:
    """Encode a JSON text."""
    if len(text) < COMPRESS_FROM:
        return b"J" + text
    return b"Z%d:" % len(text) + _zstandard.compress(text)


def compress(data: bytes) -> bytes:
    """Compress bytes as one frame of Zstandard."""
    return _zstandard.compress(data)


def decompress(frame: bytes) -> bytes:
    """Return the bytes in a frame. Raises ValueError."""
    try:
        return _zstandard.decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def pack_events(data: bytes, stem: str) -> bytes:
    """Compress a short batch of events of a response, whose ids begin with ``stem``; empty if it is to be stored as it is."""
    if len(data) > COMPRESS_FROM or _ID in data:
        return b""
    packed = _zstandard.compress_events(data.replace(stem.encode(), _ID))
    return packed if len(packed) < len(data) else b""


def unpack_events(packed: bytes, stem: str) -> bytes:
    """Return the batch that ``pack_events`` has compressed. Raises ValueError, also for what it would not have compressed."""
    try:
        if not 0 <= zstandard.frame_content_size(packed) <= COMPRESS_FROM:
            raise ValueError("the frame has another size than a short batch")
        return _zstandard.decompress_events(packed).replace(_ID, stem.encode())
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def unpack(blob: bytes) -> Any:
    """Decode a stored value. Raises NewerRecord for an unknown form, Damaged if it is not JSON."""
    try:
        return orjson.loads(_text(blob, 0))
    except _NO_JSON:
        raise Damaged("value") from None


def _text(blob: bytes, start: int) -> bytes | memoryview:
    """Return the JSON text stored in ``blob`` from ``start`` on."""
    form = blob[start]
    if form == PLAIN:
        return memoryview(blob)[start + 1 :]
    if form == COMPRESSED:
        frame = memoryview(blob)[blob.index(b":", start) + 1 :]
        if zstandard.frame_content_size(frame) != json_size(blob, start):  # the scripts have bounded that size
            raise ValueError("the frame has another size than its value")
        return _zstandard.decompress(frame)
    raise NewerRecord


def pack_turn(owner: str, items: Sequence[Item], output: Sequence[Item]) -> bytes:
    """Encode a turn, its input and output, of the response whose id ends in ``owner``."""
    return owner.encode() + pack(turn_text(items, output))


def turn_text(items: Sequence[Item], output: Sequence[Item]) -> bytes:
    """Return the JSON of a turn."""
    return orjson.dumps({"input": items, "output": output})


def turn_owner(turn: bytes) -> str:
    """Return the random part of the id of the response that wrote the stored ``turn``."""
    return turn[:RANDOM_LENGTH].decode()


def unpack_turn(turn: bytes) -> Turn:
    """Decode a stored turn."""
    return unpack_turns([turn])[0]


def unpack_turns(turns: Sequence[bytes]) -> list[Turn]:
    """Decode stored turns. Raises NewerRecord for an unknown form, Damaged if one is not a turn."""
    try:
        return _turns(turns)
    except _NO_JSON:
        raise Damaged("history") from None


def _turns(turns: Sequence[bytes]) -> list[Turn]:
    # Their JSON is parsed in one piece: hundreds of short texts one by one take twice as long.
    texts = [_text(turn, RANDOM_LENGTH) for turn in turns]
    if sum(map(len, texts)) > MAX_INLINE_BYTES:  # in pieces, it can be interrupted between them
        values = [orjson.loads(text) for text in texts]
    else:
        values = orjson.loads(b"[%b]" % b",".join(texts))
    return [
        Turn(turn_owner(turn), value["input"], value["output"], len(text))
        for turn, value, text in zip(turns, values, texts, strict=True)
    ]


def json_size(blob: bytes, start: int = 0) -> int:
    """Return the length of the JSON stored in ``blob`` from ``start`` on."""
    if blob[start : start + 1] == b"Z":
        return int(blob[start + 1 : start + 16].partition(b":")[0])
    return len(blob) - start - 1
