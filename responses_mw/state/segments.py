"""Read the turns of a history, and keep recently read turns in memory.

1. A segment is append-only, and only its end is ever trimmed. If its n-th turn still belongs to the same response, all turns
   before it are unchanged. Reading begins with the last known turn.
2. The caller has just read the response's record, which proves that the chain exists and who owns it.
3. Deleted text is never returned: the record is gone, or another response has its place in the segment. The process that
   deleted it removes it from memory at once. Other processes do so once the chain has not been read for ten minutes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ids import RANDOM_LENGTH
from ..threads import by_size
from .schema import json_size, turn_owner, unpack_turns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .client import Client
    from .schema import Address
    from .values import Pointer, Turn

__all__ = ["Segments"]

# Seconds without a read after which a conversation is removed from memory.
FORGOTTEN_AFTER = 600.0
# Memory overhead of a turn, in bytes.
TURN_OVERHEAD = 2048


@dataclass(slots=True)
class _Known:
    """The beginnings of one conversation's segments."""

    read_at: float = 0.0
    size: int = 0
    segments: dict[str, list[Turn]] = field(default_factory=dict)


class Segments:
    def __init__(self, client: Client, *, recent_bytes: int) -> None:
        """``recent_bytes`` limits the memory. The least recently read conversation is removed first."""
        self._client = client
        self._max_bytes = recent_bytes
        self._size = 0
        self._recent: OrderedDict[str, _Known] = OrderedDict()

    async def turns(self, address: Address, pointer: Pointer) -> list[Turn]:
        """Return all turns up to the pointer; an empty list if they have been deleted or lost since it was read.

        The items are shared between callers and must not be changed.
        """
        ranges = pointer.ranges
        known = self._recent.get(address.tag, _Known()).segments
        beginnings = [known.get(name, [])[:length] for name, length in ranges]
        found = await self._read(address, ranges, beginnings)
        if found is None and any(beginnings):  # the end of a segment was cut off and replaced
            self.forget(address.tag)
            found = await self._read(address, ranges, [[] for _ in ranges])
        if found is None:
            return []
        self._keep(address.tag, ((name, turns) for (name, _), turns in zip(ranges, found, strict=True)))
        return [turn for turns in found for turn in turns]

    def forget(self, tag: str) -> None:
        """Remove a conversation from memory."""
        known = self._recent.pop(tag, None)
        if known is not None:
            self._size -= known.size

    async def _read(
        self, address: Address, ranges: Sequence[tuple[str, int]], beginnings: Sequence[list[Turn]]
    ) -> list[list[Turn]] | None:
        """Return the segments up to their lengths; None if one is too short or does not continue its ``beginnings``."""
        starts = [max(len(turns) - 1, 0) for turns in beginnings]
        commands = [
            ("LRANGE", address.segment(name), start, length - 1) for (name, length), start in zip(ranges, starts, strict=True)
        ]
        found = []
        for (_, length), turns, blobs in zip(ranges, beginnings, await self._client.pipeline(commands), strict=True):
            if len(blobs) != length - max(len(turns) - 1, 0):
                return None
            if turns and turn_owner(blobs[0]) != turns[-1].owner:
                return None
            fresh = blobs[bool(turns) :]
            found.append(turns + await by_size(sum(json_size(blob, RANDOM_LENGTH) for blob in fresh), unpack_turns, fresh))
        return found

    def _keep(self, tag: str, segments: Iterable[tuple[str, list[Turn]]]) -> None:
        known = self._recent.setdefault(tag, _Known())
        self._recent.move_to_end(tag)
        known.read_at = time.monotonic()
        for name, turns in segments:
            before = known.segments.get(name, [])
            if len(turns) <= len(before) and before[len(turns) - 1].owner == turns[-1].owner:
                continue
            goes_on = bool(before) and len(turns) > len(before) and turns[len(before) - 1] is before[-1]
            more = _weight(turns[len(before) :]) if goes_on else _weight(turns) - _weight(before)
            known.segments[name] = turns
            known.size += more
            self._size += more
        while self._recent and (self._size > self._max_bytes or self._oldest_read < known.read_at - FORGOTTEN_AFTER):
            self.forget(next(iter(self._recent)))

    @property
    def _oldest_read(self) -> float:
        return next(iter(self._recent.values())).read_at


def _weight(turns: Sequence[Turn]) -> int:
    """Return the approximate memory of turns, in bytes."""
    return sum(turn.size + TURN_OVERHEAD for turn in turns)
