"""Fixtures: caches on a real Valkey, and an embedding server over HTTP."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw.cache import Cache, create_judge
from responses_mw.cache_models import create_embedder
from responses_mw.crypto import Sealer
from responses_mw.state import connect
from responses_mw.upstream.pool import Pool
from tests.cache.asking import settings
from tests.support.embeddings import EmbeddingServer
from tests.support.judges import ScriptedJudge
from tests.support.valkey import running_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from tests.support.forkserver import ForkServer
    from tests.support.servers import Serve
    from tests.support.valkey import Plain, Server

    OpenCache = Callable[..., Cache]
    RunCommand = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("cache")) as server:
        yield server


@pytest.fixture
def server(plain_server: Server) -> Iterator[Plain]:
    """A plain client of the emptied server."""
    with plain_server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def url(plain_server: Server, server: Plain) -> str:
    """The URL of the emptied server."""
    assert server.dbsize() == 0
    return plain_server.url


@pytest.fixture
def embedding_server() -> EmbeddingServer:
    return EmbeddingServer()


@pytest.fixture
async def open_cache(serve: Serve, embedding_server: EmbeddingServer, url: str) -> AsyncIterator[OpenCache]:
    """Return a function that opens a cache on the emptied server or another URL, with settings. Close it after the test."""
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(httpx.AsyncHTTPTransport())
        embeddings_url = serve(embedding_server, lifespan="off")

        def open_cache(url: str = url, sealer: Sealer | None = None, judge: ScriptedJudge | None = None, **given: Any) -> Cache:
            client = connect(url, timeout=20.0)
            stack.push_async_callback(client.aclose)
            chosen = settings(**{"cache__timeout": 20.0, "upstream__url": embeddings_url, **given})
            assert chosen.upstream is not None
            cache = Cache(
                client,
                create_embedder(transport, Pool.of(chosen.cache.embedding_url or chosen.upstream.url[0]), chosen),
                sealer or Sealer(),
                chosen.cache,
                deployment="tests",
                memory_bytes=chosen.limits.memory_bytes,
                judge=create_judge(judge.post, judge.dialect, chosen.cache) if judge is not None else None,
            )
            stack.push_async_callback(cache.aclose)
            return cache

        yield open_cache


@pytest.fixture
def cache(open_cache: OpenCache) -> Cache:
    """A cache on the emptied server."""
    return open_cache()


@pytest.fixture
def run(fork_server: ForkServer) -> RunCommand:
    """Return a function that runs `responses-mw cache` and returns its exit status and its output."""

    async def run(*arguments: str) -> tuple[int, str]:
        done = await asyncio.to_thread(fork_server.run, "cache", *arguments)
        return done.returncode, done.stdout + done.stderr

    return run
