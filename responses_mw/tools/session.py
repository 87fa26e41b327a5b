"""A session with an MCP server, based on the MCP SDK.

1. The SDK's client uses cancel scopes, which must be exited in order by the task that entered them. A run may be read by any
   task, so each session has its own task, which opens the client, waits, and closes it. Calls may come from any task.
2. Cancelling that task ends all requests at once. Then the session is deleted on the server.
3. The SDK logs URLs, messages and answers. Its logging is suppressed only for these sessions, not for the host application.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any, TypeAlias, TypeVar

import httpx2
from mcp import MCPError
from mcp.client.client import Client
from mcp.client.session import ClientSession
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Implementation

from .bridge import SESSION_HEADER, UNREACHABLE, MCPBridge
from .guard import GuardedTransport, Resolve, resolve
from .tool import MAX_MCP_TOOLS

T = TypeVar("T")
Connect: TypeAlias = Callable[["MCPTarget", "MCPLimits", MCPBridge], AbstractAsyncContextManager[Any]]

CONNECT_TIMEOUT = 5.0
"""Timeout for connecting, in seconds. A running server accepts a connection at once, however long its tools take."""
_DELETE_TIMEOUT = 1.0
"""Timeout for deleting a session on the server, in seconds."""
_OVERHEAD = 64 * 1024
_REDIRECT = "Redirect to "
_MIN_SECRET = 8
_OTHER_TRANSPORT = frozenset({400, 404, 405, 406, 410, 415, 501})
"""Statuses of a POST for which the older transport is tried (MCP specification, "Backwards compatibility")."""


@dataclass(frozen=True, slots=True)
class MCPTarget:
    """An MCP server and the headers sent to it."""

    label: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    allow_private: bool = False
    credentials_of_caller: bool = True
    """Whether the caller, not the operator, is responsible for refused credentials."""

    def reason(self, error: MCPError) -> str:
        """Return the message of ``error`` without the URL and the headers that we sent.

        A server may repeat them in its message, and errors are stored and shown.
        """
        if error.message.startswith(_REDIRECT):  # the SDK adds the new URL, which often has the old path and query
            return "it redirects to another origin, which is not followed"
        sent = [self.url, httpx2.URL(self.url).raw_path.decode("ascii"), *self.headers.values()]
        text = error.message
        for secret in (piece for value in sent for piece in (value, value.rpartition(" ")[2])):
            if len(secret) >= _MIN_SECRET:
                text = text.replace(secret, "<redacted>")
        return text


@dataclass(frozen=True, slots=True)
class MCPLimits:
    """Limits of a connection. Times are in seconds."""

    timeout: float = 60.0
    output_bytes: int = 1024 * 1024
    tools: int = MAX_MCP_TOOLS

    @property
    def answer_bytes(self) -> int:
        """Maximum size of an answer, which may contain a result twice (as text and structured content), with escapes."""
        return 8 * self.output_bytes + _OVERHEAD


class OpeningFailed(Exception):
    """No session could be opened. ``status`` is the last HTTP status, or 502. The message continues "MCP server 'label':"."""

    def __init__(self, reason: str, status: int = UNREACHABLE, *, address_refused: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.address_refused = address_refused


class MCPSession:
    """A session that runs in a task of its own. ``client`` is set once it is open."""

    client: ClientSession

    def __init__(self, connect: Connect, target: MCPTarget, limits: MCPLimits, resolve: Resolve) -> None:
        transport = GuardedTransport(allow_private=target.allow_private, resolve=resolve)
        self._limits = limits
        self._bridge = MCPBridge(transport, limits.answer_bytes)
        self._transport = connect(target, limits, self._bridge)
        self._target = target
        self._mode = "auto" if connect is _streamable else "legacy"
        self._opened: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live())
        self._task.add_done_callback(_retrieve)
        self._requests: set[asyncio.Task[Any]] = set()

    @property
    def is_over(self) -> bool:
        return self._task.done()

    @property
    def is_forgotten(self) -> bool:
        """Whether the server no longer knows the session."""
        return self._bridge.status == 404 and self._bridge.session_id is not None

    async def open(self) -> None:
        """Wait until the session can be used. Raises ``OpeningFailed``."""
        try:
            async with asyncio.timeout(self._limits.timeout):
                awaited: set[asyncio.Future[Any]] = {self._task, self._opened}
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            await self.aclose()
            raise OpeningFailed("it did not answer in time") from None
        except BaseException:
            self._task.cancel()
            raise
        if not self._opened.done():
            raise self._failure(None if self._task.cancelled() else self._task.exception())
        self.client = self._opened.result()

    async def request(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``, a call of the client. When cancelled, return at once, while the SDK still notifies the server."""
        with quiet():
            task = asyncio.create_task(work)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        task.add_done_callback(_retrieve)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        return task.result()

    async def aclose(self) -> None:
        """End the session. Pending requests fail."""
        self._task.cancel()
        await asyncio.wait({self._task, *self._requests}, timeout=2 * _DELETE_TIMEOUT)

    async def _live(self) -> None:
        with quiet():
            async with self._bridge, Client(self._transport, mode=self._mode, cache=None, client_info=_client_info()) as client:
                self._opened.set_result(client.session)
                await asyncio.get_running_loop().create_future()  # until the task is cancelled

    def _failure(self, error: BaseException | None) -> OpeningFailed:
        error = _first(error)
        status = self._bridge.status or UNREACHABLE
        if isinstance(error, httpx2.HTTPStatusError):
            status = error.response.status_code
            reason = f"it answered with HTTP status {status}"
        elif isinstance(error, MCPError):
            reason = self._target.reason(error)[:200]
            reason = reason if status >= 300 else f"it refused the session: {reason}"
        else:
            reason = "it does not speak MCP"
        return OpeningFailed(reason, status, address_refused=self._bridge.address_refused)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()


async def open_session(target: MCPTarget, limits: MCPLimits, resolve: Resolve = resolve) -> MCPSession:
    """Open a session over streamable HTTP, or over legacy SSE if the server supports only that. Raises ``OpeningFailed``."""
    session = MCPSession(_streamable, target, limits, resolve)
    try:
        await session.open()
    except OpeningFailed as first:
        if first.status not in _OTHER_TRANSPORT:
            raise
        session = MCPSession(_sse, target, limits, resolve)
        try:
            await session.open()
        except OpeningFailed as second:
            raise (second if second.status in (401, 403) else first) from None
    return session


def _http(target: MCPTarget, limits: MCPLimits, bridge: MCPBridge) -> httpx2.AsyncClient:
    """Create a client. It has no read timeout: calls have their own, and an event stream may be silent for a long time."""
    return httpx2.AsyncClient(
        transport=_SharedTransport(bridge),
        headers={"user-agent": "responses-mw", **target.headers, "accept-encoding": "identity"},
        timeout=httpx2.Timeout(limits.timeout, connect=CONNECT_TIMEOUT, read=None),
        trust_env=False,  # ignore proxies and credentials from the environment
    )


@asynccontextmanager
async def _streamable(target: MCPTarget, limits: MCPLimits, bridge: MCPBridge) -> AsyncIterator[Any]:
    async with _http(target, limits, bridge) as http:
        try:
            streams = streamable_http_client(
                target.url, http_client=http, terminate_on_close=False, max_sse_event_size=limits.answer_bytes
            )
            async with streams as pair:
                yield pair
        finally:
            if bridge.session_id is not None:
                await _delete_session(http, target.url, bridge.session_id)


async def _delete_session(http: httpx2.AsyncClient, url: str, session_id: str) -> None:
    """Delete the session on the server, ignoring failures."""
    try:
        async with asyncio.timeout(_DELETE_TIMEOUT):
            await http.delete(url, headers={SESSION_HEADER: session_id})
    except (TimeoutError, httpx2.HTTPError):
        return


def _sse(target: MCPTarget, limits: MCPLimits, bridge: MCPBridge) -> AbstractAsyncContextManager[Any]:
    def http(
        headers: dict[str, str] | None = None, timeout: httpx2.Timeout | None = None, auth: httpx2.Auth | None = None
    ) -> httpx2.AsyncClient:
        return _http(target, limits, bridge)

    return sse_client(target.url, httpx_client_factory=http)


class _SharedTransport(httpx2.AsyncBaseTransport):
    """A transport that outlives its clients."""

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return await self._transport.handle_async_request(request)


@cache
def _client_info() -> Implementation:
    return Implementation(name="responses-mw", version=version("responses-mw"))


def _first(error: BaseException | None) -> BaseException | None:
    """Return the first error in the SDK's nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# -- the SDK's logs ----------------------------------------------------------------------------------------------------------

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)
_LOGGERS = (
    "client",
    "httpcore.connection",
    "httpcore.http11",
    "httpx2",
    "mcp.client.client",
    "mcp.client.sse",
    "mcp.client.streamable_http",
    "mcp.shared.dispatcher",
    "mcp.shared.jsonrpc_dispatcher",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the SDK's logs in this context and in tasks started in it."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def _is_loggable(_: logging.LogRecord) -> bool:
    return not _quiet.get()


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(_is_loggable)
