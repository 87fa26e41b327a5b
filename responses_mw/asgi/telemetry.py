"""Record a span, metrics and an access log line for each request, and add headers to its response."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..auth import API_KEY
from ..telemetry.context import RequestContext, activated, count_response, log_facts, report_failure
from ..telemetry.conventions import ERROR_TYPE, HTTP
from ..telemetry.metrics import ACTIVE_REQUESTS, REQUEST_DURATION, STREAMS_OPEN
from ..telemetry.tracing import (
    activated_span,
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


class TelemetryMiddleware:
    """ASGI middleware that records a span, metrics and an access log line for each HTTP request to `app`.

    The request id is the client's `X-Request-Id` if it is valid, otherwise a new id. If `traced` is true, the response contains
    the request id. Nothing is recorded per token. Each ASGI message costs only one additional call.
    """

    def __init__(self, app: ASGIApp, route: str = "", *, traced: bool = True) -> None:
        """`route` is recorded if the dispatcher has set no route in the scope.

        If `traced` is false, no span is created and no header is added, so `app` must not call `add_headers`.
        """
        self._app = app
        self._route = route
        self._traced = traced

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = RequestContext(
            method=scope["method"] if scope["method"] in _METHODS else "_OTHER",
            route=scope.get(ROUTE_SCOPE, self._route),
            request_id=_request_id(scope["headers"]),
            started=scope.get(STARTED_SCOPE) or time.perf_counter(),
        )
        headers: list[HeaderSource] = []
        if self._traced:
            scope[_HEADERS] = headers = _initial_headers(request)
        recorder = _ResponseRecorder(send, headers)
        active = {HTTP.METHOD: request.method, HTTP.SCHEME: scope.get("scheme", "http")}
        ACTIVE_REQUESTS.add(1, active)
        span = start_http_span(request.method, scope) if self._traced and is_tracing() else None
        request.trace_id = trace_id(span) if span is not None else ""
        try:
            with activated(request), activated_span(span):
                await self._app(scope, receive, recorder.send)
        except Exception as error:
            recorder.fail(error)
            request.fail(error)
            raise
        finally:
            duration = time.perf_counter() - request.started
            ACTIVE_REQUESTS.add(-1, active)
            if recorder.is_stream:
                STREAMS_OPEN.add(-1)
            status, request.has_left = recorder.status or CLIENT_LEFT, not recorder.is_over
            _measure(active, request, status, duration)
            if span is not None:
                end_request_span(span, request, status)
            _report(request, status, duration)


class _ResponseRecorder:
    """Sends an HTTP response, and records its `status` (0 before it starts). `is_over` is set when the response is complete."""

    __slots__ = ("_added", "_send", "is_over", "is_stream", "status")

    def __init__(self, send: Send, added: list[HeaderSource]) -> None:
        self._send = send
        self._added = added
        self.status = 0
        self.is_stream = False
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
        self.status = self.status or 500
        self.is_over = self.is_over or not isinstance(error, OSError)

    def _start(self, message: Message) -> Message:
        self.status = message["status"]
        headers = message.get("headers", ())
        types = (value for name, value in headers if name == b"content-type")
        if next(types, b"").startswith(b"text/event-stream"):
            self.is_stream = True
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
    request = RequestContext(route=f"websocket {kind}", request_id=_request_id(), owner=owner, key=scope.get(API_KEY, ""))
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


def _request_id(headers: Iterable[tuple[bytes, bytes]] = ()) -> str:
    """Return the client's request id if it is valid, otherwise a new id."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"


def _initial_headers(request: RequestContext) -> list[HeaderSource]:
    """Return the headers that any response to the request gets, even a refusal before the route is reached."""
    return [{"x-request-id": request.request_id}]


def _measure(active: Mapping[str, str], request: RequestContext, status: int, duration: float) -> None:
    optional = {HTTP.ROUTE: request.route, ERROR_TYPE: request.error_type(status)}
    present = {name: value for name, value in optional.items() if value}
    REQUEST_DURATION.record(duration, {**active, HTTP.STATUS: status, **present})


def _report(request: RequestContext, status: int, duration: float) -> None:
    """Add the response to the metrics, log a warning if the request failed, and log the access line."""
    count_response(request, "websocket" if not request.method else "stream" if request.streams else "json")
    report_failure(request)
    method, route = request.method or "WS", request.route or "-"  # never the path, whose ids would be logged
    line = {"method": method, "route": route, "status": status, "seconds": round(duration, 6)}
    log_facts(logger, f"{method} {route} {status} {duration:.3f}s", request.facts(), line)
