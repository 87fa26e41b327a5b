"""Collect the tool calls in chat chunks. Servers split calls into fragments in different ways.

1. A fragment identifies its call by `index`, by `id` or not at all. Older Ollama gives every call the index 0. TGI repeats the
   id in every fragment, and the id is always "0". Other servers send the id once. `ToolCall.is_continued_by`
   decides whether a fragment that seems to belong to a known call begins a new call.
2. A name may come once, repeatedly, empty, in pieces, or after the first arguments. A call is not shown before its name is
   known: until then, more text could turn the name so far into an offered one (`call_names`).
3. Arguments are a string, in pieces or whole, or an object (`call_arguments`).
4. A malformed fragment (for example, a name that is not a string) is an upstream error.
5. The work is linear in the input, no matter how it is split. A turn has at most `MAX_CALLS` calls.
6. TGI up to 3.1 sends the name in the arguments: `{"function": {"_name": ..., <arguments>}}`, followed by a special token.
"""

from __future__ import annotations

from typing import Any

import orjson

from ...errors import UpstreamError
from ..origin import CALL_MEMBERS, FUNCTION_MEMBERS, unknown_members
from ..tool_kinds.form import CallForm, OfferedFunction, parse_arguments
from .call_arguments import CallArguments
from .call_names import OfferedNames, without_marker
from .chunks import malformed

MAX_CALLS = 512  # maximum number of calls in a turn. A model that makes more is in a loop


class ToolCall:
    """A tool call as received so far.

    `function` is the function that the model calls. It is None until `is_decided` is true, or if the call is left out.
    """

    __slots__ = (
        *("_is_object", "_names", "_reader", "_written", "function", "function_members", "id", "is_decided", "members", "name"),
        "place",
    )

    def __init__(self, place: int, names: OfferedNames) -> None:
        self.place = place  # position among the calls of the turn
        self.id: str | None = None
        self.name = ""
        """The offered name that the model means or, if there is none, the name that it wrote. Empty until it is known."""
        self.function: OfferedFunction | None = None
        self.is_decided = False
        self.members: dict[str, Any] = {}
        """The members of the call that Chat Completions does not define."""
        self.function_members: dict[str, Any] = {}
        """The members of its function that Chat Completions does not define."""
        self._names = names
        self._written = ""  # the name so far
        self._reader = CallArguments()
        self._is_object = False  # whether the arguments came as an object instead of a string

    @property
    def form(self) -> CallForm | None:
        """How the call appears in the response, or None as for `function`."""
        return self.function.form if self.function else None

    @property
    def arguments(self) -> str:
        return self._reader.text

    @property
    def size(self) -> int:
        """The number of characters of the arguments so far."""
        return self._reader.size

    def extend(self, fragment: dict[str, Any]) -> list[str]:
        """Add a fragment. Return arguments of further calls of the same function (`CallArguments.feed`)."""
        function = fragment.get("function") or {}
        call_id, arguments = fragment.get("id"), function.get("arguments")
        if isinstance(call_id, str):
            self.id = self.id or call_id or None
        if not (fragment.keys() <= CALL_MEMBERS and function.keys() <= FUNCTION_MEMBERS):
            self.members |= unknown_members(fragment, CALL_MEMBERS)
            self.function_members |= unknown_members(function, FUNCTION_MEMBERS)
        if not self.name or function.get("name"):
            self._extend_name(function.get("name") or "", has_arguments=bool(arguments))
        self._is_object |= isinstance(arguments, dict)
        if not arguments:
            return []
        return self._reader.feed(arguments if isinstance(arguments, str) else _encoded(arguments))

    def _extend_name(self, piece: str, *, has_arguments: bool) -> None:
        written, names = self._written, self._names
        if piece:
            self._written = names.joined(written, piece) or written if written else piece
        if self.name or not self._written:
            return
        is_over = has_arguments and self._written == written and names.match(written)
        if is_over or not names.is_open(self._written):
            self._settle_name()

    def _settle_name(self) -> None:
        self.name = self._names.match(self._written) or without_marker(self._written)

    def is_continued_by(self, fragment: dict[str, Any], *, may_repeat: bool) -> bool:
        """Return whether a fragment with the place of this call belongs to this call. If not, it begins a new one.

        It belongs to this call if one of them has no name. If both have an id, the ids decide. Otherwise, the fragment must
        repeat or continue the name. If this call has an id, another call would have one as well. If not, an object, or
        arguments after complete ones, begin a new call, unless they repeat the arguments of this call and `may_repeat` is true.
        """
        function, call_id = fragment.get("function") or {}, fragment.get("id")
        if not (function.get("name") and self._written):
            return True
        if call_id and self.id:
            return bool(call_id == self.id)
        if self._names.joined(self._written, function["name"]) is None:
            return False
        arguments = function.get("arguments")
        if self.id or not (isinstance(arguments, dict) or (arguments and self._reader.may_precede_call(arguments))):
            return True
        if isinstance(arguments, dict):
            return may_repeat and not self._is_object and self._reader.repeats(_encoded(arguments))
        return may_repeat and self._reader.repeats(arguments)

    @property
    def has_content(self) -> bool:
        return self._reader.has_content

    def take(self) -> list[str]:
        """Return the pieces of the arguments that have arrived since `take` was last called, and are not held back."""
        return self._reader.take()

    def is_whole(self) -> bool:
        """Return whether the arguments are a complete JSON object."""
        return self._reader.is_whole

    def end_empty(self) -> None:
        """End the arguments if they are an empty object so far."""
        self._reader.end_empty()

    def end(self, *, is_cut: bool) -> list[str]:
        """End the call with the turn. Return arguments of further calls. If the turn was cut off, so may be the name."""
        if self._written and not (self.name or (is_cut and self._names.match(self._written) is None)):
            self._settle_name()
        return self._reader.end()

    def is_cut(self) -> bool:
        """Return whether the arguments begin with an object or a string that has not ended."""
        return self._reader.is_cut

    def find_name(self) -> bool:
        """Move a missing name out of the complete arguments (rule 6). Return whether the call has a name."""
        text = self.arguments
        grammar = parse_arguments(text[: text.rfind("}") + 1])
        function = grammar.get("function") if grammar else None
        if isinstance(function, dict) and isinstance(function.get("_name"), str):
            self._written = function.pop("_name")
            self._reader = CallArguments()
            self._reader.feed(_encoded(function))
            self.end(is_cut=False)
        return bool(self.name)

    def again(self, place: int, arguments: str) -> ToolCall:
        """Return another call of the same function."""
        call = ToolCall(place, self._names)
        call.name, call._written = self.name, self._written
        call._reader.feed(arguments)
        return call


class ToolCalls:
    """The calls of one turn, ordered by their first fragments."""

    __slots__ = ("_by_id", "_by_index", "_names", "_passed", "calls")

    def __init__(self, names: OfferedNames) -> None:
        self.calls: list[ToolCall] = []
        self._names = names
        self._by_index: dict[int, ToolCall] = {}
        self._by_id: dict[str, ToolCall] = {}
        self._passed = 0  # number of calls before one with arguments

    def feed(self, fragments: Any) -> list[ToolCall]:
        """Add the fragments in a chunk: a list or, from TGI, one object. Return the changed calls.

        Raises `UpstreamError` if a fragment is malformed, or if the turn has more than `MAX_CALLS` calls.
        """
        grown: dict[int, ToolCall] = {}
        for fragment in _checked(fragments):
            call = self._call_of(fragment, grown)
            further = call.extend(fragment)
            if call.id is not None and self._by_id.get(call.id, call).place <= call.place:
                self._by_id[call.id] = call
            grown[call.place] = call
            if call.place > self._passed:
                self._pass_empty(call)
            if further:
                self._add_further(call, further)
        return list(grown.values())

    def end(self, *, is_cut: bool) -> None:
        """End all calls, because the turn has ended. `is_cut` is whether it was cut off."""
        for call in list(self.calls):
            self._add_further(call, call.end(is_cut=is_cut))

    def _pass_empty(self, call: ToolCall) -> None:
        """End empty arguments of calls before `call` if it has arguments. They will not be continued."""
        if call.has_content:
            for earlier in self.calls[self._passed : call.place]:
                earlier.end_empty()
            self._passed = call.place

    def _add_further(self, call: ToolCall, further: list[str]) -> None:
        for arguments in further:
            self._check_number()
            self.calls.append(call.again(len(self.calls), arguments))

    def _call_of(self, fragment: dict[str, Any], grown: dict[int, ToolCall]) -> ToolCall:
        index = fragment.get("index")
        known = self._find(index, fragment.get("id"))
        if known and known.is_continued_by(fragment, may_repeat=known.place not in grown):
            return known
        self._check_number()
        call = ToolCall(len(self.calls), self._names)
        self._by_index[index if isinstance(index, int) else call.place] = call
        self.calls.append(call)
        return call

    def _check_number(self) -> None:
        if len(self.calls) >= MAX_CALLS:
            raise UpstreamError(f"The upstream's model made more than {MAX_CALLS} calls in one turn.")

    def _find(self, index: Any, call_id: Any) -> ToolCall | None:
        """Return the latest call with this index, if any. Without an index, search by id. Without an id, take the last call.

        If the call with this index has another id, prefer an earlier call with this id: some servers repeat calls as a summary.
        """
        if isinstance(index, int):
            known = self._by_index.get(index)
            is_other = known and known.id and call_id and known.id != call_id and isinstance(call_id, str)
            return self._by_id.get(call_id, known) if is_other else known
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


def _encoded(arguments: Any) -> str:
    try:
        return orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError:  # nested deeper than the encoder allows
        malformed("arguments")
