"""A session with an MCP server, by the SDK's client.

1. The SDK's client lives in cancel scopes, which must be left by the task that entered them, in order. A run is read by whoever
   asks for its next event. So a session has a task of its own that enters, waits, and leaves; calls may come from any task.
2. Ending that task closes every request under way at once; only then a session that the server keeps is given back to it.
3. The SDK logs URLs, messages and answers. What it logs for us is dropped; where the host application uses it too, that stays.
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

from .bridge import SESSION_HEADER, UNREACHABLE, Bridge
from .guard import GuardedTransport, Resolve, resolve

T = TypeVar("T")
Connect: TypeAlias = Callable[["Target", "Bounds", Bridge], AbstractAsyncContextManager[Any]]

_FAREWELL = 1.0
"""Longest time, in seconds, that giving a session back may take."""
_OVERHEAD = 64 * 1024
_REDIRECT = "Redirect to "
_SHORTEST_SECRET = 8
_OTHER_TRANSPORT = frozenset({400, 404, 405, 406, 410, 415, 501})
"""What servers answer to a POST that expect the older transport's GET (MCP specification, "Backwards compatibility")."""


@dataclass(frozen=True, slots=True)
class Target:
    """An MCP server, and what it is sent."""

    label: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    allow_private: bool = False
    credentials_of_caller: bool = True
    """Whether a refusal of the credentials is the caller's affair, not the operator's."""

    def reason(self, error: MCPError) -> str:
        """What ``error`` tells, without what the server was sent: it may repeat that, and errors are stored and shown."""
        if error.message.startswith(_REDIRECT):  # the SDK's own, with the new URL: mostly with the old one's path and query
            return "it redirects, which is followed within its own origin only"
        sent = [self.url, httpx2.URL(self.url).raw_path.decode("ascii"), *self.headers.values()]
        text = error.message
        for secret in (piece for value in sent for piece in (value, value.rpartition(" ")[2])):
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "<redacted>")
        return text


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long and how much; seconds and bytes."""

    timeout: float = 60.0
    connect_timeout: float = 5.0
    output_bytes: int = 1024 * 1024
    tools: int = 512

    @property
    def answer_bytes(self) -> int:
        """An answer may hold a result twice, as text and as structured content, with characters escaped."""
        return 8 * self.output_bytes + _OVERHEAD


class OpeningFailed(Exception):
    """There is no session. ``status`` is the server's last answer, 502 if it gave none; the text follows the server's name."""

    def __init__(self, reason: str, status: int = UNREACHABLE, *, address_refused: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.address_refused = address_refused


class MCPSession:
    """A session in its task. ``client`` is the SDK's, once opened."""

    client: ClientSession

    def __init__(self, connect: Connect, target: Target, bounds: Bounds, resolve: Resolve) -> None:
        transport = GuardedTransport(allow_private=target.allow_private, resolve=resolve)
        self._bounds = bounds
        self._bridge = Bridge(transport, bounds.answer_bytes)
        self._transport = connect(target, bounds, self._bridge)
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
        """Whether the server does not know the session any more."""
        return self._bridge.status == 404 and self._bridge.session_id is not None

    async def open(self) -> None:
        """Waits until the session can be used. Raises OpeningFailed."""
        try:
            async with asyncio.timeout(self._bounds.timeout):
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
        """What ``work``, a call of the client's, returns. Who waits for it can leave at once: that the SDK then tells the
        server, which may not listen, is not waited for."""
        with discreet():
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
        """Ends the session. Requests that are waited for fail."""
        self._task.cancel()
        await asyncio.wait({self._task, *self._requests}, timeout=2 * _FAREWELL)

    async def _live(self) -> None:
        with discreet():
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
            told = self._target.reason(error)[:200]
            reason = told if status >= 300 else f"it refused the session: {told}"
        else:
            reason = "it does not speak MCP"
        return OpeningFailed(reason, status, address_refused=self._bridge.address_refused)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Whoever waits for the task learns how it ended; there may be nobody."""
    if not task.cancelled():
        task.exception()


async def open_session(target: Target, bounds: Bounds, resolve: Resolve = resolve) -> MCPSession:
    """A session by streamable HTTP, or by legacy SSE if the server does not know that. Raises OpeningFailed."""
    session = MCPSession(_streamable, target, bounds, resolve)
    try:
        await session.open()
    except OpeningFailed as first:
        if first.status not in _OTHER_TRANSPORT:
            raise
        session = MCPSession(_sse, target, bounds, resolve)
        try:
            await session.open()
        except OpeningFailed as second:
            raise (second if second.status in (401, 403) else first) from None
    return session


def _http(target: Target, bounds: Bounds, bridge: Bridge) -> httpx2.AsyncClient:
    """Reads have no limit of their own: calls have, and a stream of events may be silent for long."""
    return httpx2.AsyncClient(
        transport=_Shared(bridge),
        headers={"user-agent": "responses-mw", **target.headers, "accept-encoding": "identity"},
        timeout=httpx2.Timeout(bounds.timeout, connect=bounds.connect_timeout, read=None),
        trust_env=False,  # neither proxies nor credentials of the environment
    )


@asynccontextmanager
async def _streamable(target: Target, bounds: Bounds, bridge: Bridge) -> AsyncIterator[Any]:
    async with _http(target, bounds, bridge) as http:
        try:
            streams = streamable_http_client(
                target.url, http_client=http, terminate_on_close=False, max_sse_event_size=bounds.answer_bytes
            )
            async with streams as pair:
                yield pair
        finally:
            if bridge.session_id is not None:
                await _give_back(http, target.url, bridge.session_id)


async def _give_back(http: httpx2.AsyncClient, url: str, session_id: str) -> None:
    """Tells the server that its session is not needed any more."""
    try:
        async with asyncio.timeout(_FAREWELL):
            await http.delete(url, headers={SESSION_HEADER: session_id})
    except (TimeoutError, httpx2.HTTPError):
        return


def _sse(target: Target, bounds: Bounds, bridge: Bridge) -> AbstractAsyncContextManager[Any]:
    def http(
        headers: dict[str, str] | None = None, timeout: httpx2.Timeout | None = None, auth: httpx2.Auth | None = None
    ) -> httpx2.AsyncClient:
        return _http(target, bounds, bridge)

    return sse_client(target.url, httpx_client_factory=http)


class _Shared(httpx2.AsyncBaseTransport):
    """A transport that outlives the clients that use it."""

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return await self._transport.handle_async_request(request)


@cache
def _client_info() -> Implementation:
    return Implementation(name="responses-mw", version=version("responses-mw"))


def _first(error: BaseException | None) -> BaseException | None:
    """What happened first, of what the SDK's task groups gathered."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# -- what the SDK logs ---------------------------------------------------------------------------------------------------------

_discreet: ContextVar[bool] = ContextVar("discreet", default=False)
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
def discreet() -> Iterator[None]:
    """Within, and in tasks that are begun within, the SDK logs nothing."""
    token = _discreet.set(True)
    try:
        yield
    finally:
        _discreet.reset(token)


def _is_loggable(_: logging.LogRecord) -> bool:
    return not _discreet.get()


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(_is_loggable)
