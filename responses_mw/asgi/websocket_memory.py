"""Memory for the unstored responses of WebSocket connections.

A response with `store: false` can be continued only by the connection that created the response (OpenAI reference, "WebSocket
mode"). It is evicted when its connection is closed or its continuation fails. It is also evicted when newer responses or
waiting requests of its owner need the memory. The memory is limited for each owner and for all owners together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import orjson

from ..auth import Gate
from ..engine.history import History, RunContext
from ..errors import BadRequest, RateLimited
from ..protocol.json_limits import memory
from ..protocol.request.create import CreateResponse
from ..protocol.types import Document, Item
from ..state import Chain, State
from ..tasks import by_size
from ..telemetry.context import annotate
from ..telemetry.metrics import WEBSOCKETS_OPEN

_POINTER = 8
"""Memory in bytes of a list entry."""


@dataclass(eq=False, slots=True)
class Block:
    """The memory of the items that one response adds to a history: `size` bytes. It is shared by `holders` histories."""

    size: int
    holders: int = 0


@dataclass(frozen=True, slots=True)
class UnstoredChain(Chain):
    """A history with unstored responses. Its continuations cannot be stored. `blocks` count the memory of its items."""

    blocks: Sequence[Block] = ()

    @property
    def own_size(self) -> int:
        """The estimated size in bytes of the chain's own lists, without the items in its blocks."""
        return _POINTER * (len(self.items) + len(self.blocks))


@dataclass(eq=False)
class Memory:
    """The memory used by all WebSocket connections of this process, and its limits in bytes."""

    owner_bytes: int
    total_bytes: int
    size: int = 0
    shares: dict[str, Share] = field(default_factory=dict)
    """The share of each owner that has open connections."""

    @contextmanager
    def share(self, owner: str) -> Iterator[Share]:
        """Count a connection of `owner` until the context exits, and yield the owner's share."""
        share = self.shares.setdefault(owner, Share(self))
        share.connections += 1
        WEBSOCKETS_OPEN.add(1)
        try:
            yield share
        finally:
            WEBSOCKETS_OPEN.add(-1)
            share.connections -= 1
            if not share.connections:
                del self.shares[owner]


class Share:
    """The memory used by one owner, for unstored responses and for waiting requests."""

    def __init__(self, memory: Memory) -> None:
        self.connections = 0
        self._memory = memory
        self._held: OrderedDict[str, tuple[UnstoredChain, set[str]]] = OrderedDict()
        """Maps response ids to the arguments of `hold`, with the least recently used response first."""
        self._size = 0
        self._waiting = 0

    def get(self, response_id: str) -> UnstoredChain:
        """Return the history that ends with `response_id`, which must be in memory. Mark it as the most recently used."""
        self._held.move_to_end(response_id)
        return self._held[response_id][0]

    def hold(self, response_id: str, chain: UnstoredChain, known: set[str]) -> None:
        """Store `chain`, the history that ends with `response_id`. Add `response_id` to `known` until the chain is evicted.

        If necessary, evict the owner's least recently used responses. If `chain` would not fit even without them, do nothing.
        """
        if not self._fits(chain.own_size + sum(block.size for block in chain.blocks)):
            return
        self._held[response_id] = chain, known
        known.add(response_id)
        self._grow(chain.own_size)
        for block in chain.blocks:
            if not block.holders:
                self._grow(block.size)
            block.holders += 1
        self._make_room(0)

    def evict(self, response_id: str) -> None:
        """Remove a response from memory, and its id from the set that was passed to `hold`."""
        chain, known = self._held.pop(response_id)
        known.remove(response_id)
        self._grow(-chain.own_size)
        for block in chain.blocks:
            block.holders -= 1
            if not block.holders:
                self._grow(-block.size)

    def enter(self, size: int) -> None:
        """Reserve memory for a waiting request. Evict responses if necessary. Raises `RateLimited` if there is not enough."""
        if not self._fits(size):
            raise RateLimited("Too many requests are waiting on your connections.")
        self._make_room(size)
        self._waiting += size
        self._grow(size)

    def leave(self, size: int) -> None:
        self._waiting -= size
        self._grow(-size)

    def _fits(self, size: int) -> bool:
        """Return whether `size` bytes would fit in the memory if all responses of the owner were evicted."""
        memory, wanted = self._memory, self._waiting + size
        return wanted <= memory.owner_bytes and memory.size - self._size + wanted <= memory.total_bytes

    def _make_room(self, size: int) -> None:
        memory = self._memory
        while self._size + size > memory.owner_bytes or memory.size + size > memory.total_bytes:
            self.evict(next(iter(self._held)))

    def _grow(self, size: int) -> None:
        self._size += size
        self._memory.size += size


class ConnectionHistory(History):
    """The histories available to one connection: stored responses, and the connection's own unstored responses."""

    def __init__(self, state: State | None, share: Share, *, required: bool) -> None:
        super().__init__(state, required=required)
        self._share = share
        self._own: set[str] = set()

    async def will_store(self, request: CreateResponse, context: RunContext) -> bool:
        if request.store and isinstance(context.chain, UnstoredChain):
            annotate(unstored="previous_response")
            return False
        return await super().will_store(request, context)

    async def commit(self, context: RunContext, document: Document, gate: Gate) -> None:
        """Store the response in Redis. If it is not stored there, keep it in this connection's memory.

        A response is not stored in Redis if its `store` is false, if it continues an `UnstoredChain`, or if `History.commit`
        cannot store it. `document["store"]` is then false. Failed and cancelled responses are not kept in memory. If
        `History.commit` raises an error, nothing is kept.
        """
        if isinstance(context.chain, UnstoredChain):
            document["store"] = False
        await super().commit(context, document, gate)
        if not document["store"] and document["status"] in ("completed", "incomplete"):
            turn = [*context.input, *document["output"]]
            self._share.hold(document["id"], await by_size(context.size, _continued, context.chain, turn), self._own)

    def evict(self, response_id: str) -> None:
        """Remove a response from memory, if it is an unstored response of this connection."""
        if response_id in self._own:
            self._share.evict(response_id)

    def close(self) -> None:
        """Remove all responses of this connection from memory."""
        for response_id in list(self._own):
            self.evict(response_id)

    async def _chain(self, request: CreateResponse, owner: str) -> Chain:
        parent = request.previous_response_id
        if parent is None:
            return await super()._chain(request, owner)
        if parent in self._own:
            return self._share.get(parent)
        if self._state is None:
            message = f"Previous response with id '{parent}' not found."
            raise BadRequest(message, param="previous_response_id", code="previous_response_not_found")
        return await super()._chain(request, owner)


def _continued(chain: Chain, turn: Sequence[Item]) -> UnstoredChain:
    """Return `chain` with the items of `turn`, which are not stored."""
    before = chain.blocks if isinstance(chain, UnstoredChain) else [Block(memory(chain.items, chain.size))]
    size = len(orjson.dumps(turn))
    return UnstoredChain(
        tag=chain.tag,
        items=[*chain.items, *turn],
        size=chain.size + size,
        blocks=(*before, Block(memory(turn, size))),
    )
