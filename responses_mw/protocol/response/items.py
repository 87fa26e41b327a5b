"""Build the items of a response one at a time, and decide which calls of a turn to include in the response."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...ids import RunIds
from ..chat.tool_calls import ToolCall, ToolCalls
from ..request.tools import choice_names
from ..tool_kinds.form import MAX_CALL_ID, CallForm, OfferedFunction, parse_arguments
from ..types import Document, Item
from .builder import ResponseBuilder, ResponseOptions
from .document import shown
from .events import CALL_TEXTS, DONE, OUTPUT_TEXT, PARTS, Emitter, EventTarget, emit_done, ending
from .text import OpenText

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

    __slots__ = ("_held", "_inside", "_name", "_opening", "_over")

    def __init__(self, name: str) -> None:
        self._name = name
        self._opening = re.compile(r"[ \t\r\n]*".join(["", "{", f'"{re.escape(name)}"', ":", '"']))
        self._inside = self._over = False
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
        return self._decoded(text)

    def rest(self, whole: str) -> str:
        """Return the text that `feed` has not returned. `whole` is the complete JSON.

        If the string is not the first member, its whole text is returned. If there is no string of this name, or if `whole` is
        not a JSON object, `whole` is returned, so that nothing the model wrote is lost. For an empty object, the text is empty.
        """
        if self._inside:
            return self._held
        arguments = parse_arguments(whole or "{}")
        if arguments == {}:
            return ""
        value = arguments.get(self._name) if arguments else None
        return value if isinstance(value, str) else whole

    def _decoded(self, text: str) -> str:
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
        arguments = self.call.arguments
        if self._member:
            self._show(self._member.rest(arguments))
        elif not arguments:
            self._show("{}")
        self.put()
        self.is_finished = True
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

    def __init__(self, document: Document, ids: RunIds, options: ResponseOptions) -> None:
        super().__init__(document, ids, options)
        self._open: OpenText | OpenCall | None = None
        self._forms: Mapping[str, CallForm] = {}
        """Maps the names of the offered functions to their forms. A call to any other function becomes a `function_call`."""
        self._allowed: frozenset[str] | None = None
        self._call_ids = set(options.used_call_ids)
        self._tool_calls = ToolCalls()  # of the turn
        self._served = 0  # number of calls of the run that the server executes

    # -- texts and calls ------------------------------------------------------------------------------------------

    def _show(self, kind: EventTarget, text: str, logprobs: Any) -> None:
        part = self._open
        if not (isinstance(part, OpenText) and part.kind is kind):
            part = self._open_part(kind)
        part.add(text, logprobs)

    def _open_part(self, kind: EventTarget) -> OpenText:
        """Open a part of this `kind`. Use the open item if its type matches, otherwise add a new item."""
        current = self._open
        if isinstance(current, OpenText) and current.kind.item == kind.item:
            current.finish(self.sources)
            item, output_index = current.item, current.place["output_index"]
        else:
            self._close("completed")
            item, output_index = self._add_item(kind.new_item())
        item[kind.holder].append(kind.new_part())
        self._open = text = OpenText(kind, item, output_index, self._emitter)
        self._emitter.emit(f"{PARTS[kind.holder]}.added", **text.place, part=text.part)
        return text

    def _open_call(self, form: CallForm, call: ToolCall) -> None:
        item: Item = {"type": form.item, "status": "in_progress"}
        if not form.served:
            # The upstream's id may be too long for the client to send back, or already used (TGI: always "0").
            is_usable = call.id and call.id not in self._call_ids and len(call.id) <= MAX_CALL_ID
            item["call_id"] = call.id if is_usable else self._ids.item("call")
            self._call_ids.add(item["call_id"])
        item |= form.members
        if text := CALL_TEXTS.get(form.item):
            item[text.member] = ""
        elif form.made is not None:
            item |= form.made(call.arguments)
        item, output_index = self._add_item(item)
        self._open = OpenCall(call, form, item, output_index, self._emitter)

    def _reopen(self, item: Item, reasoning: EventTarget) -> None:
        """Reopen an item that another worker began. A call is closed as `incomplete` instead, as it cannot be continued."""
        index = len(self.response["output"]) - 1
        if item["type"] in ("message", "reasoning"):
            kind = OUTPUT_TEXT if item["type"] == "message" else reasoning
            self._open = OpenText(kind, item, index, self._emitter)
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
            current.finish(self.sources)
            self._seal(current.item)
        elif current is not None:
            current.finish()
        self._end_item(status)

    def _end_item(self, status: str) -> None:
        if self._open is None:
            return
        item, output_index = self._open.item, self._open.place["output_index"]
        self._open = None
        item["status"] = status
        self._emitter.emit(DONE, output_index=output_index, item=shown(item, self._options.include))

    # -- which calls are returned -------------------------------------------------------------------------------------

    def offer(self, offered: Sequence[OfferedFunction], choice: Any) -> None:
        self._forms = {one.name: one.form for one in offered}
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
            call.is_decided, call.form = True, self._decided_form(call)
        return call.form

    def _decided_form(self, call: ToolCall) -> CallForm | None:
        form = self._forms.get(call.name) or CallForm("function_call", {"name": call.name})
        if form.members.get("approval_request_id"):
            return form  # requested by the model earlier, and approved by the client now
        if self._allowed is not None and call.name not in self._allowed:
            return None  # allowed_tools and none are hard limits
        if self._options.single_call and any(other.form for other in self._tool_calls.calls):
            return None  # parallel_tool_calls is false
        if form.served and self.is_exhausted:
            self.has_left_out = True
            return None
        self._served += form.served
        return form
