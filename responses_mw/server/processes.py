"""Several processes that listen on one port.

Each process has its own listening socket (SO_REUSEPORT), and the kernel distributes the connections. The parent only reserves
the port, starts and replaces processes, and forwards signals. If the parent exits, its processes stop gracefully.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from ..network import address_family, is_dual_stack
from ..tasks import stop_signals
from ..telemetry.instruments import forget_process

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Initial and maximum number of seconds before an exited process is replaced. Each failed start doubles the pause."""


def bind(host: str, port: int, *, is_shared: bool = True) -> socket.socket:
    """Bind a socket without listening. If `is_shared` is true, set SO_REUSEPORT. Raises `OSError`."""
    bound = socket.socket(address_family(host))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if is_dual_stack(host):
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    bound.bind((host, port))
    return bound


class _Child:
    def __init__(self, run: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")  # asyncio and threads do not survive a fork
        self._reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=run, args=(writer,))
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


class Supervisor:
    """Starts and replaces the processes of one server, and stops them when a signal arrives."""

    def __init__(
        self, run: Callable[[Connection], None], count: int, announce: Callable[[dict[str, str]], None], directory: str
    ) -> None:
        """Keep `count` processes, which call `run`.

        `run` sends the facts for the start message to its connection when its server is listening. It must be picklable.
        `announce` is called with the facts of the first process when all are listening. `directory` has the metrics of all.
        """
        self._run_child = run
        self._count = count
        self._announce = announce
        self._directory = directory
        self._children: set[_Child] = set()
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Run until a signal arrives. Return the exit status."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._stop)
        try:
            first = self._start_child()  # the first process starts alone, so that an error is printed only once
            if not await first.start():
                status = await first.end()
                return 0 if self._stopping.is_set() else status
            others = [self._start_child() for _ in range(self._count - 1) if not self._stopping.is_set()]
            await asyncio.gather(*(child.start() for child in others))
            if first.facts is not None and not self._stopping.is_set():
                self._announce(first.facts)
            async with asyncio.TaskGroup() as group:
                for child in (first, *others):
                    group.create_task(self._keep(child))
            return self._status
        finally:  # multiprocessing waits for the processes at exit
            self._stop()

    def _start_child(self) -> _Child:
        child = _Child(self._run_child)
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


def stop_with_parent(stop: Callable[[], None]) -> None:
    """Call `stop` in the running event loop when the parent process exits."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    loop = asyncio.get_running_loop()

    def leave() -> None:
        loop.remove_reader(parent.sentinel)  # the sentinel stays readable, so `leave` would be called again and again
        stop()

    loop.add_reader(parent.sentinel, leave)


def leave_group() -> None:
    """Make this process a group of its own, so that Ctrl-C reaches only the parent."""
    os.setpgid(0, 0)
