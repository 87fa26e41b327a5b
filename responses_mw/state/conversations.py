"""Store, read and change conversations and their items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from ..ids import random_part
from ..lua import Script, load
from ..protocol.types import Item
from ..tasks import by_size
from .client import Args, Client
from .errors import Missing, OverBound, Reply, check_answer
from .models import Chain, Conversation, Page, StateOptions, no_such_cursor
from .schema import (
    Address,
    MemoryBudget,
    check_version,
    conversation_key,
    conversation_tag,
    item_blobs,
    json_size,
    reading,
    unpack_items,
)
from .writes import UNDONE_SECONDS, Write, Writer, own_items

_CREATE, _UPDATE, _DELETE, _APPEND, _ITEMS, _DELETE_ITEM, _UNDO = load(
    "state", *(f"conversation_{name}" for name in ("create", "update", "delete", "append", "items", "item_delete", "undo"))
)

ITEM_BYTES = 256  # overhead of an item in Redis besides its JSON, in bytes (as in lua/lib.lua)


class Conversations:
    """The conversations of all owners.

    Every coroutine raises StateUnavailable if Redis fails. Methods with a `conversation_id` raise Missing if the owner has no
    such conversation. `create` and `append` raise OverBound if the items do not fit into the conversation, and OverQuota if
    they do not fit into the owner's storage quota. Methods that return items raise OverBound if the items take too much memory.
    """

    def __init__(self, client: Client, writer: Writer, options: StateOptions) -> None:
        self._client = client
        self._writer = writer
        self._ttl = options.ttl_seconds * 1000
        self._limits = options.chain_items, options.chain_bytes
        self._max_memory = options.chain_memory

    async def create(self, conversation: Conversation, items: Sequence[Item], owner: str) -> None:
        """Store a new conversation with its first `items`. The items' ids must contain the conversation's tag."""
        address, metadata = Address(conversation_tag(conversation.id), random_part()), orjson.dumps(conversation.metadata)
        blobs, keys = await _blobs(items), [conversation_key(address.tag), address.tombstone]
        args: Args = [owner, conversation.created_at, metadata, self._ttl, *self._limits, *blobs]
        undo: Args = [owner, UNDONE_SECONDS * 1000, "1"]
        size = len(metadata) + _size(blobs)
        write = Write(_CREATE, address, keys, args, owner, "c", size, ttl=self._ttl, undo=(_UNDO, undo))
        check_answer(await self._writer.write(write), "Conversation", conversation.id)

    async def get(self, conversation_id: str, owner: str) -> Conversation:
        fields = await self._client.command("HMGET", _key(conversation_id), "v", "owner", "created_at", "metadata")
        version, of, created_at, metadata = fields
        if of != owner.encode():
            raise Missing("Conversation", conversation_id)
        check_version(version)
        return _decoded(conversation_id, created_at, metadata)

    async def update(self, conversation_id: str, metadata: dict[str, str], owner: str) -> Conversation:
        created_at, *report = await self._run(_UPDATE, conversation_id, [owner, orjson.dumps(metadata), self._ttl])
        await self._writer.quota.settle(owner, conversation_tag(conversation_id), report)
        return Conversation(conversation_id, int(created_at), metadata)

    async def delete(self, conversation_id: str, owner: str) -> None:
        """Delete the conversation and its items. Responses that were created in the conversation can no longer be continued."""
        report = await self._run(_DELETE, conversation_id, [owner])
        await self._writer.quota.settle(owner, conversation_tag(conversation_id), report)

    async def chain(self, conversation_id: str, owner: str) -> Chain:
        """Return the conversation as a history. `Responses.commit` appends the new response's items to the conversation."""
        seen, items, size = await self._read(conversation_id, owner)
        return Chain(conversation_tag(conversation_id), items, size=size, conversation=conversation_id, seen=seen)

    def check_room(self, chain: Chain, items: int) -> None:
        """Check that `items` new items and an answer fit into the conversation of `chain`. Raises OverBound if it is full."""
        max_items, max_bytes = self._limits
        if len(chain.items) + items >= max_items or chain.size >= max_bytes:
            maximum = f"the maximum is {max_items} items and {max_bytes} bytes"
            raise OverBound(f"Conversation with id '{chain.conversation}' is full: {maximum}.")

    async def until(self, tag: str, owner: str, seen: int) -> list[Item] | None:
        """Return the items up to number `seen` (see `Chain`), or None if the owner has no conversation with this tag."""
        try:
            _, items, _ = await self._read(f"conv_{tag}", owner, upto=str(seen))
        except Missing:
            return None
        return items

    async def append(self, conversation_id: str, items: Sequence[Item], owner: str, random: str | None = None) -> None:
        """Append `items` to a conversation as one block. The items' ids must contain the conversation's tag.

        `random` is the random part in the ids of new items, or None if no item is new. If the write fails and is undone, only
        the new items are removed.
        """
        address, blobs = Address(conversation_tag(conversation_id), random or random_part()), await _blobs(items)
        keys = [conversation_key(address.tag), address.tombstone]
        args: Args = [owner, self._ttl, *self._limits, *blobs]
        undo: Args = [owner, UNDONE_SECONDS * 1000, "", *own_items(items, address.random)]
        write = Write(_APPEND, address, keys, args, owner, f"a{address.random}", _size(blobs), undo=(_UNDO, undo))
        check_answer(await self._writer.write(write), "Conversation", conversation_id)

    async def items(
        self, conversation_id: str, owner: str, *, after: str | None = None, limit: int = 20, order: str = "desc"
    ) -> Page:
        """Return a page of up to `limit` items in `order` (`asc` or `desc`).

        The page starts after the item with the id `after`, or with the first item if `after` is None. Raises BadRequest if the
        conversation has no item with this id.
        """
        found = await self._run(_ITEMS, conversation_id, [owner, order, after or "", limit + 1, "+inf"])
        if found is None:
            raise no_such_cursor("after", str(after))
        _, *blobs = found
        return Page(await self._unpack(blobs[:limit], conversation_id), has_more=len(blobs) > limit)

    async def item(self, conversation_id: str, item_id: str, owner: str) -> Item:
        """Return an item. Raises Missing if the conversation or the item does not exist."""
        key = _key(conversation_id)
        of, blob = await self._client.pipeline([("HGET", key, "owner"), ("HGET", f"{key}:items", item_id)])
        if of != owner.encode():
            raise Missing("Conversation", conversation_id)
        if blob is None:
            raise Missing("Item", item_id)
        return (await self._unpack([blob], conversation_id))[0]

    async def delete_item(self, conversation_id: str, item_id: str, owner: str) -> Conversation:
        """Delete an item and return the conversation. Raises Missing if the conversation or the item does not exist."""
        found = await self._run(_DELETE_ITEM, conversation_id, [owner, item_id])
        if found is None:
            raise Missing("Item", item_id)
        created_at, metadata, *report = found
        await self._writer.quota.settle(owner, conversation_tag(conversation_id), report)
        return _decoded(conversation_id, created_at, metadata)

    async def _read(self, conversation_id: str, owner: str, upto: str = "+inf") -> tuple[int, list[Item], int]:
        """Return the number of the newest item, the items up to number `upto` in order, and the size of these items' JSON."""
        last, *blobs = await self._run(_ITEMS, conversation_id, [owner, "asc", "", -1, upto])
        items = await self._unpack(blobs, conversation_id)
        with reading("conversation"):
            return int(last), items, sum(json_size(blob) for blob in blobs)

    async def _unpack(self, blobs: Sequence[bytes | None], conversation_id: str) -> list[Item]:
        """Decode items. Raises Missing if Redis has evicted one (None), or OverBound if they take too much memory."""
        present = [blob for blob in blobs if blob is not None]
        if len(present) < len(blobs):
            raise Missing("Conversation", conversation_id)
        return await by_size(sum(map(json_size, present)), unpack_items, present, MemoryBudget(self._max_memory))

    async def _run(self, script: Script, conversation_id: str, args: Args) -> Any:
        """Run a script and return its reply without the verdict, or None if the item in `args` does not exist."""
        answer, *rest = await self._client.script(script, [_key(conversation_id)], args)
        check_answer(answer, "Conversation", conversation_id)
        return None if answer == Reply.CURSOR else rest


def _key(conversation_id: str) -> str:
    return conversation_key(conversation_tag(conversation_id))


def _decoded(conversation_id: str, created_at: bytes, metadata: bytes) -> Conversation:
    with reading("conversation"):
        return Conversation(conversation_id, int(created_at), {**orjson.loads(metadata)})


async def _blobs(items: Sequence[Item]) -> list[str | bytes]:
    texts = [orjson.dumps(item) for item in items]
    return await by_size(sum(map(len, texts)), item_blobs, items, texts)


def _size(blobs: Sequence[str | bytes]) -> int:
    return sum(ITEM_BYTES + json_size(blob) for blob in blobs if isinstance(blob, bytes))
