"""How JSON is stored in Redis.

    J<json>             uncompressed
    Z<size>:<frame>     compressed by Zstandard; <size> is the length of the JSON in decimal
    <random><either>    a turn: the random part of its response's id, then {"input": [...], "output": [...]} in either form

A batch of events is compressed with a dictionary of frequent events (``pack_events``): a delta of 240 bytes takes 30.

Only values of 4 KiB or more are compressed (level 1: smaller than with zlib, in a quarter of the time). They take most of the
memory, and shrink to half or less. Compressing short turns would save half a kilobyte each, but slow a long chain down by
more than the time of all its round trips. The size comes first so that scripts can limit the size of the JSON: the compressed
form of a repetitive text is tiny.
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
# A block of Zstandard takes at least 4 bytes and has at most 128 KiB of content.
MAX_RATIO = 128 * 1024 // 4

_NO_JSON = (ValueError, LookupError, TypeError)


# Replaces the common part of all ids of a response. No JSON text contains it.
_ID = b"\0"
# The beginnings and ends of frequent events, the most frequent last. Stored logs can be read only with the dictionary that they
# were written with, so another dictionary needs another field in a log's entries.
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
_FREQUENT.precompute_compress(level=1)  # reduces the time for each batch to a tenth


class _Zstandard(threading.local):
    """The compressors of a thread: creating one costs more than using it, and threads must not share one."""

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


def decompress(frame: bytes | memoryview) -> bytes:
    """Decompress one frame of Zstandard. Raises ValueError, without allocating memory if its size cannot be true."""
    try:
        if not 0 <= zstandard.frame_content_size(frame) <= MAX_RATIO * len(frame):
            raise ValueError("the frame is shorter than its content could be, or does not state the size of its content")
        return _zstandard.decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def pack_events(data: bytes, stem: str) -> bytes:
    """Compress a short batch of events whose ids contain ``stem``. Return ``b""`` if it should be stored uncompressed."""
    if len(data) > COMPRESS_FROM or _ID in data:
        return b""
    packed = _zstandard.compress_events(data.replace(stem.encode(), _ID))
    return packed if len(packed) < len(data) else b""


def unpack_events(packed: bytes, stem: str) -> bytes:
    """Return the batch that ``pack_events`` compressed.

    Raises ValueError, including for a batch that ``pack_events`` would not have compressed.
    """
    try:
        if not 0 <= zstandard.frame_content_size(packed) <= COMPRESS_FROM:
            raise ValueError("the frame is too large for a short batch, or does not state its size")
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
        if zstandard.frame_content_size(frame) != json_size(blob, start):  # the scripts limit that size
            raise ValueError("the size of the frame does not match its value")
        return decompress(frame)
    raise NewerRecord


def pack_turn(owner: str, items: Sequence[Item], output: Sequence[Item]) -> bytes:
    """Encode a turn: the input ``items`` and the ``output`` of the response whose id ends in ``owner``."""
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
    # Parse the JSON in one piece: parsing hundreds of short texts one by one takes twice as long.
    texts = [_text(turn, RANDOM_LENGTH) for turn in turns]
    if sum(map(len, texts)) > MAX_INLINE_BYTES:  # in pieces: other threads can run in between
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
