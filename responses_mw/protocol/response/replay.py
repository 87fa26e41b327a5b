"""Convert the events of a stream, which may have stopped anywhere, to items.

Unknown events add nothing: the item's ``done`` event replaces the whole item.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..request.checks import malformed
from ..types import Document, Item, Part
from .document import whole
from .events import ADDED, DONE, PARTS, TARGETS, Emitter, Event, EventTarget, terminal_type


class OutputReplay:
    """Builds ``items`` from events. Deltas are collected in lists, which are joined only when a text is needed."""

    def __init__(self, items: list[Item]) -> None:
        """``items`` precede the first event and are all done."""
        self.items = items
        self.open: dict[int, dict[tuple[str, str], list[Mapping[str, Any]]]] = {}
        """The places of the items that are not done, with the deltas that are not joined, by stem and index of the part."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Take any event of a response. Raise ``UpstreamError`` for a part that is not an object."""
        kind, place = event["type"], event.get("output_index")
        if kind == ADDED:
            self.open[len(self.items)] = {}
            self.items.append(event["item"])
        elif not isinstance(place, int) or place not in self.open:
            return
        elif kind == DONE:
            self.items[place] = event["item"]
            del self.open[place]
        else:
            self._grow(place, event)

    def _grow(self, place: int, event: Mapping[str, Any]) -> None:
        stem, _, step = event["type"].rpartition(".")
        target = TARGETS.get(stem)
        if target is None:
            return
        if step == "delta" and target.member:
            self.open[place].setdefault((stem, str(event.get(target.index, 0))), []).append(event)
        elif step == "added" and stem == PARTS.get(target.holder):
            part = event.get("part")
            if not isinstance(part, dict):
                malformed("part")
            item = self.items[place]
            item[target.holder] = [*(item.get(target.holder) or ()), dict(part)]

    def put(self, place: int) -> Item:
        """Add the text that has arrived to the item at ``place``, and return the item."""
        item, deltas = self.items[place], self.open.get(place, {})
        for (stem, _), events in deltas.items():
            target = TARGETS[stem]
            if not target.part:
                _append(item, target.member, events)
                continue
            part = _part(item, target, events[0].get(target.index, 0))
            _append(part, target.member, events)
            logprobs = [one for event in events for one in event.get("logprobs") or ()]
            if logprobs:
                part["logprobs"] = [*(part.get("logprobs") or ()), *logprobs]
        deltas.clear()
        return item

    def join(self) -> None:
        """Add the text that has arrived to all items. Afterwards, no delta is in memory."""
        for place in self.open:
            self.put(place)

    def cut(self) -> None:
        """Mark items that are not done as ``incomplete``, with the text so far."""
        for place in self.open:
            self.put(place)["status"] = "incomplete"
        self.open.clear()


def _append(holder: dict[str, Any], member: str, events: list[Mapping[str, Any]]) -> None:
    texts = (holder.get(member), *(event.get("delta") for event in events))
    holder[member] = "".join(text for text in texts if isinstance(text, str))


def _part(item: Item, kind: EventTarget, index: Any) -> Part:
    """Return the part that deltas add to. Add it if it was not announced, as in reasoning items of vLLM."""
    parts: list[Part] = item.get(kind.holder) or []
    item[kind.holder] = parts
    if isinstance(index, int) and 0 <= index < len(parts):
        return parts[index]
    parts.append(kind.new_part())
    return parts[-1]


def end(document: Document, number: int) -> Event:
    """Return the terminal event of a run that ended with `document`."""
    emitter = Emitter(number)
    emitter.emit(terminal_type(document), response=whole(document))
    return emitter.drain()[0]
