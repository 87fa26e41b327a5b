"""Split texts into the tokens of a vocabulary, as Llama 2's tokenizer does.

1. Each word begins with the mark "▁", which stands for the space before it. White space is reduced to one space.
2. A word starts as a list of characters. The two neighbours that together form the token with the lowest id are joined until no
   two of them form a token. In this vocabulary, a token's id is the priority of its merge.
3. A character that is not in the vocabulary is replaced with the tokens of its UTF-8 bytes.

In a token, no mark follows another character. Words can therefore be split separately, and the results are cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

MARK = "▁"
MAX_WORD = 32
"""Maximum length in characters of a piece that is split as a whole. The time to split a piece grows with its square."""
_CACHED_WORDS = 16 * 1024


class Tokenizer:
    """A tokenizer with the given vocabulary, whose entries are in the order of their ids. The bytes begin at `first_byte`."""

    def __init__(self, vocabulary: Sequence[str], first_byte: int) -> None:
        self._ids = {token: index for index, token in enumerate(vocabulary)}
        self._first_byte = first_byte
        self._word = lru_cache(_CACHED_WORDS)(self._split)

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens of `text`, without special tokens."""
        return [token for word in text.split() for piece in _pieces(MARK + word) for token in self._word(piece)]

    def _split(self, word: str) -> tuple[int, ...]:
        ids, parts = self._ids, list(word)
        while True:
            merges = [(ids[pair], at) for at in range(len(parts) - 1) if (pair := parts[at] + parts[at + 1]) in ids]
            if not merges:
                return tuple(token for part in parts for token in self._tokens(part))
            _, at = min(merges)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    def _tokens(self, part: str) -> list[int]:
        token = self._ids.get(part)
        if token is not None:
            return [token]
        return [self._first_byte + byte for byte in part.encode("utf-8", "replace")]


def _pieces(word: str) -> list[str]:
    if len(word) <= MAX_WORD:
        return [word]
    return [word[start : start + MAX_WORD] for start in range(0, len(word), MAX_WORD)]
