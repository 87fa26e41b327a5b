"""Commit, read and delete stored responses, and read their histories and input items."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import orjson

from ..errors import BadRequest
from ..ids import RANDOM_LENGTH, random_part
from ..lua import Script, load
from ..protocol.types import Item
from ..tasks import by_size
from .client import Args, Call, Client
from .conversations import Conversations
from .errors import Deleted, Fenced, Missing, OverBound, Reply, check_answer
from .models import Batch, Chain, Page, Pointer, StateOptions, Stored, StoredTurn, page
from .schema import (
    Address,
    MemoryBudget,
    check_version,
    conversation_key,
    item_address,
    item_blobs,
    json_size,
    pack,
    pack_turn,
    reading,
    response_address,
    turn_text,
    unpack,
    unpack_items,
    unpack_turns,
)
from .temporary import Vault, is_temporary
from .writes import UNDONE_SECONDS, Write, Writer, own_items

logger = logging.getLogger(__name__)

CHAINABLE = ("completed", "incomplete")
TOMBSTONE_SECONDS = 24 * 60 * 60
"""Lifetime of a deleted response's tombstone. A run that takes longer could store the response again."""
LOG_TTL_SECONDS = 24 * 60 * 60  # lifetime of a background response's event log after the response has ended
BASE = "0" * RANDOM_LENGTH
"""The `random` of a turn that contains the items of a conversation instead of a response's input and output."""

CALLS_AT_ONCE = 8  # maximum number of responses whose items are read in one round trip

_COMMIT, _GET, _DELETE, _RESOLVE, _END = load("state", "commit", "get", "delete", "resolve", "temporary_end")


class Responses:
    """The stored responses of all owners.

    Every method raises StateUnavailable if Redis fails. Methods with a `response_id` raise Missing if the owner has no such
    response. Methods that read a history raise OverBound if the history takes too much memory.
    """

    def __init__(
        self, client: Client, conversations: Conversations, writer: Writer, options: StateOptions, vault: Vault
    ) -> None:
        self._client = client
        self._vault = vault
        self._conversations = conversations
        self._writer = writer
        self._options = options
        self._ttl = options.ttl_seconds * 1000

    async def chain(self, response_id: str, owner: str) -> Chain:
        """Return the history up to and including the response.

        Raises Missing if part of the history is deleted, or BadRequest if the response is queued, running, failed or cancelled.
        """
        address = response_address(response_id)
        fields = await self._record(address, response_id, owner)
        if "temporary" in fields:
            raise Missing("Response", response_id)
        status = fields["status"].decode()
        if status not in CHAINABLE:
            message = f"Response with id '{response_id}' has status '{status}' and cannot be continued."
            raise BadRequest(message, param="previous_response_id")
        return await self._history(address, response_id, owner, fields)

    async def before(self, document: dict[str, Any], owner: str) -> Chain:
        """Return the history that the response of `document` continues. Raises the errors of `chain`."""
        if previous := document["previous_response_id"]:
            return await self.chain(previous, owner)
        if conversation := document["conversation"]:
            return await self._conversations.chain(conversation["id"], owner)
        return Chain.new()

    async def get(self, response_id: str, owner: str) -> Stored:
        address = response_address(response_id)
        reply = await self._client.script(_GET, [address.record], [owner])
        if reply is None:
            raise Missing("Response", response_id)
        version, status, document, turn, job, lost = reply
        check_version(version)
        opened = partial(self._vault.open, response_id)
        document, turn, job = opened(document), turn and opened(turn), job and opened(job)
        with reading("response"):
            head = await by_size(json_size(document), unpack, document)
            if job is not None:  # the response has not ended
                request = await by_size(json_size(job), unpack, job)
                return Stored({**head, "status": status.decode(), "output": []}, request["input"], bool(lost))
            if turn is not None:
                [made] = await by_size(json_size(turn, RANDOM_LENGTH), unpack_turns, [turn], MemoryBudget())
                if made.random == address.random:
                    return Stored({**head, "output": made.output}, made.input)
        raise Missing("Response", response_id)

    async def input_items(
        self,
        response_id: str,
        owner: str,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
        order: str = "desc",
    ) -> Page:
        """Return a page of the items that the model received: the response's history, then its input. See `page`.

        Raises BadRequest if `after` or `before` is not the id of one of these items.
        """
        address = response_address(response_id)
        fields = await self._record(address, response_id, owner)
        if "segment" in fields:
            chain = await self._history(address, response_id, owner, fields, conversation_required=False)
            given = chain.items[: len(chain.items) - len(chain.turns[-1].output)]
        else:
            given = await self._read_given(response_id, owner)
        return page(given, after=after, before=before, limit=limit, order=order)

    async def resolve(self, item_ids: Iterable[str], owner: str) -> dict[str, Item]:
        """Return a mapping from `item_ids` to the owner's stored items.

        For each item that a response created, the whole turn of the response is read. Raises Missing if an item does not exist,
        or OverBound if the data that is read exceeds `chain_bytes` or, once decoded, `chain_memory`.
        """
        wanted = list(dict.fromkeys(item_ids))
        by_address: dict[Address, list[str]] = {}
        for item_id in wanted:
            by_address.setdefault(item_address(item_id), []).append(item_id)
        groups = list(by_address.items())
        found: dict[str, Item] = {}
        left = max_bytes = self._options.chain_bytes
        budget = MemoryBudget(self._options.chain_memory)
        for begin in range(0, len(groups), CALLS_AT_ONCE):
            some = groups[begin : begin + CALLS_AT_ONCE]
            asked: list[Call] = [
                ([address.record, conversation_key(address.tag)], [owner, left, *ids]) for address, ids in some
            ]
            replies = await self._client.scripts(_RESOLVE, asked)
            for (address, ids), reply in zip(some, replies, strict=True):
                size = 0 if reply == Reply.BOUND else _size(reply)
                left -= size
                if reply == Reply.BOUND or left < 0:
                    raise OverBound(f"The responses with the referenced items have more than {max_bytes} bytes.", param="input")
                found |= await by_size(size, _items, address, ids, reply, budget)
        return {item_id: found[item_id] for item_id in wanted}

    async def _record(self, address: Address, response_id: str, owner: str) -> dict[str, bytes]:
        """Return the fields of the record that are needed to read the history. Missing fields are left out."""
        names = ("v", "owner", "status", "segment", "length", "path", "seen", "temporary")
        values = await self._client.command("HMGET", address.record, *names)
        fields = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        if fields.get("owner") != owner.encode():
            raise Missing("Response", response_id)
        check_version(fields["v"])
        return fields

    async def _read_given(self, response_id: str, owner: str) -> list[Item]:
        """Return the history and input of a response that has not ended, or only the input if the history was deleted."""
        stored = await self.get(response_id, owner)
        try:
            return (await self.before(stored.document, owner)).items + stored.input
        except Missing:
            logger.debug("the history of response %s no longer exists", response_id)
            return stored.input

    async def _history(
        self, address: Address, response_id: str, owner: str, fields: dict[str, bytes], *, conversation_required: bool = True
    ) -> Chain:
        """Return the history, including the response. Raises Missing if a turn or the required conversation was deleted."""
        seen = await self._read_seen(address, owner, fields)
        if seen is None and conversation_required:
            raise Missing("Response", response_id)
        with reading("response"):
            parent = Pointer(address.random, fields["segment"].decode(), int(fields["length"]), fields["path"].decode())
        turns = await self._turns(address, parent)
        if not turns or turns[-1].random != address.random:
            raise Missing("Response", response_id)
        items = [item for turn in turns for part in (turn.input, turn.output) for item in part]
        size = sum(turn.size for turn in turns)
        if "seen" not in fields:
            return Chain(address.tag, items, parent, turns, size)
        # A conversation can change, but a chain must not. So a response that continues this one gets a copy of `seen`.
        base = StoredTurn(BASE, seen or [], [], len(orjson.dumps(seen or [])))
        return Chain(address.tag, base.input + items, None, [base, *turns], size + base.size)

    async def _read_seen(self, address: Address, owner: str, fields: dict[str, bytes]) -> list[Item] | None:
        """Return the conversation's items that preceded the response, or None if the conversation was deleted."""
        if "seen" not in fields:
            return []
        with reading("response"):
            last = int(fields["seen"])
        return await self._conversations.until(address.tag, owner, last)

    async def _turns(self, address: Address, pointer: Pointer) -> list[StoredTurn]:
        """Return all turns up to `pointer`, or an empty list if a turn was deleted or lost.

        Raises OverBound if they take too much memory.
        """
        with reading("response"):
            ranges = pointer.ranges
        replies = await self._client.pipeline([("LRANGE", address.segment(name), 0, length - 1) for name, length in ranges])
        if any(len(blobs) != length for blobs, (_, length) in zip(replies, ranges, strict=True)):
            return []
        turns, budget = [blob for blobs in replies for blob in blobs], MemoryBudget(self._options.chain_memory)
        return await by_size(sum(json_size(turn, RANDOM_LENGTH) for turn in turns), unpack_turns, turns, budget)

    async def commit(
        self,
        chain: Chain,
        document: dict[str, Any],
        items: Sequence[Item],
        owner: str,
        token: str,
        *,
        last: Batch | None = None,
    ) -> None:
        """Store a finished response that continues `chain`.

        `document` is the complete response. Its id must contain the chain's tag. `items` are its input items with ids. If the
        chain has a conversation, append the items and the output to it, unless the response failed or was cancelled, or the
        conversation no longer exists. `token` identifies the run. A repeated commit with the same token changes nothing.

        For a background response, `last` is the final batch of its log. This method does not check the quota of background
        responses. The maximum sizes do not apply to background responses that failed or were cancelled.

        Raises Deleted if the response was deleted during the run. Raises Fenced if another worker has taken over the response.
        For a background response, raises Fenced also if the record no longer exists, or if `last` does not continue the log.
        Raises OverBound if a maximum size is exceeded, or OverQuota if the owner would exceed the quota.

        Raises StateUnavailable if Redis fails. The response may have been stored nevertheless. If the failure is temporary and
        `last` is None, the response is therefore removed as soon as Redis answers again.
        """
        address, made = response_address(document["id"]), [*items, *document["output"]]
        # The output is stored only in the turn. In the document, None keeps its place.
        head, text = orjson.dumps({**document, "output": None}), turn_text(list(items), document["output"])
        if last is None or document["status"] in CHAINABLE:
            self._check_bounds(chain, len(head) + len(text), len(text), len(made))
        turn = address.random.encode() + await by_size(len(text), pack, text)
        blobs = [await by_size(len(head), pack, head), turn]
        if last is not None and is_temporary(document):
            await self._end(document, blobs, owner, token, last)
            return
        facts = self._facts(address, document["status"], owner, token)
        undo: tuple[Script, Args] | None = None
        if last is None:
            appended = own_items(made, address.random) if chain.conversation is not None else []
            undo = _DELETE, [owner, token, UNDONE_SECONDS * 1000, token, *appended]
        else:
            facts["job"] = {"first": last.first, "last": last.last, "log_ttl": min(self._ttl, LOG_TTL_SECONDS * 1000)}
            blobs.append(last.data)
        keys, size = [address.record, address.tombstone], len(head) + len(text) if last is None else None
        name = f"r{address.random}"
        write = Write(_COMMIT, address, keys, blobs, owner, name, size, ttl=self._ttl, is_admitted=True, undo=undo)
        _check_verdict(await self._place(write, facts, chain, made, len(text)), document["id"])

    async def _end(self, document: dict[str, Any], blobs: Sequence[bytes], owner: str, token: str, last: Batch) -> None:
        """End a temporary response. `blobs` are its document and its turn. Raises the errors of `commit`."""
        response_id = document["id"]
        address = response_address(response_id)
        head, turn, events = (self._vault.seal(response_id, value) for value in (*blobs, last.data))
        args: Args = [token, document["status"], head, turn, last.first, last.last, events]
        keys = [address.record, address.tombstone]
        write = Write(_END, address, keys, args, owner, f"r{address.random}", None, is_admitted=True)
        _check_verdict(await self._writer.write(write), response_id)

    def _facts(self, address: Address, status: str, owner: str, token: str) -> dict[str, Any]:
        return {
            "random": address.random,
            "owner": owner,
            "token": token,
            "status": status,
            "aside": status not in CHAINABLE,
            "ttl": self._ttl,
            "counts": self._writer.quota.is_set,
            "max_items": self._options.chain_items,
            "max_bytes": self._options.chain_bytes,
        }

    def _check_bounds(self, chain: Chain, response_bytes: int, turn_bytes: int, items: int) -> None:
        options = self._options
        if response_bytes > options.response_bytes:
            raise OverBound(f"The response takes {response_bytes} bytes; the maximum is {options.response_bytes}.")
        if chain.size + turn_bytes > options.chain_bytes or len(chain.items) + items > options.chain_items:
            raise OverBound(f"The history exceeds the maximum of {options.chain_bytes} bytes or {options.chain_items} items.")

    async def _place(self, write: Write, facts: dict[str, Any], chain: Chain, items: Sequence[Item], turn_bytes: int) -> bytes:
        """Append the turn to the parent's segment or a fork of it, or else to a new root segment. Return the verdict."""

        async def commit(more: dict[str, Any], rest: Sequence[str | bytes] = (), size: int = 0) -> bytes:
            args = [orjson.dumps(facts | more), *write.args, *rest]
            return await self._writer.write(write._replace(args=args, size=None if write.size is None else write.size + size))

        if (parent := chain.parent) is not None:
            answer = await commit({"parent": {**parent._asdict(), "length": str(parent.length)}})
            if answer != Reply.REROOT:
                return answer
        if chain.conversation is not None:  # the conversation stores the items too
            blobs = await by_size(turn_bytes, item_blobs, items, map(orjson.dumps, items))
            return await commit({"rest": "items", "seen": chain.seen}, blobs, turn_bytes)
        if chain.turns:
            packed = await by_size(
                chain.size, lambda: [pack_turn(turn.random, turn.input, turn.output) for turn in chain.turns]
            )
            return await commit({"rest": "turns"}, packed, chain.size)
        return await commit({})

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete the response, and the turns that no remaining response needs."""
        address = response_address(response_id)
        args: Args = [owner, random_part(), TOMBSTONE_SECONDS * 1000, ""]
        answer, *report = await self._client.script(_DELETE, [address.record, address.tombstone], args)
        check_answer(answer, "Response", response_id)
        await self._writer.quota.settle(owner, address.tag, report)


def _check_verdict(verdict: bytes, response_id: str) -> None:
    if verdict == Reply.DELETED:
        raise Deleted("Response", response_id)
    if verdict == Reply.FENCED:
        raise Fenced(response_id)
    check_answer(verdict, "Response", response_id)


def _size(reply: Sequence[bytes | None]) -> int:
    turn, *blobs = reply
    return (json_size(turn, RANDOM_LENGTH) if turn else 0) + sum(json_size(blob) for blob in blobs if blob)


def _items(address: Address, ids: Sequence[str], reply: Sequence[bytes | None], budget: MemoryBudget) -> dict[str, Item]:
    """Return a mapping from ids to the items in a reply, which has the response's turn, if any, and a blob for each id."""
    turn, *blobs = reply
    made: dict[str, Item] = {}
    for each in unpack_turns([turn], budget) if turn is not None else []:
        if each.random == address.random:
            made = {item["id"]: item for item in [*each.input, *each.output] if item.get("id")}
    found = {}
    for item_id, stored in zip(ids, blobs, strict=True):
        item = made.get(item_id) or (unpack_items([stored], budget)[0] if stored is not None else None)
        if item is None:
            raise Missing("Item", item_id)
        found[item_id] = item
    return found
