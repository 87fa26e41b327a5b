"""Build the items of a response one at a time, and decide which calls of a turn to include in the response."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...ids import RunIds
from .. import origin
from ..chat.call_names import OfferedNames
from ..chat.tool_calls import ToolCall, ToolCalls
from ..citations import MAX_CITATIONS
from ..request.tools import choice_names
from ..tool_kinds.client_defined import unoffered_function
from ..tool_kinds.form import MAX_CALL_ID, CallForm, OfferedFunction, Role
from ..tool_kinds.free_text import text_in
from ..tool_kinds.registry import TOOL_ITEMS
from ..types import Document, Event, Item
from .answer import ChatAnswer
from .builder import ResponseBuilder, ResponseOptions
from .document import shown
from .events import CALL_TEXTS, DONE, OUTPUT_TEXT, PARTS, Emitter, EventTarget, emit_done, ending
from .refused_calls import nothing_called, refused_call
from .text import CitingText, OpenText

_TOKENS = re.compile(
    r"""
      (?P<plain> [^"\\]+ )
    | (?P<end> " )
    # An escape or a pair of escapes whose end has not arrived yet.
    | (?P<cut>
        \\ (?: u[0-9a-f]{0,3} | u d[89ab][0-9a-f]{2} (?: \\ (?: u (?: d (?: [c-f] [0-9a-f]? )? )? )? )? )? \Z
      )
    | (?P<escape> \\ (?: u d[89ab][0-9a-f]{2} \\ u d[c-f][0-9a-f]{2} | u[0-9a-f]{4} | . ) )
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_MAX_OPENING = 256  # maximum number of characters up to the opening quote of a text that is streamed


class StringMember:
    """Decodes the string `name` in a JSON object that arrives in pieces. The string is streamed only if it comes first.

    Models write raw line breaks in strings, and backslashes that begin no escape. Both are accepted. The result of
    `"".join(feed(piece) for piece in pieces) + rest(whole)` does not depend on how `whole` is split into pieces.
    """

    __slots__ = ("_has_text", "_held", "_inside", "_name", "_opening", "_over")

    def __init__(self, name: str) -> None:
        self._name = name
        self._opening = re.compile(r"[ \t\r\n]*".join(["", "{", f'"{re.escape(name)}"', ":", '"']))
        self._inside = self._over = self._has_text = False
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return the text that the next piece adds. An incomplete escape is held back."""
        if self._over:
            return ""
        text = self._held + piece
        if not self._inside:
            opening = self._opening.match(text, 0, _MAX_OPENING)
            if opening is None:
                self._held, self._over = text, len(text) > _MAX_OPENING
                return ""
            self._inside, text = True, text[opening.end() :]
        return self._decode(text)

    def rest(self, whole: str) -> str:
        """Return the text that `feed` has not returned. `whole` is the complete JSON.

        If the string is not the first member, or empty, the text is what `text_in` finds in `whole`.
        """
        if self._inside and (self._has_text or not self._over):
            return self._held
        return text_in(whole, self._name)

    def _decode(self, text: str) -> str:
        pieces = []
        self._held = ""
        for token in _TOKENS.finditer(text):
            if token["end"]:
                self._over = True
                break
            if token["cut"]:
                self._held = token["cut"]
                break
            pieces.append(token["plain"] or _meant(token["escape"]))
        self._has_text |= bool(pieces)
        return "".join(pieces)


def _meant(escape: str) -> str:
    try:
        text: str = json.loads(f'"{escape}"')
    except ValueError:
        return escape
    return "\ufffd" if "\ud800" <= text < "\ue000" else text


class OpenCall:
    """A call that is being streamed. `place` holds the id and index for its events."""

    __slots__ = ("_emitter", "_member", "_pieces", "_template", "_text", "call", "form", "is_finished", "item", "place")

    def __init__(self, call: ToolCall, form: CallForm, item: Item, output_index: int, emitter: Emitter) -> None:
        self.call = call
        self.form = form
        self.item = item
        self.place = {"item_id": item["id"], "output_index": output_index}
        self.is_finished = False
        self._emitter = emitter
        self._text = CALL_TEXTS.get(form.item)
        """Target of the text that is streamed to the client, or None if the item has no such text."""
        stem = self._text.stem if self._text else ""
        self._template = {"type": f"{stem}.delta", **self.place, "delta": "", "sequence_number": 0}
        self._member = StringMember(form.argument) if form.argument else None
        self._pieces: list[str] = []
        self.emit(form.begins)
        self.grow()

    def grow(self) -> None:
        """Emit deltas for the new pieces of the arguments."""
        for piece in self.call.take():
            self._show(self._member.feed(piece) if self._member else piece)

    def put(self) -> None:
        """Write the text streamed so far to the item."""
        if self._text:
            self.item[self._text.member] = "".join(self._pieces)

    def finish(self) -> None:
        """Complete the arguments. If the call has a text, complete it, write it to the item, and emit its `done` event."""
        self.grow()
        arguments = self.call.arguments
        if self._member:
            self._show(self._member.rest(arguments))
        elif not arguments:
            self._show("{}")
        self.put()
        self.is_finished = True
        origin.record(self.item, self.call.id, self.call.members, self.call.function_members)
        if self._text:
            self._emitter.emit(f"{self._text.stem}.done", **self.place, **ending(self.item, self._text))
            if self.form.made is not None:
                self.item |= self.form.made(arguments)

    def settle(self, members: Mapping[str, Any], *, failed: bool) -> None:
        """Add `members`, the call's result, to the item. Emit the form's event for success or failure, if it has one.

        If the form has only one such event, it is emitted in both cases.
        """
        self.item |= members
        self.emit(self.form.ends[failed : failed + 1] or self.form.ends[:1])

    def _show(self, text: str) -> None:
        if text and self._text:
            self._pieces.append(text)
            self._emitter.delta(self._template, text)

    def emit(self, names: tuple[str, ...]) -> None:
        """Emit a progress event for the call, `response.<name>`, for each name in `names`."""
        self._emitter.emit(*(f"response.{name}" for name in names), **self.place)


class ItemBuilder(ResponseBuilder):
    """Builds a response in which at most one item is open. The open item is the text or call that is being received."""

    answer: ChatAnswer

    def __init__(self, document: Document, ids: RunIds, options: ResponseOptions) -> None:
        super().__init__(document, ids, options)
        self._open: OpenText | OpenCall | None = None
        self._functions: Mapping[str, OfferedFunction] = {}
        """Maps names to the offered functions. A call to any other function becomes a `function_call`."""
        self._allowed: frozenset[str] | None = None
        self._call_ids = set(options.used_call_ids)
        self._names = OfferedNames()
        self._client_has_functions = False
        self._served = 0  # number of calls of the run that the server executes
        self._annotations: list[dict[str, Any]] = []  # citations of the upstream that belong to the next text that ends

    # -- texts and calls ------------------------------------------------------------------------------------------

    def _cite(self, citations: list[dict[str, Any]]) -> None:
        """Add the upstream's citations to the text that is open or comes next. Some servers repeat them with every chunk."""
        for citation in citations:
            if len(self._annotations) < MAX_CITATIONS and citation not in self._annotations:
                self._annotations.append(citation)

    def _show(self, kind: EventTarget, text: str, logprobs: Any) -> None:
        part = self._open
        if not (isinstance(part, OpenText) and part.kind is kind):
            part = self._open_part(kind)
        part.add(text, logprobs)

    def _open_part(self, kind: EventTarget) -> OpenText:
        """Open a part of this `kind`. Use the open item if its type matches, otherwise add a new item."""
        current = self._open
        if isinstance(current, OpenText) and current.kind.item == kind.item:
            self._finish_text(current)
            item, output_index = current.item, current.place["output_index"]
        else:
            self._close("completed")
            item, output_index = self._begin_item(kind.new_item())
        item[kind.holder].append(kind.new_part())
        self._open = text = self._open_text(kind, item, output_index)
        self._emitter.emit(f"{PARTS[kind.holder]}.added", **text.place, part=text.part)
        return text

    def _open_text(self, kind: EventTarget, item: Item, output_index: int) -> OpenText:
        if kind is OUTPUT_TEXT and self.sources is not None:
            return CitingText(kind, item, output_index, self._emitter, self.sources)
        return OpenText(kind, item, output_index, self._emitter)

    def _open_call(self, form: CallForm, call: ToolCall) -> None:
        item: Item = {"type": form.item, "status": "in_progress"}
        if not form.served:
            item["call_id"] = self._call_id(call)
        item |= form.members
        if text := CALL_TEXTS.get(form.item):
            item[text.member] = ""
        elif form.made is not None:
            item |= form.made(call.arguments)
        origin.record(item, call.id, call.members, call.function_members)
        item, output_index = self._begin_item(item)
        self.answer.has_served_call |= TOOL_ITEMS[form.item].role is not Role.CALL
        self._open = OpenCall(call, form, item, output_index, self._emitter)

    def _call_id(self, call: ToolCall) -> str:
        # The upstream's id may be too long for the client to send back, or already used (TGI: always "0").
        is_usable = call.id and call.id not in self._call_ids and len(call.id) <= MAX_CALL_ID
        call_id = call.id if call.id and is_usable else self._ids.item("call")
        self._call_ids.add(call_id)
        return call_id

    def _begin_item(self, item: Item) -> tuple[Item, int]:
        """Add an item that the model began. If a server-side call precedes it in its turn, mark it (see `origin`)."""
        return self._add_item(origin.in_same_turn(item) if self.answer.has_served_call else item)

    def _reopen(self, item: Item, reasoning: EventTarget) -> None:
        """Reopen an item that another worker began. A call is closed as `incomplete` instead, as it cannot be continued."""
        index = len(self.response["output"]) - 1
        if item["type"] in ("message", "reasoning"):
            kind = OUTPUT_TEXT if item["type"] == "message" else reasoning
            self._open = self._open_text(kind, item, index)
        else:
            item["status"] = "incomplete"
            emit_done(self._emitter, item, index)

    @property
    def awaited(self) -> Item:
        assert self._open is not None
        return self._open.item

    def _is_over(self) -> bool:
        """Return whether another item may follow the open one. It may not follow an incomplete call or a server-side call."""
        current = self._open
        return not isinstance(current, OpenCall) or (current.call.is_whole() and not current.form.served)

    def _close(self, status: str) -> None:
        current = self._open
        if isinstance(current, OpenText):
            self._finish_text(current)
            self._seal(current.item)
        elif current is not None:
            current.finish()
        self._end_item(status)

    def _finish_text(self, text: OpenText) -> None:
        if text.kind is OUTPUT_TEXT:
            text.finish(self._annotations)
            self._annotations = []
        else:
            text.finish()

    def _end_item(self, status: str) -> None:
        if self._open is None:
            return
        item, output_index = self._open.item, self._open.place["output_index"]
        self._open = None
        item["status"] = status
        self._emitter.emit(DONE, output_index=output_index, item=shown(item, self._options.include))

    # -- which calls are returned -------------------------------------------------------------------------------------

    def offer(self, offered: Sequence[OfferedFunction], choice: Any) -> None:
        self._functions = {one.name: one for one in offered}
        self._client_has_functions = any(TOOL_ITEMS[one.form.item].role is Role.CALL for one in offered)
        self._names = OfferedNames(offered)
        if not self.answer.tool_calls.calls:
            self.answer.tool_calls = ToolCalls(self._names)
        if isinstance(choice, dict) and choice["type"] == "allowed_tools":
            self._allowed = choice_names(choice, offered)
        elif choice == "none":
            self._allowed = frozenset()

    @property
    def is_exhausted(self) -> bool:
        return self._options.max_calls is not None and self._served >= self._options.max_calls

    def _form(self, call: ToolCall) -> CallForm | None:
        """Return the form of a call, or None if the response omits the call. The name must be known. The decision is final."""
        if not call.is_decided:
            call.is_decided, call.function = True, self._find_function(call)
        return call.form

    def _find_function(self, call: ToolCall) -> OfferedFunction | None:
        function = self._functions.get(call.name)
        if function is None and not self._client_has_functions:
            self._leave_unoffered(call)
            return None
        function = function or unoffered_function(call.name)
        if function.form.members.get("approval_request_id"):
            return function  # requested by the model earlier, and approved by the client now
        if self._allowed is not None and call.name not in self._allowed:
            self.answer.excluded.append(call.name)
            return None  # allowed_tools and none are hard limits
        if self._options.single_call and any(other.function for other in self.answer.tool_calls.calls):
            return None  # parallel_tool_calls is false
        if function.form.served and self.is_exhausted:
            self.answer.has_left_out = True
            return None
        self._served += function.form.served
        return function

    def _leave_unoffered(self, call: ToolCall) -> None:
        if self.is_exhausted:
            self.answer.has_left_out = True
        else:
            self.answer.unoffered.append(call)
            self._served += 1

    def _refuse_unoffered(self) -> None:
        """Add calls of functions that were not offered to `answer.refused_calls`, each with an output that lists valid ones."""
        allowed = self._functions.keys() if self._allowed is None else self._allowed
        names = [] if self.is_exhausted else [name for name in self._functions if name in allowed]
        for call in self.answer.unoffered:
            item, output = refused_call(self._call_id(call), call.name, call.arguments, names)
            origin.record(item, call.id, call.members, call.function_members)
            self.answer.refused_calls += [origin.in_same_turn(item) if self.answer.asked else item, output]

    def _show_no_item(self) -> None:
        """Emit an empty message for an answer without items, unless another turn follows because calls were omitted."""
        if not (self.answer.has_left_out or self.answer.refused_calls):
            self._open_part(OUTPUT_TEXT)
            if self.answer.excluded:
                self._show(OUTPUT_TEXT, nothing_called(self.answer.excluded), None)

    def end_without_calls(self) -> list[Event]:
        if (self.answer.has_left_out or self.answer.refused_calls) and len(self.response["output"]) == self.turn_begins_at:
            names = [call.name for call in self.answer.tool_calls.calls if call.function is None]
            self._show(OUTPUT_TEXT, nothing_called(names), None)
            self._close("completed")
        return self._emitter.drain()
