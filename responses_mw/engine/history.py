"""The history that a run continues, and the commit of its response: the engine's view of the state.

No other module commits a response. Without a state, or for a request that stores nothing and continues nothing, a history is
empty and a commit does nothing.
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
from ..state import Batch, Chain, Deleted, Missing, OverBound, OverQuota, State, StateFull, StateUnavailable
from ..telemetry.context import annotate
from ..threads import by_size

logger = logging.getLogger(__name__)

_GATE_TIMEOUT = 5.0
"""Seconds that a failed response waits for the check of its caller before it is stored."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a run continues: the `chain` of earlier items, and the `input` of its request, each item with its id."""

    chain: Chain
    ids: RunIds
    input: list[Item]
    owner: str
    token: str
    """The fencing token of the commit."""
    size: int = 0
    """Size of all items as JSON in bytes; 0 if unknown."""

    @property
    def items(self) -> list[Item]:
        """Everything the model sees, in order."""
        return self.chain.items + self.input


class History:
    """Reads histories from the state and commits responses to it.

    With `required`, a request whose response cannot be stored is refused (503) instead of being answered without storing it.
    """

    def __init__(self, state: State | None, *, required: bool) -> None:
        self._state = state
        self._required = required

    async def begin(self, request: CreateResponse, owner: str) -> RunContext:
        """Read the history that `request` continues.

        Raises `BadRequest` if the previous response is missing or cannot be continued, `NotFound` if the conversation is
        missing, `OverBound` if the conversation is full, and `Unavailable` if the state is needed but unavailable or full.
        """
        if self._required and request.store:
            await self._check_memory(self._needed("store"))
        chain = await self._chain(request, owner)
        ids = RunIds(chain.tag)
        items = request.items
        if any(item["type"] == "item_reference" for item in items):
            items = await resolved(_without_repeats(items, chain), self._needed("input"), owner, "input")
        if chain.conversation is not None and request.store:
            self._needed("conversation").conversations.check_room(chain, len(items))
        size = request.size if items is request.items else len(orjson.dumps(items))
        own = await by_size(size, with_ids, items, ids)
        return RunContext(chain, ids, own, owner, random_part(), chain.size + size)

    async def _check_memory(self, state: State) -> None:
        if state.client.away_for:  # `nearly_full` may return a cached answer
            await state.check()
        if await state.nearly_full():
            raise StateFull("its memory is nearly full")

    async def rejoin(self, request: CreateResponse, owner: str, ids: RunIds, token: str) -> RunContext:
        """Read the history of a background response for which `begin` was called before. Raises the same errors."""
        chain = await self._chain(request, owner)
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

    def _needed(self, param: str) -> State:
        if self._state is None:
            raise NotSupported(f"'{param}' needs stored state, but this server has none: set 'redis.url'.", param=param)
        return self._state

    async def will_store(self, request: CreateResponse, context: RunContext) -> bool:
        """Return whether to store the response: the request asks for it, and there is memory. Raises `OverQuota`."""
        if not request.store or self._state is None:
            annotate(unstored="no_state" if request.store else "request")
            return False
        await self._state.quota.check(context.owner, request.size)
        try:
            is_full = await self._state.nearly_full()
        except StateUnavailable:
            return True  # it may be available again when the response is committed
        if is_full:
            annotate(unstored=StateFull.unstored)
        return not is_full

    async def commit(self, context: RunContext, document: Document, gate: Gate) -> None:
        """Store the finished `document`. If the caller is refused or the state cannot store it, set its `store` to false.

        Raises `NotFound` if the response was deleted in the meantime, and `Unavailable` if storing it is required but fails.
        """
        if not document["store"] or self._state is None:
            return
        if not await _passes(gate):
            document["store"] = False
            annotate(unstored="credential")
            return
        try:
            await commit(self._state, context, document)
        except Deleted as error:
            raise NotFound(error.message) from None
        except (StateUnavailable, OverBound, OverQuota) as error:
            document["store"] = False
            annotate(unstored=error.unstored)
            if self._required:
                raise
            logger.warning("response %s is not stored: %s", document["id"], error.message)


NO_HISTORY = History(None, required=False)
"""Reads nothing and stores nothing."""


async def commit(state: State, context: RunContext, document: Document, last: Batch | None = None) -> None:
    """Store a response, a background response together with `last`, the final batch of its event log.

    Raises `Fenced` if the job belongs to another worker, and any error of the state.
    """
    await state.responses.commit(context.chain, document, context.input, context.owner, context.token, last=last)
    annotate(stored=True)


async def _passes(gate: Gate) -> bool:
    """Return whether the caller is accepted. Unless the response failed, the upstream has already accepted it."""
    try:
        async with asyncio.timeout(_GATE_TIMEOUT):
            await gate()
    except (APIError, TimeoutError) as error:
        logger.debug("not storing a response, because its caller was refused: %s", error)
        return False
    return True


def _without_repeats(items: Sequence[Item], chain: Chain) -> list[Item]:
    """Remove references to items that are in the chain or already referenced, so that the model reads each item once."""
    seen = {item.get("id") for item in chain.items}
    kept = []
    for item in items:
        if item["type"] == "item_reference":
            if item["id"] in seen:
                continue
            seen.add(item["id"])
        kept.append(item)
    return kept


async def resolved(items: Sequence[Item], state: State, owner: str, param: str) -> list[Item]:
    """Replace each `item_reference` with the item it names. Raises `BadRequest` if there is no such item."""
    wanted = [item["id"] for item in items if item["type"] == "item_reference"]
    try:
        named = await state.responses.resolve(wanted, owner)
    except Missing as error:
        raise BadRequest(error.message, param=param, code="item_not_found") from None
    return [named[item["id"]] if item["type"] == "item_reference" else item for item in items]


_WITH_STATUS = frozenset({"message", "function_call", "function_call_output"})
"""Types of items that have a status, which a request may omit."""
_REFERRED_TO = frozenset({"mcp_approval_request"})
"""Types of items that other items refer to by id."""


def with_ids(items: Sequence[Item], ids: RunIds) -> list[Item]:
    """Replace the items' ids with new ones, which locate them in the state. Items that others refer to keep their ids."""
    return [
        item
        if item["type"] in _REFERRED_TO and "id" in item
        else _with_id(item, ids.item(ID_PREFIXES.get(item["type"], "item")))
        for item in items
    ]


def _with_id(item: Item, item_id: str) -> Item:
    status = {"status": "completed"} if item["type"] in _WITH_STATUS else {}
    return {"id": item_id, **status, **{name: value for name, value in item.items() if name != "id"}}
