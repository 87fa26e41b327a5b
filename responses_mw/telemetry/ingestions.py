"""Report the ingestion of files into vector stores: log lines, metrics and spans."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from ..errors import Cause
from .context import RequestContext, level_of, log_facts, present
from .conventions import Messaging, Own
from .failure import Failure
from .metrics import INGESTION_CHUNKS, INGESTION_DURATION, INGESTIONS, INGESTIONS_RUNNING
from .tracing import TRACER, request_span, trace_id

logger = logging.getLogger("responses_mw.ingestion")


@dataclass(slots=True)
class IngestionReport:
    """The report about a file that a worker adds to a vector store. `attempt` is 1, plus the number of lost workers."""

    request: RequestContext
    file_id: str
    store_id: str
    attempt: int
    chunks: int = 0
    bytes: int = 0

    def fail(self, code: str, message: str, cause: Cause) -> None:
        """Record why the file cannot be added. `message` must not quote the file."""
        self.request.outcome, self.request.failure = "failed", Failure(code, code, message=message, cause=cause)

    def end(self, seconds: float) -> None:
        """Log and count the outcome. Unreadable files are not logged as warnings, because clients cause them."""
        request, status = self.request, self.request.outcome
        failure = request.failure
        counts = {"chunks": self.chunks or None, "bytes": self.bytes or None, "error": failure.message}
        facts = {"store": self.store_id, "attempt": self.attempt, "seconds": round(seconds, 3), **present(counts)}
        level = level_of(failure.cause) if failure.cause else logging.INFO
        log_facts(logger, f"ingestion of {self.file_id} ends", {**request.facts(), **facts}, level=level)
        if status in ("completed", "failed", "retried"):
            INGESTIONS.add(1, {"status": status, "cause": failure.cause})
        if status in ("completed", "failed"):
            INGESTION_DURATION.record(seconds, {"status": status})
            INGESTION_CHUNKS.add(self.chunks)


@contextmanager
def report_ingestion(file_id: str, store_id: str, owner: str, attempt: int) -> Iterator[IngestionReport]:
    """Trace the ingestion that runs in this task, count it as running, and report its end."""
    attributes: dict[str, Any] = {
        Messaging.SYSTEM: "redis",
        Messaging.DESTINATION: "files",
        Messaging.OPERATION: "process",
        Messaging.OPERATION_TYPE: "process",
        Messaging.MESSAGE_ID: file_id,
        Own.VECTOR_STORE: store_id,
        Own.ATTEMPT: attempt,
    }
    span, began = TRACER.start_span("process files", Context(), SpanKind.CONSUMER, attributes), time.perf_counter()
    report = IngestionReport(RequestContext(owner=owner, trace_id=trace_id(span)), file_id, store_id, attempt)
    report.request.outcome = "interrupted"  # until the caller sets another one
    INGESTIONS_RUNNING.add(1)
    try:
        with request_span(report.request, span):
            yield report
            span.set_attribute(Own.CHUNKS, report.chunks)
    finally:
        INGESTIONS_RUNNING.add(-1)
        report.end(time.perf_counter() - began)
