"""The entries of a partition that are nearest to a vector: found by Redis (``Index``), or by this process (``Scan``).

Both compare the same numbers exactly, and so give the same: neither is approximate. An index needs ``FT.SEARCH`` (Redis 8,
Redis Stack, valkey-search) on a server that is no cluster; a scan needs nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from ..config import Settings
from ..errors import Unavailable
from .key import Key
from .matrix import Matrix
from .store import Entries, Kept, Page, Redis
from .vectors import Vector, headed, packed, similarities

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
        await store.search(nowhere, "rmw-no-index", "", "vector", b"", 1, 0.0)
    except Unavailable as error:
        told = str(error.__cause__).lower()
        if "index" not in told and not any(word in told for word in _NO_SEARCH):
            raise
        return "index" in told
    return True


# -- by Redis --------------------------------------------------------------------------------------------------------------


_SPARE = 4
"""So many more are asked of an index, which rounds otherwise than we do."""
_HEADLESS = 20
"""So many searches do without heads after one that they told nothing of: some models take all texts for quite similar."""
_ROUNDING = 3e-3
"""More than a similarity is wrong by where each number is rounded to float16, and once more to be of length 1."""


class Index:
    """``FT.SEARCH``: one index for each space and size of vectors, with the partition as a tag; an index for each partition
    would explode. It is made when it is missed. It has each vector twice: its head, by which it finds what can be near, and the
    whole, by which it finds what is near where that is too much. What it finds is compared again here."""

    def __init__(self, store: Entries, space: str, types: Sequence[str] = ("FLOAT16", "FLOAT32")) -> None:
        """``types`` are those of vectors: the first is used, or the last where the server refuses that. (Redis has the narrow
        one since 7.4, valkey-search has it not: there a search takes twice the time.)"""
        self._store = store
        self._space = space
        self._types = list(types)
        self._made: set[str] = set()
        self._headless: dict[str, int] = {}
        """Of a space, so many searches are to come without heads."""

    async def keepable(self, vector: Vector) -> Kept:
        """``vector`` as it is to be kept."""
        if self._of_size(len(vector)) not in self._made:
            await self._make(len(vector))
        form = self._types[0]
        return Kept(self._of_size(len(vector)), "index", packed(vector, form), packed(headed(vector), form))

    def known(self, key: Key) -> None:
        """Nothing is held here."""

    async def nearest(
        self, key: Key, vector: Vector, threshold: float, count: int = NEAREST, page: Page | None = None
    ) -> list[Near]:
        """At most ``count`` entries of the partition with at least that similarity, the nearest first."""
        try:
            found = await self._found(key, vector, count + _SPARE, threshold - _ROUNDING)
        except Unavailable as error:
            if "index" not in str(error.__cause__).lower():
                raise
            await self._make(len(vector))
            return []  # what it finds, it has to read first
        similar = similarities([kept for _, kept, _, _ in found], vector, self._types[0])
        near = [Near(one[0], similarity, *one[2:]) for one, similarity in zip(found, similar, strict=True)]
        near.sort(key=lambda one: -one.similarity)
        return await self._whole(key, [one for one in near[:count] if one.similarity >= threshold])

    async def _found(self, key: Key, vector: Vector, most: int, least: float) -> list[tuple[str, bytes, bytes, float]]:
        """What may be near: by heads, or by the whole vectors where heads tell nothing."""
        space, form = self._of_size(len(vector)), self._types[0]
        index = _index(space)
        if not self._headless.get(space, 0):
            found = await self._store.search(key, index, space, "head", packed(headed(vector), form), 2 * most, least)
            if found is not None:
                return found
            self._headless[space] = _HEADLESS + 1
        self._headless[space] -= 1
        found = await self._store.search(key, index, space, "vector", packed(vector, form), most, least)
        assert found is not None
        return found

    async def _whole(self, key: Key, near: Sequence[Near]) -> list[Near]:
        """``near``, with the records that did not come along."""
        missing = [one.entry for one in near if not one.record]
        read = dict(zip(missing, await self._store.read(key, missing), strict=True)) if missing else {}
        whole = [one._replace(record=kept[0], left=kept[1]) if (kept := read.get(one.entry)) else one for one in near]
        return [one for one in whole if one.record]

    def _of_size(self, dimensions: int) -> str:
        return f"{self._space}{dimensions:x}{self._types[0].lower()}"

    async def _make(self, dimensions: int) -> None:
        space = self._of_size(dimensions)
        try:
            await self._store.commands(
                ("FT.CREATE", _index(space), "ON", "HASH", "PREFIX", 1, f"rmw:v2:{space}:", "SCHEMA", "partition", "TAG",
                 *self._field("head", dimensions // 4 + 1), *self._field("vector", dimensions))
            )  # fmt: skip
        except Unavailable as error:
            told = str(error.__cause__).lower()
            if "type" in told and self._types[0] != self._types[-1]:
                self._types = self._types[-1:]
                await self._make(dimensions)
                return
            if "exists" not in told:
                raise
        self._made.add(space)  # one that is dropped is missed by the next search

    def _field(self, name: str, dimensions: int) -> tuple[str | int, ...]:
        return name, "VECTOR", "FLAT", 6, "TYPE", self._types[0], "DIM", dimensions, "DISTANCE_METRIC", "COSINE"


def _index(space: str) -> str:
    return f"rmw-v2-{space}"


# -- by this process -------------------------------------------------------------------------------------------------------


PAGE = 2000
"""So many entries are read at a time."""


class Scan:
    """A scan of the partition's vectors, which are held in this process, with the records that were found lately: a search
    reads only what was added since, and records that it does not hold. At most ``cache_memory`` bytes of both; the partition
    that was not asked for longest goes first."""

    def __init__(self, store: Entries, space: str, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._space = space
        self._most_bytes = settings.cache_memory
        self._most_rows = settings.cache_partition_entries
        self._clock = clock
        self._partitions: OrderedDict[tuple[str, int], Matrix] = OrderedDict()
        self._dimensions: int | None = None
        """Those of the last vector that was seen."""

    async def keepable(self, vector: Vector) -> Kept:
        """``vector`` as it is to be kept."""
        return Kept(self._of_size(len(vector)), "scan", packed(vector))

    def known(self, key: Key) -> tuple[str, int] | None:
        """How far the partition was read: a space, and the last number in it. None where no vector was seen yet."""
        if self._dimensions is None:
            return None
        matrix = self._partitions.get((key.partition, self._dimensions))
        return self._of_size(self._dimensions), matrix.number if matrix is not None else 0

    async def nearest(
        self, key: Key, vector: Vector, threshold: float, count: int = NEAREST, page: Page | None = None
    ) -> list[Near]:
        """At most ``count`` entries of the partition with at least that similarity, the nearest first, as they were when
        ``page`` was read (None: as they are). That begins after what was ``known``; more is read where it is not all."""
        self._dimensions = len(vector)
        place = key.partition, self._dimensions
        matrix = self._partitions.setdefault(place, Matrix(self._dimensions))
        if page is None or not self._takes_in(matrix, page):
            await self._read_on(key, matrix)
        if place in self._partitions:
            self._partitions.move_to_end(place)
        self._make_room()
        near = matrix.nearest(vector, threshold, count, self._now())
        records = await self._records(key, matrix, [entry for entry, _ in near])
        return [Near(entry, similarity, *records[entry]) for entry, similarity in near if entry in records]

    async def _records(self, key: Key, matrix: Matrix, entries: Sequence[str]) -> dict[str, tuple[bytes, float]]:
        """The records of those ``entries`` that are still kept, and how many seconds each is: read, unless they are held."""
        now, state = self._now(), matrix.state
        held = {entry: known for entry in entries if (known := matrix.records.get(entry)) is not None}
        records = {entry: (record, (expiry - now) / 1000) for entry, (record, expiry) in held.items()}
        missing = [entry for entry in entries if entry not in held]
        for entry, kept in zip(missing, await self._store.read(key, missing) if missing else (), strict=True):
            if kept is None:
                matrix.remove(entry)  # it is gone before its time: it was evicted, or deleted
                continue
            records[entry] = kept
            if matrix.state == state:
                matrix.records.put(entry, kept[0], now + int(kept[1] * 1000))
        return records

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
        matrix.note_removals(page.removals)
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
