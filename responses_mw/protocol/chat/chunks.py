"""Read the chat chunks of an upstream, with a fast path for chunks that hold only text."""

from __future__ import annotations

import re
from typing import Any, NoReturn, TypeAlias

from ...errors import UpstreamError
from ..types import Chunk
from .deltas import READ


def malformed(member: str) -> NoReturn:
    """Raise `UpstreamError` because `member` of the upstream's answer has an invalid type."""
    raise UpstreamError(f"The upstream sent a malformed answer: its '{member}' is of the wrong type.")


def choices_of(chunk: Chunk) -> list[dict[str, Any]]:
    """Return the `choices` of a chunk, or `[]` if it has none. Raises `UpstreamError` if `choices` is not a list of objects."""
    choices = chunk.get("choices") or []
    if not isinstance(choices, list):
        malformed("choices")
    for choice in choices:
        if not isinstance(choice, dict):
            malformed("choices")
    return choices


def as_chunk(completion: dict[str, Any]) -> Chunk:
    """Convert a `chat.completion` to a single chunk. Raises `UpstreamError` if its choices, message or calls are malformed."""
    choices = choices_of(completion)
    whole = ({**choice, "delta": whole_delta(choice)} if choice.get("message") else choice for choice in choices)
    return {**completion, "choices": list(whole)}


def delta_of(choice: dict[str, Any], *, is_first: bool) -> Any:
    """Return the delta of a choice, or None. `is_first` is whether the answer has had no output yet.

    A gateway may send a whole message as the only chunk of a stream, or the text of the older Completions API.
    """
    if choice.get("delta"):
        return choice["delta"]
    if is_first and isinstance(choice.get("message"), dict):
        return whole_delta(choice)
    return {"content": choice["text"]} if choice.get("text") else None


def whole_delta(choice: dict[str, Any]) -> dict[str, Any]:
    """Convert the `message` of a choice to a single delta. Raises `UpstreamError` if the message or its calls are malformed."""
    message = choice.get("message") or {}
    if not isinstance(message, dict):
        malformed("message")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        malformed("tool_calls")
    return {**message, "tool_calls": [{**call, "index": index} for index, call in enumerate(calls)]}


# -- halves of characters ----------------------------------------------------------------------------------------------

_PAIR = rb"ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}"
_WHOLE = re.compile(rb"(?>(?:[^\\]++|\\(?:%b|(?!ud[89a-f]).))*)" % _PAIR, re.DOTALL | re.IGNORECASE)  # JSON without halves
_ESCAPE = re.compile(rb"\\(?:%b|(?P<half>ud[89a-f][0-9a-f]{2})|.)" % _PAIR, re.DOTALL | re.IGNORECASE)
_HALF_AT_END = re.compile(rb'(?<!\\)((?:\\\\)*)(\\ud[89ab][0-9a-f]{2})(?=")', re.IGNORECASE)  # a first half that ends a string
_HALF_AT_BEGIN = re.compile(rb'(?<=[^\\]")\\ud[c-f][0-9a-f]{2}', re.IGNORECASE)  # a second half that begins a string
_SOME_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|refusal|arguments|delta)": ?"[^"]')
# The whole response, an error, or the end of the stream, which must not wait for another frame.
_END = re.compile(rb'"(?:response|error)": ?\{|"(?:object|type)": ?"error"|^\s*"?\[DONE\]')
_MAX_HELD = 16  # maximum number of frames that are held back


class SurrogateHalves:
    """Joins the halves of surrogate pairs. A server may split a character between two frames (`"\\ud83d"`, `"\\ude00"`).

    `orjson` refuses such frames. A frame with a string that ends with a first half is held back until the next frame with text,
    together with frames in between. If a string in the next frame begins with a second half, the first half is moved there. A
    lone half becomes U+FFFD.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []

    @property
    def is_holding(self) -> bool:
        """Whether a frame is held back."""
        return bool(self._held)

    def feed(self, frame: bytes) -> list[bytes]:
        """Return the frames that are ready, in order. Their JSON has no halves."""
        if not self._held and ((frame.find(b"\\ud") < 0 and frame.find(b"\\uD") < 0) or _WHOLE.fullmatch(frame)):
            return [frame]  # nearly every frame
        if 0 < len(self._held) < _MAX_HELD and not (_SOME_TEXT.search(frame) or _END.search(frame)):
            self._held.append(frame)
            return []
        frame = self._join(frame)
        ready = self.flush()
        if _HALF_AT_END.search(frame) and not _END.search(frame):
            self._held = [frame]
            return ready
        return [*ready, _without_halves(frame)]

    def _join(self, frame: bytes) -> bytes:
        """Move the first half of a character from the frame that is held back to `frame`, if it has the second half."""
        if self._held and (half := _HALF_AT_END.search(self._held[0])):
            frame, joined = _HALF_AT_BEGIN.subn(lambda second: half[2] + second[0], frame)
            if joined:
                self._held[0] = _HALF_AT_END.sub(rb"\1", self._held[0])
        return frame

    def flush(self) -> list[bytes]:
        """Return the frames that are held back. Call this at the end of the answer."""
        held, self._held = self._held, []
        return [_without_halves(frame) for frame in held]


def _without_halves(frame: bytes) -> bytes:
    return _ESCAPE.sub(lambda escape: b"\\ufffd" if escape["half"] else escape[0], frame)


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
_DELTAS = tuple(READ - {"role"})
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
