"""The standalone server's application: the middleware round a reverse proxy, so that one address serves every path."""

from __future__ import annotations

from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx
from starlette.types import ASGIApp

from .apikeys import APIKeys, Guarded
from .assembly import network_transport
from .config import Settings
from .middleware import ResponsesMiddleware
from .passable import PassablePaths
from .proxy import ReverseProxy
from .telemetry import TelemetryMiddleware


def create_app(settings: Settings | None = None) -> ResponsesMiddleware:
    """The application for ``settings`` (default: the environment). Raises ``ValueError`` where no upstream is set,
    ``InvalidKeys`` for API keys that are none."""
    settings = settings or Settings()
    if settings.upstream is None:
        raise ValueError("no upstream is set: use --upstream or RESPONSES_MW_UPSTREAM")
    client = httpx.AsyncClient(
        transport=network_transport(settings),  # not that of our own calls: no request that passes comes near their connections
        timeout=httpx.Timeout(None, connect=settings.connect_timeout),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # one caller's are not another's
        trust_env=False,
    )
    keys = APIKeys.of(settings)
    passable = PassablePaths(settings.proxy_paths) if keys is not None else None
    proxy: ASGIApp = ReverseProxy(
        client, settings.upstream, settings.base_path, passable=passable, body_timeout=settings.body_timeout
    )
    if keys is not None:
        key = settings.upstream_api_key
        proxy = Guarded(proxy, keys, upstream_key=key.get_secret_value() if key else None)
    return ResponsesMiddleware(TelemetryMiddleware(proxy, "*", traced=False), settings)
