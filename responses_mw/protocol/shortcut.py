"""Reading what a server sends over and over, while its model writes, without parsing it each time.

1. Such frames are the same bytes but for one string: the text. What stands before it and after it is learned from a frame
   that was parsed; a frame that begins and ends with just that differs from it in its text alone.
2. The text is taken as it stands. It must be one that JSON writes as it is: no quote and no backslash (they would need to be
   parsed), nothing that JSON does not allow. Anything else takes the long way, and loses nothing.
3. Servers that change more than the text (a time stamp, a counter) cost the learning: who never repeats is given up.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from .types import Chunk

_TEXTS = ("content", "reasoning", "reasoning_content")
_DELTAS = (*_TEXTS, "refusal", "tool_calls")
_TELLING = ("index", "logprobs", "finish_reason", "token_ids")
_FIRST_CREDIT = 8


Text: TypeAlias = tuple[str, str]
"""A chunk that has nothing but a text: what the delta calls it, and the text."""


class Shortcut:
    """The one way of saying "and then this text" that a stream has."""

    __slots__ = ("_credit", "_head", "_member", "_tail")

    def __init__(self) -> None:
        self._head = self._tail = b""
        self._member = ""
        self._credit = _FIRST_CREDIT

    def text(self, read: bytes) -> Text | None:
        """What ``read``, which begins a frame, says if it is one whole frame like the one learned."""
        head, tail = self._head, self._tail
        if not (head and read.startswith(head) and read.endswith(tail)):
            return None
        piece = read[len(head) : -len(tail)]
        if not piece or b"\\" in piece or b'"' in piece:
            return None
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            return None
        if not text.isprintable():
            return None
        self._credit += 1
        return self._member, text

    def learn(self, read: bytes, chunk: Chunk) -> None:
        """Learns from ``read``, which was one whole frame and has been parsed to ``chunk``."""
        member = _only_text(chunk) if self._credit else None
        if member is None:
            return
        self._credit -= 1
        start = _behind(read, b'"%b":' % member.encode())
        end = read.find(b'"', start)
        if start > 0 and read[start:end].decode(errors="replace") == chunk["choices"][0]["delta"][member]:
            self._member, self._head, self._tail = member, read[:start], read[end:]


def _behind(read: bytes, name: bytes) -> int:
    """Where the string begins that is the member ``name``, which must occur once; 0 if that cannot be told."""
    at = read.find(name)
    if at < 0 or read.find(name, at + 1) >= 0:
        return 0
    at += len(name)
    while read[at : at + 1] == b" ":
        at += 1
    return at + 1 if read[at : at + 1] == b'"' else 0


def _only_text(chunk: Chunk) -> str | None:
    """The member of the delta with the text, if that is all that the chunk tells."""
    choices = chunk.get("choices")
    if chunk.get("usage") or not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        return None
    choice: dict[str, Any] = choices[0]
    delta = choice.get("delta")
    if not isinstance(delta, dict) or any(choice.get(name) for name in _TELLING):
        return None
    told = [name for name in _DELTAS if delta.get(name)]
    return told[0] if len(told) == 1 and told[0] in _TEXTS and isinstance(delta[told[0]], str) else None
