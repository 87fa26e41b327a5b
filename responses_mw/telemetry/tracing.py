"""Start spans and propagate trace context. Without a tracer provider, spans are not recorded.

docs/operation/observability.md lists the spans. Do not make a turn's span the current span. Turns run in async generators,
which share their context with the consumer, so the span would be current in the consumer's code too. Pass the span to
`with_trace_context` instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import get_meter_provider
from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span
from starlette.datastructures import Headers

from ..version import VERSION
from .context import ActiveRequest, RequestContext, current_request, present
from .conventions import CANCELLED, DB, ERROR_TYPE, HTTP, SCHEMA_URL, SCOPE, SERVER_ADDRESS, SERVER_PORT, GenAI, Messaging, Own
from .metrics import EMBEDDING_DURATION, JOBS_RUNNING, REDIS_DURATION, STATE_ERRORS, TOOL_DURATION

TRACER = trace.get_tracer(SCOPE, VERSION, schema_url=SCHEMA_URL)
_NO_SPAN = nullcontext()


def is_tracing() -> bool:
    """Return whether a command of responses-mw or the host application has set a tracer provider."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider)


def is_measuring() -> bool:
    """Return whether a meter provider records metrics. The default providers of OpenTelemetry's API package record nothing."""
    return not type(get_meter_provider()).__module__.startswith("opentelemetry.metrics")


def captures_content(*, stores: bool) -> bool:
    """Return whether spans may contain messages and tool data. The operator must opt in, and the response must be stored."""
    opt_in = os.environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "").strip().lower()
    return stores and opt_in in ("true", "span_only", "span_and_event")


def with_trace_context(headers: Mapping[str, str], span: Span | None = None) -> dict[str, str]:
    """Return a copy of `headers` with the trace context of `span`, by default the current span."""
    span = span or get_current_span()
    carrier = dict(headers)
    if span.get_span_context().is_valid and is_tracing():
        carrier.pop("tracestate", None)  # `inject` sets it again unless it is empty
        # The new context has no baggage, because a `baggage` header is forwarded like other headers.
        propagate.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier


def activate_span(span: Span | None) -> AbstractContextManager[object]:
    """Return a context manager that makes `span` the current span. If `span` is None, the context manager does nothing.

    The span is not ended on exit. Exceptions are not recorded, because their messages may quote the request.
    """
    return _NO_SPAN if span is None else trace.use_span(span, record_exception=False, set_status_on_exception=False)


def trace_id(span: Span) -> str:
    """Return the trace id of `span` in hexadecimal, or "" if the span belongs to no trace."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def mark_failed(span: Span, kind: str) -> None:
    """Mark `span` as failed. `kind` is the value of `error.type` and must not quote requests or responses."""
    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(StatusCode.ERROR)


@contextmanager
def _trace(name: str, kind: SpanKind, attributes: Mapping[str, Any], *, is_current: bool = True) -> Iterator[Span]:
    """Trace the `with` block in a span with those `attributes` that are set. The span fails if an exception is raised."""
    span = TRACER.start_span(name, kind=kind, attributes=present(attributes))
    try:
        with activate_span(span if is_current else None):
            yield span
    except Exception as error:
        mark_failed(span, type(error).__name__)
        raise
    finally:
        span.end()


def start_request_span(name: str, scope: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> Span:
    """Start the span of a request. Its parent is the client's span in the headers of `scope`, if any.

    If the host application has a current span, that span is the parent instead.
    """
    if get_current_span().get_span_context().is_valid:
        return TRACER.start_span(name, kind=SpanKind.INTERNAL, attributes=attributes)
    context = propagate.extract(Headers(raw=scope["headers"]), Context())
    return TRACER.start_span(name, context, SpanKind.SERVER, attributes)


def start_http_span(request: RequestContext, scope: Mapping[str, Any]) -> Span:
    address, port = scope.get("server") or (None, None)
    attributes = {
        HTTP.METHOD: request.method,
        HTTP.SCHEME: scope.get("scheme", "http"),
        HTTP.PATH: scope["path"],
        HTTP.PROTOCOL_VERSION: scope.get("http_version", "1.1"),
        HTTP.CLIENT_ADDRESS: request.client,
        HTTP.USER_AGENT: request.user_agent,
        SERVER_ADDRESS: address,
        SERVER_PORT: port or None,
    }
    return start_request_span(request.method, scope, present(attributes))


def end_request_span(span: Span, request: RequestContext, status: int = 200) -> None:
    """End `span` with the facts of `request` as attributes. `status` is the HTTP status, or 200 for other requests."""
    if span.is_recording():
        attributes: dict[str, str | int] = {**request.span_attributes()}
        if request.method:
            attributes[HTTP.STATUS] = status
            if request.route:
                span.update_name(f"{request.method} {request.route}")
                attributes[HTTP.ROUTE] = request.route
        span.set_attributes(attributes)
    if error_type := request.error_type(status):
        mark_failed(span, error_type)
    span.end()


@contextmanager
def request_span(request: RequestContext, span: Span) -> Iterator[None]:
    """Make `request` the current request and `span` the current span. On exit, call `end_request_span`."""
    try:
        with ActiveRequest(request), activate_span(span):
            yield
    finally:
        end_request_span(span, request)


def _messaging(operation: str, response_id: str) -> dict[str, str]:
    return {
        Messaging.SYSTEM: "redis",
        Messaging.DESTINATION: "responses",  # the name of the queue in spans
        Messaging.OPERATION: operation,
        Messaging.OPERATION_TYPE: operation,
        Messaging.MESSAGE_ID: response_id,
    }


def queueing_span(response_id: str) -> AbstractContextManager[object]:
    """Return a context manager that traces the queueing of a job."""
    return _trace("send responses", SpanKind.PRODUCER, _messaging("send", response_id))


@contextmanager
def job_span(response_id: str, owner: str) -> Iterator[RequestContext]:
    """Trace the job that runs in this task, and count it as running. Yield its `RequestContext`.

    The job has its own trace. `link_to_request` links it to the trace of the request that queued the job.
    """
    attributes = _messaging("process", response_id)
    span = TRACER.start_span("process responses", Context(), SpanKind.CONSUMER, attributes)
    JOBS_RUNNING.add(1)
    request = RequestContext(owner=owner, response_id=response_id, stores=True, trace_id=trace_id(span))
    try:
        with request_span(request, span):
            yield request
    finally:
        JOBS_RUNNING.add(-1)


def link_to_request(headers: Mapping[str, str]) -> None:
    """Link the current span to the span that queued the job. `headers` contain the trace context of that span."""
    span = get_current_span()
    if span.is_recording():
        linked = get_current_span(propagate.extract(headers, Context())).get_span_context()
        if linked.is_valid:
            span.add_link(linked)


def redis_span(
    operation: str, script: str, size: int, address: Callable[[], tuple[str | None, int | None, int | None]]
) -> AbstractContextManager[object]:
    """Return a context manager that traces a round trip of `size` commands to Redis. `script` names a Lua script, or is "".

    `address` returns the host, the port and the database. Without a current span, nothing is traced, so that periodic work does
    not start a new trace with each round trip.
    """
    if not get_current_span().is_recording():
        return _NO_SPAN
    host, port, database = address()
    attributes = {
        DB.SYSTEM: "redis",
        DB.OPERATION: operation,
        DB.PROCEDURE: script,
        DB.BATCH_SIZE: size if size > 1 else None,
        DB.NAMESPACE: None if database is None else str(database),
        SERVER_ADDRESS: host,
        SERVER_PORT: port,
    }
    return _trace(f"{operation} {script}".rstrip(), SpanKind.CLIENT, attributes, is_current=False)


def measure_round_trip(operation: str, seconds: float, error: Exception | None = None) -> None:
    """Record the duration of a round trip to Redis. If it failed, also record the class of `error`."""
    attributes = {DB.SYSTEM: "redis", DB.OPERATION: operation}
    request = current_request()
    if request is not None:
        request.phases.add_round_trip(seconds)
    REDIS_DURATION.record(seconds, attributes if error is None else {**attributes, ERROR_TYPE: type(error).__name__})


@contextmanager
def measured_embedding(model: str) -> Iterator[None]:
    """Record the duration of the `with` block, which requests one embedding. If it fails, also record the cause's class."""
    attributes, began = {GenAI.OPERATION: "embeddings", GenAI.MODEL: model}, time.perf_counter()
    try:
        yield
    except Exception as error:
        attributes[ERROR_TYPE] = type(error.__cause__ or error).__name__
        raise
    finally:
        EMBEDDING_DURATION.record(time.perf_counter() - began, attributes)


def count_state_error(error: Exception) -> None:
    STATE_ERRORS.add(1, {ERROR_TYPE: type(error).__name__})


@contextmanager
def tool_call_span(
    name: str, arguments: str, *, call_id: str, label: str, kind: str, server: str
) -> Iterator[Callable[[Any, bool], None]]:
    """Trace and measure a call to the tool `name` with `arguments` (JSON). Spans of the MCP SDK become children of this span.

    `label` is the label of the MCP server, or "" for other tools. `kind` and `server` become label values of a metric, so
    clients must not choose them. Yield a function `record(content, failed)`. It records whether the tool failed and, if
    `captures_content` returns true, the arguments and the result.
    """
    request = current_request()
    attributes = {
        GenAI.OPERATION: "execute_tool",
        GenAI.TOOL_NAME: name,
        GenAI.TOOL_TYPE: "extension",  # the conventions' term for a tool that the server calls itself
        GenAI.TOOL_CALL_ID: call_id,
        Own.MCP_SERVER: label,
        Own.RESPONSE_ID: request.response_id if request is not None else "",
    }
    measured = {Own.TOOL_KIND: kind, Own.TOOL_SERVER: server}
    started = time.perf_counter()
    with _trace(f"execute_tool {name}", SpanKind.INTERNAL, attributes) as span:

        def record(content: Any, failed: bool) -> None:
            if failed:
                measured[ERROR_TYPE] = "tool_error"
                mark_failed(span, "tool_error")
            if span.is_recording() and captures_content(stores=request is not None and request.stores):
                text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
                span.set_attributes({GenAI.TOOL_ARGUMENTS: arguments, GenAI.TOOL_RESULT: text})

        try:
            yield record
        except asyncio.CancelledError:
            measured[ERROR_TYPE] = CANCELLED  # not a failure of the tool
            raise
        except Exception as error:
            measured[ERROR_TYPE] = type(error).__name__
            raise
        finally:
            TOOL_DURATION.record(time.perf_counter() - started, measured)
            if request is not None:
                request.tool_calls += 1
                request.tool_kinds.add(kind)
                request.phases.add(kind, started)
                request.tool_errors += measured.get(ERROR_TYPE, CANCELLED) != CANCELLED
