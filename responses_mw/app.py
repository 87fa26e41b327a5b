"""The standalone server's application: the middleware round a reverse proxy, so that one address serves every path."""

from __future__ import annotations

from starlette.types import ASGIApp

from .assembly import network_client
from .config import Settings
from .middleware import ResponsesMiddleware
from .proxy import ReverseProxy


def create_app(settings: Settings | None = None) -> ASGIApp:
    """The application for ``settings`` (default: the environment). Raises ``ValueError`` where no upstream is set."""
    settings = settings or Settings()
    if settings.upstream is None:
        raise ValueError("no upstream is set: use --upstream or RESPONSES_MW_UPSTREAM")
    client = network_client(settings)
    return ResponsesMiddleware(ReverseProxy(client, settings.upstream), settings, client)
