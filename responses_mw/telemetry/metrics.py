"""Metrics: each is defined here once and recorded for both Prometheus and OpenTelemetry.

- Prometheus: a registry of our own, separate from the host application's. `/metrics` shows it without any set-up.
- OpenTelemetry: the global meter, a no-op where no meter provider is set. Counters are observable instruments, read from the
  Prometheus metric at export: the SDK takes ten times as long for each addition.
- Names and units are OpenTelemetry's. Prometheus names follow from them ("Prometheus and OpenMetrics Compatibility" in
  OpenTelemetry's specification). Dashboards and alerts depend on the names: a test compares them.
- Labels are fixed for each metric; an attribute that is not given is an empty label, which Prometheus treats as absent.
- A metric has at most `MAX_SERIES` series; beyond that every label is `_OTHER`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Generic, TypeAlias, TypeVar

import prometheus_client as prometheus
from opentelemetry.metrics import CallbackOptions, Observation, get_meter
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics import exposition as openmetrics

__all__ = ["REGISTRY", "Counter", "Gauge", "Histogram", "KnownNames", "UpDownCounter", "exposition"]

Attributes: TypeAlias = Mapping[str, str | int]
Metric = TypeVar("Metric", bound=MetricWrapperBase)

MAX_SERIES = 1000
MAX_NAME = 256
OTHER = "_OTHER"
REGISTRY = prometheus.CollectorRegistry()

_METER = get_meter("responses_mw")
_UNIT_SUFFIXES = {"s": "_seconds", "By": "_bytes"}


class Instrument(Generic[Metric]):
    """A Prometheus metric and the series recorded so far."""

    def __init__(self, metric: Metric, labels: Sequence[str]) -> None:
        """`labels` are the attributes that may be recorded, by their OpenTelemetry names."""
        self._metric = metric
        self._labels = labels
        self._series: dict[tuple[str, ...], Metric] = {}

    def _series_of(self, attributes: Attributes) -> tuple[Metric, Attributes]:
        """Return the series to record to, with the attributes that it has."""
        if not self._labels:
            return self._metric, attributes
        values = tuple([str(attributes.get(label, "")) for label in self._labels])
        series = self._series.get(values)
        if series is None:
            if unknown := attributes.keys() - set(self._labels):
                raise ValueError(f"undeclared attributes: {unknown}")
            if len(self._series) >= MAX_SERIES:
                attributes = dict.fromkeys(self._labels, OTHER)
                return self._metric.labels(*attributes.values()), attributes
            series = self._series[values] = self._metric.labels(*values)
        return series, attributes


class _Sum(Instrument[prometheus.Counter | prometheus.Gauge]):
    def add(self, amount: int = 1, attributes: Attributes | None = None) -> None:
        self._series_of(attributes or {})[0].inc(amount)

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
        labels: Sequence[str] = (),
        initial: Sequence[str] = (),
        *,
        registry: prometheus.CollectorRegistry = REGISTRY,
    ) -> None:
        """`initial`: values of the only label whose series start at 0, so that `rate()` sees their first increase."""
        names = [_prometheus_name(label) for label in labels]
        super().__init__(prometheus.Counter(_prometheus_name(name, unit), description, names, registry=registry), labels)
        _METER.create_observable_counter(name, [self._observe], unit, description)
        for value in initial:
            self.add(0, {labels[0]: value})


class UpDownCounter(_Sum):
    """A number of things that exist now."""

    def __init__(self, name: str, unit: str, description: str, labels: Sequence[str] = ()) -> None:
        names = [_prometheus_name(label) for label in labels]
        gauge = prometheus.Gauge(
            _prometheus_name(name, unit), description, names, registry=REGISTRY, multiprocess_mode="livesum"
        )
        super().__init__(gauge, labels)
        _METER.create_observable_up_down_counter(name, [self._observe], unit, description)


class Gauge:
    """A measured value, the same from all processes of a deployment."""

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
    """Names that may be label values: the first `maximum` admitted of at most `MAX_NAME` characters. Others read `_OTHER`."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._names: set[str] = set()

    def admit(self, name: str) -> None:
        if len(self._names) < self._maximum and len(name) <= MAX_NAME:
            self._names.add(name)

    def known(self, name: str) -> str:
        return name if name in self._names else OTHER


def exposition(accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type: OpenMetrics if the `Accept` header names it, else Prometheus' text format."""
    if "application/openmetrics-text" in accept:
        return openmetrics.generate_latest(REGISTRY), openmetrics.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
    return prometheus.generate_latest(REGISTRY), "text/plain; version=0.0.4; charset=utf-8"


def _prometheus_name(name: str, unit: str = "") -> str:
    return name.replace(".", "_") + _UNIT_SUFFIXES.get(unit, "")


def _version() -> str:
    try:
        return metadata.version("responses-mw")
    except metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


# -- of the model ----------------------------------------------------------------------------------------------------------

# The buckets that the conventions advise, continued for streams that take minutes.
_OPERATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68)
_TOKENS = tuple(4.0**power for power in range(14))
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_TURN = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "server.address", "server.port")

OPERATION_DURATION = Histogram(
    "gen_ai.client.operation.duration", "s", "Duration of a turn of the model.", (*_TURN, "error.type"), _OPERATION
)
TOKEN_USAGE = Histogram(
    "gen_ai.client.token.usage", "{token}", "Tokens used by a turn.", (*_TURN, "gen_ai.token.type"), _TOKENS
)
TIME_TO_FIRST_TOKEN = Histogram(
    "gen_ai.server.time_to_first_token", "s", "Time until the answer of a turn begins.", _TURN, _FIRST_TOKEN
)
TIME_PER_OUTPUT_TOKEN = Histogram(
    "gen_ai.server.time_per_output_token", "s", "Time per output token after the first.", _TURN, _PER_TOKEN
)
MODELS = KnownNames(64)
"""Clients choose the model's name: only names of models that have answered become label values."""

# -- of requests -----------------------------------------------------------------------------------------------------------

_HTTP = ("http.request.method", "url.scheme")

REQUEST_DURATION = Histogram(
    "http.server.request.duration",
    "s",
    "Duration of HTTP requests, including streams.",
    (*_HTTP, "http.response.status_code", "http.route", "error.type"),
    _REQUEST,
)
ACTIVE_REQUESTS = UpDownCounter("http.server.active_requests", "{request}", "HTTP requests in progress.", _HTTP)
STREAMS_OPEN = UpDownCounter("responses_mw.streams.open", "{stream}", "Open streams to clients.")
LIMITS_REFUSED = Counter(
    "responses_mw.limits.refused",
    "{request}",
    "Requests that a limit refused, by limit.",
    ["limit"],
    ["requests", "streams", "background", "storage"],
)
LIMITS_UNCHECKED = Counter(
    "responses_mw.limits.unchecked",
    "{request}",
    "Requests accepted unchecked because Redis was unavailable, by limit.",
    ["limit"],
    ["requests", "streams", "background", "storage"],
)
CACHE_LOOKUPS = Counter(
    "responses_mw.cache.lookups", "{lookup}", "Cache lookups, by result.", ["result"], ["exact", "semantic", "miss"]
)

# -- of background responses and the state -----------------------------------------------------------------------------------

QUEUE_DEPTH = Gauge("responses_mw.queue.depth", "{job}", "Background responses waiting for a worker, in the whole deployment.")
QUEUE_AGE = Gauge("responses_mw.queue.age", "s", "Time that the oldest of them has waited.")
JOBS_RUNNING = UpDownCounter("responses_mw.jobs.running", "{job}", "Background responses running in this process.")
LEASES_LOST = Counter("responses_mw.leases.lost", "{lease}", "Background responses whose worker was lost or too late.")
JOBS_RETRIED = Counter(
    "responses_mw.jobs.retried",
    "{job}",
    "Background responses returned to the queue after an error of the upstream, by reason.",
    ["reason"],
    ["unreachable", "broken", "429", "502", "503", "504"],
)
EVENTS_APPENDED = Counter("responses_mw.events.appended", "{event}", "Events appended to logs of background responses.")
UNSTORED = Counter(
    "responses_mw.responses.unstored",
    "{response}",
    "Responses that were answered but could not be stored, by class of error.",
    ["error.type"],
    ["OverBound", "OverQuota", "StateUnavailable"],
)
STATE_ERRORS = Counter(
    "responses_mw.state.errors",
    "{error}",
    "Failed round trips to Redis, by class of error.",
    ["error.type"],
    ["ConnectionError", "TimeoutError", "Damaged"],
)

# -- of the process, for Prometheus alone: OpenTelemetry has resource attributes for it ----------------------------------------

prometheus.ProcessCollector(registry=REGISTRY)
prometheus.Info("responses_mw_build", "Version of responses-mw and of Python.", registry=REGISTRY).info(
    {"version": _version(), "python_version": platform.python_version()}
)
