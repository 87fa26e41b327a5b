"""Create and number the events of a response, and define what they change in its items.

Events do not depend on the transport. The stem of an event is its type without the last part. For example, the stem of
`response.output_text.delta` is `response.output_text`. An `EventTarget` describes what the events with its stem change (OpenAI
reference, "Streaming events").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeGuard

import orjson

from ..parts import reasoning_text
from ..types import Document, Event, Item, Part

ADDED = "response.output_item.added"
DONE = "response.output_item.done"
TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})


@dataclass(frozen=True)
class EventTarget:
    """The target of the events `<stem>.added`, `<stem>.delta` and `<stem>.done`: a part, a text, or a text's annotations.

    A text is the text of a part, or the arguments, input or code of a call.
    """

    stem: str
    item: str = ""  # type of the item, or empty if items of several types have this target
    member: str = ""  # member that deltas extend, in the part or in an item without parts
    holder: str = ""  # member of the item that lists the parts
    part: str = ""  # type of the part, if the target is the text of a part

    @cached_property
    def index(self) -> str:
        """Name of the event field that contains the part's index, such as `content_index`."""
        return f"{self.holder}_index"

    def new_item(self) -> Item:
        """Return an empty message or reasoning item that is in progress, for the event `response.output_item.added`."""
        if self.item == "message":
            return {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
        # A reasoning item with only a summary has no `content`, because null would violate the specification's schema.
        return {"type": "reasoning", "status": "in_progress", "summary": [], self.holder: []}

    def new_part(self) -> Part:
        extra: dict[str, Any] = {"annotations": [], "logprobs": []} if self.part == "output_text" else {}
        return {"type": self.part, self.member: "", **extra}


OUTPUT_TEXT = EventTarget("response.output_text", "message", "text", "content", "output_text")
REFUSAL = EventTarget("response.refusal", "message", "refusal", "content", "refusal")
REASONING_TEXT = EventTarget("response.reasoning_text", "reasoning", "text", "content", "reasoning_text")
OPEN_REASONING_TEXT = replace(REASONING_TEXT, stem="response.reasoning")
"""Reasoning text with the event names of the Open Responses specification."""
SUMMARY_TEXT = EventTarget("response.reasoning_summary_text", "reasoning", "text", "summary", "summary_text")
TEXTS = {text.part: text for text in (OUTPUT_TEXT, REFUSAL, REASONING_TEXT, SUMMARY_TEXT)}
"""Maps each type of part to the target of its text."""
PARTS = {"summary": "response.reasoning_summary_part", "content": "response.content_part"}
"""Maps the member that contains the parts to the stem of the parts' events."""
CALL_TEXTS = {
    "function_call": EventTarget("response.function_call_arguments", "function_call", "arguments"),
    "mcp_call": EventTarget("response.mcp_call_arguments", "mcp_call", "arguments"),
    "custom_tool_call": EventTarget("response.custom_tool_call_input", "custom_tool_call", "input"),
    "code_interpreter_call": EventTarget("response.code_interpreter_call_code", "code_interpreter_call", "code"),
}
"""Maps the types of call items that have a streamed text to the target of this text."""
TARGETS = {
    target.stem: target
    for target in (
        *TEXTS.values(),
        OPEN_REASONING_TEXT,
        *CALL_TEXTS.values(),
        *(EventTarget(stem, holder=holder) for holder, stem in PARTS.items()),
        EventTarget("response.output_text.annotation", "message", holder="content"),
    )
}


def terminal_type(document: Document) -> str:
    """Return the type of the event that ends a run with this document. A cancelled run ends with `response.failed`."""
    event = f"response.{document['status']}"
    return event if event in TERMINAL else "response.failed"


class Emitter:
    """Collects the events of a response in order and numbers them without gaps."""

    __slots__ = ("_events", "next_number")

    def __init__(self) -> None:
        self.next_number = 0
        self._events: list[Event] = []

    def keeps(self, event_type: str) -> bool:
        """Return whether events of this type are kept. Others need not be emitted."""
        return True

    def emit(self, /, *event_types: str, **members: Any) -> None:
        """Add an event of each type. The `members` are copied, because the run keeps changing the document and its items."""
        for name, value in members.items():
            if isinstance(value, (dict, list)):
                members[name] = orjson.loads(orjson.dumps(value))
        for event_type in event_types:
            self._events.append(Event(event_type, {"type": event_type, **members, "sequence_number": self.next_number}))
            self.next_number += 1

    def delta(self, template: dict[str, Any], text: str) -> None:
        """Add a copy of the event `template` with this `text` and the next number. This runs for every token."""
        data = template.copy()
        data["delta"] = text
        data["sequence_number"] = number = self.next_number
        self.next_number = number + 1
        self._events.append(Event(template["type"], data))

    def drain(self) -> list[Event]:
        """Return the events added since `drain` was last called."""
        events, self._events = self._events, []
        return events


class NullEmitter(Emitter):
    """Emits only the terminal event. Its data has no type and no number, and refers to the document itself.

    `keeps` must be asked before an event that contains the document is emitted.
    """

    __slots__ = ()

    def keeps(self, event_type: str) -> bool:
        return event_type in TERMINAL

    def emit(self, /, *event_types: str, **members: Any) -> None:
        if "response" in members:
            self._events.append(Event(event_types[-1], members))

    def delta(self, template: dict[str, Any], text: str) -> None:
        pass


# -- whole items -------------------------------------------------------------------------------------------------------

# Members of call items that are set once the call has been executed.
_RESULTS = ("output", "outputs", "error")
# Members that are set when a response ends, with their values until then.
_UNFINISHED: dict[str, Any] = {
    "status": "in_progress",
    "output": [],
    "output_text": "",
    **dict.fromkeys(("usage", "completed_at", "error", "incomplete_details")),
}


def ending(holder: dict[str, Any], target: EventTarget) -> dict[str, Any]:
    """Return the members of the `done` event of a text or a part. `holder` is the part, or an item without parts."""
    if not target.member:
        return {"part": holder}
    named = {"name": holder.get("name") or ""} if target.item == "function_call" else {}
    return {**named, target.member: holder.get(target.member) or "", **_logprobs(target, holder)}


def emit_part_done(emitter: Emitter, kind: EventTarget, place: dict[str, Any], part: Part) -> None:
    """Emit the `done` events of a text and its part. `place` holds the part's indices."""
    emitter.emit(f"{kind.stem}.done", **place, **ending(part, kind))
    emitter.emit(f"{PARTS[kind.holder]}.done", **place, part=part)


def _logprobs(kind: EventTarget, part: Part) -> dict[str, Any]:
    return {"logprobs": part.get("logprobs") or []} if kind is OUTPUT_TEXT else {}


def emit_done(emitter: Emitter, item: Item, output_index: int) -> None:
    """Emit the `done` event of an item whose parts are done.

    For a call, first emit the `done` event of its text (see `CALL_TEXTS`), unless the text is malformed.
    """
    call = CALL_TEXTS.get(item["type"])
    if call and isinstance(item.get(call.member) or "", str):
        emitter.emit(f"{call.stem}.done", item_id=item["id"], output_index=output_index, **ending(item, call))
    emitter.emit(DONE, output_index=output_index, item=item)


def events_of(document: Document, *, open_reasoning: bool = False) -> list[Event]:
    """Return all events of a finished response. `document` must be the response as clients see it (`document.whole`)."""
    emitter = Emitter()
    begun = {name: _UNFINISHED.get(name, value) for name, value in document.items()}
    emitter.emit("response.created", "response.in_progress", response=begun)
    for index, item in enumerate(document["output"]):
        emit_item(emitter, index, item, open_reasoning=open_reasoning)
    emitter.emit(terminal_type(document), response=document)
    return emitter.drain()


def emit_item(emitter: Emitter, index: int, item: Item, *, open_reasoning: bool) -> None:
    """Emit the events of a complete item. Malformed texts have no events of their own."""
    begun = {**item, **({"status": "in_progress"} if "status" in item else {}), **{name: [] for name in _lists_of(item)}}
    if call := CALL_TEXTS.get(item["type"]):
        begun |= {call.member: "", **{name: None for name in _RESULTS if name in item}}
    emitter.emit(ADDED, output_index=index, item=begun)
    emit_parts(emitter, index, item, open_reasoning=open_reasoning)
    if call and isinstance(text := item.get(call.member), str) and text:
        emitter.emit(f"{call.stem}.delta", item_id=item["id"], output_index=index, delta=text)
    emit_done(emitter, item, index)


def emit_parts(emitter: Emitter, index: int, item: Item, *, open_reasoning: bool) -> None:
    """Emit the events of the parts of a complete item. Each text that is not empty becomes one delta."""
    kinds = {**TEXTS, REASONING_TEXT.part: OPEN_REASONING_TEXT} if open_reasoning else TEXTS
    for name in _lists_of(item):
        for number, part in enumerate(item[name]):
            kind = kinds[part["type"]]
            _emit_part(emitter, kind, {"item_id": item["id"], "output_index": index, kind.index: number}, part)


def _lists_of(item: Item) -> list[str]:
    """Return the names of the members that consist of well-formed texts."""
    lists = {name: item.get(name) for name in PARTS}
    return [name for name, parts in lists.items() if isinstance(parts, list) and all(_is_text(part, name) for part in parts)]


def _is_text(part: Any, holder: str) -> bool:
    kind = TEXTS.get(str(part.get("type"))) if isinstance(part, dict) else None
    if kind is None or kind.holder != holder:
        return False
    return isinstance(part.get(kind.member), str) and isinstance(part.get("annotations") or [], list)


def _emit_part(emitter: Emitter, kind: EventTarget, place: dict[str, Any], part: Part) -> None:
    empty = {name: value for name, value in kind.new_part().items() if name in part}
    emitter.emit(f"{PARTS[kind.holder]}.added", **place, part=empty)
    if part[kind.member]:
        emitter.emit(f"{kind.stem}.delta", **place, delta=part[kind.member], **_logprobs(kind, part))
    for number, annotation in enumerate(part.get("annotations") or ()):
        members = {"annotation_index": number, "annotation": annotation}
        emitter.emit("response.output_text.annotation.added", **place, **members)
    emit_part_done(emitter, kind, place, part)


# -- readable reasoning ----------------------------------------------------------------------------------------------------
# Servers of open models (vLLM, llama.cpp) accept `reasoning.summary`, but still send the reasoning as content. Many clients
# show only summaries. If the request asks for one, content therefore becomes a summary, as for Chat Completions. An item that
# has a summary is not changed.

_AS_SUMMARY = {
    **{f"{REASONING_TEXT.stem}.{step}": f"{SUMMARY_TEXT.stem}.{step}" for step in ("delta", "done")},
    **{f"{PARTS['content']}.{step}": f"{PARTS['summary']}.{step}" for step in ("added", "done")},
}


def with_summary(event: dict[str, Any]) -> dict[str, Any]:
    """Convert an event of the content of a reasoning item to one of its summary. Return other events unchanged."""
    kind, part = event["type"], event.get("part")
    if kind not in _AS_SUMMARY or not (kind.startswith(REASONING_TEXT.stem) or _is_reasoning(part)):
        return event
    event = {**event, "type": _AS_SUMMARY[kind]}
    if REASONING_TEXT.index in event:
        event[SUMMARY_TEXT.index] = event.pop(REASONING_TEXT.index)
    return {**event, "part": {**part, "type": SUMMARY_TEXT.part}} if _is_reasoning(part) else event


def summarized(item: Item) -> Item:
    """Return a reasoning item with its content as its summary. Return other items unchanged."""
    if item["type"] != "reasoning" or item.get("summary"):
        return item
    content = item.get("content") or []
    if not isinstance(content, list) or not all(map(_is_reasoning, content)):
        return item
    others = {name: value for name, value in item.items() if name != "content"}
    return {**others, "summary": [{**part, "type": SUMMARY_TEXT.part} for part in content]}


def _is_reasoning(part: Any) -> TypeGuard[Part]:
    return isinstance(part, dict) and part.get("type") == REASONING_TEXT.part


def readable(item: Item) -> Item:
    """Undo `summarized`: return a reasoning item with its summary as its content."""
    return {**item, "summary": [], "content": [{"type": REASONING_TEXT.part, "text": reasoning_text(item)}]}
