"""The in-process transport: an ASGI application as the upstream of an httpx client.

httpx's own ``ASGITransport`` gathers the whole answer before it returns. This one behaves like a connection:

1. The head is there as soon as the application starts its answer, and each chunk as soon as it is sent.
2. One chunk is under way at a time: the application's ``send`` waits until the chunk before has been read.
3. The application's ``receive`` gives the body once, then blocks until the reader leaves or the answer is complete.
   (Told ``http.disconnect`` any earlier, vLLM aborts the generation.)
4. A reader that leaves (``aclose``) cancels the application and waits for its end. Before the answer starts, it is told first,
   as by a server, and has a moment to end by itself: it may work in a task that it ends when it is told, and that would be left
   behind if it were cancelled (vLLM).
5. Only ``more_body: False`` ends an answer. An application that raises or returns before it breaks the answer off.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import anyio
import httpx

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

__all__ = ["ASGITransport"]

logger = logging.getLogger(__name__)

# What an outer scope offers of its own server and connection; a sub-request has neither.
_NOT_INHERITED = ("extensions", "subprotocols")
# Set anew for the sub-request, which is neither compressed nor chunked.
_DROPPED_HEADERS = frozenset({b"accept-encoding", b"content-length", b"expect", b"transfer-encoding"})
# Seconds that an application has to end by itself before its answer starts.
_HEED_GRACE = 0.5
# Seconds that a leaving reader waits for an application that does not heed its cancellation.
_END_GRACE = 5.0


class ASGITransport(httpx.AsyncBaseTransport):
    """Sends requests to ``app`` in this process and streams its answers.

    Request extensions: ``asgi_scope`` is the scope that the sub-request inherits from (the outer request's: ``app``, ``state``,
    ``root_path``, ``client`` and what else the host put there); ``timeout["read"]`` bounds, in seconds, the wait for the head
    and for each chunk.

    Raises ``httpx.ReadError`` where the application raises, ``httpx.RemoteProtocolError`` where it returns without a
    complete answer, and ``httpx.ReadTimeout``: from the request before the answer starts, from its stream afterwards.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._answers: set[_InnerResponse] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        timeout = request.extensions.get("timeout", {})
        answer = _InnerResponse(self._app, _scope(request, body), body, timeout.get("read"))
        self._answers.add(answer)
        answer.task.add_done_callback(lambda _: self._answers.discard(answer))
        try:
            status, headers = await answer.head()
        except BaseException:
            await answer.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=answer)

    async def aclose(self) -> None:
        """Break off the answers that are still open, and wait for applications at work after theirs (background tasks)."""
        await asyncio.gather(*(answer.aclose() for answer in self._answers))
        if self._answers:
            await asyncio.wait({answer.task for answer in self._answers})


class _InnerResponse(httpx.AsyncByteStream):
    """An application's answer on its way to one reader; owns the ``task`` that the application runs in."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes, read_timeout: float | None) -> None:
        self._body: bytes | None = body
        self._read_timeout = read_timeout
        self._head: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._chunk = b""
        self._complete = False
        self._left = False
        self._over = asyncio.Event()  # the reader has left, or the answer is complete
        self._reader: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None
        self.task = asyncio.create_task(self._run(app, scope))
        self.task.add_done_callback(self._ended)

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers, as soon as the application has sent them."""
        while self._head is None:
            await self._news()
        return self._head

    def __aiter__(self) -> _InnerResponse:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunk:
            if self._complete:
                raise StopAsyncIteration
            await self._news()
        chunk, self._chunk = self._chunk, b""
        _wake(self._sender)
        return chunk

    async def aclose(self) -> None:
        """The reader leaves: an answer that is not complete is cancelled, and its application's end awaited."""
        if self._complete:
            return
        if not self._left:
            self._left = True
            self._over.set()
            try:
                if self._head is None:
                    with anyio.move_on_after(_HEED_GRACE, shield=True):
                        await asyncio.wait({self.task})
            finally:
                self.task.cancel()
        with anyio.move_on_after(_END_GRACE, shield=True):
            await asyncio.wait({self.task})

    # The reader's side.

    async def _news(self) -> None:
        """Wait until the application has sent something; raise if it has ended or takes too long."""
        if self._left:
            raise httpx.StreamClosed
        if self.task.done():
            raise self._breaking_off()
        loop = asyncio.get_running_loop()
        self._reader = reader = loop.create_future()
        timer = loop.call_later(self._read_timeout, self._expire) if self._read_timeout is not None else None
        try:
            await reader
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()

    def _expire(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(httpx.ReadTimeout(f"The application sent nothing for {self._read_timeout} s"))

    def _breaking_off(self) -> httpx.TransportError:
        """What the reader of an answer without an end is told."""
        if self.task.cancelled():
            return httpx.ReadError("The application was cancelled before its answer was complete")
        failure = self.task.exception()
        if failure is None:
            return httpx.RemoteProtocolError("The application returned before its answer was complete")
        error = httpx.ReadError(f"The application failed before its answer was complete: {failure!r}")
        error.__cause__ = failure
        return error

    # The application's side.

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        await app(scope, self._receive, self._send)

    def _ended(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        if failure is not None and self._complete:
            logger.error("The application failed after its answer was complete", exc_info=failure)
        elif failure is not None and self._left:
            logger.debug("The application failed after its reader had left", exc_info=failure)
        _wake(self._reader)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        expected = "http.response.start" if self._head is None else "http.response.body"
        if self._complete or message["type"] != expected:
            raise RuntimeError(f"Unexpected ASGI message {message['type']!r}")
        if self._chunk and not self._left:
            self._sender = asyncio.get_running_loop().create_future()
            await self._sender
        if self._left:
            raise OSError("The reader has left")
        if self._head is None:
            self._head = message["status"], list(message.get("headers", ()))
        else:
            self._chunk = bytes(message.get("body", b""))
            self._complete = not message.get("more_body", False)
        if self._complete:
            self._over.set()
        _wake(self._reader)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _scope(request: httpx.Request, body: bytes) -> Scope:
    """The sub-request's scope: the outer one's, if there is one, with this request's target and headers, and the outer
    ``Host``."""
    url = request.url
    scope: dict[str, Any] = {
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "scheme": url.scheme,
        "server": (url.host, url.port),
        "client": ("127.0.0.1", 0),
        "root_path": "",
    }
    scope.update(request.extensions.get("asgi_scope") or {})
    for key in _NOT_INHERITED:
        scope.pop(key, None)
    if "state" in scope:
        scope["state"] = dict(scope["state"])  # as a server does for each request
    outer_host = [value for name, value in scope.get("headers", ()) if name == b"host"]
    headers = [(name.lower(), value) for name, value in request.headers.raw if name.lower() not in _DROPPED_HEADERS]
    if outer_host:  # hosts that they do not know are refused by some applications
        headers = [(b"host", outer_host[0]), *(header for header in headers if header[0] != b"host")]
    if body or "content-length" in request.headers:
        headers.append((b"content-length", b"%d" % len(body)))
    raw_path, _, query = url.raw_path.partition(b"?")
    return scope | {
        "type": "http",
        "http_version": "1.1",
        "method": request.method,
        "path": url.path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": headers,
    }
