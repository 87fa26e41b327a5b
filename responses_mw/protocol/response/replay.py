"""From events back to items: what a stream has come to, wherever it stopped.

The events that add to an item tell which of its members they write to (OpenAI reference, "Streaming events"); what is not
known here adds nothing, and the item's ``done`` brings it whole.

`fold` makes the document of a run that lost its worker or was cancelled from the log of its events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..request.checks import malformed
from ..types import Document, Item, Part
from .document import whole
from .events import Emitter, Event, terminal_type

ADDED = "response.output_item.added"
DONE = "response.output_item.done"


class PartText(NamedTuple):
    """How deltas add to a part."""

    holder: str
    """The member of the item that lists the parts."""
    place: str
    """The event's index into that list."""
    member: str
    """The member of the part."""
    empty: Part
    """A part to begin with."""


_OUTPUT_TEXT: Part = {"type": "output_text", "text": "", "annotations": []}
_REASONING: Part = {"type": "reasoning_text", "text": ""}
_SUMMARY: Part = {"type": "summary_text", "text": ""}

TEXTS = {
    "response.output_text.delta": PartText("content", "content_index", "text", _OUTPUT_TEXT),
    "response.refusal.delta": PartText("content", "content_index", "refusal", {"type": "refusal", "refusal": ""}),
    "response.reasoning_text.delta": PartText("content", "content_index", "text", _REASONING),
    "response.reasoning.delta": PartText("content", "content_index", "text", _REASONING),
    "response.reasoning_summary_text.delta": PartText("summary", "summary_index", "text", _SUMMARY),
}
# Deltas that write to a member of the item itself.
MEMBERS = {
    "response.function_call_arguments.delta": "arguments",
    "response.mcp_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
    "response.code_interpreter_call_code.delta": "code",
}
_NEW_PARTS = {"response.content_part.added": "content", "response.reasoning_summary_part.added": "summary"}


class Output:
    """Takes events one by one; ``items`` grows. A delta costs an entry in a list: the texts are put together in the end."""

    __slots__ = ("_pieces", "items", "open")

    def __init__(self, items: list[Item]) -> None:
        """``items`` are those before the first event, all done."""
        self.items = items
        self.open: set[int] = set()
        """The places of the items that are not done."""
        self._pieces: dict[tuple[int, str, str], list[Any]] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """Any event of a response. One that is for no open item adds nothing. Raises ``UpstreamError`` where a part is none."""
        kind, index = event["type"], event.get("output_index")
        if kind == ADDED:
            self.open.add(len(self.items))
            self.items.append(event["item"])
        elif not isinstance(index, int) or index not in self.open:
            return
        elif kind == DONE:
            self._done(index, event["item"])
        elif kind in _NEW_PARTS:
            self._new_part(self.items[index], _NEW_PARTS[kind], event.get("part"))
        elif kind in TEXTS or kind in MEMBERS:
            part = str(event.get(TEXTS[kind].place, 0)) if kind in TEXTS else ""
            self._pieces.setdefault((index, kind, part), []).append(event)

    def _done(self, index: int, item: Item) -> None:
        self.items[index] = item
        self.open.discard(index)
        for place in [place for place in self._pieces if place[0] == index]:
            del self._pieces[place]

    def _new_part(self, item: Item, holder: str, part: Any) -> None:
        if not isinstance(part, dict):
            malformed("part")
        item[holder] = [*(item.get(holder) or ()), dict(part)]

    def put(self, index: int) -> Item:
        """The item at ``index`` with all the text that came for it."""
        item = self.items[index]
        for place in [place for place in self._pieces if place[0] == index]:
            events = self._pieces.pop(place)
            kind = place[1]
            if kind in MEMBERS:
                _append(item, MEMBERS[kind], events)
            else:
                holder, part_index, member, empty = TEXTS[kind]
                part = _part(item, holder, events[0].get(part_index, 0), empty)
                _append(part, member, events)
                logprobs = [one for event in events for one in event.get("logprobs") or ()]
                if logprobs:
                    part["logprobs"] = [*(part.get("logprobs") or ()), *logprobs]
        return item

    def cut(self) -> None:
        """The stream has stopped: items that are not done are ``incomplete``, with the text so far."""
        for index in sorted(self.open):
            self.put(index)["status"] = "incomplete"
        self.open.clear()


def _append(holder: dict[str, Any], member: str, events: list[Any]) -> None:
    deltas = [event.get("delta") for event in events]
    before = holder.get(member)
    holder[member] = "".join(text for text in (before, *deltas) if isinstance(text, str))


def _part(item: Item, holder: str, index: Any, empty: Part) -> Part:
    """The part that deltas write to. Some servers (vLLM) do not announce the parts of a reasoning item."""
    parts: list[Part] = item.get(holder) or []
    item[holder] = parts
    if isinstance(index, int) and 0 <= index < len(parts):
        return parts[index]
    parts.append(dict(empty))
    return parts[-1]


def fold(created: Document, log: Iterable[Mapping[str, Any]]) -> Document:
    """Return the `created` document with the output of the events in its `log`. Items that are not done become `incomplete`."""
    output = Output([])
    for event in log:
        output.take(event)
    output.cut()
    return {**created, "output": output.items}


def end(document: Document, number: int) -> Event:
    """Return the terminal event of a run that ended with `document`."""
    emitter = Emitter(number)
    emitter.emit(terminal_type(document), response=whole(document))
    return emitter.drain()[0]
