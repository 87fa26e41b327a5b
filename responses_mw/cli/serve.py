"""The command `responses-mw serve`, in one or several processes, and the start message."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ..auth import APIKeys
from ..errors import StartupError
from ..network import is_dual_stack, listening_socket
from ..redaction import Redactor
from ..server.processes import Supervisor, bind, leave_group, stop_with_parent
from ..settings import Settings
from ..settings.upstreams import DEFAULT
from ..state import without_credentials
from ..state.embedded.binary import find_valkey
from ..tasks import GARBAGE
from ..telemetry.context import log_facts
from ..telemetry.instruments import METRICS_DIRECTORY
from ..telemetry.setup import set_up_logs, set_up_sdk
from ..version import VERSION

if TYPE_CHECKING:
    from ..server.draining import DrainingServer
    from ..upstream import Upstream

logger = logging.getLogger(__name__)

STARTUP_FAILURE = 3
"""Exit status of a server that could not start, as in uvicorn."""

_FEW_FILES = 4096
"""Number of open files below which a warning is logged."""


class ServeSettings(Settings):
    """The settings of `responses-mw serve`."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on")
    processes: int = Field(1, ge=1, le=64, description="number of processes that listen on the port; each uses up to one core")


def serve(settings: ServeSettings) -> None:
    """Serve until a signal stops the server. If it cannot start, exit with an error status."""
    allow_open_files()
    if settings.processes > 1:
        sys.exit(_supervise(settings))
    _run_server(settings, lambda server, facts: _announce_server(settings, server.address, facts))


def _run_server(
    settings: ServeSettings, started: Callable[[DrainingServer, dict[str, str]], None], listener: socket.socket | None = None
) -> None:
    """Serve in this process until a signal stops the process. If the server cannot start, exit with an error status.

    `started` is called in the event loop when the server is listening. Its arguments are the server and the facts for the start
    message. If `listener` is None, the server opens its own socket.
    """
    from ..app import create_app
    from ..server.config import uvicorn_config
    from ..server.draining import DrainingServer

    try:
        set_up_sdk()
        app = create_app(settings, settings.host)
    except StartupError as error:
        sys.exit(f"responses-mw: {error}")
    # The collector need not traverse modules, which are never unloaded. High thresholds make collections rare while streaming.
    # With 1,000 streams, the token lag (99th percentile) is 3 to 7 ms, instead of 120 to 310 ms with the default thresholds.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    GARBAGE.maximum = 4 * settings.limits.memory_bytes  # a request is processed about five times; a collection may take 0.2 s

    def announce_start() -> None:
        application = app.application
        assert application is not None
        started(server, summary(settings, application.upstreams.all, has_state=application.jobs is not None))

    config = uvicorn_config(settings, app, settings.host, settings.port)
    server = DrainingServer(config, app, settings.server.drain_timeout, announce_start)
    if listener is None and is_dual_stack(settings.host):  # uvicorn's socket would accept only IPv6
        try:
            listener = bind(settings.host, settings.port, is_shared=False)
        except OSError as error:
            print(f"responses-mw: {settings.host}:{settings.port} cannot be opened: {error.strerror}", file=sys.stderr)
            sys.exit(STARTUP_FAILURE)
    server.run([listener] if listener is not None else None)
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def allow_open_files() -> None:
    """Raise the soft limit of open files, which is often 1,024, to the hard limit. Each stream needs two connections.

    Log a warning if the limit is lower than `_FEW_FILES`.
    """
    with suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if hard != resource.RLIM_INFINITY and hard < _FEW_FILES:
            advice = "raise the limit (ulimit -n, LimitNOFILE)"
            logger.warning("this process may open only %d files, enough for about %d streams: %s", hard, hard // 2, advice)


def check_ports(settings: ServeSettings) -> None:
    """Check that the server's port and the admin port can be opened together. Raises `OSError`, which names the port."""
    addresses = (settings.host, settings.port), (settings.server.admin_host, settings.server.admin_port)
    with ExitStack() as opened:
        for host, port in (address for address in addresses if address[1]):
            try:
                opened.enter_context(listening_socket(host, port))
            except OSError as error:
                reason = str(error.strerror).partition(" (while")[0]  # create_server adds the address
                raise OSError(error.errno, f"{host}:{port} cannot be opened: {reason}") from None


# -- the start message ---------------------------------------------------------------------------------------------------


def announce(settings: Settings, started: str, facts: dict[str, str]) -> None:
    """Print the start message: the version, `started` (such as `runs background responses`), and a line for each fact.

    If the log format is JSON, log the message and the facts as one record instead.
    """
    headline = f"responses-mw {VERSION} {started}"
    if settings.server.log_format == "json":
        log_facts(logging.getLogger("responses_mw"), headline, {"version": VERSION, **facts})
        return
    width = max(map(len, facts))
    lines = [f"  {name.replace('_', ' '):{width}}  {value}" for name, value in facts.items()]
    print("\n".join([headline, *lines]), flush=True)


def _announce_server(settings: ServeSettings, address: Any, facts: dict[str, str]) -> None:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    processes = {"processes": str(settings.processes)} if settings.processes > 1 else {}
    announce(settings, f"listens on http://{host}:{address[1]}{settings.server.base_path}/v1", processes | facts)


def summary(settings: Settings, upstreams: Sequence[Upstream], *, has_state: bool) -> dict[str, str]:
    """Return the facts for the start message."""
    server, concurrency = settings.server, settings.jobs.concurrency
    return {
        "upstream": _upstreams(upstreams),
        "store": _store(settings, has_state=has_state),
        **_files(settings, has_state=has_state),
        "tools": _tools(settings),
        "cache": settings.cache.mode,
        "keys": _keys(settings),
        "limits": _limits(settings),
        "background": f"up to {concurrency} responses at a time" if concurrency else "run by workers",
        "admin_port": f"http://{server.admin_host}:{server.admin_port}" if server.admin_port else "off",
        **_inspector(settings, has_state=has_state),
    }


def _inspector(settings: Settings, *, has_state: bool) -> dict[str, str]:
    server, ui = settings.server, settings.ui
    if ui.mode == "off" or not server.admin_port or not has_state:
        return {}
    is_open = ui.token is not None or server.admin_is_local
    return {"inspector": f"http://{server.admin_host}:{server.admin_port}/ui" if is_open else "closed: set ui.token"}


def _upstreams(upstreams: Sequence[Upstream]) -> str:
    is_named = len(upstreams) > 1 or upstreams[0].name != DEFAULT
    return "; ".join(f"{one.name}: {_described(one)}" if is_named else _described(one) for one in upstreams)


def _described(upstream: Upstream) -> str:
    """Describe an upstream by its URLs, its dialect and, if it has several endpoints, how many are available."""
    urls, endpoints = ", ".join(upstream.settings.url), upstream.pool.endpoints
    live = sum(not one.is_ejected for one in endpoints)
    number = f", {live} of {_count(len(endpoints), 'endpoint')} available" if len(endpoints) != 1 else ""
    return f"{urls} ({upstream.known_dialect or 'dialect not detected yet'}{number})"


def _files(settings: Settings, *, has_state: bool) -> dict[str, str]:
    if not settings.serves_files or not has_state:
        return {}
    place = settings.files.url or "in the store, up to 1 MiB each"
    return {"files": f"{place} (vector stores use the embedding model {settings.files.embedding_model})"}


def _store(settings: Settings, *, has_state: bool) -> str:
    if settings.redis.url is not None:
        return without_credentials(settings.redis.url.get_secret_value())
    if not has_state:
        return "none: responses are not stored"
    if find_valkey() is None:
        return "embedded fakeredis in memory, only for trials: its data is lost when the server stops"
    if settings.redis.data_dir is not None:
        return f"embedded Valkey in {settings.redis.data_dir}"
    return "embedded Valkey in memory: its data is lost when the server stops"


def _tools(settings: Settings) -> str:
    search = settings.search.provider
    tools = {
        f"MCP {', '.join(settings.tools.mcp_servers)}": settings.tools.mcp_servers,
        f"web search ({search})": search != "none",
        "code interpreter": settings.tools.sandbox_url,
    }
    return "; ".join(name for name, is_set in tools.items() if is_set) or "none"


def _keys(settings: Settings) -> str:
    keys, secrets = APIKeys.of(settings.auth), settings.auth.secret_keys
    callers = f"API keys of {_count(len(keys.names), 'owner')}" if keys is not None else "none: the upstream checks credentials"
    return f"{callers}; {_count(len(secrets), 'secret key')}" if secrets else callers


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _limits(settings: Settings) -> str:
    limits = settings.limits
    units = {
        "requests a minute": limits.requests_per_minute,
        "streams": limits.streams,
        "background responses": limits.background,
        "stored bytes": limits.stored_bytes,
    }
    found = ", ".join(f"{maximum} {unit}" for unit, maximum in units.items() if maximum)
    return f"{found or 'none'} per owner"


# -- several processes ---------------------------------------------------------------------------------------------------


def _supervise(settings: ServeSettings) -> int:
    if not hasattr(socket, "SO_REUSEPORT"):
        sys.exit("responses-mw: --processes needs SO_REUSEPORT, which this system does not have.")
    try:
        temporary = tempfile.TemporaryDirectory(prefix="rmw-metrics-")
    except OSError as error:
        print(f"responses-mw: --processes needs a temporary directory (see TMPDIR): {error.strerror}", file=sys.stderr)
        return STARTUP_FAILURE
    with temporary as directory:
        os.environ[METRICS_DIRECTORY] = directory  # the processes inherit it
        try:
            check_ports(settings)  # SO_REUSEPORT would silently share a port
            with bind(settings.host, settings.port) as reserved:
                address = reserved.getsockname()
                run = partial(_run_child, settings.model_copy(update={"port": address[1]}))
                announce_all = partial(_announce_server, settings, address)
                return asyncio.run(Supervisor(run, settings.processes, announce_all, directory).run())
        except OSError as error:
            print(f"responses-mw: {error.strerror}", file=sys.stderr)
            return STARTUP_FAILURE


def _run_child(settings: ServeSettings, started: Connection) -> None:
    """Run the server of a child process until it gets a signal or the parent exits. Send the facts when it is listening."""
    leave_group()
    set_up_logs(settings.server.log_level, settings.server.log_format, Redactor.of(settings))

    def report(server: DrainingServer, facts: dict[str, str]) -> None:
        stop_with_parent(server.stop)
        started.send(facts)
        started.close()

    _run_server(settings, report, bind(settings.host, settings.port))


async def no_app(*_: object) -> None:
    """ASGI application for commands that wrap no application. Always raises `NotImplementedError`."""
    raise NotImplementedError("this command calls no application")
