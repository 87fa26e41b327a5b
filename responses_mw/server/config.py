"""The configuration of uvicorn."""

from __future__ import annotations

import math

import uvicorn

from ..asgi.middleware import Dispatcher
from ..asgi.requests import Inbound
from ..settings import Settings
from .client_connections import Connections, Unread, max_waiting
from .draining import END_TIMEOUT
from .protocols import http_protocol, websocket_protocol


def uvicorn_config(settings: Settings, app: Dispatcher, host: str, port: int) -> uvicorn.Config:
    """Return the configuration of the server that serves `app` at `host` and `port`. Logging must be set up already."""
    limits = settings.limits
    inbound, unread = Inbound(max(limits.memory_bytes, limits.max_request_bytes)), Unread(limits.memory_bytes)
    connections = Connections(max_waiting(), per_address=limits.connections_per_address)
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=http_protocol(unread, connections),
        log_config=None,
        access_log=False,
        forwarded_allow_ips=settings.server.trusted_proxies or None,
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(settings.server.drain_timeout + END_TIMEOUT),
        timeout_keep_alive=settings.server.idle_timeout,
        ws=websocket_protocol(inbound, unread, connections),
        ws_max_size=limits.max_request_bytes,
        ws_ping_timeout=60.0,  # a client that reads slowly also answers pings slowly
        ws_per_message_deflate=False,  # compression would be the most expensive work per token
        server_header=False,
        date_header=False,
    )
