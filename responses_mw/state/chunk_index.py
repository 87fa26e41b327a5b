"""Index the chunks of a vector store with the search module of the Redis server.

The index is derived from the blocks, so it can be built and dropped at any time. These keys are in the slot of the store:

    rmw:{v<store>}:i<dimension>               the index
    rmw:{v<store>}:c:<file>:<block>:<chunk>   a chunk: its block (`f`), words (`t`), vector (`v`), place of its text (`p`)
                                              and, for one of `_SAMPLE` chunks, `s`
    rmw:{v<store>}:ib                         for each indexed block, its numbers of chunks and words, and the sum of vectors

A block is noted in `ib` after its chunks are written, and removed from it before they are erased.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple
from zlib import crc32

from .client import Client, Value
from .errors import StateUnavailable
from .schema import reading
from .search_commands import TIMEOUT, ChunkQuery, Command, hybrid_keys, keys, total
from .store_keys import name_of

logger = logging.getLogger(__name__)

_BATCH = 200  # chunks that one round trip writes or erases
_SAMPLE = 32
_SURE = 64  # with this many hits in the sample, the count of a word is estimated from the sample
_NOTE = struct.Struct("<IQ")
_COMMANDS = ("FT.CREATE", "FT.SEARCH", "FT._LIST", "FT.DROPINDEX")


class IndexedChunk(NamedTuple):
    """A chunk to index. `vector` is in float32, and `piece` and `place` are those of its text (`SearchedBlock.place_of`)."""

    words: str
    vector: bytes
    piece: int
    place: int


class IndexedBlock(NamedTuple):
    """The summary of an indexed block. `vectors` is the sum of its vectors in float32."""

    chunks: int
    words: int
    vectors: bytes


class ChunkName(NamedTuple):
    """The name of a chunk: its block (`<file>:<block>`), and its index in the block."""

    block: str
    chunk: int


class ChunkIndex:
    """The indexes of all stores. Every coroutine raises StateUnavailable if Redis fails, or if the index is missing."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._has_module: bool | None = None
        self._has_hybrid = False

    async def is_supported(self) -> bool:
        """Return whether the server has a search module. In a cluster, it is not used."""
        if self._has_module is None:
            # redis-py cannot decode the reply to "COMMAND" with "INFO" if a command is unknown.
            names = (*_COMMANDS, "FT.HYBRID")
            known: Sequence[object] = () if self._client.is_cluster else await self._client.command("COMMAND INFO", *names)
            self._has_module = len(known) == len(names) and all(known[: len(_COMMANDS)])
            self._has_hybrid = self._has_module and bool(known[-1])
        return self._has_module

    async def create(self, store_id: str, dimension: int) -> bool:
        """Create the index of a store, if it does not exist. Drop those for vectors of another dimension.

        Return whether it did not exist.
        """
        name, names = _index(store_id, dimension), await self._names(store_id)
        for other in names:
            if other != name:
                await self._client.command("FT.DROPINDEX", other)
        if name in names:
            return False
        await self.remove(store_id, [*await self.blocks(store_id)])  # as another index, which is gone, needed them
        options: list[Value] = ["ON", "HASH", "PREFIX", 1, _chunks(store_id), "NOHL", "NOOFFSETS", "NOFIELDS"]
        options += ["STOPWORDS", 0, "SKIPINITIALSCAN"]
        schema: list[Value] = ["SCHEMA", "f", "TAG", "CASESENSITIVE", "s", "TAG", "t", "TEXT", "NOSTEM"]
        schema += ["v", "VECTOR", "HNSW", 10, "TYPE", "FLOAT32", "DIM", dimension, "DISTANCE_METRIC", "IP"]
        await self._client.command("FT.CREATE", name, *options, *schema, "M", 16, "EF_CONSTRUCTION", 200)
        return True

    async def drop(self, store_id: str) -> None:
        """Drop the index of a store, if there is one, and erase its keys. The blocks stay."""
        for name in await self._names(store_id) if await self.is_supported() else []:
            await self._client.command("FT.DROPINDEX", name)
        await self.remove(store_id, [*await self.blocks(store_id)])

    async def _names(self, store_id: str) -> list[str]:
        prefix = f"{_slot(store_id)}:i".encode()
        return [name.decode() for name in await self._client.command("FT._LIST") if name.startswith(prefix)]

    # -- blocks --------------------------------------------------------------------------------------------------------

    async def blocks(self, store_id: str) -> set[str]:
        """Return the names of the indexed blocks."""
        return {name.decode() for name in await self._client.command("HKEYS", _noted(store_id))}

    async def count(self, store_id: str) -> int:
        """Return the number of indexed blocks."""
        count: int = await self._client.command("HLEN", _noted(store_id))
        return count

    async def noted(self, store_id: str, blocks: Sequence[str]) -> list[IndexedBlock | None]:
        """Return the summaries of blocks. A block that is not indexed is None."""
        if not blocks:
            return []
        values = await self._client.command("HMGET", _noted(store_id), *blocks)
        with reading("index of a vector store"):
            return [None if value is None else _note(value) for value in values]

    async def add(self, store_id: str, block: str, chunks: Iterator[IndexedChunk], note: IndexedBlock) -> None:
        """Add a block and its summary, the `note`, to the index."""
        count, prefix = 0, f"{_chunks(store_id)}{block}"
        while some := list(islice(chunks, _BATCH)):
            commands: list[tuple[Value, ...]] = []
            for number, one in enumerate(some, count):
                place = f"{one.piece}:{one.place}"
                sampled: tuple[Value, ...] = ("s", "1") if (crc32(block.encode()) + number) % _SAMPLE == 0 else ()
                fields = ("f", block, "t", one.words, "v", one.vector, "p", place, *sampled)
                commands.append(("HSET", f"{prefix}:{number}", *fields))
            await self._client.pipeline(commands)
            count += len(some)
        await self._client.command("HSET", _noted(store_id), block, _NOTE.pack(*note[:2]) + note.vectors)

    async def remove(self, store_id: str, blocks: Sequence[str]) -> None:
        """Remove blocks from the index, if they are in it."""
        for block, note in zip(blocks, await self.noted(store_id, blocks), strict=True):
            if note is None:
                continue
            await self._client.command("HDEL", _noted(store_id), block)
            for start in range(0, note.chunks, _BATCH):
                numbers = range(start, min(note.chunks, start + _BATCH))
                await self._client.command("UNLINK", *(f"{_chunks(store_id)}{block}:{number}" for number in numbers))

    # -- searches ------------------------------------------------------------------------------------------------------

    async def candidates(self, store_id: str, dimension: int, query: ChunkQuery) -> list[ChunkName]:
        """Return the chunks that a search finds, each once."""
        index, refusal = _index(store_id, dimension), ""
        if self._has_hybrid and query.vector is not None and query.words is not None:
            try:
                return await self._hybrid(query.hybrid(index))
            except StateUnavailable as error:
                if error.passing:
                    raise
                refusal = str(error.__cause__ or error.reason)
        replies = await self._client.pipeline(query.searches(index))
        if refusal:  # as these searches have succeeded, they are what is left
            self._has_hybrid = False
            logger.warning("searches do not use FT.HYBRID any more, because the Redis server refused it: %.200s", refusal)
        with reading("reply of the search module"):
            return list(dict.fromkeys(_name(key) for reply in replies for key in keys(reply)))

    async def _hybrid(self, command: Command) -> list[ChunkName]:
        reply = await self._client.command(*command)
        try:
            return [_name(key) for key in hybrid_keys(reply)]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise StateUnavailable(f"the reply has another form ({error!r})") from None

    async def frequencies(self, store_id: str, dimension: int, words: Sequence[str]) -> list[int]:
        """Return the number of chunks that contain each word. For frequent words, this is an estimate."""
        index = _index(store_id, dimension)
        sampled = await self._count(index, [f"@s:{{1}} @t:{word}" for word in words])
        rare = [word for word, count in zip(words, sampled, strict=True) if count < _SURE]
        exact = dict(zip(rare, await self._count(index, [f"@t:{word}" for word in rare]), strict=True))
        return [exact.get(word, count * _SAMPLE) for word, count in zip(words, sampled, strict=True)]

    async def _count(self, index: str, queries: Sequence[str]) -> list[int]:
        """Return the number of results of each query."""
        if not queries:
            return []
        last: list[Value] = ["NOCONTENT", "LIMIT", 0, 0, "TIMEOUT", TIMEOUT, "DIALECT", 2]
        replies = await self._client.pipeline([("FT.SEARCH", index, query, *last) for query in queries])
        with reading("reply of the search module"):
            return [total(reply) for reply in replies]

    async def read(self, store_id: str, names: Sequence[ChunkName]) -> list[IndexedChunk | None]:
        """Return chunks. A chunk that has been erased is None."""
        if not names:
            return []
        commands = [("HMGET", f"{_chunks(store_id)}{name.block}:{name.chunk}", "t", "v", "p") for name in names]
        with reading("index of a vector store"):
            return [_chunk(*fields) for fields in await self._client.pipeline(commands)]


def _slot(store_id: str) -> str:
    return f"rmw:{{v{name_of(store_id, 'vs_')}}}"


def _index(store_id: str, dimension: int) -> str:
    return f"{_slot(store_id)}:i{dimension}"


def _chunks(store_id: str) -> str:
    return f"{_slot(store_id)}:c:"


def _noted(store_id: str) -> str:
    return f"{_slot(store_id)}:ib"


def _note(value: bytes) -> IndexedBlock:
    if len(value) < _NOTE.size:
        raise ValueError("the note is truncated")
    chunks, words = _NOTE.unpack_from(value)
    return IndexedBlock(chunks, words, value[_NOTE.size :])


def _chunk(words: bytes | None, vector: bytes | None, place: bytes | None) -> IndexedChunk | None:
    if words is None or vector is None or place is None:
        return None
    piece, _, number = place.partition(b":")
    return IndexedChunk(words.decode(), vector, int(piece), int(number))


def _name(key: bytes) -> ChunkName:
    file, block, chunk = key.decode().rsplit(":", 3)[-3:]
    return ChunkName(f"{file}:{block}", int(chunk))
