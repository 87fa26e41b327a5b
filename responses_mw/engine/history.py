"""What a request stands on, and how its response joins it: the runner's view of the state.

Without a state (none is configured), or for a request that asks for none, a run stands on nothing and joins nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from ..auth import Gate
from ..errors import APIError, BadRequest, NotFound, NotSupported
from ..ids import RunIds, random_part
from ..protocol.request.create import CreateResponse
from ..protocol.request.items import ID_PREFIXES
from ..protocol.types import Document, Item
from ..state import Chain, Deleted, Missing, OverBound, OverQuota, State, StateUnavailable
from ..telemetry import UNSTORED
from ..threads import by_size

logger = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds that the end of a failed response waits for what the upstream says of its caller


@dataclass(frozen=True, slots=True)
class RunContext:
    """What one run stands on: the ``chain`` before it and its own ``input``, each item with its id."""

    chain: Chain
    ids: RunIds
    input: list[Item]
    owner: str
    token: str
    size: int = 0
    """Bytes of the JSON of all that, where they are known."""

    @property
    def items(self) -> list[Item]:
        """All that the model is to see, in order."""
        return self.chain.items + self.input


class History:
    """``required`` refuses (503) a response that is to be stored and cannot be, in place of answering it unstored."""

    def __init__(self, state: State | None, *, required: bool) -> None:
        self._state = state
        self._required = required

    async def begin(self, request: CreateResponse, owner: str) -> RunContext:
        """Reads the history that ``request`` stands on.

        Raises ``BadRequest`` for a previous response that is not there or cannot be continued, ``NotFound`` for a conversation,
        ``OverBound`` for one that takes nothing more, ``Unavailable`` where the state is needed and away, or full.
        """
        if self._required and request.store:
            await self._check_room(self._needed("store"))
        chain = await self._chain(request, owner)
        ids = RunIds(chain.tag)
        items = await self._resolved(request.items, chain, owner)
        if chain.conversation is not None and request.store:
            self._needed("conversation").conversations.check_room(chain, len(items))
        size = request.size if items is request.items else len(orjson.dumps(items))
        own = await by_size(size, with_ids, items, ids)
        return RunContext(chain, ids, own, owner, random_part(), chain.size + size)

    async def _check_room(self, state: State) -> None:
        if state.client.away_for:  # how full it is, is not asked each time
            await state.check()
        if await state.nearly_full():
            raise StateUnavailable("its memory is nearly full")

    async def rejoin(self, request: CreateResponse, owner: str, response_id: str, token: str) -> RunContext:
        """What a background response stands on, which ``begin`` was called for before. Raises as that."""
        chain = await self._chain(request, owner)
        ids = RunIds(response=response_id, used=len(request.items))
        return RunContext(chain, ids, request.items, owner, token, chain.size + request.size)

    async def _chain(self, request: CreateResponse, owner: str) -> Chain:
        if request.conversation is not None:
            return await self._needed("conversation").conversations.chain(request.conversation, owner)
        if request.previous_response_id is None:
            return Chain.new()
        state = self._needed("previous_response_id")
        try:
            return await state.responses.chain(request.previous_response_id, owner)
        except Missing as error:
            message = f"Previous response with id '{error.object_id}' not found."
            raise BadRequest(message, param="previous_response_id", code="previous_response_not_found") from None

    async def _resolved(self, items: Sequence[Item], chain: Chain, owner: str) -> Sequence[Item]:
        """``items`` with those in place of references that they name."""
        if all(item["type"] != "item_reference" for item in items):
            return items
        return await resolved(_unrepeated(items, chain), self._needed("input"), owner, "input")

    def _needed(self, param: str) -> State:
        if self._state is None:
            raise NotSupported(f"'{param}' needs stored state, and this server keeps none: set 'redis'.", param=param)
        return self._state

    async def will_store(self, request: CreateResponse, ground: RunContext) -> bool:
        """Whether the response of ``request`` is to be stored, and there is room. Raises OverQuota."""
        if not request.store or self._state is None:
            return False
        await self._state.quota.check(ground.owner, request.size)
        try:
            return not await self._state.nearly_full()
        except StateUnavailable:
            return True  # it may be back at the commit

    async def commit(self, ground: RunContext, document: Document, gate: Gate) -> None:
        """Stores the finished ``document``. Where that cannot be done, or the ``gate`` does not let it, it says
        ``store: false`` from then on.

        Raises ``NotFound`` if the response was deleted meanwhile, ``Unavailable`` if it must be stored and cannot be.
        """
        if not document["store"] or self._state is None:
            return
        if not await _passes(gate):
            document["store"] = False
            return
        try:
            await self._state.responses.commit(ground.chain, document, ground.input, ground.owner, ground.token)
        except Deleted as error:
            raise NotFound(error.message) from None
        except (StateUnavailable, OverBound, OverQuota) as error:
            document["store"] = False
            UNSTORED.add(1, {"error.type": type(error).__name__})
            if self._required:
                raise
            logger.warning("response %s is not stored: %s", document["id"], error.message)


async def _passes(gate: Gate) -> bool:
    """Whether a finished response may be stored. Only of one that failed is that not known already."""
    try:
        async with asyncio.timeout(_PATIENCE):
            await gate()
    except (APIError, TimeoutError) as error:
        logger.debug("a response is not stored, as its caller was not accepted: %s", error)
        return False
    return True


def _unrepeated(items: Sequence[Item], chain: Chain) -> list[Item]:
    """``items`` without references to what stands in the chain, or before them, already: the model is to read it once."""
    there = {item.get("id") for item in chain.items}
    left = []
    for item in items:
        if item["type"] == "item_reference":
            if item["id"] in there:
                continue
            there.add(item["id"])
        left.append(item)
    return left


async def resolved(items: Sequence[Item], state: State, owner: str, param: str) -> list[Item]:
    """``items`` with those in place of references that they name. Raises ``BadRequest`` for one that is nowhere."""
    wanted = [item["id"] for item in items if item["type"] == "item_reference"]
    try:
        found = await state.responses.resolve(wanted, owner)
    except Missing as error:
        raise BadRequest(error.message, param=param, code="item_not_found") from None
    return [found[item["id"]] if item["type"] == "item_reference" else item for item in items]


_WITH_STATUS = frozenset({"message", "function_call", "function_call_output"})
"""Types of items that have a status when they are listed; a caller may leave it out."""


_REFERRED_TO = frozenset({"mcp_approval_request"})


def with_ids(items: Sequence[Item], ids: RunIds) -> list[Item]:
    """The items under ids of ours: by such an id alone an item is found again, and a client's own may be anything. Those that
    other items refer to stay."""
    return [
        item
        if item["type"] in _REFERRED_TO and "id" in item
        else _with_id(item, ids.item(ID_PREFIXES.get(item["type"], "item")))
        for item in items
    ]


def _with_id(item: Item, item_id: str) -> Item:
    status = {"status": "completed"} if item["type"] in _WITH_STATUS else {}
    return {"id": item_id, **status, **{name: value for name, value in item.items() if name != "id"}}
