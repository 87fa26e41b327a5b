"""Create, fill and erase vector stores. Workers ingest their files (`ingestion.py`).

The records show which files wait for ingestion. If a process dies after writing a record and before queueing its job, the sweep
queues the job, so no file waits forever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple, TypeAlias

import orjson

from ..errors import RateLimited, Unavailable
from ..state import Damaged, Missing, OverBound, OverQuota, State, StateFull, StateUnavailable
from ..state.due import DAMAGED_SECONDS
from ..state.store_erasures import CHANGE_SECONDS, WAITING_SECONDS, Due
from ..state.store_file_records import Attributes, FileBatch, NewFile, StoreFile
from ..state.store_files import new_batch_id, new_generation
from ..state.vector_stores import VectorStore, new_store_id
from .chunks import Chunking

logger = logging.getLogger(__name__)

Enqueue: TypeAlias = Callable[[str, str, Sequence[str], str], Awaitable[None]]
"""Queues the ingestion of files. Parameters: store id, owner, file ids, generation. Jobs that are already queued stay as is."""

EXPIRED_SECONDS = 30 * 24 * 3600
"""Time in seconds for which the record of an expired store is kept."""
MAX_WAITING = 100_000
"""Maximum number of an owner's files that wait to be ingested."""
_SWEEP_INTERVAL = 60.0
_SWEEP_BATCH = 100
_CONCURRENT = 2  # maximum number of files whose texts are read concurrently
_ERASED = 250  # number of files that are erased from a store at a time


class Addition(NamedTuple):
    """A file that a request adds to a store."""

    file_id: str
    attributes: Attributes
    chunking: Chunking


class VectorStores:
    """The vector stores of all owners.

    Every coroutine raises `Unavailable` if Redis fails, and `Missing` if the owner has no such store, file or batch.
    """

    def __init__(self, state: State, enqueue: Enqueue) -> None:
        self.records = state.vector_stores
        self.files = state.store_files
        self._uploads = state.files
        self._checks = state.store_erasures
        self._index = state.chunk_index
        self._queue = state.ingestion_queue
        self._enqueue = enqueue
        self._reading = asyncio.Semaphore(_CONCURRENT)

    async def create(
        self, owner: str, name: str, description: str, metadata: dict[str, str], days: int | None, files: Sequence[Addition]
    ) -> VectorStore:
        """Create a store with `files`. It expires `days` after its last use, unless that is None.

        Raises `OverBound` if the owner has too many stores, and `OverQuota` if the owner has stored too much.
        """
        await self._check_waiting(owner, len(files))
        found, now = await self._resolve(files, owner), int(time.time())
        store = VectorStore(new_store_id(), name, now, now, description, metadata, days)
        await self.records.create(store, owner)
        await self._watch(store, owner)
        try:
            if found:
                await self._attach(store.id, owner, found)
        except (OverBound, OverQuota, Missing):
            await self.delete(store.id, owner)
            raise
        return await self.records.get(store.id, owner)

    async def update(self, store_id: str, owner: str, changes: dict[str, Any]) -> VectorStore:
        """Change the `name`, `metadata` or `days` of a store. Raises `BadRequest` if the store has expired."""
        fields = {**changes, "active": int(time.time())}
        if "metadata" in fields:
            fields["metadata"] = orjson.dumps(fields["metadata"])
        await self.records.update(store_id, owner, fields)
        store = await self.records.get(store_id, owner)
        await self._watch(store, owner)
        return store

    async def _watch(self, store: VectorStore, owner: str) -> None:
        if store.expires_at is not None:
            await self._checks.schedule([Due(owner, store.id)], store.expires_at)

    async def delete(self, store_id: str, owner: str) -> None:
        """Delete a store and its chunks, but not its files."""
        check = [Due(owner, store_id)]
        try:
            is_indexed = (await self.records.get(store_id, owner)).is_indexed
        except Damaged:
            is_indexed = True
        with suppress(StateFull):  # deleting frees memory
            await self._checks.schedule(check, int(time.time()) + CHANGE_SECONDS)  # if this process dies, another one erases
        await self.records.delete(store_id, owner)
        await self._erase(store_id, owner)
        if is_indexed:
            await self._index.drop(store_id)
        await self._checks.schedule(check, None)

    async def _erase(self, store_id: str, owner: str) -> None:
        """Remove all files from a store that was deleted or has expired."""
        some = list[StoreFile]()
        async for file in self.files.each(store_id, owner):
            some.append(file)
        for start in range(0, len(some), _ERASED):
            await self.files.detach(store_id, owner, some[start : start + _ERASED])

    # -- files ---------------------------------------------------------------------------------------------------------

    async def add(self, store_id: str, owner: str, file: Addition) -> StoreFile:
        """Add a file, or ingest it again if the store already has it.

        Raises `BadRequest` if the store has expired, `OverBound` if it is full, `OverQuota` if the owner has stored too much.
        """
        await self.records.get(store_id, owner)
        await self._check_waiting(owner, 1)
        await self._attach(store_id, owner, await self._resolve([file], owner))
        return await self.files.get(store_id, owner, file.file_id)

    async def add_batch(self, store_id: str, owner: str, files: Sequence[Addition]) -> FileBatch:
        """Add files as a batch. Raises the same errors as `add`."""
        await self.records.get(store_id, owner)
        await self._check_waiting(owner, len(files))
        batch_id = new_batch_id()
        await self._attach(store_id, owner, await self._resolve(files, owner), batch_id)
        return await self.files.batch(store_id, owner, batch_id)

    async def file(self, store_id: str, owner: str, file_id: str) -> StoreFile:
        await self.records.get(store_id, owner)
        return await self.files.get(store_id, owner, file_id)

    async def describe(self, store_id: str, owner: str, file_id: str, attributes: Attributes) -> StoreFile:
        """Replace the attributes of a file."""
        await self.files.describe(store_id, owner, file_id, attributes)
        return await self.files.get(store_id, owner, file_id)

    async def remove(self, store_id: str, owner: str, file_id: str) -> None:
        """Remove a file and its chunks from a store, without deleting the file."""
        await self.files.detach(store_id, owner, [await self.file(store_id, owner, file_id)])

    async def text(self, store_id: str, owner: str, file_id: str) -> list[str]:
        """Return the text of a file as extracted for the store, in parts. Until the file is ingested, the list is empty."""
        file = await self.file(store_id, owner, file_id)
        if not file.block:
            return []
        async with self._reading:
            texts, starts = await self.files.read_document(file)
            return await asyncio.to_thread(lambda: list(_without_overlap(texts, starts)))

    async def batch(self, store_id: str, owner: str, batch_id: str) -> FileBatch:
        await self.records.get(store_id, owner)
        return await self.files.batch(store_id, owner, batch_id)

    async def cancel(self, store_id: str, owner: str, batch_id: str) -> FileBatch:
        """Cancel the ingestion of the files of a batch that are in progress."""
        await self.records.get(store_id, owner)
        await self.files.cancel(store_id, owner, batch_id)
        return await self.files.batch(store_id, owner, batch_id)

    async def _check_waiting(self, owner: str, added: int) -> None:
        """Raises `RateLimited` if too many files of the owner would wait to be ingested."""
        if added and await self._queue.waiting(owner) + added > MAX_WAITING:
            raise RateLimited(f"More than {MAX_WAITING} of your files would wait to be added.", retry_after=60)

    async def _resolve(self, files: Sequence[Addition], owner: str) -> list[NewFile]:
        """Return the files with their names. Raises `Missing` if the owner does not have one of them."""
        uploads = await self._uploads.get_all([one.file_id for one in files], owner)
        return [
            NewFile(one.file_id, upload.filename, one.attributes, asdict(one.chunking))
            for one, upload in zip(files, uploads, strict=True)
        ]

    async def _attach(self, store_id: str, owner: str, files: Sequence[NewFile], batch_id: str = "") -> None:
        generation, ids = new_generation(), [one.file_id for one in files]
        await self._watch_jobs(store_id, owner, ids, generation)
        await self.files.attach(store_id, owner, files, generation, batch_id)
        await self._add_jobs(store_id, owner, ids, generation)

    async def _watch_jobs(self, store_id: str, owner: str, file_ids: Sequence[str], generation: str) -> None:
        """Schedule a check that queues the files again if their jobs are lost."""
        checks = [Due(owner, store_id, file_id, generation=generation) for file_id in file_ids]
        await self._checks.schedule(checks, int(time.time()) + WAITING_SECONDS)

    async def _add_jobs(self, store_id: str, owner: str, file_ids: Sequence[str], generation: str) -> None:
        try:
            await self._enqueue(store_id, owner, file_ids, generation)
        except StateUnavailable as error:
            logger.warning("cannot queue %d files for ingestion, will retry: %s", len(file_ids), error.message)

    async def rebuild(self, store_id: str, owner: str) -> int:
        """Ingest all files of a store again, for example with a new embedding model. Return the number of files.

        A file is not found in searches until it has been ingested. Raises `BadRequest` if the store has expired.
        """
        await self.records.use(store_id, owner)
        files, generation = [file async for file in self.files.each(store_id, owner)], new_generation()
        await self._watch_jobs(store_id, owner, [file.id for file in files], generation)
        await self.files.begin_again(store_id, owner, files, generation)
        await self._add_jobs(store_id, owner, [file.id for file in files], generation)
        return len(files)

    # -- scheduled checks ----------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Call `do_due` periodically, until cancelled. Several processes may do this at the same time."""
        while True:
            try:
                while await self.do_due() == _SWEEP_BATCH:
                    pass
            except Unavailable as error:
                logger.debug("cannot check vector stores, will retry: %s", error.message)
            await asyncio.sleep(_SWEEP_INTERVAL)

    async def do_due(self) -> int:
        """Run the due checks: expire stores, erase the remains of deleted ones, and queue files whose jobs were lost.

        Return the number of checks.
        """
        checks = await self._checks.due(_SWEEP_BATCH)
        for one in checks:
            check = self._check_block if one.block else self._check_job if one.generation else self._check_store
            try:
                await check(one)
            except Damaged:  # already logged by the Redis client
                await self._checks.schedule([one], int(time.time()) + DAMAGED_SECONDS)
        return len(checks)

    async def _check_store(self, check: Due) -> None:
        expires_at = await self.records.expire(check.store_id, check.owner)
        if expires_at is None:
            expires_at = await self._erase_expired(check.store_id, check.owner)
        await self._checks.schedule([check], expires_at or None)

    async def _erase_expired(self, store_id: str, owner: str) -> int:
        """Erase what a store that has expired or was deleted has left. Return when its record will be erased, or 0."""
        await self._erase(store_id, owner)
        try:
            store = await self.records.get(store_id, owner)
        except Missing:
            return 0
        if store.is_indexed:
            await self._index.drop(store_id)
        erased_at = (store.expires_at or 0) + EXPIRED_SECONDS
        if erased_at > time.time():
            return erased_at
        await self.records.delete(store_id, owner)
        return 0

    async def _check_block(self, check: Due) -> None:
        try:
            file = await self.files.get(check.store_id, check.owner, check.file_id)
        except Missing:
            file = None
        if file is not None and file.block == check.block:
            await self._checks.schedule([check], None)
        else:
            await self._checks.erase_blocks(check.store_id, check.owner, [(check.file_id, check.block)])

    async def _check_job(self, check: Due) -> None:
        if await self.files.get_pending(check.store_id, check.owner, check.file_id, check.generation) is None:
            await self._checks.schedule([check], None)
        else:
            await self._checks.schedule([check], int(time.time()) + WAITING_SECONDS)
            await self._enqueue(check.store_id, check.owner, [check.file_id], check.generation)


def _without_overlap(texts: Sequence[str], starts: Sequence[int]) -> Iterator[str]:
    """Yield each chunk up to the beginning of the next one."""
    for place, text in enumerate(texts):
        yield text[: starts[place + 1] - starts[place]] if place + 1 < len(texts) else text
