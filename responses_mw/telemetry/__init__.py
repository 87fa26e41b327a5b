"""What an operator sees: spans, metrics, log records. Nothing here is done for each token.

    exchange   what is known of the request, or job, that this task works for
    observed   a request: server span, metrics of HTTP, access line
    turn       a chat completion: client span, metrics of generative AI
    tool       a call of a tool
    tracing    the other spans, and how their context goes on
    names      all instruments; ``metrics`` is what they are made of
    content    messages as spans hold them, for those who opted in
    logs, sdk  set-up, for our own commands

No other module imports OpenTelemetry. A span, a metric, a log record holds no prompt, answer, credential, path or query.
"""

from .exchange import told_cache, told_owner, told_response, told_route
from .logs import set_up_logs
from .metrics import CONTENT_TYPE, exposition
from .names import (
    CACHE_LOOKUPS,
    EVENTS_APPENDED,
    INSTRUMENTS,
    LEASES_LOST,
    LIMITS_REFUSED,
    LIMITS_UNCHECKED,
    QUEUE_AGE,
    QUEUE_DEPTH,
)
from .observed import Observed, observed_message
from .sdk import set_up_sdk
from .tool import ToolCall
from .tracing import carried, is_measuring, is_tracing, queued_by, running, state_failed, storing
from .turn import Server, Turn

__all__ = [
    "CACHE_LOOKUPS",
    "CONTENT_TYPE",
    "EVENTS_APPENDED",
    "INSTRUMENTS",
    "LEASES_LOST",
    "LIMITS_REFUSED",
    "LIMITS_UNCHECKED",
    "QUEUE_AGE",
    "QUEUE_DEPTH",
    "Observed",
    "Server",
    "ToolCall",
    "Turn",
    "carried",
    "exposition",
    "is_measuring",
    "is_tracing",
    "observed_message",
    "queued_by",
    "running",
    "set_up_logs",
    "set_up_sdk",
    "state_failed",
    "storing",
    "told_cache",
    "told_owner",
    "told_response",
    "told_route",
]
