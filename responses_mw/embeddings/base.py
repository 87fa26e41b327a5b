"""The interface of embedders. The cache and the file search use only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .vector import Vector

BUILTIN = "builtin"
"""Name of the built-in embeddings in the settings."""


class NoEmbedding(Exception):
    """The texts could not be embedded. The message gives the reason without quoting a text.

    If `is_temporary`, the same request may succeed later. If `is_refusal`, a request with shorter texts may succeed.
    """

    def __init__(self, message: str, *, is_temporary: bool = False, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary
        self.is_refusal = is_refusal


class Embedder(ABC):
    """Converts texts to vectors of length 1, whose dot product is the similarity of the texts."""

    model: str
    """Name of the model, for metrics and for users."""
    space: str
    """Id of the vector space. Only vectors of the same space and dimension are comparable."""
    dimension: int | None
    """Size of the vectors, or None until a server has sent the first one."""

    @abstractmethod
    async def embed(self, texts: Sequence[str], caller: Any = None) -> list[Vector]:
        """Return the vector of each text. Raises `NoEmbedding` on every failure.

        An embedder that calls a server may send the credential of `caller`, which is None on the command line.
        """
