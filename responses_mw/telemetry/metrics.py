"""Instruments: each records for OpenTelemetry, and keeps what the admin port's ``/metrics`` shows.

1. What an instrument is told goes into a table of its own, which ``/metrics`` shows without any SDK, and to the meter of
   OpenTelemetry's API, which forgets it where nothing is set up. Counts are read from the table when they are exported: an
   SDK takes ten times as long over each as we do.
2. Both are given the same attributes, of which there is a bounded number: beyond ``MOST_SERIES`` sets of them an instrument
   counts under ``otel.metric.overflow``, as the SDK would (OpenTelemetry, "Cardinality limits").
3. Names and units are OpenTelemetry's; Prometheus' are made of them (OpenTelemetry, "Prometheus Compatibility").
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from opentelemetry.metrics import CallbackOptions, Observation, get_meter

Attributes: TypeAlias = Mapping[str, str | int | bool]
Labels: TypeAlias = tuple[tuple[str, str | int | bool], ...]

MOST_SERIES = 1000
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_OVERFLOW: Attributes = {"otel.metric.overflow": True}
_UNITS = {"s": "_seconds", "By": "_bytes"}
_METER = get_meter("responses_mw")
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Instrument:
    """What all kinds have: ``labels`` of a recording, and the text of everything recorded."""

    kind: str
    suffix = ""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.name = name
        self.prometheus = name.replace(".", "_") + _UNITS.get(unit, "") + self.suffix
        self._description = description

    def lines(self) -> Iterator[str]:
        """The text that Prometheus reads."""
        yield f"# HELP {self.prometheus} {self._description}"
        yield f"# TYPE {self.prometheus} {self.kind}"
        yield from self._samples()

    def _samples(self) -> Iterator[str]:
        raise NotImplementedError


class _Values(Instrument):
    """A number for each set of attributes."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        super().__init__(name, unit, description)
        self._values: dict[Labels, float] = {}

    def value(self, attributes: Attributes | None = None) -> float:
        """What it stands at."""
        return self._values.get(tuple((attributes or {}).items()), 0)

    def _samples(self) -> Iterator[str]:
        for labels, value in list(self._values.items()) or [((), 0.0)]:
            yield f"{self.prometheus}{_braced(labels)} {_number(value)}"


class _Counted(_Values):
    """What is added up."""

    def add(self, amount: int = 1, attributes: Attributes | None = None) -> None:
        labels, _ = _bounded(self._values, attributes or {})
        self._values[labels] = self._values.get(labels, 0) + amount

    def _observed(self, _: CallbackOptions) -> Iterator[Observation]:
        """Asked for by another thread."""
        for labels, value in list(self._values.items()):
            yield Observation(value, dict(labels))


class Counter(_Counted):
    kind = "counter"
    suffix = "_total"

    def __init__(self, name: str, unit: str, description: str) -> None:
        super().__init__(name, unit, description)
        _METER.create_observable_counter(name, [self._observed], unit, description)


class UpDown(_Counted):
    """How many there are now."""

    kind = "gauge"

    def __init__(self, name: str, unit: str, description: str) -> None:
        super().__init__(name, unit, description)
        _METER.create_observable_up_down_counter(name, [self._observed], unit, description)


class Gauge(_Values):
    """What was measured last."""

    kind = "gauge"

    def __init__(self, name: str, unit: str, description: str) -> None:
        super().__init__(name, unit, description)
        self._otel = _METER.create_gauge(name, unit, description)

    def set(self, value: float) -> None:
        self._values[()] = value
        self._otel.set(value)


class Histogram(Instrument):
    kind = "histogram"

    def __init__(self, name: str, unit: str, description: str, bounds: Sequence[float]) -> None:
        """``bounds`` are the upper ends of the buckets, each included."""
        super().__init__(name, unit, description)
        self._bounds = bounds
        self._series: dict[Labels, _Buckets] = {}
        self._otel = _METER.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=bounds)

    def record(self, value: float, attributes: Attributes) -> None:
        labels, attributes = _bounded(self._series, attributes)
        buckets = self._series.get(labels)
        if buckets is None:
            buckets = self._series[labels] = _Buckets(len(self._bounds) + 1)
        buckets.counts[bisect_left(self._bounds, value)] += 1
        buckets.sum += value
        self._otel.record(value, attributes)

    def _samples(self) -> Iterator[str]:
        for labels, buckets in list(self._series.items()):
            total = 0
            for bound, count in zip([*self._bounds, math.inf], buckets.counts, strict=True):
                total += count
                yield f"{self.prometheus}_bucket{_braced((*labels, ('le', _number(bound))))} {total}"
            yield f"{self.prometheus}_sum{_braced(labels)} {_number(buckets.sum)}"
            yield f"{self.prometheus}_count{_braced(labels)} {total}"


class _Buckets:
    __slots__ = ("counts", "sum")

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.sum = 0.0


class Reading(Instrument):
    """A number that is read when it is asked for, for ``/metrics`` alone: what the SDK's resource detectors know already."""

    def __init__(self, name: str, unit: str, description: str, kind: str, read: Callable[[], float | None]) -> None:
        self.kind = kind
        self.suffix = Counter.suffix if kind == "counter" else ""
        super().__init__(name, unit, description)
        self._read = read

    def _samples(self) -> Iterator[str]:
        value = self._read()
        if value is not None:
            yield f"{self.prometheus} {_number(value)}"


def exposition(instruments: Sequence[Instrument]) -> bytes:
    """All that was recorded, in Prometheus' text format."""
    return "".join(f"{line}\n" for instrument in instruments for line in instrument.lines()).encode()


class KnownNames:
    """Names that may be attributes: at most ``most`` of those that were ``admit``ted; any other is ``_OTHER``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: set[str] = set()

    def admit(self, name: str) -> None:
        if len(self._names) < self._most:
            self._names.add(name)

    def known(self, name: str) -> str:
        return name if name in self._names else "_OTHER"


def _bounded(series: Mapping[Labels, object], attributes: Attributes) -> tuple[Labels, Attributes]:
    labels = tuple(attributes.items())
    if labels in series or len(series) < MOST_SERIES:
        return labels, attributes
    return tuple(_OVERFLOW.items()), _OVERFLOW


def _braced(labels: Labels) -> str:
    pairs = [f'{name.replace(".", "_")}="{_text(value)}"' for name, value in labels]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _text(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).translate(_ESCAPES)


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else f"{value:.12g}"
