"""Cache the vectors and words of vector stores in memory, for searches.

A process reads the block of each file once. Before each search, it compares the version of the store, so changes by other
processes take effect at once. When the cache exceeds its maximum size, the least recently searched stores are removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from sys import getsizeof

import numpy as np

from ..errors import TooLarge, Unavailable
from ..state import Damaged, Missing
from ..state.blocks import BlockName, Blocks, SearchedBlock
from ..state.schema import reading
from ..state.store_file_records import StoreFile
from ..state.store_files import StoreFiles
from ..state.vector_stores import StoreRecords, VectorStore
from ..tasks import by_size
from .content_cache import ContentCache, Reservation, Shortage
from .search import Index, Segment
from .store_locks import StoreLocks
from .words import count_words, decode_words

logger = logging.getLogger(__name__)

_REVIEW_SECONDS = 60.0
_ATTEMPTS = 3  # attempts to read a store whose files change meanwhile
_READ_BLOCKS = 256  # maximum number of blocks that are decoded at a time
_READ_BYTES = 32 * 1024 * 1024  # maximum size of these blocks in Redis, unless it is one block


@dataclass(frozen=True, slots=True)
class Content:
    """The cached content of a store at a version. `files` and `blocks` are by the name of the block."""

    owner: str = ""
    version: int = -1
    files: Mapping[str, StoreFile] = field(default_factory=dict)
    blocks: Mapping[str, SearchedBlock] = field(default_factory=dict)  # without their vectors and words
    index: Index = field(default_factory=Index)
    record_bytes: int = 0  # memory for the names and attributes of the files

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.record_bytes


class StoreMemory:
    """A cache of the contents of stores, which takes up to `max_bytes` of memory."""

    def __init__(self, records: StoreRecords, files: StoreFiles, blocks: Blocks, max_bytes: int) -> None:
        self._records = records
        self._files = files
        self._blocks = blocks
        self._cache = ContentCache[Content](max_bytes)
        self._locks = StoreLocks()

    @property
    def nbytes(self) -> int:
        """The memory that contents take, in bytes."""
        return self._cache.used

    @property
    def max_bytes(self) -> int:
        return self._cache.max_bytes

    @property
    def stores(self) -> list[str]:
        """The ids of the stores in memory, the least recently used first."""
        return self._cache.stores

    @asynccontextmanager
    async def using(self, stores: Sequence[VectorStore], owner: str) -> AsyncIterator[list[Content]]:
        """Return the contents of stores at their versions. Read `stores` from Redis just before each call.

        The contents count as used memory in the `with` block. Raises TooLarge if they need more than `max_bytes`, and
        Unavailable if other searches use the memory.
        """
        with ExitStack() as pins:
            contents = list[Content]()
            for store in stores:
                content = await self._content(store, owner, sum(content.nbytes for content in contents))
                pins.enter_context(self._cache.pinned(store.id, content))
                contents.append(content)
                self.check(sum(content.nbytes for content in contents))
            yield contents

    async def _content(self, store: VectorStore, owner: str, pinned: int) -> Content:
        content = self._cache.get(store.id) or Content()
        if content.version != store.version:
            async with self._locks.of(store.id):
                content = self._cache.get(store.id) or Content()
                if content.version < store.version:
                    return await self._read_and_keep(store, owner, content, pinned)
        self._cache.put(store.id, content)
        return content

    async def _read_and_keep(self, store: VectorStore, owner: str, known: Content, pinned: int) -> Content:
        with self._cache.pinned(store.id, known):
            try:
                async with self._cache.reading(pinned) as reservation:
                    content = await self._read(store, owner, known, reservation)
                    self._cache.put(store.id, content)
            except Shortage:
                async with self._cache.reading_alone(pinned) as reservation:
                    content = await self._read(store, owner, known, reservation)
                    self._cache.put(store.id, content)
        return content

    async def review(self) -> None:
        """Call `remove_deleted` periodically, until cancelled."""
        while True:
            await asyncio.sleep(_REVIEW_SECONDS)
            try:
                await self.remove_deleted()
            except Unavailable as error:
                logger.debug("cannot look for deleted vector stores, will retry: %s", error.message)

    async def remove_deleted(self) -> None:
        """Remove the content of files and stores that this or another process has deleted."""
        for store_id, content in self._cache.items():
            with suppress(Missing):
                store = await self._records.get(store_id, content.owner)
                if store.version == content.version:
                    continue
                files = await self._list(store_id, content.owner, content)
                if not content.index.blocks - files.keys():
                    continue
            if self._cache.get(store_id) is content:  # the next search reads the store again
                self._cache.remove(store_id)

    async def _read(self, store: VectorStore, owner: str, known: Content, memory: Reservation[Content]) -> Content:
        for _ in range(_ATTEMPTS):
            files = await self._list(store.id, owner, known)
            known, lost = await self._update(replace(known, owner=owner), store, files, memory)
            if not lost:
                break
            # A file has just changed, so list the files again. After the last attempt, leave it to the next search.
        return replace(known, version=store.version if not lost else -1)

    async def _list(self, store_id: str, owner: str, known: Content) -> dict[str, StoreFile]:
        """Return the files of a store that have chunks. Read only those that have changed since the version of `known`."""
        changed = await self._files.changes(store_id, owner, known.version) if known.version >= 0 else None
        if changed is None:
            return {_name(file): file async for file in self._files.each(store_id, owner) if file.block}
        kept = {name: file for name, file in known.files.items() if file.id not in changed}
        return kept | {_name(file): file for file in changed.values() if file is not None and file.block}

    async def _update(
        self, known: Content, store: VectorStore, files: Mapping[str, StoreFile], memory: Reservation[Content]
    ) -> tuple[Content, bool]:
        """Read the missing blocks. Return the content with exactly these files, and whether a block was erased meanwhile."""
        self.check(memory.pinned + 4 * store.dimension * sum(file.chunks for file in files.values()))
        index, blocks = known.index, {name: block for name, block in known.blocks.items() if name in files}
        if index.blocks - files.keys():
            index = await by_size(index.nbytes, index.updated, files.keys())
        missing, lost, size = [name for name in files if name not in blocks], False, index.nbytes
        added = list[Segment]()
        for names in _groups(missing, files):
            for name, block in zip(names, await self._read_blocks(store.id, [files[one] for one in names]), strict=True):
                try:
                    segment = await self._segment(name, block, files[name], store.dimension)
                except Damaged:
                    await self._files.leave_out(files[name], known.owner)
                    continue
                if segment is None or not isinstance(block, SearchedBlock):
                    lost = True
                    continue
                size += segment.nbytes
                self.check(memory.pinned + size)
                await memory.grow(segment.nbytes)
                added.append(segment)
                blocks[name] = block._replace(vectors=b"", words=b"")
        if added:
            index = await by_size(size, index.updated, files.keys(), added)
        record_bytes = sum(map(_record_bytes, files.values()))
        self.check(memory.pinned + index.nbytes + record_bytes)
        await memory.grow(max(0, record_bytes - known.record_bytes))
        return Content(known.owner, -1, files, blocks, index, record_bytes), lost

    async def _read_blocks(self, store_id: str, files: Sequence[StoreFile]) -> list[SearchedBlock | Damaged | None]:
        return await self._blocks.read_searched(store_id, [BlockName(file.id, file.block, file.size) for file in files])

    async def _segment(
        self, name: str, block: SearchedBlock | Damaged | None, file: StoreFile, dimension: int
    ) -> Segment | None:
        """Return the segment of a block, or None if it has been erased. Raises Damaged."""
        if isinstance(block, Damaged):
            raise block
        if block is None or block.dimension != dimension:  # the store has been rebuilt with another model
            return None
        texts: Sequence[str] = ()
        if not block.words:
            try:
                texts = (await self._files.read_block(file)).texts
            except Missing:
                return None
        size = len(block.vectors) + len(block.words) + sum(map(len, texts))
        return await by_size(size, _segment, name, block, texts, dimension)

    def check(self, size: int) -> None:
        """Raise TooLarge if a search needs more than `max_bytes`."""
        if size > self.max_bytes:
            raise TooLarge(
                f"Searching these vector stores needs more than {self.max_bytes} bytes of memory. Search fewer stores at a "
                "time, or raise files.search_memory_bytes."
            )


def _groups(names: Sequence[str], files: Mapping[str, StoreFile]) -> Iterator[list[str]]:
    """Yield the names of blocks that are read and decoded together."""
    group, size = list[str](), 0
    for name in names:
        if group and (len(group) == _READ_BLOCKS or size + files[name].size > _READ_BYTES):
            yield group
            group, size = [], 0
        group.append(name)
        size += files[name].size
    if group:
        yield group


def _name(file: StoreFile) -> str:
    """Return the name of a file's block in the index."""
    return f"{file.id}:{file.block}"


def _record_bytes(file: StoreFile) -> int:
    attributes = file.attributes
    strings = chain(attributes, attributes.values(), (file.filename,))
    return getsizeof(attributes) + sum(map(getsizeof, strings))


def _segment(name: str, block: SearchedBlock, texts: Sequence[str], dimension: int) -> Segment:
    with reading("content of a vector store"):
        vectors = np.frombuffer(block.vectors, "<f2").reshape(block.chunks, dimension)
        return Segment.of(name, vectors, decode_words(block.words, block.chunks) if block.words else count_words(texts))
