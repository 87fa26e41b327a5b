"""Metric types that record to both Prometheus and OpenTelemetry.

- Prometheus metrics are in a registry of our own, separate from the host application's. `/metrics` needs no configuration.
- OpenTelemetry metrics use the global meter, which does nothing unless a meter provider is set. Counters are observable
  instruments, which are read from the Prometheus metric at export. Adding to an SDK counter would take ten times as long.
- Names and units follow OpenTelemetry's conventions. The Prometheus names are derived from these names as specified in
  "Prometheus and OpenMetrics Compatibility" (OpenTelemetry's specification). Dashboards and alerts use the Prometheus names,
  which a test checks.
- Each metric has a fixed set of labels. A missing attribute becomes an empty label, which Prometheus treats as absent.
- A metric has at most `MAX_SERIES` series. Further values are recorded in one series whose labels are all `_OTHER`.
- If PROMETHEUS_MULTIPROC_DIR is set when the package is imported, the processes of one server share their metrics through files
  in that directory. The files of counters remain when a process ends, so that no counter decreases.
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
    """A Prometheus metric, with a cache of its series by their attributes."""

    def __init__(self, metric: Metric, labels: Sequence[str]) -> None:
        """`labels` are the OpenTelemetry names of the attributes that may be recorded."""
        self._metric = metric
        self._labels = labels
        self._series: dict[tuple[tuple[str, str | int], ...], Metric] = {}

    def _series_of(self, attributes: Attributes) -> tuple[Metric, Attributes]:
        """Return the series for `attributes`, and the attributes to record.

        If the metric already has `MAX_SERIES` other series, every label is `_OTHER`. Raises `ValueError` for an attribute that
        is not a label.
        """
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
        """Yield the current sums for OpenTelemetry. The SDK calls this method in its own thread."""
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
        """`labels` maps each label to its known values.

        The series for all combinations of known values start at 0, so that `rate()` sees their first increase.
        """
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
    """A measured value without labels. If several processes share metrics, the maximum of their values is exposed."""

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
        """`buckets` are the inclusive upper bounds of the buckets."""
        names = [_prometheus_name(label) for label in labels]
        histogram = prometheus.Histogram(_prometheus_name(name, unit), description, names, registry=REGISTRY, buckets=buckets)
        super().__init__(histogram, labels)
        self._otel = _METER.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=buckets)

    def record(self, value: float, attributes: Attributes) -> None:
        series, attributes = self._series_of(attributes)
        series.observe(value)
        self._otel.record(value, attributes)


class KnownNames:
    """A set of at most `maximum` names that may be label values.

    Names of more than `MAX_NAME` characters are never admitted. `known` returns `_OTHER` for a name that was not admitted.
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
    """Return the body and the content type of a response with the metrics.

    `accept` is the value of the `Accept` header. The format is OpenMetrics if `accept` includes it, or else Prometheus's text
    format.
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
    """Remove the gauges of the ended process `pid` from `directory`, which contains the shared metrics."""
    mark_process_dead(pid, directory)  # type: ignore[no-untyped-call]


class _Unshared(Collector):
    """Collects the metrics that are not in the shared files: build information, and the process metrics of all processes."""

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
