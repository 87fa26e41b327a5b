"""Store the files of vector stores, and the batches in which they were added.

Each request to ingest a file has a *generation*. A worker publishes its result, chunks or a failure, for a generation. The
result is rejected if the file has another generation by then, because it was added again, cancelled or removed. The counts of
a store and of a batch change in the same script as the status of the file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress

import orjson

from ..ids import random_part
from ..lua import load
from .blocks import BlockName, Blocks, StoredBlock, new_block_name
from .client import Args, Client
from .errors import Damaged, Missing, OverBound, Reply, StateFull, StateUnavailable
from .schema import reading
from .store_erasures import WRITING_SECONDS, Erasures
from .store_file_records import (
    DAMAGED_CHUNKS,
    Attributes,
    FileBatch,
    NewFile,
    OtherSpace,
    StoreFile,
    StoreFilePage,
    damaged_file,
    decode_file,
)
from .store_keys import (
    DAMAGED_FIELDS,
    Fields,
    Index,
    Range,
    StoreKeys,
    check_verdict,
    fields_in,
    fields_of,
    integer,
    name_of,
    stores_of_file,
    text,
)
from .vector_stores import FileCounts
from .writes import Writer

_ATTACH, _SETTLE, _DETACH, _DESCRIBE, _CANCEL, _FORGET, _CHANGES, _DAMAGED = load(
    "state",
    *(f"store_{name}" for name in ("attach", "settle", "detach", "describe", "cancel", "forget", "changes", "damaged")),
    library="store_lib",
)

MAX_FILES = 10_000
"""Maximum number of files of a vector store."""
BATCH_SECONDS = 7 * 24 * 3600
"""Lifetime of the record of a batch. Its files stay in the store."""
_CHANGED = 500  # if more files have changed, all files are read
_ATTACHED = 250  # number of files that one script call adds or removes

logger = logging.getLogger(__name__)


class StoreFiles:
    """The files of all vector stores.

    Every coroutine raises StateUnavailable if Redis fails, and Missing if the owner has no such store, file or batch.
    """

    def __init__(self, client: Client, writer: Writer, blocks: Blocks, erasures: Erasures) -> None:
        self._client = client
        self._quota = writer.quota
        self._blocks = blocks
        self._erasures = erasures

    # -- adding and removing -------------------------------------------------------------------------------------------

    async def attach(self, store_id: str, owner: str, files: Sequence[NewFile], generation: str, batch_id: str = "") -> None:
        """Add files to a store, and to the batch if there is one. They wait until this `generation` of them is ingested.

        If the store already has a file, its old chunks stay visible until the new ones are published. Raises BadRequest if the
        store has expired, OverBound if it is full, or OverQuota if the owner has stored too much.
        """
        keys, now = StoreKeys.of(store_id, owner), int(time.time())
        await self._quota.check(owner, sum(1024 + len(orjson.dumps(one.attributes)) for one in files))
        batch, names = name_of(batch_id, "vsfb_") if batch_id else "", [keys.record, keys.files, f"rmw:{{f{owner}}}:files"]
        if len(files) > _ATTACHED:  # a single script call checks this itself
            await self._check_room(keys, [name_of(one.file_id, "file-") for one in files])
        for start in range(0, len(files), _ATTACHED):
            args: Args = [keys.name, batch, BATCH_SECONDS * 1000, MAX_FILES, now, time.time_ns() // 1000, generation]
            for one in files[start : start + _ATTACHED]:
                args += [name_of(one.file_id, "file-"), one.filename, orjson.dumps(one.attributes), orjson.dumps(one.chunking)]
            verdict, *report = await self._client.script(_ATTACH, names, args)
            if verdict == Reply.FILE:
                raise Missing("File", f"file-{report[0].decode()}")
            check_verdict(verdict, store_id, _full())
            await self._quota.settle(owner, keys.tag, report)

    async def _check_room(self, keys: StoreKeys, names: Sequence[str]) -> None:
        """Raise OverBound if a store has no room for all of these files, so that it does not get only some of them."""
        count, found = await self._client.pipeline([("ZCARD", keys.files), ("ZMSCORE", keys.files, *names)])
        if count + sum(score is None for score in found) > MAX_FILES:
            raise OverBound(_full())

    async def begin_again(self, store_id: str, owner: str, files: Sequence[StoreFile], generation: str) -> None:
        """Erase the chunks of all `files` of a store, reset its vector space, and set the files to be ingested again.

        Queue the files only after this has returned.
        """
        again = [NewFile(file.id, file.filename, file.attributes, file.chunking) for file in files]
        await self.attach(store_id, owner, again, generation)  # results of older generations are rejected from now on
        blocks = [(file.id, file.block) async for file in self.each(store_id, owner) if file.block]
        keys = StoreKeys.of(store_id, owner)
        await self._erasures.schedule_blocks(store_id, owner, blocks)
        for start in range(0, max(1, len(blocks)), _ATTACHED):
            args: Args = [keys.name, *_named(blocks[start : start + _ATTACHED])]
            _, *report = await self._client.script(_FORGET, [keys.record], args)
            await self._quota.settle(owner, keys.tag, report)
        await self._erasures.erase_blocks(store_id, owner, blocks)

    async def detach(self, store_id: str, owner: str, files: Sequence[StoreFile]) -> None:
        """Remove files and their chunks from a store, even if the store has been deleted."""
        for start in range(0, len(files), _ATTACHED):
            some = files[start : start + _ATTACHED]
            while await self._detach(store_id, owner, some):  # chunks of a file were published meanwhile
                names = {one.id for one in some}
                some = [one async for one in self.each(store_id, owner) if one.id in names]

    async def _detach(self, store_id: str, owner: str, files: Sequence[StoreFile]) -> int:
        """Remove files from a store if they still have the same blocks. Return the number of those that do not."""
        keys, blocks = StoreKeys.of(store_id, owner), [(one.id, one.block) for one in files if one.block]
        with suppress(StateFull):  # removing files frees memory
            await self._erasures.schedule_blocks(store_id, owner, blocks)
        args: Args = [keys.name, *_named([(one.id, "*" if one.is_damaged else one.block) for one in files])]
        left, *report = await self._client.script(_DETACH, [keys.record, keys.files], args)
        await self._quota.settle(owner, keys.tag, report)
        if not left:  # else the scheduled checks erase the blocks
            await self._erasures.erase_blocks(store_id, owner, blocks)
        return int(left)

    async def detach_everywhere(self, file_id: str, owner: str) -> None:
        """Remove a file from all stores of its owner. Do nothing if the id is malformed."""
        for name in await self._client.command("SMEMBERS", stores_of_file(owner, name_of(file_id, "file-"))):
            store_id = f"vs_{name.decode()}"
            try:
                file = await self.get(store_id, owner, file_id)
            except Missing:
                continue
            await self.detach(store_id, owner, [file])

    async def describe(self, store_id: str, owner: str, file_id: str, attributes: Attributes) -> None:
        """Replace the attributes of a file. Raises BadRequest if the store has expired."""
        keys = StoreKeys.of(store_id, owner)
        args: Args = [keys.name, name_of(file_id, "file-"), orjson.dumps(attributes)]
        verdict, *report = await self._client.script(_DESCRIBE, [keys.record], args)
        if verdict == Reply.MISSING:
            raise Missing("File", file_id)
        check_verdict(verdict, store_id)
        await self._quota.settle(owner, keys.tag, report)

    # -- reading -------------------------------------------------------------------------------------------------------

    async def get(self, store_id: str, owner: str, file_id: str) -> StoreFile:
        key = StoreKeys.of(store_id, owner).file(name_of(file_id, "file-"))
        try:
            values = await self._client.command("HGETALL", key)
            fields = fields_of(values)
        except Damaged:
            fields = DAMAGED_FIELDS
        if not fields:
            raise Missing("File", file_id)
        return self._file(store_id, owner, file_id, fields)

    def _file(self, store_id: str, owner: str, file_id: str, fields: Fields) -> StoreFile:
        """Decode the record of a file. If it is damaged, return a failed file in its place."""
        try:
            return decode_file(store_id, file_id, fields)
        except Damaged:
            self._client.damage(StoreKeys.of(store_id, owner).record, f"the record of {file_id} in it cannot be read")
            return damaged_file(store_id, file_id, fields)

    async def page(self, store_id: str, owner: str, wanted: Range, status: str | None, batch_id: str = "") -> StoreFilePage:
        """Return a range of the files of a store, or of a batch if `batch_id` is given.

        If `status` is not None, return only files with that status. Raises BadRequest if an id of the range is unknown.
        """
        keys = StoreKeys.of(store_id, owner)
        key = f"{keys.batch(name_of(batch_id, 'vsfb_'))}:files" if batch_id else keys.files
        index = Index(self._client, key, keys.file(), "file-")
        found, has_more = await index.select(wanted, (lambda fields: text(fields, "status") == status) if status else None)
        return StoreFilePage([self._file(store_id, owner, f"file-{name}", fields) for name, fields in found], has_more)

    async def each(self, store_id: str, owner: str) -> AsyncIterator[StoreFile]:
        """Yield all files of a store, even if the store has been deleted."""
        keys = StoreKeys.of(store_id, owner)
        async for name, fields in Index(self._client, keys.files, keys.file(), "file-").each():
            if fields:
                yield self._file(store_id, owner, f"file-{name}", fields)

    async def changes(self, store_id: str, owner: str, version: int) -> dict[str, StoreFile | None] | None:
        """Return the files that have changed since a version of the store, by id. Removed files are None.

        Return None if more than 500 files have changed, or if the version is too old. The caller must then read all files.
        """
        keys = StoreKeys.of(store_id, owner)
        reply = await self._client.script(_CHANGES, [keys.record, f"{keys.record}:changes"], [version, _CHANGED])
        if reply is None:
            return None
        found = dict[str, StoreFile | None]()
        for name, values in zip(reply[::2], reply[1::2], strict=True):
            file_id, fields = f"file-{name.decode()}", fields_in(values)
            found[file_id] = self._file(store_id, owner, file_id, fields) if fields else None
        return found

    async def read_block(self, file: StoreFile) -> StoredBlock:
        """Return the visible chunks of a file. Raises Missing if it has none, or if they have just been replaced."""
        if not file.block:
            raise Missing("Content of file", file.id)
        return await self._blocks.read(file.store_id, file.id, file.block, file.pieces)

    async def read_document(self, file: StoreFile) -> tuple[list[str], list[int]]:
        """Return the texts of the visible chunks of a file, and their offsets. Raises the same error as `read_block`."""
        if not file.block:
            raise Missing("Content of file", file.id)
        return await self._blocks.read_document(file.store_id, BlockName(file.id, file.block), file.pieces)

    # -- ingestion -----------------------------------------------------------------------------------------------------

    async def get_pending(self, store_id: str, owner: str, file_id: str, generation: str) -> StoreFile | None:
        """Return the record of a file if it still waits for the result of `generation`, else None."""
        try:
            file = await self.get(store_id, owner, file_id)
        except Missing:
            return None
        return file if file.status == "in_progress" and file.generation == generation else None

    async def publish(self, file: StoreFile, owner: str, block: StoredBlock) -> bool:
        """Replace the visible chunks of a file atomically. Return False if `file.generation` is no longer the current one.

        Raises OverQuota or OverBound if the block is too large, or OtherSpace. Nothing has changed after an error.
        """
        name = new_block_name()
        async with self._quota.hold(owner, f"f{owner}b{name}", block.size):
            return await self._publish(file, owner, name, block)

    async def _publish(self, file: StoreFile, owner: str, name: str, block: StoredBlock) -> bool:
        await self._erasures.schedule_new_block(file.store_id, owner, file.id, name)
        if file.block:
            await self._erasures.schedule_blocks(file.store_id, owner, [(file.id, file.block)])
        try:
            unwanted = await self._write(file, owner, name, block)
        except (OtherSpace, OverBound):
            await self._erasures.erase_blocks(file.store_id, owner, [(file.id, name)])
            raise
        if unwanted != name:
            await self._erasures.keep_block(file.store_id, owner, file.id, name, file.generation)
        if unwanted is not None:
            await self._erasures.erase_blocks(file.store_id, owner, [(file.id, unwanted)])
        return unwanted != name

    async def _write(self, file: StoreFile, owner: str, name: str, block: StoredBlock) -> str | None:
        """Write a block, and name it in the record of its file. Return the name of the block to erase, if there is one.

        If the result is rejected, that is the new block. Otherwise, it is the replaced one.
        """
        try:
            async with asyncio.timeout(WRITING_SECONDS / 2):
                pieces = await self._blocks.write(file.store_id, file.id, name, block)
        except TimeoutError:
            raise StateUnavailable("timeout while writing the chunks of a file") from None
        fields: Args = ["block", name, "pieces", pieces, "chunks", len(block.texts), "bytes", block.size]
        verdict, unneeded = await self._settle(file, owner, "completed", [block.space, block.dimension], fields)
        return (unneeded or None) if verdict else name

    async def fail(self, file: StoreFile, owner: str, code: str, message: str) -> bool:
        """Record that a file cannot be ingested. Return False if `file.generation` is no longer the current one.

        `code` is `server_error`, `unsupported_file` or `invalid_file`.
        """
        wanted, _ = await self._settle(file, owner, "failed", ["", ""], ["code", code, "message", message])
        return wanted

    async def _settle(self, file: StoreFile, owner: str, status: str, space: Args, fields: Args) -> tuple[bool, str]:
        """Store a result. Return whether it was accepted, and the name of the replaced block or ""."""
        keys = StoreKeys.of(file.store_id, owner)
        args: Args = [keys.name, name_of(file.id, "file-"), file.generation, status, *space, *fields]
        verdict, *report = await self._client.script(_SETTLE, [keys.record], args)
        if verdict == Reply.SPACE:
            raise OtherSpace(report[0].decode(), int(report[1]))
        if verdict == Reply.FENCED:
            return False, ""
        await self._quota.settle(owner, keys.tag, report[1:])
        return True, report[0].decode()

    async def leave_out(self, file: StoreFile, owner: str) -> None:
        """Erase the damaged chunks of a file, set the file to failed, and log an error.

        Do nothing if the file has new chunks by now. If Redis is full, keep the chunks.
        """
        keys, blocks = StoreKeys.of(file.store_id, owner), [(file.id, file.block)]
        self._client.damage(f"rmw:{{v{keys.name}}}:b:", f"the chunks of {file.id} cannot be read")
        logger.error("the chunks of %s in %s are damaged, and were removed: add the file again", file.id, file.store_id)
        with suppress(StateFull):
            await self._erasures.schedule_blocks(file.store_id, owner, blocks)
            args: Args = [keys.name, name_of(file.id, "file-"), file.block, *DAMAGED_CHUNKS]
            verdict, *report = await self._client.script(_DAMAGED, [keys.record], args)
            if verdict != Reply.FENCED:
                await self._quota.settle(owner, keys.tag, report)
                await self._erasures.erase_blocks(file.store_id, owner, blocks)

    # -- batches -------------------------------------------------------------------------------------------------------

    async def batch(self, store_id: str, owner: str, batch_id: str) -> FileBatch:
        values = await self._client.command("HGETALL", StoreKeys.of(store_id, owner).batch(name_of(batch_id, "vsfb_")))
        if not values:
            raise Missing("File batch", batch_id)
        fields = fields_of(values)
        with reading("file batch"):
            return FileBatch(batch_id, store_id, integer(fields, "created_at"), FileCounts.of(fields), "is_cancelled" in fields)

    async def cancel(self, store_id: str, owner: str, batch_id: str) -> None:
        """Cancel the ingestion of the files of a batch that are in progress."""
        keys, name = StoreKeys.of(store_id, owner), name_of(batch_id, "vsfb_")
        key = keys.batch(name)
        if await self._client.script(_CANCEL, [keys.record, key, f"{key}:files"], [name]) == Reply.MISSING:
            raise Missing("File batch", batch_id)


def _full() -> str:
    return f"The vector store has reached its maximum of {MAX_FILES} files."


new_generation = random_part


def new_batch_id() -> str:
    return f"vsfb_{random_part()}"


def _named(blocks: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the names of each file and of its block in turn, as arguments of a script."""
    for file_id, block in blocks:
        yield from (name_of(file_id, "file-"), block)
