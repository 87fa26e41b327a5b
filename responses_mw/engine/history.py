"""Read the history that a run continues, and commit its response. No other module commits responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import orjson

from ..auth import Gate
from ..errors import APIError, BadRequest, Conflict, NotSupported
from ..ids import RunIds, random_part
from ..protocol import origin
from ..protocol.request.create import CreateResponse
from ..protocol.request.items import ID_PREFIXES, ITEMS
from ..protocol.request.repeats import may_repeat, without_repeats
from ..protocol.tool_kinds.form import Role
from ..protocol.types import Document, Item
from ..state import Batch, Chain, Missing, OverBound, OverQuota, State, StateFull, StateUnavailable
from ..tasks import by_size
from ..telemetry.context import annotate, level_of

logger = logging.getLogger(__name__)

MAX_CLAIMS = 10_000
"""Maximum number of approvals that a process without a state store remembers."""
_GATE_TIMEOUT = 5.0  # seconds; the gate asks the upstream only if the run failed before the caller was accepted


@dataclass(frozen=True, slots=True)
class RunContext:
    """The input of a run. `chain` has the earlier items, and `input` the items of the request.

    All items have ids, except in the runs that write summaries (see `Compaction`).
    """

    chain: Chain
    ids: RunIds
    input: list[Item]
    owner: str
    token: str
    """Identifies the run to the state store. The store refuses a commit if another worker has taken over the response."""
    size: int = 0
    """Size in bytes of all items as JSON, or 0 if the size is unknown."""

    @property
    def items(self) -> list[Item]:
        return self.chain.items + self.input


class _Claims:
    """Claims of approvals in a process without a state store: the latest `MAX_CLAIMS`."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], str] = {}

    def claim(self, owner: str, approvals: Sequence[str], response_id: str) -> str | None:
        """Claim `approvals`, or return one that another response has claimed."""
        for approval in approvals:
            if self._holders.get((owner, approval), response_id) != response_id:
                return approval
        self._holders |= dict.fromkeys(((owner, approval) for approval in approvals), response_id)
        while len(self._holders) > MAX_CLAIMS:
            del self._holders[next(iter(self._holders))]
        return None


_CLAIMS = _Claims()


class History:
    """Reads histories from the state store and commits responses to it. If `state` is None, nothing is stored.

    If `required` is true, a request fails if its response cannot be stored. Otherwise, a finished response that cannot be
    stored is returned with `store` set to false.
    """

    def __init__(self, state: State | None, *, required: bool) -> None:
        self._state = state
        self._required = required

    async def begin(self, request: CreateResponse, owner: str) -> RunContext:
        """Return the history that `request` continues, and the items of its input.

        References in the input are replaced with their items, and items that the history already contains are omitted (see
        `without_repeats`). The items get new ids (see `with_ids`). Raises:

        `BadRequest`         the previous response is missing or cannot be continued, a referenced item is missing, or an item
                             of the input is already in the history and must not be repeated
        `NotSupported`       the request needs a state store, but there is none
        `NotFound`           the conversation is missing
        `OverBound`          the conversation is full, or the history or the referenced items are too large
        `StateUnavailable`   the state store fails, or storing is `required` and the store is nearly full
        """
        if self._required and request.store:
            await self._check_memory(self._needed("store"))
        chain = await self._chain(request, owner)
        ids = RunIds(chain.tag)
        items = request.items
        if any(item["type"] == "item_reference" for item in items):
            items = await resolve_references(items, self._needed("input"), owner, "input", known=chain.items)
        if chain.items and any(map(may_repeat, items)):
            leave_out = partial(without_repeats, in_conversation=chain.conversation is not None)
            items = await by_size(chain.size, leave_out, items, chain.items)
        if chain.conversation is not None and request.store:
            self._needed("conversation").conversations.check_room(chain, len(items))
        size = request.size if items is request.items else len(orjson.dumps(items))
        own = await by_size(size, with_ids, items, ids)
        return RunContext(chain, ids, own, owner, random_part(), chain.size + size)

    async def claim(self, approvals: Sequence[str], owner: str, response_id: str) -> None:
        """Claim approvals of tool calls for a response. Raises `Conflict` if another response has claimed one of them.

        Without a state store, claims last as long as this process. Raises `StateUnavailable` if the state store fails.
        """
        if self._state is not None:
            taken = await self._state.approvals.claim(owner, approvals, response_id)
        else:
            taken = _CLAIMS.claim(owner, approvals, response_id)
        if taken is not None:
            message = f"The approval of '{taken}' has already been used by another response, and a call is made only once."
            raise Conflict(message, param="input", code="approval_already_used")

    async def _check_memory(self, state: State) -> None:
        if state.client.away_for:  # because `nearly_full` may return a cached result
            await state.check()
        if await state.nearly_full():
            raise StateFull("its memory is nearly full")

    async def rejoin(self, request: CreateResponse, owner: str, ids: RunIds, token: str) -> RunContext:
        """Return the history and input of a background response. The items of `request` already have ids.

        `ids` and `token` belong to the job. Raises the same errors as `begin` if the history can no longer be read.
        """
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
            raise NotSupported(f"'{param}' needs stored state, but this server has none. Set 'redis.url'.", param=param)
        return self._state

    async def will_store(self, request: CreateResponse, context: RunContext) -> bool:
        """Return whether to store the response: the request asks for it, and the store exists and is not nearly full.

        If the store is unavailable, return true. Raises `OverQuota` if the quota is used up.
        """
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
        """Store the finished `document`, unless its `store` is false.

        If `gate` does not accept the caller within 5 seconds, or if storing fails, set the document's `store` to false.

        Raises `Deleted` if the response was deleted during its run. If the history is `required`, also raises
        `StateUnavailable`, `OverBound` or `OverQuota` if storing fails.
        """
        if not document["store"] or self._state is None:
            return
        try:
            async with asyncio.timeout(_GATE_TIMEOUT):
                await gate()
        except (APIError, TimeoutError) as error:
            logger.debug("not storing a response, because its caller was not accepted: %s", error)
            document["store"] = False
            annotate(unstored="credential")
            return
        try:
            await commit(self._state, context, document)
        except (StateUnavailable, OverBound, OverQuota) as error:
            document["store"] = False
            annotate(unstored=error.unstored)
            if self._required:
                raise
            logger.log(level_of(error.cause), "response %s is not stored: %s", document["id"], error.message)


NO_HISTORY = History(None, required=False)
"""The history of runs that continue nothing and are never stored."""


async def commit(state: State, context: RunContext, document: Document, last: Batch | None = None) -> None:
    """Store a finished response. For a background response, also store `last`, the final batch of its event log.

    Raises `Deleted` if the response was deleted, or `Fenced` if another worker has taken over the job. Raises `OverBound`,
    `OverQuota` or `StateUnavailable` if the response cannot be stored.
    """
    await state.responses.commit(context.chain, document, context.input, context.owner, context.token, last=last)
    annotate(stored=document["store"])


async def resolve_references(
    items: Sequence[Item], state: State, owner: str, param: str, *, known: Iterable[Item] = ()
) -> list[Item]:
    """Return `items` with each `item_reference` replaced with the referenced item.

    Repeated references, and references to `known` items, are omitted. Otherwise, a short list could become very large.

    Raises `BadRequest` with this `param` if an item does not exist. Raises `OverBound` if the responses that contain the items
    are too large, or `StateUnavailable` if Redis fails.
    """
    seen = {item.get("id") for item in known}
    wanted = [item["id"] for item in items if item["type"] == "item_reference" and item["id"] not in seen]
    try:
        named = await state.responses.resolve(wanted, owner)
    except Missing as error:
        raise BadRequest(error.message, param=param, code="item_not_found") from None
    kept = []
    for item in items:
        if item["type"] != "item_reference":
            kept.append(item)
        elif item["id"] in named:
            kept.append(named.pop(item["id"]))
    return kept


_WITH_STATUS = frozenset({"message", "function_call", "function_call_output"})
"""Types of items with a status. Requests may omit the status."""


def with_ids(items: Sequence[Item], ids: RunIds) -> list[Item]:
    """Return `items` with new ids from `ids`, and set missing statuses to `completed`. An approval request keeps its id.

    The model sees the same id of a server-side call before and afterwards, so that its prompt stays the same.
    """
    identified = []
    for item in items:
        kind = item["type"]
        if kind == "mcp_approval_request" and "id" in item:  # approval responses refer to this id
            identified.append(item)
            continue
        is_served = kind in ITEMS and ITEMS[kind].role is Role.SERVED_CALL
        new_id = {"id": ids.item(ID_PREFIXES.get(kind, "item"))}
        status = {"status": "completed"} if kind in _WITH_STATUS else {}
        identified.append(new_id | status | (origin.with_id(item) if is_served else item) | new_id)
    return identified
