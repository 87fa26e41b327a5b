"""Resolve ``item_reference`` items by their ids, in batches that do not block Redis or the event loop.

An item's id contains the random part of the response that made it, and the tag of its conversation. A response's turn is always
read whole, so the number of bytes to read has a maximum: the same as for a history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..ids import RANDOM_LENGTH
from ..threads import by_size
from .errors import Missing, OverBound
from .schema import Address, conversation_key, item_address, json_size, unpack, unpack_turns
from .scripts import script

if TYPE_CHECKING:
    from .client import Client
    from .values import Item

__all__ = ["resolve"]

IDS_AT_ONCE = 100
"""Maximum number of ids in one call of the script."""
CALLS_AT_ONCE = 8
"""Maximum number of calls in one round trip. Each reads at most one turn."""

_RESOLVE = script("resolve")


class _Call(NamedTuple):
    """A lookup of items that a response made, or that are in the conversation with its tag."""

    address: Address
    item_ids: Sequence[str]
    reads_turn: bool
    """Whether to read the response's turn. Only the first call for a response does."""


async def resolve(client: Client, item_ids: Iterable[str], owner: str, *, max_bytes: int) -> dict[str, Item]:
    """Return the stored items with these ids, by id.

    Raises Missing for an unknown item, and OverBound if more than ``max_bytes`` of JSON would have to be read.
    """
    wanted = list(dict.fromkeys(item_ids))
    calls = list(_calls(wanted))
    turns: dict[Address, dict[str, Item]] = {}
    found: dict[str, Item] = {}
    left = max_bytes
    for begin in range(0, len(calls), CALLS_AT_ONCE):
        some = calls[begin : begin + CALLS_AT_ONCE]
        replies = await client.scripts(_RESOLVE, [_asked(call, owner, left) for call in some])
        for call, reply in zip(some, replies, strict=True):
            size = 0 if reply == b"bound" else _size(reply)
            left -= size
            if reply == b"bound" or left < 0:
                raise OverBound(f"The referenced items are in turns of more than {max_bytes} bytes in total.", param="input")
            found |= await by_size(size, _items, call, reply, turns.setdefault(call.address, {}))
    return {item_id: found[item_id] for item_id in wanted}


def _calls(item_ids: Sequence[str]) -> Iterator[_Call]:
    groups: dict[Address, list[str]] = {}
    for item_id in item_ids:
        groups.setdefault(item_address(item_id), []).append(item_id)
    for address, ids in groups.items():
        for begin in range(0, len(ids), IDS_AT_ONCE):
            yield _Call(address, ids[begin : begin + IDS_AT_ONCE], reads_turn=not begin)


def _asked(call: _Call, owner: str, max_bytes: int) -> tuple[Sequence[str], Sequence[str | int]]:
    """Return the keys and arguments of the script."""
    keys = [call.address.record, conversation_key(call.address.tag)]
    return keys, [owner, max_bytes, int(call.reads_turn), *call.item_ids]


def _size(reply: Sequence[bytes | None]) -> int:
    """Return the bytes of JSON in a reply."""
    turn, *blobs = reply
    return (json_size(turn, RANDOM_LENGTH) if turn else 0) + sum(json_size(blob) for blob in blobs if blob)


def _items(call: _Call, reply: Sequence[bytes | None], made: dict[str, Item]) -> dict[str, Item]:
    """Return the items of one call. ``made`` collects the items of the response's turn, which the first call reads."""
    blob, *blobs = reply
    turn = unpack_turns([blob])[0] if blob is not None else None
    if turn is not None and turn.owner == call.address.random:
        made |= {item["id"]: item for item in [*turn.input, *turn.output] if item.get("id")}
    found = {}
    for item_id, stored in zip(call.item_ids, blobs, strict=True):
        item = made.get(item_id) or (unpack(stored) if stored is not None else None)
        if item is None:
            raise Missing("Item", item_id)
        found[item_id] = item
    return found
