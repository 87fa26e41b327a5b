"""What one connection remembers: the responses made on it that are stored nowhere else.

OpenAI reference, "WebSocket mode": with ``store: false`` a response can be continued on the connection that made it, and there
only. It is forgotten when the connection ends, when a continuation of it failed, and when it is the oldest of too many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import orjson

from ..chains import Chains, Ground
from ..errors import BadRequest
from ..protocol.request import CreateResponse
from ..protocol.types import Document, Item
from ..state import Chain, State

# What an item takes in memory beside its texts, in bytes.
ITEM_OVERHEAD = 512
_CHAINABLE = ("completed", "incomplete")


class HeldChain(Chain):
    """A history that is, at least in part, stored nowhere: what stands on it cannot be stored either."""


class HeldChains(Chains):
    """The chains of one connection: its own, and all that are stored. At ``most`` so many bytes are held; a history that two
    responses share counts for each."""

    def __init__(self, state: State | None, *, required: bool, most: int) -> None:
        super().__init__(state, required=required)
        self._most = most
        self._size = 0
        self._held: OrderedDict[str, HeldChain] = OrderedDict()

    async def will_store(self, request: CreateResponse, ground: Ground) -> bool:
        return not isinstance(ground.chain, HeldChain) and await super().will_store(request, ground)

    async def commit(self, ground: Ground, document: Document) -> None:
        """Stores ``document``; what is not stored is held."""
        if isinstance(ground.chain, HeldChain):
            document["store"] = False
        await super().commit(ground, document)
        if not document["store"] and document["status"] in _CHAINABLE:
            self._hold(ground, document["id"], [*ground.input, *document["output"]])

    def evict(self, response_id: str) -> None:
        """Forgets the response, if it is held."""
        chain = self._held.pop(response_id, None)
        if chain is not None:
            self._size -= chain.size

    async def _chain(self, request: CreateResponse, owner: str) -> Chain:
        parent = request.previous_response_id
        if parent is None:
            return await super()._chain(request, owner)
        if parent in self._held:
            self._held.move_to_end(parent)
            return self._held[parent]
        if self._state is None:
            message = f"Previous response with id '{parent}' not found."
            raise BadRequest(message, param="previous_response_id", code="previous_response_not_found")
        return await super()._chain(request, owner)

    def _hold(self, ground: Ground, response_id: str, turn: Sequence[Item]) -> None:
        size = ground.chain.size + len(orjson.dumps(turn)) + ITEM_OVERHEAD * len(turn)
        self._held[response_id] = HeldChain(tag=ground.chain.tag, items=[*ground.chain.items, *turn], size=size)
        self._size += size
        while self._size > self._most:
            self.evict(next(iter(self._held)))
