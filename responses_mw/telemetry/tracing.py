"""Spans, and the context that goes on to others. Without a tracer that somebody set up, all of it does nothing.

    POST /v1/responses            server; the caller's traceparent is its parent
    ├── EVALSHA commit            client; a round trip to Redis with one of our scripts
    ├── chat <model>              client; a turn
    └── execute_tool <name>       internal; a tool of ours
    process response              consumer; a job, linked to the request that queued it, with the same below it

Context does not go into generators: between two items of one, whoever reads it would have it. So a turn's span is not the
current one; it is handed on by its headers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry import propagate
from opentelemetry.context import Context, attach, detach
from opentelemetry.metrics import get_meter_provider
from opentelemetry.trace import (
    NoOpTracerProvider,
    ProxyTracerProvider,
    Span,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    get_tracer,
    get_tracer_provider,
    set_span_in_context,
)

from .exchange import Exchange, going_on, response_attributes
from .names import JOBS_RUNNING, STATE_ERRORS

TRACER = get_tracer("responses_mw")
_NOTHING = nullcontext()


def is_tracing() -> bool:
    """Whether somebody set up a tracer: this process's command, or the host application."""
    return not isinstance(get_tracer_provider(), ProxyTracerProvider | NoOpTracerProvider)


def is_measuring() -> bool:
    """Whether somebody set up a meter. The providers of the API itself forget what they are told."""
    return not type(get_meter_provider()).__module__.startswith("opentelemetry.metrics")


def captures(*, stores: bool) -> bool:
    """Whether texts may stand in spans: by the conventions' opt-in, and never those of a response that is not stored."""
    chosen = os.environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "").strip().lower()
    return stores and chosen in ("true", "span_only", "span_and_event")


def carried(headers: Mapping[str, str], span: Span | None = None) -> dict[str, str]:
    """The caller's ``headers`` as they go on: with the context of ``span`` (the current one) in place of the caller's."""
    carrier = dict(headers)
    if is_tracing():
        span = span or get_current_span()
        if span.get_span_context().is_valid:
            carrier.pop("tracestate", None)  # the span has it too, unless it was none
            propagate.inject(carrier, set_span_in_context(span, Context()))  # no baggage: that goes as other headers do
    return carrier


def told_by(headers: Mapping[str, str]) -> Context:
    """The context that ``headers`` (names in lower case) bring."""
    return propagate.extract(dict(headers), Context())


@contextmanager
def current_span(span: Span) -> Iterator[None]:
    token = attach(set_span_in_context(span))
    try:
        yield
    finally:
        detach(token)


def mark_failed(span: Span, kind: str) -> None:
    """Marks a span as failed; ``kind`` names a class of failures, and holds nothing of what was asked or answered."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


@contextmanager
def running(response_id: str, owner: str) -> Iterator[None]:
    """The span of a job that runs in this task: a trace of its own. ``queued_by`` links it."""
    span = TRACER.start_span(
        "process response",
        Context(),
        SpanKind.CONSUMER,
        {"messaging.operation.type": "process", "messaging.system": "redis"},
    )
    exchange = Exchange(owner=owner, response_id=response_id, stores=True)
    JOBS_RUNNING.add(1)
    try:
        with within(exchange, span):
            yield
    finally:
        JOBS_RUNNING.add(-1)


@contextmanager
def within(exchange: Exchange, span: Span) -> Iterator[None]:
    """What goes on belongs to ``exchange``, which ``span`` tells of in the end."""
    try:
        with going_on(exchange), current_span(span):
            yield
    except Exception as error:
        mark_failed(span, type(error).__name__)
        raise
    finally:
        span.set_attributes(response_attributes(exchange))
        span.end()


def queued_by(headers: Mapping[str, str]) -> None:
    """Links the current span to the one whose context ``headers`` bring: that of the request that queued the job."""
    span = get_current_span()
    if span.is_recording():
        of = get_current_span(told_by(headers)).get_span_context()
        if of.is_valid:
            span.add_link(of)


def storing(operation: str, script: str = "") -> AbstractContextManager[None]:
    """The span of a round trip to Redis: by one of our scripts, or a pipeline. Only within a request or a job: what the process
    does by itself, time and again, would be a trace each."""
    return _storing(operation, script) if get_current_span().is_recording() else _NOTHING


@contextmanager
def _storing(operation: str, script: str) -> Iterator[None]:
    attributes = {"db.system.name": "redis", "db.operation.name": operation}
    if script:
        attributes["db.stored_procedure.name"] = script
    span = TRACER.start_span(f"{operation} {script}".rstrip(), kind=SpanKind.CLIENT, attributes=attributes)
    try:
        yield
    except Exception as error:
        mark_failed(span, type(error).__name__)
        raise
    finally:
        span.end()


def state_failed(kind: str) -> None:
    """Counts a round trip to Redis that failed; ``kind`` is the name of the class of the error."""
    STATE_ERRORS.add(1, {"error.type": kind})
