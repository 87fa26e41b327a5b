"""The network as httpx sees it."""

from __future__ import annotations

import ssl

import httpx

from .exchange import Exchange, OutgoingRequest
from .pool import ConnectionPool, Origin

_PORTS = {"http": 80, "https": 443}


class NetworkTransport(httpx.AsyncBaseTransport):
    """Sends requests over pooled connections. Bodies are streamed both ways, answers stay compressed as they came.

    Request extensions: ``timeout`` as httpx's (``connect``, ``pool``, ``read``; in seconds), ``target`` the bytes to send as
    the request's target.

    Raises ``httpx.ConnectError`` (nothing was sent, or a connection in use before was closed without an answer: to be tried
    again), ``ConnectTimeout``, ``PoolTimeout``, ``ReadError``, ``ReadTimeout``, ``RemoteProtocolError``, ``WriteError``; and
    ``LocalProtocolError`` for a request that cannot be sent. What a request's body raises comes through as it is.
    """

    def __init__(self, connections: int, ssl_context: ssl.SSLContext | None = None) -> None:
        """``connections``: how many are open at once, at the most. ``ssl_context``: if not the system's default."""
        self._pool = ConnectionPool(connections)
        self._ssl_context = ssl_context

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeout = request.extensions.get("timeout", {})
        outgoing = OutgoingRequest.of(request)
        context = self._tls() if request.url.scheme == "https" else None
        connection = await self._pool.acquire(
            _origin(request.url), context, pool_timeout=timeout.get("pool"), connect_timeout=timeout.get("connect")
        )
        return await Exchange(connection, outgoing, timeout.get("read")).answer()

    async def aclose(self) -> None:
        """Breaks off what is under way, and returns when every connection is closed."""
        await self._pool.aclose()

    def _tls(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()  # takes milliseconds: it reads all the authorities
        return self._ssl_context


def _origin(url: httpx.URL) -> Origin:
    if url.scheme not in _PORTS:
        raise httpx.UnsupportedProtocol(f"The URL must begin with http:// or https://: {url}")
    return url.scheme, url.raw_host.decode(), url.port or _PORTS[url.scheme]
