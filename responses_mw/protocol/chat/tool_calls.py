"""Collect the tool calls in chat chunks. Servers split calls into fragments in different ways.

1. A fragment identifies its call by `index`, by `id` or not at all. Older Ollama gives every call the index 0. TGI repeats the
   id in every fragment, and the id is always "0". Other servers send the id once. `_begins_another` decides whether a fragment
   that seems to belong to a known call begins a new call.
2. A name may come once, repeatedly, empty, or after the first arguments. A call is not shown before its name is known.
3. Arguments are a string, in pieces or whole, or an object.
4. A malformed fragment (for example, a name that is not a string) is an upstream error.
5. The work is linear in the input, no matter how it is split. A turn has at most `MAX_CALLS` calls.
6. TGI up to 3.1 sends the name in the arguments: `{"function": {"_name": ..., <arguments>}}`, followed by a special token.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from ...errors import UpstreamError
from ..request.checks import malformed
from ..tool_kinds.form import CallForm, parse_arguments

MAX_CALLS = 512  # maximum number of calls in a turn. A model that makes more is in a loop

_MARKS = re.compile(r'["{}]|\\.?', re.DOTALL)
_WHITE = " \t\r\n"


class ToolCall:
    """A tool call as received so far.

    `form` describes how the call appears in the response. It is None until `is_decided` is true, or if the call is left out.
    """

    __slots__ = ("_end", "_pieces", "_taken", "form", "id", "is_decided", "name", "place")

    def __init__(self, place: int) -> None:
        self.place = place  # position among the calls of the turn
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
        """Return whether the arguments are a complete JSON object."""
        return self._end.is_reached(self._pieces)

    def find_name(self) -> bool:
        """Move a missing name out of the complete arguments (rule 6). Return whether the call has a name."""
        text = self.arguments
        grammar = parse_arguments(text[: text.rfind("}") + 1])
        function = grammar.get("function") if grammar else None
        if isinstance(function, dict) and isinstance(function.get("_name"), str):
            self.name = function.pop("_name")
            self._pieces, self._end, self._taken = [_encoded(function)], _ObjectEnd(), 0
        return bool(self.name)


class _ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces. Each piece is read once.

    The text is parsed when the outermost brace closes. After this brace, only white space is valid.
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
        """Return the position after the outermost closing brace in `piece`, or 0 if there is none."""
        begin, self._is_escaped = int(self._is_escaped), False
        for mark in _MARKS.finditer(piece, begin):
            if mark[0].startswith("\\"):
                self._is_escaped = mark[0] == "\\"  # the escaped character is in the next piece
            elif mark[0] == '"':
                self._is_quoted = not self._is_quoted
            elif not self._is_quoted:
                self._depth += 1 if mark[0] == "{" else -1
                if self._depth <= 0:
                    return mark.end()
        return 0


class ToolCalls:
    """The calls of one turn, ordered by their first fragments."""

    __slots__ = ("_by_id", "_by_index", "calls")

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self._by_index: dict[int, ToolCall] = {}
        self._by_id: dict[str, ToolCall] = {}

    def feed(self, fragments: Any) -> list[ToolCall]:
        """Add the fragments in a chunk: a list or, from TGI, one object. Return the changed calls.

        Raises `UpstreamError` if a fragment is malformed, or if the turn has more than `MAX_CALLS` calls.
        """
        grown: dict[int, ToolCall] = {}
        for fragment in _checked(fragments):
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
        """Return the latest call with this index, if any. Without an index, search by id. Without an id, take the last call."""
        if isinstance(index, int):
            return self._by_index.get(index)
        if call_id in (None, ""):
            return self.calls[-1] if self.calls else None
        return self._by_id.get(call_id) if isinstance(call_id, str) else None


def _checked(fragments: Any) -> list[dict[str, Any]]:
    listed = fragments if isinstance(fragments, list) else [fragments]
    for fragment in listed:
        function = (fragment.get("function") or {}) if isinstance(fragment, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name") or "", str):
            malformed("tool_calls")
    return listed


def _begins_another(fragment: dict[str, Any], known: ToolCall) -> bool:
    """Return whether a fragment that seems to belong to `known` begins a new call.

    It does not if the fragment or `known` has no name. If both have an id, a different id begins a new call. Otherwise, a
    different name or arguments that are an object begin one. So do arguments that follow the complete arguments of `known`.
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
