"""Reasoning that a model writes into its text, ``<think>...</think>``: told apart as it streams.

Some servers have no parser for it (TGI, vLLM without ``--reasoning-parser``). The tag may be cut over any number of chunks, so
what could still become a tag is held back until it is known.
"""

from __future__ import annotations


class ThinkingSplitter:
    """Text in, as it comes; pieces of reasoning and of answer out."""

    __slots__ = ("_held", "_tags", "_thinking")

    def __init__(self, tag: str) -> None:
        self._tags = (f"<{tag}>", f"</{tag}>")
        self._thinking = False
        self._held = ""

    def feed(self, text: str) -> list[tuple[bool, str]]:
        """Pairs of (is it reasoning, piece), without the tags."""
        pieces: list[tuple[bool, str]] = []
        whole, begin = self._held + text, 0
        while (end := whole.find(tag := self._tags[self._thinking], begin)) >= 0:
            self._add(pieces, whole[begin:end])
            self._thinking = not self._thinking
            begin = end + len(tag)
        rest = whole[begin:]
        kept = _overlap(rest, tag)
        self._held = rest[len(rest) - kept :]
        self._add(pieces, rest[: len(rest) - kept])
        return pieces

    def flush(self) -> list[tuple[bool, str]]:
        """What was held back and became no tag."""
        pieces: list[tuple[bool, str]] = []
        self._add(pieces, self._held)
        self._held = ""
        return pieces

    def _add(self, pieces: list[tuple[bool, str]], piece: str) -> None:
        if piece:
            pieces.append((self._thinking, piece))


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` are a beginning of ``tag``."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
