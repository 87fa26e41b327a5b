"""Fixtures: a shared Valkey, and own servers for tests that stop or reconfigure them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.state import State, StateOptions, connect
from tests.support.valkey import running_server, starting_servers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.support.valkey import OpenState, Plain, Server


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An in-memory server shared by all tests that change only its keys."""
    with running_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(valkey: Server) -> Iterator[Plain]:
    """A plain client of the emptied server, to inspect what is stored."""
    with valkey.client() as client:
        client.flushall()
        yield client


@pytest.fixture
async def open_state() -> AsyncIterator[OpenState]:
    """Return a function that opens a state for a URL, with a patience, a quota and options of `connect`. Close it after the test."""
    async with AsyncExitStack() as stack:

        def open_state(url: str, *, patience: float = 2.0, owner_bytes: int = 0, **options: Any) -> State:
            options.setdefault("timeout", 20.0)  # generous, for busy machines
            state = State(connect(url, **options), StateOptions(patience=patience, owner_bytes=owner_bytes))
            stack.push_async_callback(state.aclose)
            return state

        yield open_state


@pytest.fixture
def state(open_state: OpenState, valkey: Server, server: Plain) -> State:
    """A state on the emptied server."""
    assert server.dbsize() == 0
    return open_state(valkey.url)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Return a function that starts a separate server with options of valkey-server."""
    with starting_servers(tmp_path_factory) as start:
        yield start
