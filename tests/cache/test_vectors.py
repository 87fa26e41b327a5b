"""The search finds the same entries as brute force, and sees what is stored, deleted and purged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as trying
from hypothesis import strategies as st

from responses_mw.cache.entry import Key
from responses_mw.cache.store import Entries, EntryPage, Kept, LookupVerdict
from responses_mw.cache.vectors import Scan, VectorTable, decode_vectors, encode_vector
from responses_mw.embeddings.vector import unit_vector
from responses_mw.ids import random_part
from responses_mw.state import connect
from tests.cache.asking import ALICE, BOB, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from responses_mw.embeddings.vector import Vector
    from responses_mw.state import Client
    from tests.support.valkey import Plain

DIMENSIONS = 6


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    client = connect(url)
    yield client
    await client.aclose()


def partition() -> str:
    return random_part().translate(str.maketrans("ghijklmnopqrstuvwxyz", "0123456789abcdef0123")).ljust(40, "0")


def key_in(partition: str, name: str, owner: str = ALICE) -> Key:
    return Key(owner, partition, name, name)


async def add(store: Entries, search: Scan, key: Key, vector: Vector, *, record: bytes = b"C{}", **told: Any) -> None:
    kept = search.stored(vector)
    facts = {"generation": "0", "token": "", "ttl": 60, "response": f"resp_{key.exact}", **told}
    assert await store.keep(key, record, vector=kept, **facts) is Kept.KEPT


def opened(client: Client, **given: Any) -> tuple[Entries, Scan]:
    chosen = settings(**given)
    store = Entries(client, chosen.cache)
    return store, Scan(store, "space", chosen.limits.memory_bytes)


def brute_force(kept: dict[str, Vector], vector: Vector, threshold: float, count: int) -> list[tuple[str, float]]:
    rounded = {name: decode_vectors([encode_vector(one)], DIMENSIONS)[0].astype(np.float64) for name, one in kept.items()}
    near = [(name, float(one @ vector)) for name, one in rounded.items()]
    return sorted((one for one in near if one[1] >= threshold), key=lambda one: -one[1])[:count]


numbers = st.integers(-9, 9)
vectors = st.lists(numbers, min_size=DIMENSIONS, max_size=DIMENSIONS).filter(any).map(unit_vector)


@trying(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(vectors, min_size=1, max_size=12), st.lists(vectors, max_size=3), vectors, st.floats(-0.9, 0.99), st.integers(1, 4)
)
async def test_the_search_finds_the_same_entries_as_brute_force(
    client: Client, kept: list[Vector], later: list[Vector], asked: Vector, threshold: float, count: int
) -> None:
    store, search = opened(client)
    here = partition()
    elsewhere = partition()
    by_name: dict[str, Vector] = {}
    for batch in (kept, later):  # the scan continues where it stopped
        for vector in batch:
            name = f"e{len(by_name)}"
            await add(store, search, key_in(here, name), vector)
            await add(store, search, key_in(elsewhere, f"x{name}"), asked)
            by_name[name] = vector
        found = await search.nearest(key_in(here, ""), asked, threshold, count)
        expected = brute_force(by_name, asked, threshold, count)
        assert [near.similarity for near in found] == pytest.approx([one for _, one in expected], abs=1e-5)
        assert len({near.entry for near in found}) == len(found)
        for near in found:
            assert near.similarity == pytest.approx(
                brute_force({near.entry: by_name[near.entry]}, asked, -1, 1)[0][1], abs=1e-5
            )
            assert near.record == b"C{}"
            assert 0 < near.left <= 60


async def test_an_entry_is_found_under_its_last_vector(client: Client) -> None:
    store, search = opened(client)
    here = partition()
    for vector in ([1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]):
        await add(store, search, key_in(here, "e"), unit_vector(vector))
        assert [near.entry for near in await search.nearest(key_in(here, ""), unit_vector(vector), 0.9)] == ["e"]
    assert await search.nearest(key_in(here, ""), unit_vector([1, 0, 0, 0, 0, 0]), 0.9) == []


async def test_vectors_of_different_dimensions_are_separate_spaces(client: Client) -> None:
    store, search = opened(client)
    here = partition()
    await add(store, search, key_in(here, "six"), unit_vector([1, 0, 0, 0, 0, 0]))
    await add(store, search, key_in(here, "two"), unit_vector([1, 0]))
    assert [near.entry for near in await search.nearest(key_in(here, ""), unit_vector([1, 0]), 0.9)] == ["two"]
    assert [near.entry for near in await search.nearest(key_in(here, ""), unit_vector([1, 0, 0, 0, 0, 0]), 0.9)] == ["six"]


async def test_a_replica_finds_the_entries_of_another_until_they_are_purged(client: Client) -> None:
    store, search = opened(client)
    other_store, other = opened(client)
    here, vector = partition(), unit_vector([1, 0, 0, 0, 0, 0])
    await add(store, search, key_in(here, "e"), vector)
    assert [near.entry for near in await other.nearest(key_in(here, ""), vector, 0.9)] == ["e"]
    assert await store.purge(ALICE) == 1
    assert await other.nearest(key_in(here, ""), vector, 0.9) == []
    await add(store, search, key_in(here, "f"), vector, generation="1")
    assert [near.entry for near in await other.nearest(key_in(here, ""), vector, 0.9)] == ["f"]
    assert other_store is not store


async def test_a_vector_in_another_owners_keys_is_never_found(client: Client) -> None:
    store, search = opened(client)
    here, vector = partition(), unit_vector([1, 0, 0, 0, 0, 0])
    await add(store, search, key_in(here, "poison", BOB), vector)
    assert await search.nearest(key_in(here, ""), vector, 0.5) == []


# -- memory of the scan ----------------------------------------------------------------------------------------------------


async def test_a_scan_reads_only_new_entries(url: str, server: Plain) -> None:
    client = connect(url)
    store, search = opened(client)
    here, vector = partition(), unit_vector([1, 0, 0, 0, 0, 0])
    for number in range(20):
        await add(store, search, key_in(here, f"e{number}"), vector)
    await search.nearest(key_in(here, ""), vector, 0.9)
    page = await store.since(key_in(here, ""), "space6", 0, 100)
    assert len(page.entries) == 20
    assert page.last == page.entries[-1][1]
    before = server.info("commandstats")["cmdstat_hmget"]["calls"]
    await search.nearest(key_in(here, ""), vector, 0.9)
    assert server.info("commandstats")["cmdstat_hmget"]["calls"] == before, "nothing was added"
    await client.aclose()


steps = st.tuples(st.sampled_from(["keep", "page", "search", "purge"]), st.integers(0, 9))


@trying(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(steps, max_size=12))
async def test_late_and_repeated_pages_remove_no_entries(url: str, steps: list[tuple[str, int]]) -> None:
    client = connect(url)
    store, search = opened(client)
    here, vector = key_in(partition(), ""), unit_vector([1, 0, 0, 0, 0, 0])
    await search.nearest(here, vector, 0.9)
    kept: set[str] = set()
    pages: list[tuple[EntryPage | None, set[str]]] = [(None, kept)]
    for step, number in steps:
        if step == "keep":
            name = f"e{len(kept)}"
            await add(store, search, key_in(here.partition, name), vector, generation=await generation(store, here))
            for since in (kept, *(since for _, since in pages)):
                since.add(name)
        elif step == "page":
            pages.append(((await store.lookup(here, None, 0, search.known(here))).page, set(kept)))
        elif step == "purge":
            await store.purge(ALICE)
            kept.clear()
        else:
            page, since = pages[number % len(pages)]
            found = await search.nearest(here, vector, 0.9, 99, page)
            assert {near.entry for near in found} <= since, "it was there while the request was under way"
    found = await search.nearest(here, vector, 0.9, 99)
    await client.aclose()
    assert {near.entry for near in found} == kept


async def generation(store: Entries, key: Key) -> str:
    return (await store.lookup(key, None, 0)).generation


async def test_a_lookup_returns_the_first_page_of_a_partition_and_the_search_reads_the_rest(url: str) -> None:
    client = connect(url)
    store, search = opened(client)
    here, vector = key_in(partition(), ""), unit_vector([1, 0, 0, 0, 0, 0])
    for number in range(250):
        await add(store, search, key_in(here.partition, f"e{number}"), vector)
    page = (await store.lookup(here, None, 0, ("space6", 0))).page
    assert page is not None
    assert page.full
    assert len(await search.nearest(here, vector, 0.9, 999, page)) == 250
    await client.aclose()


async def test_a_scan_evicts_partitions_over_its_memory_limit(url: str) -> None:
    client = connect(url)
    store, search = opened(client, limits__memory_bytes=1)
    vector = unit_vector([1, 0, 0, 0, 0, 0])
    for here in (partition(), partition()):
        await add(store, search, key_in(here, "e"), vector)
        assert [near.entry for near in await search.nearest(key_in(here, ""), vector, 0.9)] == ["e"]
        assert len(search._partitions) == 1, "the one that was asked for last"
    await client.aclose()


async def test_partitions_without_vectors_do_not_accumulate_in_memory(client: Client) -> None:
    store, search = opened(client)
    vector = unit_vector([1, 0, 0, 0, 0, 0])
    for _ in range(3):
        assert await search.nearest(key_in(partition(), ""), vector, 0.9) == []
    assert len(search._partitions) == 0, "they are empty"
    store, search = opened(client, limits__memory_bytes=1)
    for _ in range(3):
        without = key_in(partition(), "e")
        facts: dict[str, Any] = {"generation": "0", "token": "", "ttl": 60, "response": f"resp_{without.partition}"}
        assert await store.keep(without, b"C{}", **facts) is Kept.KEPT
        assert await search.nearest(without, vector, 0.9) == []
        assert len(search._partitions) == 1, "the one that was asked for last"


async def test_a_waiting_lookup_receives_no_vectors(client: Client) -> None:
    store, search = opened(client)
    here, known = key_in(partition(), "asked"), ("space6", 0)
    await add(store, search, key_in(here.partition, "e"), unit_vector([1, 0, 0, 0, 0, 0]))
    first, second = await store.lookup(here, "one", 5, known), await store.lookup(here, "two", 5, known)
    assert (first.verdict, second.verdict) == (LookupVerdict.LEAD, LookupVerdict.WAIT)
    assert first.page is not None
    assert second.page is None


@given(st.integers(0, 2**32 - 1), st.floats(-1, 0.999), st.integers(1, 5), st.floats(0, 3))
def test_the_search_of_long_vectors_matches_brute_force(seed: int, threshold: float, count: int, spread: float) -> None:
    random = np.random.default_rng(seed)
    centre = random.normal(size=500)
    vectors = [unit_vector(centre + spread * random.normal(size=500)) for _ in range(30)]
    asked = unit_vector(centre + spread * random.normal(size=500))
    table = VectorTable(500)
    table.put((str(n), 1000, encode_vector(vector)) for n, vector in enumerate(vectors))
    rows = decode_vectors([encode_vector(vector) for vector in vectors], 500)
    expected = sorted((float(one) for one in rows @ asked if one >= threshold), reverse=True)[:count]
    found = [similarity for _, similarity in table.nearest(asked, threshold, count, 0)]
    near = [one for one in expected if one >= threshold + 1e-5]
    assert found[: len(near)] == pytest.approx(near, abs=1e-5)


def encoded(*numbers: float) -> bytes:
    return encode_vector(unit_vector(numbers))


def test_a_table_removes_expired_entries_and_the_oldest_beyond_its_limit() -> None:
    table = VectorTable(2)
    table.put(
        [("a", 1000, encoded(1, 0)), ("b", 10, encoded(1, 0)), ("c", 1000, encoded(1, 0)), ("d", 1000, b""), ("e", 1000, b"xx")]
    )
    asked = unit_vector([1, 0])

    def names(now: int = 5) -> set[str]:
        return {name for name, _ in table.nearest(asked, 0.5, 9, now)}

    assert names() == {"a", "b", "c"}
    assert names(now=10) == {"a", "c"}
    table.shrink(2, now=10)
    assert names() == {"a", "c"}
    table.shrink(1, now=10)
    assert names() == {"c"}
    table.put([("f", 1000, encoded(0, 1)), ("g", 1000, encoded(1, 0))])
    assert names() == {"c", "g"}, "free rows are used again, with nothing of before"
    table.put([("c", 1000, encoded(0, 1))])
    assert names() == {"g"}, "an entry has one vector"
    table.remove("g")
    table.remove("g")
    assert names() == set()


def test_encoding_a_vector_preserves_it_except_for_rounding() -> None:
    vector = unit_vector([0.1, -0.7, 0.3])
    assert decode_vectors([encode_vector(vector)], 3)[0] == pytest.approx(vector, abs=1e-3)
