"""Two replicas that share a Valkey, and the official client in front of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

from state.making import everything
from state.servers import Plain, Server

from .echo import Echo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import openai

    from conftest import Ours, Start

    StartServer = Callable[..., Server]


@pytest.fixture
def upstream() -> Echo:
    return Echo()


@pytest.fixture
def keys(redis_url: str) -> Iterator[Plain]:
    """A plain client of the Valkey that all replicas share, empty at the start."""
    with redis.Redis.from_url(redis_url, socket_timeout=5) as client:
        client.flushall()
        yield client


@pytest.fixture
def a(start_at: Start, keys: Plain) -> Ours:
    """A replica in front of the upstream, over the network."""
    return start_at("proxy")


@pytest.fixture
def b(start_at: Start, keys: Plain) -> Ours:
    """Another replica, mounted in the upstream's own process."""
    return start_at("mounted")


@pytest.fixture
def on_a(a: Ours) -> openai.AsyncOpenAI:
    return a.client


@pytest.fixture
def on_b(b: Ours) -> openai.AsyncOpenAI:
    return b.client


@pytest.fixture
def start_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts a Valkey of the test's own, with options of valkey-server."""
    servers: list[Server] = []

    def start(*options: str) -> Server:
        server = Server(tmp_path_factory.mktemp("own"), *options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()


def texts_in(keys: Plain) -> bytes:
    """All that is stored, in one piece; what is short is stored in the open."""
    return repr(everything(keys)).encode()
