"""Capture the requests to the upstream for a response, and the upstream's answers.

Only responses that fail, or whose request asks for a capture, are captured. A capture has the requests and errors of the turns.
If the request asked for it, it also has the bytes of the answers and the resulting events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from ..redaction import redacted
from .collector import Collector

HEADER: Final = "x-responses-capture"
"""The request header that asks for a capture, and the response header that tells whether one is made."""
MAX_TURNS: Final = 20
MAX_ANSWER: Final = 128 * 1024
"""Maximum number of bytes of an answer that are captured."""
MAX_TEXT: Final = 4000  # maximum length of a text in a captured request
MAX_VALUES: Final = 5000  # maximum number of values in a captured request
MAX_EVENT: Final = 2000  # maximum length of the JSON of an event
MAX_TOTAL: Final = 512 * 1024
"""Maximum number of characters of all requests, of bytes of all answers, and of characters of all events of a capture."""
MAX_PENDING: Final = 20  # maximum number of captures that wait for Redis


class CapturedEvent(NamedTuple):
    """An event, the number of its turn, and the number of lines of the answer that had arrived before it."""

    number: int
    turn: int
    lines: int
    seconds: float | None
    type: str
    data: str


@dataclass(slots=True)
class CapturedTurn:
    """A turn: its request, and its answer so far. At most `room` bytes of the answer are kept."""

    number: int
    sent: Mapping[str, Any]
    room: int = MAX_ANSWER
    began: float = field(default_factory=time.perf_counter)
    status: int | None = None
    answer: bytearray = field(default_factory=bytearray)
    lines: int = 0
    """Number of complete lines in `answer`."""
    is_cut: bool = False
    error: str = ""
    seconds: float | None = None

    def receive(self, data: bytes) -> None:
        """Add bytes of the answer."""
        kept = data[: self.room - len(self.answer)]
        self.answer += kept
        self.lines += kept.count(b"\n")
        self.is_cut = self.is_cut or len(data) > len(kept)

    def age(self) -> float:
        """Return the seconds since the turn began."""
        return round(time.perf_counter() - self.began, 4)

    def facts(self, characters: int) -> dict[str, Any]:
        """Return the turn as JSON, with up to this number of characters of its request."""
        return {
            "number": self.number,
            "sent": clipped(self.sent, characters),
            "status": self.status,
            "answer": redacted(self.answer.decode(errors="replace")),
            "is_cut": self.is_cut,
            "error": redacted(self.error)[:MAX_TEXT],
            "seconds": self.seconds,
        }


@dataclass(slots=True)
class Capture:
    """The turns of a response. If its request asked for a capture, `is_requested` is set, and `events` has its events."""

    is_requested: bool = False
    turns: list[CapturedTurn] = field(default_factory=list)
    events: list[CapturedEvent] = field(default_factory=list)
    left: int = MAX_TOTAL
    """Number of characters left for further events. Negative if events were omitted."""

    def begin(self, sent: Mapping[str, Any]) -> None:
        """Begin a turn. The first and the last turns are kept."""
        number = self.turns[-1].number + 1 if self.turns else 1
        if len(self.turns) == MAX_TURNS:
            del self.turns[MAX_TURNS // 2]
        used = sum(len(turn.answer) for turn in self.turns)
        self.turns.append(CapturedTurn(number, sent, max(0, min(MAX_ANSWER, MAX_TOTAL - used))))

    def end(self, error: str = "", status: int | None = None) -> None:
        """End the last turn. `error` and `status` are those of the upstream, if it failed."""
        if self.turns:
            turn = self.turns[-1]
            turn.error, turn.status = error or turn.error, status or turn.status
            turn.seconds = round(turn.age(), 3)

    def add_event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Add an event of the stream that the client gets."""
        if self.left < 0:
            return
        text = orjson.dumps(data)[: 4 * MAX_EVENT].decode(errors="ignore")
        text = text if len(text) <= MAX_EVENT else f"{text[:MAX_EVENT]}…"
        self.left -= len(text)
        turn = self.turns[-1] if self.turns else None
        number, lines, seconds = (turn.number, turn.lines, turn.age()) if turn is not None else (1, 0, None)
        self.events.append(CapturedEvent(data.get("sequence_number", -1), number, lines, seconds, kind, text))

    @property
    def open_turn(self) -> CapturedTurn | None:
        """The turn whose answer is to be captured, or None."""
        return self.turns[-1] if self.is_requested and self.turns else None

    def facts(self) -> dict[str, Any]:
        """Return the capture as JSON."""
        characters = MAX_TOTAL // max(1, len(self.turns))
        return {
            "turns": [turn.facts(characters) for turn in self.turns],
            "requested": self.is_requested,
            "events": [list(event) for event in self.events],
            "are_events_cut": self.left < 0,
        }


class CaptureCollector(Collector):
    """The captures of the process that have not been written to Redis yet."""

    def __init__(self) -> None:
        super().__init__(MAX_PENDING)

    def add(self, response_id: str, capture: Capture) -> None:
        """Add a capture. If many responses fail at once, drop some captures, because each one takes CPU time."""
        if capture.is_requested or not self.is_full:
            self._append(response_id, orjson.dumps(capture.facts()))


CAPTURES = CaptureCollector()


def clipped(value: Any, characters: int = MAX_TOTAL) -> Any:
    """Return a copy of a JSON value with long texts and names cut off.

    Values after the first `MAX_VALUES`, and texts after the first `characters` in total, are omitted.
    """
    values, room = MAX_VALUES, characters

    def shorten(text: str) -> str:
        nonlocal room
        length = min(MAX_TEXT, max(0, room))
        room -= min(len(text), length)
        return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"

    def clip(part: Any) -> Any:
        nonlocal values
        values -= 1
        if values < 0:
            return "…"
        if isinstance(part, str):
            return shorten(part)
        if isinstance(part, Mapping):
            return {shorten(str(name)): clip(member) for name, member in part.items() if values > 0}
        if isinstance(part, list | tuple):
            return [clip(member) for member in part if values > 0]
        return part

    return clip(value)
