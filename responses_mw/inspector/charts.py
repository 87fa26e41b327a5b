"""Plots of the last hour, as the coordinates of SVG elements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..state.recent import FAILED, Summary
from .texts import duration

WIDTH, HEIGHT = 320, 72
SLOTS = 30
"""Number of columns of a plot. In a plot of an hour, a column is two minutes."""
_KINDS = {"completed": "good", "incomplete": "warm", "cancelled": "idle", "failed": "bad"}
"""Maps what the plot of responses shows to the kind of its bars. Refused and interrupted responses are shown as failed."""


@dataclass(frozen=True, slots=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with either bars or lines (the points of polylines). `value` is the latest or the total value as text.

    `legend` maps the kinds of bars to their meaning.
    """

    title: str
    value: str
    top: str
    bars: Sequence[Bar] = ()
    lines: Sequence[tuple[str, str]] = ()
    label: str = ""
    since: str = "1 h ago"
    until: str = "now"
    legend: Sequence[tuple[str, str]] = ()
    width: int = WIDTH
    height: int = HEIGHT


def plots(summaries: Sequence[Summary], now: float, seconds: float = 3600.0) -> list[Plot]:
    """Return the plots of the responses that ended in the last `seconds`."""
    slots = _slots(summaries, now, seconds)
    return [
        _responses(slots),
        _percentiles("Time to first token", slots, "first_token"),
        _percentiles("Duration", slots, "seconds"),
        _tokens(slots, seconds / SLOTS),
    ]


def hits_plot(summaries: Sequence[Summary], now: float, seconds: float) -> Plot:
    """Return the plot of the hits and misses of the cache in the last `seconds`."""
    slots = _slots(summaries, now, seconds)
    counts = [(sum(_is_hit(one) for one in slot), sum(one.get("cache") == "miss" for one in slot)) for slot in slots]
    top = max(1, *(sum(pair) for pair in counts))
    bars: list[Bar] = []
    for place, (hits, misses) in enumerate(counts):
        low = _scaled(hits, top)
        title = f"{duration((SLOTS - place) * seconds / SLOTS)} ago: {hits:,} hits, {misses:,} misses"
        bars += _bar(place, low, 0.0, "good", title) + _bar(place, _scaled(misses, top), low, "miss", title)
    hits, misses = (sum(pair[one] for pair in counts) for one in (0, 1))
    text = f"{hits:,} hits, {misses:,} misses"
    legend = (("good", "hits"), ("miss", "misses"))
    return Plot("Lookups", text, f"{top:,}", bars, since=f"{duration(round(seconds, -1))} ago", legend=legend)


def days_plot(days: Sequence[tuple[str, int, int]]) -> Plot:
    """Return the plot of input and output tokens by day. Each of `days` is a name, input tokens and output tokens."""
    top = max(1, *(given + made for _, given, made in days))
    bars: list[Bar] = []
    for place, (day, given, made) in enumerate(days):
        low = _scaled(given, top)
        title = f"{day}: {given:,} in, {made:,} out"
        bars += _bar(place, low, 0.0, "plain", title, len(days)) + _bar(
            place, _scaled(made, top), low, "good", title, len(days)
        )
    text = f"{sum(given for _, given, _ in days):,} in, {sum(made for *_, made in days):,} out"
    legend = (("plain", "in"), ("good", "out"))
    return Plot("Tokens per day", text, f"{top:,}", bars, since=days[0][0], until=days[-1][0], legend=legend)


def sample_plot(title: str, samples: Sequence[tuple[float, float]], now: float, shown: Callable[[float], str]) -> Plot:
    """Return the plot of the maximum in each column of the last hour. `samples` are pairs of time and value."""
    if not samples:
        return Plot(title, "not measured yet", "")
    slots: list[float | None] = [None] * SLOTS
    for moment, value in samples:
        slot = int((moment - now + 3600) / 3600 * SLOTS)
        if 0 <= slot < SLOTS:
            slots[slot] = max(value, slots[slot] or 0.0)
    top = max((value for value in slots if value is not None), default=0.0)
    bars = [
        bar
        for place, value in enumerate(slots)
        if value is not None
        for bar in _bar(place, _scaled(value, top or 1.0), 0.0, "plain", f"{_ago(place)}: {shown(value)}")
    ]
    return Plot(
        title,
        f"{shown(samples[-1][1])} now",
        shown(top) if top else "",
        bars,
        label=f"at most {shown(top)}, seen by this process",
    )


def _is_hit(summary: Summary) -> bool:
    return summary.get("cache") in ("exact", "semantic")


def _slots(summaries: Sequence[Summary], now: float, seconds: float) -> list[list[Summary]]:
    """Divide the last `seconds` into `SLOTS` equal parts. Return the responses that ended in each part."""
    slots: list[list[Summary]] = [[] for _ in range(SLOTS)]
    for summary in summaries:
        slot = int((summary.get("ended", 0.0) - (now - seconds)) / seconds * SLOTS)
        if 0 <= slot < SLOTS:
            slots[slot].append(summary)
    return slots


def _responses(slots: Sequence[Sequence[Summary]]) -> Plot:
    counts = [Counter("failed" if one["status"] in FAILED else one["status"] for one in slot) for slot in slots]
    top = max(1, *(sum(count[status] for status in _KINDS) for count in counts))
    bars: list[Bar] = []
    for place, count in enumerate(counts):
        title, low = f"{_ago(place)}: {_listed(count)}", 0.0
        for status in reversed(_KINDS):  # failures are below, where they are seen although there are few
            bars += _bar(place, _scaled(count[status], top), low, _KINDS[status], title)
            low += _scaled(count[status], top)
    every = sum(counts, Counter())
    label = f"{_listed(every)} in the last hour"
    legend = [(kind, status) for status, kind in _KINDS.items() if every[status]]
    return Plot("Responses", f"{every.total():,}, {every['failed']:,} failed", f"{top:,}", bars, label=label, legend=legend)


def _listed(count: Counter[str]) -> str:
    return ", ".join(f"{count[status]:,} {status}" for status in _KINDS if count[status]) or "none"


def _tokens(slots: Sequence[Sequence[Summary]], seconds: float) -> Plot:
    rates = [sum(one.get("tokens_out", 0) for one in slot) / seconds for slot in slots]
    top = max(rates) or 1.0
    bars = [
        bar
        for place, rate in enumerate(rates)
        for bar in _bar(place, _scaled(rate, top), 0.0, "plain", f"{_ago(place)}: {rate:.1f}/s")
    ]
    mean = f"{sum(rates) / len(rates):.1f} on average"
    return Plot("Output tokens per second", mean, f"{top:.0f}", bars, label=f"{mean}, at most {top:.1f} in two minutes")


def _percentiles(title: str, slots: Sequence[Sequence[Summary]], member: str) -> Plot:
    values = [sorted(one[member] for one in slot if isinstance(one.get(member), int | float)) for slot in slots]
    every = sorted(value for slot in values for value in slot)
    if not every:
        return Plot(title, "–", "")
    lines = {
        kind: [_percentile(slot, share) if slot else None for slot in values] for kind, share in (("p50", 0.5), ("p95", 0.95))
    }
    top = max(value for line in lines.values() for value in line if value is not None) or 1.0
    drawn = [(kind, _points(line, top)) for kind, line in lines.items()]
    text = f"p50 {duration(_percentile(every, 0.5))}, p95 {duration(_percentile(every, 0.95))}"
    return Plot(title, text, duration(top), lines=drawn, label=text, legend=(("p50", "p50"), ("p95", "p95")))


def _points(line: Sequence[float | None], top: float) -> str:
    step = WIDTH / SLOTS
    points = [(place, value) for place, value in enumerate(line) if value is not None]
    if len(points) == 1:  # a line needs two points
        points.append((points[0][0] + 1, points[0][1]))
    return " ".join(f"{(place + 0.5) * step:.1f},{HEIGHT - _scaled(value, top):.1f}" for place, value in points)


def _bar(place: int, height: float, above: float, kind: str, title: str, slots: int = SLOTS) -> list[Bar]:
    step = WIDTH / slots
    if height <= 0:
        return []
    return [
        Bar(round(place * step + 1, 1), round(HEIGHT - above - height, 1), round(step - 2, 1), round(height, 1), kind, title)
    ]


def _scaled(value: float, top: float) -> float:
    return value / top * (HEIGHT - 2)


def _ago(place: int) -> str:
    return f"{(SLOTS - place) * 60 // SLOTS} min ago"


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
