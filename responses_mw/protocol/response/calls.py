"""The text within a call's arguments, while they are still being written.

A tool that takes one text is to the model a function with one string, ``{"input": "..."}``; the client is to see the text grow.
Models are careless with JSON: line breaks stand in strings as they are, and so do backslashes that begin no escape.

A call that is being shown: the item and the events that its form makes of it.

Which calls of the model count, and in which form and under which id they are given back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..chat.tool_calls import ToolCall
from ..request.tools import choice_names
from ..tool_kinds.form import MAX_CALL_ID, CallForm, Offered, function_form, parse_arguments
from ..types import Item
from .events import DeltaTemplate, Emitter
from .lifecycle import Options

_SPECIAL = re.compile(r'["\\]')
_ESCAPE = re.compile(
    r"\\(?:u(?P<hex>[0-9a-fA-F]{4})(?:(?<=[dD][89abAB]..)\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2}))?|(?P<one>.))", re.DOTALL
)
# An escape, or a pair of them, of which the end has not come yet.
_CUT = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?\Z")
_MEANT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WHITE = " \t\r\n"
_REPLACEMENT = "\ufffd"


class StringMember:
    """Reads the fragments of an object's JSON; gives what they add to its string ``name``, if that is its first member.

    ``"".join(feed(piece) for piece in pieces) + rest(whole)`` does not depend on how ``whole`` was cut into the pieces.
    """

    __slots__ = ("_expected", "_held", "_inside", "_name", "_over", "_place")

    def __init__(self, name: str) -> None:
        self._name = name
        self._expected = f'{{"{name}":"'
        self._place = 0  # how much of that has come
        self._inside = False
        self._over = False
        self._held = ""

    def feed(self, piece: str) -> str:
        """What ``piece`` adds to the text. An escape that it cuts is held back."""
        if self._over:
            return ""
        if not self._inside:
            piece = self._after_opening(piece)
        if not self._inside:
            return ""
        return self._decoded(self._held + piece) if self._held or _SPECIAL.search(piece) else piece

    def rest(self, whole: str) -> str:
        """What is missing of the text when all has been fed: all of it, where the member is not the first one; and ``whole``
        itself where that is no object with such a member, so that nothing is lost that the model wrote."""
        if self._inside:
            return self._held
        arguments = parse_arguments(whole or "{}")
        if arguments == {}:
            return ""
        value = arguments.get(self._name) if arguments else None
        return value if isinstance(value, str) else whole

    def _after_opening(self, piece: str) -> str:
        """What follows the quote with which the text begins. Anything else that comes before it ends the reading."""
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
            assert escape is not None  # a backslash at the end is cut
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
    """The item of a call as it is added; one without a growing text has all that the arguments tell."""
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
    """The open item of an assembler, where it is a call. ``place`` is where its events say that it stands."""

    __slots__ = ("_emitter", "_member", "_pieces", "_template", "call", "form", "is_finished", "item", "place")

    def __init__(self, call: ToolCall, form: CallForm, item: Item, output_index: int, emitter: Emitter) -> None:
        self.call = call
        self.form = form
        self.item = item
        self.place = {"item_id": item["id"], "output_index": output_index}
        self.is_finished = False
        self._emitter = emitter
        self._template = DeltaTemplate(f"response.{form.events}.delta", self.place)
        self._member = StringMember(form.argument) if form.argument else None
        self._pieces: list[str] = []
        self._tell(form.begins)
        self.grow()

    def grow(self) -> None:
        """Shows what the call has grown by."""
        for piece in self.call.take():
            self._show(self._member.feed(piece) if self._member else piece)

    def put(self) -> None:
        """Writes what was shown so far into the item."""
        if self.form.text is not None:
            self.item[self.form.text] = "".join(self._pieces)

    def finish(self) -> None:
        """The arguments are all there."""
        arguments = self.call.arguments
        if self._member:
            self._show(self._member.rest(arguments))
        elif not arguments:
            self._show("{}")
        self.put()
        self.is_finished = True
        if self.form.text is not None:
            told = {name: self.item[name] for name in self.form.done}
            self._emitter.emit(f"response.{self.form.events}.done", **self.place, **told)
            if self.form.made is not None:
                self.item |= self.form.made(arguments)

    def run(self) -> None:
        """The call is being carried out."""
        self._tell(self.form.runs)

    def settle(self, members: Mapping[str, Any], *, failed: bool) -> None:
        """The call has been carried out; ``members`` are what its item shows of the result."""
        self.item |= members
        self._tell(self.form.ends[failed : failed + 1] or self.form.ends[:1])

    def _show(self, text: str) -> None:
        if text and self.form.text is not None:
            self._pieces.append(text)
            self._emitter.delta(self._template, text)

    def _tell(self, events: tuple[str, ...]) -> None:
        for event in events:
            self._emitter.emit(f"response.{event}", **self.place)


class CallRules:
    """What the request allows, and how much of it is used up; for all turns of a run."""

    def __init__(self, options: Options) -> None:
        self.forms: Mapping[str, CallForm] = {}
        """The forms of the functions that are offered, by their names; a call of any other is a function call."""
        self._allowed = options.allowed
        self.has_left_out = False
        """Whether the turn had more calls than may be carried out here (``max_tool_calls``)."""
        self._options = options
        self._call_ids = set(options.used_call_ids)
        self._served = 0

    def offer(self, offered: Sequence[Offered], choice: Any) -> None:
        """``offered`` are the functions that the model may call, ``choice`` is the request's ``tool_choice``."""
        self.forms = {one.name: one.form for one in offered}
        if isinstance(choice, dict) and choice["type"] == "allowed_tools":
            self._allowed = choice_names(choice, offered)

    @property
    def is_exhausted(self) -> bool:
        """Whether no more calls may be carried out here."""
        return self._served == self._options.most_calls

    def decide(self, call: ToolCall, turn: Sequence[ToolCall]) -> CallForm | None:
        """How a call of the ``turn`` is given back; None for one that is left out. Decided once, when it has its name."""
        if not call.is_decided:
            call.is_decided = True
            call.form = self._form(call, turn)
        return call.form

    def _form(self, call: ToolCall, turn: Sequence[ToolCall]) -> CallForm | None:
        form = self.forms.get(call.name) or function_form(call.name)
        if form.members.get("approval_request_id"):
            return form  # it was the model's wish before, and is the client's now
        if self._allowed is not None and call.name not in self._allowed:
            return None  # allowed_tools is a hard limit
        if self._options.single_call and any(other.form for other in turn):
            return None  # parallel_tool_calls is false
        if form.served and self._served == self._options.most_calls:
            self.has_left_out = True
            return None
        self._served += form.served
        return form

    def call_id(self, given: str | None, mint: Callable[[], str]) -> str:
        """The upstream's id, unless it is missing, already used in the chain (TGI calls every call "0"), or longer than what
        a caller may send back."""
        usable = given and given not in self._call_ids and len(given) <= MAX_CALL_ID
        call_id = given if given and usable else mint()
        self._call_ids.add(call_id)
        return call_id
