"""Embedding vectors: length 1, float32 in memory, float16 in Redis; and an exact nearest-neighbour search among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float32]
Rows: TypeAlias = NDArray[np.intp]

_STORED = np.dtype("<f2")
_TINY = np.float32(1e-30)  # avoids a division by zero
_FIRST_SLICE = 64
_ROUNDING = 1e-4  # upper bound of the error of similarities and lengths
_MIN_GROWTH = 128


class InvalidVector(ValueError):
    """The value is not a list of numbers, has no direction, or has the wrong size."""


def unit_vector(numbers: object) -> Vector:
    """Return ``numbers`` as a vector of length 1. Raises ``InvalidVector``."""
    with np.errstate(over="ignore"):  # an overflow is reported below
        try:
            vector = np.asarray(numbers, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            raise InvalidVector("the embedding is not a list of numbers") from None
        length = np.linalg.norm(vector) if vector.ndim == 1 else np.float32(0)
    if not np.isfinite(length) or length == 0:
        raise InvalidVector("the embedding has no direction")
    return vector / length


def encode_vector(vector: Vector) -> bytes:
    """Return ``vector`` as little-endian float16."""
    return vector.astype(_STORED).tobytes()


def decode_vectors(blobs: Sequence[bytes], dimensions: int) -> Vector:
    """Return encoded vectors as the rows of a matrix, scaled to length 1 again. Raises ``InvalidVector`` for a wrong size."""
    if any(len(blob) != _STORED.itemsize * dimensions for blob in blobs):
        raise InvalidVector("a stored vector has the wrong size")
    rows = np.frombuffer(b"".join(blobs), _STORED).astype(np.float32).reshape(len(blobs), dimensions)
    unit_rows: Vector = rows / np.sqrt(np.vecdot(rows, rows) + _TINY)[:, np.newaxis]
    return unit_rows


class VectorTable:
    """Vectors by id, each with an expiry (ms), in the order in which they were added.

    The columns are split into slices of 64, 128, 256, ... numbers. A search compares slice by slice. After each slice, the
    Cauchy-Schwarz inequality limits what the remaining numbers can add to a similarity, and rows that can no longer
    reach the threshold are skipped. Among 10,000 vectors of 384 (1536) numbers, a search takes 0.1 (0.3 to 1.5) ms; comparing
    all numbers takes 0.3 (2.4) ms.
    """

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self._rows: dict[str, int] = {}
        self._ids: list[str] = []
        """The id of each row."""
        self._free: list[int] = []
        self._expiries = np.empty(0, np.int64)
        """The expiry of each row (ms); 0 if the row is free."""
        self._slices = _slices(dimensions)

    @property
    def nbytes(self) -> int:
        return 4 * self.dimensions * len(self._expiries)

    def put(self, entries: Iterable[tuple[str, int, bytes]]) -> None:
        """Add entries (id, expiry and encoded vector), or replace them; skip vectors of a wrong size."""
        fitting = [entry for entry in entries if len(entry[2]) == _STORED.itemsize * self.dimensions]
        if not fitting:
            return
        rows = [self._row(id_) for id_, _, _ in fitting]
        self._grow()
        vectors = decode_vectors([vector for _, _, vector in fitting], self.dimensions)
        for part in self._slices:
            part.set(rows, vectors)
        self._expiries[rows] = [expiry for _, expiry, _ in fitting]

    def remove(self, id_: str) -> None:
        """Remove an entry, if it is there."""
        row = self._rows.pop(id_, None)
        if row is not None:
            self._expiries[row] = 0
            self._free.append(row)

    def shrink(self, limit: int, now: int) -> None:
        """If there are more than ``limit`` entries, remove the expired ones, and then the oldest."""
        if len(self._rows) <= limit:
            return
        for id_ in [id_ for id_, row in self._rows.items() if self._expiries[row] <= now]:
            self.remove(id_)
        for id_ in list(self._rows)[: max(0, len(self._rows) - limit)]:
            self.remove(id_)

    def nearest(self, vector: Vector, threshold: float, count: int, now: int) -> list[tuple[str, float]]:
        """Return ids and similarities of up to ``count`` unexpired entries that reach the threshold, nearest first."""
        first, *others = self._slices
        similarities = first.products(vector)
        likely = similarities + first.limits(vector) >= threshold - _ROUNDING
        rows = np.flatnonzero(likely & (self._expiries > now))
        similarities = similarities[rows]
        for part in others:
            similarities += part.products(vector, rows)
            likely = similarities + part.limits(vector, rows) >= threshold - _ROUNDING
            rows, similarities = rows[likely], similarities[likely]
        best = [place for place in np.argsort(-similarities)[:count] if similarities[place] >= threshold]
        return [(self._ids[rows[place]], float(similarities[place])) for place in best]

    def _row(self, id_: str) -> int:
        """Return a row for ``id_``, which becomes the newest entry."""
        row = self._rows.pop(id_, None)
        if row is None and self._free:
            row = self._free.pop()
        if row is None:
            row = len(self._ids)
            self._ids.append("")
        self._ids[row] = id_
        self._rows[id_] = row
        return row

    def _grow(self) -> None:
        """Allocate rows for all ids; if any are missing, grow by at least half."""
        missing = len(self._ids) - len(self._expiries)
        if missing > 0:
            more = max(missing, len(self._expiries) // 2, _MIN_GROWTH)
            self._expiries = np.concatenate([self._expiries, np.zeros(more, np.int64)])
            for part in self._slices:
                part.grow(more)


class _Slice:
    """The columns ``start`` to ``stop`` of all vectors, and the length of the part of each vector after them."""

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

    def products(self, vector: Vector, rows: Rows | None = None) -> Vector:
        """Return the dot products of this slice of ``vector`` and of ``rows``, or of all rows."""
        other = vector[self.start : self.stop]
        products: Vector
        if rows is not None and len(rows) < len(self.values) // 4:
            products = np.vecdot(self.values[rows], other)
            return products
        products = np.vecdot(self.values, other)  # copying many rows costs more than multiplying all
        return products if rows is None else products[rows]

    def limits(self, vector: Vector, rows: Rows | None = None) -> Vector:
        """Return the maximum that the columns after this slice can add to each similarity."""
        rests = self.rests if rows is None else self.rests[rows]
        limits: Vector = rests * (np.linalg.norm(vector[self.stop :]) + _ROUNDING)
        return limits


def _slices(dimensions: int) -> list[_Slice]:
    slices, start, width = [], 0, _FIRST_SLICE
    while start < dimensions:
        slices.append(_Slice(start, min(start + width, dimensions)))
        start, width = start + width, 2 * width
    return slices
