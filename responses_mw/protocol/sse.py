"""Encode and decode server-sent events.

Decoding follows the WHATWG HTML specification (section 9.2.6, "Interpreting an event stream"), with these additions:

- A byte order mark is ignored at the beginning of any frame, not only of the stream.
- An unterminated frame at the end of the stream is decoded.
- A field `error: {...}` becomes the data `{"error": {...}}`. Old llama.cpp reports errors in this field.
- An event with the name `error` becomes such data too, whatever its data is. Without data, its comment is the error (Dynamo).
- JSON objects without a field name are data. Each one begins at the beginning of a line. Servers behind gateways send errors in
  this form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import orjson

from ..errors import UpstreamError
from .types import Event

DONE = b"[DONE]"
DONE_FRAME = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
MAX_FRAME = 64 * 1024 * 1024  # maximum size of an incomplete frame in bytes

_BOM = b"\xef\xbb\xbf"


class SSEDecoder:
    """An incremental decoder. Its work is linear in the length of a frame, even if the frame arrives in many reads."""

    __slots__ = ("_after_cr", "_pending")

    def __init__(self) -> None:
        self._pending = bytearray()
        self._after_cr = False

    @property
    def is_between_frames(self) -> bool:
        """Whether the next read begins a new frame."""
        return not (self._pending or self._after_cr)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of frames completed by a read. Raises `UpstreamError` if an incomplete frame exceeds `MAX_FRAME`."""
        if _is_one_frame(data) and self.is_between_frames:
            return [data[6:-2]]
        if data and (self._after_cr or b"\r" in data):
            data = self._unify(data)
        if self._pending:
            searched = len(self._pending) - 1  # the two line breaks that end a frame may arrive in two reads
            self._pending += data
            data = self._take_pending() if self._pending.find(b"\n\n", searched) >= 0 else b""
        *blocks, rest = data.split(b"\n\n")
        self._pending += rest
        if len(self._pending) > MAX_FRAME:
            raise UpstreamError(f"The upstream sent a frame of more than {MAX_FRAME} bytes.")
        return [payload for block in blocks for payload in _payloads(block) if payload]

    def flush(self) -> list[bytes]:
        """Return the data of an unterminated frame at the end of the stream, if any."""
        return [payload for payload in _payloads(self._take_pending()) if payload]

    def _take_pending(self) -> bytes:
        whole = bytes(self._pending)
        self._pending.clear()
        return whole

    def _unify(self, data: bytes) -> bytes:
        """Replace CRLF and CR with LF. If a CRLF is split between two reads, drop its LF from the second read."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _is_one_frame(data: bytes) -> bool:
    """Return whether a read consists of one `data: ...` line and a blank line. While tokens stream, most reads do."""
    end = len(data) - 2
    return end > 6 and data.startswith(b"data: ") and data.find(b"\n") == end and data.endswith(b"\n") and b"\r" not in data


def _payloads(block: bytes) -> list[bytes]:
    """Return the data of a frame, which is one piece unless JSON without a field name stands beside it."""
    if block.startswith(b"data: ") and b"\n" not in block:  # nearly every frame of nearly every server
        return [block[6:]]
    fields: dict[bytes, list[bytes]] = {}
    bare: list[bytes] = []
    block = block.removeprefix(_BOM)
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name in _FIELDS:
            fields.setdefault(name, []).append(value.removeprefix(b" "))
        else:
            bare.append(line)
    objects = _objects(bare)
    data = _data(fields)
    return [*objects, data] if block.lstrip().startswith(b"{") else [data, *objects]


_FIELDS = frozenset({b"data", b"event", b"error", b"id", b"retry", b""})  # a comment begins with a colon


def _data(fields: dict[bytes, list[bytes]]) -> bytes:
    data = b"\n".join(fields.get(b"data", ()))
    if fields.get(b"event", [b""])[-1].strip().lower() == b"error":
        return b'{"object":"error",%b' % _error(data or b"\n".join(fields.get(b"", ())))[1:]
    errors = [_error(value) for value in fields.get(b"error", ())]
    return b"\n".join([data, *errors] if data else errors)


def _error(text: bytes) -> bytes:
    """Return an error object for `text`, which is JSON or plain text."""
    text = text.strip()
    is_json = text.startswith((b"{", b"[", b'"'))
    return b'{"error":%b}' % (text if is_json else orjson.dumps(text.decode(errors="replace")))


def _objects(lines: list[bytes]) -> list[bytes]:
    """Return the JSON objects in `lines`. Other lines are ignored, as the specification requires."""
    objects: list[list[bytes]] = []
    for line in lines:
        if line.startswith(b"{") or (not objects and line.lstrip().startswith(b"{")):
            objects.append([line])
        elif objects:
            objects[-1].append(line)
    return [b"\n".join(one).strip() for one in objects]


def frame(event: str, data: bytes) -> bytes:
    """Encode one frame. `data` is JSON without line breaks."""
    return _head(event) + data + b"\n\n"


@lru_cache(maxsize=256)  # saves a tenth of the CPU per token at full speed (benchmarks, flat-out)
def _head(event: str) -> bytes:
    return b"event: %b\ndata: " % event.encode()


# -- the events of a response, as clients receive them and job logs store them -------------------------------------------------


def encode(events: Iterable[Event]) -> bytes:
    """Encode events as consecutive frames."""
    return b"".join([_head(event.type) + orjson.dumps(event.data) + b"\n\n" for event in events])


def split_delta(template: dict[str, Any]) -> tuple[bytes, bytes]:
    """Split the frame of a delta into the bytes before its text and those between its text and its number.

    In `template`, `delta` is empty, and the last member is `sequence_number`, which is 0.
    """
    name = b'"delta":"'
    before, after = encode((Event(template["type"], template),)).split(name)
    return before + name, after.removesuffix(b"0}\n\n")


def decode(frames: bytes) -> Iterator[dict[str, Any]]:
    """Decode frames made by `encode`. Return an iterator over the data of the events."""
    return (orjson.loads(block.partition(b"\ndata: ")[2]) for block in frames.split(b"\n\n") if block)


def skip(frames: bytes, count: int) -> bytes:
    """Return `frames`, made by `encode`, without the first `count` frames."""
    return b"\n\n".join(frames.split(b"\n\n")[count:])
