"""Log requests and jobs when they end, and count their outcomes."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import get_current_span

from .context import Failure, RequestContext
from .metrics import CONTINUATION_PAUSE, CONTINUATIONS, RESPONSES, STATUSES, UNSTORED, UNSTORED_REASONS, USAGE

logger = logging.getLogger("responses_mw.runs")

_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)
_MAX_MESSAGE = 500
WARNING_INTERVAL = 60.0
"""Minimum number of seconds between two warnings about the same fault."""


class WarningLimit:
    """Limits the warnings about one fault."""

    def __init__(self) -> None:
        self._next = float("-inf")

    def is_due(self) -> bool:
        """Return whether to warn now: true at most once in `WARNING_INTERVAL`."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + WARNING_INTERVAL
        return True

    def reset(self) -> None:
        """Allow the next warning at once, because the fault is over."""
        self._next = float("-inf")


def log_facts(
    to: logging.Logger, subject: str, facts: Mapping[str, Any], named: Mapping[str, Any] = {}, level: int = logging.INFO
) -> None:
    """Log `subject` and the facts, as `name=value` in text or as members in JSON.

    `named` holds facts that `subject` already states in words. They are added only in JSON.
    """
    if not to.isEnabledFor(level):
        return
    shown = " ".join(f"{name}={_shown(value)}" for name, value in facts.items())
    to.log(level, "%s", f"{subject} {shown}".rstrip(), extra={"facts": {**named, **facts}, "subject": subject})


def count_response(request: RequestContext, kind: str) -> None:
    """Count the response of `request`, if it has one.

    `kind` is how it was requested: `json`, `stream`, `websocket`, or `background` for a job, which always has one.
    """
    makes_response = request.streams is not None or kind == "background"
    if not makes_response or request.outcome not in STATUSES:
        return
    RESPONSES.add(1, {"status": request.outcome, "kind": kind})
    if request.unstored in UNSTORED_REASONS:
        UNSTORED.add(1, {"reason": request.unstored})
    if request.owner and (request.usage or request.outcome in ("completed", "incomplete")):
        USAGE.count(request.owner, request.usage)  # not for refused and failed requests, whose owners may be forged


def report_failure(request: RequestContext, **more: Any) -> None:
    """Log a warning if the run of `request` failed. `more` are further facts.

    The text of the error, which may quote the request, is logged only at `debug`, and never if the response is not stored.
    """
    failure = request.failure
    if request.outcome != "failed" or failure is None:
        return
    subject = f"response {request.response_id} failed" if request.response_id else f"{request.route or 'a request'} failed"
    log_facts(logger, subject, {**request.facts(), **more}, level=logging.WARNING)
    if request.stores and failure.message:
        logger.debug("response %s failed because of: %.*r", request.response_id, _MAX_MESSAGE, failure.message)


def report_continuation(
    response_id: str, *, reason: str, phase: str, tokens: int | None = None, pause: float | None = None
) -> None:
    """Count and log that a response was continued.

    `reason` is what failed: the upstream (`broken` or `timeout`) or the `worker` of a background response. `phase` is what the
    client had seen, `tokens` is how many tokens of that were kept, and `pause` is how many seconds the client waited.
    """
    CONTINUATIONS.add(1, {"reason": reason, "phase": phase})
    if pause is not None:
        CONTINUATION_PAUSE.record(pause, {})
    given = {"reason": reason, "phase": phase, "tokens_kept": tokens, "pause": pause if pause is None else round(pause, 3)}
    facts = {name: value for name, value in given.items() if value is not None}
    get_current_span().add_event(
        "responses_mw.continuation", {f"responses_mw.continuation.{name}": value for name, value in facts.items()}
    )
    log_facts(logger, f"response {response_id} continued", facts)


def report_lost_job(response_id: str, owner: str, outcome: str, code: str = "", kind: str = "") -> None:
    """Log the end of a job that was recorded by a process other than its worker."""
    request = RequestContext(owner=owner, response_id=response_id, outcome=outcome)
    request.failure = Failure(code, kind or code) if code else None
    log_facts(logger, f"job {response_id} ended without its worker", request.facts())
    report_failure(request)
    count_response(request, "background")


def _shown(value: Any) -> str:
    """Return a value as text, quoted if it could be mistaken for another fact."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
