"""From settings to objects that work together: the only place that names concrete classes; it opens them and closes them."""

from __future__ import annotations

import asyncio
import logging

import httpx
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from .config import Settings
from .errors import APIError
from .routes import Routes
from .runner import Runner
from .transport import ASGITransport
from .upstream import Caller, Upstream

logger = logging.getLogger(__name__)

_GETTING_TO_KNOW = 2.0
IN_PROCESS = "http://in-process"


def network_client(settings: Settings) -> httpx.AsyncClient:
    """A client for the upstream over the network; over aiohttp's transport where that is installed, at half the cost."""
    limits = httpx.Limits(
        max_connections=settings.upstream_connections, max_keepalive_connections=settings.upstream_connections
    )
    timeout = httpx.Timeout(None, connect=settings.connect_timeout)
    try:
        import httpx_aiohttp
    except ImportError:
        transport: httpx.AsyncBaseTransport = httpx.AsyncHTTPTransport(limits=limits)
    else:
        transport = httpx_aiohttp.AiohttpTransport(limits=limits)
    return httpx.AsyncClient(transport=transport, timeout=timeout, follow_redirects=False, trust_env=False)


class Assembly:
    """Everything that one middleware needs, around the application ``app`` that it wraps. It owns ``client``."""

    def __init__(self, app: ASGIApp, settings: Settings, client: httpx.AsyncClient | None = None) -> None:
        self._settings = settings
        if settings.upstream is None:
            base = IN_PROCESS + settings.base_path
            self._client = client or httpx.AsyncClient(transport=ASGITransport(app), timeout=httpx.Timeout(None))
        else:
            base = settings.upstream
            self._client = client or network_client(settings)
        self.upstream = Upstream(self._client, base, settings)
        self.runner = Runner(self.upstream, settings)
        self.routes: ASGIApp = Routes(self.runner, settings)
        if settings.cors_origins:
            self.routes = CORSMiddleware(
                self.routes, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
            )

    async def open(self) -> None:
        """Gets to know the upstream, so that no request need wait for that. It may be away: then the first one will."""
        if self._settings.upstream is None:
            return  # the application that we are mounted in has not started yet
        try:
            async with asyncio.timeout(_GETTING_TO_KNOW):
                await self.upstream.dialect(Caller())
        except (APIError, TimeoutError):
            logger.warning("the upstream %s does not answer yet", self._settings.upstream)

    async def close(self) -> None:
        await self._client.aclose()
