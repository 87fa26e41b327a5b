"""The admin port, which a uvicorn server of its own serves in the same event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

from ..asgi.admin import Admin, Check, Inspector, monitoring
from ..asgi.web_pages import Hosts
from ..errors import StartupError
from ..network import listening_socket
from ..settings.groups import ServerSettings
from ..state import State, server_group
from ..telemetry.instruments import is_shared
from ..telemetry.tracing import is_measuring
from .client_connections import Connections

logger = logging.getLogger(__name__)

_MAX_WAITING = 100
"""Maximum number of connections of the admin port that have no request in progress."""


@asynccontextmanager
async def open_admin(
    settings: ServerSettings,
    checks: Mapping[str, Check],
    state: State | None,
    keys: Mapping[str, str] = {},
    inspector: Inspector | None = None,
    upstreams: Mapping[str, Check] = {},
) -> AsyncIterator[None]:
    """Serve the admin port and record periodic metrics until the context exits. `upstreams` are measured, each by its check.

    If `settings.admin_port` is 0, no port is opened, and these metrics are recorded only if OpenTelemetry exports them. Raises
    `StartupError` if the port cannot be opened. Processes of one server that share their metrics share the port. Otherwise, the
    first process opens the port, and the others log a warning.
    """
    async with AsyncExitStack() as stack:
        if settings.admin_port or is_measuring():
            await stack.enter_async_context(monitoring(state, upstreams))
        listener = _listener(settings.admin_host, settings.admin_port) if settings.admin_port else None
        if listener is not None:
            if inspector is not None:
                await stack.enter_async_context(inspector.watching())
            hosts = Hosts(settings.allowed_hosts, settings.admin_host)
            await stack.enter_async_context(_serving(Admin(checks, state, keys, hosts, inspector), listener))
        yield


def _listener(host: str, port: int) -> socket.socket | None:
    """Open the port. Return None if another process of this server has opened it. Other failures raise `StartupError`."""
    # Each process that shares its metrics can serve the metrics of all processes, so these processes also share the port.
    shares = server_group() is not None and is_shared()
    try:
        return listening_socket(host, port, reuse_port=shares)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and server_group() is not None:
            advice = "set PROMETHEUS_MULTIPROC_DIR to combine the metrics of all processes"
            logger.warning("the admin port %s:%s shows only the metrics of another process: %s", host, port, advice)
            return None
        raise StartupError(f"the admin port {host}:{port} cannot be opened: {error.strerror}") from None


@asynccontextmanager
async def _serving(admin: Admin, listener: socket.socket) -> AsyncIterator[None]:
    import uvicorn

    class AdminServer(uvicorn.Server):
        # https://github.com/Kludex/uvicorn/blob/0.54.0/uvicorn/server.py#L340
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # uvicorn would replace the signal handlers, which are those of the server of the public port

    options: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_config": None, "access_log": False, "server_header": False}
    with suppress(ModuleNotFoundError):  # a host may lack httptools
        from .protocols import http_protocol

        options["http"] = http_protocol(connections=Connections(_MAX_WAITING, reserve=0))
    server = AdminServer(uvicorn.Config(admin, timeout_graceful_shutdown=1, **options))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
