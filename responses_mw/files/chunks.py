"""Split the text of a document into overlapping chunks.

A chunk has a maximum number of tokens. It ends with a paragraph, a line or a sentence if one ends in its last quarter. Each
chunk repeats the end of the previous one, so a passage that is cut in one chunk is usually whole in the next. The tokens of
each word are counted once, so the time is linear in the length of the text: 1.6 s for a manual of 200 pages (630 kB). The
library semantic-text-splitter takes three times as long, because it counts the tokens of many candidates, and its chunks
overlap less.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_TOKENS, DEFAULT_OVERLAP = 800, 400
MIN_TOKENS, MAX_TOKENS = 100, 4096
_WORD = re.compile(r"\S{1,64}")
_GAP = 64  # this many characters of white space count as a token, which limits the length of chunks with few words
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n")
_SENTENCE_END = re.compile(r"[.!?:;][\"')\]]*\Z")
_AFTER_END = 4  # a chunk may end early if that costs at most a quarter of its tokens


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a document is split. `tokens` is the maximum size of a chunk, `overlap` the maximum that two adjacent ones share."""

    tokens: int = DEFAULT_TOKENS
    overlap: int = DEFAULT_OVERLAP

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= self.tokens // 2:
            raise ValueError("the overlap must be between 0 and half of the tokens")


class Chunk(NamedTuple):
    """A part of a document's text. `start` is its offset in characters."""

    start: int
    text: str


def split(text: str, count: Callable[[str], int], chunking: Chunking = Chunking()) -> Iterator[Chunk]:
    """Yield the chunks of `text`, in order. `count` returns the number of tokens in a word, at least 1."""
    words, begin = _Words(text, count), 0
    while words.read(begin, chunking.tokens):
        tokens, weights = words.tokens, words.weights
        full = max(begin + 1, bisect_right(tokens, tokens[begin] + chunking.tokens) - 1)
        early = bisect_left(tokens, tokens[begin] + chunking.tokens * (_AFTER_END - 1) // _AFTER_END)
        end = full if full == len(words.starts) else _best(weights, max(begin + 1, min(early, full)), full)
        start = words.starts[begin]
        yield Chunk(start, text[start : words.ends[end - 1]])
        if end == len(words.starts):
            break
        repeated = bisect_left(tokens, tokens[end] - chunking.overlap)
        late = bisect_left(tokens, tokens[end] - chunking.overlap * (_AFTER_END - 1) // _AFTER_END)
        begin = max(begin + 1, _best(weights, min(repeated, end), min(late, end)))


def _best(weights: bytearray, first: int, last: int) -> int:
    """Return the index from `first` to `last` with the highest weight. If several have it, return the last one."""
    return max(range(first, last + 1), key=lambda at: (weights[at], at))


class _Words:
    """The words of a text, read lazily.

    starts    offset of each word in the text; `ends`: the offset after it
    tokens    number of tokens before each word, followed by the total
    weights   how good a cut before each word is: 3 after a paragraph, 2 after a line, 1 after a sentence, else 0; 3 for the end

    These are arrays, because the garbage collector would scan a million tuples, and stop all threads meanwhile.
    """

    def __init__(self, text: str, count: Callable[[str], int]) -> None:
        self.starts, self.ends, self.tokens = array("q"), array("q"), array("q", [0])
        self.weights = bytearray()
        self._text = text
        self._count = count
        self._matches = _WORD.finditer(text)
        self._is_complete = False

    def read(self, begin: int, tokens: int) -> bool:
        """Read words until more than `tokens` tokens follow the word `begin`. Return whether this word exists."""
        while not self._is_complete and (len(self.starts) <= begin + 1 or self.tokens[-1] - self.tokens[begin] <= tokens):
            if match := next(self._matches, None):
                gap = match.start() - self.ends[-1] if self.ends else 0
                self.weights.append(self._weight(match.start()))
                self.starts.append(match.start())
                self.ends.append(match.end())
                self.tokens.append(self.tokens[-1] + self._count(match[0]) + gap // _GAP)
            else:
                self.weights.append(3)
                self._is_complete = True
        return begin < len(self.starts)

    def _weight(self, start: int) -> int:
        """Return the weight of the word that begins at `start`, the first one that is not in the arrays yet."""
        if not self.starts:
            return 0
        begin, end = self.starts[-1], self.ends[-1]
        gap = self._text[end:start]
        if "\n" in gap:
            return 3 if _PARAGRAPH.search(gap) else 2
        return 1 if gap and _SENTENCE_END.search(self._text, begin, end) else 0
