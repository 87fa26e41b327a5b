"""Replicas that share their state and their secret, in one process and in several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.processes import free_port
from tests.support.configured import REDIS_TIMEOUT, flag
from tests.support.servers import Ours

if TYPE_CHECKING:
    from tests.support.forkserver import ForkServer
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve, Start

    Replica = Callable[..., Ours]

LEASE = 1.0
SECRET = "a secret that all the replicas of the deployment have"


@pytest.fixture
def replica(start_at: Start, mount: str) -> Replica:
    """Start a replica. All replicas of a test share their state and their secret."""

    def replica(**settings: Any) -> Ours:
        return start_at(mount, **{"auth__secret_keys": [SECRET], **settings})

    return replica


@pytest.fixture
def upstream_url(serve: Serve, upstream: ScriptedUpstream) -> str:
    return serve(upstream)


class Server:
    """`responses-mw serve` or `worker` as a separate process."""

    def __init__(self, fork_server: ForkServer, command: str, settings: dict[str, Any]) -> None:
        flags = [f"{flag(name)}={value}" for name, value in settings.items() if value is not None]
        self.process = fork_server.start(command, *flags)
        self.port = settings.get("port", 0)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(60)

    async def ours(self) -> Ours:
        async with asyncio.timeout(60):
            while True:
                assert self.process.poll() is None, "the process has ended"
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    return Ours(f"http://127.0.0.1:{self.port}")


Run = Callable[..., Server]


@pytest.fixture
def run(fork_server: ForkServer, redis_url: str, upstream_url: str) -> Iterator[Run]:
    with ExitStack() as stack:

        def run(command: str = "serve", **settings: Any) -> Server:
            defaults = {
                "upstream__url": upstream_url,
                "redis__url": redis_url,
                "auth__secret_keys": SECRET,
                "jobs__lease": LEASE,
                "redis__timeout": REDIS_TIMEOUT,
            }
            if command == "serve":
                settings["port"] = free_port()
            server = Server(fork_server, command, {**defaults, **settings})
            stack.callback(server.process.wait)
            stack.callback(server.process.kill)
            return server

        yield run
