"""Show turn by turn how a request was translated for the upstream, and how the upstream's answers became items."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import orjson

from ..protocol.types import Item
from ..state import Damaged, NewerRecord, State
from ..telemetry.captures import CapturedEvent
from .report import ResponseReport, texts_of
from .snippets import request_of
from .texts import pretty

MAX_STEPS = 400
"""Maximum number of steps of a turn on a page."""
_MAX_MARKS = 400


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a JSON text. Pieces with the same `mark` have the same text. Mark 0 is for text that occurs only once."""

    text: str
    mark: int = 0


class MadeEvent(NamedTuple):
    """An event for the client. `data` is its JSON without the type. The page folds it if it contains the whole response."""

    type: str
    data: list[Piece]
    has_response: bool


class Step(NamedTuple):
    """Data that arrived from the upstream together, and the resulting events. `seconds` is the time since the turn began."""

    seconds: float | None
    arrived: list[Piece]
    events: list[MadeEvent]


@dataclass(frozen=True, slots=True)
class TranslatedTurn:
    """A turn: the request to the upstream, and the status, error and bytes of the answer. `is_cut` if they are truncated.

    `steps` shows the bytes beside the resulting events. It is empty if no events were captured.
    """

    number: int
    sent: list[Piece]
    status: int | None
    error: str
    answer: list[Piece]
    is_cut: bool
    seconds: float | None
    steps: list[Step]


@dataclass(frozen=True, slots=True)
class Translation:
    """The client's request, the turns, and the output items. `turns` is empty if nothing was captured.

    `events` are the captured events, which are truncated if `are_events_cut` is set.
    """

    asked: list[Piece]
    turns: list[TranslatedTurn]
    made: list[Piece]
    events: list[CapturedEvent]
    are_events_cut: bool


async def translation(state: State, report: ResponseReport) -> Translation:
    """Return the translation of a response. Raises StateUnavailable if Redis fails."""
    try:
        captured = await state.captures.read(report.id) or {}
    except (Damaged, NewerRecord):
        captured = {}
    asked = pretty(request_of(report))
    document = report.document or {}
    made = pretty({name: document.get(name) for name in ("status", "output", "usage", "error") if document.get(name)})
    marks = list(_shared(report))
    events = [CapturedEvent(*event) for event in captured.get("events", ())]
    turns = [_turn(turn, events, marks) for turn in captured.get("turns", ())]
    return Translation(marked(asked, marks), turns, marked(made, marks), events, bool(captured.get("are_events_cut")))


def _turn(turn: dict[str, Any], events: Sequence[CapturedEvent], marks: Sequence[str]) -> TranslatedTurn:
    answer, number = str(turn.get("answer", "")), int(turn.get("number", 1))
    own = [event for event in events if event.turn == number]
    return TranslatedTurn(
        number,
        marked(pretty(turn.get("sent")), marks),
        turn.get("status"),
        str(turn.get("error", "")),
        [] if own else marked(answer, marks),
        bool(turn.get("is_cut")),
        turn.get("seconds"),
        _steps(answer, own, marks) if own else [],
    )


def _steps(answer: str, events: Sequence[CapturedEvent], marks: Sequence[str]) -> list[Step]:
    """Return the lines of an answer in order of arrival, each with the events that it led to."""
    lines, steps, at = answer.split("\n"), list[Step](), 0
    for until, group in groupby(events, key=lambda event: event.lines):
        made = list(group)
        deltas = [text for event in made if (text := _delta_of(event))]
        first = _MAX_MARKS * (len(steps) + 1)
        arrived = _marked_as(_joined(lines[at:until]), deltas, first, marks)
        steps.append(Step(made[0].seconds, arrived, [_made(event, deltas, first, marks) for event in made]))
        at = until
        if len(steps) == MAX_STEPS:
            return steps
    rest = _joined(lines[at:])
    return [*steps, Step(None, marked(rest, marks), [])] if rest else steps


def _made(event: CapturedEvent, deltas: Sequence[str], first: int, marks: Sequence[str]) -> MadeEvent:
    data = event.data.replace(f'"type":"{event.type}",', "", 1)
    return MadeEvent(event.type, _marked_as(data, deltas, first, marks), data.startswith('{"response":'))


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(line for line in lines if line.strip())


def _delta_of(event: CapturedEvent) -> str:
    """Return the text of a delta event, encoded as in JSON, or "" for other events."""
    try:
        delta = orjson.loads(event.data).get("delta")
    except ValueError:  # the JSON was cut
        return ""
    return json.dumps(delta, ensure_ascii=False) if isinstance(delta, str) else ""


def _marked_as(text: str, deltas: Sequence[str], first: int, marks: Sequence[str]) -> list[Piece]:
    """Mark the `deltas` in a text, numbered from `first`, and the `marks` in the rest of it."""
    pieces = marked(text, deltas[:_MAX_MARKS], first)
    return [part for piece in pieces for part in ([piece] if piece.mark else marked(piece.text, marks))]


def _shared(report: ResponseReport) -> Iterator[str]:
    """Yield the texts, encoded as in JSON, that are likely to occur on both sides, longest first."""
    items: list[Item] = [*report.input, *((report.document or {}).get("output") or ())]
    texts = {text for item in items for text in texts_of(item)} | {
        str(item["call_id"]) for item in items if item.get("call_id")
    }
    document = report.document or {}
    if isinstance(document.get("instructions"), str):
        texts.add(document["instructions"])
    texts |= {str(tool.get("name")) for tool in document.get("tools") or () if isinstance(tool, dict) and tool.get("name")}
    found = sorted((text for text in texts if len(text) >= 3), key=lambda text: (-len(text), text))
    return (pretty(text)[1:-1] for text in found[:_MAX_MARKS] if len(text) <= 4000)


def marked(text: str, marks: Sequence[str], start: int = 1) -> list[Piece]:
    """Split a text at the texts in `marks`, which are numbered from `start`. Where they overlap, earlier ones win."""
    pieces = [Piece(text)] if text else []
    for number, mark in enumerate(marks, start):
        split: list[Piece] = []
        for piece in pieces:
            if piece.mark or mark not in piece.text:
                split.append(piece)
                continue
            first, *others = piece.text.split(mark)
            split.append(Piece(first))
            for other in others:
                split += [Piece(mark, number), Piece(other)]
        pieces = [piece for piece in split if piece.text]
        if len(pieces) > 2 * _MAX_MARKS:
            break
    return pieces
