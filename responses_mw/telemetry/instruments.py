"""Kinds of metrics, each recorded for both Prometheus and OpenTelemetry.

- Prometheus: a registry of our own, separate from the host application's. `/metrics` shows it without any set-up.
- OpenTelemetry: the global meter, a no-op where no meter provider is set. Counters are observable instruments, read from the
  Prometheus metric at export, because adding to an SDK counter takes ten times as long.
- Names and units are OpenTelemetry's. Prometheus names follow from them ("Prometheus and OpenMetrics Compatibility" in
  OpenTelemetry's specification). Dashboards and alerts depend on the names: a test compares them.
- Labels are fixed for each metric; an attribute that is not given is an empty label, which Prometheus treats as absent.
- A metric has at most `MAX_SERIES` series; beyond that every label is `_OTHER`.
- If PROMETHEUS_MULTIPROC_DIR names a directory when the package is imported, the processes of one server share their metrics
  through files in it. The counts of processes that have ended remain there, so that no counter goes down.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

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
    """A Prometheus metric and the series recorded so far, by their attributes."""

    def __init__(self, metric: Metric, labels: Sequence[str]) -> None:
        """`labels` are the attributes that may be recorded, by their OpenTelemetry names."""
        self._metric = metric
        self._labels = labels
        self._series: dict[tuple[tuple[str, str | int], ...], Metric] = {}

    def _series_of(self, attributes: Attributes) -> tuple[Metric, Attributes]:
        """Return the series to record to, and its attributes."""
        if not self._labels:
            return self._metric, attributes
        given = tuple(attributes.items())
        series = self._series.get(given)
        if series is None:
            if unknown := attributes.keys() - set(self._labels):
                raise ValueError(f"undeclared attributes: {unknown}")
            if len(self._series) >= MAX_SERIES:
                attributes = dict.fromkeys(self._labels, OTHER)
                return self._metric.labels(*attributes.values()), attributes
            values = (str(attributes.get(label, "")) for label in self._labels)
            series = self._series[given] = self._metric.labels(*values)
        return series, attributes


class _Sum(Instrument[prometheus.Counter | prometheus.Gauge]):
    def add(self, amount: int = 1, attributes: Attributes | None = None) -> None:
        series, _ = self._series_of(attributes or {})
        if amount:
            series.inc(amount)

    def _observe(self, _: CallbackOptions) -> Iterator[Observation]:
        """Read the sums for OpenTelemetry. The SDK calls this from a thread of its own."""
        for family in self._metric.collect():
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    values = {label: sample.labels[_prometheus_name(label)] for label in self._labels}
                    yield Observation(sample.value, {label: value for label, value in values.items() if value})


class Counter(_Sum):
    def __init__(
        self,
        name: str,
        unit: str,
        description: str,
        labels: Mapping[str, Iterable[str]] = {},
        *,
        registry: prometheus.CollectorRegistry = REGISTRY,
    ) -> None:
        """`labels` come with their known values. The series of these start at 0, so that `rate()` sees their first increase."""
        names = [_prometheus_name(label) for label in labels]
        counter = prometheus.Counter(_prometheus_name(name, unit), description, names, registry=registry)
        super().__init__(counter, tuple(labels))
        _METER.create_observable_counter(name, [self._observe], unit, description)
        for values in product(*labels.values()):
            self.add(0, dict(zip(labels, values, strict=True)))


class UpDownCounter(_Sum):
    """A count that can rise and fall, such as the number of active turns."""

    def __init__(self, name: str, unit: str, description: str, labels: Sequence[str] = ()) -> None:
        names = [_prometheus_name(label) for label in labels]
        gauge = prometheus.Gauge(
            _prometheus_name(name, unit), description, names, registry=REGISTRY, multiprocess_mode="livesum"
        )
        super().__init__(gauge, labels)
        _METER.create_observable_up_down_counter(name, [self._observe], unit, description)


class Gauge:
    """A measured value. Among the processes of one server, the highest is shown."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self._metric = prometheus.Gauge(
            _prometheus_name(name, unit), description, registry=REGISTRY, multiprocess_mode="livemax"
        )
        self._otel = _METER.create_gauge(name, unit, description)

    def set(self, value: float) -> None:
        self._metric.set(value)
        self._otel.set(value)


class Histogram(Instrument[prometheus.Histogram]):
    def __init__(self, name: str, unit: str, description: str, labels: Sequence[str], buckets: Sequence[float]) -> None:
        """`buckets` are inclusive upper bounds."""
        names = [_prometheus_name(label) for label in labels]
        histogram = prometheus.Histogram(_prometheus_name(name, unit), description, names, registry=REGISTRY, buckets=buckets)
        super().__init__(histogram, labels)
        self._otel = _METER.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=buckets)

    def record(self, value: float, attributes: Attributes) -> None:
        series, attributes = self._series_of(attributes)
        series.observe(value)
        self._otel.record(value, attributes)


class KnownNames:
    """Names that may be label values: the first `maximum` that are admitted.

    Other names, and names of more than `MAX_NAME` characters, become `_OTHER`.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._names: set[str] = set()

    def admit(self, name: str) -> None:
        if len(self._names) < self._maximum and len(name) <= MAX_NAME:
            self._names.add(name)

    def known(self, name: str) -> str:
        return name if name in self._names else OTHER


def _prometheus_name(name: str, unit: str = "") -> str:
    return name.replace(".", "_") + _UNIT_SUFFIXES.get(unit, "")


# -- exposition ------------------------------------------------------------------------------------------------------------


def exposition(accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type: OpenMetrics if the `Accept` header names it, else Prometheus' text format."""
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
    """Remove the gauges of a process that has ended from the `directory` of shared metrics."""
    mark_process_dead(pid, directory)  # type: ignore[no-untyped-call]


class _Unshared(Collector):
    """Metrics that are not in the files: build information, and the process metrics of all processes combined."""

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
