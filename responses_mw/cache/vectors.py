"""Search for the entries of a partition that are nearest to a vector.

Each process has an in-memory copy of the vectors in the partitions that it has searched. Before each search, it reads the
vectors that were added since the last search. The search is therefore exact and needs no Redis module. Vectors are normalized
to unit length. In Redis, they are stored as float16.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..embeddings.vector import Vector
from .entry import Key
from .store import MAX_PARTITION_ENTRIES, Entries, EntryPage

MAX_MATCHES = 4  # maximum number of entries returned. Several are useful because the guard may refuse the nearest ones
PAGE = 2000  # maximum number of vectors that are read at a time
_STORED = np.dtype("<f2")
_TINY = np.float32(1e-30)  # avoids a division by zero
_MIN_GROWTH = 128
_OVERHEAD = 1024  # bytes of a table without vectors


class Match(NamedTuple):
    """An entry similar to a vector: its id, its cosine similarity, its record, and its remaining lifetime in seconds."""

    entry: str
    similarity: float
    record: bytes
    left: float


class Scan:
    """Linear search for the stored vectors that are nearest to a vector.

    Vectors are kept in memory. While they exceed `max_bytes`, the least recently used partition is evicted, unless it is alone.
    """

    def __init__(self, store: Entries, space: str, max_bytes: int) -> None:
        self._store = store
        self._space = space
        self._max_bytes = max_bytes
        self._partitions: dict[tuple[str, str], _Partition] = {}  # partitions by name and space, the least recently used first
        self._latest: str | None = None  # the space of the last search

    def stored(self, vector: Vector) -> tuple[str, bytes]:
        """Return the space and the encoded form of `vector`."""
        return self._space_of(vector), encode_vector(vector)

    def known(self, key: Key) -> tuple[str, int] | None:
        """Return the vector space of the last search, and the number of the last entry read from the partition of `key`.

        The number is 0 if no entry was read. The result is None if there has been no search yet.
        """
        if self._latest is None:
            return None
        partition = self._partitions.get((key.partition, self._latest))
        return self._latest, partition.last if partition is not None else 0

    async def nearest(
        self, key: Key, vector: Vector, threshold: float, count: int = MAX_MATCHES, page: EntryPage | None = None
    ) -> list[Match]:
        """Return up to `count` entries that reach the threshold, nearest first.

        `page` is the page of an exact lookup with the result of `known`. Further entries are read from Redis.
        """
        partition = await self._read(key, vector, page)
        near = partition.vectors.nearest(vector, threshold, count, _now())
        found = await self._store.read(key, [entry for entry, _ in near]) if near else []
        pairs = list(zip(near, found, strict=True))
        for (entry, _), read in pairs:
            if read is None:
                partition.vectors.remove(entry)  # evicted or deleted
        return [Match(entry, similarity, *read) for (entry, similarity), read in pairs if read is not None]

    async def _read(self, key: Key, vector: Vector, page: EntryPage | None) -> _Partition:
        """Read the new entries in the partition of `key`, and return the partition."""
        self._latest = self._space_of(vector)
        place = key.partition, self._latest
        partition = self._partitions.pop(place, None) or _Partition(self._latest, len(vector))
        self._partitions[place] = partition  # now the most recently used one
        if page is None or not partition.update(page):
            async with partition.reading:
                while not partition.update(await self._store.since(key, partition.space, partition.last, PAGE)):
                    pass
        if not partition.last:  # every new prompt begins an empty partition
            self._partitions.pop(place, None)
        while len(self._partitions) > 1 and sum(one.vectors.nbytes for one in self._partitions.values()) > self._max_bytes:
            del self._partitions[next(iter(self._partitions))]
        return partition

    def similarity(self, key: Key, vector: Vector, floor: float) -> float | None:
        """Return the similarity of the nearest entry in memory, or None if no entry in memory reaches `floor`."""
        partition = self._partitions.get((key.partition, self._space_of(vector)))
        near = partition.vectors.nearest(vector, floor, 1, _now()) if partition is not None else []
        return near[0][1] if near else None

    def _space_of(self, vector: Vector) -> str:
        return f"{self._space}{len(vector):x}"  # only vectors of the same model and size are comparable


def _now() -> int:
    return int(time.time() * 1000)


class _Partition:
    """The part of a partition that this process has read: entries up to the number `last`, with vectors in one `space`."""

    def __init__(self, space: str, dimensions: int) -> None:
        self.space = space
        self.reading = asyncio.Lock()
        self._purge("", dimensions)

    def _purge(self, generation: str, dimensions: int) -> None:
        self.generation = generation
        self.last = 0
        self.vectors = VectorTable(dimensions)

    def update(self, page: EntryPage) -> bool:
        """Add the entries of a page. Pages may arrive late or twice. Return False if further entries must be read."""
        if page.space != self.space:
            return False
        same = page.generation == self.generation
        if same and page.last < self.last > page.after:
            return True  # later entries have been read meanwhile
        if not same or page.last < self.last:
            self._purge(page.generation, self.vectors.dimensions)
        if page.after > self.last:
            return False  # the entries in between are unknown
        new = [entry for entry in page.entries if entry[1] > self.last]
        added = ((entry, stored.partition(b":")) for entry, _, stored in new if stored)
        self.vectors.put((entry, int(expiry), vector) for entry, (expiry, _, vector) in added)
        self.last = new[-1][1] if new else self.last
        self.vectors.shrink(MAX_PARTITION_ENTRIES, _now())
        return not page.full


# -- vectors ---------------------------------------------------------------------------------------------------------------


def encode_vector(vector: Vector) -> bytes:
    """Encode `vector` as little-endian float16."""
    return vector.astype(_STORED).tobytes()


def decode_vectors(blobs: Sequence[bytes], dimensions: int) -> Vector:
    """Decode vectors into the rows of a matrix, each scaled to length 1 again."""
    rows = np.frombuffer(b"".join(blobs), _STORED).astype(np.float32).reshape(len(blobs), dimensions)
    unit_rows: Vector = rows / np.sqrt(np.vecdot(rows, rows) + _TINY)[:, np.newaxis]
    return unit_rows


class VectorTable:
    """Vectors, each with an id and an expiry (ms), ordered from oldest to newest. A replaced vector becomes the newest."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self._rows: dict[str, int] = {}
        self._ids: list[str] = []  # the id of each row
        self._free: list[int] = []
        self._vectors = np.empty((0, dimensions), np.float32)
        self._expiries = np.empty(0, np.int64)  # the expiry of each row (ms); 0 if the row is free

    @property
    def nbytes(self) -> int:
        return _OVERHEAD + 4 * self.dimensions * len(self._expiries)

    def put(self, entries: Iterable[tuple[str, int, bytes]]) -> None:
        """Add or replace entries (id, expiry and encoded vector). Entries whose vector has the wrong size are ignored."""
        fitting = [entry for entry in entries if len(entry[2]) == _STORED.itemsize * self.dimensions]
        if not fitting:
            return
        rows = [self._row(id_) for id_, _, _ in fitting]
        missing = len(self._ids) - len(self._expiries)
        if missing > 0:
            size = len(self._expiries) + max(missing, len(self._expiries) // 2, _MIN_GROWTH)
            for array in (self._vectors, self._expiries):
                array.resize((size, *array.shape[1:]), refcheck=False)
        self._vectors[rows] = decode_vectors([vector for _, _, vector in fitting], self.dimensions)
        self._expiries[rows] = [expiry for _, expiry, _ in fitting]

    def remove(self, id_: str) -> None:
        row = self._rows.pop(id_, None)
        if row is not None:
            self._expiries[row] = 0
            self._free.append(row)

    def shrink(self, limit: int, now: int) -> None:
        """Reduce the entries to `limit`, if there are more. Remove all expired entries first, then the oldest ones."""
        if len(self._rows) <= limit:
            return
        for id_ in [id_ for id_, row in self._rows.items() if self._expiries[row] <= now]:
            self.remove(id_)
        for id_ in list(self._rows)[: max(0, len(self._rows) - limit)]:
            self.remove(id_)

    def nearest(self, vector: Vector, threshold: float, count: int, now: int) -> list[tuple[str, float]]:
        """Return the ids and similarities of up to `count` unexpired entries that reach the threshold, nearest first."""
        similarities = np.vecdot(self._vectors, vector)
        rows = np.flatnonzero((similarities >= threshold) & (self._expiries > now))
        best = rows[np.argsort(-similarities[rows])[:count]]
        return [(self._ids[row], float(similarities[row])) for row in best]

    def _row(self, id_: str) -> int:
        """Return the row of `id_`, or a free row, and make `id_` the newest entry."""
        row = self._rows.pop(id_, None)
        if row is None and not self._free:
            self._free.append(len(self._ids))
            self._ids.append("")
        self._rows[id_] = row = self._free.pop() if row is None else row
        self._ids[row] = id_
        return row
