"""Convert the events of a stream, which may have stopped anywhere, to items, and items to events.

The type of an event says what it adds to (OpenAI reference, "Streaming events"). Unknown events add nothing: the item's
``done`` event replaces the whole item.

`OutputReplay` makes the items of a run that lost its worker or was cancelled, from the log of its events. `events_of` makes
the stream of a finished response.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..request.checks import malformed
from ..types import Document, Item, Part
from .document import whole
from .events import Emitter, Event, terminal_type
from .text import OPEN_REASONING_TEXT, OUTPUT_TEXT, REASONING_TEXT, REFUSAL, SUMMARY_TEXT, TextKind

ADDED = "response.output_item.added"
DONE = "response.output_item.done"


class EventTarget(NamedTuple):
    """What the events of one stem (``response.output_text`` of ``response.output_text.delta``) add to."""

    item: str | None  # type of the item, if there is only one
    member: str = ""  # what deltas add to: a member of the part, or of an item without parts
    holder: str | None = None  # the member of the item that lists the parts
    text: TextKind | None = None  # the kind of part, for text
    position: str | None = None  # the member of the events with the index of the part


TEXTS = {f"response.{kind.events}": kind for kind in (OUTPUT_TEXT, REFUSAL, REASONING_TEXT, OPEN_REASONING_TEXT, SUMMARY_TEXT)}
PARTS = {"content": "response.content_part", "summary": "response.reasoning_summary_part"}
"""Stems of the events of whole parts, by the member that lists the parts."""
TARGETS: dict[str, EventTarget] = {
    **{stem: EventTarget(kind.item, kind.text, kind.parts, kind, kind.index) for stem, kind in TEXTS.items()},
    **{stem: EventTarget(None, holder=holder, position=f"{holder}_index") for holder, stem in PARTS.items()},
    "response.output_text.annotation": EventTarget("message", holder="content", position="content_index"),
    "response.function_call_arguments": EventTarget("function_call", "arguments"),
    "response.mcp_call_arguments": EventTarget("mcp_call", "arguments"),
    "response.custom_tool_call_input": EventTarget("custom_tool_call", "input"),
    "response.code_interpreter_call_code": EventTarget("code_interpreter_call", "code"),
}


STEM_OF_CALL = {target.item: stem for stem, target in TARGETS.items() if target.member and target.holder is None}


def ending(item: Item, stem: str, index: int = 0) -> dict[str, Any]:
    """The members of the event that ends a text or a part of an item."""
    target = TARGETS[stem]
    if target.holder is None:
        named = {"name": item.get("name") or ""} if item["type"] == "function_call" else {}
        return {target.member: item.get(target.member) or "", **named}
    part = item[target.holder][index]
    if target.text is None:
        return {"part": part}
    return {target.member: part.get(target.member) or "", **({"logprobs": part["logprobs"]} if "logprobs" in part else {})}


class OutputReplay:
    """Builds ``items`` from events. Deltas are collected in lists, which are joined only when a text is needed."""

    __slots__ = ("_pieces", "items", "open")

    def __init__(self, items: list[Item]) -> None:
        """``items`` precede the first event and are all done."""
        self.items = items
        self.open: set[int] = set()
        """The places of the items that are not done."""
        self._pieces: dict[tuple[int, str, str], list[Any]] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """Take any event of a response. Raise ``UpstreamError`` for a part that is not an object."""
        kind, place = event["type"], event.get("output_index")
        if kind == ADDED:
            self.open.add(len(self.items))
            self.items.append(event["item"])
        elif not isinstance(place, int) or place not in self.open:
            return
        elif kind == DONE:
            self._done(place, event["item"])
        else:
            self._grow(place, event)

    def _done(self, place: int, item: Item) -> None:
        self.items[place] = item
        self.open.discard(place)
        for key in [key for key in self._pieces if key[0] == place]:
            del self._pieces[key]

    def _grow(self, place: int, event: Mapping[str, Any]) -> None:
        stem, _, step = event["type"].rpartition(".")
        target = TARGETS.get(stem)
        if target is None:
            return
        if step == "delta" and target.member:
            self._pieces.setdefault((place, stem, str(event.get(target.position or "", 0))), []).append(event)
        elif step == "added" and target.holder and stem == PARTS[target.holder]:
            part = event.get("part")
            if not isinstance(part, dict):
                malformed("part")
            item = self.items[place]
            item[target.holder] = [*(item.get(target.holder) or ()), dict(part)]

    def put(self, place: int) -> Item:
        """Add the text that has arrived to the item at ``place``, and return the item."""
        item = self.items[place]
        for key in [key for key in self._pieces if key[0] == place]:
            events, target = self._pieces.pop(key), TARGETS[key[1]]
            if target.text is None:
                _append(item, target.member, events)
                continue
            part = _part(item, target.text, events[0].get(target.position, 0))
            _append(part, target.member, events)
            logprobs = [one for event in events for one in event.get("logprobs") or ()]
            if logprobs:
                part["logprobs"] = [*(part.get("logprobs") or ()), *logprobs]
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


def _append(holder: dict[str, Any], member: str, events: list[Any]) -> None:
    deltas = [event.get("delta") for event in events]
    before = holder.get(member)
    holder[member] = "".join(text for text in (before, *deltas) if isinstance(text, str))


def _part(item: Item, kind: TextKind, index: Any) -> Part:
    """Return the part that deltas add to. Add it if it was not announced, as in reasoning items of vLLM."""
    parts: list[Part] = item.get(kind.parts) or []
    item[kind.parts] = parts
    if isinstance(index, int) and 0 <= index < len(parts):
        return parts[index]
    parts.append(kind.new_part())
    return parts[-1]


def end(document: Document, number: int) -> Event:
    """Return the terminal event of a run that ended with `document`."""
    emitter = Emitter(number)
    emitter.emit(terminal_type(document), response=whole(document))
    return emitter.drain()[0]


# -- from items to events ----------------------------------------------------------------------------------------------

_KINDS = {kind.part: kind for kind in (OUTPUT_TEXT, REFUSAL, REASONING_TEXT, SUMMARY_TEXT)}
_OPEN_KINDS = {**_KINDS, OPEN_REASONING_TEXT.part: OPEN_REASONING_TEXT}

# Members of calls that are set when the call has been executed.
_RESULTS = ("output", "outputs", "error")
# Members that a response gets at its end.
_UNFINISHED: dict[str, Any] = {
    "status": "in_progress",
    "output": [],
    "usage": None,
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
}


def events_of(document: Document, include: frozenset[str] = frozenset(), *, open_reasoning: bool = False) -> list[Event]:
    """Return the events of a finished response, from ``response.created`` to its terminal event.

    With ``open_reasoning``, reasoning events have the names of the Open Responses specification.
    """
    emitter = Emitter()
    begun = {name: _UNFINISHED.get(name, value) for name, value in document.items()}
    for event in ("response.created", "response.in_progress"):
        emitter.emit(event, response=whole(begun, include))
    kinds = _OPEN_KINDS if open_reasoning else _KINDS
    for index, item in enumerate(whole(document, include)["output"]):
        _add_item(emitter, index, item, kinds)
    emitter.emit(terminal_type(document), response=whole(document, include))
    return emitter.drain()


def _add_item(emitter: Emitter, index: int, item: Item, kinds: dict[str, TextKind]) -> None:
    begun, place = dict(item), {"item_id": item.get("id"), "output_index": index}
    if "status" in item:
        begun["status"] = "in_progress"
    lists = [name for name in ("summary", "content") if _are_texts(item.get(name), kinds)]
    begun |= {name: [] for name in lists}
    stem = STEM_OF_CALL.get(item["type"])
    member = TARGETS[stem].member if stem else ""
    if stem:
        begun |= {member: "", **{name: None for name in _RESULTS if name in item}}
    emitter.emit(ADDED, output_index=index, item=begun)
    for name in lists:
        for number, part in enumerate(item[name]):
            kind = kinds[part["type"]]
            _add_part(emitter, kind, {**place, kind.index: number}, part)
    if stem:
        if item[member]:
            emitter.emit(f"{stem}.delta", **place, delta=item[member])
        emitter.emit(f"{stem}.done", **place, **ending(item, stem))
    emitter.emit(DONE, output_index=index, item=item)


def _are_texts(parts: Any, kinds: dict[str, TextKind]) -> bool:
    return bool(parts) and isinstance(parts, list) and all(part.get("type") in kinds for part in parts)


def _add_part(emitter: Emitter, kind: TextKind, place: dict[str, Any], part: Part) -> None:
    text = part[kind.text]
    logprobs = {"logprobs": part.get("logprobs") or []} if kind.has_logprobs else {}
    empty = {name: value for name, value in kind.new_part().items() if name in part}
    emitter.emit(f"response.{kind.part_events}.added", **place, part=empty)
    if text:
        emitter.emit(f"response.{kind.events}.delta", **place, delta=text, **logprobs)
    for number, annotation in enumerate(part.get("annotations") or ()):
        members = {"annotation_index": number, "annotation": annotation}
        emitter.emit("response.output_text.annotation.added", **place, **members)
    emitter.emit(f"response.{kind.events}.done", **place, **{kind.text: text, **logprobs})
    emitter.emit(f"response.{kind.part_events}.done", **place, part=part)
