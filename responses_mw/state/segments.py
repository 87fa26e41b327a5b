"""Read histories, and single items by id, from stored turns. A segment is a list of turns, which are only added at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..ids import RANDOM_LENGTH
from ..lua import load
from ..threads import by_size
from .client import Call, Client
from .errors import Missing, OverBound
from .schema import Address, conversation_key, item_address, json_size, reading, unpack, unpack_turns
from .values import Item, Pointer, StoredTurn

[_RESOLVE] = load("state", "resolve")

IDS_AT_ONCE = 100  # maximum number of ids in one script call
CALLS_AT_ONCE = 8
"""Maximum number of calls in one round trip. Each reads at most one turn."""


async def read_turns(client: Client, address: Address, pointer: Pointer, *, max_memory: int) -> list[StoredTurn]:
    """Return all turns up to `pointer`, or an empty list if a turn was deleted or lost.

    Raises OverBound if they take more than `max_memory` bytes of memory.
    """
    with reading("response"):
        ranges = pointer.ranges
    replies = await client.pipeline([("LRANGE", address.segment(name), 0, length - 1) for name, length in ranges])
    if any(len(blobs) != length for blobs, (_, length) in zip(replies, ranges, strict=True)):
        return []
    turns = [blob for blobs in replies for blob in blobs]
    return await by_size(sum(json_size(turn, RANDOM_LENGTH) for turn in turns), unpack_turns, turns, max_memory)


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
