"""Facts about the request or job that the current task works for.

Code that learns a fact calls `annotate`, `begin_run` or `end_run`, and need not know who reads it. Access lines, job
log lines, failed-run warnings, spans and metrics are derived from the facts when the request ends. Only this module knows the
names of the facts.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import get_current_span

from ..errors import APIError, UpstreamError
from .conventions import GenAI, Own
from .metrics import CONTINUATION_PAUSE, CONTINUATIONS, RESPONSES, STATUSES, UNSTORED, UNSTORED_REASONS, USAGE

logger = logging.getLogger("responses_mw.runs")

WARNING_INTERVAL = 60.0
"""Minimum number of seconds between two warnings about the same fault."""

_ENDS = frozenset({"completed", "incomplete", "failed"})
_FAULTS = frozenset({"failed", "interrupted"})
_HASH_LENGTH, _SHORT = 16, 8
"""Minimum length of an owner that is a hash, and how many of its characters are shown."""
_MAX_TEXT, _MAX_MESSAGE = 128, 500
"""Maximum length of a fact that a client or the upstream chooses, and of an error's message in the log."""
_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run failed or a request was refused; without a code, neither happened."""

    code: str = ""
    """The error's code, or else its type, as the client sees it."""
    kind: str = ""
    """`error.type` in spans and metrics: the upstream's status, or else the class of the error."""
    upstream_status: int | None = None
    message: str = ""
    """May quote the request."""

    @classmethod
    def of(cls, error: Exception, code: str | None = None) -> Failure:
        if not isinstance(error, APIError):
            return cls(code or APIError.type, kind_of_error(error))
        return cls(code or error.code or error.type, kind_of_error(error), error.upstream_status, error.message)


_NO_FAILURE = Failure()


def kind_of_error(error: Exception) -> str:
    """Return the upstream's status if it caused the `error`, or else the error's class."""
    status = error.upstream_status if isinstance(error, APIError) else None
    return str(status) if status is not None else type(error).__name__.lstrip("_")


@dataclass(slots=True)
class RequestContext:
    """Facts about one HTTP request, WebSocket message or background job."""

    route: str = ""
    """The path's template."""
    request_id: str = ""
    owner: str = ""
    """The hash by which stored objects are assigned to their owner."""
    key: str = ""
    """The name of the caller's API key."""
    response_id: str = ""
    conversation: str = ""
    previous_response: str = ""
    model: str = ""
    streams: bool | None = None
    """Whether the client asked for a stream; None for a request without a run."""
    stores: bool = False
    """False if the text of the response must not be recorded anywhere."""
    cache: str = ""
    """The result of a lookup: `exact`, `semantic` or `miss`."""
    cache_reason: str = ""
    """Why the cache has no answer."""
    cache_status: str = ""
    """The result of the lookup in full, for the response's header."""
    outcome: str = ""
    """How the run ended: `completed`, `incomplete`, `failed`, `cancelled` (the client disconnected), `refused` (4xx),
    `queued`, `repeated` (by an idempotency key) or `interrupted` (the client must resume elsewhere, or Redis failed during a
    job). A job can also be `requeued` or `lost` (cancelled, or taken by another worker)."""
    failure: Failure = _NO_FAILURE
    turns: int | None = None
    continuations: int = 0
    """How often the run was continued after its upstream or its worker was lost."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Number of failed calls of server-side tools. The model sees the failure, and the run continues."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    first_token: float | None = None
    """Seconds until the first turn's answer was first read; None for an upstream error, a compaction or a token count."""
    stored: bool | None = None
    unstored: str = ""
    """Why the response is not stored."""
    has_left: bool = False
    """Whether the client disconnected before the answer was complete."""
    trace_id: str = ""
    started: float = field(default_factory=time.perf_counter)

    def fail(self, error: Exception) -> None:
        """Record that `error` is the answer to the request."""
        if isinstance(error, UpstreamError):
            is_refusal = error.status in (401, 403)
        else:
            is_refusal = isinstance(error, APIError) and error.status < 500
        self.outcome, self.failure = "refused" if is_refusal else "failed", Failure.of(error)

    def error_type(self, status: int = 200) -> str:
        """Return `error.type` of an answer with this HTTP status; empty if the server did not fail."""
        if status >= 500:
            return str(status)
        return self.failure.kind if self.outcome in _FAULTS and status < 400 else ""

    def span_attributes(self) -> dict[str, str | bool]:
        """Return the known facts about the response, named by OpenTelemetry's conventions."""
        attributes: dict[str, str | bool | None] = {
            GenAI.RESPONSE_ID: self.response_id,
            GenAI.CONVERSATION_ID: self.conversation,
            GenAI.MODEL: self.model,
            GenAI.STREAM: self.streams or None,
            GenAI.PREVIOUS_RESPONSE_ID: self.previous_response,
            Own.CACHE_RESULT: self.cache,
            Own.OUTCOME: self.outcome,
        }
        return {name: value for name, value in attributes.items() if value}

    def facts(self) -> dict[str, Any]:
        """Return the known facts for logs, without any content of the request."""
        details_in, details_out = (self.usage.get(f"{way}_tokens_details") or {} for way in ("input", "output"))
        facts: dict[str, Any] = {
            "outcome": self.outcome,
            "error_code": self.failure.code[:_MAX_TEXT],
            "error_type": self.failure.kind,
            "upstream_status": self.failure.upstream_status,
            "model": self.model[:_MAX_TEXT],
            "stream": self.streams,
            "turns": self.turns,
            "continuations": self.continuations or None,
            "tool_calls": self.tool_calls or None,
            "tool_errors": self.tool_errors or None,
            "tokens_in": self.usage.get("input_tokens"),
            "tokens_out": self.usage.get("output_tokens"),
            "tokens_cached": details_in.get("cached_tokens"),
            "tokens_reasoning": details_out.get("reasoning_tokens"),
            "first_token": None if self.first_token is None else round(self.first_token, 4),
            "cache": self.cache,
            "cache_reason": self.cache_reason,
            "stored": False if self.unstored else self.stored,
            "unstored": self.unstored,
            "request": self.request_id,
            "response": self.response_id,
            "key": self.key,
            "owner": self.owner[:_SHORT] if len(self.owner) >= _HASH_LENGTH else self.owner,
            "left": self.has_left or None,
            "trace_id": self.trace_id,
        }
        return {name: value for name, value in facts.items() if value not in ("", None)}


_CURRENT: ContextVar[RequestContext | None] = ContextVar("responses_mw.request", default=None)


def current_request() -> RequestContext | None:
    return _CURRENT.get()


@contextmanager
def activated(request: RequestContext) -> Iterator[None]:
    """Make `request` the current one, including for tasks created inside."""
    token = _CURRENT.set(request)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def annotate(*, error: Exception | None = None, response: Mapping[str, Any] | None = None, **facts: str | bool) -> None:
    """Set `facts`, members of `RequestContext`, for the current request, if there is one.

    `error` is the answer to the request, `response` the document being created or retrieved.
    """
    request = _CURRENT.get()
    if request is None:
        return
    if error is not None:
        request.fail(error)
    for name, fact in facts.items():
        setattr(request, name, fact)
    if response is not None:
        conversation = response.get("conversation")
        request.response_id = response["id"]
        request.conversation = conversation["id"] if conversation else ""
        request.stores = bool(response.get("store"))


def begin_run(document: Mapping[str, Any], *, streams: bool) -> None:
    """Record that the current request makes the response `document`."""
    request = _CURRENT.get()
    if request is None:
        return
    annotate(response=document)
    request.model, request.streams = str(document["model"]), streams
    request.previous_response = document.get("previous_response_id") or ""


def end_run(document: Mapping[str, Any], *, turns: int, continuations: int = 0, error: Exception | None = None) -> None:
    """Record the end of the current request's run, or the state in which it was cancelled.

    A later call replaces an earlier one. `error` is what ended the run, if it is known. Runs that make a part of the response,
    such as a summary, are ignored.
    """
    request = _CURRENT.get()
    if request is None or document["id"] != request.response_id:
        return
    request.outcome = document["status"] if document["status"] in _ENDS else "cancelled"
    request.turns, request.continuations, request.usage = turns, continuations, document.get("usage") or {}
    fault = document.get("error") if request.outcome == "failed" else None
    if fault:
        request.failure = Failure.of(error, fault["code"]) if error is not None else Failure(fault["code"], fault["code"])


# -- reports -----------------------------------------------------------------------------------------------------------------


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
    if request.outcome != "failed" or not request.failure.code:
        return
    subject = f"response {request.response_id} failed" if request.response_id else f"{request.route or 'a request'} failed"
    log_facts(logger, subject, {**request.facts(), **more}, level=logging.WARNING)
    if request.stores and request.failure.message:
        logger.debug("response %s failed because of: %.*r", request.response_id, _MAX_MESSAGE, request.failure.message)


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
    failure = Failure(code, kind or code) if code else _NO_FAILURE
    request = RequestContext(owner=owner, response_id=response_id, outcome=outcome, failure=failure)
    log_facts(logger, f"job {response_id} ended without its worker", request.facts())
    report_failure(request)
    count_response(request, "background")


def _shown(value: Any) -> str:
    """Return a value as text, quoted if it could be mistaken for another fact."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
