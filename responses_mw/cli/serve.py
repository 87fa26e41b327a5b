"""The command `responses-mw serve`, in one or several processes, and the start message.

With `--processes N`, each process has its own listening socket (SO_REUSEPORT), and the kernel distributes the connections. The
parent only reserves the port, starts and replaces processes, and forwards signals. If the parent exits, its processes stop
gracefully.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ..auth import APIKeys
from ..errors import StartupError
from ..network import address_family
from ..settings import Settings
from ..state import without_credentials
from ..telemetry.context import log_facts
from ..telemetry.instruments import METRICS_DIRECTORY, forget_process
from ..telemetry.setup import set_up_logs, set_up_sdk
from ..threads import GARBAGE
from ..version import VERSION

if TYPE_CHECKING:
    import uvicorn

    from ..app import ResponsesMiddleware
    from ..asgi.listener import DrainingServer

logger = logging.getLogger(__name__)

STARTUP_FAILURE = 3
"""Exit status of a server that could not start, as in uvicorn."""

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Initial and maximum number of seconds before an exited process is replaced. Each failed start doubles the pause."""


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
    from ..asgi.listener import DrainingServer

    try:
        set_up_sdk()
        app = create_app(settings)
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
        started(server, summary(settings, application.upstream.known_dialect, has_state=application.jobs is not None))

    server = DrainingServer(_uvicorn_config(settings, app), app, settings.server.drain_timeout, announce_start)
    server.run([listener] if listener is not None else None)
    if not server.started:
        sys.exit(STARTUP_FAILURE)


def _uvicorn_config(settings: ServeSettings, app: ResponsesMiddleware) -> uvicorn.Config:
    import uvicorn

    from ..asgi.listener import END_TIMEOUT, Unread, http_protocol, websocket_protocol
    from ..asgi.requests import Inbound

    limits = settings.limits
    inbound, unread = Inbound(max(limits.memory_bytes, limits.max_request_bytes)), Unread(limits.memory_bytes)
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=http_protocol(unread),
        log_config=None,  # set_up_logs has configured logging
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(settings.server.drain_timeout + END_TIMEOUT),
        ws=websocket_protocol(inbound, unread),
        ws_max_size=limits.max_request_bytes,
        ws_ping_timeout=60.0,  # a client that reads slowly also answers pings slowly
        ws_per_message_deflate=False,  # compression would be the most expensive work per token
        server_header=False,
        date_header=False,
    )


def allow_open_files() -> None:
    """Raise the soft limit of open files, which is often 1,024, to the hard limit. Each stream needs two connections."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_ports(settings: ServeSettings) -> None:
    """Check that the server's port and the admin port can be opened together. Raises `OSError`, which names the port."""
    addresses = (settings.host, settings.port), (settings.server.admin_host, settings.server.admin_port)
    with ExitStack() as opened:
        for host, port in (address for address in addresses if address[1]):
            try:
                opened.enter_context(socket.create_server((host, port), family=address_family(host)))
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


def summary(settings: Settings, dialect: str | None, *, has_state: bool) -> dict[str, str]:
    """Return the facts for the start message. `dialect` is None if it has not been detected."""
    server, concurrency = settings.server, settings.jobs.concurrency
    return {
        "upstream": f"{settings.upstream.url} ({dialect or 'dialect not detected yet'})",
        "store": _store(settings, has_state=has_state),
        "tools": _tools(settings),
        "cache": settings.cache.mode,
        "keys": _keys(settings),
        "limits": _limits(settings),
        "background": f"up to {concurrency} responses at a time" if concurrency else "run by workers",
        "admin_port": f"http://{server.admin_host}:{server.admin_port}" if server.admin_port else "off",
    }


def _store(settings: Settings, *, has_state: bool) -> str:
    if settings.redis.url is not None:
        return without_credentials(settings.redis.url.get_secret_value())
    if not has_state:
        return "none: responses are not stored"
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
    with tempfile.TemporaryDirectory(prefix="rmw-metrics-") as directory:
        os.environ[METRICS_DIRECTORY] = directory  # the processes inherit it
        try:
            check_ports(settings)  # SO_REUSEPORT would silently share a port
            with _socket(settings.host, settings.port) as reserved:
                return asyncio.run(_Supervisor(settings, reserved.getsockname(), directory).run())
        except OSError as error:
            print(f"responses-mw: {error.strerror}", file=sys.stderr)
            return STARTUP_FAILURE


def _socket(host: str, port: int) -> socket.socket:
    """Bind a socket with SO_REUSEPORT, without listening."""
    bound = socket.socket(address_family(host))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((host, port))
    return bound


class _Child:
    def __init__(self, settings: ServeSettings) -> None:
        context = multiprocessing.get_context("spawn")  # asyncio and threads do not survive a fork
        self._reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_child, args=(settings, writer))
        self._process.start()
        writer.close()
        self.stop = self._process.terminate
        self.facts: dict[str, str] | None = None
        """The facts for the start message. None until the process's server is listening."""

        assert self._process.pid is not None
        self.pid: int = self._process.pid

    async def start(self) -> bool:
        """Wait until the process's server is listening or the process exits. Return whether the server is listening."""
        await _readable(self._reader.fileno())
        try:
            self.facts = self._reader.recv()
        except EOFError:  # the process has exited
            return False
        finally:
            self._reader.close()
        return True

    async def end(self) -> int:
        """Wait until the process exits. Return its exit status."""
        await _readable(self._process.sentinel)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


class _Supervisor:
    def __init__(self, settings: ServeSettings, address: Any, directory: str) -> None:
        self._settings = settings.model_copy(update={"port": address[1]})
        self._address = address
        self._directory = directory
        self._children: set[_Child] = set()
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            first = self._start_child()  # the first process starts alone, so that an error is printed only once
            if not await first.start():
                status = await first.end()
                return 0 if self._stopping.is_set() else status
            others = [self._start_child() for _ in range(self._settings.processes - 1) if not self._stopping.is_set()]
            await asyncio.gather(*(child.start() for child in others))
            if first.facts is not None and not self._stopping.is_set():
                _announce_server(self._settings, self._address, first.facts)
            async with asyncio.TaskGroup() as group:
                for child in (first, *others):
                    group.create_task(self._keep(child))
            return self._status
        finally:  # multiprocessing waits for the processes at exit
            self._stop()

    def _start_child(self) -> _Child:
        child = _Child(self._settings)
        self._children.add(child)
        return child

    def _stop(self) -> None:
        self._stopping.set()
        for child in self._children:  # Ctrl-C does not reach them, because each has its own process group
            child.stop()

    async def _keep(self, child: _Child) -> None:
        """Replace the process, and every replacement, when it exits. Return when the server stops."""
        pause = _FIRST_PAUSE
        while True:
            status = await child.end()
            self._children.discard(child)
            forget_process(child.pid, self._directory)
            if self._stopping.is_set():
                is_clean = status == 0 or (status == -signal.SIGTERM and child.facts is None)  # the server had not started
                self._status = self._status if is_clean else 1
                return
            cause = signal.Signals(-status).name if status < 0 else f"status {status}"
            logger.error("process %d exited (%s); restarting it in %g s", child.pid, cause, pause)
            replacement = await self._replacement(pause)
            if replacement is None:
                return
            child = replacement
            pause = _FIRST_PAUSE if await child.start() else min(2 * pause, _LONGEST_PAUSE)

    async def _replacement(self, pause: float) -> _Child | None:
        """Start a process after `pause` seconds. Retry while the system lacks resources. Return None if the server stops."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            if self._stopping.is_set():
                return None
            try:
                return self._start_child()
            except OSError as error:
                pause = min(2 * pause, _LONGEST_PAUSE)
                logger.warning("cannot start a process (%s); retrying in %g s", error.strerror, pause)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


def _run_child(settings: ServeSettings, started: Connection) -> None:
    """Run the server of a child process until it gets a signal or the parent exits. Send the facts when it is listening."""
    os.setpgid(0, 0)
    set_up_logs(settings.server.log_level, settings.server.log_format)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def report(server: DrainingServer, facts: dict[str, str]) -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.remove_reader(parent.sentinel)  # the sentinel stays readable, so `stop` would be called again and again
            server.stop()

        loop.add_reader(parent.sentinel, stop)
        started.send(facts)
        started.close()

    _run_server(settings, report, _socket(settings.host, settings.port))


async def no_app(*_: object) -> None:
    """ASGI application for commands that wrap no application. Always raises `NotImplementedError`."""
    raise NotImplementedError("this command calls no application")
