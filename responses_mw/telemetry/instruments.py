"""Metric types that record to a Prometheus registry of this package and to OpenTelemetry's global meter.

- Names and units follow OpenTelemetry's conventions. Prometheus names are derived from them, as in "Prometheus and OpenMetrics
  Compatibility" (OpenTelemetry's specification).
- Counters are registered with OpenTelemetry as observable counters, which read the Prometheus values at export. Adding to an
  SDK counter would take ten times as long.
- If PROMETHEUS_MULTIPROC_DIR is set on import, the processes of one server share their metrics through files in that directory.
  The counters' files are kept when a process exits, so that no counter decreases.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import prometheus_client as prometheus
from opentelemetry.metrics import CallbackOptions, Observation, get_meter
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from ..version import VERSION
from .conventions import SCHEMA_URL, SCOPE

Attributes: TypeAlias = Mapping[str, str | int]
_Key: TypeAlias = tuple[tuple[str, str | int], ...]  # the items of attributes
Metric = TypeVar("Metric", bound=MetricWrapperBase)

MAX_SERIES = 1000
MAX_NAME = 256
OTHER = "_OTHER"
REGISTRY = prometheus.CollectorRegistry()
METRICS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"

_METER = get_meter(SCOPE, VERSION, schema_url=SCHEMA_URL)
_UNIT_SUFFIXES = {"s": "_seconds", "By": "_bytes"}
_LIVE = re.compile(r"gauge_live[a-z]+_([0-9]+)\.db")


class Instrument(Generic[Metric]):
    """A metric with a fixed set of labels. A missing attribute becomes an empty label, which Prometheus treats as absent."""

    def __init__(
        self, kind: type[Metric], name: str, unit: str, description: str, labels: Sequence[str] = (), **options: Any
    ) -> None:
        """`name` and `labels` are OpenTelemetry names. `labels` lists the allowed attributes. `options` go to `kind`."""
        label_names = [_prometheus_name(label) for label in labels]
        self._metric = kind(_prometheus_name(name, unit), description, label_names, **{"registry": REGISTRY, **options})
        self._labels = labels
        self._series: dict[_Key, tuple[Metric, Attributes]] = {}

    def _series_of(self, attributes: Attributes) -> tuple[Metric, Attributes]:
        key = tuple(attributes.items())
        return self._series.get(key) or self._new_series(key)

    def _new_series(self, given: _Key) -> tuple[Metric, Attributes]:
        """Return a new series, and the attributes to record. After `MAX_SERIES` series, all labels of new ones are `OTHER`."""
        attributes = dict(given)
        if unknown := attributes.keys() - set(self._labels):
            raise ValueError(f"undeclared attributes: {unknown}")
        is_full = len(self._series) >= MAX_SERIES
        if is_full:
            attributes = dict.fromkeys(self._labels, OTHER)
        values = [str(attributes.get(label, "")) for label in self._labels]
        created = (self._metric.labels(*values) if values else self._metric), attributes
        if not is_full:
            self._series[given] = created
        return created

    def read(self, sample: str) -> dict[tuple[str, ...], float]:
        """Return the values of this process by their labels. `sample` is `total` of a counter, or `count` or `sum`."""
        names = [_prometheus_name(label) for label in self._labels]
        return {
            tuple(one.labels[name] for name in names): one.value
            for family in self._metric.collect()
            for one in family.samples
            if one.name == f"{family.name}_{sample}"
        }


class _Sum(Instrument[prometheus.Counter | prometheus.Gauge]):
    def add(self, amount: int = 1, attributes: Mapping[str, str | int] = {}) -> None:
        series, _ = self._series_of(attributes)
        if amount:
            series.inc(amount)

    def series(self, attributes: Attributes) -> prometheus.Counter | prometheus.Gauge:
        """Return the series with these `attributes`, so that adding to it often takes less time."""
        return self._series_of(attributes)[0]

    def forget(self, attributes: Attributes) -> None:
        """Remove the series with these `attributes`. This is not possible if processes share their metrics."""
        if self._series.pop(tuple(attributes.items()), None) is not None:
            self._metric.remove(*[str(attributes.get(label, "")) for label in self._labels])

    def _observe(self, _: CallbackOptions) -> Iterator[Observation]:
        """Yield the current sums. The SDK calls this method in its own thread."""
        for family in self._metric.collect():
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    values = {label: sample.labels[_prometheus_name(label)] for label in self._labels}
                    yield Observation(sample.value, {label: value for label, value in values.items() if value})


class Counter(_Sum):
    def __init__(
        self, name: str, unit: str, description: str, labels: Mapping[str, Iterable[str]] = {}, **options: Any
    ) -> None:
        """`labels` maps each label to its known values. Their series start at 0, so that `rate()` sees their first increase."""
        super().__init__(prometheus.Counter, name, unit, description, tuple(labels), **options)
        _METER.create_observable_counter(name, [self._observe], unit, description)
        for values in product(*labels.values()):
            self.add(0, dict(zip(labels, values, strict=True)))


class UpDownCounter(_Sum):
    def __init__(self, name: str, unit: str, description: str, labels: Sequence[str] = ()) -> None:
        super().__init__(prometheus.Gauge, name, unit, description, labels, multiprocess_mode="livesum")
        _METER.create_observable_up_down_counter(name, [self._observe], unit, description)


class Gauge(Instrument[prometheus.Gauge]):
    """A measured value. If several processes share metrics, the maximum of their values is exposed."""

    def __init__(self, name: str, unit: str, description: str, labels: Sequence[str] = ()) -> None:
        super().__init__(prometheus.Gauge, name, unit, description, labels, multiprocess_mode="livemax")
        self._otel = _METER.create_gauge(name, unit, description)

    def set(self, value: float, attributes: Mapping[str, str | int] = {}) -> None:
        series, attributes = self._series_of(attributes)
        series.set(value)
        self._otel.set(value, attributes)


class Histogram(Instrument[prometheus.Histogram]):
    def __init__(self, name: str, unit: str, description: str, labels: Sequence[str], buckets: Sequence[float]) -> None:
        super().__init__(prometheus.Histogram, name, unit, description, labels, buckets=buckets)
        self._otel = _METER.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=buckets)

    def record(self, value: float, attributes: Attributes) -> None:
        series, attributes = self._series_of(attributes)
        series.observe(value)
        self._otel.record(value, attributes)


class KnownNames:
    """The names that may be label values, each of at most `MAX_NAME` characters. Others become `OTHER`.

    The first `listed` names that are listed, and the first `unlisted` others that are admitted, are known. Clients may be able
    to choose the latter, but not the former.
    """

    def __init__(self, *, listed: int, unlisted: int) -> None:
        self._max_listed, self._max_unlisted = listed, unlisted
        self._listed: set[str] = set()
        self._unlisted: set[str] = set()

    @property
    def is_listed(self) -> bool:
        """Whether a name has been listed."""
        return bool(self._listed)

    @property
    def listed(self) -> list[str]:
        return sorted(self._listed)

    def add_listed(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self._listed) >= self._max_listed:
                return
            if len(name) <= MAX_NAME:
                self._listed.add(name)
                self._unlisted.discard(name)

    def admit(self, name: str) -> None:
        if name not in self._listed and len(self._unlisted) < self._max_unlisted and len(name) <= MAX_NAME:
            self._unlisted.add(name)

    def known(self, name: str) -> str:
        return name if name in self._listed or name in self._unlisted else OTHER


def _prometheus_name(name: str, unit: str = "") -> str:
    return name.replace(".", "_") + _UNIT_SUFFIXES.get(unit, "")


# -- exposition ------------------------------------------------------------------------------------------------------------


def exposition(accept: str) -> tuple[bytes, str]:
    """Return the metrics as the body of an HTTP response, and the body's content type.

    The format is OpenMetrics if the header `accept` includes it, otherwise Prometheus's text format.
    """
    registry = REGISTRY
    if is_shared():
        registry = prometheus.CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(_Unshared())
    if "application/openmetrics-text" in accept:
        return openmetrics.generate_latest(registry), openmetrics.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
    return prometheus.generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"


def is_shared() -> bool:
    """Return whether this process shares its metrics with other processes."""
    return METRICS_DIRECTORY in os.environ


def forget_process(pid: int, directory: str) -> None:
    """Remove the gauges of the exited process `pid` from the shared metrics in `directory`."""
    mark_process_dead(pid, directory)  # type: ignore[no-untyped-call]


class _Unshared(Collector):
    """Collects the metrics that the shared files lack: build information, and the process metrics of all processes."""

    def collect(self) -> Iterator[Family]:
        yield from (family for family in REGISTRY.collect() if family.type == "info")
        names = (_LIVE.fullmatch(path.name) for path in Path(os.environ[METRICS_DIRECTORY]).iterdir())
        combined: dict[str, Family] = {}
        for pid in sorted({int(name[1]) for name in names if name is not None}):
            for family in prometheus.ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                known = combined.setdefault(family.name, family)
                if known is not family:
                    [one], [other] = known.samples, family.samples
                    value = min(one.value, other.value) if "start_time" in family.name else one.value + other.value
                    known.samples = [one._replace(value=value)]
        yield from combined.values()
