"""The prompts of the demo models, and their tokens. A token is a word with the white space before it.

The chat template writes the text of each message on lines of its own. Roles, tools and calls are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_TOKEN = re.compile(r"\s*\S+|\s+\Z")
_MAX_WORDS = 100_000  # maximum number of words in the vocabulary


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def prompt_of(messages: Iterable[dict[str, Any]]) -> str:
    return "\n".join(filter(None, map(text_of, messages)))


def tokens_of(text: str) -> list[str]:
    return _TOKEN.findall(text)


class Vocabulary:
    """Assigns numbers to tokens. It is emptied when it is full, and the earlier numbers are then invalid."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._tokens: dict[int, str] = {}
        self._next = 0

    def numbers(self, tokens: Sequence[str]) -> list[int]:
        if len(self._numbers) + len(tokens) > _MAX_WORDS:
            self._numbers.clear()
            self._tokens.clear()
        return [self._number(token) for token in tokens]

    def text(self, numbers: Iterable[int]) -> str:
        """Return the text of tokens. Raises `KeyError` if a number is unknown."""
        return "".join(self._tokens[number] for number in numbers)

    def _number(self, token: str) -> int:
        if token not in self._numbers:
            self._numbers[token], self._tokens[self._next] = self._next, token
            self._next += 1
        return self._numbers[token]
