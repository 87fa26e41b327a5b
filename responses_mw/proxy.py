"""Everything that is not ours: the request passes to the upstream and its answer back, streamed, byte for byte.

1. Path, query and bodies stay as they are, compressed or not; so do headers, their order and their duplicates, but for
   the hop-by-hop ones (RFC 9110, section 7.6.1), ``Host`` and ``X-Forwarded-*``.
2. Neither body is gathered: one read gives one write, and who writes too fast is held by who reads slowly.
3. A client that leaves closes the upstream's connection at once.
4. An upstream that breaks off within its answer never looks like a clean end.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from urllib.parse import quote

import anyio
import httpx
import orjson

from .errors import BadRequest, UpstreamError, UpstreamTimeout, UpstreamUnreachable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

    from starlette.types import Message, Receive, Scope, Send

    from .errors import APIError

    Headers: TypeAlias = list[tuple[bytes, bytes]]

__all__ = ["ReverseProxy"]

logger = logging.getLogger(__name__)

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Whoever asks for "100-continue" has been told to go on by the server in front, once we read the body.
_NOT_FORWARDED = frozenset({b"host", b"expect", b"x-forwarded-for"})


class ReverseProxy:
    """An ASGI application that passes every request to ``upstream`` (``http://vllm:8000``, with or without a base path).

    ``base_path`` (``/openai``) is where our clients find what the upstream has at its root; paths beside it pass as they are.
    The ``client`` is the caller's to build and to close; its time-outs hold. Answers 502 where the upstream cannot be
    reached, 504 where it does not answer in time, 501 where a WebSocket is asked for. Raises ``UpstreamError`` where the
    upstream breaks off within an answer: the server then closes the client's connection without ending the body.
    """

    def __init__(self, client: httpx.AsyncClient, upstream: str, base_path: str = "") -> None:
        self._client = client
        self._own_path = base_path.encode()
        self._upstream = httpx.URL(upstream)
        self._base_path = self._upstream.raw_path.partition(b"?")[0].rstrip(b"/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._pass(scope, receive, send)
        elif scope["type"] == "websocket":
            await _refuse_websocket(scope, receive, send)
        else:
            await _lifespan(receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await receive()
        if first["type"] == "http.disconnect":
            return
        body = _RequestBody(first, receive) if first.get("more_body", False) else first.get("body", b"")
        try:
            request = self._request(scope, body)
        except httpx.InvalidURL as error:
            await _send_error(send, BadRequest(f"The request's target is not valid: {error}"))
            return
        failure = None
        async with anyio.create_task_group() as group:
            group.start_soon(_watch, receive, body, group.cancel_scope)
            failure = await self._relay(request, send)
            group.cancel_scope.cancel()
        if failure is not None:
            raise UpstreamError(f"The upstream broke off its answer: {failure!r}")

    async def _relay(self, request: httpx.Request, send: Send) -> httpx.TransportError | None:
        """Send the request and pass the answer back; what broke the answer off, if anything did, is returned."""
        try:
            response = await self._send(request)
        except httpx.TransportError as error:
            logger.warning("No answer from the upstream to %s %s: %r", request.method, request.url.path, error)
            await _send_error(send, _unanswered(error))
            return None
        try:
            head = {"status": response.status_code, "headers": _response_headers(response)}
            await send({"type": "http.response.start", **head})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except httpx.TransportError as error:
            return error
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """A connection that the upstream was closing as the request went into it is no reason to fail: there is one more try,
        where there is a body to send again."""
        try:
            return await self._client.send(request, stream=True, follow_redirects=False)
        except httpx.ConnectError:
            if not isinstance(request.stream, httpx.ByteStream):
                raise
            return await self._client.send(request, stream=True, follow_redirects=False)

    def _request(self, scope: Scope, body: bytes | _RequestBody) -> httpx.Request:
        target = self._target(scope)
        url = self._upstream.copy_with(raw_path=target)
        headers = [(b"host", self._upstream.netloc), *_request_headers(scope)]
        # httpx normalises the path of its URL; "target" is what it sends instead.
        extensions = {"target": target, "timeout": self._client.timeout.as_dict()}
        if isinstance(body, bytes):
            return httpx.Request(scope["method"], url, headers=headers, content=body, extensions=extensions)
        if all(name != b"content-length" for name, _ in headers):
            headers.append((b"transfer-encoding", b"chunked"))
        return httpx.Request(scope["method"], url, headers=headers, stream=body, extensions=extensions)

    def _target(self, scope: Scope) -> bytes:
        """The upstream's base path, the request's path below the host's ``root_path`` and ours, and its query."""
        path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
        for prefix in (scope.get("root_path", "").rstrip("/").encode(), self._own_path):
            if path == prefix or path.startswith(prefix + b"/"):
                path = path[len(prefix) :]
        query = scope["query_string"]
        return (self._base_path + path or b"/") + (b"?" + query if query else b"")


class _RequestBody(httpx.AsyncByteStream):
    """A request's body, read from the client as the upstream takes it.

    ``over`` is set once nothing more will come; ``aborted`` tells that the client left before its end.
    """

    def __init__(self, first: Message, receive: Receive) -> None:
        self._next: Message | None = first
        self._receive = receive
        self.over = anyio.Event()
        self.aborted = False

    def __aiter__(self) -> _RequestBody:
        return self

    async def __anext__(self) -> bytes:
        if self.over.is_set():
            raise StopAsyncIteration
        message, self._next = self._next or await self._receive(), None
        self.aborted = message["type"] == "http.disconnect"
        if not message.get("more_body", False):
            self.over.set()
        if self.aborted:
            await anyio.sleep_forever()  # until we are cancelled: an end here would make the torso a whole body
        chunk: bytes = message.get("body", b"")
        return chunk


async def _watch(receive: Receive, body: bytes | _RequestBody, exchange: anyio.CancelScope) -> None:
    """Cancel the exchange once the client leaves. Until the body is over, it is the body that reads from the client."""
    if isinstance(body, _RequestBody):
        await body.over.wait()
    if isinstance(body, bytes) or not body.aborted:
        while (await receive())["type"] != "http.disconnect":
            pass
    exchange.cancel()


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers that go beyond this hop, their names in lower case as ASGI wants them."""
    lowered = [(name.lower(), value) for name, value in headers]
    listed = b",".join(value for name, value in lowered if name == b"connection")
    hop_by_hop = _HOP_BY_HOP.union(name.strip().lower() for name in listed.split(b","))
    return [(name, value) for name, value in lowered if name not in hop_by_hop]


def _request_headers(scope: Scope) -> Headers:
    """The client's headers and ``X-Forwarded-*``: ``-For`` appended to, the others set unless a proxy before us did."""
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
    kept = [(name, value) for name, value in headers if name not in _NOT_FORWARDED]
    return kept + [(name, value) for name, value in forwarded.items() if value and name not in dict(kept)]


def _response_headers(response: httpx.Response) -> Headers:
    headers = _end_to_end(response.headers.raw)
    if response.status_code in {204, 304}:
        # A 304 may tell the length that a 200 would have; servers take it for that of the body, which is empty.
        return [(name, value) for name, value in headers if name != b"content-length"]
    return headers


def _unanswered(error: httpx.TransportError) -> UpstreamError:
    if isinstance(error, httpx.TimeoutException):
        return UpstreamTimeout("The upstream did not answer in time")
    return UpstreamUnreachable("The upstream cannot be reached")


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    if "websocket.http.response" in scope.get("extensions", {}):
        error = UpstreamError("WebSockets are not relayed", status=501, code="websocket_not_supported")
        await _send_error(send, error, kind="websocket.http.response")
    else:
        await send({"type": "websocket.close"})


async def _send_error(send: Send, error: APIError, *, kind: str = "http.response") -> None:
    """Answer with the error's JSON body; ``kind`` is the message type of the answer, HTTP's or a refused WebSocket's."""
    body = orjson.dumps(error.body())
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": f"{kind}.start", "status": error.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})


async def _lifespan(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
