"""The items that ``item_reference`` items name: found by their ids alone, in batches that hold nobody up.

An id tells the response that the item was made in, and the conversation. A response's turn comes whole, however little of it is
wanted: so what comes is bounded in bytes, as a chain is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..ids import RANDOM_LENGTH
from ..threads import by_size
from .codec import json_size, unpack, unpack_turn
from .errors import Missing, OverBound
from .keys import Address, conversation_key, item_address
from .scripts import script

if TYPE_CHECKING:
    from .client import Client
    from .values import Item

__all__ = ["resolve"]

IDS_AT_ONCE = 100
"""Of one call of the script."""
CALLS_AT_ONCE = 8
"""Each brings a turn at the most."""

_RESOLVE = script("resolve")


class _Call(NamedTuple):
    """Some items of one response, or of the conversation with its tag. Its turn comes with the first of its calls."""

    address: Address
    item_ids: Sequence[str]
    brings_turn: bool


async def resolve(client: Client, item_ids: Iterable[str], owner: str, *, most_bytes: int) -> dict[str, Item]:
    """The stored items, by id. Raises Missing for one that is nowhere, OverBound where more than ``most_bytes`` of JSON would
    have to be read."""
    wanted = list(dict.fromkeys(item_ids))
    calls = list(_calls(wanted))
    turns: dict[Address, dict[str, Item]] = {}
    found: dict[str, Item] = {}
    left = most_bytes
    for begin in range(0, len(calls), CALLS_AT_ONCE):
        some = calls[begin : begin + CALLS_AT_ONCE]
        replies = await client.scripts(_RESOLVE, [_asked(call, owner, left) for call in some])
        for call, reply in zip(some, replies, strict=True):
            size = 0 if reply == b"bound" else _size(reply)
            left -= size
            if reply == b"bound" or left < 0:
                raise OverBound(f"The items that are referred to stand among more than {most_bytes} bytes.", param="input")
            found |= await by_size(size, _items, call, reply, turns.setdefault(call.address, {}))
    return {item_id: found[item_id] for item_id in wanted}


def _calls(item_ids: Sequence[str]) -> Iterator[_Call]:
    groups: dict[Address, list[str]] = {}
    for item_id in item_ids:
        address = item_address(item_id)
        if address is None:
            raise Missing("Item", item_id)
        groups.setdefault(address, []).append(item_id)
    for address, ids in groups.items():
        for begin in range(0, len(ids), IDS_AT_ONCE):
            yield _Call(address, ids[begin : begin + IDS_AT_ONCE], brings_turn=not begin)


def _asked(call: _Call, owner: str, most_bytes: int) -> tuple[Sequence[str], Sequence[str | int]]:
    """Keys and arguments of the script."""
    keys = [call.address.record, conversation_key(call.address.tag)]
    return keys, [owner, most_bytes, int(call.brings_turn), *call.item_ids]


def _size(reply: Sequence[bytes | None]) -> int:
    """Bytes of the JSON in it."""
    turn, *blobs = reply
    return (json_size(turn, RANDOM_LENGTH) if turn else 0) + sum(json_size(blob) for blob in blobs if blob)


def _items(call: _Call, reply: Sequence[bytes | None], made: dict[str, Item]) -> dict[str, Item]:
    """The items of one call; ``made`` are those of the turn, once that has come."""
    blob, *blobs = reply
    turn = unpack_turn(blob) if blob is not None else None
    if turn is not None and turn.owner == call.address.random:
        made |= {item["id"]: item for item in [*turn.input, *turn.output] if item.get("id")}
    found = {}
    for item_id, stored in zip(call.item_ids, blobs, strict=True):
        item = made.get(item_id) or (unpack(stored) if stored is not None else None)
        if item is None:
            raise Missing("Item", item_id)
        found[item_id] = item
    return found
