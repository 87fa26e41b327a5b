"""Search by Redis and by this process: both find what comparing with every vector finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as trying
from hypothesis import strategies as st

from responses_mw.cache.key import Key
from responses_mw.cache.matrix import Matrix
from responses_mw.cache.search import Index, Scan, choose
from responses_mw.cache.store import Entries, Page
from responses_mw.cache.vectors import FORMS, directions, headed, packed, unpacked, vector_of
from responses_mw.ids import random_part
from responses_mw.state import connect

from .asking import ALICE, BOB, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from responses_mw.cache.vectors import Vector
    from responses_mw.state import Client
    from state.servers import Plain, Server

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


async def add(store: Entries, search: Index | Scan, key: Key, vector: Vector, *, record: bytes = b"C{}", **told: Any) -> None:
    kept = await search.keepable(vector)
    facts = {"generation": "0", "token": "", "ttl": 60, "response": f"resp_{key.exact}", **told}
    assert await store.keep(key, record, vector=kept, **facts) == "kept"


async def opened(client: Client, **given: Any) -> tuple[Entries, Index | Scan]:
    chosen = settings(**given)
    store = Entries(client, chosen)
    return store, await choose(store, client, "space", chosen)


def brute_force(kept: dict[str, Vector], vector: Vector, threshold: float, count: int) -> list[tuple[str, float]]:
    rounded = {name: unpacked([packed(one)], DIMENSIONS)[0].astype(np.float64) for name, one in kept.items()}
    near = [(name, float(one @ vector / np.linalg.norm(one))) for name, one in rounded.items()]
    return sorted((one for one in near if one[1] >= threshold), key=lambda one: -one[1])[:count]


numbers = st.integers(-9, 9)
vectors = st.lists(numbers, min_size=DIMENSIONS, max_size=DIMENSIONS).filter(any).map(vector_of)


@trying(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(vectors, min_size=1, max_size=12), st.lists(vectors, max_size=3), vectors, st.floats(-0.9, 0.99), st.integers(1, 4)
)
async def test_what_is_found_is_what_comparing_with_all_finds(
    client: Client, kept: list[Vector], later: list[Vector], asked: Vector, threshold: float, count: int
) -> None:
    store, search = await opened(client)
    here = partition()
    elsewhere = partition()
    by_name: dict[str, Vector] = {}
    for batch in (kept, later):  # the scan reads on where it stopped
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


async def test_the_server_decides_who_searches_unless_a_setting_does(plain_server: Server, searching_server: Server) -> None:
    for server, expected in ((plain_server, Scan), (searching_server, Index)):
        client = connect(server.url)
        assert isinstance((await opened(client))[1], expected)
        assert isinstance((await opened(client, cache_search="scan"))[1], Scan)
        await client.aclose()


async def test_an_entry_is_found_under_its_last_vector(client: Client) -> None:
    store, search = await opened(client)
    here = partition()
    for vector in ([1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]):
        await add(store, search, key_in(here, "e"), vector_of(vector))
        assert [near.entry for near in await search.nearest(key_in(here, ""), vector_of(vector), 0.9)] == ["e"]
    assert await search.nearest(key_in(here, ""), vector_of([1, 0, 0, 0, 0, 0]), 0.9) == []


async def test_a_vector_of_another_size_is_another_space(client: Client) -> None:
    store, search = await opened(client)
    here = partition()
    await add(store, search, key_in(here, "six"), vector_of([1, 0, 0, 0, 0, 0]))
    await add(store, search, key_in(here, "two"), vector_of([1, 0]))
    assert [near.entry for near in await search.nearest(key_in(here, ""), vector_of([1, 0]), 0.9)] == ["two"]
    assert [near.entry for near in await search.nearest(key_in(here, ""), vector_of([1, 0, 0, 0, 0, 0]), 0.9)] == ["six"]


async def test_a_replica_finds_what_another_kept_and_no_more_after_a_purge(client: Client) -> None:
    store, search = await opened(client)
    other_store, other = await opened(client)
    here, vector = partition(), vector_of([1, 0, 0, 0, 0, 0])
    await add(store, search, key_in(here, "e"), vector)
    assert [near.entry for near in await other.nearest(key_in(here, ""), vector, 0.9)] == ["e"]
    assert await store.purge(ALICE) == 1
    assert await other.nearest(key_in(here, ""), vector, 0.9) == []
    await add(store, search, key_in(here, "f"), vector, generation="1")
    assert [near.entry for near in await other.nearest(key_in(here, ""), vector, 0.9)] == ["f"]
    assert other_store is not store


async def test_a_vector_in_another_owners_keys_is_never_found(client: Client) -> None:
    store, search = await opened(client)
    here, vector = partition(), vector_of([1, 0, 0, 0, 0, 0])
    await add(store, search, key_in(here, "poison", BOB), vector)
    assert await search.nearest(key_in(here, ""), vector, 0.5) == []


async def test_an_index_of_a_server_without_narrow_vectors_has_wide_ones(
    searching_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMS, "FLOAT8", "<f2")  # no server has it
    client = connect(searching_server.url)
    store, here = Entries(client, settings()), partition()
    vector, other = vector_of([1, 2, 0, 0, 0, 3]), vector_of([1, 2, 1, 0, 0, 3])
    index = Index(store, random_part()[:16], ("FLOAT8", "FLOAT32"))
    assert await index.nearest(key_in(here, ""), vector, 0.5) == []
    await add(store, index, key_in(here, "e"), vector)
    found = await index.nearest(key_in(here, ""), other, 0.5)
    assert [near.similarity for near in found] == pytest.approx([float(vector @ other)], abs=1e-3)
    await client.aclose()


@pytest.mark.parametrize(("near", "threshold", "wholes"), [(0, 0.3, 1), (6, 0.9, 0), (30, 0.9, 1), (0, 0.9, 0)])
async def test_an_index_and_a_scan_tell_the_same_similarities(
    searching_server: Server, near: int, threshold: float, wholes: int
) -> None:
    """Whole vectors are compared by the server only where too many have near heads."""
    client, random = connect(searching_server.url), np.random.default_rng(1)
    told = []
    spreads = [0.2] * (1 + near) + [2.0] * (40 - near)  # similarities of 0.96 and 0.44
    vectors = [vector_of(1 + spread * random.normal(size=384)) for spread in spreads]
    calls = 0
    for search in ("index", "scan"):
        store, one = await opened(client, cache_search=search)
        here = partition()
        for number, vector in enumerate(vectors[1:]):
            await add(store, one, key_in(here, f"e{number}"), vector)
        before = await searches(client)
        found = await one.nearest(key_in(here, ""), vectors[0], threshold)
        told.append({one.entry: one.similarity for one in found})
        calls += await searches(client) - before
    assert len(told[0]) == (0 if (near, threshold) == (0, 0.9) else 4)
    assert told[0] == pytest.approx(told[1], abs=1e-6)
    assert calls == 1 + wholes
    await client.aclose()


async def test_heads_that_told_nothing_are_left_out_for_a_while(searching_server: Server) -> None:
    client = connect(searching_server.url)
    store = Entries(client, settings())
    index = Index(store, random_part()[:16])
    here, vector = partition(), vector_of(range(1, 13))
    for number in range(16):
        await add(store, index, key_in(here, f"e{number}"), vector)
    made = []
    for _ in range(23):
        before = await searches(client)
        assert len(await index.nearest(key_in(here, ""), vector, 0.9)) == 4
        made.append(await searches(client) - before)
    assert made == [2] + 20 * [1] + [2, 1]
    await client.aclose()


async def test_of_large_records_those_that_are_near_are_read(searching_server: Server) -> None:
    client = connect(searching_server.url)
    store = Entries(client, settings())
    index = Index(store, random_part()[:16])
    here, asked = partition(), vector_of([1, 1, 1, 1, 0, 0, 0, 0])
    for number in range(6):  # alike by their heads; the last is near
        vector = vector_of([1, 1, *((1, 1, 0, 0) if number == 5 else (0, 0, 1, 1)), 0, 0])
        await add(store, index, key_in(here, f"e{number}"), vector, record=bytes([number]) * 40_000)
    space, _, _, head = await index.keepable(asked)
    told = await store.search(key_in(here, ""), f"rmw-v2-{space}", space, "head", head, 16, 0.9)
    assert told is not None
    assert sorted(len(record) for _, _, record, _ in told) == [0, 0, 0, 0, 40_000, 40_000]
    (found,) = await index.nearest(key_in(here, ""), asked, 0.9)
    assert (found.entry, found.record) == ("e5", b"\x05" * 40_000)
    assert 0 < found.left <= 60
    await client.aclose()


async def searches(client: Client) -> int:
    """How many the server has made."""
    stats: dict[str, Any] = await client.redis.info("commandstats")
    return sum(told["calls"] for name, told in stats.items() if name.lower() == "cmdstat_ft.search")


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.floats(0, 3))
def test_heads_are_at_least_as_similar_as_vectors(seed: int, dimensions: int, spread: float) -> None:
    random = np.random.default_rng(seed)
    one, other = (vector_of(1 + spread * random.normal(size=dimensions)) for _ in range(2))
    heads = headed(one), headed(other)
    assert [len(head) for head in heads] == [dimensions // 4 + 1] * 2
    assert [float(np.linalg.norm(head)) for head in heads] == pytest.approx([1, 1], abs=1e-5)
    assert float(np.dot(*heads)) >= float(np.dot(one, other)) - 1e-5


# -- what the scan holds ---------------------------------------------------------------------------------------------------


@pytest.fixture
def scanned(plain_server: Server, server: Plain) -> str:
    assert server.dbsize() == 0
    return plain_server.url


async def test_a_scan_reads_only_what_was_added_since(scanned: str, server: Plain) -> None:
    client = connect(scanned)
    store, search = await opened(client)
    here, vector = partition(), vector_of([1, 0, 0, 0, 0, 0])
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


@trying(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(steps, max_size=12))
async def test_pages_that_come_late_or_again_take_nothing_away(scanned: str, steps: list[tuple[str, int]]) -> None:
    client = connect(scanned)
    store, search = await opened(client)
    here, vector = key_in(partition(), ""), vector_of([1, 0, 0, 0, 0, 0])
    await search.nearest(here, vector, 0.9)
    kept: set[str] = set()
    pages: list[tuple[Page | None, set[str]]] = [(None, kept)]
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


async def test_a_look_up_brings_a_part_of_a_long_partition_and_the_search_the_rest(scanned: str) -> None:
    client = connect(scanned)
    store, search = await opened(client)
    here, vector = key_in(partition(), ""), vector_of([1, 0, 0, 0, 0, 0])
    for number in range(250):
        await add(store, search, key_in(here.partition, f"e{number}"), vector)
    page = (await store.lookup(here, None, 0, ("space6", 0))).page
    assert page is not None
    assert page.full
    assert len(await search.nearest(here, vector, 0.9, 999, page)) == 250
    await client.aclose()


async def test_a_scan_holds_no_more_bytes_than_it_may(scanned: str) -> None:
    client = connect(scanned)
    store, search = await opened(client, cache_memory=1)
    assert isinstance(search, Scan)
    vector = vector_of([1, 0, 0, 0, 0, 0])
    for here in (partition(), partition()):
        await add(store, search, key_in(here, "e"), vector)
        assert [near.entry for near in await search.nearest(key_in(here, ""), vector, 0.9)] == ["e"]
        assert len(search._partitions) == 1, "the one that was asked for last"
    await client.aclose()


@given(st.integers(0, 2**32 - 1), st.floats(-1, 0.999), st.integers(1, 5), st.floats(0, 3))
def test_long_vectors_are_found_as_by_comparing_with_all_though_few_are_compared_whole(
    seed: int, threshold: float, count: int, spread: float
) -> None:
    random = np.random.default_rng(seed)
    centre = random.normal(size=500)
    vectors = [vector_of(centre + spread * random.normal(size=500)) for _ in range(30)]
    asked = vector_of(centre + spread * random.normal(size=500))
    matrix = Matrix(500)
    matrix.add([(str(n), n + 1, b"1000:" + packed(vector)) for n, vector in enumerate(vectors)])
    rows = directions(unpacked([packed(vector) for vector in vectors], 500))
    expected = sorted((float(one) for one in rows @ asked if one >= threshold), reverse=True)[:count]
    found = [similarity for _, similarity in matrix.nearest(asked, threshold, count, 0)]
    near = [one for one in expected if one >= threshold + 1e-5]
    assert found[: len(near)] == pytest.approx(near, abs=1e-5)


def kept(vector: list[int], expiry: int = 1000) -> bytes:
    return b"%d:" % expiry + packed(vector_of(vector))


def test_a_matrix_forgets_what_expired_what_was_evicted_and_what_is_over_its_bound() -> None:
    matrix = Matrix(2)
    matrix.add(
        [("a", 1, kept([1, 0])), ("b", 2, kept([1, 0], expiry=10)), ("c", 3, kept([1, 0])), ("d", 4, b""), ("e", 5, b"9:xx")]
    )
    asked = vector_of([1, 0])

    def names(now: int = 5) -> set[str]:
        return {name for name, _ in matrix.nearest(asked, 0.5, 9, now)}

    assert names() == {"a", "b", "c"}
    assert names(now=10) == {"a", "c"}
    assert matrix.number == 5
    matrix.bound(2, now=10)
    assert names() == {"a", "c"}
    matrix.bound(1, now=10)
    assert names() == {"c"}
    matrix.add([("f", 6, kept([0, 1])), ("g", 7, kept([1, 0]))])
    assert names() == {"c", "g"}, "rows that became free are used again, with nothing of before"
    matrix.forget_before(7)
    assert names() == {"g"}
    matrix.remove("g")
    matrix.remove("g")
    assert names() == set()
