"""The in-process transport, which sends an httpx client's requests to an ASGI application.

httpx's own `ASGITransport` collects the whole response before it returns. This transport behaves like a connection:

1. The headers are available as soon as the application starts its response, and each chunk as soon as it is sent.
2. The application's `send` waits until the previous chunk has been read (backpressure).
3. The application's `receive` returns the body once. It then blocks until the reader disconnects or the response is complete,
   because an earlier `http.disconnect` makes vLLM abort the generation.
4. If the reader disconnects (`aclose`) before the response is complete, the application is cancelled and awaited. The moment of
   the cancellation depends on the progress of the response:
   - Before the response starts, the application first receives `http.disconnect`, and gets a short grace period to stop its own
     tasks. vLLM generates in a separate task, which a cancellation does not stop.
   - Before the first chunk, the application also gets a grace period. vLLM never aborts a request if it is cancelled while it
     hands the request to its engine.
   - After the first chunk, the application is cancelled while it makes its next chunk, never within `send`. A cancellation
     within `send` leaves the generator of a streamed response open (Starlette). vLLM's engine then continues until a garbage
     collection.
5. Only `more_body: False` completes a response. If the application raises or returns earlier, the reader gets an error.

There is no read timeout. Callers limit the time that they wait.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import anyio
import httpx

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

logger = logging.getLogger(__name__)

# Members of the outer scope that are not inherited, because they belong to its connection. The members `responses_mw.*`, which
# are about the outer request, are not inherited either.
_NOT_INHERITED = ("extensions", "subprotocols")
# Headers that are not passed on. The response must not be compressed, and the request body is sent whole with a new length.
_DROPPED_HEADERS = frozenset({b"accept-encoding", b"content-length", b"expect", b"transfer-encoding"})
# Seconds for an application to return after `http.disconnect`, before its response starts.
_DISCONNECT_GRACE = 0.5
# Seconds for an application to send its first chunk, which is dropped, after its response has started.
_FIRST_CHUNK_GRACE = 0.1
# Maximum number of chunks to drop from an application that never yields between chunks, and so cannot be cancelled.
_MAX_DROPPED = 8
# Seconds to wait for an application that ignores its cancellation.
_CANCEL_GRACE = 5.0


class ASGITransport(httpx.AsyncBaseTransport):
    """Sends requests to `app` in this process, and streams its responses.

    The request extension `asgi_scope` is the scope of the outer request. The inner request inherits its `Host` header and its
    members, such as `app`, `state`, `client` and those that the host application added. It has its own path and other headers.

    Raises `httpx.ReadError` if the application raises before its response is complete, and `httpx.RemoteProtocolError` if it
    returns before. Once the response has started, its stream raises these errors.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._answers: set[_InnerResponse] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        answer = _InnerResponse(self._app, _scope(request, body), body)
        self._answers.add(answer)
        answer.task.add_done_callback(lambda _: self._answers.discard(answer))
        try:
            status, headers = await answer.head()
        except BaseException:
            await answer.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=answer)

    async def aclose(self) -> None:
        """Cancel the applications whose responses are incomplete, and wait until all applications have returned."""
        await asyncio.gather(*(answer.aclose() for answer in self._answers))
        if self._answers:
            await asyncio.wait({answer.task for answer in self._answers})


class _InnerResponse(httpx.AsyncByteStream):
    """The response of an application to one reader. The application runs in `task`."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes) -> None:
        self._body: bytes | None = body
        self._head: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._chunk = b""
        self._begun = False  # the first chunk has been sent
        self._complete = False
        self._left = False
        self._is_sending = False  # the application waits in `send`
        self._is_cancelled = False
        self._dropped = 0
        self._over = asyncio.Event()  # the reader has disconnected, or the response is complete
        self._reader: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None
        self.task = asyncio.create_task(self._run(app, scope))
        self.task.add_done_callback(self._note_end)

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Return the status and the headers, once the application has sent them."""
        while self._head is None:
            await self._more()
        return self._head

    def __aiter__(self) -> _InnerResponse:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunk:
            if self._complete:
                raise StopAsyncIteration
            await self._more()
        chunk, self._chunk = self._chunk, b""
        _wake(self._sender)
        return chunk

    async def aclose(self) -> None:
        """Stop reading. If the response is incomplete, cancel the application and give it `_CANCEL_GRACE` seconds to end."""
        if self._complete:
            return
        if not self._left:
            self._left = True
            self._over.set()
            await self._cancel()
        with anyio.move_on_after(_CANCEL_GRACE, shield=True):
            await asyncio.wait({self.task})

    # -- the reader's side

    async def _more(self) -> None:
        if self._left:
            raise httpx.StreamClosed
        if self.task.done():
            raise self._end_failure()
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    async def _cancel(self) -> None:
        try:
            if self._is_sending:
                _wake(self._sender)
            elif not self._begun:
                grace = _DISCONNECT_GRACE if self._head is None else _FIRST_CHUNK_GRACE
                with anyio.move_on_after(grace, shield=True):
                    await asyncio.wait({self.task})
        finally:
            if not (self._is_sending or self._is_cancelled):
                self._is_cancelled = True
                self.task.cancel()

    def _end_failure(self) -> httpx.TransportError:
        if self.task.cancelled():
            return httpx.ReadError("The application was cancelled before its response was complete")
        failure = self.task.exception()
        if failure is None:
            return httpx.RemoteProtocolError("The application returned before its response was complete")
        error = httpx.ReadError(f"The application failed before its response was complete: {failure!r}")
        error.__cause__ = failure
        return error

    # -- the application's side

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        await app(scope, self._receive, self._send)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        if failure is not None and self._complete:
            logger.error("The application failed after its response was complete", exc_info=failure)
        elif failure is not None and self._left:
            logger.debug("The application failed after its reader had disconnected", exc_info=failure)
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
            self._is_sending = True
            try:
                await self._sender
            finally:
                self._is_sending = False
        if self._left:
            self._drop()
            return
        if self._head is None:
            self._head = message["status"], list(message.get("headers", ()))
        else:
            self._begun = True
            self._chunk = bytes(message.get("body", b""))
            self._complete = not message.get("more_body", False)
        if self._complete:
            self._over.set()
        _wake(self._reader)

    def _drop(self) -> None:
        """Discard a message that nobody will read, and cancel the application while it makes its next chunk.

        Raises `OSError` if the response has not started, or after `_MAX_DROPPED` messages.
        """
        self._dropped += 1
        if self._head is None or self._dropped > _MAX_DROPPED:
            raise OSError("The reader has disconnected")
        if not self._is_cancelled:
            self._is_cancelled = True
            asyncio.get_running_loop().call_soon(self.task.cancel)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _scope(request: httpx.Request, body: bytes) -> Scope:
    """Return the outer scope, if any, with the target and the headers of `request`. The outer `Host` header is kept."""
    url = request.url
    scope: dict[str, Any] = {
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "scheme": url.scheme,
        "server": (url.host, url.port),
        "client": ("127.0.0.1", 0),
        "root_path": "",
    }
    scope.update(request.extensions.get("asgi_scope") or {})
    for key in [key for key in scope if key in _NOT_INHERITED or key.startswith("responses_mw.")]:
        del scope[key]
    if "state" in scope:
        scope["state"] = dict(scope["state"])  # as a server does for each request
    outer_host = [value for name, value in scope.get("headers", ()) if name == b"host"]
    headers = [(name.lower(), value) for name, value in request.headers.raw if name.lower() not in _DROPPED_HEADERS]
    if outer_host:  # some applications refuse unknown hosts
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
