"""A stream of events for a response that has finished: the same items, each text as one delta."""

from __future__ import annotations

from typing import Any

from ..types import Document, Item, Part
from .document import whole
from .events import Emitter, Event, terminal_type
from .replay import ADDED, DONE
from .text import OPEN_REASONING_TEXT, OUTPUT_TEXT, REASONING_TEXT, REFUSAL, SUMMARY_TEXT, TextKind

_KINDS = {kind.part: kind for kind in (OUTPUT_TEXT, REFUSAL, REASONING_TEXT, SUMMARY_TEXT)}
_OPEN_KINDS = {**_KINDS, OPEN_REASONING_TEXT.part: OPEN_REASONING_TEXT}

# By type of item: the member that grows by deltas, the name of its events, and the members of the event that ends it.
_MEMBERS = {
    "function_call": ("arguments", "function_call_arguments", ("name", "arguments")),
    "mcp_call": ("arguments", "mcp_call_arguments", ("arguments",)),
    "custom_tool_call": ("input", "custom_tool_call_input", ("input",)),
    "code_interpreter_call": ("code", "code_interpreter_call_code", ("code",)),
}
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

    ``open_reasoning``: reasoning events have the names of the Open Responses specification.
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
    member, events, done = _MEMBERS.get(item["type"], ("", "", ()))
    if member:
        begun |= {member: "", **{name: None for name in _RESULTS if name in item}}
    emitter.emit(ADDED, output_index=index, item=begun)
    for name in lists:
        for number, part in enumerate(item[name]):
            kind = kinds[part["type"]]
            _add_part(emitter, kind, {**place, kind.index: number}, part)
    if member:
        if item[member]:
            emitter.emit(f"response.{events}.delta", **place, delta=item[member])
        emitter.emit(f"response.{events}.done", **place, **{name: item[name] for name in done})
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
