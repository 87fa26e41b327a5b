"""Read the chat chunks of an upstream and the tool calls in them, with a fast path for chunks that hold only text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import orjson

from ...errors import UpstreamError
from ..request.checks import malformed
from ..tool_kinds.form import CallForm, parse_arguments
from ..types import Chunk


def choices_of(chunk: Chunk) -> list[dict[str, Any]]:
    """Return the `choices` of a chunk, or an empty list if they are absent or null.

    Raises `UpstreamError` if the choices are not a list of objects.
    """
    choices = chunk.get("choices") or []
    if not isinstance(choices, list):
        malformed("choices")
    for choice in choices:
        if not isinstance(choice, dict):
            malformed("choices")
    return choices


def text_of_parts(parts: list[Any]) -> str:
    """Return the text of content parts. Mistral's own API sends content as a list of parts."""
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def as_chunk(completion: dict[str, Any]) -> Chunk:
    """Convert a whole `chat.completion` to a single chunk, so that streamed and whole answers are processed alike.

    Raises `UpstreamError` if the completion is malformed.
    """
    return {**completion, "choices": [{**choice, "delta": _delta(choice)} for choice in choices_of(completion)]}


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    if not isinstance(message, dict):
        malformed("message")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        malformed("tool_calls")
    return {**message, "tool_calls": [{**call, "index": index} for index, call in enumerate(calls)]}


# -- tool calls --------------------------------------------------------------------------------------------------------
# Calls arrive in fragments:
#
# 1. A fragment identifies its call by `index`, by `id` or not at all. Some servers give every call the index 0 (older Ollama),
#    some repeat the id in every fragment (TGI: always "0"), and some send the id once. `_begins_another` decides whether a
#    fragment with a known index or id begins a new call.
# 2. A name may come once, repeatedly, empty, or after the first arguments. A call without a name cannot be shown yet.
# 3. Arguments are a string, in pieces or whole, or an object.
# 4. A malformed fragment (for example, a name that is not a string) is an upstream error, and the whole delta is ignored.
# 5. The work is linear in the input, no matter how it is split. A turn has at most `MAX_CALLS` calls.
# 6. TGI up to 3.1 never sends a name. Its arguments are `{"function": {"_name": ..., <arguments>}}` and a special token.

MAX_CALLS = 512
"""Maximum number of calls in a turn. A model that makes more is in a loop."""

_MARKS = re.compile(r'["\\{}]')
_WHITE = " \t\r\n"


class ToolCall:
    """A tool call as received so far.

    `form` is the form in which the response shows the call, or None if the response leaves the call out. `form` is valid once
    `is_decided` is true.
    """

    __slots__ = ("_end", "_pieces", "_taken", "form", "id", "is_decided", "name", "place")

    def __init__(self, place: int) -> None:
        self.place = place
        """Position among the calls of the turn."""
        self.id: str | None = None
        self.name = ""
        self.form: CallForm | None = None
        self.is_decided = False
        self._pieces: list[str] = []
        self._taken = 0
        self._end = _ObjectEnd()

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)

    def extend(self, fragment: dict[str, Any]) -> None:
        function = fragment.get("function") or {}
        call_id = fragment.get("id")
        if isinstance(call_id, str):
            self.id = self.id or call_id or None
        self.name = self.name or function.get("name") or ""
        arguments = function.get("arguments")
        if arguments:
            self._pieces.append(arguments if isinstance(arguments, str) else _encoded(arguments))

    def take(self) -> list[str]:
        """Return the pieces of the arguments that have arrived since `take` was last called."""
        fresh = self._pieces[self._taken :]
        self._taken = len(self._pieces)
        return fresh

    def is_whole(self) -> bool:
        """Whether the arguments are a complete JSON object."""
        return self._end.is_reached(self._pieces)

    def find_name(self) -> bool:
        """Extract a missing name from the arguments (rule 6). Return whether a name was found.

        The name is removed from the arguments, which must be complete. Call this at the end of the turn.
        """
        text = self.arguments
        grammar = parse_arguments(text[: text.rfind("}") + 1])
        function = grammar.get("function") if grammar else None
        if isinstance(function, dict) and isinstance(function.get("_name"), str):
            self.name = function.pop("_name")
            self._pieces, self._end, self._taken = [_encoded(function)], _ObjectEnd(), 0
        return bool(self.name)


class _ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces. Each piece is read once.

    The text is parsed when the outermost brace closes. Anything but white space after this brace makes the text invalid.
    """

    __slots__ = ("_depth", "_is_escaped", "_is_object", "_is_quoted", "_read")

    def __init__(self) -> None:
        self._read = self._depth = 0
        self._is_quoted = self._is_escaped = False
        self._is_object: bool | None = None

    def is_reached(self, pieces: list[str]) -> bool:
        for index in range(self._read, len(pieces)):
            rest = pieces[index]
            if self._is_object is None and (end := self._end_in(rest)):
                self._is_object = parse_arguments("".join([*pieces[:index], rest[:end]])) is not None
                rest = rest[end:]
            if self._is_object and rest.strip(_WHITE):
                self._is_object = False
        self._read = len(pieces)
        return self._is_object is True

    def _end_in(self, piece: str) -> int:
        """Return the position after the outermost closing brace in `piece`, or 0 if that brace has not arrived."""
        escaped = 0 if self._is_escaped else -1
        for mark in _MARKS.finditer(piece):
            at = mark.start()
            if at == escaped:
                continue
            if mark[0] == "\\":
                escaped = at + 1
            elif mark[0] == '"':
                self._is_quoted = not self._is_quoted
            elif not self._is_quoted:
                self._depth += 1 if mark[0] == "{" else -1
                if self._depth <= 0:
                    return at + 1
        self._is_escaped = escaped == len(piece)
        return 0


class ToolCalls:
    """The calls of one turn, in the order of their first fragments."""

    __slots__ = ("_by_id", "_by_index", "calls")

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self._by_index: dict[int, ToolCall] = {}
        self._by_id: dict[str, ToolCall] = {}

    def feed(self, fragments: Any) -> list[ToolCall]:
        """Add the fragments in `delta.tool_calls`, which is a list or, from TGI, a single object.

        Return the calls that the fragments began or extended, each call once. Raises `UpstreamError` for a malformed fragment
        and for more than `MAX_CALLS` calls.
        """
        grown: dict[int, ToolCall] = {}
        listed = fragments if isinstance(fragments, list) else [fragments]
        for fragment in listed:
            _check(fragment)
        for fragment in listed:
            call = self._call_of(fragment)
            call.extend(fragment)
            if call.id is not None and self._by_id.get(call.id, call).place <= call.place:
                self._by_id[call.id] = call
            grown[call.place] = call
        return list(grown.values())

    def _call_of(self, fragment: dict[str, Any]) -> ToolCall:
        index = fragment.get("index")
        known = self._find(index, fragment.get("id"))
        if known and not _begins_another(fragment, known):
            return known
        if len(self.calls) >= MAX_CALLS:
            raise UpstreamError(f"The upstream's model made more than {MAX_CALLS} calls in one turn.")
        call = ToolCall(len(self.calls))
        self._by_index[index if isinstance(index, int) else call.place] = call
        self.calls.append(call)
        return call

    def _find(self, index: Any, call_id: Any) -> ToolCall | None:
        """Return the latest call with this index. Without an index, search by id. Without an id, return the last call."""
        if isinstance(index, int):
            return self._by_index.get(index)
        if call_id in (None, ""):
            return self.calls[-1] if self.calls else None
        return self._by_id.get(call_id) if isinstance(call_id, str) else None


def _check(fragment: Any) -> None:
    function = (fragment.get("function") or {}) if isinstance(fragment, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name") or "", str):
        malformed("tool_calls")


def _begins_another(fragment: dict[str, Any], known: ToolCall) -> bool:
    """Whether a fragment that matches `known` begins a new call. Both must have a name.

    If both have an id, a different id begins a new call. Otherwise, one of these does: a different name, arguments that are
    an object, or any arguments once those of `known` are complete.
    """
    function, call_id = fragment.get("function") or {}, fragment.get("id")
    if not (function.get("name") and known.name):
        return False
    if call_id and known.id:
        return bool(call_id != known.id)
    arguments = function.get("arguments")
    return function["name"] != known.name or isinstance(arguments, dict) or (bool(arguments) and known.is_whole())


def _encoded(arguments: Any) -> str:
    try:
        return orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError:  # nested deeper than the encoder allows
        malformed("arguments")


# -- halves of characters ----------------------------------------------------------------------------------------------


class SurrogateHalves:
    """Joins surrogate halves, if a server sent the two halves of a character in two chunks.

    A server that splits text between UTF-16 code units writes an emoji as `"\\ud83d"` and `"\\ude00"`, which strict decoders
    refuse. A half without its other half becomes U+FFFD.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], str] = {}

    @property
    def is_holding(self) -> bool:
        """Whether a first half is held back until the next chunk."""
        return bool(self._held)

    def decode(self, data: bytes) -> Any:
        """Decode JSON in which a strict decoder found an error. Join the surrogate halves in its texts (see `join`).

        Raises `ValueError` if the JSON has no surrogate halves or another error.
        """
        if b"\\ud" not in data.lower():
            raise ValueError("invalid JSON")
        try:
            # `orjson` decodes the result again, because `json` accepts numbers that `orjson` cannot encode later.
            return orjson.loads(json.dumps(_whole_characters(self.join(json.loads(data)))))
        except RecursionError:
            raise ValueError("nested too deeply") from None

    def join(self, chunk: Any) -> Any:
        """Join surrogate pairs in the texts of a decoded chunk or event. Change the chunk in place and return it.

        A high surrogate at the end of a text is held back and prepended to the next delta of that text. Other unpaired
        surrogates become U+FFFD.
        """
        for place, holder, member in _growing_texts(chunk):
            text = self._held.pop(place, "") + holder[member]
            if text and "\ud800" <= text[-1] < "\udc00":
                self._held[place], text = text[-1], text[:-1]
            holder[member] = _whole_characters(text)
        return chunk


def _growing_texts(chunk: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], str]]:
    """Yield the texts of a chunk or event that a later chunk or event may continue.

    Each text is given as a key that identifies it in the stream, the object that holds it, and the name of the member.
    """
    if not isinstance(chunk, dict):
        return
    if isinstance(chunk.get("delta"), str):
        yield (str(chunk.get("type")), str(chunk.get("item_id"))), chunk, "delta"
    choices = chunk.get("choices")
    deltas = [one.get("delta") for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
    for delta in (one for one in deltas if isinstance(one, dict)):
        yield from ((("text", name), delta, name) for name in (*_TEXTS, "refusal") if isinstance(delta.get(name), str))
        given = delta.get("tool_calls")
        calls: list[Any] = given if isinstance(given, list) else [given]
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield ("call", str(call.get("index"))), function, "arguments"


def _whole_characters(value: Any) -> Any:
    """Join pairs of surrogate halves in all strings of `value`, and replace unpaired halves with U+FFFD."""
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


Text: TypeAlias = tuple[str, str]
"""A chunk that holds only text: the name of the delta's member, and the text."""


class DeltaFastPath:
    """Extracts the text of frames that hold only text, without parsing. The form of the frames is learned from the stream."""

    __slots__ = ("_credit", "_in_frame", "_in_read", "_member")

    def __init__(self) -> None:
        self._in_frame = self._in_read = (b"", b"")
        self._member = ""
        self._credit = _FIRST_CREDIT

    def text(self, data: bytes, *, is_read: bool = False) -> Text | None:
        """Return the text in the `data` of a frame, or None if the frame does not have the learned form.

        With `is_read`, `data` is a network read that begins a frame. The result is None unless the read is exactly one frame.
        """
        head, tail = self._in_read if is_read else self._in_frame
        if not (head and data.startswith(head) and data.endswith(tail)):
            return None
        piece = data[len(head) : -len(tail)]
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

    def learn(self, data: bytes, chunk: Chunk) -> None:
        """Learn the form of a frame from its `data` and the `chunk` parsed from it."""
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
    """Return the position of the string that follows `name` (`"content":`) in `data`.

    Return 0 if `name` does not occur exactly once, or if its value is not a string.
    """
    at = data.find(name)
    if at < 0 or data.find(name, at + 1) >= 0:
        return 0
    at += len(name)
    while data[at : at + 1] == b" ":
        at += 1
    return at + 1 if data[at : at + 1] == b'"' else 0


def _only_text(chunk: Chunk) -> str | None:
    """Return the name of the delta's member with the text, or None if the chunk holds anything but one text."""
    choices = chunk.get("choices")
    if chunk.get("usage") or not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        return None
    choice: dict[str, Any] = choices[0]
    delta = choice.get("delta")
    if not isinstance(delta, dict) or any(choice.get(name) for name in _OTHER_MEMBERS):
        return None
    given = [name for name in _DELTAS if delta.get(name)]
    return given[0] if len(given) == 1 and given[0] in _TEXTS and isinstance(delta[given[0]], str) else None
