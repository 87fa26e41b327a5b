"""Configure logs, traces and metrics for the command line. A host application configures its telemetry itself.

Unless the log level is `debug`, log records contain no prompts, answers or tool data. Some values, such as model names, are
chosen by clients or by the upstream. Characters that could start a new line or control a terminal are therefore escaped.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from traceback import format_tb
from typing import Any, Literal

from opentelemetry.metrics import set_meter_provider
from opentelemetry.trace import ProxyTracerProvider, get_current_span, get_tracer_provider, set_tracer_provider

from ..errors import StartupError
from ..redaction import NO_SECRETS, Redactor
from ..version import VERSION
from .context import current_request

logger = logging.getLogger(__name__)

# At `info`, these loggers log every request or internal details.
_QUIET = ("httpx", "httpx2", "httpcore", "httpcore2", "opentelemetry", "uvicorn")

# C0, DEL and C1, Unicode's line separators, characters that change the text direction, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_INDENT = "    "
_EXIT_TIMEOUT = 1.0
"""Maximum number of seconds for exporting the last data at exit. The SDK would wait up to a minute for the collector."""


def set_up_logs(level: str, form: Literal["human", "json"], redactor: Redactor = NO_SECRETS) -> None:
    """Configure the root logger to write to standard error. `redactor` is applied to each record."""
    handler = logging.StreamHandler()
    formatter = JSONFormatter if form == "json" else HumanFormatter
    handler.setFormatter(formatter(with_messages=level == "debug", redactor=redactor))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def set_up_sdk() -> None:
    """Export traces and metrics by OTLP over HTTP, as OpenTelemetry's environment variables specify.

    Do nothing if no endpoint or exporter is set, or if `opentelemetry-instrument` has already set a tracer provider. If the SDK
    is not installed, log a warning. Raises `StartupError` if a variable is invalid, or sets another exporter or protocol.
    """
    if not isinstance(get_tracer_provider(), ProxyTracerProvider):
        return
    exporters = {signal: exporter for signal in ("TRACES", "METRICS") if (exporter := _exporter(signal)) != "none"}
    if not exporters:
        return
    try:
        _export(exporters)
    except ModuleNotFoundError:
        logger.warning("OTEL_* variables are set, but the extra responses-mw[otel] is not installed: nothing is exported")
    except ValueError as error:
        raise StartupError(f"an OTEL_* variable is invalid: {error}") from None


def _export(exporters: Mapping[str, str]) -> None:
    """Set the provider of each signal in `exporters`.

    Raises `StartupError` if an exporter or its protocol is not supported, and `ValueError` if a variable is invalid.
    """
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    for signal, exporter in exporters.items():
        _check_exporter(signal, exporter)
    attributes = {"service.version": VERSION}
    if not _variable("OTEL_SERVICE_NAME") and "service.name=" not in _variable("OTEL_RESOURCE_ATTRIBUTES"):
        attributes["service.name"] = "responses-mw"
    resource = Resource.create(attributes)
    shut_down = list[Callable[[], None]]()
    if "TRACES" in exporters:
        tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        set_tracer_provider(tracer_provider)
        shut_down.append(tracer_provider.shutdown)
    if "METRICS" in exporters:
        meter_provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource, shutdown_on_exit=False)
        set_meter_provider(meter_provider)
        shut_down.append(meter_provider.shutdown)
    _call_at_exit(shut_down)


def _call_at_exit(shut_down: Iterable[Callable[[], None]]) -> None:
    """When the process exits, call the functions of `shut_down` at the same time, for at most `_EXIT_TIMEOUT` seconds."""
    is_exiting = threading.Event()

    def run(function: Callable[[], None]) -> None:
        is_exiting.wait()
        function()

    def exit_soon() -> None:
        is_exiting.set()
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        if any(thread.is_alive() for thread in threads):
            logger.warning("the OTLP collector does not answer: the last traces or metrics are lost")

    # Started now, because threads cannot be started during the exit.
    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in shut_down]
    for thread in threads:
        thread.start()
    atexit.register(exit_soon)


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def _exporter(signal: str) -> str:
    """Return the name of the exporter of traces or metrics, or `none`. The default is `otlp` if an endpoint is set."""
    if _variable("OTEL_SDK_DISABLED").lower() == "true":
        return "none"
    has_endpoint = _variable("OTEL_EXPORTER_OTLP_ENDPOINT") or _variable(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    exporter = _variable(f"OTEL_{signal}_EXPORTER") or ("otlp" if has_endpoint else "none")
    return "none" if exporter.lower() == "none" else exporter


def _check_exporter(signal: str, exporter: str) -> None:
    """Raise `StartupError` unless the exporter is `otlp` and its protocol is `http/protobuf`."""
    name = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
    protocol = _variable(name) or _variable("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    if (exporter, protocol) != ("otlp", "http/protobuf"):
        unsupported = f"OTEL_{signal}_EXPORTER={exporter}" if exporter != "otlp" else f"the OTLP protocol {protocol}"
        raise StartupError(f"{unsupported} is not supported: run the command under opentelemetry-instrument.")


# -- log records ----------------------------------------------------------------------------------------------------


class _Formatter(logging.Formatter):
    form: str | None = None

    def __init__(self, *, with_messages: bool = False, redactor: Redactor = NO_SECRETS) -> None:
        """If `with_messages` is true, tracebacks include the messages of exceptions. Use this only for debugging.

        Messages may quote the request, so they are omitted if the current request's response is not stored.
        """
        super().__init__(self.form)
        self._with_messages = with_messages
        self._redactor = redactor

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        request = current_request()
        if self._with_messages and (request is None or request.stores):
            return _block(super().formatException(ei))
        return _block("\n".join(_traceback(ei[1]))) if ei[1] is not None else ""

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 (logging's name)
        return _block(stack_info)


class HumanFormatter(_Formatter):
    """Formats a record as one line of text. Tracebacks are indented, so that their lines cannot be mistaken for records."""

    form = "%(asctime)s %(levelname)s %(name)s: %(message)s%(ids)s"

    def format(self, record: logging.LogRecord) -> str:
        ids = {} if hasattr(record, "facts") else _ids()
        record.ids = " [" + " ".join(f"{name}={value}" for name, value in ids.items()) + "]" if ids else ""
        return self._redactor(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return _escaped(super().formatMessage(record))


class JSONFormatter(_Formatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "subject", None) or record.getMessage(),
            **_ids(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = self._redactor(json.dumps(line, ensure_ascii=False, default=str))
        return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _block(text: str) -> str:
    return "\n".join(_INDENT + _escaped(line.expandtabs()) for line in text.split("\n"))


def _ids() -> dict[str, str]:
    ids: dict[str, str] = {}
    context, request = get_current_span().get_span_context(), current_request()
    if context.is_valid:
        ids = {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
    if request is not None:
        ids |= {"request": request.request_id, "response": request.response_id}
    return {name: value for name, value in ids.items() if value}


def _traceback(error: BaseException, shown: frozenset[int] = frozenset()) -> Iterator[str]:
    """Yield the lines of a traceback without messages, including the causes of `error` and the exceptions of a group.

    Causes may form a circle. `shown` has the ids of the exceptions that are being shown, which are not shown again.
    """
    shown |= {id(error)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and id(cause) not in shown:
        yield from _traceback(cause, shown)
        yield "and then:"
    yield from (line.rstrip() for line in format_tb(error.__traceback__))
    yield f"{type(error).__module__}.{type(error).__qualname__}"
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield "in it:"
        yield from _traceback(inner, shown)
