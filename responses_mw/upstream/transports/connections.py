"""The pool of TCP and TLS connections that `http11` uses."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable
from typing import Any, TypeAlias

import anyio
import httpx

Origin: TypeAlias = tuple[str, str, int]
"""Scheme, host and port."""

_DEFAULT_PORTS = {"http": 80, "https": 443}
# Seconds after which an idle connection is closed. Common servers close it after 5 s, and a request sent then would fail.
_KEEPALIVE_EXPIRY = 4.0
# Seconds before the next address of a host is tried in parallel (RFC 8305).
_ATTEMPT_DELAY = 0.25


def origin_of(url: httpx.URL) -> Origin:
    """Return the origin of `url`. Raises `httpx.UnsupportedProtocol` if its scheme is neither http nor https."""
    if url.scheme not in _DEFAULT_PORTS:
        raise httpx.UnsupportedProtocol(f"The URL must begin with http:// or https://: {url}")
    return url.scheme, url.raw_host.decode(), url.port or _DEFAULT_PORTS[url.scheme]


class ConnectionPool:
    """The connections to all origins. Only the operating system limits their number."""

    def __init__(self) -> None:
        self.is_closed = False
        self._open: set[PooledConnection] = set()
        self._idle: dict[PooledConnection, None] = {}  # an ordered set: the most recently used is last

    async def acquire(
        self, origin: Origin, context: ssl.SSLContext | None, connect_timeout: float | None, *, reuse: bool = True
    ) -> PooledConnection:
        """Return an open connection to `origin`, with TLS if `context` is not None.

        With `reuse`, prefer an idle one. Raises httpx's `ConnectError`, or `ConnectTimeout` after `connect_timeout` seconds.
        """
        for connection in reversed(self._idle):
            if reuse and connection.origin == origin and not connection.transport.is_closing():
                del self._idle[connection]
                connection.take()
                return connection
        connection = await _connect(self, origin, context, connect_timeout)
        self._open.add(connection)
        return connection

    def release(self, connection: PooledConnection) -> None:
        """Add a connection to the idle connections."""
        self._idle[connection] = None

    def forget(self, connection: PooledConnection) -> None:
        """Remove a closed connection."""
        self._idle.pop(connection, None)
        self._open.discard(connection)

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
        self.transport.set_protocol(self)
        self._expiry = self.loop.call_later(_KEEPALIVE_EXPIRY, self.transport.abort)
        self._pool.release(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        if self._pool.is_closed:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self.transport.abort()

    def eof_received(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self.closed.set_result(None)
        self._pool.forget(self)


async def _connect(
    pool: ConnectionPool, origin: Origin, context: ssl.SSLContext | None, connect_timeout: float | None
) -> PooledConnection:
    _, host, port = origin
    try:
        async with asyncio.timeout(connect_timeout):
            connection = await _first_connection(pool, origin, context)
    except TimeoutError as error:
        raise httpx.ConnectTimeout(f"Connecting to {host}:{port} timed out") from error
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        raise httpx.ConnectError(f"Could not connect to {host}:{port}: {error}") from error
    if connection.transport.is_closing():
        raise httpx.ConnectError(f"Could not connect to {host}:{port}: the connection was closed immediately")
    return connection


async def _first_connection(pool: ConnectionPool, origin: Origin, context: ssl.SSLContext | None) -> PooledConnection:
    """Connect to the first address that accepts ("happy eyeballs", which uvloop lacks). Raises `OSError` if none accepts."""
    loop = asyncio.get_running_loop()
    _, host, port = origin
    server_hostname = host if context else None
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

    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
        raise failures[0]
    _abort(made[1:])
    return made[0]


def _abort(connections: Iterable[PooledConnection]) -> None:
    for connection in connections:
        connection.transport.abort()
