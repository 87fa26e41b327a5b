"""Collect facts about the request or job that the current task is processing.

Other code records facts with `annotate`, `begin_run` and `end_run`. When the request or job ends, its log lines, spans and
metrics are derived from the facts.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from opentelemetry.trace import get_current_span

from ..errors import APIError, UpstreamError, cause_of_code
from ..settings.upstreams import DEFAULT, with_path_of
from .captures import CAPTURES, Capture
from .conventions import GenAI, Own
from .failure import NO_FAILURE, Failure
from .metrics import CONTINUATION_PAUSE, CONTINUATIONS
from .phases import Phases

logger = logging.getLogger("responses_mw.runs")

T = TypeVar("T")

ResponseKind: TypeAlias = Literal["json", "stream", "websocket", "background"]
CacheResult: TypeAlias = Literal["exact", "semantic", "miss"]
_Status: TypeAlias = Literal["completed", "incomplete", "failed", "cancelled"]
Outcome: TypeAlias = _Status | Literal["refused", "interrupted", "queued", "repeated", "requeued", "retried", "lost"]

WARNING_INTERVAL = 60.0  # minimum number of seconds between two warnings about the same fault

_ENDS = frozenset({"completed", "incomplete", "failed"})
_FAULTS = frozenset({"failed", "interrupted"})
# Minimum length of an owner that is treated as a hash, and the number of characters of the hash that are logged.
_HASH_LENGTH, _SHORT = 16, 8
# Maximum length in logs of text chosen by a client or by the upstream, and of an error's message.
_MAX_TEXT, MAX_MESSAGE = 128, 500
_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)


@dataclass(slots=True)
class RequestContext:
    """Facts about one HTTP request, WebSocket message or background job."""

    method: str = ""  # HTTP method, or "" for WebSocket messages and jobs
    route: str = ""  # template of the path, or type of the WebSocket message
    request_id: str = ""
    status: int = 0  # HTTP status of the response. 0 until it starts
    sends_events: bool = False  # whether the HTTP response is a stream of events. Known, like `status`, when it starts
    client: str = ""  # address of the client
    user_agent: str = ""
    upstream_request: str = ""  # the request id that was last sent to the upstream for a turn
    upstream: str = ""  # name of the upstream that the run's turns go to
    answered_by: str = ""
    """Name of the upstream that last answered a turn. Set when the answer begins: see `first_token` for the time."""
    endpoint: str = ""  # URL of the endpoint that this request was sent to
    owner: str = ""  # the caller's owner id (see `auth`)
    key: str = ""  # name of the caller's API key
    response_id: str = ""
    conversation: str = ""
    previous_response: str = ""
    model: str = ""
    streams: bool | None = None
    """Whether the client requested a stream. None if no response is created or compacted, for example for repeated creates.

    See `sends_events` for the response: a refused stream is JSON, and a repeated one is a stream.
    """
    stores: bool = False  # whether the response is stored. If not, its text must not be logged or added to spans
    cache: CacheResult | Literal[""] = ""
    cache_reason: str = ""
    cache_status: str = ""  # value of the response header `X-Responses-Cache`
    outcome: Outcome | Literal[""] = ""
    """The final status of the response, or another value of docs/operation/observability.md, such as `refused` for a 4xx."""
    failure: Failure = NO_FAILURE
    turns: int | None = None
    """Number of turns begun, also of failed ones. 0 for a cache hit. Set with `outcome` and `usage` when the run ends or fails.

    A JSON response is sent after that, a stream's headers before. All three stay unset if no run begins, for example for
    repeated creates. A background create has no run either: its run belongs to the context of the job.
    """
    continuations: int = 0  # how often the run was continued after its worker or its connection to the upstream was lost
    tool_calls: int = 0  # number of calls of server-side tools so far
    tool_errors: int = 0  # number of those calls that have failed
    is_captured: bool = False  # whether the request asked for a capture (see `captures`)
    capture: Capture | None = None  # what is captured of the turns; None if captures are off, or the response is not stored
    phases: Phases = field(default_factory=Phases)
    tool_kinds: set[str] = field(default_factory=set)  # the kinds of the tools that were called
    usage: Mapping[str, Any] = field(default_factory=dict)
    first_token: float | None = None
    """Seconds from `started` until the first chunk (Chat Completions) or event (Responses) of the upstream's answer arrived.

    Set when the chunk arrives, by the first turn of the response. Turns that only summarize the history do not set it.
    Without `stream`, the whole answer is usually one chunk. None until a chunk arrives. No chunk arrives for cache hits,
    repeated and background creates, refused requests, and upstreams that respond with an error. A JSON response is sent after
    the last turn or an error. A stream's headers are sent after the first chunk, an error or `upstream.status_grace`, whichever
    comes first.
    """
    stored: bool | None = None
    unstored: str = ""  # the reason why the response is not stored
    has_left: bool = False  # whether the connection was closed before the HTTP response was complete, other than by an error
    trace_id: str = ""
    started: float = field(default_factory=time.perf_counter)
    """The time when the request's headers or the message arrived, or the job began, as `time.perf_counter()`."""

    def fail(self, error: Exception) -> None:
        """Record the error. `outcome` becomes `refused` for our 4xx and for the upstream's 401 and 403, otherwise `failed`."""
        if isinstance(error, UpstreamError):
            is_refusal = error.status in (401, 403)
        else:
            is_refusal = isinstance(error, APIError) and error.status < 500
        self.outcome, self.failure = "refused" if is_refusal else "failed", Failure.of(error)

    def error_type(self, status: int = 200) -> str:
        """Return the attribute `error.type`: the HTTP `status` if it is a 5xx, otherwise `failure.kind` if the run failed.

        Return "" for a 4xx, or if nothing failed.
        """
        if status >= 500:
            return str(status)
        return self.failure.kind if self.outcome in _FAULTS and status < 400 else ""

    @property
    def cause_of_failure(self) -> str:
        """The label `cause` of a failed response, or "" if the response has not failed."""
        return self.failure.cause if self.outcome == "failed" else ""

    def cause_of_error(self, status: int) -> str:
        """Return the label `cause` of an HTTP response with this `status`, or "" for a success."""
        if status < 400 and self.outcome not in _FAULTS:
            return ""
        return self.failure.cause or ("client" if 400 <= status < 500 else "server")

    def span_attributes(self) -> dict[str, str | bool]:
        return present(
            {
                GenAI.RESPONSE_ID: self.response_id,
                GenAI.CONVERSATION_ID: self.conversation,
                GenAI.MODEL: self.model,
                GenAI.STREAM: self.streams or None,
                GenAI.PREVIOUS_RESPONSE_ID: self.previous_response,
                Own.CACHE_RESULT: self.cache,
                Own.OUTCOME: self.outcome,
                Own.CAUSE: self.failure.cause,
                Own.OWNER: self.owner,
                Own.KEY: self.key,
                Own.REQUEST_ID: self.request_id,
                Own.UPSTREAM_REQUEST_ID: self.upstream_request,
                Own.UPSTREAM: self.upstream,
            }
        )

    def facts(self) -> dict[str, Any]:
        """Return the facts for log records, without those that are unset. They contain no prompts, answers or tool data."""
        usage = self.usage
        facts = {
            "outcome": self.outcome,
            "error_code": self.failure.code[:_MAX_TEXT],
            "error_type": self.failure.kind,
            "upstream_status": self.failure.upstream_status,
            "cause": self.failure.cause,
            "model": self.model[:_MAX_TEXT],
            "stream": self.streams,
            "turns": self.turns,
            "continuations": self.continuations or None,
            "tool_calls": self.tool_calls or None,
            "tool_errors": self.tool_errors or None,
            "tokens_in": usage.get("input_tokens"),
            "tokens_out": usage.get("output_tokens"),
            "tokens_cached": (usage.get("input_tokens_details") or {}).get("cached_tokens"),
            "tokens_reasoning": (usage.get("output_tokens_details") or {}).get("reasoning_tokens"),
            "first_token": None if self.first_token is None else round(self.first_token, 4),
            "cache": self.cache,
            "cache_reason": self.cache_reason,
            "stored": False if self.unstored else self.stored,
            "unstored": self.unstored,
            "request": self.request_id,
            "upstream_request": self.upstream_request,
            "upstream": self.upstream,
            "endpoint": self.endpoint,
            "response": self.response_id,
            "key": self.key,
            "owner": self.owner[:_SHORT] if len(self.owner) >= _HASH_LENGTH else self.owner,
            "client": self.client,
            "user_agent": self.user_agent[:_MAX_TEXT],
            "left": self.has_left or None,
            "trace_id": self.trace_id,
        }
        return present(facts)


def present(values: Mapping[str, T | None]) -> dict[str, T]:
    """Return the values that are neither None nor ""."""
    return {name: value for name, value in values.items() if value is not None and value != ""}


_CURRENT: ContextVar[RequestContext | None] = ContextVar("responses_mw.request", default=None)


def current_request() -> RequestContext | None:
    return _CURRENT.get()


class ActiveRequest:
    """A context manager that makes `request` the current request in the `with` block and in tasks created there."""

    __slots__ = ("_request", "_token")

    def __init__(self, request: RequestContext) -> None:
        self._request = request

    def __enter__(self) -> None:
        self._token = _CURRENT.set(self._request)

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)


def annotate(
    *,
    error: Exception | None = None,
    outcome: Outcome | None = None,
    response: Mapping[str, Any] | None = None,
    **facts: str | bool | Failure,
) -> None:
    """Record facts about the current request. If there is none, do nothing.

    `error` is the exception that the request failed with. `response` is the response that the request creates or retrieves.
    The names of `facts` are fields of `RequestContext`.
    """
    request = _CURRENT.get()
    if request is None:
        return
    if error is not None:
        request.fail(error)
    if outcome is not None:
        request.outcome = outcome
    for name, fact in facts.items():
        setattr(request, name, fact)
    if response is not None:
        conversation = response.get("conversation")
        request.response_id = response["id"]
        request.conversation = conversation["id"] if conversation else ""
        request.stores = bool(response.get("store"))


def begin_run(document: Mapping[str, Any], *, streams: bool | None) -> None:
    """Record that the current request creates the response `document`, and whether the client requested a stream.

    `streams` is None if no response is created, because only its tokens are counted.
    """
    request = _CURRENT.get()
    if request is None:
        return
    annotate(response=document)
    if streams is None:
        request.response_id = ""
    request.model, request.streams = str(document["model"]), streams
    request.previous_response = document.get("previous_response_id") or ""
    if CAPTURES.is_on and request.stores:
        request.capture = Capture(request.is_captured)


def end_run(document: Mapping[str, Any], *, turns: int, error: Exception | None = None) -> None:
    """Record the outcome and the usage of the current request's run. A later call replaces the data of an earlier call.

    `error` is the exception that the run failed with, if known. Do nothing for internal runs, which have other documents.
    """
    request = _CURRENT.get()
    if request is None or document["id"] != request.response_id:
        return
    request.outcome = document["status"] if document["status"] in _ENDS else "cancelled"
    request.turns, request.usage = turns, document.get("usage") or {}
    fault = document.get("error") if request.outcome == "failed" else None
    if fault and error is not None:
        request.failure = Failure.of(error, fault["code"])
    elif fault:  # the upstream sent the code, which may be any text and must not become a label
        request.failure = Failure(fault["code"], UpstreamError.__name__, cause=cause_of_code(fault["code"]))


# -- reports -----------------------------------------------------------------------------------------------------------------


def level_of(cause: str) -> int:
    """Return the level at which to log an error with this cause. Nobody should be alerted to the errors of clients."""
    return logging.INFO if cause == "client" else logging.WARNING


class WarningLimit:
    """Limits how often a warning about one fault is logged."""

    def __init__(self) -> None:
        self._next = float("-inf")

    def is_due(self) -> bool:
        """Return true at most once per `WARNING_INTERVAL`. The caller must then log the warning."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + WARNING_INTERVAL
        return True


def log_facts(
    to: logging.Logger, subject: str, facts: Mapping[str, Any], named: Mapping[str, Any] = {}, level: int = logging.INFO
) -> None:
    """Log `subject` with `facts`, which become `name=value` in text records and members in JSON records.

    `named` contains facts that `subject` already states. They are added only to JSON records.
    """
    if not to.isEnabledFor(level):
        return
    words = [subject]
    for name, value in facts.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        words.append(f"{name}={text if _PLAIN.fullmatch(text) else json.dumps(text)}")  # quoted if it has special characters
    to.log(level, "%s", " ".join(words), extra={"facts": {**named, **facts}, "subject": subject})


def report_failure(request: RequestContext, **more: Any) -> None:
    """If `request` failed, log its facts and `more`: as a warning, or at level `info` if the client caused the error.

    The warning contains the remedy, if it is known, and the error's message, at most `MAX_MESSAGE` characters, if the response
    is stored. The message of an error that the client caused often quotes the request. It is logged only at level `debug`.
    """
    if request.outcome != "failed" or not request.failure.code:
        return
    subject = f"response {request.response_id} failed" if request.response_id else f"{request.route or 'a request'} failed"
    level, facts, message = level_of(request.failure.cause), {**request.facts(), **more}, request.failure.message
    if level == logging.WARNING and request.failure.remedy:
        facts["remedy"] = with_path_of(request.upstream or DEFAULT, request.failure.remedy)
    if level == logging.WARNING and request.stores and message:
        facts["error"] = message[:MAX_MESSAGE]
    elif request.stores and message:
        logger.debug("response %s failed because of: %.*r", request.response_id, MAX_MESSAGE, message)
    log_facts(logger, subject, facts, level=level)


def report_continuation(
    response_id: str,
    *,
    reason: Literal["broken", "timeout", "worker"],
    phase: str,
    tokens: int | None = None,
    pause: float | None = None,
) -> None:
    """Record in the metrics, the span, the log and the current request that an interrupted response was continued.

    `reason` is `broken`, `timeout`, or `worker` for a lost worker. `phase` is the last kind of output that the client had
    received. `tokens` is the number of tokens that were kept. `pause` is the time in seconds from the interruption until the
    new answer began. Both are None if they are unknown.
    """
    CONTINUATIONS.add(1, {"reason": reason, "phase": phase})
    if (request := _CURRENT.get()) is not None:
        request.continuations += 1
    if pause is not None:
        CONTINUATION_PAUSE.record(pause, {})
    rounded = None if pause is None else round(pause, 3)
    facts: dict[str, Any] = present({"reason": reason, "phase": phase, "tokens_kept": tokens, "pause": rounded})
    attributes = {f"responses_mw.continuation.{name}": value for name, value in facts.items()}
    get_current_span().add_event("responses_mw.continuation", attributes)
    log_facts(logger, f"response {response_id} continued", facts)
