"""A call that is being shown: the item and the events that its form makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .events import DeltaTemplate, Emitter
from .forms import CallForm
from .stringmember import StringMember
from .toolcalls import ToolCall
from .types import Item


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
