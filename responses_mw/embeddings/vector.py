"""Vectors of length 1. Needs numpy, an optional dependency."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float32]


def unit_vector(numbers: object) -> Vector:
    """Scale `numbers` to length 1. Raises `ValueError` if it is not a list of numbers, or the norm is 0 or not finite."""
    with np.errstate(over="ignore"):  # an overflow is reported below
        try:
            vector = np.asarray(numbers, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            raise ValueError("the embedding is not a list of numbers") from None
        length = np.linalg.norm(vector) if vector.ndim == 1 else np.float32(0)
    if not np.isfinite(length) or length == 0:
        raise ValueError("the norm of the embedding is zero or not finite")
    return vector / length
