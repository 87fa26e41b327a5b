"""When the text of a request is embedded: only for accepted callers, and only if a semantic lookup needs it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.cache import Miss
from responses_mw.errors import Unauthorized
from tests.cache.asking import BOB, EXACT, SEMANTIC, ask, granted, key
from tests.support.scripted import Signal

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from responses_mw.cache import Cache
    from tests.cache.asking import EmbeddingServer
    from tests.cache.conftest import OpenCache
    from tests.support.servers import Serve
    from tests.support.valkey import Plain

Q = "What is the capital of France?"


class Slow:
    """An embedding server that never answers, and signals a disconnect."""

    def __init__(self) -> None:
        self.came, self.left = Signal(), Signal()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.came.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


async def test_a_lookup_of_a_refused_caller_computes_no_embedding_and_stores_nothing(
    cache: Cache, embedding_server: EmbeddingServer, server: Plain
) -> None:
    async def refused() -> None:
        raise Unauthorized("no")

    before = server.dbsize()
    with pytest.raises(Unauthorized):
        await cache.lookup(key(cache), SEMANTIC, refused)
    assert embedding_server.requests == []
    assert server.dbsize() == before


async def test_cancelling_a_lookup_cancels_its_embedding_request(open_cache: OpenCache, serve: Serve) -> None:
    slow = Slow()
    cache = open_cache(upstream__url=serve(slow, lifespan="off"), cache__timeout=60)
    looking = asyncio.create_task(cache.lookup(key(cache), SEMANTIC, granted))
    await slow.came.wait()
    looking.cancel()
    await asyncio.wait({looking})
    await slow.left.wait()


async def test_a_semantic_miss_carries_the_embedding_of_its_text(cache: Cache, embedding_server: EmbeddingServer) -> None:
    found = await cache.lookup(key(cache), SEMANTIC, granted)
    assert isinstance(found, Miss)
    assert found.vector is not None
    assert len(embedding_server.requests) == 1
    async with cache.flight(found):
        pass


@pytest.mark.parametrize(("text", "policy"), [(Q, EXACT), ("long " * 5000, SEMANTIC)], ids=["an exact lookup", "a long text"])
async def test_exact_lookups_and_long_texts_compute_no_embedding(
    cache: Cache, embedding_server: EmbeddingServer, text: str, policy: Any
) -> None:
    await ask(cache, key(cache, text), policy)
    assert embedding_server.requests == []


async def test_an_exact_hit_computes_no_embedding(cache: Cache, embedding_server: EmbeddingServer) -> None:
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    before = len(embedding_server.requests)
    await ask(cache, key(cache), SEMANTIC)
    assert len(embedding_server.requests) == before
    await ask(cache, key(cache, owner=BOB), SEMANTIC)
    assert len(embedding_server.requests) == before + 1, "another owner's answer is not found"
