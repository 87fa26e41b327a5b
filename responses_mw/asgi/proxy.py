"""A reverse proxy for all paths that the Responses API does not use.

1. The path below `base_path`, the query, the headers and the body are forwarded unchanged. Only hop-by-hop headers (RFC 9110,
   section 7.6.1) and `Expect` are removed, `Host` is replaced, and `X-Forwarded-*` headers are added (see `_request_headers`).
   Request bodies must match their `Content-Length`.
2. Bodies are streamed in both directions with backpressure. Each chunk is forwarded as soon as it is read.
3. If the client or the upstream disconnects early, the other connection is closed too. The client therefore cannot mistake an
   interrupted response for a complete one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias
from urllib.parse import quote, unquote

import anyio
import httpx
from starlette.types import Message, Receive, Scope, Send

from ..auth import API_KEY
from ..errors import APIError, BadRequest, MethodNotAllowed, NotFound, Unavailable, UpgradeRequired, UpstreamError
from ..http import BodyFraming, InvalidFraming, body_framing, check_upgrade
from ..redaction import redacted
from ..tasks import in_background
from ..upstream.affinity import session_key
from ..upstream.errors import from_transport
from ..upstream.forwarding import BodyStream, Forwarder, Headers, PassedRequest
from ..upstream.pool import Lease
from ..upstream.routing import Destination, Upstreams
from .http_responses import ErrorResponse, cancel_on_disconnect
from .locations import BasePaths, own_locations
from .passable_paths import PassablePaths, check_path
from .passed_errors import recording
from .requests import next_message
from .spellings import OurPaths

logger = logging.getLogger(__name__)

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection".split()
    + b"te trailer transfer-encoding upgrade".split()
)
# Host and Content-Length are replaced, and X-Forwarded-For is extended. The server answers Expect when the body is read.
_NOT_FORWARDED = frozenset({b"host", b"expect", b"content-length", b"x-forwarded-for"})
# Requests with these methods have a Content-Length even if it is 0 (RFC 9110, section 8.6).
_WITH_BODY = frozenset({"PATCH", "POST", "PUT"})
_CLOSE = {"connection": "close"}

OpenUpstreams: TypeAlias = Callable[[Scope], Awaitable[Upstreams]]
"""Returns the upstreams of the open application for a request. Raises `Unavailable` if it cannot be opened."""

DESTINATION = "responses_mw.destination"
"""The key in an ASGI scope for the `Destination` of the request. Without it, the request goes to the first upstream."""


class ReverseProxy:
    """An ASGI application that forwards requests to the upstreams.

    `base_path`, such as `/openai`, is removed from the start of paths. If `passable` is not None, only the requests in it are
    forwarded. CONNECT, TRACE and WebSockets are always refused.

    If the upstream's response is interrupted, `UpstreamError` is raised. The server then closes the client's connection.
    """

    def __init__(
        self,
        upstreams: OpenUpstreams,
        base_path: str = "",
        *,
        passable: PassablePaths | None = None,
        paths: OurPaths | None = None,
    ) -> None:
        self._paths = paths or OurPaths()
        self._upstreams = upstreams
        self._own_path = base_path.encode()
        self._passable = passable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._pass(scope, receive, send)
        elif scope["type"] == "websocket":
            await ErrorResponse(UpgradeRequired("WebSockets are not proxied; use HTTP."))(scope, receive, send)
        else:
            await _lifespan(receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = anyio.CancelScope()
        try:
            upstreams = await self._upstreams(scope)
            destination = scope.get(DESTINATION) or Destination(upstreams.default)
            forwarder = destination.upstream.forwarder
            path = self._path(scope)
            self._check(scope, path, is_below=forwarder.has_base_path)
            framing = _framing(scope)
            first = await (next_message(receive) if framing.has_body else receive())
            if first["type"] == "http.disconnect":
                return
            body = _RequestBody(first, receive, framing, exchange)
            request = _request(scope, path, body)
        except APIError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        response = None
        try:
            with exchange:
                async with in_background(body.watch()):
                    session = destination.session or _session(scope, forwarder.session_header)
                    response, lease = await _open(forwarder, request, session, destination.model)
                    with lease:
                        is_encoded = "content-encoding" in response.headers
                        recorded = recording(scope, path, response.status_code, send, is_encoded=is_encoded)
                        base_paths = partial(upstreams.base_paths, lease.endpoint, destination.upstream)
                        blamed = lease if request.is_repeatable() else None  # an upload may have made the server close
                        await _forward(response, self._own_locations(scope, response, lease, base_paths), recorded, blamed)
        except APIError as error:
            if response is not None:
                raise
            await ErrorResponse(error)(scope, receive, send)
        except asyncio.CancelledError:  # the server is shutting down
            if (task := asyncio.current_task()) is not None:
                task.uncancel()  # uvicorn would log the cancellation with a traceback and send a 500
            if response is None:
                await ErrorResponse(Unavailable("The server is shutting down."))(scope, receive, send)

    def _check(self, scope: Scope, path: bytes, *, is_below: bool) -> None:
        """Check that the request may be forwarded. Raises `MethodNotAllowed`, `NotFound` or `BadRequest` if it may not.

        `is_below` is whether the upstream has a base path.

        A path of the Responses API only gets here if it is outside of `base_path`. The upstream's own API must not serve it.
        """
        method: str = scope["method"]
        check_upgrade(method, scope["headers"])
        if self._paths.has_other_spelling(path.decode("latin-1")):
            where = self._own_path.decode() or "/"
            raise NotFound(f"Unknown request URL. The Responses API is served below {where}.", code="unknown_url")
        if method == "TRACE":  # its response would show the client the headers that we add
            raise MethodNotAllowed("Method TRACE is not passed on.", headers={"allow": "GET, HEAD, OPTIONS, POST"})
        if is_below or self._passable is not None:
            check_path(path)
        if self._passable is not None:
            self._passable.check(method, path)

    def _path(self, scope: Scope) -> bytes:
        path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
        for prefix in (scope.get("root_path", "").rstrip("/").encode(), self._own_path):
            if path == prefix or path.startswith(prefix + b"/"):
                path = path[len(prefix) :]
        return path

    def _own_locations(
        self, scope: Scope, response: httpx.Response, lease: Lease, base_paths: Callable[[], BasePaths]
    ) -> Sequence[tuple[bytes, bytes]]:
        prefix = scope.get("root_path", "").rstrip("/").encode() + self._own_path
        return own_locations(response.headers.raw, prefix, lease.endpoint.base_path, base_paths)


async def _lifespan(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


class _RequestBody(BodyStream):
    """A request body, which is read from the client as fast as the upstream accepts it.

    Iteration raises `BadRequest` if the body is shorter or longer than announced, and `RequestTimeout` if the client stops
    sending. If the client disconnects, `exchange` is cancelled.
    """

    def __init__(self, first: Message, receive: Receive, framing: BodyFraming, exchange: anyio.CancelScope) -> None:
        self._next: Message | None = first
        self._receive = receive
        self._length = self._left = framing.length
        self._exchange = exchange
        self._over = anyio.Event()
        self.whole = None if first.get("more_body", False) else self._chunk(first)
        """The body, if it has arrived in one ASGI message."""

    def __aiter__(self) -> _RequestBody:
        return self

    async def __anext__(self) -> bytes:
        self.is_begun = True
        if self._over.is_set():
            raise StopAsyncIteration
        message, self._next = self._next or await next_message(self._receive), None
        if message["type"] == "http.disconnect":
            self._exchange.cancel()
            await anyio.sleep_forever()  # an end of the iteration would make the partial body look complete
        return self._chunk(message)

    def _chunk(self, message: Message) -> bytes:
        chunk: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            self._over.set()
        if self._left is not None:
            self._left -= len(chunk)
            if self._left < 0 or (self._left and self._over.is_set()):
                fault = "The length of the request body does not match its Content-Length."
                raise BadRequest(fault, code="invalid_framing", headers=_CLOSE)
        return chunk

    async def watch(self) -> None:
        """Wait until the body is complete. Then cancel the exchange when the client disconnects, or when `receive` fails."""
        await self._over.wait()
        await cancel_on_disconnect(self._receive, self._exchange)

    def framing_headers(self, method: str) -> Headers:
        """Return the headers that announce the body to the upstream."""
        length = self._length if self.whole is None else len(self.whole)
        if length is None:
            return [(b"transfer-encoding", b"chunked")]
        return [(b"content-length", b"%d" % length)] if length or method in _WITH_BODY else []


def _framing(scope: Scope) -> BodyFraming:
    """Return the framing of the request. Raises `BadRequest` if it is invalid."""
    try:
        return body_framing(scope["headers"])
    except InvalidFraming as error:
        message = f"The framing of the request is invalid: {error}."
        raise BadRequest(message, code="invalid_framing", headers=_CLOSE) from None


def _request(scope: Scope, path: bytes, body: _RequestBody) -> PassedRequest:
    return PassedRequest(
        scope["method"],
        path,
        scope["query_string"],
        [*_request_headers(scope), *body.framing_headers(scope["method"])],
        body if body.whole is None else body.whole,
        has_api_key=API_KEY in scope,
    )


def _session(scope: Scope, header: bytes) -> str:
    """Return the key of the session that the request's `header` names, or "" if it names none."""
    named = [value for name, value in scope["headers"] if name == header and value]
    return session_key("header", *named) if named else ""


async def _open(forwarder: Forwarder, request: PassedRequest, session: str, model: str | None) -> tuple[httpx.Response, Lease]:
    """Send the request, and return the response without its body. Raises `APIError` if there is no response."""
    try:
        return await forwarder.send(request, session, model)
    except httpx.TransportError as error:
        if isinstance(error, httpx.LocalProtocolError):
            raise BadRequest(f"The request cannot be passed on: {error}", headers=_CLOSE) from error
        path = unquote(request.path.decode("latin-1"))
        logger.warning("no answer from the upstream to %s %s: %s", request.method, path, redacted(repr(error)))
        raise from_transport(error) from error


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return `headers` without the hop-by-hop headers, with names in lower case, as ASGI requires."""
    lowered = [(name.lower(), value) for name, value in headers]
    listed = b",".join(value for name, value in lowered if name == b"connection")
    hop_by_hop = _HOP_BY_HOP.union(name.strip().lower() for name in listed.split(b","))
    return [(name, value) for name, value in lowered if name.replace(b"_", b"-") not in hop_by_hop]


def _request_headers(scope: Scope) -> Headers:
    """Return the headers to forward.

    The client's address is appended to `X-Forwarded-For`. The other `X-Forwarded-*` headers are added if they are missing.
    """
    headers = _end_to_end(scope["headers"])
    present = dict(headers)
    client, server = scope.get("client"), scope.get("server")
    hops = [value for name, value in headers if name == b"x-forwarded-for"] + ([client[0].encode()] if client else [])
    forwarded = {
        b"x-forwarded-for": b", ".join(hops),
        b"x-forwarded-proto": scope["scheme"].encode(),
        b"x-forwarded-host": present.get(b"host", b""),
        b"x-forwarded-port": str(server[1]).encode() if server and server[1] else b"",
    }
    # CGI and WSGI map "content_length" and "content-length" to one name.
    kept = [(name, value) for name, value in headers if name.replace(b"_", b"-") not in _NOT_FORWARDED]
    return kept + [(name, value) for name, value in forwarded.items() if value and name not in dict(kept)]


async def _forward(response: httpx.Response, headers: Iterable[tuple[bytes, bytes]], send: Send, blamed: Lease | None) -> None:
    """Forward the response to the client with `headers`. Raises `UpstreamError` if the upstream's response is interrupted.

    An error that `send` raises for the first message is passed on. An interruption is the fault of the endpoint of `blamed`.
    """
    headers = _end_to_end(headers)
    if response.status_code in {204, 304}:  # a 304 may announce the length of the equivalent 200
        headers = [(name, value) for name, value in headers if name != b"content-length"]
    try:
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await _forward_body(response, send, blamed)
    finally:
        with anyio.CancelScope(shield=True):
            await response.aclose()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _forward_body(response: httpx.Response, send: Send, blamed: Lease | None) -> None:
    try:
        async for chunk in response.aiter_raw():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except (httpx.TransportError, APIError) as error:
        if blamed is not None:
            blamed.record_error(error)
        raise UpstreamError(f"The upstream closed the connection before its response was complete: {error!r}") from error
