"""Store the records of vector stores. A store's files are in `store_files.py`, and their chunks in `blocks.py`."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import orjson

from ..ids import random_part
from ..lua import load
from .client import Args, Client
from .errors import Damaged, Missing, StateFull
from .schema import Address, reading
from .store_keys import DAY, Fields, Index, Range, StoreKeys, check_verdict, fields_of, index_of_stores, integer, text
from .writes import UNDONE_SECONDS, Write, Writer

_CREATE, _UPDATE, _DELETE, _EXPIRE = load(
    "state", *(f"store_{name}" for name in ("create", "update", "delete", "expire")), library="store_lib"
)

MAX_STORES = 10_000
"""Maximum number of vector stores of an owner."""
STORE_BYTES = 1536  # overhead of a record in Redis, in bytes
FOREVER = 10 * 365 * DAY * 1000  # TTL in ms that counts for an owner's quota, as in lua/store_lib.lua
_TOUCH_SECONDS = 60  # minimum seconds between two updates of the time of the last use


def new_store_id() -> str:
    return f"vs_{random_part()}"


class FileCounts(NamedTuple):
    """The number of files by their status."""

    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0

    @classmethod
    def of(cls, fields: Fields) -> Self:
        return cls(*(integer(fields, name) for name in cls._fields))

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True, slots=True)
class VectorStore:
    """The record of a vector store.

    active_at   time of the last use in Unix seconds
    days        lifetime in days after the last use; None if the store does not expire
    size        size in bytes of the chunks of its files
    version     changes whenever a file changes, so processes can tell whether their copy is current
    is_indexed  whether the search module of the Redis server has an index of its chunks
    space       the vector space of its vectors (`Embedder.space`), "" until a file is ingested
    dimension   the size of its vectors, 0 until a file is ingested
    """

    id: str
    name: str
    created_at: int
    active_at: int
    description: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    days: int | None = None
    counts: FileCounts = field(default_factory=FileCounts)
    size: int = 0
    version: int = 0
    space: str = ""
    dimension: int = 0
    was_expired: bool = False
    is_indexed: bool = False

    @property
    def expires_at(self) -> int | None:
        return None if self.days is None else self.active_at + self.days * DAY

    @property
    def is_expired(self) -> bool:
        return self.was_expired or (self.expires_at is not None and self.expires_at <= time.time())


class StorePage(NamedTuple):
    stores: list[VectorStore]
    has_more: bool


class StoreRecords:
    """The vector stores of all owners.

    Every coroutine raises StateUnavailable if Redis fails, and Missing if the owner has no such store.
    """

    def __init__(self, client: Client, writer: Writer) -> None:
        self._client = client
        self._writer = writer

    async def create(self, store: VectorStore, owner: str) -> None:
        """Store a new record. Raises OverBound if the owner has too many stores, or OverQuota if too much is stored."""
        keys = StoreKeys.of(store.id, owner)
        days: Args = ["days", store.days] if store.days is not None else []
        args: Args = [keys.name, time.time_ns() // 1000, MAX_STORES, "name", store.name, "created_at", store.created_at]
        args += ["active", store.active_at, "description", store.description, "metadata", orjson.dumps(store.metadata), *days]
        undo: Args = [keys.name, UNDONE_SECONDS * 1000]
        address, names = Address(keys.tag, keys.name), [keys.record, keys.stores, keys.tombstone]
        write = Write(_CREATE, address, names, args, owner, f"v{keys.name}", STORE_BYTES, ttl=FOREVER, undo=(_DELETE, undo))
        bound = f"You have reached the maximum of {MAX_STORES} vector stores. Delete some."
        check_verdict(await self._writer.write(write), store.id, bound)

    async def owners(self) -> list[str]:
        """Return the owners that have vector stores. This scans all keys."""
        return [key.split("{f")[1].split("}")[0] for key in await self._client.scan(index_of_stores("*"))]

    async def get(self, store_id: str, owner: str) -> VectorStore:
        values = await self._client.command("HGETALL", StoreKeys.of(store_id, owner).record)
        if not values:
            raise Missing("Vector store", store_id)
        return _store(store_id, fields_of(values))

    async def exists(self, store_id: str, owner: str) -> bool:
        """Return whether the owner has the store. It may have expired, or its record may be damaged."""
        try:
            key = StoreKeys.of(store_id, owner).record
        except Missing:
            return False
        return bool(await self._client.command("EXISTS", key))

    async def use(self, store_id: str, owner: str) -> VectorStore:
        """Return a store, and set the time of its last use unless Redis is full. Raises BadRequest if it has expired."""
        store, now = await self.get(store_id, owner), int(time.time())
        if store.is_expired:
            check_verdict(b"expired", store_id)
        if store.active_at + _TOUCH_SECONDS < now:
            with suppress(StateFull):  # a search must work even if Redis is full
                await self.update(store_id, owner, {"active": now})
        return store

    async def page(self, owner: str, wanted: Range) -> StorePage:
        """Return a range of the owner's stores, except those with a damaged record.

        Raises BadRequest if an id of the range is unknown.
        """
        key = index_of_stores(owner)
        found, has_more = await Index(self._client, key, f"{key}:", "vs_").select(wanted)
        stores = list[VectorStore]()
        for name, fields in found:
            try:
                stores.append(_store(f"vs_{name}", fields))
            except Damaged:
                self._client.damage(f"{key}:{name}", "the record cannot be read: delete the store")
        return StorePage(stores, has_more)

    async def update(self, store_id: str, owner: str, fields: dict[str, str | bytes | int | None]) -> None:
        """Set fields (`name`, `description`, `metadata` as JSON, `days`, `active`, `indexed`). None deletes a field.

        Raises BadRequest if the store has expired.
        """
        keys = StoreKeys.of(store_id, owner)
        deleted: Args = [name for name, value in fields.items() if value is None]
        args: Args = [keys.name, len(deleted), *deleted]
        for name, value in fields.items():
            args += [name, value] if value is not None else []
        verdict, *report = await self._client.script(_UPDATE, [keys.record], args)
        check_verdict(verdict, store_id)
        await self._writer.quota.settle(owner, keys.tag, report)

    async def delete(self, store_id: str, owner: str) -> None:
        """Delete a record, if there is one. The records of the store's files stay until they are detached."""
        keys = StoreKeys.of(store_id, owner)
        _, *report = await self._client.script(_DELETE, [keys.record, keys.stores, keys.tombstone], [keys.name, 0])
        await self._writer.quota.settle(owner, keys.tag, report)

    async def expire(self, store_id: str, owner: str) -> int | None:
        """Mark a store as expired if its time has come. Return None if it has expired or was deleted.

        Otherwise, return the time in Unix seconds when it will expire, or 0 for never.
        """
        reply = await self._client.script(_EXPIRE, [StoreKeys.of(store_id, owner).record])
        return reply if isinstance(reply, int) else None


def _store(store_id: str, fields: Fields) -> VectorStore:
    with reading("vector store"):
        return VectorStore(
            store_id,
            text(fields, "name"),
            integer(fields, "created_at"),
            integer(fields, "active"),
            text(fields, "description"),
            orjson.loads(fields["metadata"]),
            integer(fields, "days") if "days" in fields else None,
            FileCounts.of(fields),
            integer(fields, "bytes"),
            integer(fields, "version"),
            text(fields, "space"),
            integer(fields, "dimension"),
            "expired" in fields,
            "indexed" in fields,
        )
