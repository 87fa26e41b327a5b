"""Collect a summary of each response that ends, for the index that `state/recent.py` keeps in Redis.

A summary is a JSON object of a few hundred bytes. It contains no text of a request, an answer or a tool.
"""

from __future__ import annotations

import time
from typing import Final

import orjson

from .collector import Collector
from .context import RequestContext, ResponseKind, present

MAX_PENDING: Final = 2000
"""Maximum number of summaries that wait for Redis. If there are more, the oldest ones are lost."""

_UNFINISHED = frozenset({"", "queued", "repeated", "requeued", "retried", "lost"})
_MAX_TEXT = 128  # maximum length of a text that a client or the upstream chooses
_FACTS = (
    "error_code",
    "error_type",
    "upstream_status",
    "cause",
    "model",
    "turns",
    "continuations",
    "tool_calls",
    "tool_errors",
    "tokens_in",
    "tokens_out",
    "tokens_cached",
    "tokens_reasoning",
    "first_token",
    "cache",
    "cache_reason",
    "stored",
    "unstored",
    "key",
    "request",
    "trace_id",
)
"""The facts of `RequestContext.facts` that a summary contains."""


class SummaryCollector(Collector):
    """The summaries of the process that have not been written to Redis yet."""

    def __init__(self) -> None:
        super().__init__(MAX_PENDING)
        self.replica = ""
        """The name of this process."""

    def add(self, request: RequestContext, kind: ResponseKind) -> None:
        """Add the summary of `request`, unless its response has not ended. `kind` is how the response was requested."""
        if not request.response_id or request.outcome in _UNFINISHED:
            return
        facts = request.facts()
        summary = {
            "id": request.response_id,
            "status": request.outcome,
            "kind": kind,
            "owner": request.owner,
            "ended": round(time.time(), 3),
            "seconds": round(time.perf_counter() - request.started, 3),
            "previous": request.previous_response[:_MAX_TEXT],
            "conversation": request.conversation[:_MAX_TEXT],
            "endpoint": request.endpoint[:_MAX_TEXT],
            "tools": sorted(request.tool_kinds) or None,
            "replica": self.replica,
            "phases": request.phases.since(request.started),
            "redis": request.phases.redis(),
            **{name: facts[name] for name in _FACTS if name in facts},
        }
        self._append(request.response_id, orjson.dumps(present(summary)))


SUMMARIES = SummaryCollector()
