"""A session with an MCP server, based on the MCP SDK.

The SDK's client must be closed by the task that opened it. Because any task may read a run, each session has its own task to
open and close the client. When the task is cancelled, all requests fail. If the server assigned a session id, it is asked to
delete the session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import httpx2
from mcp import MCPError
from mcp.client.client import Client
from mcp.client.session import ClientSession
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Implementation, JSONRPCRequest

from ..errors import Cause
from ..redaction import Redactor, credentials_in, redacted
from ..version import VERSION
from . import MAX_OUTPUT_BYTES
from .guarded_transport import SESSION_HEADER, UNREACHABLE, GuardedTransport

T = TypeVar("T")

_CONNECT_TIMEOUT = 5.0  # seconds; a running server accepts connections immediately, even if its tools are slow
_DELETE_TIMEOUT = 1.0  # seconds
_MAX_ANSWER_BYTES = 8 * MAX_OUTPUT_BYTES + 64 * 1024  # a response may contain a result twice, with escaped characters
MAX_SERVER_REQUESTS = 200
"""Maximum number of requests, such as pings, that a server may send in a session, in addition to one per second.

The SDK answers each request in a task of its own.
"""
_REDIRECT = "Redirect to "
_OTHER_TRANSPORT = frozenset({400, 404, 405, 406, 410, 415, 501})
"""The HTTP statuses after which the older transport is tried (MCP specification, "Backwards compatibility")."""


@dataclass(eq=False)
class MCPFailure(Exception):
    """A session could not be opened, or a request failed. `kind` and `code` are the error's `type` and `code` in an `mcp_call`.

    The code of an `http_error` is an HTTP status. Other codes are JSON-RPC codes. `address_refused` means that the server's
    address is not public.
    """

    message: str
    code: int = UNREACHABLE
    kind: str = "http_error"
    address_refused: bool = False


@dataclass(frozen=True, slots=True)
class MCPTarget:
    """The parameters for connecting to an MCP server. `headers` are sent with every request."""

    label: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    allow_private: bool = False
    credentials_of_caller: bool = True
    """Whether the credentials come from the caller, so that a refusal is the caller's error and not the operator's."""
    is_configured: bool = False
    """Whether the server is in the operator's settings. Otherwise, the caller chose it."""
    timeout: float = 60.0
    """Timeout of a request in seconds."""

    def cause(self, status: int) -> Cause:
        """Return who caused a failure with this HTTP status."""
        is_refusal = status in (401, 403) and self.credentials_of_caller
        return "client" if is_refusal or not self.is_configured else "server"

    def failure(self, reason: str, code: int = UNREACHABLE, kind: str = "http_error") -> MCPFailure:
        return MCPFailure(f"MCP server '{self.label}': {redacted(reason)}.", code, kind)

    def reason(self, error: MCPError) -> str:
        """Return the message of `error` for clients. The URL and header values of 8 characters or more are redacted."""
        if error.message.startswith(_REDIRECT):  # the SDK adds the new URL, which often has the old path and query
            return "it redirects to another origin, which is not followed"
        sent = [self.url, httpx2.URL(self.url).raw_path.decode("ascii"), *credentials_in(self.headers)]
        return Redactor(sent)(error.message)


class MCPSession:
    """A session that runs in its own task. `client` is set by `open`."""

    client: ClientSession

    def __init__(self, target: MCPTarget, *, legacy: bool) -> None:
        """Start the task. If `legacy` is true, use the older SSE transport instead of streamable HTTP."""
        self._target = target
        self._legacy = legacy
        self._transport = GuardedTransport(_MAX_ANSWER_BYTES, allow_private=target.allow_private)
        self._opened: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(_quietly(self._live()))
        self._task.add_done_callback(_retrieve)
        self._requests: set[asyncio.Task[Any]] = set()

    @property
    def is_over(self) -> bool:
        return self._task.done()

    @property
    def is_forgotten(self) -> bool:
        """Whether the server no longer knows the session. It assigned a session id, but answered the last POST with 404."""
        return self._transport.status == 404 and self._transport.session_id is not None

    async def open(self) -> Self:
        """Wait until the session can be used, and return it. Raises `MCPFailure` if the session cannot be opened."""
        awaited: set[asyncio.Future[Any]] = {self._task, self._opened}
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if not self._opened.done():
            raise self._failure(None if self._task.cancelled() else self._task.exception())
        self.client = self._opened.result()
        return self

    async def request(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, a call to a method of `client`, in a task, and return its result.

        A cancelled call of `request` does not wait until the SDK has notified the server.
        """
        task = asyncio.create_task(_quietly(work))
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
        """Close the session. Pending requests fail. Wait at most two seconds for the session's tasks."""
        self._task.cancel()
        await asyncio.wait({self._task, *self._requests}, timeout=2 * _DELETE_TIMEOUT)

    async def _live(self) -> None:
        connect, mode = (_sse, "legacy") if self._legacy else (_streamable, "auto")
        info = Implementation(name="responses-mw", version=VERSION)
        async with Client(connect(self._target, self._transport), mode=mode, cache=None, client_info=info) as client:
            self._opened.set_result(client.session)
            await asyncio.get_running_loop().create_future()  # until the task is cancelled

    def _failure(self, error: BaseException | None) -> MCPFailure:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        status = self._transport.status or UNREACHABLE
        if isinstance(error, httpx2.HTTPStatusError):
            status = error.response.status_code
            reason = f"it answered with HTTP status {status}"
        elif isinstance(error, MCPError):
            reason = self._target.reason(error)[:200]
            reason = reason if status >= 300 else f"it refused the session: {reason}"
        else:
            reason = "it does not speak MCP"
        failure = self._target.failure(reason, status)
        failure.address_refused = self._transport.address_refused
        return failure


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of `task`, so that asyncio does not log that it was never retrieved."""
    if not task.cancelled():
        task.exception()


async def open_session(target: MCPTarget) -> MCPSession:
    """Open a session over streamable HTTP or, if the server lacks it, over legacy SSE. Raises `MCPFailure` if that fails."""
    try:
        return await MCPSession(target, legacy=False).open()
    except MCPFailure as first:
        if first.code not in _OTHER_TRANSPORT:
            raise
        try:
            return await MCPSession(target, legacy=True).open()
        except MCPFailure as second:
            raise (second if second.code in (401, 403) else first) from None


# -- transports --------------------------------------------------------------------------------------------------------------


def _http(target: MCPTarget, transport: GuardedTransport) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=transport,
        headers={"user-agent": "responses-mw", **target.headers, "accept-encoding": "identity"},
        # no read timeout, because calls have their own timeout, and an event stream may be idle for a long time
        timeout=httpx2.Timeout(target.timeout, connect=_CONNECT_TIMEOUT, read=None),
        trust_env=False,  # ignore proxies and credentials from the environment
    )


@asynccontextmanager
async def _streamable(target: MCPTarget, transport: GuardedTransport) -> AsyncIterator[Any]:
    async with _http(target, transport) as http:
        try:
            async with streamable_http_client(
                target.url, http_client=http, terminate_on_close=False, max_sse_event_size=_MAX_ANSWER_BYTES
            ) as pair:
                yield _Incoming(pair[0]), pair[1]
        finally:
            if transport.session_id is not None:
                with suppress(TimeoutError, httpx2.HTTPError):
                    async with asyncio.timeout(_DELETE_TIMEOUT):
                        await http.delete(target.url, headers={SESSION_HEADER: transport.session_id})


@asynccontextmanager
async def _sse(target: MCPTarget, transport: GuardedTransport) -> AsyncIterator[Any]:
    factory = lambda headers=None, timeout=None, auth=None: _http(target, transport)  # noqa: E731
    async with sse_client(target.url, httpx_client_factory=factory) as pair:
        yield _Incoming(pair[0]), pair[1]


class _Incoming:
    """The stream of a server's messages. It ends if the server sends too many requests."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._began = time.monotonic()
        self._requests = 0

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stream.__aexit__(*error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        received = await anext(self._stream)
        self._requests += isinstance(getattr(received, "message", None), JSONRPCRequest)
        if self._requests > MAX_SERVER_REQUESTS + time.monotonic() - self._began:
            raise StopAsyncIteration
        return received


# -- the SDK's logs, which contain URLs and messages. The filter affects only our sessions, not those of a host application ---

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)
_LOGGERS = (
    "client",
    "httpcore2.connection",
    "httpcore2.http11",
    "httpx2",
    "mcp.client.client",
    "mcp.client.sse",
    "mcp.client.streamable_http",
    "mcp.shared.dispatcher",
    "mcp.shared.jsonrpc_dispatcher",
)


async def _quietly(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` with the SDK's logging suppressed. Call this in a new task, because it changes the task's context."""
    _quiet.set(True)
    return await work


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(lambda _: not _quiet.get())
