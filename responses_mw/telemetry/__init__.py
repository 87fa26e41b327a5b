"""Spans, metrics and log records. Nothing here runs per token.

    context    facts about the current request or job
    report     log lines and counts derived from the facts; usage: counts by owner
    turn       turns of the model: client span, metrics, messages by opt-in
    tracing    all other spans, and propagation of trace context
    metrics    all metrics, for Prometheus and OpenTelemetry; instruments: their kinds
    logs, sdk  set-up for our own commands

No other module imports opentelemetry or prometheus_client. Spans, metrics and log records hold no prompt, answer, credential,
path or query.
"""

from .context import annotate, begin_run, current_request, end_run, kind_of_error
from .instruments import REGISTRY, exposition
from .logs import WarningLimit, set_up_logs
from .metrics import (
    CACHE_LOOKUPS,
    CACHE_MISSES,
    EVENT_LOOP_LAG,
    EVENTS_APPENDED,
    JOBS_RETRIED,
    LEASES_LOST,
    LIMITS_REFUSED,
    LIMITS_UNCHECKED,
    QUEUE_AGE,
    QUEUE_DEPTH,
    REDIS_MEMORY_MAX,
    REDIS_MEMORY_USED,
    UPSTREAM_UP,
    UPSTREAM_WAITS,
    WEBSOCKETS_OPEN,
)
from .report import count_response, log_facts, report_continuation, report_failure, report_lost_job
from .sdk import set_up_sdk
from .shared import DIRECTORY as METRICS_DIRECTORY
from .shared import forget_process, is_shared
from .tracing import (
    ToolCallSpan,
    count_state_error,
    is_measuring,
    is_tracing,
    job_span,
    link_to_request,
    measure_round_trip,
    measured_embedding,
    queueing_span,
    redis_span,
    with_trace_context,
)
from .turn import TurnSpan, UpstreamServer
from .usage import MAX_OWNERS, OTHERS, USAGE, OwnerUsage

__all__ = [
    "CACHE_LOOKUPS",
    "CACHE_MISSES",
    "EVENTS_APPENDED",
    "EVENT_LOOP_LAG",
    "JOBS_RETRIED",
    "LEASES_LOST",
    "LIMITS_REFUSED",
    "LIMITS_UNCHECKED",
    "MAX_OWNERS",
    "METRICS_DIRECTORY",
    "OTHERS",
    "QUEUE_AGE",
    "QUEUE_DEPTH",
    "REDIS_MEMORY_MAX",
    "REDIS_MEMORY_USED",
    "REGISTRY",
    "UPSTREAM_UP",
    "UPSTREAM_WAITS",
    "USAGE",
    "WEBSOCKETS_OPEN",
    "OwnerUsage",
    "ToolCallSpan",
    "TurnSpan",
    "UpstreamServer",
    "WarningLimit",
    "annotate",
    "begin_run",
    "count_response",
    "count_state_error",
    "current_request",
    "end_run",
    "exposition",
    "forget_process",
    "is_measuring",
    "is_shared",
    "is_tracing",
    "job_span",
    "kind_of_error",
    "link_to_request",
    "log_facts",
    "measure_round_trip",
    "measured_embedding",
    "queueing_span",
    "redis_span",
    "report_continuation",
    "report_failure",
    "report_lost_job",
    "set_up_logs",
    "set_up_sdk",
    "with_trace_context",
]
