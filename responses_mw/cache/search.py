"""Search for the entries of a partition that are nearest to a vector.

Each process holds the vectors of the partitions that it has searched. Before each search, it reads the vectors that were added
since. The search is exact. Redis needs no module for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .key import Key
from .store import MAX_PARTITION_ENTRIES, Entries, Page, StoredVector
from .vectors import Vector, VectorTable, encode_vector

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MATCHES = 4
"""Maximum number of entries returned: the guard may refuse the nearest ones."""
PAGE = 2000
"""Maximum number of vectors that are read at a time."""
_MAX_RECORD_BYTES = 4 * 1024 * 1024
"""Maximum size of the records that are held for each partition."""


class Match(NamedTuple):
    """An entry similar to a vector: its id, cosine similarity, record and remaining seconds."""

    entry: str
    similarity: float
    record: bytes
    left: float


class Scan:
    """Linear search in the vectors of a partition, which are held in this process.

    Recently matched records are held too: this saves a repeated semantic hit a round trip, a sixth of its time. Vectors and
    records take up to ``max_bytes``; the least recently used partition is dropped first.
    """

    def __init__(self, store: Entries, space: str, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._space = space
        self._max_bytes = max_bytes
        self._max_entries = MAX_PARTITION_ENTRIES
        self._clock = clock
        self._partitions: OrderedDict[tuple[str, int], _Partition] = OrderedDict()
        self._dimensions: int | None = None
        """Size of the last vector; None before the first."""

    def stored(self, vector: Vector) -> StoredVector:
        """Return ``vector`` in the form in which it is stored."""
        return StoredVector(self._sized_space(len(vector)), encode_vector(vector))

    def known(self, key: Key) -> tuple[str, int] | None:
        """Return the space and the last entry number read of the partition; None before the first search."""
        if self._dimensions is None:
            return None
        partition = self._partitions.get((key.partition, self._dimensions))
        return self._sized_space(self._dimensions), partition.last if partition is not None else 0

    async def nearest(
        self, key: Key, vector: Vector, threshold: float, count: int = MAX_MATCHES, page: Page | None = None
    ) -> list[Match]:
        """Return up to ``count`` entries that reach the threshold, nearest first.

        ``page`` is what the exact lookup has read after ``known``; if there is more, it is read here.
        """
        self._dimensions = len(vector)
        place = key.partition, self._dimensions
        partition = self._partitions.setdefault(place, _Partition(self._dimensions))
        if page is None or not self._update(partition, page):
            await self._read_rest(key, partition)
        if place in self._partitions:
            self._partitions.move_to_end(place)
        self._evict()
        near = partition.vectors.nearest(vector, threshold, count, self._now())
        records = await self._records(key, partition, [entry for entry, _ in near])
        return [Match(entry, similarity, *records[entry]) for entry, similarity in near if entry in records]

    def similarity(self, key: Key, vector: Vector, floor: float) -> float | None:
        """Return the similarity of the nearest entry known here; None if it is below ``floor``."""
        partition = self._partitions.get((key.partition, len(vector)))
        near = partition.vectors.nearest(vector, floor, 1, self._now()) if partition is not None else []
        return near[0][1] if near else None

    async def _records(self, key: Key, partition: _Partition, entries: Sequence[str]) -> dict[str, tuple[bytes, float]]:
        """Return record and remaining seconds of each entry that still exists. Records that are not held are read."""
        now, state = self._now(), partition.state
        held = {entry: known for entry in entries if (known := partition.records.get(entry)) is not None}
        records = {entry: (record, (expiry - now) / 1000) for entry, (record, expiry) in held.items()}
        missing = [entry for entry in entries if entry not in held]
        for entry, read in zip(missing, await self._store.read(key, missing) if missing else (), strict=True):
            if read is None:
                partition.remove(entry)  # evicted or deleted
                continue
            records[entry] = read
            if partition.state == state:
                partition.records.put(entry, read[0], now + int(read[1] * 1000))
        return records

    async def _read_rest(self, key: Key, partition: _Partition) -> None:
        async with partition.reading:
            while True:
                space = self._sized_space(partition.vectors.dimensions)
                page = await self._store.since(key, space, partition.last, PAGE)
                if self._update(partition, page):
                    return

    def _update(self, partition: _Partition, page: Page) -> bool:
        """Add a page to ``partition``; return whether the partition is complete now."""
        if page.space != self._sized_space(partition.vectors.dimensions):
            return False
        return partition.update(page, self._max_entries, self._now())

    def _sized_space(self, dimensions: int) -> str:
        return f"{self._space}{dimensions:x}"

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _evict(self) -> None:
        while len(self._partitions) > 1 and sum(one.nbytes for one in self._partitions.values()) > self._max_bytes:
            self._partitions.popitem(last=False)


class _Partition:
    """What this process has read of a partition, up to entry number ``last``."""

    def __init__(self, dimensions: int) -> None:
        self.reading = asyncio.Lock()
        self.removals = ""
        self._reset("", dimensions)

    def _reset(self, generation: str, dimensions: int) -> None:
        self.generation = generation
        self.last = 0
        self.vectors = VectorTable(dimensions)
        self.records = _Records()

    @property
    def nbytes(self) -> int:
        return self.vectors.nbytes + self.records.nbytes

    @property
    def state(self) -> tuple[str, int, str]:
        """A value that changes when a record is replaced or deleted."""
        return self.generation, self.last, self.removals

    def remove(self, entry: str) -> None:
        self.vectors.remove(entry)
        self.records.remove(entry)

    def update(self, page: Page, limit: int, now: int) -> bool:
        """Add a page, which may arrive late or twice; return whether everything up to its end is known now."""
        if page.removals != self.removals:
            self.removals, self.records = page.removals, _Records()
        same = page.generation == self.generation
        if same and page.last < self.last > page.after:
            return True  # more has been read meanwhile
        if not same or page.last < self.last:
            self._reset(page.generation, self.vectors.dimensions)  # the cache was purged
        if page.after > self.last:
            return False  # the entries in between are unknown
        new = [entry for entry in page.entries if entry[1] > self.last]
        self.vectors.put((entry, *_split(vector)) for entry, _, vector in new if vector)
        for entry, _, _ in new:
            self.records.remove(entry)
        if new:
            self.last = new[-1][1]
        self.vectors.shrink(limit, now)
        return not page.full


class _Records:
    """Recently used records with their expiry (ms), up to ``_MAX_RECORD_BYTES``."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._records: OrderedDict[str, tuple[bytes, int]] = OrderedDict()

    def get(self, entry: str) -> tuple[bytes, int] | None:
        if entry in self._records:
            self._records.move_to_end(entry)
        return self._records.get(entry)

    def put(self, entry: str, record: bytes, expiry: int) -> None:
        self.remove(entry)
        self._records[entry] = record, expiry
        self.nbytes += len(record)
        while self.nbytes > _MAX_RECORD_BYTES:
            self.remove(next(iter(self._records)))

    def remove(self, entry: str) -> None:
        record, _ = self._records.pop(entry, (b"", 0))
        self.nbytes -= len(record)


def _split(stored: bytes) -> tuple[int, bytes]:
    """Split an expiry (ms) from a vector."""
    expiry, _, vector = stored.partition(b":")
    return int(expiry), vector
