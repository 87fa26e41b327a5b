"""Two replicas that share a Valkey, and the official client in front of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

from benchmarks.processes import free_port
from tests.support.configured import flag
from tests.support.echo import Echo
from tests.support.servers import Ours, wait_until_serving
from tests.support.valkey import starting_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import openai

    from tests.support.forkserver import Forked, ForkServer
    from tests.support.servers import Serve, Start
    from tests.support.valkey import Plain, Server

    StartServer = Callable[..., Server]
    StartProcess = Callable[..., tuple[Ours, Forked]]


@pytest.fixture
def upstream() -> Echo:
    return Echo()


@pytest.fixture
def keys(redis_url: str) -> Iterator[Plain]:
    """A plain client of the Valkey that all replicas share, empty at the start."""
    with redis.Redis.from_url(redis_url, socket_timeout=60) as client:
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
    """Start a Valkey for one test, with options of valkey-server."""
    with starting_servers(tmp_path_factory) as start:
        yield start


@pytest.fixture
def upstream_url(serve: Serve, upstream: Echo) -> str:
    return serve(upstream)


@pytest.fixture
def start_process(fork_server: ForkServer) -> Iterator[StartProcess]:
    """Start `responses-mw serve` as a separate process, which the test may kill."""
    processes: list[Forked] = []

    def start(upstream_url: str, **settings: str) -> tuple[Ours, Forked]:
        port = free_port()
        flags = [part for name, value in settings.items() for part in (flag(name), value)]
        process = fork_server.start("serve", "--upstream", upstream_url, "--port", str(port), *flags)
        processes.append(process)
        url = f"http://127.0.0.1:{port}"
        wait_until_serving(url, process)
        return Ours(url), process

    yield start
    for process in processes:
        process.kill()
        process.wait()
