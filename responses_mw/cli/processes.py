"""``responses-mw serve --processes N``: several processes that listen on one port, and their parent.

Each process has its own socket (SO_REUSEPORT), and the kernel distributes the connections among them. The parent reserves the
port with a socket that does not listen. It handles no requests: it starts the processes, forwards signals to them, and replaces
a process that exits. A process whose parent has exited drains and exits, too.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ..network import address_family
from ..telemetry.instruments import METRICS_DIRECTORY, forget_process
from ..telemetry.setup import set_up_logs
from .serve import STARTUP_FAILURE, announce_server, check_ports, run_server

if TYPE_CHECKING:
    from ..asgi.listener import DrainingServer
    from .commands import ServeCommand

__all__ = ["supervise"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds until a process that has exited is replaced. The pause doubles each time the replacement fails to start."""


def supervise(settings: ServeCommand) -> int:
    """Run the processes until a signal stops them. Return the exit status."""
    if not hasattr(socket, "SO_REUSEPORT"):
        sys.exit("responses-mw: --processes needs SO_REUSEPORT, which this system does not have.")
    with tempfile.TemporaryDirectory(prefix="rmw-metrics-") as directory:
        os.environ[METRICS_DIRECTORY] = directory  # the processes inherit it
        try:
            check_ports(settings)  # SO_REUSEPORT would silently share a port with another server
            with _socket(settings.host, settings.port) as reserved:
                return asyncio.run(_Supervisor(settings, reserved.getsockname(), directory).run())
        except OSError as error:
            print(f"responses-mw: {error.strerror}", file=sys.stderr)
            return STARTUP_FAILURE


def _socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the port but does not listen yet."""
    bound = socket.socket(address_family(host))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((host, port))
    return bound


class _Child:
    """A process. Starting it takes seconds: it imports everything again, because asyncio and threads do not survive a fork."""

    def __init__(self, settings: ServeCommand) -> None:
        context = multiprocessing.get_context("spawn")
        self._reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_child, args=(settings, writer))
        self._process.start()
        writer.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.facts: dict[str, str] | None = None
        """Facts for the start message. The process sends them when it has started."""

    async def start(self) -> bool:
        """Wait until the process serves or has exited. Return whether it serves."""
        await _readable(self._reader.fileno())
        try:
            self.facts = self._reader.recv()
        except EOFError:  # it has exited
            return False
        finally:
            self._reader.close()
        return True

    async def end(self) -> int:
        """Wait until the process exits, and return its exit status."""
        await _readable(self._process.sentinel)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def stop(self) -> None:
        self._process.terminate()


class _Supervisor:
    def __init__(self, settings: ServeCommand, address: Any, directory: str) -> None:
        self._settings = settings.model_copy(update={"port": address[1]})
        self._address = address
        self._directory = directory
        self._children: set[_Child] = set()
        self._stopping = asyncio.Event()
        self._status = 0
        self._is_announced = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            return await self._run()
        finally:  # multiprocessing waits for the processes at exit
            self._stop()

    async def _run(self) -> int:
        first = _Child(self._settings)  # alone, so that an error at startup is printed once
        self._children.add(first)
        if not await first.start():
            status = await first.end()
            return 0 if self._stopping.is_set() else status
        others = [_Child(self._settings) for _ in range(self._settings.processes - 1) if not self._stopping.is_set()]
        self._children.update(others)
        async with asyncio.TaskGroup() as group:
            for child in (first, *others):
                group.create_task(self._keep(child))
        return self._status

    def _announce(self) -> None:
        """Print the start message, once, when all processes have started."""
        facts = [child.facts for child in self._children if child.facts is not None]
        if not self._is_announced and len(facts) == self._settings.processes:
            self._is_announced = True
            announce_server(self._settings, self._address, facts[0])

    def _stop(self) -> None:
        """Stop all processes. A terminal's Ctrl-C does not reach them, because they are in their own process groups."""
        self._stopping.set()
        for child in self._children:
            child.stop()

    async def _keep(self, child: _Child) -> None:
        """Wait for a process, and replace it whenever it exits, until the server stops."""
        pause = _FIRST_PAUSE
        while True:
            if child.facts is not None or await child.start():
                pause = _FIRST_PAUSE
                self._announce()
            status = await child.end()
            self._children.discard(child)
            forget_process(child.pid, self._directory)
            if self._stopping.is_set():
                is_clean = status == 0 or (status == -signal.SIGTERM and child.facts is None)  # it had not started
                self._status = self._status if is_clean else 1
                return
            cause = signal.Signals(-status).name if status < 0 else f"status {status}"
            logger.error("process %d exited (%s); restarting it in %g s", child.pid, cause, pause)
            replacement = await self._replacement(pause)
            if replacement is None:
                return
            child, pause = replacement, min(2 * pause, _LONGEST_PAUSE)

    async def _replacement(self, pause: float) -> _Child | None:
        """Start a process after a pause, and return it, or None if the server stops. Retry while the system lacks resources."""
        while True:
            await self._wait(pause)
            if self._stopping.is_set():
                return None
            try:
                child = _Child(self._settings)
            except OSError as error:
                pause = min(2 * pause, _LONGEST_PAUSE)
                logger.warning("cannot start a process (%s); retrying in %g s", error.strerror, pause)
            else:
                self._children.add(child)
                return child

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


def _run_child(settings: ServeCommand, started: Connection) -> None:
    """The main function of a process."""
    os.setpgid(0, 0)
    set_up_logs(settings.server.log_level, settings.server.log_format)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def report(server: DrainingServer, facts: dict[str, str]) -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.remove_reader(parent.sentinel)  # it stays readable, and would call this again and again
            server.stop()

        loop.add_reader(parent.sentinel, stop)
        started.send(facts)
        started.close()

    run_server(settings, report, _socket(settings.host, settings.port))
