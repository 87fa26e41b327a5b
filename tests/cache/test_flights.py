"""Single flight: one of many concurrent equal requests computes the answer, on any replica, and waiting has a timeout."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from responses_mw.cache import Hit, Miss
from tests.cache.asking import EXACT, SEMANTIC, answered, ask, granted, key
from tests.support.embeddings import EmbeddingServer
from tests.support.scripted import Signal

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from responses_mw.cache import Cache
    from tests.cache.conftest import OpenCache
    from tests.support.servers import Serve
    from tests.support.valkey import Plain

Q, SAME = "What is the capital city of France?", "What is the capital-city of France?"


@pytest.fixture
def replicas(open_cache: OpenCache) -> tuple[Cache, Cache]:
    return open_cache(), open_cache()


async def begun(cache: Cache) -> Miss:
    miss = await cache.lookup(key(cache), EXACT, granted)
    assert isinstance(miss, Miss)
    return miss


@pytest.fixture
def long_flights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let waiting requests give up later than the test."""
    monkeypatch.setattr("responses_mw.cache.cache.MAX_WAIT", 600)


async def waiting(cache: Cache, *, streamed: bool = False) -> asyncio.Task[Hit | Miss]:
    task = asyncio.create_task(cache.lookup(key(cache), EXACT, granted, streamed=streamed))
    await asyncio.sleep(0.1)
    assert not task.done(), "it waits"
    return task


async def test_only_one_of_many_concurrent_requests_computes_the_answer(replicas: tuple[Cache, Cache]) -> None:
    made = 0

    async def one(cache: Cache) -> str:
        nonlocal made
        found = await cache.lookup(key(cache), EXACT, granted)
        if isinstance(found, Hit):
            return "hit"
        async with cache.flight(found):
            made += 1
            await asyncio.sleep(0.1)
            await cache.keep(found, answered())
        return "made"

    results = await asyncio.gather(*(one(replicas[n % 2]) for n in range(20)))
    assert (made, results.count("made"), results.count("hit")) == (1, 1, 19)


@pytest.mark.usefixtures("long_flights")
async def test_a_waiting_request_takes_over_if_the_leader_is_cancelled(replicas: tuple[Cache, Cache], server: Plain) -> None:
    one, other = replicas
    under_way = asyncio.Event()

    async def fly() -> None:
        async with one.flight(await begun(one)):
            under_way.set()
            await asyncio.Event().wait()

    flying = asyncio.create_task(fly())
    await under_way.wait()
    waits = await waiting(other)
    server.persist(server.keys("*:f:*")[0])  # otherwise, it would expire
    flying.cancel()
    await asyncio.gather(flying, return_exceptions=True)
    async with asyncio.timeout(60):
        found = await waits
    assert isinstance(found, Miss)
    assert found.token is not None, "now it makes the answer for others"


@pytest.mark.usefixtures("long_flights")
async def test_requests_waiting_for_an_uncacheable_answer_continue_at_once(
    replicas: tuple[Cache, Cache], server: Plain
) -> None:
    one, other = replicas
    miss = await begun(one)
    server.persist(server.keys("*:f:*")[0])  # otherwise, it would expire
    waits = [await waiting(other), await waiting(other)]
    await one.keep(miss, answered(finish="length"))
    async with asyncio.timeout(60):
        for found in await asyncio.gather(*waits):
            assert isinstance(found, Miss)
            assert found.token is None, "nobody waits for it again"


async def test_waiting_has_a_timeout_and_a_shorter_one_for_streams(
    open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.cache.cache.MAX_WAIT", 0.2)
    cache = open_cache()
    await begun(cache)
    assert isinstance(await (await waiting(cache)), Miss)
    monkeypatch.setattr("responses_mw.cache.cache.MAX_WAIT", 60)
    patient = open_cache()
    since = time.monotonic()
    assert isinstance(await (await waiting(patient, streamed=True)), Miss)
    assert time.monotonic() - since < 10


async def test_the_lease_of_a_flight_is_renewed_while_the_answer_is_computed(cache: Cache, server: Plain) -> None:
    async with cache.flight(await begun(cache)):
        (flight,) = server.keys("*:f:*")
        server.pexpire(flight, 2000)
        async with asyncio.timeout(60):
            while server.pttl(flight) < 3000:
                await asyncio.sleep(0.05)
    await cache.aclose()
    assert server.keys("*:f:*") == []


@pytest.mark.usefixtures("long_flights")
async def test_the_lease_of_a_flight_expires_if_its_holder_is_lost(replicas: tuple[Cache, Cache], server: Plain) -> None:
    one, other = replicas
    await begun(one)
    (flight,) = server.keys("*:f:*")
    assert 0 < server.pttl(flight) <= 5000
    waits = await waiting(other)
    server.delete(flight)
    async with asyncio.timeout(60):
        assert isinstance(await waits, Miss)


async def test_only_the_holder_of_a_flight_ends_it(replicas: tuple[Cache, Cache], server: Plain) -> None:
    one, other = replicas
    late = await begun(one)
    server.delete(*server.keys("*:f:*"))
    await begun(other)
    async with one.flight(late):
        pass
    assert len(server.keys("*:f:*")) == 1


async def test_a_semantic_hit_ends_the_flight_of_its_text(
    replicas: tuple[Cache, Cache], server: Plain, embedding_server: EmbeddingServer
) -> None:
    cache, _ = replicas
    embedding_server.near(Q, SAME, 1.0)
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    assert await ask(cache, key(cache, SAME), SEMANTIC) == "told again: Paris."
    await cache.aclose()
    assert server.keys("*:f:*") == []


@pytest.mark.usefixtures("long_flights")
async def test_a_refreshing_request_does_not_wait(cache: Cache, server: Plain) -> None:
    await begun(cache)
    server.persist(server.keys("*:f:*")[0])  # otherwise, it would expire
    async with asyncio.timeout(60):
        refreshing = replace(EXACT, read=False)
        assert await ask(cache, key(cache), refreshing, answer="Paris.") == "Paris."
    assert await ask(cache, key(cache)) == "told again: Paris."


async def test_a_cancelled_lookup_ends_its_flight(open_cache: OpenCache, serve: Serve, server: Plain) -> None:
    asked = Signal()

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    cache = open_cache(upstream__url=serve(silent, lifespan="off"), cache__timeout=60)
    looking = asyncio.create_task(cache.lookup(key(cache), SEMANTIC, granted))
    await asked.wait()
    async with asyncio.timeout(60):
        while not server.keys("*:f:*"):
            await asyncio.sleep(0.01)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    await cache.aclose()
    assert server.keys("*:f:*") == []
