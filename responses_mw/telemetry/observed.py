"""A server's view of a request: its span, its metrics, its line in the log."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, get_current_span

from .exchange import Exchange, going_on, response_attributes
from .names import ACTIVE_REQUESTS, REQUEST_DURATION, STREAMS_OPEN
from .tracing import TRACER, current_span, is_tracing, mark_failed, told_by, within

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("responses_mw.access")

LEFT = 499
"""What a request counts as whose client left before it was answered, as nginx has it."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"})
_OWNER_SHOWN = 8
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Observed:
    """An ASGI application that observes the HTTP requests to ``app``. ``route`` is what it calls their path, unless told.

    Each request has an id, the caller's (``X-Request-Id``) or a new one, which the answer's header gives back. A token costs a
    call and a look at two members of the message.
    """

    def __init__(self, app: ASGIApp, route: str = "", *, traced: bool = True) -> None:
        """Not ``traced``: what passes through untouched, its headers and those of its answer too."""
        self._app = app
        self._route = route
        self._traced = traced

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        exchange = Exchange(self._route, _request_id(scope))
        answer = _Answer(send, exchange.request_id if self._traced else "")
        began = time.perf_counter()
        active = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
        ACTIVE_REQUESTS.add(1, active)
        span = _span(method, scope) if self._traced else get_current_span()
        try:
            with going_on(exchange), current_span(span):
                await self._app(scope, receive, answer.send)
        except Exception:
            answer.status = answer.status or 500
            raise
        finally:
            took = time.perf_counter() - began
            ACTIVE_REQUESTS.add(-1, active)
            if answer.is_stream:
                STREAMS_OPEN.add(-1)
            status = answer.status or LEFT
            _measure(active, exchange, status, took)
            if self._traced:
                _end(span, method, exchange, status)
            _log(method, exchange, status, took, span, left=not answer.is_whole)


class _Answer:
    """What is sent, as far as anybody wants to know it."""

    __slots__ = ("_request_id", "_send", "is_stream", "is_whole", "status")

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0
        self.is_stream = False
        self.is_whole = False

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = self._start(message)
        elif not message.get("more_body"):
            self.is_whole = True
        return self._send(message)

    def _start(self, message: Message) -> Message:
        self.status = message["status"]
        headers = message.get("headers", ())
        types = (value for name, value in headers if name == b"content-type")
        if next(types, b"").startswith(b"text/event-stream"):
            self.is_stream = True
            STREAMS_OPEN.add(1)
        if not self._request_id:
            return message
        return {**message, "headers": [*headers, (b"x-request-id", self._request_id.encode())]}


@contextmanager
def observed_message(kind: str, headers: Mapping[str, str], owner: str) -> Iterator[None]:
    """Observes what one message on a WebSocket asks for: as a request, without HTTP's metrics. ``kind`` is the message's type,
    ``headers`` (names in lower case) those that the connection came with."""
    exchange = Exchange(f"websocket {kind}", _new_id(), owner)
    began = time.perf_counter()
    span = TRACER.start_span(exchange.route, told_by(headers), SpanKind.SERVER) if is_tracing() else INVALID_SPAN
    STREAMS_OPEN.add(1)
    try:
        with within(exchange, span):
            yield
    finally:
        STREAMS_OPEN.add(-1)
        _log("WS", exchange, 101, time.perf_counter() - began, span, left=False)


def _request_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else _new_id()


def _new_id() -> str:
    return f"req_{secrets.token_hex(16)}"


def _span(method: str, scope: Scope) -> Span:
    if not is_tracing():
        return INVALID_SPAN
    attributes = _attributes(method, scope)
    if get_current_span().get_span_context().is_valid:  # the host application has a span of its own for the request
        return TRACER.start_span(method, kind=SpanKind.INTERNAL, attributes=attributes)
    carrier: dict[str, str] = {}
    for name, value in scope["headers"]:
        carrier.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return TRACER.start_span(method, told_by(carrier), SpanKind.SERVER, attributes)


def _attributes(method: str, scope: Scope) -> dict[str, Any]:
    attributes: dict[str, Any] = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
    attributes["network.protocol.version"] = scope.get("http_version", "1.1")
    server = scope.get("server")
    if server:
        attributes["server.address"] = server[0]
        if server[1]:
            attributes["server.port"] = server[1]
    return attributes


def _measure(active: Mapping[str, str], exchange: Exchange, status: int, took: float) -> None:
    attributes: dict[str, str | int | bool] = {**active, "http.response.status_code": status}
    if exchange.route:
        attributes["http.route"] = exchange.route
    if status >= 500:
        attributes["error.type"] = str(status)
    REQUEST_DURATION.record(took, attributes)


def _end(span: Span, method: str, exchange: Exchange, status: int) -> None:
    if span.is_recording():
        attributes: dict[str, str | int] = {"http.response.status_code": status, **response_attributes(exchange)}
        if exchange.route:
            span.update_name(f"{method} {exchange.route}")
            attributes["http.route"] = exchange.route
        span.set_attributes(attributes)
    if status >= 500:
        mark_failed(span, str(status))
    span.end()


def _log(method: str, exchange: Exchange, status: int, took: float, span: Span, *, left: bool) -> None:
    """The access line: nothing of what was asked, no path as it came, no query."""
    if not logger.isEnabledFor(logging.INFO):
        return
    context = span.get_span_context()
    facts: dict[str, Any] = {
        "method": method,
        "route": exchange.route or "-",
        "status": status,
        "seconds": round(took, 6),
        "request": exchange.request_id or None,
        "response": exchange.response_id or None,
        "owner": exchange.owner[:_OWNER_SHOWN] or None,
        "left": left or None,
        "trace_id": f"{context.trace_id:032x}" if context.is_valid else None,
    }
    shown = " ".join(f"{name}={facts[name]}" for name in ("request", "response", "owner", "trace_id") if facts[name])
    ending = " (the client left)" if left else ""
    text = f"{method} {facts['route']} {status} {took:.3f}s {shown}".rstrip() + ending
    logger.info("%s", text, extra={"facts": {name: value for name, value in facts.items() if value is not None}})
