"""Vectors of texts: of length 1, in float32 where they are compared, in float16 where they are kept.

All that is kept is rounded to float16 first, whoever searches: so an index and a scan see the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float32]


class NoVector(ValueError):
    """What should be a vector is none, or has no direction."""


def vector_of(numbers: object) -> Vector:
    """The direction of ``numbers``. Raises ``NoVector``."""
    with np.errstate(over="ignore"):  # what is beyond float32 has no direction either
        try:
            vector = np.asarray(numbers, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            raise NoVector("the embedding is no list of numbers") from None
        length = math.sqrt(np.dot(vector, vector)) if vector.ndim == 1 else 0.0
    if not math.isfinite(length) or length == 0:
        raise NoVector("the embedding has no direction")
    return vector / np.float32(length)


_TINY = np.float32(1e-30)
"""More than nothing: to divide by."""
FORMS = {"FLOAT16": "<f2", "FLOAT32": "<f4"}


def packed(vector: Vector, form: str = "FLOAT16") -> bytes:
    """The form in which a vector is kept, little-endian; in the wide one it holds no more than in the other."""
    return vector.astype("<f2").astype(FORMS[form], copy=False).tobytes()


def headed(vector: Vector) -> Vector:
    """The first quarter of a vector's numbers, and how long the rest is. The cosine of two of these is the most that the whole
    vectors' can be (Cauchy and Schwarz)."""
    head = np.empty(len(vector) // 4 + 1, np.float32)
    head[:-1] = vector[: len(vector) // 4]
    head[-1] = math.sqrt(max(0.0, 1.0 - float(np.dot(head[:-1], head[:-1]))))
    return head


def unpacked(blobs: Sequence[bytes], dimensions: int, form: str = "FLOAT16") -> Vector:
    """The rows of a matrix, out of what ``packed`` made of them. Raises ``NoVector`` where the sizes differ."""
    numbers = np.dtype(FORMS[form])
    if any(len(blob) != numbers.itemsize * dimensions for blob in blobs):
        raise NoVector("a kept vector has another size")
    return np.frombuffer(b"".join(blobs), numbers).astype(np.float32).reshape(len(blobs), dimensions)


def directions(rows: Vector) -> Vector:
    """``rows``, each of length 1 again after it was rounded; one of zeros stays as it is."""
    lengths = np.sqrt(np.vecdot(rows, rows) + _TINY)
    of_length_1: Vector = rows / lengths[:, np.newaxis]
    return of_length_1


def similarities(kept: Sequence[bytes], vector: Vector, form: str) -> list[float]:
    """Those of kept vectors with ``vector``."""
    similar: list[float] = np.vecdot(directions(unpacked(kept, len(vector), form)), vector).tolist()
    return similar
