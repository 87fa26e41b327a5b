"""Count ended responses, and keep their summaries."""

from __future__ import annotations

import logging

from ..errors import Cause, cause_of_code
from .captures import CAPTURES
from .context import Outcome, RequestContext, ResponseKind, log_facts, report_failure
from .failure import Failure
from .metrics import RESPONSES, STATUSES, UNSTORED, UNSTORED_REASONS, USAGE
from .summaries import SUMMARIES

logger = logging.getLogger("responses_mw.runs")


def count_response(request: RequestContext, kind: ResponseKind) -> None:
    """Count the response of `request`, if it has ended, in the metrics and in its owner's usage, and keep its summary.

    A failed or cancelled response without tokens is not added to the owner's usage. `kind` is how the response was
    requested: `json`, `stream`, `websocket`, or `background` for a job.
    """
    makes_response = request.streams is not None or kind == "background"
    if not makes_response:
        return
    if SUMMARIES.is_on:
        SUMMARIES.add(request, kind)
    if request.capture is not None and (request.capture.is_requested or request.outcome in ("failed", "refused")):
        CAPTURES.add(request.response_id, request.capture)
    if request.outcome not in STATUSES:
        return
    RESPONSES.add(1, {"status": request.outcome, "kind": kind, "cause": request.cause_of_failure})
    if request.unstored in UNSTORED_REASONS:
        UNSTORED.add(1, {"reason": request.unstored})
    if request.owner and (request.usage or request.outcome in ("completed", "incomplete")):
        # A cached answer's tokens were counted when it was generated. The owner of a refused or failed request may be forged.
        usage = {} if request.cache in ("exact", "semantic") else request.usage or None
        USAGE.count(request.owner, request.model, usage)


def report_lost_job(response_id: str, owner: str, outcome: Outcome, code: str = "", kind: str = "") -> None:
    """Log and count a job that was finalized without its worker. If it failed, `code` and `kind` describe the error."""
    cause: Cause = "server" if kind else cause_of_code(code)
    failure = Failure(code, kind or code, cause=cause) if code else Failure()
    request = RequestContext(owner=owner, response_id=response_id, outcome=outcome, failure=failure)
    log_facts(logger, f"job {response_id} ended without its worker", request.facts())
    report_failure(request)
    count_response(request, "background")
