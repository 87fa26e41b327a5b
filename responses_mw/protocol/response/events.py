"""Events, and the one place that numbers them.

An event is a type and its data. It does not depend on the transport: `protocol.sse` encodes server-sent events,
`asgi.websocket` WebSocket messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from ..types import Document

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})


def terminal_type(document: Document) -> str:
    """Return the type of the event that ends a run with this document. A cancelled run ends in `response.failed`."""
    event = f"response.{document['status']}"
    return event if event in TERMINAL else "response.failed"


@dataclass(slots=True)  # created for each token, in half the time of a named tuple
class Event:
    """One event of a response's stream. Neither it nor its data may be changed once it exists."""

    type: str
    data: dict[str, Any]
    """All members, including `type` and `sequence_number`."""


class DeltaTemplate:
    """The members of a part's delta events, which differ only in the text and the number."""

    __slots__ = ("members", "type")

    def __init__(self, event_type: str, place: dict[str, Any], after: dict[str, Any] | None = None) -> None:
        """`place` holds the item id and the indices; the members `after` follow the text."""
        self.type = event_type
        self.members = {"type": event_type, **place, "delta": "", **(after or {}), "sequence_number": 0}


class Emitter:
    """Collects the events of a response in order and numbers them without gaps."""

    __slots__ = ("_events", "next_number")

    def __init__(self, next_number: int = 0) -> None:
        self.next_number = next_number
        self._events: list[Event] = []

    def emit(self, /, *event_types: str, **members: Any) -> None:
        """Add an event of each type. Mutable members are copied, because the run keeps changing the document and its items."""
        for name, value in members.items():
            if isinstance(value, (dict, list)):
                members[name] = _copy(value)
        for event_type in event_types:
            self._events.append(Event(event_type, {"type": event_type, **members, "sequence_number": self.next_number}))
            self.next_number += 1

    def delta(self, template: DeltaTemplate, text: str) -> None:
        """Add a delta event. This runs for every token."""
        data = template.members.copy()
        data["delta"] = text
        data["sequence_number"] = number = self.next_number
        self.next_number = number + 1
        self._events.append(Event(template.type, data))

    def drain(self) -> list[Event]:
        """Return the events added since the last call."""
        events, self._events = self._events, []
        return events


class NullEmitter(Emitter):
    """Emits only the events that hold the document, without numbers or copies."""

    __slots__ = ()

    def emit(self, /, *event_types: str, **members: Any) -> None:
        if "response" in members:
            self._events.append(Event(event_types[-1], members))

    def delta(self, template: DeltaTemplate, text: str) -> None:
        pass


def _copy(value: Any) -> Any:
    """Copy a JSON value deeply."""
    return orjson.loads(orjson.dumps(value))
