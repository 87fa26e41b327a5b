"""Events, and the one place that numbers them."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import orjson

from ..types import Document

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})


def terminal_type(document: Document) -> str:
    """The type of the event that ends a run with that document; a cancelled one failed."""
    event = f"response.{document['status']}"
    return event if event in TERMINAL else "response.failed"


class Event(NamedTuple):
    """One event of a response's stream. It is encoded when it is made: the document goes on changing, the event must not."""

    type: str
    frame: bytes
    """The whole server-sent event; empty where nobody reads it (``NullEmitter``)."""
    response: Document | None = None
    """The document that the event carries, where it carries one."""

    @property
    def json(self) -> bytes:
        """The event's data."""
        return self.frame[len(_head(self.type)) : -len(_END)]


_event = partial(tuple.__new__, Event)  # as ``Event(...)``, for a third of the cost
_END = b"\n\n"


def _head(event_type: str) -> bytes:
    return f"event: {event_type}\ndata: ".encode()


class DeltaTemplate:
    """A delta event that is prepared but for the text and the number: what a token costs is what is spent here."""

    __slots__ = ("head", "tail", "type")

    def __init__(self, event_type: str, place: dict[str, Any], extra: bytes = b"") -> None:
        """``place`` tells where the delta belongs (item id, indices); ``extra`` is JSON that stands after the text."""
        self.type = event_type
        self.head = _head(event_type) + orjson.dumps({"type": event_type, **place})[:-1] + b',"delta":'
        self.tail = extra + b',"sequence_number":%d}' + _END


class Emitter:
    """Collects the events of a response in order and gives each its ``sequence_number``: from 0, contiguous."""

    __slots__ = ("_events", "next_number")

    def __init__(self, next_number: int = 0) -> None:
        self.next_number = next_number
        self._events: list[Event] = []

    def emit(self, event_type: str, /, **members: Any) -> None:
        body = orjson.dumps({"type": event_type, **members, "sequence_number": self._number()})
        self._events.append(Event(event_type, _head(event_type) + body + _END, members.get("response")))

    def delta(self, template: DeltaTemplate, text: str) -> None:
        frame = template.head + orjson.dumps(text) + template.tail % self._number()
        self._events.append(_event((template.type, frame, None)))

    def _number(self) -> int:
        number = self.next_number
        self.next_number = number + 1
        return number

    def drain(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


class NullEmitter(Emitter):
    """Emits events that nobody reads: they are not encoded, and tell no more than their type and document."""

    __slots__ = ()

    def emit(self, event_type: str, /, **members: Any) -> None:
        self._events.append(Event(event_type, b"", members.get("response")))

    def delta(self, template: DeltaTemplate, text: str) -> None:
        self._events.append(_event((template.type, b"", None)))
