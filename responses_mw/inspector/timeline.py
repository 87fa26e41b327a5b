"""The timeline of a response: its waits in the queue, for the model and for tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..state.recent import Summary
from .report import ResponseReport


class Stretch(NamedTuple):
    """A part of a row. `start` and `share` are percentages of the whole duration."""

    kind: str
    start: float
    share: float


class Row(NamedTuple):
    """A phase of a response. `seconds` is its total duration."""

    name: str
    seconds: float
    stretches: list[Stretch]


class TimeLine(NamedTuple):
    """The phases of a response, its whole duration, and the number and total duration of its round trips to Redis."""

    rows: list[Row]
    seconds: float
    round_trips: int
    redis_seconds: float


def timeline(report: ResponseReport) -> TimeLine | None:
    """Return the timeline of a response that has ended, or None if its times are unknown."""
    summary = report.summary
    ran = _number(summary.get("seconds"))
    if ran is None or ran <= 0:
        return None
    queued = _queued(report, ran)
    whole = queued + ran
    first, rows = _number(summary.get("first_token")), list[Row]()

    def add(name: str, kind: str, start: float, seconds: float) -> None:
        parts = [(kind, start, seconds)]
        if kind == "answer" and first is not None and start < first < start + seconds:
            parts = [("wait", start, first - start), ("answer", first, start + seconds - first)]
        stretches = [Stretch(part, *_shares(queued + begin, length, whole)) for part, begin, length in parts]
        rows.append(Row(name, seconds, stretches))

    if queued:
        rows.append(Row("in the queue", queued, [Stretch("queue", *_shares(0.0, queued, whole))]))
    for name, kind, start, seconds in _phases(summary, ran):
        add(name, kind, start, seconds)
    trips, milliseconds = _redis(summary)
    return TimeLine(rows, whole, trips, milliseconds / 1000)


def _queued(report: ResponseReport, ran: float) -> float:
    """Return the seconds that a background response waited before its last attempt, accurate to a second."""
    created, ended = (report.document or {}).get("created_at"), _number(report.summary.get("ended"))
    if report.summary.get("kind") != "background" or ended is None or _number(created) is None:
        return 0.0
    waited = ended - ran - float(created)  # type: ignore[arg-type]
    return waited if waited >= 1 else 0.0


def _phases(summary: Summary, ran: float) -> Iterator[tuple[str, str, float, float]]:
    """Yield the name, kind, start and duration in seconds of each phase."""
    found = [phase for phase in summary.get("phases") or () if _is_phase(phase)]
    turns = 0
    for kind, start, milliseconds in sorted(found, key=lambda phase: phase[1]):
        turns += kind == "turn"
        name = {"turn": f"turn {turns}", "summary": "summary of the history"}.get(kind, f"tool: {kind}")
        yield name, "answer" if kind in ("turn", "summary") else "tool", start / 1000, milliseconds / 1000
    if not found:
        is_hit = summary.get("cache") in ("exact", "semantic")
        yield "from the cache" if is_hit else "whole response", "queue" if is_hit else "answer", 0.0, ran


def _is_phase(phase: Any) -> bool:
    return isinstance(phase, list) and [type(part) for part in phase] == [str, int, int]


def _redis(summary: Summary) -> tuple[int, int]:
    match summary.get("redis"):
        case [int(trips), int(milliseconds)]:
            return trips, milliseconds
    return 0, 0


def _shares(start: float, seconds: float, whole: float) -> tuple[float, float]:
    return round(100 * start / whole, 2), round(max(100 * seconds / whole, 0.3), 2)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
