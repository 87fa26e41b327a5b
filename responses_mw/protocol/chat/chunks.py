"""Read the chat chunks of an upstream, with a fast path for chunks that hold only text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import orjson

from ..request.checks import malformed
from ..types import Chunk


def choices_of(chunk: Chunk) -> list[dict[str, Any]]:
    """Return the `choices` of a chunk, or `[]` if it has none. Raises `UpstreamError` if `choices` is not a list of objects."""
    choices = chunk.get("choices") or []
    if not isinstance(choices, list):
        malformed("choices")
    for choice in choices:
        if not isinstance(choice, dict):
            malformed("choices")
    return choices


def text_of_parts(parts: list[Any]) -> str:
    """Join the texts of content parts, which Mistral's own API sends instead of a string. Skip malformed parts."""
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def as_chunk(completion: dict[str, Any]) -> Chunk:
    """Convert a `chat.completion` to a single chunk. Raises `UpstreamError` if its choices, message or calls are malformed."""
    return {**completion, "choices": [{**choice, "delta": _delta(choice)} for choice in choices_of(completion)]}


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    if not isinstance(message, dict):
        malformed("message")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        malformed("tool_calls")
    return {**message, "tool_calls": [{**call, "index": index} for index, call in enumerate(calls)]}


# -- halves of characters ----------------------------------------------------------------------------------------------

_MAX_HELD = 16  # maximum number of chunks that are held back


class SurrogateHalves:
    """Joins the halves of surrogate pairs. A server may split a character between two chunks (`"\\ud83d"`, `"\\ude00"`).

    `orjson` refuses such chunks. A chunk whose text ends with a first half is held back, together with later chunks without
    text, until more text arrives. At most `_MAX_HELD` chunks are held back. A lone half becomes U+FFFD.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []  # a chunk whose text ends with a first half, and later chunks without text
        self._has_halves = False  # whether the last decoded chunk may have halves

    @property
    def is_holding(self) -> bool:
        """Whether a chunk is held back."""
        return bool(self._held)

    def decode(self, data: bytes) -> Any:
        """Decode JSON that `orjson` refuses because of surrogate halves. The result must be passed to `join`.

        Raises `ValueError` if the data contains no escaped surrogates, or is invalid for another reason.
        """
        if b"\\ud" not in data.lower():
            raise ValueError("invalid JSON")
        try:
            decoded = json.loads(data)
            # `orjson` decodes the result again, because `json` accepts numbers that `orjson` cannot encode later.
            chunk = orjson.loads(json.dumps(_whole_characters(decoded)))
        except RecursionError:
            raise ValueError("nested too deeply") from None
        for (_, holder, member), (_, original, _) in zip(_growing_texts(chunk), _growing_texts(decoded), strict=True):
            holder[member] = original[member]
        self._has_halves = True
        return chunk

    def join(self, chunk: Any) -> list[Any]:
        """Join halves that are held back with the texts of `chunk`. Return the chunks that are ready, in order."""
        if not (self._held or self._has_halves):
            return [chunk]
        self._has_halves = False
        texts = [(place, holder, member) for place, holder, member in _growing_texts(chunk) if holder[member]]
        if not texts and 0 < len(self._held) < _MAX_HELD:
            self._held.append(chunk)
            return []
        if self._held:
            _move_halves(self._held[0], texts)
        chunks = self.flush()
        if any(_ends_with_half(holder[member]) for _, holder, member in texts):
            self._held.append(chunk)
            return chunks
        return [*chunks, _replaced(chunk)]

    def flush(self) -> list[Any]:
        """Return the chunks that are held back, with lone halves replaced. Call this at the end of the answer."""
        held, self._held = self._held, []
        return [_replaced(chunk) for chunk in held]


def _move_halves(chunk: Any, texts: list[tuple[tuple[Any, ...], dict[str, Any], str]]) -> None:
    """Move a first half from the end of a text in `chunk` to the continuation of this text in `texts`."""
    following = {place: holder for place, holder, _ in texts}
    for place, holder, member in _growing_texts(chunk):
        if place in following and _ends_with_half(holder[member]):
            following[place][member] = holder[member][-1] + following[place][member]
            holder[member] = holder[member][:-1]


def _ends_with_half(text: str) -> bool:
    return "\ud800" <= text[-1:] < "\udc00"


def _replaced(chunk: Any) -> Any:
    """Replace each lone half in the texts of `chunk` with U+FFFD, in place. Return `chunk`."""
    for _, holder, member in _growing_texts(chunk):
        holder[member] = _whole_characters(holder[member])
    return chunk


def _growing_texts(chunk: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], str]]:
    """Yield the key, object and member name of each text that a later chunk or event may continue under the same key."""
    if not isinstance(chunk, dict):
        return
    if isinstance(chunk.get("delta"), str):
        yield (str(chunk.get("type")), str(chunk.get("item_id"))), chunk, "delta"
    choices = chunk.get("choices")
    deltas = [one.get("delta") for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
    for delta in (one for one in deltas if isinstance(one, dict)):
        yield from ((("text", name), delta, name) for name in (*_TEXTS, "refusal") if isinstance(delta.get(name), str))
        given: Any = delta.get("tool_calls")
        for call in given if isinstance(given, list) else [given]:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield ("call", str(call.get("index"))), function, "arguments"


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_characters(one) for one in value]
    if isinstance(value, dict):
        return {_whole_characters(name): _whole_characters(member) for name, member in value.items()}
    return value


# -- text only ---------------------------------------------------------------------------------------------------------
# While a model writes, a server sends frames that differ in only one string. `DeltaFastPath` reads these frames without
# parsing them:
#
# 1. The bytes before and after the text are learned from a parsed frame. A frame with the same beginning and end differs only
#    in its text.
# 2. The text must not need escapes in JSON: no quotes, no backslashes, only printable characters. Any other frame is parsed
#    as usual.
# 3. If a server varies more than the text (a timestamp, a counter), learning is useless and stops after a few failures.

_TEXTS = ("content", "reasoning", "reasoning_content")
_DELTAS = (*_TEXTS, "refusal", "tool_calls")
_OTHER_MEMBERS = ("index", "logprobs", "finish_reason", "token_ids")
_FIRST_CREDIT = 8


Text: TypeAlias = tuple[str, str]  # a chunk that holds only text: the name of the delta's member, and the text


class DeltaFastPath:
    """Extracts the text of frames that hold only text, without parsing them."""

    __slots__ = ("_credit", "_in_frame", "_in_read", "_member")

    def __init__(self) -> None:
        self._in_frame = self._in_read = (b"", b"")
        self._member = ""
        self._credit = _FIRST_CREDIT

    def text(self, data: bytes, *, is_read: bool = False) -> Text | None:
        """Return the `Text` of a frame that has the learned form, or None. With `is_read`, `data` includes the SSE framing."""
        head, tail = self._in_read if is_read else self._in_frame
        if not (head and data.startswith(head) and data.endswith(tail)):
            return None
        piece = data[len(head) : -len(tail)]
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            return None
        # `in` is cheap for strings. For bytes, it first raises and catches a TypeError (CPython).
        if not text or "\\" in text or '"' in text or not text.isprintable():
            return None
        self._credit += 1
        return self._member, text

    def learn(self, data: bytes, chunk: Chunk) -> None:
        """Learn the form of the frame `data`, whose parsed JSON is `chunk`. Do nothing if the frame holds more than text.

        Each attempt costs a credit, and each frame that `text` recognizes earns one. Without credit, nothing more is learned.
        """
        member = _only_text(chunk) if self._credit else None
        if member is None:
            return
        self._credit -= 1
        start = _value_start(data, b'"%b":' % member.encode())
        end = data.find(b'"', start)
        if start > 0 and data[start:end].decode(errors="replace") == chunk["choices"][0]["delta"][member]:
            head, tail = data[:start], data[end:]
            self._member, self._in_frame, self._in_read = member, (head, tail), (b"data: " + head, tail + b"\n\n")


def _value_start(data: bytes, name: bytes) -> int:
    """Return the position of the string after `name` in `data`, or 0 if there is no string or if `name` occurs twice."""
    at = data.find(name)
    if at < 0 or data.find(name, at + 1) >= 0:
        return 0
    at += len(name)
    while data[at : at + 1] == b" ":
        at += 1
    return at + 1 if data[at : at + 1] == b'"' else 0


def _only_text(chunk: Chunk) -> str | None:
    """Return the name of the delta's member that holds text, or None if the chunk holds anything else."""
    choices = chunk.get("choices")
    if chunk.get("usage") or not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        return None
    choice: dict[str, Any] = choices[0]
    delta = choice.get("delta")
    if not isinstance(delta, dict) or any(choice.get(name) for name in _OTHER_MEMBERS):
        return None
    given = [name for name in _DELTAS if delta.get(name)]
    return given[0] if len(given) == 1 and given[0] in _TEXTS and isinstance(delta[given[0]], str) else None
