"""A Valkey for the tests that do it no harm, and servers for those that do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from responses_mw.state import State, connect

from .servers import Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from .servers import Plain


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in memory, for all tests that leave it as it was but for its keys."""
    server = Server(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(valkey: Server) -> Iterator[Plain]:
    """A plain client of the empty server, for the test to look with."""
    with valkey.client() as client:
        client.flushall()
        yield client


@pytest.fixture
async def state(valkey: Server, server: Plain) -> AsyncIterator[State]:
    state = State(connect(valkey.url))
    yield state
    await state.aclose()


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts a server of the test's own, with options of valkey-server."""
    servers: list[Server] = []

    def start(*options: str) -> Server:
        server = Server(tmp_path_factory.mktemp("own"), *options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()
