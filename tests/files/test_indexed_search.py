"""Searching with the index of the Redis module gives the same results as in memory. Needs `scripts/search-module`."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from responses_mw.embeddings.static import StaticEmbedder
from responses_mw.errors import APIError
from responses_mw.files.filters import parse_filter
from responses_mw.files.indexed_search import IndexedSearch
from responses_mw.files.indexing import Indexing
from responses_mw.files.ranking import Ranking, Weights
from responses_mw.files.retrieval import Retrieval
from responses_mw.files.search import Query
from responses_mw.files.vector_stores import VectorStores
from responses_mw.files.words import count_words, encode_words, number_of
from responses_mw.state import Damaged, State, StateUnavailable, connect
from responses_mw.state.blocks import StoredBlock
from responses_mw.state.files import File, new_file_id
from responses_mw.state.store_file_records import NewFile, StoreFile
from responses_mw.state.store_files import StoreFiles, new_generation
from responses_mw.state.vector_stores import VectorStore, new_store_id
from tests.support import search_module
from tests.support.hybrid_relay import HybridRelay
from tests.support.valkey import Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator

    from tests.support.valkey import Plain

pytestmark = pytest.mark.skipif(not search_module.PATH.exists(), reason="no search module: run scripts/search-module")

OWNER = "anonymous"
EMBEDDER = StaticEmbedder()
TOPICS = [
    "annual leave",
    "the office dog",
    "salaries and bonuses",
    "travel by train",
    "fire drills",
    "東京の事務所",
    "C++ or Rust",
]
TEXTS = [f"{topic}, rule {number}: see {TOPICS[number % 5]}" for number in range(20) for topic in TOPICS]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("valkey"), "--loadmodule", str(search_module.PATH))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(valkey: Server) -> Iterator[Plain]:
    with valkey.client() as client:
        client.flushall()
        yield client


@pytest.fixture(params=[2, 3])
async def state(request: pytest.FixtureRequest, valkey: Server, server: Plain) -> AsyncIterator[State]:
    state = State(connect(f"{valkey.url}?protocol={request.param}", timeout=20))
    yield state
    await state.aclose()


@asynccontextmanager
async def with_hybrid(
    valkey: Server, reply: bytes | None = None, protocol: int = 3
) -> AsyncIterator[tuple[State, HybridRelay]]:
    """Yield a state whose server answers FT.HYBRID, and the relay that does this."""
    relay = HybridRelay(valkey.port, reply)
    async with relay.serve():
        state = State(connect(f"redis://127.0.0.1:{relay.port}?protocol={protocol}", timeout=20))
        try:
            yield state, relay
        finally:
            await state.aclose()


@pytest.fixture
def retrieval(state: State) -> Retrieval:
    return Retrieval(state, EMBEDDER, 10_000_000)


async def new_store(state: State) -> str:
    now = int(time.time())
    store = VectorStore(new_store_id(), "handbook", now, now)
    await state.vector_stores.create(store, OWNER)
    return store.id


async def add(state: State, store_id: str, texts: list[str], file_id: str = "", **attributes: Any) -> str:
    if not file_id:
        file = File(new_file_id(), "a.txt", "assistants", 5, int(time.time()), None, "")
        await state.files.create(file, OWNER)
        file_id = file.id
    vectors = np.stack(await EMBEDDER.embed(texts)).astype("<f2")
    words = encode_words(count_words(texts))
    block = StoredBlock(EMBEDDER.space, vectors.shape[1], texts, [0] * len(texts), vectors.tobytes(), words)
    await state.store_files.attach(store_id, OWNER, [NewFile(file_id, "a.txt", attributes, {})], new_generation())
    assert await state.store_files.publish(await state.store_files.get(store_id, OWNER, file_id), OWNER, block)
    return file_id


async def results(retrieval: Retrieval, store_id: str, *queries: str, **options: Any) -> list[tuple[str, float]]:
    found = await retrieval.search([store_id], OWNER, queries, **options)
    return [(one.text, round(one.score, 3)) for one in found]


def chunk_keys(server: Plain) -> list[bytes]:
    return [key for key in server.keys("rmw:{v*") if b":c:" in key or key.endswith(b":ib")]


@pytest.mark.parametrize("weights", [Weights(), Weights(0, 1), Weights(1, 0), Weights(0.2, 0.8)])
async def test_results_and_scores_equal_those_of_a_search_in_memory(
    state: State, retrieval: Retrieval, weights: Weights
) -> None:
    store = await new_store(state)
    for start in range(0, len(TEXTS), 35):
        await add(state, store, TEXTS[start : start + 35], part=start)
    queries = ["How many days of annual leave?", "office dog rule 7", "東京", "C++ (or) Rust|-@x:{1}"]
    filters = [
        None,
        *(parse_filter({"type": kind, "key": "part", "value": 35}, "filters") for kind in ("eq", "ne", "gt", "lt")),
        parse_filter({"type": "eq", "key": "none", "value": 1}, "filters"),
    ]
    options = [{"filters": one, "maximum": 5, "ranking": Ranking(weights=weights)} for one in filters]
    expected = [await results(retrieval, store, *queries[:number], **one) for one in options for number in (1, 4)]
    expected += [await results(retrieval, store, query, **options[0]) for query in queries]
    assert await Indexing(state).build(store, OWNER) == len(TEXTS)
    found = [await results(retrieval, store, *queries[:number], **one) for one in options for number in (1, 4)]
    found += [await results(retrieval, store, query, **options[0]) for query in queries]
    assert retrieval.memory.stores == [store]
    for one, other in zip(found, expected, strict=True):
        assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=0.01)
        assert one[:1] == [] or one[0][0] in [text for text, score in other if score >= other[0][1] - 0.01]


@pytest.mark.parametrize("protocol", [2, 3])
async def test_one_command_finds_the_same_candidates_where_the_server_has_it(
    valkey: Server, server: Plain, protocol: int
) -> None:
    async with with_hybrid(valkey, protocol=protocol) as (state, relay):
        retrieval, store = Retrieval(state, EMBEDDER, 10_000_000), await new_store(state)
        for start in range(0, len(TEXTS), 35):
            await add(state, store, TEXTS[start : start + 35], part=start)
        await Indexing(state).build(store, OWNER)
        filters = [None, *(parse_filter({"type": kind, "key": "part", "value": 35}, "filters") for kind in ("eq", "ne"))]
        options = [{"filters": one, "ranking": Ranking(weights=Weights(0.2, 0.8))} for one in filters]
        queries = ["How many days of annual leave?", "東京", "C++ (or) Rust|-@x:{1}"]
        found = [await results(retrieval, store, query, **one) for one in options for query in queries]
        assert len(relay.calls) == 9
        relay.reply = b"-ERR no such command\r\n"
        assert found == [await results(retrieval, store, query, **one) for one in options for query in queries]
        assert len(relay.calls) == 10


@pytest.mark.parametrize(
    "reply",
    [
        b"-ERR Unknown argument `FILTER` at position 10\r\n",
        b"+OK\r\n",
        b"*1\r\n:1\r\n",
        b"*2\r\n:1\r\n$5\r\nother\r\n",
        b"*4\r\n+results\r\n*1\r\n*2\r\n+__key\r\n+other\r\n+warnings\r\n*0\r\n",
        b"%2\r\n+results\r\n*0\r\n+warnings\r\n*1\r\n+Timeout limit was reached (SEARCH)\r\n",
    ],
)
async def test_a_server_whose_command_does_something_else_is_searched_with_two(
    valkey: Server, server: Plain, caplog: pytest.LogCaptureFixture, reply: bytes
) -> None:
    async with with_hybrid(valkey, reply) as (state, relay):
        retrieval, store = Retrieval(state, EMBEDDER, 10_000_000), await new_store(state)
        await add(state, store, TEXTS[:10])
        await Indexing(state).build(store, OWNER)
        for _ in range(2):
            assert (await results(retrieval, store, TEXTS[3], maximum=1))[0][0] == TEXTS[3]
        assert len(relay.calls) == 1
        assert [record.message.startswith("searches do not use FT.HYBRID") for record in caplog.records].count(True) == 1


async def test_a_failure_of_the_server_does_not_end_the_use_of_the_command(
    valkey: Server, server: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    async with with_hybrid(valkey, b"-LOADING Redis is loading the dataset in memory\r\n") as (state, relay):
        retrieval, store = Retrieval(state, EMBEDDER, 10_000_000), await new_store(state)
        await add(state, store, TEXTS[:10])
        await Indexing(state).build(store, OWNER)
        with pytest.raises(StateUnavailable):
            await results(retrieval, store, TEXTS[3])
        relay.reply = None
        assert (await results(retrieval, store, TEXTS[3], maximum=1))[0][0] == TEXTS[3]
        calls = len(relay.calls)
        server.execute_command("FT.DROPINDEX", f"rmw:{{v{store.removeprefix('vs_')}}}:i256")
        relay.reply = b"-SEARCH_INDEX_NOT_FOUND Index not found\r\n"
        with pytest.raises(StateUnavailable):
            await results(retrieval, store, TEXTS[3])
        assert len(relay.calls) > calls
        assert not any("FT.HYBRID" in record.message for record in caplog.records)


async def test_added_replaced_and_removed_files_update_the_index(state: State, retrieval: Retrieval, server: Plain) -> None:
    store = await new_store(state)
    first = await add(state, store, ["annual leave"])
    await Indexing(state).build(store, OWNER)
    second = await add(state, store, ["the office dog"])
    await Indexing(state).add(store, OWNER, second)
    assert len(chunk_keys(server)) == 3
    assert {text for text, _ in await results(retrieval, store, "leave")} == {"annual leave", "the office dog"}
    await add(state, store, ["no leave"], first)  # the search indexes it
    assert {text for text, _ in await results(retrieval, store, "leave")} == {"no leave", "the office dog"}
    await state.store_files.detach(store, OWNER, [await state.store_files.get(store, OWNER, first)])
    assert len(chunk_keys(server)) == 2
    assert {text for text, _ in await results(retrieval, store, "leave")} == {"the office dog"}
    await state.store_files.detach(store, OWNER, [await state.store_files.get(store, OWNER, second)])
    assert chunk_keys(server) == []
    assert await results(retrieval, store, "leave") == []


async def test_the_next_search_removes_a_stale_block_from_the_index(state: State, retrieval: Retrieval, server: Plain) -> None:
    store = await new_store(state)
    await add(state, store, ["annual leave"])
    gone = await add(state, store, ["the office dog"])
    await Indexing(state).build(store, OWNER)
    [record] = [file async for file in state.store_files.each(store, OWNER) if file.id == gone]
    name = f"{gone}:{record.block}"
    [note] = await state.chunk_index.noted(store, [name])
    assert note is not None
    await state.store_files.detach(store, OWNER, [record])
    await state.chunk_index.add(store, name, iter(()), note)  # as a slow process would
    assert [text for text, _ in await results(retrieval, store, "leave")] == ["annual leave"]
    assert await state.chunk_index.blocks(store) != set()
    assert len(chunk_keys(server)) == 2


async def test_dropping_an_index_erases_all_its_keys(state: State, retrieval: Retrieval, server: Plain) -> None:
    store = await new_store(state)
    await add(state, store, TEXTS)
    await Indexing(state).build(store, OWNER)
    await Indexing(state).drop(store, OWNER)
    assert chunk_keys(server) == []
    assert server.execute_command("FT._LIST") == []
    assert len(await results(retrieval, store, "leave")) == 10
    assert not (await state.vector_stores.get(store, OWNER)).is_indexed


async def test_searching_without_the_index_fails_until_it_is_rebuilt(state: State, retrieval: Retrieval, server: Plain) -> None:
    store = await new_store(state)
    await add(state, store, ["annual leave"])
    await Indexing(state).build(store, OWNER)
    found = await results(retrieval, store, "leave")
    server.execute_command("FT.DROPINDEX", f"rmw:{{v{store.removeprefix('vs_')}}}:i256")
    with pytest.raises(StateUnavailable):
        await results(retrieval, store, "leave")
    await Indexing(state).build(store, OWNER)
    assert await results(retrieval, store, "leave") == found


async def test_an_indexed_store_may_become_empty_and_get_vectors_of_another_dimension(
    state: State, retrieval: Retrieval, server: Plain
) -> None:
    store = await new_store(state)
    assert await Indexing(state).build(store, OWNER) == 0
    assert await results(retrieval, store, "leave") == []
    first = await add(state, store, ["annual leave"])
    await Indexing(state).add(store, OWNER, first)
    assert [text for text, _ in await results(retrieval, store, "leave")] == ["annual leave"]
    [name] = server.execute_command("FT._LIST")
    await state.chunk_index.create(store, 8)
    assert server.execute_command("FT._LIST") == [name.replace(b":i256", b":i8")]
    assert chunk_keys(server) == []


async def test_after_a_change_only_the_changed_files_are_read(state: State, retrieval: Retrieval, server: Plain) -> None:
    store = await new_store(state)
    files = [await add(state, store, [f"rule {number}"]) for number in range(40)]
    await Indexing(state).build(store, OWNER)
    await results(retrieval, store, "rule")
    await add(state, store, ["the office dog"], files[0])
    await state.store_files.detach(store, OWNER, [await state.store_files.get(store, OWNER, files[1])])
    server.config_resetstat()
    found = [text for text, _ in await results(retrieval, store, "rule", maximum=50)]
    assert sorted(found) == sorted(["the office dog", *(f"rule {number}" for number in range(2, 40))])
    assert server.info("commandstats")["cmdstat_hgetall"]["calls"] < 20
    await add(state, store, ["rule 0"], files[0])
    assert await Indexing(state).build(store, OWNER) == 39
    fresh = Retrieval(state, EMBEDDER, 10_000_000)
    assert await results(retrieval, store, "rule 7") == await results(fresh, store, "rule 7")


async def test_an_index_that_another_process_has_dropped_is_built_again_after_a_change(
    state: State, retrieval: Retrieval, server: Plain
) -> None:
    store = await new_store(state)
    file_id = await add(state, store, ["annual leave"])
    await add(state, store, ["the office dog"])
    await Indexing(state).build(store, OWNER)
    found = await results(retrieval, store, "leave")
    await Indexing(state).drop(store, OWNER)
    await state.vector_stores.update(store, OWNER, {"indexed": 1})
    await state.store_files.describe(store, OWNER, file_id, {"part": 1})
    await state.chunk_index.create(store, 256)  # as by a process that is building the index
    assert await results(retrieval, store, "leave") == found
    assert len(chunk_keys(server)) == 3


async def test_listing_a_large_store_delays_no_search_of_another_one(state: State) -> None:
    is_listing, may_continue = asyncio.Event(), asyncio.Event()

    class SlowFiles(StoreFiles):
        async def each(self, store_id: str, owner: str) -> AsyncIterator[StoreFile]:
            async for file in state.store_files.each(store_id, owner):
                if store_id == slow:
                    is_listing.set()
                    await may_continue.wait()
                yield file

    slow, other = await new_store(state), await new_store(state)
    for store in (slow, other):
        await add(state, store, ["annual leave"])
        await Indexing(state).build(store, OWNER)
    files = SlowFiles(state.client, state.writer, state.store_blocks, state.store_erasures)
    indexed = IndexedSearch(files, state.store_blocks, state.chunk_index)
    searches = []
    for store in (slow, other):
        record = await state.vector_stores.get(store, OWNER)
        searches.append(indexed.search(record, OWNER, [Query(None, "leave")], None, 1, Weights(0, 1)))
    first = asyncio.create_task(searches[0])
    await is_listing.wait()
    assert len(await searches[1]) == 1
    assert not first.done()
    may_continue.set()
    assert len(await first) == 1


async def test_the_count_of_a_frequent_word_is_estimated_from_a_sample(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("responses_mw.state.chunk_index._SURE", 8)
    store = await new_store(state)
    await add(state, store, [f"common {'rare' if number % 100 == 0 else ''}" for number in range(320)])
    await Indexing(state).build(store, OWNER)
    words = [np.base_repr(number_of(word), 36) for word in ("common", "rare", "none")]
    common, *others = await state.chunk_index.frequencies(store, 256, words)
    assert (common, others) == (320, [4, 0])


async def test_deleting_a_store_erases_its_index(state: State, server: Plain) -> None:
    async def enqueue(*_: object) -> None: ...

    store = await new_store(state)
    await add(state, store, ["annual leave"])
    await Indexing(state).build(store, OWNER)
    await VectorStores(state, enqueue).delete(store, OWNER)
    assert chunk_keys(server) == []
    assert server.execute_command("FT._LIST") == []


@pytest.mark.parametrize("members", [{"v": b"x"}, {"v": b"\xff" * 1024}, {"v": bytes(8)}, {"p": b"x"}, {"t": b"\xff"}])
async def test_a_damaged_chunk_is_reported(
    state: State, retrieval: Retrieval, server: Plain, members: dict[str, bytes]
) -> None:
    store = await new_store(state)
    await add(state, store, ["annual leave"])
    await Indexing(state).build(store, OWNER)
    [key] = [key for key in chunk_keys(server) if b":c:" in key]
    server.hset(key, mapping=members)
    damaged = await _failure(results(retrieval, store, "leave"))
    assert damaged is None or isinstance(damaged, Damaged)  # None: the module no longer finds the chunk
    assert damaged is not None or "v" in members


@pytest.mark.parametrize("note", [b"", b"x" * 12, b"x" * 13, b"\1\0\0\0" + bytes(8) + bytes(8)])
async def test_damaged_block_summaries_are_reported(state: State, retrieval: Retrieval, server: Plain, note: bytes) -> None:
    store = await new_store(state)
    await add(state, store, ["annual leave"])
    await Indexing(state).build(store, OWNER)
    [key] = [key for key in chunk_keys(server) if key.endswith(b":ib")]
    [block] = server.hkeys(key)
    server.hset(key, block, note)
    assert isinstance(await _failure(results(retrieval, store, "leave")), Damaged)


async def _failure(work: Awaitable[Any]) -> Exception | None:
    try:
        await work
    except APIError as error:
        return error
    return None
