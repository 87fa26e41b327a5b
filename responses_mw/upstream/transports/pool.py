"""Connections: how they are made, shared and closed."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import nullcontext
from typing import Any, TypeAlias

import anyio
import httpx

Origin: TypeAlias = tuple[str, str, int]
"""Scheme, host and port."""

# Idle connections go before common servers close them (5 s), so that no request is sent into a closing one.
_KEPT_IDLE = 4.0
# Seconds that one address of a host is tried alone, before the next one is tried as well (RFC 8305).
_HEAD_START = 0.25
_AT_ONCE = nullcontext()


class ConnectionPool:
    """The connections, of all origins. Whoever has to wait for one is served in turn.

    A *place* is held by each connection that is being made, is in use, or is being closed; not by idle ones, which give way
    to others.
    """

    def __init__(self, places: int) -> None:
        self.is_closed = False
        self._most = places
        self._places = asyncio.Semaphore(places)
        self._being_made = 0
        self._open: set[PooledConnection] = set()
        self._idle: dict[PooledConnection, None] = {}  # a set in order: the one used last comes last

    async def acquire(
        self, origin: Origin, context: ssl.SSLContext | None, *, pool_timeout: float | None, connect_timeout: float | None
    ) -> PooledConnection:
        """An open connection; over TLS where there is a ``context``. Times are in seconds.

        Raises ``httpx.PoolTimeout``, ``httpx.ConnectTimeout``, ``httpx.ConnectError``.
        """
        try:
            async with asyncio.timeout(pool_timeout) if self._places.locked() else _AT_ONCE:
                await self._places.acquire()
        except TimeoutError as error:
            raise httpx.PoolTimeout("No connection was free in time") from error
        for connection in reversed(self._idle):
            if connection.origin == origin and not connection.transport.is_closing():
                del self._idle[connection]
                connection.take()
                return connection
        return await self._make(origin, context, connect_timeout)

    async def _make(self, origin: Origin, context: ssl.SSLContext | None, patience: float | None) -> PooledConnection:
        self._being_made += 1
        try:
            while len(self._open) + self._being_made > self._most:  # then there are idle ones, of other origins
                await next(iter(self._idle)).aclose()
            connection = await _connect(self, origin, context, patience)
        except BaseException:
            self._places.release()
            raise
        finally:
            self._being_made -= 1
        self._open.add(connection)
        return connection

    def release(self, connection: PooledConnection) -> None:
        """The connection is idle now."""
        self._idle[connection] = None
        self._places.release()

    def forget(self, connection: PooledConnection) -> None:
        """The connection is closed."""
        if connection in self._idle:
            del self._idle[connection]
        elif connection in self._open:
            self._places.release()
        self._open.discard(connection)

    async def aclose(self) -> None:
        """Closes all connections; who waits for one, or makes one, gets a ``httpx.ConnectError``."""
        self.is_closed = True
        open_ones = list(self._open)
        _abort(open_ones)
        for connection in open_ones:
            await connection.aclose()


class PooledConnection(asyncio.Protocol):
    """A connection of the pool. It is its own protocol while no exchange is: what arrives then was not asked for."""

    transport: asyncio.Transport

    def __init__(self, pool: ConnectionPool, origin: Origin) -> None:
        self.origin = origin
        self.was_used = False
        self._pool = pool
        self._closed = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None

    def take(self) -> None:
        """Out of the pool, for another exchange."""
        self.was_used = True
        if self._expiry is not None:
            self._expiry.cancel()

    def release(self) -> None:
        """Back into the pool."""
        self.transport.set_protocol(self)
        self._expiry = asyncio.get_running_loop().call_later(_KEPT_IDLE, self.transport.abort)
        self._pool.release(self)

    async def aclose(self) -> None:
        self.transport.abort()
        await self._closed.wait()

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
        self._closed.set()
        self._pool.forget(self)


async def _connect(
    pool: ConnectionPool, origin: Origin, context: ssl.SSLContext | None, patience: float | None
) -> PooledConnection:
    """A new connection, within ``patience`` seconds. Raises ``httpx.ConnectError``, ``httpx.ConnectTimeout``."""
    _, host, port = origin
    try:
        async with asyncio.timeout(patience):
            connection = await _first_connection(pool, origin, context)
    except TimeoutError as error:
        raise httpx.ConnectTimeout(f"No connection to {host}:{port} in time") from error
    except (OSError, UnicodeError) as error:  # a name that cannot be one is a UnicodeError
        raise httpx.ConnectError(f"No connection to {host}:{port}: {error}") from error
    if connection.transport.is_closing():
        raise httpx.ConnectError(f"No connection to {host}:{port}: closed at once")
    return connection


async def _first_connection(pool: ConnectionPool, origin: Origin, context: ssl.SSLContext | None) -> PooledConnection:
    """To the address of the host that takes one first: "happy eyeballs", which uvloop does not have."""
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
                with anyio.move_on_after(_HEAD_START):
                    await over.wait()
    except BaseException:
        _abort(made)
        raise
    if not made:
        raise failures[0]
    _abort(made[1:])
    return made[0]


def _abort(connections: list[PooledConnection]) -> None:
    for connection in connections:
        connection.transport.abort()
