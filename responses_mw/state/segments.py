"""Read histories, and single items by id, from stored turns. Recently read histories are cached in memory.

A segment is a list of turns. Turns are only appended to it, or removed from its end. Reading begins with the last cached turn.
If it still belongs to the same response, all turns before it are unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..ids import RANDOM_LENGTH
from ..lua import load
from ..threads import by_size
from .client import Call, Client
from .errors import Missing, OverBound
from .schema import Address, conversation_key, item_address, json_size, reading, turn_owner, unpack, unpack_turns
from .values import Item, Pointer, StoredTurn

[_RESOLVE] = load("state", "resolve")

FORGOTTEN_AFTER = 600.0
"""Seconds without a read after which a conversation is evicted, because another process may have deleted its turns."""
TURN_OVERHEAD = 2048  # memory overhead of a turn, in bytes
IDS_AT_ONCE = 100  # maximum number of ids in one script call
CALLS_AT_ONCE = 8
"""Maximum number of calls in one round trip. Each reads at most one turn."""


@dataclass(slots=True)
class _Known:
    """The cached turns of a conversation: the first turns of each segment."""

    read_at: float = 0.0
    size: int = 0
    segments: dict[str, list[StoredTurn]] = field(default_factory=dict)


class Segments:
    """Reads turns, and caches up to `recent_bytes` of them. If that is 0, there is no cache.

    The least recently read conversation is evicted first.
    """

    def __init__(self, client: Client, *, recent_bytes: int, max_memory: int) -> None:
        """`max_memory` limits the bytes of memory that the turns of one history take."""
        self._client = client
        self._max_memory = max_memory
        self._max_bytes = recent_bytes
        self._size = 0
        self._recent: dict[str, _Known] = {}  # conversations by tag, with the most recently read one last

    async def turns(self, address: Address, pointer: Pointer) -> list[StoredTurn]:
        """Return all turns up to `pointer`, or an empty list if a turn was deleted or lost. The turns must not be changed.

        Raises OverBound if they take too much memory.
        """
        with reading("response"):
            ranges = pointer.ranges
        known = self._recent.get(address.tag, _Known()).segments
        beginnings = [known.get(name, [])[:length] for name, length in ranges]
        found = await self._read(address, ranges, beginnings)
        if found is None and any(beginnings):  # the end of a segment was cut off and replaced
            self.forget(address.tag)
            found = await self._read(address, ranges, [[] for _ in ranges])
        if found is None:
            return []
        self._keep(address.tag, {name: turns for (name, _), turns in zip(ranges, found, strict=True)})
        return [turn for turns in found for turn in turns]

    def forget(self, tag: str) -> None:
        """Evict the conversation with this tag."""
        known = self._recent.pop(tag, None)
        if known is not None:
            self._size -= known.size

    async def _read(
        self, address: Address, ranges: Sequence[tuple[str, int]], beginnings: Sequence[list[StoredTurn]]
    ) -> list[list[StoredTurn]] | None:
        """Return the turns of each segment, or None if a segment is too short or its cached `beginnings` are outdated."""
        parts = [(name, max(len(known) - 1, 0), length) for (name, length), known in zip(ranges, beginnings, strict=True)]
        replies = await self._client.pipeline(
            [("LRANGE", address.segment(name), start, length - 1) for name, start, length in parts]
        )
        found, left = list[list[StoredTurn]](), self._max_memory
        for (_, start, length), turns, blobs in zip(parts, beginnings, replies, strict=True):
            if len(blobs) != length - start or (turns and turn_owner(blobs[0]) != turns[-1].owner):
                return None
            fresh = blobs[bool(turns) :]
            size = sum(json_size(blob, RANDOM_LENGTH) for blob in fresh)
            left -= sum(turn.memory for turn in turns)
            decoded = await by_size(size, unpack_turns, fresh, left)
            left -= sum(turn.memory for turn in decoded)
            found.append(turns + decoded)
        return found

    def _keep(self, tag: str, segments: dict[str, list[StoredTurn]]) -> None:
        known = self._recent.pop(tag, None) or _Known()
        self._recent[tag] = known
        known.read_at = time.monotonic()
        for name, turns in segments.items():
            before = known.segments.get(name, [])
            if len(turns) > len(before) or before[len(turns) - 1].owner != turns[-1].owner:
                known.segments[name] = turns
        size = sum(turn.memory + TURN_OVERHEAD for turns in known.segments.values() for turn in turns)
        self._size += size - known.size
        known.size = size
        for oldest in list(self._recent):
            if self._size <= self._max_bytes and self._recent[oldest].read_at >= known.read_at - FORGOTTEN_AFTER:
                break
            self.forget(oldest)


async def resolve(client: Client, item_ids: Iterable[str], owner: str, *, max_bytes: int) -> dict[str, Item]:
    """Return the owner's stored items with these ids, as a mapping from id to item.

    For each item that a response created, the whole turn of the response is read. Raises Missing if an item does not exist, or
    OverBound if these turns and items exceed `max_bytes` of JSON.
    """
    wanted = list(dict.fromkeys(item_ids))
    groups: dict[Address, list[str]] = {}
    for item_id in wanted:
        groups.setdefault(item_address(item_id), []).append(item_id)
    calls = [(of, ids[at : at + IDS_AT_ONCE], not at) for of, ids in groups.items() for at in range(0, len(ids), IDS_AT_ONCE)]
    made: dict[Address, dict[str, Item]] = {address: {} for address in groups}
    found: dict[str, Item] = {}
    left = max_bytes
    for begin in range(0, len(calls), CALLS_AT_ONCE):
        some = calls[begin : begin + CALLS_AT_ONCE]
        asked: list[Call] = [
            # The first call for a response reads its turn.
            ([address.record, conversation_key(address.tag)], [owner, left, int(is_first), *ids])
            for address, ids, is_first in some
        ]
        replies = await client.scripts(_RESOLVE, asked)
        for (address, ids, _), reply in zip(some, replies, strict=True):
            size = 0 if reply == b"bound" else _size(reply)
            left -= size
            if reply == b"bound" or left < 0:
                raise OverBound(f"The responses with the referenced items have more than {max_bytes} bytes.", param="input")
            found |= await by_size(size, _items, address, ids, reply, made[address])
    return {item_id: found[item_id] for item_id in wanted}


def _size(reply: Sequence[bytes | None]) -> int:
    turn, *blobs = reply
    return (json_size(turn, RANDOM_LENGTH) if turn else 0) + sum(json_size(blob) for blob in blobs if blob)


def _items(address: Address, ids: Sequence[str], reply: Sequence[bytes | None], made: dict[str, Item]) -> dict[str, Item]:
    """Return a mapping from ids to the items in a reply. If the reply contains the response's turn, add its items to `made`."""
    blob, *blobs = reply
    for turn in unpack_turns([blob]) if blob is not None else []:
        if turn.owner == address.random:
            made |= {item["id"]: item for item in [*turn.input, *turn.output] if item.get("id")}
    found = {}
    for item_id, stored in zip(ids, blobs, strict=True):
        item = made.get(item_id) or (unpack(stored) if stored is not None else None)
        if item is None:
            raise Missing("Item", item_id)
        found[item_id] = item
    return found
