"""Keep the indexes of vector stores up to date, and list their content.

A worker adds the block of a file to the index once it is visible. Before a search, missing blocks are added. A process lists
the files of a store once. Afterwards, it reads only the files that have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..state import Damaged, Missing
from ..state.blocks import BlockName, Blocks, SearchedBlock
from ..state.chunk_index import ChunkIndex, IndexedBlock, IndexedChunk
from ..state.schema import reading
from ..state.store_file_records import StoreFile
from ..state.store_files import StoreFiles
from ..state.vector_stores import VectorStore
from ..tasks import by_size
from .store_locks import StoreLocks
from .words import Words, decode_words, number_of

_MAX_STORES = 256  # whose files are remembered
_READ_BLOCKS = 16
_DIGITS = 36


@dataclass(frozen=True, eq=False, slots=True)
class Statistics:
    """The totals of a store: chunks, words, and the sum of all vectors."""

    chunks: int = 0
    words: int = 0
    vectors: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def changed(self, notes: Iterable[IndexedBlock], sign: int) -> Statistics:
        """Return the statistics with these blocks, or without them if `sign` is -1."""
        chunks, words, vectors = self.chunks, self.words, self.vectors
        with reading("index of a vector store"):
            for note in notes:
                chunks += sign * note.chunks
                words += sign * note.words
                added = np.frombuffer(note.vectors, "<f4").astype(np.float64)
                if vectors.size and vectors.shape != added.shape:
                    raise ValueError("the vectors have different sizes")
                vectors = vectors + sign * added if vectors.size else added
        return Statistics(chunks, words, vectors)


@dataclass(frozen=True, eq=False, slots=True)
class Listing:
    """The files of an indexed store at a version, and the summaries of their blocks, both by the name of the block."""

    version: int = -1
    files: Mapping[str, StoreFile] = field(default_factory=dict)
    noted: Mapping[str, IndexedBlock] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=Statistics)


class IndexListings:
    """Lists the indexed stores. Every coroutine raises the errors of `ChunkIndex`."""

    def __init__(self, files: StoreFiles, blocks: Blocks, index: ChunkIndex) -> None:
        self._files = files
        self._blocks = blocks
        self._index = index
        self._listings: dict[str, Listing] = {}  # by the id of the store, the least recently used first
        self._locks = StoreLocks()

    async def read(self, store: VectorStore, owner: str) -> Listing:
        """Bring the index of a store up to date, and return its listing."""
        listing = self._listings.get(store.id, Listing())
        if listing.version < store.version:
            async with self._locks.of(store.id):
                listing = self._listings.get(store.id, Listing())
                if listing.version < store.version:
                    listing = await self._updated(store, owner, listing)
        self._listings.pop(store.id, None)
        self._listings[store.id] = listing
        while len(self._listings) > _MAX_STORES:
            del self._listings[next(iter(self._listings))]
        return listing

    async def add_file(self, store: VectorStore, owner: str, file_id: str) -> None:
        await self._index.create(store.id, store.dimension)
        await self._add(store, owner, [await self._files.get(store.id, owner, file_id)])

    async def _updated(self, store: VectorStore, owner: str, known: Listing) -> Listing:
        is_new = await self._index.create(store.id, store.dimension)
        if known.version >= 0 and not is_new:
            changed = await self._files.changes(store.id, owner, known.version)
            if changed is not None:
                kept = {name: file for name, file in known.files.items() if file.id not in changed}
                files = kept | _visible(file for file in changed.values() if file is not None)
                listing = await self._indexed(store, owner, files, known)
                if await self._index.count(store.id) >= len(listing.noted):
                    return listing
                # Another process has dropped the index, or is building it.
        files = _visible([file async for file in self._files.each(store.id, owner)])
        await self._remove_stale(store.id, owner, await self._index.blocks(store.id) - files.keys())
        return await self._indexed(store, owner, files, Listing())

    async def _indexed(self, store: VectorStore, owner: str, files: Mapping[str, StoreFile], known: Listing) -> Listing:
        """Return a listing with these files. Add those that are not in the index."""
        kept = {name: note for name, note in known.noted.items() if name in files}
        new = [name for name in files if name not in kept]
        added = await self._noted(store.id, new)
        missing = [name for name in new if name not in added]
        for start in range(0, len(missing), _READ_BLOCKS):
            await self._add(store, owner, [files[name] for name in missing[start : start + _READ_BLOCKS]])
        added |= await self._noted(store.id, missing)
        removed = [note for name, note in known.noted.items() if name not in kept]
        statistics = known.statistics.changed(removed, -1).changed(added.values(), 1)
        return Listing(store.version, files, kept | added, statistics)

    async def _noted(self, store_id: str, names: Sequence[str]) -> dict[str, IndexedBlock]:
        notes = zip(names, await self._index.noted(store_id, names), strict=True)
        return {name: note for name, note in notes if note is not None}

    async def _add(self, store: VectorStore, owner: str, files: Sequence[StoreFile]) -> None:
        names = [BlockName(file.id, file.block, file.size) for file in files]
        for file, block in zip(files, await self._blocks.read_searched(store.id, names), strict=True):
            if block is None or (isinstance(block, SearchedBlock) and block.dimension != store.dimension):
                continue
            name = _name(file)
            try:
                if isinstance(block, Damaged):
                    raise block
                chunks, note = await by_size(len(block.words) * 8, _indexed_chunks, block, store.dimension)
            except Damaged:
                if isinstance(block, SearchedBlock) and not block.words:
                    raise
                await self._files.leave_out(file, owner)
                continue
            await self._index.add(store.id, name, iter(chunks), note)
            await self._remove_stale(store.id, owner, [name])  # the file may have been removed meanwhile

    async def _remove_stale(self, store_id: str, owner: str, blocks: Iterable[str]) -> None:
        """Remove the `blocks` that are not visible. A block that was replaced never becomes visible again."""
        for name in blocks:
            file_id, _, block = name.partition(":")
            try:
                is_visible = (await self._files.get(store_id, owner, file_id)).block == block
            except Missing:
                is_visible = False
            if not is_visible:
                await self._index.remove(store_id, [name])


def _name(file: StoreFile) -> str:
    """Return the name of a file's block in the index."""
    return f"{file.id}:{file.block}"


def _visible(files: Iterable[StoreFile]) -> dict[str, StoreFile]:
    """Return the files that have chunks by the names of their blocks."""
    return {_name(file): file for file in files if file.block}


def token(word: str) -> str:
    """Return how a word is written in the index."""
    return np.base_repr(number_of(word), _DIGITS)


def float32(vector: NDArray[np.floating]) -> bytes:
    return vector.astype("<f4").tobytes()


def _indexed_chunks(block: SearchedBlock, dimension: int) -> tuple[list[IndexedChunk], IndexedBlock]:
    """Return the chunks of a block in the form of the index, and the summary of the block."""
    with reading("content of a vector store"):
        vectors = np.frombuffer(block.vectors, "<f2").reshape(block.chunks, dimension).astype(np.float32)
        if not np.isfinite(vectors).all():
            raise ValueError("a vector is not finite")
        words = decode_words(block.words, block.chunks)
        places = (block.place_of(chunk) for chunk in range(block.chunks))
        chunks = [
            IndexedChunk(text, float32(vector), *place)
            for text, vector, place in zip(_tokens(words), vectors, places, strict=True)
        ]
    return chunks, IndexedBlock(block.chunks, int(words.lengths.sum()), float32(vectors.sum(0)))


def _tokens(words: Words) -> Iterator[str]:
    """Yield the words of each chunk, as often as it contains them."""
    tokens = [np.base_repr(number, _DIGITS) for number in words.numbers.tolist()]
    numbers = np.repeat(np.arange(len(tokens)), np.diff(words.ends, prepend=0))
    order = np.argsort(words.chunks, kind="stable")
    ends = np.searchsorted(words.chunks[order], np.arange(1, len(words.lengths) + 1))
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        chosen = order[start:end]
        pairs = zip(numbers[chosen].tolist(), words.counts[chosen].tolist(), strict=True)
        yield " ".join(" ".join([tokens[number]] * count) for number, count in pairs)
