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
import re
from collections.abc import Iterable
from typing import TypeAlias
from urllib.parse import quote, unquote_to_bytes

import anyio
import httpx
from starlette.types import Message, Receive, Scope, Send

from ..errors import APIError, BadRequest, MethodNotAllowed, NotFound, Unavailable, UpgradeRequired, UpstreamError
from ..http import BodyFraming, InvalidFraming, body_framing, check_upgrade
from ..threads import in_background
from ..upstream.client import CONNECT_TIMEOUT
from ..upstream.errors import from_transport
from .http_responses import ErrorResponse, cancel_on_disconnect
from .requests import next_message

Headers: TypeAlias = list[tuple[bytes, bytes]]

logger = logging.getLogger(__name__)

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection".split()
    + b"te trailer transfer-encoding upgrade".split()
)
# Host and Content-Length are set anew, and X-Forwarded-For is extended. The server answers Expect when the body is read.
_NOT_FORWARDED = frozenset({b"host", b"expect", b"content-length", b"x-forwarded-for"})
# Requests with these methods have a Content-Length even if it is 0 (RFC 9110, section 8.6).
_WITH_BODY = frozenset({"PATCH", "POST", "PUT"})
_CLOSE = {"connection": "close"}

_DEFAULT_METHODS = ("GET", "HEAD", "OPTIONS", "POST")
_SEPARATORS = re.compile(rb"[/\\]")
_CONTROLS = re.compile(rb"[\x00-\x1f\x7f]")
_MAX_DECODINGS = 3
"""Maximum number of times that a path is decoded to find dot segments. No known chain of servers decodes a path as often."""


class ReverseProxy:
    """An ASGI application that forwards requests to the URL `upstream`, such as `http://vllm:8000` or `http://vllm:8000/base`.

    `base_path`, such as `/openai`, is removed from the start of paths. If `passable` is not None, only the requests in it are
    forwarded. CONNECT, TRACE and WebSockets are always refused. `transport` is closed at the end of the lifespan.

    If the upstream's response is interrupted, `UpstreamError` is raised. The server then closes the client's connection.
    """

    def __init__(
        self, transport: httpx.AsyncBaseTransport, upstream: str, base_path: str = "", *, passable: PassablePaths | None = None
    ) -> None:
        self._transport = transport
        self._own_path = base_path.encode()
        self._upstream = httpx.URL(upstream)
        self._base_path = self._upstream.raw_path.rstrip(b"/")
        self._passable = passable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._pass(scope, receive, send)
        elif scope["type"] == "websocket":
            await ErrorResponse(UpgradeRequired("WebSockets are not proxied; use HTTP."))(scope, receive, send)
        else:
            await self._lifespan(receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = anyio.CancelScope()
        try:
            path = self._path(scope)
            self._check(scope, path)
            framing = _framing(scope)
            first = await (next_message(receive) if framing.has_body else receive())
            if first["type"] == "http.disconnect":
                return
            body = _RequestBody(first, receive, framing, exchange)
            request = self._request(scope, path, body)
        except APIError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        response = None
        try:
            with exchange:
                async with in_background(body.watch()):
                    response = await self._open(request)
                    await _forward(response, send)
        except APIError as error:
            if response is not None:
                raise
            await ErrorResponse(error)(scope, receive, send)
        except asyncio.CancelledError:  # the server is shutting down
            if (task := asyncio.current_task()) is not None:
                task.uncancel()  # uvicorn would log the cancellation with a traceback and send a 500
            if response is None:
                await ErrorResponse(Unavailable("The server is shutting down."))(scope, receive, send)

    def _check(self, scope: Scope, path: bytes) -> None:
        """Check that the request may be forwarded. Raises `MethodNotAllowed`, `NotFound` or `BadRequest` if it may not."""
        method: str = scope["method"]
        check_upgrade(method, scope["headers"])
        if method == "TRACE":  # its response would show the client the headers that we add
            raise MethodNotAllowed("Method TRACE is not passed on.", headers={"allow": "GET, HEAD, OPTIONS, POST"})
        if self._base_path or self._passable is not None:
            check_path(path)
        if self._passable is not None:
            self._passable.check(method, path)

    async def _open(self, request: httpx.Request) -> httpx.Response:
        """Send the request, and return the response without its body. Raises `APIError` if there is no response."""
        try:
            return await self._transport.handle_async_request(request)
        except httpx.TransportError as error:
            logger.warning("no answer from the upstream to %s %s: %r", request.method, request.url.path, error)
            if isinstance(error, httpx.LocalProtocolError):
                raise BadRequest(f"The request cannot be passed on: {error}", headers=_CLOSE) from error
            raise from_transport(error) from error

    def _request(self, scope: Scope, path: bytes, body: _RequestBody) -> httpx.Request:
        query = scope["query_string"]
        target = (self._base_path + path or b"/") + (b"?" + query if query else b"")
        try:
            url = self._upstream.copy_with(raw_path=target)
        except httpx.InvalidURL as error:
            raise BadRequest(f"The request's target is not valid: {error}") from None
        stream = body if body.whole is None else httpx.ByteStream(body.whole)  # only a body in memory can be sent again
        headers = [(b"host", self._upstream.netloc), *_request_headers(scope), *body.framing_headers(scope["method"])]
        # httpx normalizes the path of a URL, but sends "target" unchanged.
        extensions = {"target": target, "timeout": {"connect": CONNECT_TIMEOUT}}
        return httpx.Request(scope["method"], url, headers=headers, stream=stream, extensions=extensions)

    def _path(self, scope: Scope) -> bytes:
        path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
        for prefix in (scope.get("root_path", "").rstrip("/").encode(), self._own_path):
            if path == prefix or path.startswith(prefix + b"/"):
                path = path[len(prefix) :]
        return path

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        try:
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        finally:
            await self._transport.aclose()
        await send({"type": "lifespan.shutdown.complete"})


class _RequestBody(httpx.AsyncByteStream):
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


async def _forward(response: httpx.Response, send: Send) -> None:
    """Forward the response to the client. Raises `UpstreamError` if the upstream's response is interrupted."""
    headers = _end_to_end(response.headers.raw)
    if response.status_code in {204, 304}:  # a 304 may announce the length of the equivalent 200
        headers = [(name, value) for name, value in headers if name != b"content-length"]
    try:
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        async for chunk in response.aiter_raw():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except (httpx.TransportError, APIError) as error:
        raise UpstreamError(f"The upstream closed the connection before its response was complete: {error!r}") from error
    finally:
        with anyio.CancelScope(shield=True):
            await response.aclose()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


# -- paths ------------------------------------------------------------------------------------------------------------------


class PassablePaths:
    """The requests that the reverse proxy forwards if API keys are required.

    The upstream trusts this server, and therefore every caller with an API key. For this reason, only listed paths are
    forwarded.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        """Parse entries such as `/health` (one path), `/v1/` (all paths below) and `DELETE /v1/files/` (one method).

        An entry without a method allows GET, HEAD, OPTIONS and POST. An entry for GET also allows HEAD.
        """
        self._entries: list[tuple[frozenset[str], bytes]] = []
        for entry in entries:
            method, space, path = entry.rpartition(" ")
            methods = ({method, "HEAD"} if method == "GET" else {method}) if space else _DEFAULT_METHODS
            self._entries.append((frozenset(methods), path.encode()))

    def check(self, method: str, path: bytes) -> None:
        """Raise `NotFound` if no entry matches `path`, or `MethodNotAllowed` if no matching entry allows `method`."""
        allowed: set[str] = set()
        for methods, entry in self._entries:
            if path == entry or (entry[-1:] == b"/" and path.startswith(entry)):
                allowed |= methods
        if not allowed:
            raise NotFound("This path is not passed on to the upstream.", code="unknown_url")
        if method not in allowed:
            message = f"Method {method} is not passed on at this path."
            raise MethodNotAllowed(message, headers={"allow": ", ".join(sorted(allowed))})


def check_path(path: bytes) -> None:
    """Raise `BadRequest` if `path` is ambiguous, because servers could resolve it differently.

    A path is ambiguous if it does not start with a slash, has a control character or a `.` or `..` segment in any encoding, or
    is percent-encoded more than twice.
    """
    if not path.startswith(b"/"):
        raise BadRequest("The path does not start with a slash.", code="invalid_path")
    for _ in range(_MAX_DECODINGS):
        # Some servers split paths at backslashes too, and some ignore what follows a semicolon in a segment.
        segments = (segment.partition(b";")[0] for segment in _SEPARATORS.split(path))
        if any(segment in (b".", b"..") for segment in segments) or _CONTROLS.search(path):
            raise BadRequest("The path contains control characters, or a segment '.' or '..'.", code="invalid_path")
        decoded = unquote_to_bytes(path)
        if decoded == path:
            return
        path = decoded
    raise BadRequest("The path is percent-encoded more than twice.", code="invalid_path")
