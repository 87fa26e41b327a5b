"""Rebuild items from the events of a stream that may have stopped anywhere, and continue an interrupted turn.

Output that the client has seen cannot be withdrawn, so the next answer must continue it. A `Phase` describes what the client
has seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from ...errors import UpstreamError
from .. import origin, sse
from ..chat.chunks import malformed
from ..tool_kinds.form import Role
from ..tool_kinds.registry import TOOL_ITEMS, is_finished
from ..types import Event, Item, Part
from .events import ADDED, DONE, PARTS, TARGETS, TEXTS, EventTarget

# Types of events after which the server may have executed a call.
_RUNNING = re.compile(r"\.(done|searching|interpreting)\Z")
_BETWEEN_TURNS = frozenset({"mcp_list_tools", "compaction"})
# Members with the results of calls that the server executed, by item type. Events contain these members only on request. Those
# of file searches are not listed, because they can be found again.
_HIDDEN = {"web_search_call": "results", "code_interpreter_call": "outputs"}

MAX_OPEN = 1000
"""Maximum number of open items, and of the parts of an item. Events without an index are compared with all of them."""


class OutputReplay:
    """Rebuilds the items of a response from its events. Deltas are collected, and joined only when a text is needed."""

    def __init__(self, items: list[Item]) -> None:
        """`items` are the complete items before the first event. New items are appended to this list."""
        self.items = items
        self.open: dict[int, dict[tuple[str, int], bool]] = {}
        """Maps the index of an open item to the stems and indices of its parts and texts, and to whether they are open."""
        self._deltas: dict[int, dict[tuple[str, int], list[Mapping[str, Any]]]] = {}
        """Maps the index of an open item to the deltas of its texts that have not been joined."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Apply an event to the items.

        Raises `UpstreamError` if a part or its list is malformed, if an item would have more than `MAX_OPEN` parts, or if more
        than `MAX_OPEN` items would be open.
        """
        kind, place = event["type"], event.get("output_index")
        if kind == ADDED:
            if len(self.open) >= MAX_OPEN:
                raise UpstreamError(f"The upstream began more than {MAX_OPEN} items at once.")
            self.open[len(self.items)], self._deltas[len(self.items)] = {}, {}
            self.items.append(event["item"])
        elif not isinstance(place, int) or place not in self.open:
            return
        elif kind == DONE:
            self.items[place] = event["item"]
            del self.open[place], self._deltas[place]
        else:
            self._grow(place, event)

    def _grow(self, place: int, event: Mapping[str, Any]) -> None:
        stem, _, step = event["type"].rpartition(".")
        target = TARGETS.get(stem)
        if target is None:
            return
        index = event.get(target.index, 0) if target.holder else 0
        begun, deltas = self.open[place], self._deltas[place]
        if step == "delta" and target.member:
            deltas.setdefault((stem, index), []).append(event)
            begun.setdefault((stem, index), True)
        elif step == "added" and stem == PARTS.get(target.holder):
            self._add_part(place, target, index, event.get("part"))
        elif step == "added" and isinstance(annotation := event.get("annotation"), dict):
            self._annotate(self.items[place], index, annotation)
        elif step == "done":
            begun[stem, index] = False
            if not target.holder and isinstance(text := event.get(target.member), str):
                deltas.pop((stem, index), None)
                self.items[place][target.member] = text  # even without deltas

    def _add_part(self, place: int, target: EventTarget, index: Any, part: Any) -> None:
        item, begun = self.items[place], self.open[place]
        parts = item.get(target.holder) or []
        if not (isinstance(part, dict) and isinstance(parts, list)):
            malformed("part")
        if len(parts) >= MAX_OPEN:
            raise UpstreamError(f"The upstream sent an item of more than {MAX_OPEN} parts.")
        item[target.holder] = [*parts, dict(part)]
        kinds = (text for text in TEXTS.values() if text.holder == target.holder)
        texts = (text.stem for text in kinds if text.part == part.get("type"))
        begun |= dict.fromkeys(((one, index) for one in (*texts, target.stem)), True)

    def _annotate(self, item: Item, index: Any, annotation: dict[str, Any]) -> None:
        part = _part(item, TEXTS["output_text"], index)
        annotations = part.setdefault("annotations", [])
        if isinstance(annotations, list) and len(annotations) < MAX_OPEN:
            annotations.append(annotation)

    def put(self, place: int) -> Item:
        """Add the collected deltas to the item at `place`, and return the item."""
        item, deltas = self.items[place], self._deltas.get(place, {})
        for (stem, index), events in deltas.items():
            target = TARGETS[stem]
            holder = _part(item, target, index) if target.part else item
            texts = (holder.get(target.member), *(event.get("delta") for event in events))
            holder[target.member] = "".join(text for text in texts if isinstance(text, str))
            logprobs = [one for each in (holder, *events) for one in _logprobs(each)] if target.part else []
            if logprobs:
                holder["logprobs"] = logprobs
        deltas.clear()
        return item

    def text_size(self) -> int:
        """Return the number of characters in the items, and in the deltas that have not been joined."""
        deltas = (event.get("delta") for each in self._deltas.values() for events in each.values() for event in events)
        members = (value for item in self.items for holder in (item, *parts_of(item)) for value in holder.values())
        return sum(len(text) for text in (*deltas, *members) if isinstance(text, str))

    def join(self) -> None:
        """Join the collected deltas of each open item, so that their events can be freed."""
        for place in self.open:
            self.put(place)

    def cut(self) -> None:
        """Close all open items as `incomplete`, with the text so far."""
        for place in self.open:
            self.put(place)["status"] = "incomplete"
        self.open.clear()
        self._deltas.clear()


def _logprobs(holder: Mapping[str, Any]) -> list[Any]:
    logprobs = holder.get("logprobs")
    return logprobs if isinstance(logprobs, list) else []


def _part(item: Item, kind: EventTarget, index: Any) -> Part:
    """Return the part that deltas extend. If it is malformed, or was not announced (vLLM), add a new part and return that."""
    given = item.get(kind.holder)
    parts: list[Part] = given if isinstance(given, list) else []
    item[kind.holder] = parts
    if isinstance(index, int) and 0 <= index < len(parts) and isinstance(parts[index], dict):
        return parts[index]
    parts.append(kind.new_part())
    return parts[-1]


UNKNOWN_RESULT = "It is not known whether the call was made: the response ended before there was a result."


class LogReplay(OutputReplay):
    """The output of a background response, rebuilt from the events in its log."""

    def __init__(self) -> None:
        super().__init__([])
        self.next_number = 0
        self.size = 0  # in bytes
        self.runs = False  # whether the server may have executed the call that was added last

    def end_running_call(self) -> list[Event]:
        """End an open MCP call that may have been made, with an error that says so. Return the events that follow the log."""
        last = len(self.items) - 1
        if not (self.runs and last in self.open and self.items[last]["type"] == "mcp_call"):
            return []
        item = self.put(last)
        text = {"type": "text", "text": UNKNOWN_RESULT}
        item.update(status="failed", error={"type": "mcp_tool_execution_error", "content": [text]})
        del self.open[last]
        kind, number = "response.mcp_call.failed", self.next_number
        failed = {"type": kind, "item_id": item["id"], "output_index": last, "sequence_number": number}
        done = {"type": DONE, "output_index": last, "item": item, "sequence_number": number + 1}
        return [Event(kind, failed), Event(DONE, done)]

    def read(self, frames: bytes) -> None:
        """Apply the next events of the log. `frames` contains them in the form of `sse.encode`."""
        for event in sse.decode(frames):
            self.take(event)
            self.runs = event["type"] != ADDED and (self.runs or bool(_RUNNING.search(event["type"])))
            self.next_number += 1
        self.size += len(frames)


class Takeover:
    """The output of a lost or stopped worker, and whether another worker can continue this output.

    An item is closed when the next item begins or the turn ends. Therefore, the turn is over if it has items, none is open, and
    the last one is not an interrupted call or reasoning, after which the answer may be missing.
    """

    def __init__(self, log: LogReplay) -> None:
        """`log` must have read all events so far."""
        self.items = items = log.items
        open_items = [log.put(place) for place in log.open]
        self.open = last = open_items[-1] if open_items else None
        self.turn_begins_at = 1 + max((place for place, item in enumerate(items) if _ends_turn(item)), default=-1)
        self.calls = sum(_is_served(item) and is_finished(item) for item in items)
        """Number of server-side calls that have ended."""
        turn = [item for item in items[self.turn_begins_at :] if not origin.is_kept(item)]
        self.phase = phase_of(turn, last if last is not None and _is_served(last) and not log.runs else None)
        if len(open_items) > 1 or any(map(hides_result, items)):
            self.phase = Phase.FIXED
        is_call_cut = bool(turn) and turn[-1].get("status") == "incomplete" and turn[-1]["type"] != "message"
        is_unanswered = not turn or turn[-1]["type"] == "reasoning" or is_call_cut
        self.is_over = last is None and not is_unanswered
        """Whether the last turn is complete and no further turn follows."""

    @property
    def can_go_on(self) -> bool:
        return self.is_over or self.phase is not Phase.FIXED

    @property
    def is_charged(self) -> bool:
        """Whether earlier turns have used tokens. The log does not contain their usage."""
        return any(item["type"] != "mcp_list_tools" for item in self.items[: self.turn_begins_at])

    def ids_used(self, stem: str) -> int:
        """Return the first unused number for ids of the form `<prefix>_<stem><number>`."""
        ids = [str(item.get(name)) for item in self.items for name in ("id", "call_id")]
        found = (re.fullmatch(rf"[a-z]+_{re.escape(stem)}(\d+)", one) for one in ids)
        return max((int(match[1]) + 1 for match in found if match), default=0)


def _is_served(item: Item) -> bool:
    kind = TOOL_ITEMS.get(item["type"])
    return kind is not None and kind.role is Role.SERVED_CALL


def _ends_turn(item: Item) -> bool:
    return item["type"] in _BETWEEN_TURNS or (_is_served(item) and item.get("status") in ("completed", "failed"))


def hides_result(item: Item) -> bool:
    """Return whether the item of a finished call lacks the result that the model saw, because `include` does not list it."""
    return item.get("status") == "completed" and item["type"] in _HIDDEN and item.get(_HIDDEN[item["type"]]) is None


# -- an interrupted turn -------------------------------------------------------------------------------------------------


class Phase(StrEnum):
    """The last kind of output of a turn that the client has received."""

    NOTHING = "nothing"
    REASONING = "reasoning"
    CALL = "call"  # a call for the server that has not been executed
    TEXT = "text"  # one message with one text, perhaps followed by a call for the server that has not been executed
    FIXED = "fixed"  # output that no other answer can continue: a call for the client, a refusal, several messages


def phase_of(items: Sequence[Item], served: Item | None) -> Phase:
    """Return the phase of a turn with these `items`. `served` is an open call for the server that was not executed, or None."""
    phase = Phase.NOTHING
    for item in items:
        kind, has_text = item["type"], phase is Phase.TEXT
        if kind == "reasoning" and not has_text:
            seen = Phase.REASONING
        elif kind == "message" and not has_text and _is_one_text(item.get("content")):
            seen = Phase.TEXT
        elif kind not in ("message", "reasoning") and (item is served or item.get("status") == "incomplete"):
            seen = Phase.CALL
        else:
            return Phase.FIXED
        phase = max(phase, seen, key=list(Phase).index)
    return phase


def _is_one_text(content: Any) -> bool:
    match content:
        case [{"type": "output_text"}]:
            return True
    return False  # also if an upstream's own Responses API sent malformed content


def parts_of(item: Item) -> Iterator[Part]:
    """Yield the parts of a message or a reasoning item."""
    for holder in ("content", "summary"):
        parts = item.get(holder)
        yield from (part for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ()
