"""Define the names of keys (see docs/inside/architecture.md), and encode and decode values.

Documents, jobs, items and turns are stored as JSON:

    J<json>                    uncompressed
    Z<size>:<frame>            compressed by Zstandard; <size> is the size of the JSON in bytes, which scripts count and limit
    <random>J... or Z...       a turn: the random part of the response's id, then {"input": [...], "output": [...]}
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import orjson
import zstandard

from ..ids import RANDOM_LENGTH, TAG_LENGTH
from ..protocol.json_limits import memory_bound
from ..protocol.types import Item
from ..tasks import MAX_INLINE_BYTES
from .errors import Damaged, Missing, NewerRecord, OverBound
from .models import StoredTurn

VERSION = 1
"""Version of the records that this release writes. Changes within a version are additive. Higher versions are refused."""
COMPRESS_FROM = 4096
"""Minimum size in bytes of a JSON text or an event log that is compressed.

Compressing a shorter turn would save half a kilobyte, but decompressing all turns of a long chain would take longer than the
chain's round trips.
"""

# Only these characters are allowed in key names, because a brace would change the slot.
_TAG = rf"([a-z0-9]{{{TAG_LENGTH}}})"
_RANDOM = rf"([a-z0-9]{{{RANDOM_LENGTH}}})"

# -- keys ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """The keys of a response, derived from the `tag` and the `random` part of its id."""

    tag: str
    random: str

    @property
    def record(self) -> str:
        return f"rmw:{{{self.tag}}}:r:{self.random}"

    @property
    def tombstone(self) -> str:
        return f"rmw:{{{self.tag}}}:x:{self.random}"

    @property
    def log(self) -> str:
        return f"rmw:{{{self.tag}}}:e:{self.random}"

    @property
    def credential(self) -> str:
        return f"rmw:{{{self.tag}}}:k:{self.random}"

    @property
    def capture(self) -> str:
        return f"rmw:{{{self.tag}}}:t:{self.random}"

    @property
    def events(self) -> str:
        return f"rmw:{{{self.tag}}}:ev:{self.random}"

    def segment(self, name: str) -> str:
        return f"rmw:{{{self.tag}}}:s:{name}"


def response_address(response_id: str) -> Address:
    """Return the address of the response `resp_<tag><random>`. Raises Missing if the id has a different form."""
    return Address(*_parts(f"resp_{_TAG}{_RANDOM}", "Response", response_id))


def item_address(item_id: str) -> Address:
    """Return the address of the response that created the item `<prefix>_<tag><random><n>`.

    Raises Missing if the id has a different form.
    """
    return Address(*_parts(f"[a-z]+_{_TAG}{_RANDOM}[0-9]{{1,6}}", "Item", item_id))


def conversation_tag(conversation_id: str) -> str:
    """Return the tag of the conversation `conv_<tag>`. Raises Missing if the id has a different form."""
    return _parts(f"conv_{_TAG}", "Conversation", conversation_id)[0]


def _parts(pattern: str, kind: str, object_id: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, object_id)
    if match is None:
        raise Missing(kind, object_id)
    return match.groups()


def conversation_key(tag: str) -> str:
    return f"rmw:{{{tag}}}:c"


QUEUE = "rmw:{q2}:ready"
"""Key of the queue of background responses. The scripts derive the queue's other keys. `2` is the version of the queue."""
INGESTION_QUEUE = "rmw:{qf1}:ready"
"""Key of the queue of files to ingest, which has the same form."""
OLD_QUEUES = tuple(f"rmw:{{q1p{number}}}:ready" for number in range(8))
"""Keys of the queues of older releases."""

RECENT_SHARDS = 4
"""Number of streams that the summaries of responses are distributed over."""
CAPTURE_LIST = "rmw:{captures}:keys"
REPLICAS = "rmw:{replicas}:beats"


def recent_key(shard: int) -> str:
    return f"rmw:{{recent{shard}}}:summaries"


def ended_session_key(session_id: str) -> str:
    return f"rmw:{{ui}}:ended:{session_id}"


def stop_channel(worker: str) -> str:
    return f"rmw:{{w{worker}}}:stop"


_KINDS = (
    (re.compile(r"rmw:\{[a-z0-9]+\}:r:"), "response"),
    (re.compile(r"rmw:\{[a-z0-9]+\}:s:"), "history"),
    (re.compile(r"rmw:\{[a-z0-9]+\}:e:"), "event log"),
    (re.compile(r"rmw:\{[a-z0-9]+\}:c\b"), "conversation"),
    (re.compile(r"rmw:\{qf?\d+\}:"), "queue"),
    (re.compile(r"rmw:\{f[^}]+\}:(files|d:)"), "file"),
    (re.compile(r"rmw:\{f[^}]+\}:(vs|of:)"), "vector store"),
    (re.compile(r"rmw:\{v[a-z0-9]+\}:(b:|c:|ib|i\d)"), "content of a vector store"),
    (re.compile(r"rmw:\{recent\d+\}:"), "list of recent responses"),
    (re.compile(r"rmw:\{replicas\}:"), "list of replicas"),
    (re.compile(r"rmw:\{[a-z0-9]+\}:t:|rmw:\{captures\}"), "capture"),
    (re.compile(r"rmw:\{[lb][^}]+\}:(rate|streams|background|expires|sizes)$"), "account of an owner"),
)


def check_version(version: bytes) -> None:
    """Raise NewerRecord if a record's `version` is higher than this release supports, or Damaged if it is not a number."""
    with reading("record"):
        if int(version) > VERSION:
            raise NewerRecord


def kind_of(key: str) -> str:
    """Return a noun for the value at `key`, for logs and error messages."""
    return next((kind for pattern, kind in _KINDS if pattern.match(key)), "value")


# -- values --------------------------------------------------------------------------------------------------------------

_PLAIN, _COMPRESSED = b"JZ"
# A block of Zstandard takes at least 4 bytes and has at most 128 KiB of content.
_MAX_RATIO = 128 * 1024 // 4
_NO_JSON = (ValueError, LookupError, TypeError, zstandard.ZstdError)


@contextmanager
def reading(kind: str) -> Iterator[None]:
    """Convert decoding errors in the `with` block to Damaged. `kind` names the value that is read."""
    try:
        yield
    except _NO_JSON:
        raise Damaged(kind) from None


class _Zstandard(threading.local):
    """A compressor and a decompressor for each thread. They are slow to create, and threads must not share them."""

    def __init__(self) -> None:
        # Level 1 gives smaller results than zlib in a quarter of the time.
        self.compress = zstandard.ZstdCompressor(level=1).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_zstandard = _Zstandard()


def compress(data: bytes) -> bytes:
    """Compress `data` into one Zstandard frame."""
    return _zstandard.compress(data)


def decompress(frame: bytes | memoryview) -> bytes:
    """Decompress one Zstandard frame.

    Raises ValueError if the frame is invalid, or if the content size in its header is missing or impossible.
    """
    try:
        if not 0 <= zstandard.frame_content_size(frame) <= _MAX_RATIO * len(frame):  # checked before memory is allocated
            raise ValueError("the frame states no size, or an impossible size")
        return _zstandard.decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def pack(text: bytes) -> bytes:
    """Encode a JSON text for storage. Texts of at least `COMPRESS_FROM` bytes are compressed."""
    if len(text) < COMPRESS_FROM:
        return b"J" + text
    return b"Z%d:" % len(text) + compress(text)


def unpack(blob: bytes) -> Any:
    """Decode a stored value. Raises NewerRecord if its form is unknown, or Damaged if its content is malformed."""
    with reading("value"):
        return orjson.loads(_text(blob, 0))


def _text(blob: bytes, start: int) -> bytes | memoryview:
    """Return the JSON of the value at index `start`. Raises NewerRecord, or one of `_NO_JSON` if the value is damaged."""
    form = blob[start]
    if form == _PLAIN:
        return memoryview(blob)[start + 1 :]
    if form == _COMPRESSED:
        frame = memoryview(blob)[blob.index(b":", start) + 1 :]
        if zstandard.frame_content_size(frame) != json_size(blob, start):  # scripts limit the stated size
            raise ValueError("the size of the frame does not match its value")
        return decompress(frame)
    raise NewerRecord


def item_blobs(items: Sequence[Item], texts: Iterable[bytes]) -> list[str | bytes]:
    """Return the id and the encoded form of each item, in one flat list. `texts` are the items as JSON."""
    return [part for item, text in zip(items, texts, strict=True) for part in (item["id"], pack(text))]


def json_size(blob: bytes, start: int = 0) -> int:
    """Return the size of the JSON in the value at index `start` of `blob`, in bytes. Raises Damaged if it states none."""
    if blob[start : start + 1] == b"Z":
        with reading("value"):
            return int(blob[start + 1 : start + 16].partition(b":")[0])
    return len(blob) - start - 1


def pack_turn(random: str, items: Sequence[Item], output: Sequence[Item]) -> bytes:
    """Encode a turn for storage. `random` is the random part of the response's id."""
    return random.encode() + pack(turn_text(items, output))


def turn_text(items: Sequence[Item], output: Sequence[Item]) -> bytes:
    return orjson.dumps({"input": items, "output": output})


def turn_random(turn: bytes) -> str:
    """Return the random part of the id of the response that wrote the stored `turn`."""
    return turn[:RANDOM_LENGTH].decode()


class MemoryBudget:
    """A limit on the memory that the decoded values of a history may use, in bytes."""

    def __init__(self, maximum: float = inf) -> None:
        self._left = maximum

    def checked(self, values: Iterable[Any], texts: Sequence[bytes | memoryview]) -> Iterator[Any]:
        """Yield the `values`, which are decoded from `texts`. Raises OverBound when their memory exceeds the budget."""
        for value, text in zip(values, texts, strict=True):
            self._left -= memory_bound(value, bytes(text))
            if self._left < 0:
                raise OverBound("The history takes too much memory, because it has too many small values.")
            yield value


def unpack_items(blobs: Sequence[bytes], budget: MemoryBudget) -> list[Item]:
    """Decode stored items. Raises the same errors as `unpack`, or OverBound if the items exceed `budget`."""
    with reading("value"):
        texts = [_text(blob, 0) for blob in blobs]
        return list(budget.checked(map(orjson.loads, texts), texts))


def unpack_turns(turns: Sequence[bytes], budget: MemoryBudget) -> list[StoredTurn]:
    """Decode stored turns. Raises the same errors as `unpack_items`."""
    with reading("history"):
        # Parse all texts together, because parsing hundreds of short texts one by one takes twice as long.
        texts = [_text(turn, RANDOM_LENGTH) for turn in turns]
        if sum(map(len, texts)) > MAX_INLINE_BYTES:  # one by one, so that other threads can run in between
            values = map(orjson.loads, texts)
        else:
            values = orjson.loads(b"[%b]" % b",".join(texts))
        return [
            StoredTurn(turn_random(turn), value["input"], value["output"], len(text))
            for turn, text, value in zip(turns, texts, budget.checked(values, texts), strict=True)
        ]


def milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
