"""The network transport for installations without httptools: httpx's own."""

from __future__ import annotations

import ssl

import httpx

from .base import UpstreamTransport


class HTTPXTransport(UpstreamTransport):
    """Sends requests with httpx's transport. Each `sni_hostname` has its own, because it shares connections between the names.

    `retire` does nothing, because httpx closes idle connections by itself: at the first request after they expired.
    """

    def __init__(self, ssl_context: ssl.SSLContext) -> None:
        self._ssl_context = ssl_context
        self._transports: dict[str, httpx.AsyncHTTPTransport] = {}  # by server name, of which the settings contain few

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name = request.extensions.get("sni_hostname") or ""
        transport = self._transports.get(name) or self._transports.setdefault(name, self._open())
        return await transport.handle_async_request(request)

    def _open(self) -> httpx.AsyncHTTPTransport:
        # no limit of connections, because the upstream limits its own concurrency
        return httpx.AsyncHTTPTransport(limits=httpx.Limits(), verify=self._ssl_context)

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()
