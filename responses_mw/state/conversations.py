"""Stored conversations and their items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from ..ids import random_part
from .errors import Missing, NewerRecord, OverBound, StateUnavailable
from .retractions import TOMBSTONE_SECONDS as UNDONE_SECONDS
from .retractions import Undo, own_items
from .schema import VERSION, Address, conversation_key, conversation_tag, json_size, pack, unpack
from .scripts import script
from .values import Bounds, Chain, Conversation, Item, Page, no_such_cursor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..lua import Script
    from .client import Client
    from .quota import Quota
    from .retractions import Retractions

__all__ = ["Conversations"]

_CREATE = script("conversation_create")
_UPDATE = script("conversation_update")
_DELETE = script("conversation_delete")
_APPEND = script("conversation_append")
_ITEMS = script("conversation_items")
_DELETE_ITEM = script("conversation_item_delete")
_UNDO = script("conversation_undo")

# Overhead of an item in Redis besides its JSON, in bytes (as in lua/lib.lua).
ITEM_BYTES = 256


class Conversations:
    """The conversations of all owners. Each call can access only conversations of its ``owner``.

    Methods raise StateUnavailable, and Missing if the owner has no such conversation.
    """

    def __init__(
        self,
        client: Client,
        quota: Quota,
        retractions: Retractions,
        *,
        ttl_seconds: int,
        bounds: Bounds,
        patience: float,
    ) -> None:
        """``ttl_seconds`` is the lifetime of a conversation after its last change. ``patience`` is the number of seconds for
        which creating a conversation, or appending to it, is retried."""
        self._client = client
        self._quota = quota
        self._retractions = retractions
        self._ttl = ttl_seconds * 1000
        self._bounds = bounds
        self._patience = patience

    async def create(self, conversation: Conversation, items: Sequence[Item], owner: str) -> None:
        """Store a new conversation with its first ``items``, whose ids must contain the conversation's tag.

        Raises OverBound, OverQuota.
        """
        tag, blobs = conversation_tag(conversation.id), _blobs(items)
        metadata = orjson.dumps(conversation.metadata)
        args: list[str | bytes | int] = [owner, conversation.created_at, metadata, self._ttl, *self._limits, *blobs]
        undo = Undo(_UNDO, [], [owner, UNDONE_SECONDS * 1000, "1"], owner, "c")
        async with self._quota.reserved(owner, tag, "c", len(metadata) + _size(blobs), ttl=self._ttl) as report:
            answer, *report[:] = await self._write(_CREATE, Address(tag, random_part()), args, undo)
        _check(answer, conversation.id)

    async def get(self, conversation_id: str, owner: str) -> Conversation:
        fields = await self._client.command("HMGET", _key(conversation_id), "v", "owner", "created_at", "metadata")
        version, of, created_at, metadata = fields
        if of != owner.encode():
            raise Missing("Conversation", conversation_id)
        if int(version) > VERSION:
            raise NewerRecord
        return Conversation(conversation_id, int(created_at), orjson.loads(metadata))

    async def update(self, conversation_id: str, metadata: dict[str, str], owner: str) -> Conversation:
        """Replace the metadata and return the conversation."""
        args: list[str | bytes | int] = [owner, orjson.dumps(metadata), self._ttl]
        answer, *rest = await self._client.script(_UPDATE, [_key(conversation_id)], args)
        _check(answer, conversation_id)
        created_at, *report = rest
        await self._quota.settle(owner, conversation_tag(conversation_id), report)
        return Conversation(conversation_id, int(created_at), metadata)

    async def delete(self, conversation_id: str, owner: str) -> None:
        """Delete the conversation and its items. Responses made in it remain, but cannot be continued."""
        answer, *report = await self._client.script(_DELETE, [_key(conversation_id)], [owner])
        _check(answer, conversation_id)
        await self._quota.settle(owner, conversation_tag(conversation_id), report)

    async def chain(self, conversation_id: str, owner: str) -> Chain:
        """Return the conversation's items as a history. The commit of a response that continues it appends to them."""
        seen, items, size = await self._read(conversation_id, owner)
        return Chain(conversation_tag(conversation_id), items, size=size, conversation=conversation_id, seen=seen)

    def check_room(self, chain: Chain, items: int) -> None:
        """Raise OverBound if the conversation read as ``chain`` has no room for this number of new ``items`` and an answer."""
        if len(chain.items) + items >= self._bounds.chain_items or chain.size >= self._bounds.chain_bytes:
            raise OverBound(
                f"Conversation with id '{chain.conversation}' is full: the maximum is {self._bounds.chain_items} items "
                f"and {self._bounds.chain_bytes} bytes."
            )

    async def until(self, tag: str, owner: str, seen: int) -> list[Item] | None:
        """Return the items of the conversation with ``tag`` up to the counter ``seen``; None if it has been deleted."""
        try:
            _, items, _ = await self._read(f"conv_{tag}", owner, upto=str(seen))
        except Missing:
            return None
        return items

    async def append(self, conversation_id: str, items: Sequence[Item], owner: str, random: str | None = None) -> None:
        """Append items, whose ids must contain the conversation's tag, as one block.

        ``random`` is the random part of the ids that were created for these items. Raises OverBound, OverQuota.
        """
        write, blobs = Address(conversation_tag(conversation_id), random or random_part()), _blobs(items)
        args: list[str | bytes | int] = [owner, self._ttl, *self._limits, *blobs]
        made, name = own_items((item["id"] for item in items), write.random), f"a{write.random}"
        undo = Undo(_UNDO, [], [owner, UNDONE_SECONDS * 1000, "", *made], owner, name)
        async with self._quota.reserved(owner, write.tag, name, _size(blobs)) as report:
            answer, *report[:] = await self._write(_APPEND, write, args, undo)
        _check(answer, conversation_id)

    async def _write(self, script: Script, write: Address, args: list[str | bytes | int], undo: Undo) -> Any:
        """Run a script. If it is given up, undo what it did or may still do, because the client gets an error."""
        keys = [conversation_key(write.tag), write.tombstone]
        try:
            return await self._client.persistently(script, keys, args, patience=self._patience)
        except StateUnavailable as error:
            if error.passing:
                self._retractions.add(write, undo._replace(keys=keys))
            raise

    async def items(
        self, conversation_id: str, owner: str, *, after: str | None = None, limit: int = 20, order: str = "desc"
    ) -> Page:
        """Return a page of up to ``limit`` items after the item ``after``. Raises BadRequest if there is no such item."""
        args: list[str | bytes | int] = [owner, order, after or "", limit + 1, "+inf"]
        answer, *rest = await self._client.script(_ITEMS, [_key(conversation_id)], args)
        if answer == b"cursor":
            raise no_such_cursor("after", str(after))
        _check(answer, conversation_id)
        return Page(_unblob(rest[1 : limit + 1], conversation_id), has_more=len(rest) - 1 > limit)

    async def item(self, conversation_id: str, item_id: str, owner: str) -> Item:
        """Return an item. Raises Missing if the conversation or the item does not exist."""
        key = _key(conversation_id)
        of, blob = await self._client.pipeline([("HGET", key, "owner"), ("HGET", f"{key}:items", item_id)])
        if of != owner.encode():
            raise Missing("Conversation", conversation_id)
        if blob is None:
            raise Missing("Item", item_id)
        return _unblob([blob], conversation_id)[0]

    async def delete_item(self, conversation_id: str, item_id: str, owner: str) -> Conversation:
        """Delete an item and return the conversation. Raises Missing if either does not exist."""
        answer, *rest = await self._client.script(_DELETE_ITEM, [_key(conversation_id)], [owner, item_id])
        if answer == b"cursor":
            raise Missing("Item", item_id)
        _check(answer, conversation_id)
        created_at, metadata, *report = rest
        await self._quota.settle(owner, conversation_tag(conversation_id), report)
        return Conversation(conversation_id, int(created_at), orjson.loads(metadata))

    async def _read(self, conversation_id: str, owner: str, upto: str = "+inf") -> tuple[int, list[Item], int]:
        """Return the counter of the newest item, the items up to the counter ``upto`` in order, and the size of their JSON."""
        args: list[str | bytes | int] = [owner, "asc", "", -1, upto]
        answer, *rest = await self._client.script(_ITEMS, [_key(conversation_id)], args)
        _check(answer, conversation_id)
        last, *blobs = rest
        return int(last), _unblob(blobs, conversation_id), sum(json_size(blob) for blob in blobs)

    @property
    def _limits(self) -> tuple[int, int]:
        return self._bounds.chain_items, self._bounds.chain_bytes


def _key(conversation_id: str) -> str:
    return conversation_key(conversation_tag(conversation_id))


def _blobs(items: Sequence[Item]) -> list[str | bytes]:
    return [part for item in items for part in (item["id"], pack(orjson.dumps(item)))]


def _size(blobs: Sequence[str | bytes]) -> int:
    """Return the bytes that the encoded items count towards the quota."""
    return sum(ITEM_BYTES + json_size(blob) for blob in blobs if isinstance(blob, bytes))


def _unblob(blobs: Sequence[bytes | None], conversation_id: str) -> list[dict[str, Any]]:
    """Decode the items in ``blobs``. Raises Missing for the conversation if Redis has evicted one of them."""
    if any(blob is None for blob in blobs):
        raise Missing("Conversation", conversation_id)
    return [unpack(blob) for blob in blobs if blob is not None]


def _check(answer: bytes, conversation_id: str) -> None:
    """Raise the error for a script's ``answer``, if it is one."""
    if answer == b"missing":
        raise Missing("Conversation", conversation_id)
    if answer == b"newer":
        raise NewerRecord
    if answer == b"bound":
        raise OverBound("The conversation would exceed its maximum size or number of items.")
