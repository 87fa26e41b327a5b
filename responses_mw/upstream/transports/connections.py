"""The pool of TCP and TLS connections that `http11` uses."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeAlias

import anyio
import httpx

from ...network import keep_alive

Origin: TypeAlias = tuple[str, str, int, str]
"""Scheme, host, port, and server name of TLS ("" without TLS)."""

_DEFAULT_PORTS = {"http": 80, "https": 443}
# Seconds after which an idle connection is closed. Common servers close it after 5 s, and a request sent then would fail.
_KEEPALIVE_EXPIRY = 4.0
# Seconds before the next address of a host is tried in parallel (RFC 8305).
_ATTEMPT_DELAY = 0.25


def origin_of(url: httpx.URL, server_name: str | None = None) -> Origin:
    """Return the origin of `url`. The server name is the URL's host, or `server_name` if it is not empty.

    Raises `httpx.UnsupportedProtocol` if the scheme is neither http nor https.
    """
    scheme, host = url.scheme, url.raw_host.decode()
    if scheme not in _DEFAULT_PORTS:
        raise httpx.UnsupportedProtocol(f"The URL must begin with http:// or https://: {url}")
    return scheme, host, url.port or _DEFAULT_PORTS[scheme], (server_name or host) if scheme == "https" else ""


class ConnectionPool:
    """The connections to all origins. Only the operating system limits their number."""

    def __init__(self) -> None:
        self.is_closed = False
        self._open: set[PooledConnection] = set()
        self._idle: defaultdict[Origin, dict[PooledConnection, None]] = defaultdict(dict)  # the most recently used is last
        self._retirements = 0

    async def acquire(
        self, origin: Origin, context: ssl.SSLContext | None, connect_timeout: float | None, *, reuse: bool = True
    ) -> PooledConnection:
        """Return an open connection to `origin`, with TLS if `context` is not None.

        With `reuse`, prefer an idle one. Raises httpx's `ConnectError`, or `ConnectTimeout` after `connect_timeout` seconds.
        """
        idle = self._idle.get(origin) if reuse else None
        while idle:
            connection, _ = idle.popitem()
            if not connection.transport.is_closing():
                connection.take()
                return connection
        before = self._retirements
        connection = await _connect(self, origin, context, connect_timeout)
        connection.is_retired = before != self._retirements  # perhaps of another origin, which does no harm
        self._open.add(connection)
        return connection

    def release(self, connection: PooledConnection) -> None:
        """Add a connection to the idle connections."""
        self._idle[connection.origin][connection] = None

    def retire(self, origin: Origin) -> None:
        """Close the idle connections to `origin`, and the others once they would be idle. Later requests get new ones."""
        self._retirements += 1
        _abort(self._idle.pop(origin, ()))
        for connection in self._open:
            connection.is_retired |= connection.origin == origin

    def forget(self, connection: PooledConnection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        if (idle := self._idle.get(connection.origin)) is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.origin]

    async def aclose(self) -> None:
        """Abort all connections and wait until they are closed. Pending and later calls of `acquire` raise `ConnectError`."""
        self.is_closed = True
        _abort(self._open)
        if self._open:
            await asyncio.wait([connection.closed for connection in self._open])


class PooledConnection(asyncio.Protocol):
    """A connection in the pool. While it is idle, it is the protocol of its transport, and closes if any data arrives."""

    transport: asyncio.Transport

    def __init__(self, pool: ConnectionPool, origin: Origin) -> None:
        self.origin = origin
        self.loop = asyncio.get_running_loop()
        self.was_used = False
        self.is_retired = False
        """Whether the connection is not used for another request."""
        self.failure: Exception | None = None
        """The error that has closed the connection, such as an alert of TLS."""
        self._pool = pool
        self.closed = self.loop.create_future()
        self._expiry: asyncio.TimerHandle | None = None

    def take(self) -> None:
        """Prepare an idle connection for another request."""
        self.was_used = True
        if self._expiry is not None:
            self._expiry.cancel()

    def release(self) -> None:
        """Return the connection to the pool. It is closed if it stays unused for `_KEEPALIVE_EXPIRY` seconds."""
        if self.is_retired:
            self.transport.abort()
            return
        self.transport.set_protocol(self)
        self._expiry = self.loop.call_later(_KEEPALIVE_EXPIRY, self.transport.abort)
        self._pool.release(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        keep_alive(transport)
        if self._pool.is_closed:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self.transport.abort()

    def eof_received(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self.failure = exc
        self.closed.set_result(None)
        self._pool.forget(self)


async def _connect(
    pool: ConnectionPool, origin: Origin, context: ssl.SSLContext | None, connect_timeout: float | None
) -> PooledConnection:
    _, host, port, _ = origin
    try:
        async with asyncio.timeout(connect_timeout):
            connection = await _first_connection(pool, origin, context)
    except TimeoutError as error:
        raise httpx.ConnectTimeout(f"Connecting to {host}:{port} timed out") from error
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        raise httpx.ConnectError(f"Could not connect to {host}:{port}: {error}") from error
    if connection.transport.is_closing():
        await asyncio.wait({connection.closed}, timeout=_ATTEMPT_DELAY)  # for the reason
        message = f"Could not connect to {host}:{port}: the connection was closed immediately"
        raise httpx.ConnectError(message) from connection.failure
    return connection


async def _first_connection(pool: ConnectionPool, origin: Origin, context: ssl.SSLContext | None) -> PooledConnection:
    """Connect to the first address that accepts ("happy eyeballs", which uvloop lacks). Raises `OSError` if none accepts."""
    loop = asyncio.get_running_loop()
    _, host, port, server_name = origin
    server_hostname = server_name if context else None
    made: list[PooledConnection] = []
    failures: list[OSError] = []

    async def attempt(address: Any, over: anyio.Event) -> None:
        connection = PooledConnection(pool, origin)
        try:
            await loop.create_connection(lambda: connection, address, port, ssl=context, server_hostname=server_hostname)
            made.append(connection)
            attempts.cancel_scope.cancel()
        except OSError as error:
            failures.append(error)
        finally:
            over.set()

    addresses = _own_address(host, port) or await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    try:
        async with anyio.create_task_group() as attempts:
            for *_, (address, *_) in addresses:
                over = anyio.Event()
                attempts.start_soon(attempt, address, over)
                with anyio.move_on_after(_ATTEMPT_DELAY):
                    await over.wait()
    except BaseException:
        _abort(made)
        raise
    if not made:
        try:
            raise failures[0]
        finally:
            failures.clear()  # the tracebacks of the errors refer to the list
    _abort(made[1:])
    return made[0]


def _own_address(host: str, port: int) -> list[Any]:
    """Return the address of a host that is an IP address. It must not wait for threads in which name servers are asked."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        return []


def _abort(connections: Iterable[PooledConnection]) -> None:
    for connection in connections:
        connection.transport.abort()
