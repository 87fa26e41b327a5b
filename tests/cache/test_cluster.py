"""The cache in a Redis Cluster: every command uses keys of one slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cache.asking import ALICE, BOB, SEMANTIC, ask, key
from tests.support.cluster import cluster_url
from tests.support.embeddings import EmbeddingServer

if TYPE_CHECKING:
    from tests.cache.conftest import OpenCache
    from tests.support.valkey import Server

Q, SAME = "What is the capital city of France?", "What is the capital-city of France?"


async def test_lookups_evictions_and_purges_work_in_a_redis_cluster(
    open_cache: OpenCache,
    cluster: list[Server],
    embedding_server: EmbeddingServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("responses_mw.cache.store.MAX_PARTITION_ENTRIES", 2)
    cache = open_cache(cluster_url(cluster))
    embedding_server.near(Q, SAME, 0.97)
    for owner in (ALICE, BOB):
        for n in range(4):
            await ask(cache, key(cache, f"Question {n}?", owner), SEMANTIC, answer=str(n))
        await ask(cache, key(cache, owner=owner), SEMANTIC, answer="Paris.")
    assert await ask(cache, key(cache), SEMANTIC) == "told again: Paris."
    assert await ask(cache, key(cache, SAME), SEMANTIC) == "told again: Paris."
    assert (await cache.entries.stats()).entries == 4
    assert await cache.entries.purge(ALICE) == 2
    assert not await cache.entries.forget(BOB, "resp_unknown")
    assert await cache.entries.purge() == 2
