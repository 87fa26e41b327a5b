"""Set up OpenTelemetry's SDK from the standard variables, for our own commands. A host application sets up its own."""

from __future__ import annotations

import logging
import os
from importlib.metadata import version

from opentelemetry.trace import ProxyTracerProvider, get_tracer_provider

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
_EXPORTERS = ("OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER")


def set_up_sdk() -> bool:
    """Export traces and metrics as the variables say. Return whether anything was set up.

    An OTLP endpoint alone is enough: both are then sent there by HTTP. Nothing is set up without an endpoint or exporter, with
    `OTEL_SDK_DISABLED`, or where `opentelemetry-instrument` did it before. Errors of the SDK about invalid variables propagate.
    """
    if not _is_wanted() or not isinstance(get_tracer_provider(), ProxyTracerProvider):
        return False
    try:
        from opentelemetry.sdk._configuration import _OTelSDKConfigurator  # the base class that the SDK offers to distributions
    except ModuleNotFoundError:
        logger.warning("OTEL_* variables are set, but the extra responses-mw[otel] is not installed: nothing is exported")
        return False

    class Configurator(_OTelSDKConfigurator):
        """The SDK's own set-up; its base class is abstract."""

    _set_defaults()
    Configurator().configure(  # type: ignore[no-untyped-call]
        resource_attributes={"service.version": version("responses-mw")}
    )
    return True


def _is_wanted() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if os.environ.get("OTEL_CONFIG_FILE") or any(os.environ.get(name) for name in _ENDPOINTS):
        return True
    return any(os.environ.get(name, "none").strip().lower() not in ("", "none") for name in _EXPORTERS)


def _set_defaults() -> None:
    """Set the specification's defaults where the SDK has others or none."""
    if "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        os.environ.setdefault("OTEL_SERVICE_NAME", "responses-mw")
    os.environ.setdefault("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    both = bool(os.environ.get(_ENDPOINTS[0]))
    for exporter, endpoint in zip(_EXPORTERS, _ENDPOINTS[1:], strict=True):
        if both or os.environ.get(endpoint):
            os.environ.setdefault(exporter, "otlp")
