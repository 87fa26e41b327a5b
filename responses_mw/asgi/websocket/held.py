"""What one connection remembers: the responses made on it that are stored nowhere else.

OpenAI reference, "WebSocket mode": with ``store: false`` a response can be continued on the connection that made it, and there
only. It is forgotten when the connection ends, when a continuation of it failed, and when it is the oldest of too
many of the owner's.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from ...auth import Gate
from ...engine.history import History, RunContext
from ...errors import BadRequest
from ...protocol.request.create import CreateResponse
from ...protocol.types import Document, Item
from ...state import Chain, State
from .memory import Block, Share, UnstoredChain

# What an item takes in memory beside its texts, in bytes.
ITEM_OVERHEAD = 512
_CHAINABLE = ("completed", "incomplete")


class ConnectionHistory(History):
    """The chains of one connection: its own, which the owner's ``share`` of the memory holds, and all that are stored."""

    def __init__(self, state: State | None, share: Share, *, required: bool) -> None:
        super().__init__(state, required=required)
        self._share = share
        self._own: set[str] = set()

    async def will_store(self, request: CreateResponse, context: RunContext) -> bool:
        return not isinstance(context.chain, UnstoredChain) and await super().will_store(request, context)

    async def commit(self, context: RunContext, document: Document, gate: Gate) -> None:
        """Stores ``document``; what is not stored is held."""
        if isinstance(context.chain, UnstoredChain):
            document["store"] = False
        await super().commit(context, document, gate)
        if not document["store"] and document["status"] in _CHAINABLE:
            self._hold(context, document["id"], [*context.input, *document["output"]])

    def evict(self, response_id: str) -> None:
        """Forgets the response, if it is held."""
        if response_id in self._own:
            self._share.evict(response_id)

    def close(self) -> None:
        """Forgets all of them: the connection has ended."""
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

    def _hold(self, context: RunContext, response_id: str, turn: Sequence[Item]) -> None:
        chain = context.chain
        before = chain.blocks if isinstance(chain, UnstoredChain) else [Block(_weight(chain.size, chain.items))]
        size = len(orjson.dumps(turn))
        held = UnstoredChain(
            tag=chain.tag,
            items=[*chain.items, *turn],
            size=chain.size + size,
            blocks=(*before, Block(_weight(size, turn))),
        )
        self._share.hold(response_id, held, self._own)


def _weight(size: int, items: Sequence[Item]) -> int:
    """About so many bytes of memory."""
    return size + ITEM_OVERHEAD * len(items)
