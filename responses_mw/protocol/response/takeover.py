"""Restore the output of a background response from the log of its events, after its worker was lost or stopped.

The last item of a turn is closed by the next item or by the end of the turn. So if no item is open, the turn is over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .. import sse
from ..tool_kinds.registry import TOOL_ITEMS, is_finished
from ..types import Item
from .events import ADDED
from .replay import OutputReplay
from .seam import Phase, phase_of

_RUNNING = re.compile(r"\.(done|searching|interpreting)\Z")
"""Ends of the types of events after which a call may have been run."""
_BETWEEN_TURNS = frozenset({"mcp_list_tools", "compaction"})
_HIDDEN = {"web_search_call": "results", "code_interpreter_call": "outputs"}
"""Members without which the model cannot see the result of a call. Events contain them only on request."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """The output of another worker, and how a run can continue it."""

    items: list[Item]
    open: Item | None
    """The item that is not done: the last one, with the text so far."""
    turn_begins_at: int
    """Number of items before those of the last turn."""
    calls: int
    """Number of server-side calls that have ended."""
    phase: Phase
    """What the client has seen of the last turn."""
    is_over: bool
    """Whether the last turn is complete and no further turn follows."""

    @property
    def can_go_on(self) -> bool:
        return self.is_over or self.phase is not Phase.FIXED

    @property
    def is_charged(self) -> bool:
        """Whether there were earlier turns, whose usage is not in the log."""
        return any(item["type"] != "mcp_list_tools" for item in self.items[: self.turn_begins_at])

    def ids_used(self, stem: str) -> int:
        """Return one more than the highest number in the ids of the items, which are `<prefix>_<stem><number>`."""
        ids = [str(item.get(name)) for item in self.items for name in ("id", "call_id")]
        found = (re.fullmatch(rf"[a-z]+_{re.escape(stem)}(\d+)", one) for one in ids)
        return max((int(match[1]) + 1 for match in found if match), default=0)


class LogReplay(OutputReplay):
    """The output of a background response, built from the events of its log in order."""

    def __init__(self) -> None:
        super().__init__([])
        self.next_number = 0
        """Number of the next event in the log."""
        self.size = 0
        """Bytes of the events so far."""
        self.runs = False
        """Whether the call that was added last may have been run."""

    def read(self, frames: bytes) -> None:
        """Take the next events of the log."""
        for event in sse.decode(frames):
            self.take(event)
            self.runs = event["type"] != ADDED and (self.runs or bool(_RUNNING.search(event["type"])))
            self.next_number += 1
        self.size += len(frames)


def take_over(output: LogReplay) -> Takeover:
    """Return the state of the response after the events of its log."""
    items = output.items
    open_items = [output.put(place) for place in output.open]
    last = open_items[-1] if open_items else None
    begins_at = 1 + max((place for place, item in enumerate(items) if _ends_turn(item)), default=-1)
    phase = phase_of(items[begins_at:], last if last is not None and _is_served(last) and not output.runs else None)
    is_over = last is None and len(items) > begins_at and not _broke_off(items[-1])
    if len(open_items) > 1 or any(map(_hides_result, items)):
        phase = Phase.FIXED
    calls = sum(_is_served(item) and is_finished(item) for item in items)
    return Takeover(items, last, begins_at, calls, phase, is_over)


def _is_served(item: Item) -> bool:
    kind = TOOL_ITEMS.get(item["type"])
    return kind is not None and kind.role == "served_call"


def _ends_turn(item: Item) -> bool:
    return item["type"] in _BETWEEN_TURNS or (_is_served(item) and item.get("status") in ("completed", "failed"))


def _broke_off(item: Item) -> bool:
    return item.get("status") == "incomplete" and item["type"] != "message"


def _hides_result(item: Item) -> bool:
    return item.get("status") == "completed" and item["type"] in _HIDDEN and item.get(_HIDDEN[item["type"]]) is None
