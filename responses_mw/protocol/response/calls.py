"""Stream tool calls: decode text within their arguments, show the open call, and apply the limits of the request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..chat.chunks import ToolCall
from ..request.tools import choice_names
from ..tool_kinds.form import MAX_CALL_ID, CallForm, OfferedFunction, function_form, parse_arguments
from ..types import Item
from .builder import ResponseOptions
from .events import Emitter

_SPECIAL = re.compile(r'["\\]')
_ESCAPE = re.compile(
    r"\\(?:u(?P<hex>[0-9a-fA-F]{4})(?:(?<=[dD][89abAB]..)\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2}))?|(?P<one>.))", re.DOTALL
)
# An escape, or a pair of them, whose end has not arrived yet.
_CUT = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?\Z")
_MEANT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WHITE = " \t\r\n"
_REPLACEMENT = "\ufffd"


class StringMember:
    """Decode the string ``name`` from fragments of an object's JSON, if it is the first member.

    A tool that takes one text is a function with one string, ``{"input": "..."}``, whose text the client sees as it grows.
    Models write careless JSON: raw line breaks in strings, and backslashes that begin no escape. The result of
    ``"".join(feed(piece) for piece in pieces) + rest(whole)`` does not depend on how ``whole`` is split into pieces.
    """

    __slots__ = ("_expected", "_held", "_inside", "_name", "_over", "_place")

    def __init__(self, name: str) -> None:
        self._name = name
        self._expected = f'{{"{name}":"'
        self._place = 0  # number of its characters that have arrived
        self._inside = False
        self._over = False
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return what ``piece`` adds to the text. A split escape is held back."""
        if self._over:
            return ""
        if not self._inside:
            piece = self._after_opening(piece)
        if not self._inside:
            return ""
        return self._decoded(self._held + piece) if self._held or _SPECIAL.search(piece) else piece

    def rest(self, whole: str) -> str:
        """Return the rest of the text after the last piece: the whole text if the member is not the first.

        If ``whole`` has no such member, return ``whole`` itself, so that nothing the model wrote is lost.
        """
        if self._inside:
            return self._held
        arguments = parse_arguments(whole or "{}")
        if arguments == {}:
            return ""
        value = arguments.get(self._name) if arguments else None
        return value if isinstance(value, str) else whole

    def _after_opening(self, piece: str) -> str:
        """Return what follows the opening quote of the text. Anything unexpected before it ends the decoding."""
        name_begins, name_ends = 2, len(self._expected) - 2
        for position, character in enumerate(piece):
            if character in _WHITE and not name_begins <= self._place < name_ends:
                continue
            if character != self._expected[self._place]:
                self._over = True
                break
            self._place += 1
            if self._place == len(self._expected):
                self._inside = True
                return piece[position + 1 :]
        return ""

    def _decoded(self, text: str) -> str:
        pieces = []
        position = 0
        self._held = ""
        while special := _SPECIAL.search(text, position):
            start = special.start()
            pieces.append(text[position:start])
            if special[0] == '"':
                self._over = True
                return "".join(pieces)
            if _CUT.match(text, start):
                self._held = text[start:]
                return "".join(pieces)
            escape = _ESCAPE.match(text, start)
            assert escape is not None  # a trailing backslash is held back above
            pieces.append(_meant(escape))
            position = escape.end()
        pieces.append(text[position:])
        return "".join(pieces)


def _meant(escape: re.Match[str]) -> str:
    if escape["one"]:
        return _MEANT.get(escape["one"], escape[0])
    code = int(escape["hex"], 16)
    if escape["low"]:
        return chr(0x10000 + ((code & 0x3FF) << 10) + (int(escape["low"], 16) & 0x3FF))
    return _REPLACEMENT if 0xD800 <= code < 0xE000 else chr(code)


def new_item(form: CallForm, call: ToolCall, call_id: str | None) -> Item:
    """The item of a call as it is added. If it has no text that grows, it is complete."""
    item: Item = {"type": form.item, "status": "in_progress"}
    if call_id is not None:
        item["call_id"] = call_id
    item |= form.members
    if form.text is not None:
        item[form.text] = ""
    elif form.made is not None:
        item |= form.made(call.arguments)
    return item


class OpenCall:
    """A call that is being streamed. ``place`` holds the id and index in its events."""

    __slots__ = ("_emitter", "_member", "_pieces", "_template", "call", "form", "is_finished", "item", "place")

    def __init__(self, call: ToolCall, form: CallForm, item: Item, output_index: int, emitter: Emitter) -> None:
        self.call = call
        self.form = form
        self.item = item
        self.place = {"item_id": item["id"], "output_index": output_index}
        self.is_finished = False
        self._emitter = emitter
        self._template = {"type": f"response.{form.events}.delta", **self.place, "delta": "", "sequence_number": 0}
        self._member = StringMember(form.argument) if form.argument else None
        self._pieces: list[str] = []
        self._emit_all(form.begins)
        self.grow()

    def grow(self) -> None:
        """Show the new pieces of the arguments."""
        for piece in self.call.take():
            self._show(self._member.feed(piece) if self._member else piece)

    def put(self) -> None:
        """Write the text shown so far to the item."""
        if self.form.text is not None:
            self.item[self.form.text] = "".join(self._pieces)

    def finish(self) -> None:
        """Complete the arguments."""
        arguments = self.call.arguments
        if self._member:
            self._show(self._member.rest(arguments))
        elif not arguments:
            self._show("{}")
        self.put()
        self.is_finished = True
        if self.form.text is not None:
            members = {name: self.item[name] for name in self.form.done}
            self._emitter.emit(f"response.{self.form.events}.done", **self.place, **members)
            if self.form.made is not None:
                self.item |= self.form.made(arguments)

    def run(self) -> None:
        """Report that execution has started."""
        self._emit_all(self.form.runs)

    def settle(self, members: Mapping[str, Any], *, failed: bool) -> None:
        """Report that execution has ended; ``members`` are the parts of the result that its item shows."""
        self.item |= members
        self._emit_all(self.form.ends[failed : failed + 1] or self.form.ends[:1])

    def _show(self, text: str) -> None:
        if text and self.form.text is not None:
            self._pieces.append(text)
            self._emitter.delta(self._template, text)

    def _emit_all(self, events: tuple[str, ...]) -> None:
        for event in events:
            self._emitter.emit(f"response.{event}", **self.place)


class CallRules:
    """Decide which calls of a run are returned, and in which form."""

    def __init__(self, options: ResponseOptions) -> None:
        self.forms: Mapping[str, CallForm] = {}
        """Forms of the offered functions by name. A call with any other name is a function call."""
        self._allowed = options.allowed
        self.has_left_out = False
        """Whether calls of the turn were left out because of ``max_tool_calls``."""
        self._options = options
        self._call_ids = set(options.used_call_ids)
        self.served = 0
        """Number of calls that the server executes."""

    def offer(self, offered: Sequence[OfferedFunction], choice: Any) -> None:
        """Set the functions that the model may call. ``choice`` is the request's ``tool_choice``."""
        self.forms = {one.name: one.form for one in offered}
        if isinstance(choice, dict) and choice["type"] == "allowed_tools":
            self._allowed = choice_names(choice, offered)
        elif choice == "none":
            self._allowed = frozenset()

    @property
    def is_exhausted(self) -> bool:
        """Whether ``max_tool_calls`` is reached."""
        return self._options.max_calls is not None and self.served >= self._options.max_calls

    def decide(self, call: ToolCall, turn: Sequence[ToolCall]) -> CallForm | None:
        """Return the form of a call of the ``turn``, or None to leave it out. Its name must be known. The decision is final."""
        if not call.is_decided:
            call.is_decided = True
            call.form = self._form(call, turn)
        return call.form

    def _form(self, call: ToolCall, turn: Sequence[ToolCall]) -> CallForm | None:
        form = self.forms.get(call.name) or function_form(call.name)
        if form.members.get("approval_request_id"):
            return form  # requested by the model before, and approved by the client now
        if self._allowed is not None and call.name not in self._allowed:
            return None  # allowed_tools is a hard limit
        if self._options.single_call and any(other.form for other in turn):
            return None  # parallel_tool_calls is false
        if form.served and self.is_exhausted:
            self.has_left_out = True
            return None
        self.served += form.served
        return form

    def withdraw(self, calls: Sequence[ToolCall]) -> None:
        """Stop counting interrupted calls, which are not executed."""
        self.served -= sum(bool(call.form and call.form.served) for call in calls)
        self.has_left_out = False

    def call_id(self, given: str | None, mint: Callable[[], str]) -> str:
        """Return the upstream's id for a call, or a new one if it is unusable.

        It is unusable if it is missing, too long to be sent back, or already used in the history (TGI gives every call "0").
        """
        usable = given and given not in self._call_ids and len(given) <= MAX_CALL_ID
        call_id = given if given and usable else mint()
        self._call_ids.add(call_id)
        return call_id
