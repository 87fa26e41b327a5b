"""The outer shape of chat chunks, and of whole completions brought into it.

Reading what a server sends over and over, while its model writes, without parsing it each time.

1. Such frames are the same bytes but for one string: the text. What stands before it and after it is learned from a frame
   that was parsed; a frame that begins and ends with just that differs from it in its text alone.
2. The text is taken as it stands. It must be one that JSON writes as it is: no quote and no backslash (they would need to be
   parsed), nothing that JSON does not allow. Anything else takes the long way, and loses nothing.
3. Servers that change more than the text (a time stamp, a counter) cost the learning: who never repeats is given up.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from ..request.checks import malformed
from ..types import Chunk


def choices_of(chunk: Chunk) -> list[dict[str, Any]]:
    """The ``choices``, which may be absent or null. Raises ``UpstreamError`` where they are no list of objects."""
    choices = chunk.get("choices") or []
    if not isinstance(choices, list):
        malformed("choices")
    for choice in choices:
        if not isinstance(choice, dict):
            malformed("choices")
    return choices


def text_of_parts(parts: list[Any]) -> str:
    """The text of a content that is a list of parts (Mistral's own API)."""
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def as_chunk(completion: dict[str, Any]) -> Chunk:
    """A whole ``chat.completion`` as the one chunk of a stream, so that there is one path for both."""
    return {**completion, "choices": [{**choice, "delta": _delta(choice)} for choice in choices_of(completion)]}


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    if not isinstance(message, dict):
        malformed("message")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        malformed("tool_calls")
    return {**message, "tool_calls": [{**call, "index": index} for index, call in enumerate(calls)]}


_TEXTS = ("content", "reasoning", "reasoning_content")
_DELTAS = (*_TEXTS, "refusal", "tool_calls")
_TELLING = ("index", "logprobs", "finish_reason", "token_ids")
_FIRST_CREDIT = 8


Text: TypeAlias = tuple[str, str]
"""A chunk that has nothing but a text: what the delta calls it, and the text."""


class DeltaFastPath:
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
