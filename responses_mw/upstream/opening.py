"""Open a client of the upstream, as the settings describe it."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import Any

import httpx
from starlette.types import ASGIApp

from ..errors import APIError, StartupError
from ..network import system_tls, tls_context
from ..settings import Settings
from ..settings.upstreams import DEFAULT, UpstreamSettings, path_of
from ..tasks import in_background
from .caller import Caller
from .client import Upstream
from .discovery import Address, Discovery
from .pool import Pool
from .transports.asgi import ASGITransport
from .transports.base import UpstreamTransport
from .transports.fallback import HTTPXTransport

logger = logging.getLogger(__name__)

IN_PROCESS = "http://localhost"
"""Base URL for calls to the wrapped application in this process."""
_DETECTION_TIMEOUT = 2.0
"""Timeout in seconds for detecting the upstream's dialect at startup."""


def upstream_tls(chosen: UpstreamSettings, name: str = DEFAULT) -> ssl.SSLContext:
    """Return a context with the certificates in the settings. Raises `StartupError` if a file cannot be used."""
    try:
        return tls_context(chosen.ca_file, chosen.client_certificate, chosen.client_key)
    except ValueError as error:
        raise StartupError(f"{path_of(name)}.url: {error}") from None


def network_transport(tls: ssl.SSLContext | None = None) -> UpstreamTransport:
    """Return a `NetworkTransport` with the context `tls`, by default with the system's CA certificates.

    If httptools is missing, return httpx's transport, which takes three times the CPU time.
    """
    try:
        from .transports.http11 import NetworkTransport
    except ModuleNotFoundError:
        return HTTPXTransport(tls or system_tls())
    return NetworkTransport(tls)


@asynccontextmanager
async def open_upstreams(
    app: ASGIApp,
    settings: Settings,
    transport: httpx.AsyncBaseTransport | None = None,
    scope: MutableMapping[str, Any] | None = None,
) -> AsyncIterator[list[Upstream]]:
    """Open the clients of all upstreams: the servers at their URLs or, if no URL is set, `app`.

    If URLs are set and an upstream's `dialect` is `auto`, detect the dialect. Log a warning if the server is not available yet.
    `transport` replaces the default transports. It is closed on exit. Probes call `app` with the members of `scope`.
    """
    named = settings.named_upstreams
    async with AsyncExitStack() as stack:
        opened: dict[str, Upstream] = {}
        for name, chosen in named.items():
            if chosen.url:
                one = _open(name, chosen, transport, is_only=len(named) == 1)
            else:
                one = _open_in_process(name, chosen, transport or ASGITransport(app), settings.server.base_path, scope)
            opened[name] = await stack.enter_async_context(one)
        for upstream in opened.values():
            for fallback in upstream.settings.fallbacks:
                name, _, model = fallback.partition(":")
                upstream.fallbacks.append((opened[name], model or None))
        yield list(opened.values())


@asynccontextmanager
async def _open_in_process(
    name: str,
    chosen: UpstreamSettings,
    transport: httpx.AsyncBaseTransport,
    base_path: str,
    scope: MutableMapping[str, Any] | None,
) -> AsyncIterator[Upstream]:
    with closing(Pool.of(IN_PROCESS + base_path, chosen.dialect, name)) as pool:
        upstream = Upstream(transport, pool, chosen, name)
        probe = partial(upstream.answers, caller=Caller(scope=scope))
        async with transport, in_background(pool.watch(probe)):
            yield upstream  # the dialect is not detected yet, because `app` has not started


@asynccontextmanager
async def _open(
    name: str, chosen: UpstreamSettings, transport: httpx.AsyncBaseTransport | None, *, is_only: bool
) -> AsyncIterator[Upstream]:
    tls = upstream_tls(chosen, name)
    # A connection that a client spoils, such as with a body that it does not complete, must not harm this server's own calls.
    async with transport or network_transport(tls) as calling, network_transport(tls) as passing:
        with closing(Pool(chosen.dialect, name)) as pool:
            discovery = Discovery(chosen.url, partial(_update, pool, [calling, passing]))
            await discovery.refresh()
            upstream = Upstream(calling, pool, chosen, name, passing)
            await _detect(upstream, ", ".join(chosen.url))
            watching = pool.watch(upstream.answers), upstream.watch_models(always=not is_only)
            async with in_background(discovery.run(), *watching):
                yield upstream


def _update(pool: Pool, transports: Sequence[httpx.AsyncBaseTransport], addresses: Sequence[Address]) -> None:
    """Replace the addresses of `pool`, and close the idle connections to those that were removed."""
    for endpoint in pool.update(addresses):
        logger.info("the endpoint %s was removed", endpoint.address.url)
        for transport in transports:
            if isinstance(transport, UpstreamTransport):
                transport.retire(endpoint.address.url, endpoint.address.server_name)


async def _detect(upstream: Upstream, url: str) -> None:
    try:
        async with asyncio.timeout(_DETECTION_TIMEOUT):
            await upstream.dialect(Caller())
            if upstream.has_key:
                await upstream.check_key(Caller())  # logs that the key is refused
    except (APIError, TimeoutError):  # the first request detects the dialect
        logger.warning("the upstream %s does not answer yet", url)


def first_of(settings: Settings) -> UpstreamSettings:
    """Return the settings of the first upstream."""
    return next(iter(settings.named_upstreams.values()))
