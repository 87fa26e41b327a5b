"""Search a vector store with its index in the Redis server, instead of in the memory of this process.

The server finds candidates by vectors (HNSW) and by words (BM25), which are then scored as in `search.py`. Because HNSW is
approximate, a search may miss a chunk.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..state.blocks import Blocks
from ..state.chunk_index import ChunkIndex, ChunkName, IndexedChunk
from ..state.schema import reading
from ..state.search_commands import ChunkQuery, Restriction, WordQuery
from ..state.store_file_records import StoreFile
from ..state.store_files import StoreFiles
from ..state.vector_stores import VectorStore
from ..tasks import by_size
from .filters import Filter
from .index_listings import IndexListings, Listing, Statistics, float32, token
from .ranking import Weights
from .search import MAX_QUERY_WORDS, MAX_TERM, Query, bm25_norm, rarity, relative_similarity
from .words import words_of

_CANDIDATES = 150  # minimum number of candidates from each ranking
_EFFORT = 2000  # minimum number of candidates that HNSW examines, which costs little even in a large index
_MAX_SCORED = 20_000  # maximum number of chunks that the server scores by words, unless the rarest word is in more
_MAX_FREQUENCIES = 100_000
_FREQUENCY_SECONDS = 600.0
_FREQUENT = 4  # words in more than a quarter of the chunks are not used to find candidates
_MAX_WORDS = 16  # maximum number of words that are used to find candidates


class IndexedHit(NamedTuple):
    """A result of a search. `piece` and `place` locate its text (`SearchedBlock.place_of`)."""

    file: StoreFile
    score: float
    piece: int
    place: int


class IndexedSearch:
    """Searches the stores that are indexed. Every coroutine raises the errors of `ChunkIndex`."""

    def __init__(self, files: StoreFiles, blocks: Blocks, index: ChunkIndex) -> None:
        self._index = index
        self._listings = IndexListings(files, blocks, index)
        self._frequencies: dict[tuple[str, str], tuple[int, float]] = {}

    async def can_search(self, store: VectorStore) -> bool:
        return store.is_indexed and await self._index.is_supported()

    async def update(self, store: VectorStore, owner: str) -> int:
        """Bring the index of a store up to date. Return the number of chunks in it."""
        return (await self._listings.read(store, owner)).statistics.chunks

    async def add_file(self, store: VectorStore, owner: str, file_id: str) -> None:
        """Add the visible chunks of a file to the index of a store, so that the next search need not do this."""
        if await self.can_search(store):
            await self._listings.add_file(store, owner, file_id)

    async def search(
        self, store: VectorStore, owner: str, queries: Sequence[Query], filters: Filter | None, k: int, weights: Weights
    ) -> list[IndexedHit]:
        """Return the best `k` chunks of a store for any of the queries, best first."""
        listing = await self._listings.read(store, owner)
        restriction = _restriction(listing, filters)
        if restriction is None or not listing.statistics.chunks:
            return []
        hits = dict[ChunkName, IndexedHit]()
        for query in queries:
            scorer = await self._scorer(store, query, listing.statistics, weights)
            names, chunks = await self._candidates(store, scorer, restriction, k)
            scores = await by_size(sum(len(chunk.words) for chunk in chunks if chunk is not None), scorer.scores, chunks)
            for name, chunk, score in zip(names, chunks, scores, strict=True):
                file = listing.files.get(name.block)
                if chunk is not None and file is not None:
                    hit = IndexedHit(file, score, chunk.piece, chunk.place)
                    hits[name] = max(hit, hits.get(name, hit), key=lambda one: one.score)
        return sorted(hits.values(), key=lambda hit: -hit.score)[:k]

    async def _candidates(
        self, store: VectorStore, scorer: _Scorer, restriction: Restriction, k: int
    ) -> tuple[list[ChunkName], list[IndexedChunk | None]]:
        """Return the chunks among which are probably the best `k`. A chunk that has just been erased is None."""
        count = max(_CANDIDATES, 2 * k)
        query = ChunkQuery(scorer.vector, scorer.word_query(), count, max(_EFFORT, 2 * count), restriction)
        if query.vector is None and query.words is None:
            return [], []
        names = await self._index.candidates(store.id, store.dimension, query)
        return names, await self._index.read(store.id, names)

    async def _scorer(self, store: VectorStore, query: Query, statistics: Statistics, weights: Weights) -> _Scorer:
        words = Counter(map(token, words_of(query.text)[:MAX_QUERY_WORDS])) if weights.words else Counter[str]()
        return _Scorer(query.vector, words, await self._count(store, list(words)), statistics, weights)

    async def _count(self, store: VectorStore, words: Sequence[str]) -> dict[str, int]:
        """Return the number of chunks that contain each word. The numbers are cached for ten minutes."""
        now = time.monotonic()
        if len(self._frequencies) > _MAX_FREQUENCIES:
            self._frequencies.clear()
        unknown = [word for word in words if self._frequencies.get((store.id, word), (0, 0.0))[1] < now]
        counts = await self._index.frequencies(store.id, store.dimension, unknown) if unknown else []
        end = now + _FREQUENCY_SECONDS
        self._frequencies |= {(store.id, word): (count, end) for word, count in zip(unknown, counts, strict=True)}
        return {word: self._frequencies[store.id, word][0] for word in words}


class _Scorer:
    """Scores chunks as `search.py` does, because the scores of the Redis module depend on its version."""

    def __init__(
        self,
        vector: NDArray[np.float32] | None,
        words: Mapping[str, int],
        found: Mapping[str, int],
        statistics: Statistics,
        weights: Weights,
    ) -> None:
        """`words` maps the words of the query to their counts in it, and `found` maps them to the number of chunks."""
        self.weights = weights if vector is not None else Weights(0.0, weights.words)
        self._vector = vector
        self._found = found
        self._statistics = statistics
        total = statistics.chunks
        self._rarity = {word: times * rarity(max(total, found[word]), found[word]) for word, times in words.items()}
        self._maximum = MAX_TERM * sum(self._rarity.values()) or 1.0
        self._average = _product(statistics.vectors, vector) / total if vector is not None else 0.0

    @property
    def vector(self) -> bytes | None:
        """The vector to search for, if there is a search by vector."""
        return float32(self._vector) if self._vector is not None and self.weights.vectors else None

    def word_query(self) -> WordQuery | None:
        """Return a query for the rarest words, or None if no chunk has one of the words.

        The server scores each chunk that has a required word, so more words are required only while few chunks have them. Words
        that are too frequent to distinguish chunks are left out, unless all are: they take time, and after deletions, version
        2.10 of RediSearch gives them scores that are too high.
        """
        known = sorted((word for word in self._rarity if self._found[word]), key=self._found.__getitem__)
        maximum = max(_CANDIDATES, self._statistics.chunks // _FREQUENT)
        words = [word for word in known if self._found[word] <= maximum][:_MAX_WORDS] or known[:1]
        totals = accumulate(self._found[word] for word in words)
        required = max(1, sum(total <= _MAX_SCORED for total in totals))
        return WordQuery(words[:required], words[required:]) if words else None

    def scores(self, chunks: Sequence[IndexedChunk | None]) -> list[float]:
        return [0.0 if chunk is None else self._score(chunk) for chunk in chunks]

    def _score(self, chunk: IndexedChunk) -> float:
        vectors, words = self.weights.vectors, self.weights.words
        total = vectors + words or 1.0
        score = vectors / total * self._similarity(chunk) if vectors else 0.0
        score += words / total * self._bm25(chunk.words) if words else 0.0
        return min(max(score, 0.0), 1.0)

    def _similarity(self, chunk: IndexedChunk) -> float:
        assert self._vector is not None
        with reading("index of a vector store"):
            similarity = _product(np.frombuffer(chunk.vector, "<f4"), self._vector)
        return relative_similarity(similarity, self._average, self._statistics.chunks)

    def _bm25(self, text: str) -> float:
        words = text.split()
        counts = Counter(word for word in words if word in self._rarity)
        norm = bm25_norm(len(words), max(1.0, self._statistics.words / self._statistics.chunks))
        return sum(self._rarity[word] * MAX_TERM * count / (count + norm) for word, count in counts.items()) / self._maximum


def _product(stored: NDArray[np.floating], vector: NDArray[np.float32]) -> float:
    """Return the dot product of a stored vector and that of a query. Raises Damaged if it is not a number."""
    with reading("index of a vector store"):
        product = float(stored @ vector)
        if not math.isfinite(product):
            raise ValueError("the vector is not finite")
        return product


def _restriction(listing: Listing, filters: Filter | None) -> Restriction | None:
    """Return a restriction to the blocks whose files pass the filter, or None if no file does."""
    if filters is None:
        return Restriction()
    passing = [name for name, file in listing.files.items() if filters(file.attributes)]
    if not passing:
        return None
    if len(passing) <= len(listing.files) // 2:
        return Restriction(passing, excludes=False)
    return Restriction([*(listing.files.keys() - set(passing))])
