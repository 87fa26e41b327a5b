"""From a log of events back to the document: what a run that lost its worker, or was cancelled, has come to.

The events that add to an item tell which of its members they write to; what is not known here adds nothing, and the item's
``done`` brings it whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from .document import whole
from .events import Emitter, Event, terminal_type
from .types import Document, Item

# Deltas: the list in the item that holds the part, the event's index into it, and the member of the part.
_PARTS = {
    "response.output_text.delta": ("content", "content_index", "text"),
    "response.refusal.delta": ("content", "content_index", "refusal"),
    "response.reasoning_text.delta": ("content", "content_index", "text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_index", "text"),
}
# Deltas that write to a member of the item itself.
_MEMBERS = {
    "response.function_call_arguments.delta": "arguments",
    "response.mcp_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
    "response.code_interpreter_call_code.delta": "code",
}
_NEW_PARTS = {"response.content_part.added": "content", "response.reasoning_summary_part.added": "summary"}


def fold(created: Document, log: Iterable[bytes]) -> Document:
    """The document that was ``created`` with what the batches of its ``log`` (raw server-sent events) brought since. An item
    that was not done is ``incomplete``."""
    output: list[Item] = []
    pieces: dict[tuple[int, str, int, str], list[str]] = {}
    for batch in log:
        for frame in batch.split(b"\n\n"):
            if frame:
                _take(orjson.loads(frame.partition(b"\ndata: ")[2]), output, pieces)
    for (index, parts, part_index, member), texts in pieces.items():
        place = output[index][parts][part_index] if parts else output[index]
        place[member] = (place.get(member) or "") + "".join(texts)
    for item in output:
        if item.get("status") not in ("completed", "incomplete", "failed"):
            item["status"] = "incomplete"
    return {**created, "output": output}


def _take(event: dict[str, Any], output: list[Item], pieces: dict[tuple[int, str, int, str], list[str]]) -> None:
    kind, index = event["type"], event.get("output_index", -1)
    if kind == "response.output_item.added":
        output.append(event["item"])
    elif kind == "response.output_item.done":
        output[index] = event["item"]
        for place in [place for place in pieces if place[0] == index]:
            del pieces[place]
    elif kind in _NEW_PARTS:
        output[index][_NEW_PARTS[kind]].append(event["part"])
    elif kind in _PARTS:
        parts, part_index, member = _PARTS[kind]
        pieces.setdefault((index, parts, event[part_index], member), []).append(event["delta"])
        if event.get("logprobs"):
            output[index][parts][event[part_index]].setdefault("logprobs", []).extend(event["logprobs"])
    elif kind in _MEMBERS:
        pieces.setdefault((index, "", 0, _MEMBERS[kind]), []).append(event["delta"])


def end(document: Document, number: int) -> Event:
    """The terminal event, with that number, of a run that ended with ``document``."""
    emitter = Emitter(number)
    emitter.emit(terminal_type(document), response=whole(document))
    return emitter.drain()[0]
