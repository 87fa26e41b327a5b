"""Search the chunks of vector stores in the memory of a process, by meaning (vectors) and by words (BM25).

The chunks of several files form a segment, which never changes. A search may therefore run in a thread while others add files.
An index has few segments, because small ones are merged.

Both scores are normalized: similarity relative to that of an average chunk, which depends on the model, and BM25 relative to
its maximum for the query. Their mean finds more relevant chunks than rank fusion does and, unlike a rank, tells how good a
result is. `benchmarks/retrieval.py` has the figures.

Vectors are kept as float32, because numpy multiplies float32 ten times as fast as float16.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .ranking import DEFAULT_WEIGHTS, Weights
from .words import Words, count_words, merge_words, number_of, select_words, words_of

Scores: TypeAlias = NDArray[np.float32]
Chunks: TypeAlias = NDArray[np.int64]
T = TypeVar("T", float, NDArray[np.float32])

MAX_QUERY_WORDS = 256
_K1, _B = 1.2, 0.75
MAX_TERM = _K1 + 1
"""Maximum score of a word with a rarity of 1."""
_FEW_CHUNKS = 10
_GROWTH = 2  # a segment has at least this many times the chunks of the next one
_OVERHEAD = 2048  # bytes of memory of a file with its record, besides its arrays


class Query(NamedTuple):
    """A query: its vector and its text. Without a vector, only words count."""

    vector: NDArray[np.float32] | None
    text: str


class Hit(NamedTuple):
    """A result of a search: index of the store, block, index of the chunk in the block, and a score from 0 to 1."""

    store: int
    block: str
    chunk: int
    score: float


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """The chunks of blocks, in order: vectors of length 1, and words. `ends` are the ends of the blocks."""

    blocks: tuple[str, ...]
    ends: Chunks
    vectors: Scores
    words: Words

    @classmethod
    def of(cls, block: str, vectors: NDArray[np.floating], words: Words) -> Segment:
        """Return the segment of one block. Raises ValueError if a vector is not finite, or not of length 1 (or 0)."""
        vectors = vectors.astype(np.float32)
        norms = np.einsum("ij,ij->i", vectors, vectors)
        if not ((abs(norms - 1) < 0.1) | (norms == 0)).all():
            raise ValueError("a vector is not of length 1 or 0")
        return cls((block,), np.array([len(vectors)]), vectors, words)

    @classmethod
    def of_texts(cls, block: str, texts: Sequence[str], vectors: NDArray[np.floating]) -> Segment:
        return cls.of(block, vectors, count_words(texts))

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def nbytes(self) -> int:
        return self.vectors.nbytes + self.words.nbytes + _OVERHEAD * len(self.blocks)

    def mask(self, wanted: Collection[str]) -> NDArray[np.bool_] | None:
        """Return a mask of the chunks in the wanted blocks, or None if all chunks are."""
        chosen = [block in wanted for block in self.blocks]
        return None if all(chosen) else np.repeat(chosen, np.diff(self.ends, prepend=0))

    def without_others(self, wanted: Collection[str]) -> Segment:
        """Return a segment that contains only the wanted blocks."""
        mask = self.mask(wanted)
        if mask is None:
            return self
        kept = [(block, size) for block, size in zip(self.blocks, self._sizes(), strict=True) if block in wanted]
        ends = np.cumsum([size for _, size in kept], dtype=np.int64)
        return Segment(tuple(block for block, _ in kept), ends, self.vectors[mask], select_words(self.words, mask))

    def _sizes(self) -> list[int]:
        sizes: list[int] = np.diff(self.ends, prepend=0).tolist()
        return sizes

    def at(self, chunk: int) -> tuple[str, int]:
        """Return the block of a chunk, and its index in the block."""
        place = int(np.searchsorted(self.ends, chunk, "right"))
        return self.blocks[place], chunk - (int(self.ends[place - 1]) if place else 0)


@dataclass(frozen=True, eq=False)
class Index:
    """The chunks of a store. An index is immutable: `updated` returns a new one that shares segments with it."""

    segments: tuple[Segment, ...] = ()
    blocks: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", frozenset(block for segment in self.segments for block in segment.blocks))

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def updated(self, wanted: Collection[str], added: Sequence[Segment] = ()) -> Index:
        """Return an index of the `wanted` blocks, after adding the `added` segments."""
        segments = list[Segment]()
        for segment in (*self.segments, *_merged(added)):
            if kept := segment.without_others(wanted):
                segments.append(kept)
        segments.sort(key=len, reverse=True)
        while len(segments) > 1 and len(segments[-2]) < _GROWTH * len(segments[-1]):
            segments += _merged([segments.pop(), segments.pop()])
            segments.sort(key=len, reverse=True)
        return Index(tuple(segments))


def _merged(segments: Sequence[Segment]) -> Sequence[Segment]:
    if len(segments) < 2:
        return segments
    blocks = tuple(block for segment in segments for block in segment.blocks)
    ends = np.cumsum(np.concatenate([np.diff(segment.ends, prepend=0) for segment in segments]))
    vectors = np.concatenate([segment.vectors for segment in segments])
    return [Segment(blocks, ends, vectors, merge_words([segment.words for segment in segments]))]


# -- searches ------------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A segment to search. `mask` selects the chunks that may be found; None selects all. Chunks are numbered from `first`."""

    store: int
    segment: Segment
    mask: NDArray[np.bool_] | None
    first: int


def search(
    indexes: Sequence[tuple[Index, Collection[str]]], queries: Sequence[Query], k: int, weights: Weights = DEFAULT_WEIGHTS
) -> list[Hit]:
    """Return the best `k` chunks, best first. `indexes` pairs each index with the blocks to search in it.

    A chunk gets the score of the query that it matches best. All vectors must have the same dimension.
    """
    parts = list(_parts(indexes))
    if not parts:
        return []
    scores = reduce(np.maximum, (_scores(parts, query, weights) for query in queries))
    return [_hit(parts, chunk, min(max(float(scores[chunk]), 0.0), 1.0)) for chunk in _best(scores, k).tolist()]


def _scores(parts: Sequence[_Part], query: Query, weights: Weights) -> Scores:
    """Return the score of each chunk for a query: the weighted mean of its scores by vector and by words.

    Chunks outside the mask get -inf. A chunk that contains no word of the query can be found only by its vector.
    """
    vectors = weights.vectors if query.vector is not None else 0.0
    total = vectors + weights.words or 1.0
    scores = np.zeros(sum(len(part.segment) for part in parts), np.float32)
    if query.vector is not None and vectors:
        scores += np.float32(vectors / total) * _similarities(parts, query.vector)
    if weights.words:
        scores += np.float32(weights.words / total) * _bm25(parts, words_of(query.text)[:MAX_QUERY_WORDS])
    if not vectors:
        scores[scores <= 0] = -np.inf
    for part in parts:
        if part.mask is not None:
            scores[part.first : part.first + len(part.segment)][~part.mask] = -np.inf
    return scores


def _parts(indexes: Sequence[tuple[Index, Collection[str]]]) -> Iterator[_Part]:
    first = 0
    for number, (index, wanted) in enumerate(indexes):
        for segment in index.segments:
            mask = segment.mask(wanted)
            if mask is None or mask.any():
                yield _Part(number, segment, mask, first)
                first += len(segment)


def _hit(parts: Sequence[_Part], chunk: int, score: float) -> Hit:
    part = next(part for part in reversed(parts) if part.first <= chunk)
    return Hit(part.store, *part.segment.at(chunk - part.first), score)


def _similarities(parts: Sequence[_Part], vector: Scores) -> Scores:
    """Return how much more similar to a vector each chunk is than the average chunk: 0 for not at all, and at most 1."""
    similarities = np.concatenate([part.segment.vectors @ vector for part in parts])
    scale = relative_similarity(np.array([0.0, 1.0], np.float32), float(similarities.mean()), len(similarities))
    similarities *= scale[1] - scale[0]
    similarities += scale[0]
    return similarities


def relative_similarity(similarity: T, average: float, count: int) -> T:
    """Return how much more similar a chunk is than the average of `count` chunks. The maximum is 1."""
    # In a small store, the average depends more on its few chunks than on the model.
    average = min(average * count / (count + _FEW_CHUNKS), 0.99)
    return (similarity - average) / (1 - average)


def rarity(total: int, found: int) -> float:
    """Return the BM25 weight of a word that `found` of `total` chunks contain."""
    return math.log(1 + (total - found + 0.5) / (found + 0.5))


def bm25_norm(length: T, mean: float) -> T:
    """Return the length normalization of BM25: the denominator of a word's term is its count in the chunk plus this."""
    return _K1 * (1 - _B) + _K1 * _B / mean * length


def _bm25(parts: Sequence[_Part], words: Sequence[str]) -> Scores:
    """Return the BM25 score of each chunk, as a fraction of its upper bound.

    The rarity of a word is computed over all chunks, including those outside the mask.
    """
    total = sum(len(part.segment) for part in parts)
    mean = max(1.0, sum(int(part.segment.words.lengths.sum()) for part in parts) / total)
    scores, maximum = np.zeros(total, np.float32), 0.0
    norms = [bm25_norm(part.segment.words.lengths.astype(np.float32), mean) for part in parts]
    for number, times in Counter(map(number_of, words)).items():
        places = [part.segment.words.postings(number) for part in parts]
        found = sum(place.stop - place.start for place in places)
        highest = times * rarity(total, found) * MAX_TERM
        maximum += highest
        for part, place, norm in zip(parts, places, norms, strict=True):
            chunks, counts = part.segment.words.chunks[place], part.segment.words.counts[place].astype(np.float32)
            scores[part.first :][chunks] += np.float32(highest) * counts / (counts + norm[chunks])
    return scores / np.float32(maximum or 1.0)


def _best(scores: Scores, k: int) -> Chunks:
    """Return the indexes of the `k` highest scores, highest first. Equal scores keep their order."""
    if k < len(scores):
        threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
        candidates = np.flatnonzero(scores >= threshold)
    else:
        candidates = np.arange(len(scores))
    best = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
    return best[scores[best] > -np.inf]
