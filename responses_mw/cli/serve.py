"""``responses-mw serve`` in one process."""

from __future__ import annotations

import gc
import logging
import math
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..auth import InvalidKeys
from ..network import address_family
from ..telemetry.setup import set_up_sdk
from .summary import announce, summary

if TYPE_CHECKING:
    from ..app import ResponsesMiddleware
    from ..asgi.listener import DrainingServer
    from .commands import ServeCommand

__all__ = ["STARTUP_FAILURE", "announce_server", "check_ports", "run_server", "serve"]

logger = logging.getLogger(__name__)

STARTUP_FAILURE = 3
"""The exit status of a server that could not start, the same as uvicorn's."""


def serve(settings: ServeCommand) -> None:
    """Serve until a signal stops the process."""
    if settings.processes > 1:
        from .processes import supervise

        sys.exit(supervise(settings))

    def started(server: DrainingServer, facts: dict[str, str]) -> None:
        announce_server(settings, server.address, facts)

    run_server(settings, started)


def run_server(
    settings: ServeCommand, started: Callable[[DrainingServer, dict[str, str]], None], listener: socket.socket | None = None
) -> None:
    """Serve until a signal stops the process.

    ``started`` is called in the event loop once the server is listening. If ``listener`` is given, the server listens on it.
    """
    import uvicorn

    from ..app import create_app
    from ..asgi.listener import END_TIMEOUT, DrainingServer, HTTPProtocol, websocket_protocol
    from ..asgi.requests import Inbound

    set_up_sdk()
    # The collector need not traverse modules, which stay loaded. A high threshold makes collections rare while tokens stream.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        app = create_app(settings)
    except InvalidKeys as error:
        sys.exit(f"responses-mw: {error}")
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=HTTPProtocol,
        log_config=None,  # set_up_logs has configured logging
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(settings.server.drain_timeout + END_TIMEOUT),
        ws=websocket_protocol(Inbound(max(settings.limits.memory_bytes, settings.limits.max_request_bytes))),
        ws_max_size=settings.limits.max_request_bytes,
        ws_ping_timeout=60.0,  # a client that reads slowly answers pings slowly, too
        ws_per_message_deflate=False,  # compression would cost more per token than everything else
        server_header=False,
        date_header=False,
    )
    server = DrainingServer(config, app, settings.server.drain_timeout, lambda: started(server, _facts(settings, app)))
    server.run([listener] if listener is not None else None)
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def check_ports(settings: ServeCommand) -> None:
    """Raise ``OSError`` if the server's port or the admin port cannot be opened."""
    for host, port in ((settings.host, settings.port), (settings.server.admin_host, settings.server.admin_port)):
        if port:
            try:
                socket.create_server((host, port), family=address_family(host)).close()
            except OSError as error:
                raise OSError(error.errno, f"{host}:{port} cannot be opened: {os.strerror(error.errno or 0)}") from None


def _facts(settings: ServeCommand, app: ResponsesMiddleware) -> dict[str, str]:
    application = app.application
    assert application is not None
    dialect = application.upstream.known_dialect
    return summary(settings, dialect, has_state=application.jobs is not None, processes=settings.processes)


def announce_server(settings: ServeCommand, address: Any, facts: dict[str, str]) -> None:
    """Print the start message. ``address`` is the socket's address."""
    host, port = address[:2]
    host = f"[{host}]" if ":" in host else host
    announce(settings, f"listens on http://{host}:{port}{settings.server.base_path}/v1", facts)
