"""The entries of a partition that are nearest to a vector: found by Redis (``Index``), or by this process (``Scan``).

Both compare the same numbers exactly, and so give the same: neither is approximate. An index needs ``FT.SEARCH`` (Redis 8,
Redis Stack, valkey-search) on a server that is no cluster; a scan needs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..config import Settings
from ..errors import Unavailable
from .key import Key
from .store import Entries, Page, Redis
from .vectors import Vector, directions, packed, packed_wide, unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Near(NamedTuple):
    """An entry that was found: its id, its cosine similarity, its record, and for how many seconds more it is kept."""

    entry: str
    similarity: float
    record: bytes
    left: float


NEAREST = 4
"""How many are looked at: the guard may refuse the first."""


async def choose(store: Entries, redis: Redis, space: str, settings: Settings) -> Index | Scan:
    """Who is to search. Raises ``Unavailable`` where the server does not tell."""
    wanted = settings.cache_search
    if wanted == "scan" or (wanted == "auto" and (redis.is_cluster or not await _has_index(store))):
        return Scan(store, space, settings)
    return Index(store, space)


_NO_SEARCH = ("unknown", "block", "permission")
"""Words of the errors of a server that has no ``FT.SEARCH``, has it not in scripts (shards behind a proxy), or not for us."""


async def _has_index(store: Entries) -> bool:
    """Whether the server searches: asked for an index that nobody made, it misses that index."""
    nowhere = Key("0", "0", "", "")
    try:
        await store.search(nowhere, "rmw-no-index", "", "*", b"", 0, 0.0)
    except Unavailable as error:
        told = str(error.__cause__).lower()
        if "index" not in told and not any(word in told for word in _NO_SEARCH):
            raise
        return "index" in told
    return True


# -- by Redis --------------------------------------------------------------------------------------------------------------


class Index:
    """``FT.SEARCH``: one index for each space and size of vectors, with the partition as a tag; an index for each partition
    would explode. It is made when it is missed."""

    form = "index"

    def __init__(self, store: Entries, space: str) -> None:
        self._store = store
        self._space = space
        self._made: set[str] = set()

    async def keepable(self, vector: Vector) -> tuple[str, bytes]:
        """The space and the bytes under which a vector is kept."""
        space = self._of_size(vector)
        if space not in self._made:
            await self._make(space, len(vector))
        return space, packed_wide(vector)

    def known(self, key: Key) -> None:
        """Nothing is held here."""

    async def nearest(
        self, key: Key, vector: Vector, threshold: float, count: int = NEAREST, page: Page | None = None
    ) -> list[Near]:
        """At most ``count`` entries of the partition with at least that similarity, the nearest first."""
        space = self._of_size(vector)
        query = f"(@partition:{{{key.partition}}})=>[KNN {count} @vector $vector AS distance]"
        try:
            found = await self._store.search(key, _index(space), space, query, vector.tobytes(), count, threshold)
        except Unavailable as error:
            if "index" not in str(error.__cause__).lower():
                raise
            await self._make(space, len(vector))
            return []  # what it finds, it has to read first
        return sorted((Near(*one) for one in found), key=lambda near: -near.similarity)

    def _of_size(self, vector: Vector) -> str:
        return f"{self._space}{len(vector):x}"

    async def _make(self, space: str, dimensions: int) -> None:
        try:
            await self._store.commands(
                ("FT.CREATE", _index(space), "ON", "HASH", "PREFIX", 1, f"rmw:v1:{space}:", "SCHEMA", "partition", "TAG",
                 "vector", "VECTOR", "FLAT", 6, "TYPE", "FLOAT32", "DIM", dimensions, "DISTANCE_METRIC", "COSINE")
            )  # fmt: skip
        except Unavailable as error:
            if "exists" not in str(error.__cause__).lower():
                raise
        self._made.add(space)  # one that is dropped is missed by the next search


def _index(space: str) -> str:
    return f"rmw-v1-{space}"


# -- by this process -------------------------------------------------------------------------------------------------------


PAGE = 2000
"""So many entries are read at a time."""


class Scan:
    """A scan of the partition's vectors, which are held in this process: a search reads only what was added since. At most
    ``cache_memory`` bytes of them; the partition that was not asked for longest goes first."""

    form = "scan"

    def __init__(self, store: Entries, space: str, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._space = space
        self._most_bytes = settings.cache_memory
        self._most_rows = settings.cache_partition_entries
        self._clock = clock
        self._partitions: OrderedDict[tuple[str, int], Matrix] = OrderedDict()
        self._dimensions: int | None = None
        """Those of the last vector that was seen."""

    async def keepable(self, vector: Vector) -> tuple[str, bytes]:
        """The space and the bytes under which a vector is kept."""
        return self._of_size(len(vector)), packed(vector)

    def known(self, key: Key) -> tuple[str, int] | None:
        """How far the partition was read: a space, and the last number in it. None where no vector was seen yet."""
        if self._dimensions is None:
            return None
        matrix = self._partitions.get((key.partition, self._dimensions))
        return self._of_size(self._dimensions), matrix.number if matrix is not None else 0

    async def nearest(
        self, key: Key, vector: Vector, threshold: float, count: int = NEAREST, page: Page | None = None
    ) -> list[Near]:
        """At most ``count`` entries of the partition with at least that similarity, the nearest first. ``page`` is what was
        read after what was ``known``; more is read where that is not all."""
        self._dimensions = len(vector)
        place = key.partition, self._dimensions
        matrix = self._partitions.setdefault(place, Matrix(self._dimensions))
        if page is None or not self._takes_in(matrix, page):
            await self._read_on(key, matrix)
        if place in self._partitions:
            self._partitions.move_to_end(place)
        self._make_room()
        near = matrix.nearest(vector, threshold, count, self._now())
        records = await self._store.read(key, [entry for entry, _ in near]) if near else []
        found = []
        for (entry, similarity), kept in zip(near, records, strict=True):
            if kept is None:
                matrix.remove(entry)  # it is gone before its time: it was evicted, or deleted
            else:
                found.append(Near(entry, similarity, *kept))
        return found

    async def _read_on(self, key: Key, matrix: Matrix) -> None:
        async with matrix.reading:
            while True:
                page = await self._store.since(key, self._of_size(matrix.dimensions), matrix.number, PAGE)
                if self._takes_in(matrix, page):
                    return

    def _takes_in(self, matrix: Matrix, page: Page) -> bool:
        """Has ``matrix`` hold what it does not yet of ``page``. Whether it holds all then that there was."""
        if page.space != self._of_size(matrix.dimensions):
            return False
        if page.generation == matrix.generation and page.last < matrix.number > page.after:
            return True  # more was read since
        if page.generation != matrix.generation or page.last < matrix.number:
            matrix.clear(page.generation)  # the cache was emptied
        if page.after > matrix.number:
            return False  # what lies between is not known here
        matrix.add([entry for entry in page.entries if entry[1] > matrix.number])
        matrix.forget_before(page.first)
        matrix.bound(self._most_rows, self._now())
        return not page.full

    def _of_size(self, dimensions: int) -> str:
        return f"{self._space}{dimensions:x}"

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _make_room(self) -> None:
        while len(self._partitions) > 1 and sum(matrix.nbytes for matrix in self._partitions.values()) > self._most_bytes:
            self._partitions.popitem(last=False)


HEAD = 64
"""So many numbers of each vector are looked at first. A similarity is at most that of the heads, and the product of the lengths
of the rests (Cauchy and Schwarz): few entries can reach a high threshold then, and only these are compared whole."""
_ROUNDING = 1e-4


class Matrix:
    """The vectors of one partition, as far as this process has read them: a row for each entry, and free rows."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self.reading = asyncio.Lock()
        self.clear("")

    def clear(self, generation: str) -> None:
        self.generation = generation
        self.number = 0
        """That of the last entry that was read."""
        self._rows: OrderedDict[str, tuple[int, int]] = OrderedDict()  # of each entry row and number, in the order of these
        self._ids: list[str] = []
        self._free: list[int] = []
        self._vectors = np.empty((0, self.dimensions), np.float32)
        self._heads = np.empty((0, min(HEAD, self.dimensions)), np.float32)
        self._rests = np.empty(0, np.float32)
        self._expiries = np.empty(0, np.int64)

    @property
    def nbytes(self) -> int:
        return self._vectors.nbytes + self._heads.nbytes

    def add(self, entries: Sequence[tuple[str, int, bytes]]) -> None:
        """Takes in entries with their numbers, and their expiries and vectors as they are kept."""
        wanted = [(entry, number, *_split(kept)) for entry, number, kept in entries if kept]
        fitting = [one for one in wanted if len(one[3]) == 2 * self.dimensions]
        rows = [self._row(entry, number) for entry, number, _, _ in fitting]
        self._grow()
        if rows:
            vectors = directions(unpacked([vector for *_, vector in fitting], self.dimensions))
            self._vectors[rows], self._heads[rows] = vectors, vectors[:, :HEAD]
            self._rests[rows] = np.linalg.norm(vectors[:, HEAD:], axis=1)
            self._expiries[rows] = [expiry for _, _, expiry, _ in fitting]
        if entries:
            self.number = entries[-1][1]

    def forget_before(self, number: int) -> None:
        """Removes entries with a lower number: they were evicted."""
        while self._rows:
            entry, (_, oldest) = next(iter(self._rows.items()))
            if oldest >= number > 0:
                return
            self.remove(entry)

    def bound(self, most: int, now: int) -> None:
        """Of more entries than ``most``, removes those that have expired ``now`` (ms), and then the oldest: the lowest number
        that is left tells nothing of those that were evicted in between."""
        if len(self._rows) <= most:
            return
        expired = [entry for entry, (row, _) in self._rows.items() if self._expiries[row] <= now]
        for entry in expired:
            self.remove(entry)
        for entry in list(self._rows)[: max(0, len(self._rows) - most)]:
            self.remove(entry)

    def remove(self, entry: str) -> None:
        row, _ = self._rows.pop(entry, (None, 0))
        if row is not None:
            self._expiries[row] = 0
            self._free.append(row)

    def nearest(self, vector: Vector, threshold: float, count: int, now: int) -> list[tuple[str, float]]:
        """Ids and similarities of those with at least that one which have not expired ``now`` (ms), the nearest first."""
        if not self._rows:
            return []
        # A product of matrices would wake BLAS's threads, which then spin for longer than all this takes.
        most = np.vecdot(self._heads, vector[:HEAD]) + self._rests * (np.linalg.norm(vector[HEAD:]) + _ROUNDING)
        rows = np.flatnonzero((most >= threshold - _ROUNDING) & (self._expiries > now))  # those that are free have expired
        # Where the heads tell little, it is cheaper to compare all than to pick those that are left.
        many = len(rows) > len(self._expiries) // 8
        similarities = np.vecdot(self._vectors, vector)[rows] if many else np.vecdot(self._vectors[rows], vector)
        best = [place for place in np.argsort(-similarities)[:count] if similarities[place] >= threshold]
        return [(self._ids[rows[place]], float(similarities[place])) for place in best]

    def _row(self, entry: str, number: int) -> int:
        row, _ = self._rows.pop(entry, (None, 0))
        if row is None and self._free:
            row = self._free.pop()
        if row is None:
            row = len(self._ids)
            self._ids.append("")
        self._ids[row] = entry
        self._rows[entry] = row, number
        return row

    def _grow(self) -> None:
        """Makes room for as many rows as there are ids: by a half more, so that entry by entry costs little."""
        have, need = len(self._expiries), len(self._ids)
        if need > have:
            size = max(need, have + have // 2)
            self._vectors = np.concatenate([self._vectors, np.zeros((size - have, self.dimensions), np.float32)])
            self._heads = np.concatenate([self._heads, np.zeros((size - have, self._heads.shape[1]), np.float32)])
            self._rests = np.concatenate([self._rests, np.zeros(size - have, np.float32)])
            self._expiries = np.concatenate([self._expiries, np.zeros(size - have, np.int64)])


def _split(kept: bytes) -> tuple[int, bytes]:
    expiry, _, vector = kept.partition(b":")
    return int(expiry), vector
