"""Embed chunks in batches. Retry failed requests, and cut texts that are too long for the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..backoff import Backoff
from ..embeddings import Embedder, NoEmbedding

if TYPE_CHECKING:
    from ..embeddings.vector import Vector

BATCH = 32
"""Number of texts in a request. Every server accepts this many."""
_ATTEMPTS = 3
_FIRST_PAUSE = 0.5  # seconds between two attempts
_SHORTEST = 400  # characters; a server that refuses shorter texts does so for another reason than their length


class ChunkEmbedding:
    """Embeds the chunks of files.

    A chunk has 800 tokens by default, but many models accept only 512. If the server refuses a batch, the maximum length of a
    text is halved for this and all later batches. Longer texts are cut into parts, and their vector is the mean of the parts'.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._longest = math.inf  # number of characters that the server may accept

    async def embed(self, texts: Sequence[str]) -> list[Vector]:
        """Return the vector of each text. Raises `NoEmbedding` if all attempts fail."""
        while True:
            parts = [[*_cut(text, self._longest)] for text in texts]
            try:
                vectors = iter(await self._embed_all([part for some in parts for part in some]))
            except NoEmbedding as error:
                half = max(len(part) for some in parts for part in some) // 2
                if not error.is_refusal or half < _SHORTEST:
                    raise
                self._longest = half
            else:
                return [_mean([next(vectors) for _ in some]) for some in parts]

    async def _embed_all(self, texts: Sequence[str]) -> list[Vector]:
        vectors = list["Vector"]()
        for start in range(0, len(texts), BATCH):
            vectors += await self._embed_batch(texts[start : start + BATCH])
        return vectors

    async def _embed_batch(self, texts: Sequence[str]) -> list[Vector]:
        pauses = Backoff(_FIRST_PAUSE, 8.0, jitter=0.5)
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._embedder.embed(texts)
            except NoEmbedding as error:
                if not error.is_temporary:
                    raise
                await pauses.wait()
        return await self._embedder.embed(texts)


def _cut(text: str, longest: float) -> Iterator[str]:
    """Yield parts of equal length, at most `longest`. Omit blank ones."""
    size = math.ceil(len(text) / max(1, math.ceil(len(text) / longest)))
    for start in range(0, len(text), size):
        if (part := text[start : start + size]).strip():
            yield part


def _mean(vectors: Sequence[Vector]) -> Vector:
    if len(vectors) == 1:
        return vectors[0]
    from ..embeddings.vector import unit_vector

    try:
        return unit_vector(sum(vectors[1:], vectors[0]))
    except ValueError:  # they cancel each other out
        return vectors[0]
