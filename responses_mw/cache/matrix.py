"""The vectors of one partition in memory, and the nearest of them.

A vector is compared slice by slice, the first of 64 numbers and each twice as wide as the one before. What the slices so far
leave of a similarity is at most the product of the lengths of the rests (Cauchy and Schwarz): after one or two of them few
vectors can still reach a high threshold, and only these are compared further. What is found is what comparing with all finds.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .vectors import Vector, directions, unpacked

_FIRST_SLICE = 64
_ROUNDING = 1e-4
"""Similarities and lengths are exact to this, at least."""
_BLOCK = 128
"""There is room for a multiple of so many rows."""
_ALL = slice(None)
_MOST_RECORDS = 4 * 1024 * 1024
"""Bytes of them, for each partition."""
_ONE_THREAD = 9216
"""A product of a matrix with so many numbers wakes OpenBLAS's threads, which then spin for longer than the product takes."""


class Matrix:
    """A row for each entry of a partition that this process has read, and free rows."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self.reading = asyncio.Lock()
        self.removals = ""
        """The number of removals for which ``records`` are those that are kept."""
        self.clear("")

    def clear(self, generation: str) -> None:
        self.generation = generation
        self.number = 0
        """That of the last entry that was read."""
        self._rows: OrderedDict[str, tuple[int, int]] = OrderedDict()  # of each entry row and number, in the order of these
        self._ids: list[str] = []
        self._free: list[int] = []
        self._expiries = np.empty(0, np.int64)
        self._slices = _slices(self.dimensions)
        self.records = Records()

    @property
    def nbytes(self) -> int:
        return 4 * self.dimensions * len(self._expiries) + self.records.nbytes

    @property
    def state(self) -> tuple[str, int, str]:
        """As long as it is the same, an entry has the same record."""
        return self.generation, self.number, self.removals

    def note_removals(self, removals: str) -> None:
        if removals != self.removals:
            self.removals, self.records = removals, Records()

    def add(self, entries: Sequence[tuple[str, int, bytes]]) -> None:
        """Takes in entries with their numbers, and their expiries and vectors as they are kept."""
        wanted = [(entry, number, *_split(kept)) for entry, number, kept in entries if kept]
        fitting = [one for one in wanted if len(one[3]) == 2 * self.dimensions]
        rows = [self._row(entry, number) for entry, number, _, _ in fitting]
        self._grow()
        if rows:
            vectors = directions(unpacked([vector for *_, vector in fitting], self.dimensions))
            for part in self._slices:
                part.set(rows, vectors)
            self._expiries[rows] = [expiry for _, _, expiry, _ in fitting]
        for entry, _, _ in entries:
            self.records.remove(entry)
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
        self.records.remove(entry)
        row, _ = self._rows.pop(entry, (None, 0))
        if row is not None:
            self._expiries[row] = 0
            self._free.append(row)

    def nearest(self, vector: Vector, threshold: float, count: int, now: int) -> list[tuple[str, float]]:
        """Ids and similarities of those with at least that one which have not expired ``now`` (ms), the nearest first."""
        least = threshold - _ROUNDING
        first, *others = self._slices
        similarities = first.products(vector)
        rows = np.flatnonzero(first.most(similarities, vector) >= least)
        rows = rows[self._expiries[rows] > now]  # those that are free have expired
        similarities = similarities[rows]
        for part in others:
            similarities += part.products(vector, rows)
            likely = part.most(similarities, vector, rows) >= least
            rows, similarities = rows[likely], similarities[likely]
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
            more = -(-max(need - have, have // 2) // _BLOCK) * _BLOCK
            self._expiries = np.concatenate([self._expiries, np.zeros(more, np.int64)])
            for part in self._slices:
                part.grow(more)


class Records:
    """Records that were read lately, as they are kept: the popular ones need not be read again."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._records: OrderedDict[str, tuple[bytes, int]] = OrderedDict()

    def get(self, entry: str) -> tuple[bytes, int] | None:
        """The record of ``entry``, and when it expires (ms)."""
        if entry in self._records:
            self._records.move_to_end(entry)
        return self._records.get(entry)

    def put(self, entry: str, record: bytes, expiry: int) -> None:
        self.remove(entry)
        self._records[entry] = record, expiry
        self.nbytes += len(record)
        while self.nbytes > _MOST_RECORDS:
            self.remove(next(iter(self._records)))

    def remove(self, entry: str) -> None:
        record, _ = self._records.pop(entry, (b"", 0))
        self.nbytes -= len(record)


class _Slice:
    """Some of the numbers of all vectors: those from ``start`` to ``stop``, and how long the rest of each is."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.values = np.empty((0, stop - start), np.float32)
        self.rests = np.empty(0, np.float32)

    def set(self, rows: Sequence[int], vectors: Vector) -> None:
        self.values[rows] = vectors[:, self.start : self.stop]
        self.rests[rows] = np.linalg.norm(vectors[:, self.stop :], axis=1)

    def grow(self, more: int) -> None:
        self.values = np.concatenate([self.values, np.zeros((more, self.stop - self.start), np.float32)])
        self.rests = np.concatenate([self.rests, np.zeros(more, np.float32)])

    def products(self, vector: Vector, rows: NDArray[np.intp] | None = None) -> Vector:
        """Those of ``rows`` (None: of all) with the same numbers of ``vector``."""
        asked = vector[self.start : self.stop]
        products: Vector
        if rows is not None and len(rows) < len(self.values) // 8:
            products = np.vecdot(self.values[rows], asked)
            return products
        # More cheaply than many are picked, all are multiplied: in blocks, so that this thread does it alone.
        width, block = len(asked), _BLOCK
        while block > 1 and block * width >= _ONE_THREAD:
            block //= 2
        products = np.matmul(self.values.reshape(-1, block, width), asked).reshape(-1)
        return products if rows is None else products[rows]

    def most(self, similarities: Vector, vector: Vector, rows: NDArray[np.intp] | slice = _ALL) -> Vector:
        """What the whole similarities are at most, where up to here they are ``similarities``."""
        most: Vector = similarities + self.rests[rows] * (_length(vector[self.stop :]) + _ROUNDING)
        return most


def _slices(dimensions: int) -> list[_Slice]:
    slices, start, width = [], 0, _FIRST_SLICE
    while start < dimensions:
        slices.append(_Slice(start, min(start + width, dimensions)))
        start, width = start + width, 2 * width
    return slices


def _length(vector: Vector) -> float:
    return math.sqrt(np.dot(vector, vector))


def _split(kept: bytes) -> tuple[int, bytes]:
    expiry, _, vector = kept.partition(b":")
    return int(expiry), vector
