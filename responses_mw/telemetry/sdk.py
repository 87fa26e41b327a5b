"""Sets up OpenTelemetry's SDK by the standard variables: for our own commands. A host application has its own, or none."""

from __future__ import annotations

import logging
import os
from importlib.metadata import version

from opentelemetry.trace import ProxyTracerProvider, get_tracer_provider

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
_EXPORTERS = ("OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER")


def set_up_sdk() -> bool:
    """Sends traces and metrics where the variables say. True if it does.

    An OTLP endpoint alone is enough: both go there then, by HTTP. Without endpoint and exporter, or with ``OTEL_SDK_DISABLED``,
    nothing is set up; nor is it where ``opentelemetry-instrument`` was there before. Raises what the SDK raises for variables
    that it does not understand.
    """
    if not _is_wanted() or not isinstance(get_tracer_provider(), ProxyTracerProvider):
        return False
    try:
        from opentelemetry.sdk._configuration import _OTelSDKConfigurator  # made to be derived from by distributions
    except ModuleNotFoundError:
        logger.warning("OTEL_* variables are set, but the extra responses-mw[otel] is not installed: nothing is sent")
        return False

    class Configurator(_OTelSDKConfigurator):
        """The SDK's own set-up, with what the specification has for defaults."""

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
    """Those of the specification, where the SDK has others or none."""
    if "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        os.environ.setdefault("OTEL_SERVICE_NAME", "responses-mw")
    os.environ.setdefault("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    both = bool(os.environ.get(_ENDPOINTS[0]))
    for exporter, endpoint in zip(_EXPORTERS, _ENDPOINTS[1:], strict=True):
        if both or os.environ.get(endpoint):
            os.environ.setdefault(exporter, "otlp")
