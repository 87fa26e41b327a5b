"""Cache recently read texts in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

ENTRY = 512
"""Overhead of an entry in bytes."""


class TextCache:
    """Texts by key. Each counts as its length plus `ENTRY`, and their total is at most `maximum` characters.

    The least recently used texts are removed first.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._size = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts.values())

    def get(self, key: bytes) -> str | None:
        if key in self._texts:
            self._texts.move_to_end(key)
        return self._texts.get(key)

    def put(self, key: bytes, text: str) -> None:
        """Add a text, or replace the one with the same key."""
        if (known := self._texts.pop(key, None)) is not None:
            self._size -= len(known) + ENTRY
        self._texts[key] = text
        self._size += len(text) + ENTRY
        while self._size > self._maximum:
            _, oldest = self._texts.popitem(last=False)
            self._size -= len(oldest) + ENTRY
