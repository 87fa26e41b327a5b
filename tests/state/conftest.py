"""A Valkey for the tests that do it no harm, and servers for those that do."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.state import State, StateOptions, connect
from tests.support.valkey import Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.support.valkey import OpenState, Plain


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
async def open_state() -> AsyncIterator[OpenState]:
    """Makes a state of a URL, with options of `connect`, a patience and a quota, that is closed when the test ends."""
    async with AsyncExitStack() as stack:

        def open_state(url: str, *, patience: float = 2.0, owner_bytes: int = 0, **options: Any) -> State:
            options.setdefault("timeout", 20.0)  # a busy machine takes its time
            state = State(connect(url, **options), StateOptions(patience=patience, owner_bytes=owner_bytes))
            stack.push_async_callback(state.aclose)
            return state

        yield open_state


@pytest.fixture
def state(open_state: OpenState, valkey: Server, server: Plain) -> State:
    """A state in the empty server."""
    assert server.dbsize() == 0
    return open_state(valkey.url)


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
