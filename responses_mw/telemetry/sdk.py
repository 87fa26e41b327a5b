"""Set up OpenTelemetry's SDK from the standard variables, for our own commands. A host application sets up its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from opentelemetry.metrics import set_meter_provider
from opentelemetry.trace import ProxyTracerProvider, get_tracer_provider, set_tracer_provider

from ..version import VERSION

logger = logging.getLogger(__name__)

_OTLP_EXPORTERS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


def set_up_sdk() -> None:
    """Export traces and metrics as the environment variables specify.

    An OTLP endpoint is enough: both are then sent to it over HTTP. Nothing is set up without an endpoint or exporter, with
    `OTEL_SDK_DISABLED`, or if `opentelemetry-instrument` has done so already. That command supports more features, such as
    configuration files. Raises `RuntimeError` for an exporter that is not installed.
    """
    traces, metrics = _exporter_names("TRACES"), _exporter_names("METRICS")
    is_disabled = _variable("OTEL_SDK_DISABLED").lower() == "true"
    if is_disabled or not (traces or metrics) or not isinstance(get_tracer_provider(), ProxyTracerProvider):
        return
    try:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        logger.warning("OTEL_* variables are set, but the extra responses-mw[otel] is not installed: nothing is exported")
        return
    resource = Resource.create(_resource_attributes())
    if traces:
        tracer_provider = TracerProvider(resource=resource)
        for exporter in _exporters("traces", traces):
            tracer_provider.add_span_processor(BatchSpanProcessor(exporter))
        set_tracer_provider(tracer_provider)
    if metrics:
        exporters = _exporters("metrics", metrics)
        readers = [each if isinstance(each, MetricReader) else PeriodicExportingMetricReader(each) for each in exporters]
        set_meter_provider(MeterProvider(readers, resource))


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def _exporter_names(signal: str) -> list[str]:
    """Return the entry points of the exporters for `signal`, by default OTLP if it has an endpoint."""
    has_endpoint = _variable("OTEL_EXPORTER_OTLP_ENDPOINT") or _variable(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    names = _variable(f"OTEL_{signal}_EXPORTER") or ("otlp" if has_endpoint else "none")
    if names.lower() == "none":
        return []
    protocol = _variable(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or _variable("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    stripped = [name.strip() for name in names.split(",")]
    return [_OTLP_EXPORTERS.get(protocol, protocol) if name == "otlp" else name for name in stripped]


def _exporters(signal: str, names: list[str]) -> Iterator[Any]:
    for name in names:
        found = list(entry_points(group=f"opentelemetry_{signal}_exporter", name=name))
        if not found:
            raise RuntimeError(f"no installed package provides the OpenTelemetry {signal} exporter {name!r}")
        yield found[0].load()()


def _resource_attributes() -> dict[str, str]:
    attributes = {"service.version": VERSION}
    if not _variable("OTEL_SERVICE_NAME") and "service.name=" not in _variable("OTEL_RESOURCE_ATTRIBUTES"):
        attributes["service.name"] = "responses-mw"
    return attributes
