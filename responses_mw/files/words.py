"""Count the words of chunks, for the ranking by words (BM25).

A word is represented by a 32-bit hash. With a million different words, a word of a query collides with another word with a
probability of 1 in 4,000. A collision only ranks a few chunks slightly too high. In return, the words of many files can be
merged without a loop in Python.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.uint32]
Counts: TypeAlias = NDArray[np.uint8]

# Chinese, Japanese and Thai are written without spaces. In these scripts, each pair of adjacent characters is a word.
_UNSPACED = "\u0e01-\u0e4f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"([{_UNSPACED}]+)|[^\W{_UNSPACED}]+")
_MAX_WORD = 64
_MAX_COUNT = 255
_STEP = 2**16
"""Number of words merged at a time. numpy holds the interpreter's lock while it sums or repeats an array."""
_MAX_UINT16 = 2**16
_UINT32 = np.dtype("<u4")


def words_of(text: str) -> list[str]:
    """Split a text into normalized words, as used by the search."""
    words = list[str]()
    for match in _WORD.finditer(text.casefold()):
        if (run := match[1]) is None:
            words.append(match[0][:_MAX_WORD])
        else:
            words += map("".join, pairwise(run)) if len(run) > 1 else [run]
    return words


def number_of(word: str) -> int:
    return crc32(word.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, eq=False, slots=True)
class Words:
    """The words of a list of chunks.

    lengths   number of words of each chunk
    numbers   hashes of the distinct words, in ascending order
    ends      index after the last posting of each word
    chunks    for each posting, the chunk that contains the word; `counts`: how often it does
    """

    lengths: Numbers
    numbers: Numbers
    ends: NDArray[np.int64]
    chunks: Numbers
    counts: Counts

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.lengths, self.numbers, self.ends, self.chunks, self.counts))

    def postings(self, number: int) -> slice:
        """Return the slice of `chunks` and `counts` for the word with this number."""
        place = int(np.searchsorted(self.numbers, np.uint32(number)))
        if place == len(self.numbers) or self.numbers[place] != number:
            return slice(0, 0)
        return slice(int(self.ends[place - 1]) if place else 0, int(self.ends[place]))


def count_words(texts: Sequence[str]) -> Words:
    """Count the words of each text."""
    known = dict[str, int]()
    lengths, numbers, counts, sizes = list[int](), list[int](), list[int](), list[int]()
    for text in texts:
        found = Counter(words_of(text))
        for word in found.keys() - known.keys():
            known[word] = number_of(word)
        lengths.append(found.total())
        sizes.append(len(found))
        numbers += map(known.__getitem__, found)
        counts += found.values()
    chunks = np.repeat(np.arange(len(texts), dtype=np.uint32), sizes)
    return _grouped(
        np.array(lengths, np.uint32),
        np.array(numbers, np.uint32),
        chunks,
        np.minimum(np.array(counts, np.int64), _MAX_COUNT).astype(np.uint8),
    )


def merge_words(parts: Sequence[Words]) -> Words:
    """Concatenate the chunks of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    first, shifted = 0, list[Numbers]()
    for part in parts:
        shifted.append(part.chunks + np.uint32(first))
        first += len(part.lengths)
    lengths, chunks = np.concatenate([part.lengths for part in parts]), np.concatenate(shifted)
    counts, numbers = np.concatenate([part.counts for part in parts]), np.concatenate([part.numbers for part in parts])
    sizes = np.concatenate([np.diff(part.ends, prepend=0) for part in parts])
    # Sort the words, because there are more postings than words. Equal words stay in the order of the parts.
    order = _order(numbers)
    starts = (_cumulated(sizes) - sizes)[order]
    sizes, numbers = sizes[order], numbers[order]
    ends = _cumulated(sizes)
    moved, moved_counts = np.empty_like(chunks), np.empty_like(counts)
    for place in range(0, len(sizes), _STEP):
        some = slice(place, place + _STEP)
        first, last = int(ends[some][0] - sizes[some][0]), int(ends[some][-1])
        gathered = np.repeat(starts[some] - (ends[some] - sizes[some]), sizes[some])
        gathered += np.arange(first, last)
        moved[first:last], moved_counts[first:last] = chunks[gathered], counts[gathered]
    final = np.flatnonzero(np.diff(numbers, append=numbers[-1:] + np.uint32(1)))
    return Words(lengths, numbers[final], ends[final], moved, moved_counts)


def _cumulated(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the cumulative sums."""
    sums, total = np.empty_like(numbers), 0
    for place in range(0, len(numbers), _STEP):
        part = slice(place, place + _STEP)
        np.cumsum(numbers[part], out=sums[part])
        sums[part] += total
        total = int(sums[part][-1])
    return sums


def select_words(words: Words, selected: NDArray[np.bool_]) -> Words:
    """Keep only the selected chunks."""
    kept = selected[words.chunks]
    sizes = np.diff(words.ends, prepend=0)
    numbers = np.repeat(words.numbers, sizes)[kept]
    places = (np.cumsum(selected) - 1).astype(np.uint32)
    ends = np.flatnonzero(np.diff(numbers, append=numbers[-1:] + np.uint32(1))) + 1
    return Words(words.lengths[selected], numbers[ends - 1], ends, places[words.chunks[kept]], words.counts[kept])


def encode_words(words: Words) -> bytes:
    """Encode words for storage. Little-endian arrays, without padding: see `decode_words`."""
    sizes, place = np.diff(words.ends, prepend=0), _place_type(len(words.lengths))
    head = np.array([len(words.numbers), len(words.chunks)])
    numbers = (one.astype(_UINT32).tobytes() for one in (head, words.lengths, words.numbers, sizes))
    return b"".join((*numbers, words.chunks.astype(place).tobytes(), words.counts.tobytes()))


def decode_words(data: bytes, count: int) -> Words:
    """Decode the words of `count` chunks. Raises `ValueError` if the data is damaged."""
    reader = _Reader(data)
    number, total = (int(one) for one in reader.read(_UINT32, 2))
    lengths, numbers, sizes = (reader.read(_UINT32, size) for size in (count, number, number))
    chunks, counts = reader.read(_place_type(count), total), reader.read(np.dtype(np.uint8), total)
    ends = np.cumsum(sizes, dtype=np.int64)
    if reader.left or (ends[-1] if number else 0) != total or (total and int(chunks.max()) >= count):
        raise ValueError("the word counts are inconsistent")
    if number > 1 and not (numbers[1:] > numbers[:-1]).all():
        raise ValueError("the words are not in order")
    return Words(lengths.astype(np.uint32), numbers.astype(np.uint32), ends, chunks.astype(np.uint32), counts)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._place

    def read(self, kind: np.dtype[Any], count: int) -> NDArray[Any]:
        if count * kind.itemsize > self.left:
            raise ValueError("the word counts are truncated")
        begin, self._place = self._place, self._place + count * kind.itemsize
        return np.frombuffer(self._data, kind, count, begin)


def _place_type(count: int) -> np.dtype[Any]:
    return np.dtype("<u2") if count <= _MAX_UINT16 else _UINT32


def _order(numbers: Numbers) -> NDArray[np.int64]:
    """Return the indexes that sort the numbers. Equal numbers keep their order."""
    # Sorting each number packed with its index takes a third of the time of numpy's stable `argsort`.
    keys = numbers.astype(np.uint64) << np.uint64(32) | np.arange(len(numbers), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _grouped(lengths: Numbers, numbers: Numbers, chunks: Numbers, counts: Counts) -> Words:
    """Group postings, which are in the order of the chunks, by word."""
    order = _order(numbers)
    numbers = numbers[order]
    ends = np.flatnonzero(np.diff(numbers, append=numbers[-1:] + np.uint32(1))) + 1
    return Words(lengths, numbers[ends - 1], ends, chunks[order], counts[order])
