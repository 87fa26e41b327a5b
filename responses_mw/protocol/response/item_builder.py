"""The open item of a response, to which text or a call is being written. There is at most one."""

from __future__ import annotations

from typing import Any

from ..chat.chunks import ToolCall
from ..request.items import text_of
from ..tool_kinds.form import CallForm
from ..types import Document, Item
from .builder import IdSource, ResponseBuilder, ResponseOptions
from .calls import OpenCall, new_item
from .document import shown
from .events import DONE, OUTPUT_TEXT, PARTS, EventTarget, emit_done
from .text import OpenText


class ItemBuilder(ResponseBuilder):
    """A response whose items are written one after the other."""

    def __init__(self, document: Document, ids: IdSource, options: ResponseOptions) -> None:
        super().__init__(document, ids, options)
        self._open: OpenText | OpenCall | None = None

    @property
    def awaited(self) -> Item:
        """The item of the call whose result is next."""
        assert self._open is not None
        return self._open.item

    def _show(self, kind: EventTarget, text: str, logprobs: Any) -> None:
        part = self._open
        if not (isinstance(part, OpenText) and part.kind is kind):
            part = self._open_part(kind)
        part.add(text, logprobs)

    def _open_part(self, kind: EventTarget) -> OpenText:
        """Open a part of ``kind``, in the open item if it has the right type, otherwise in a new one."""
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

    def _open_call(self, form: CallForm, call: ToolCall, call_id: str | None) -> None:
        item, output_index = self._add_item(new_item(form, call, call_id))
        self._open = OpenCall(call, form, item, output_index, self._emitter)

    def _is_over(self) -> bool:
        """Whether the open item is complete, so that interleaved calls can follow."""
        current = self._open
        return not isinstance(current, OpenCall) or (current.call.is_whole() and not current.form.served)

    def _reopen(self, item: Item, reasoning: EventTarget) -> None:
        """Reopen the last item, which another worker began, to continue its text. Close a call as incomplete instead.

        ``reasoning`` is the kind of the text of a reasoning item.
        """
        index = len(self.response["output"]) - 1
        if item["type"] in ("message", "reasoning"):
            kind = OUTPUT_TEXT if item["type"] == "message" else reasoning
            self._open = OpenText(kind, item, index, self._emitter)
            return
        item["status"] = "incomplete"
        emit_done(self._emitter, item, index)

    def _leave_open(self) -> None:
        """Mark the open item as incomplete, without a done event."""
        if self._open:
            self._open.put()
            self._open.item["status"] = "incomplete"
            self._open = None

    def _close(self, status: str) -> None:
        current = self._open
        if current is None:
            return
        if isinstance(current, OpenText):
            current.finish(self.sources)
            if self._options.seal and current.kind.item == "reasoning":
                current.item["encrypted_content"] = self._options.seal(text_of(current.item))
        else:
            current.finish()
        self._end_item(status)

    def _end_item(self, status: str) -> None:
        assert self._open is not None
        item, output_index = self._open.item, self._open.place["output_index"]
        self._open = None
        item["status"] = status
        item = shown(item, self._options.include)
        self._emitter.emit(DONE, output_index=output_index, item=item)
