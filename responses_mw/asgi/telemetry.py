"""Record a span, metrics and an access log line for each request, and add headers to its response."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth import API_KEY
from ..settings import Settings
from ..telemetry.context import ActiveRequest, RequestContext, log_facts, report_failure
from ..telemetry.conventions import ERROR_TYPE, HTTP
from ..telemetry.ends import count_response
from ..telemetry.metrics import ACTIVE_REQUESTS, CAUSE, REQUEST_DURATION, STREAMS_OPEN
from ..telemetry.tracing import (
    activate_span,
    end_request_span,
    is_tracing,
    request_span,
    start_http_span,
    start_request_span,
    trace_id,
)

logger = logging.getLogger("responses_mw.access")

CLIENT_LEFT = 499
"""The status that is recorded if the client disconnected before the response started, as in nginx."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"})
_MAX_USER_AGENT = 256
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

HeaderSource: TypeAlias = Mapping[str, str] | Callable[[], Mapping[str, str]]
"""Response headers, or a function that returns them. The function is called when the response starts."""

ROUTE_SCOPE = "responses_mw.route"
"""The key in a request's scope for its route, or "" if the path is unknown."""
STARTED_SCOPE = "responses_mw.started"
"""The key in a request's scope for the time when its headers were read, as `time.perf_counter()`. `Dispatcher` sets it."""

_HEADERS = "responses_mw.headers"


def add_headers(scope: Scope, headers: HeaderSource) -> None:
    """Add `headers` to the HTTP response, whether it is a success or an error. Call this before the response starts.

    `scope` is the scope of a request to an application inside a `TelemetryMiddleware` with `traced=True`.
    """
    scope[_HEADERS].append(headers)


@dataclass(frozen=True, slots=True)
class HeaderOptions:
    """The headers that all responses get only if a setting turns them on, or in some deployments."""

    names_upstream: bool = False
    """Name the upstream that answered, if it has when the response starts."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(names_upstream=len(settings.named_upstreams) > 1)


DEFAULT_HEADERS = HeaderOptions()


class TelemetryMiddleware:
    """ASGI middleware that records a span, metrics and an access log line for each HTTP request to `app`.

    The request id is the client's `X-Request-Id` if it is valid, otherwise a new id. If `traced` is true, the response contains
    the request id. Nothing is recorded per token. Each ASGI message costs only one additional call.
    """

    def __init__(self, app: ASGIApp, route: str = "", *, traced: bool = True, options: HeaderOptions = DEFAULT_HEADERS) -> None:
        """`route` is recorded if the dispatcher has set no route in the scope.

        If `traced` is false, no span is created and no header is added, so `app` must not call `add_headers`.
        """
        self._app = app
        self._route = route
        self._traced = traced
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = RequestContext(
            method=scope["method"] if scope["method"] in _METHODS else "_OTHER",
            route=scope.get(ROUTE_SCOPE, self._route),
            started=scope.get(STARTED_SCOPE) or time.perf_counter(),
        )
        _identify(request, scope)
        headers: list[HeaderSource] = []
        if self._traced:
            scope[_HEADERS] = headers = _initial_headers(request, self._options)
        recorder = _ResponseRecorder(request, send, headers)
        active = {HTTP.METHOD: request.method, HTTP.SCHEME: scope.get("scheme", "http")}
        ACTIVE_REQUESTS.add(1, active)
        span = start_http_span(request, scope) if self._traced and is_tracing() else None
        request.trace_id = trace_id(span) if span is not None else ""
        try:
            with ActiveRequest(request), activate_span(span):
                await self._app(scope, receive, recorder.send)
        except Exception as error:
            recorder.fail(error)
            request.fail(error)
            if isinstance(error, OSError):  # the client has disconnected
                request.failure = replace(request.failure, cause="client")
            raise
        finally:
            duration = time.perf_counter() - request.started
            ACTIVE_REQUESTS.add(-1, active)
            if request.sends_events:
                STREAMS_OPEN.add(-1)
            status, request.has_left = request.status or CLIENT_LEFT, not recorder.is_over
            _measure(active, request, status, duration)
            if span is not None:
                end_request_span(span, request, status)
            _report(request, status, duration)


class _ResponseRecorder:
    """Sends the HTTP response to `request`, and records its status and kind. `is_over` is set when the response is complete."""

    __slots__ = ("_added", "_request", "_send", "is_over")

    def __init__(self, request: RequestContext, send: Send, added: list[HeaderSource]) -> None:
        self._request = request
        self._send = send
        self._added = added
        self.is_over = False

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = self._start(message)
        elif not message.get("more_body"):
            self.is_over = True
        return self._send(message)

    def fail(self, error: Exception) -> None:
        """Record that the application raised `error`.

        After an `OSError`, the response is incomplete, because the client has disconnected. After any other error, the server
        sends a 500 or, if the response has started, closes the connection.
        """
        self._request.status = self._request.status or 500
        self.is_over = self.is_over or not isinstance(error, OSError)

    def _start(self, message: Message) -> Message:
        self._request.status = message["status"]
        headers = message.get("headers", ())
        types = (value for name, value in headers if name == b"content-type")
        if next(types, b"").startswith(b"text/event-stream"):
            self._request.sends_events = True
            STREAMS_OPEN.add(1)
        added = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for source in self._added
            for name, value in (source() if callable(source) else source).items()
        ]
        return {**message, "headers": [*headers, *added]} if added else message


@contextmanager
def websocket_request_span(kind: str, scope: Scope, owner: str) -> Iterator[None]:
    """Record a span and an access log line for a WebSocket message of type `kind`. No HTTP metrics are recorded.

    `scope` is the scope of the connection.
    """
    request = RequestContext(route=f"websocket {kind}", owner=owner, key=scope.get(API_KEY, ""))
    _identify(request, scope, request_id=_new_request_id())
    span = start_request_span(request.route, scope)
    request.trace_id = trace_id(span)
    STREAMS_OPEN.add(1)
    try:
        with request_span(request, span):
            try:
                yield
            except Exception as error:
                request.fail(error)
                raise
    finally:
        STREAMS_OPEN.add(-1)
        _report(request, 101, time.perf_counter() - request.started)


def _identify(request: RequestContext, scope: Scope, request_id: str = "") -> None:
    """Record who sends the request with this `scope`: the client's request id if it is valid, its address and user agent."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and not request_id and _REQUEST_ID.fullmatch(value):
            request_id = value.decode()
        elif name == b"user-agent":
            request.user_agent = value[:_MAX_USER_AGENT].decode("latin-1")
    request.request_id = request_id or _new_request_id()
    request.client = scope["client"][0] if scope.get("client") else ""


def _new_request_id() -> str:
    return f"req_{secrets.token_hex(16)}"


def _initial_headers(request: RequestContext, options: HeaderOptions) -> list[HeaderSource]:
    """Return the headers that any response to the request gets, even a refusal before the route is reached."""
    headers: list[HeaderSource] = [{"x-request-id": request.request_id}]
    if options.names_upstream:
        headers.append(lambda: {"x-responses-upstream": request.answered_by} if request.answered_by else {})
    return headers


def _measure(active: Mapping[str, str], request: RequestContext, status: int, duration: float) -> None:
    optional = {HTTP.ROUTE: request.route, ERROR_TYPE: request.error_type(status), CAUSE: request.cause_of_error(status)}
    present = {name: value for name, value in optional.items() if value}
    REQUEST_DURATION.record(duration, {**active, HTTP.STATUS: status, **present})


def _report(request: RequestContext, status: int, duration: float) -> None:
    """Add the response to the metrics, log a warning if the request failed, and log the access line."""
    count_response(request, "websocket" if not request.method else "stream" if request.streams else "json")
    report_failure(request)
    if not logger.isEnabledFor(logging.INFO):
        return
    method, route = request.method or "WS", request.route or "-"  # never the path, whose ids would be logged
    line = {"method": method, "route": route, "status": status, "seconds": round(duration, 6)}
    log_facts(logger, f"{method} {route} {status} {duration:.3f}s", request.facts(), line)
