"""What the WebSockets of this process keep in memory, bounded for each owner and for all owners together.

An owner makes room by its own oldest responses, never by another's: where others have filled the memory, it is refused more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import RateLimited
from ...state import Chain

__all__ = ["Block", "Memory", "Share", "UnstoredChain"]

# Bytes that each item and each turn of a held chain takes in the chain's own lists.
_POINTER = 8


class Block:
    """The items that one response adds to a history; all histories that contain them share them."""

    __slots__ = ("holders", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.holders = 0


@dataclass(frozen=True, slots=True)
class UnstoredChain(Chain):
    """A history that is, at least in part, stored nowhere: what continues it cannot be stored either."""

    blocks: Sequence[Block] = ()

    @property
    def own_size(self) -> int:
        """What it takes besides its blocks."""
        return _POINTER * (len(self.items) + len(self.blocks))


class _Held(NamedTuple):
    chain: UnstoredChain
    known: set[str]


class Memory:
    def __init__(self, *, owner_bytes: int, total_bytes: int) -> None:
        self.owner_bytes = owner_bytes
        self.total_bytes = total_bytes
        self.size = 0
        self._shares: dict[str, Share] = {}

    @contextmanager
    def share(self, owner: str) -> Iterator[Share]:
        """The share of an owner, for one connection."""
        share = self._shares.setdefault(owner, Share(self))
        share.connections += 1
        try:
            yield share
        finally:
            share.connections -= 1
            if not share.connections:
                del self._shares[owner]


class Share:
    """What one owner keeps: responses by id, the oldest first, and requests that wait for their turn."""

    def __init__(self, memory: Memory) -> None:
        self.connections = 0
        self._memory = memory
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._size = 0
        self._waiting = 0

    def get(self, response_id: str) -> UnstoredChain:
        """The history of a response that is kept, which is the newest from now on."""
        self._held.move_to_end(response_id)
        return self._held[response_id].chain

    def hold(self, response_id: str, chain: UnstoredChain, known: set[str]) -> None:
        """Keep a response if there is room for it. While it is kept, its id is among the ``known`` ones."""
        if not self._can_have(chain.own_size + sum(block.size for block in chain.blocks)):
            return
        self._held[response_id] = _Held(chain, known)
        known.add(response_id)
        self._grow(chain.own_size)
        for block in chain.blocks:
            if not block.holders:
                self._grow(block.size)
            block.holders += 1
        self._make_room(0)

    def evict(self, response_id: str) -> None:
        """Forget a response that is kept."""
        chain, known = self._held.pop(response_id)
        known.remove(response_id)
        self._grow(-chain.own_size)
        for block in chain.blocks:
            block.holders -= 1
            if not block.holders:
                self._grow(-block.size)

    def enter(self, size: int) -> None:
        """Count a request that waits. Raises `RateLimited`."""
        if not self._can_have(size):
            raise RateLimited("Too many requests wait for their turn on your connections.")
        self._make_room(size)
        self._waiting += size
        self._grow(size)

    def leave(self, size: int) -> None:
        """Count a request no more."""
        self._waiting -= size
        self._grow(-size)

    def _can_have(self, size: int) -> bool:
        """Whether there would be room for so many bytes if all that the owner holds were forgotten."""
        memory, wanted = self._memory, self._waiting + size
        return wanted <= memory.owner_bytes and memory.size - self._size + wanted <= memory.total_bytes

    def _make_room(self, size: int) -> None:
        memory = self._memory
        while self._size + size > memory.owner_bytes or memory.size + size > memory.total_bytes:
            self.evict(next(iter(self._held)))

    def _grow(self, size: int) -> None:
        self._size += size
        self._memory.size += size
