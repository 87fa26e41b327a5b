"""A search finds the current content of stores, even if another process has just changed it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from responses_mw.embeddings import NoEmbedding
from responses_mw.embeddings.static import StaticEmbedder
from responses_mw.errors import BadRequest, TooLarge, Unavailable, UpstreamError
from responses_mw.files import content_cache
from responses_mw.files.content_cache import ContentCache, Reservation
from responses_mw.files.filters import parse_filter
from responses_mw.files.ranking import Found, Ranking, Weights
from responses_mw.files.reranking import Reranker
from responses_mw.files.retrieval import Retrieval
from responses_mw.files.store_memory import Content
from responses_mw.files.words import count_words, encode_words
from responses_mw.state import Missing, State, connect
from responses_mw.state.blocks import StoredBlock
from responses_mw.state.files import File, new_file_id
from responses_mw.state.store_file_records import NewFile
from responses_mw.state.store_files import new_generation
from responses_mw.state.vector_stores import VectorStore, new_store_id
from tests.support.reranking import PATHS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from responses_mw.embeddings.vector import Vector

OWNER = "anonymous"
EMBEDDER = StaticEmbedder()
LEAVE = "Every employee has 28 days of annual leave."
PAY = "Salaries are paid at the end of the month."
DOG = "The office dog is called Rex."


class Failing(StaticEmbedder):
    async def embed(self, texts: Sequence[str], caller: Any = None) -> list[Vector]:
        raise NoEmbedding("the server is down")


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[State]:
    state = State(connect(redis_url, timeout=20))
    yield state
    await state.aclose()


def retrieval_of(state: State, memory_bytes: int = 10_000_000) -> Retrieval:
    return Retrieval(state, EMBEDDER, memory_bytes)


@pytest.fixture
def retrieval(state: State) -> Retrieval:
    return retrieval_of(state)


async def new_store(state: State, **members: Any) -> str:
    now = int(time.time())
    store = VectorStore(new_store_id(), "handbook", now, members.pop("active_at", now), **members)
    await state.vector_stores.create(store, OWNER)
    return store.id


async def block_of(texts: list[str], space: str = EMBEDDER.space, *, with_words: bool = True) -> StoredBlock:
    vectors = np.stack(await EMBEDDER.embed(texts)).astype("<f2")
    words = encode_words(count_words(texts)) if with_words else b""
    return StoredBlock(space, vectors.shape[1], texts, [0] * len(texts), vectors.tobytes(), words)


async def add(
    state: State, store_id: str, *texts: str, file_id: str = "", block: StoredBlock | None = None, **attributes: Any
) -> str:
    """Add a file with these chunks to a store, and return its id."""
    if not file_id:
        file = File(new_file_id(), "a.txt", "assistants", 5, int(time.time()), None, "")
        await state.files.create(file, OWNER)
        file_id = file.id
    await state.store_files.attach(store_id, OWNER, [NewFile(file_id, "a.txt", attributes, {})], new_generation())
    record = await state.store_files.get(store_id, OWNER, file_id)
    assert await state.store_files.publish(record, OWNER, block or await block_of([*texts]))
    return file_id


async def texts(retrieval: Retrieval, stores: str | list[str], *queries: str, **options: Any) -> list[str]:
    ids = [stores] if isinstance(stores, str) else stores
    return [one.text for one in await retrieval.search(ids, OWNER, queries, **options)]


async def test_the_best_chunk_is_the_first_result(state: State, retrieval: Retrieval) -> None:
    store = await new_store(state)
    file = await add(state, store, PAY, LEAVE, DOG, year=2026)
    first, *others = await retrieval.search([store], OWNER, ["How much annual leave do I have?"])
    assert first == Found(file, "a.txt", {"year": 2026}, first.score, LEAVE)
    assert {one.text for one in others} == {PAY, DOG}
    assert 1 >= first.score > others[0].score >= others[1].score >= 0


async def test_an_empty_store_has_no_results(state: State, retrieval: Retrieval) -> None:
    assert await texts(retrieval, await new_store(state), "leave") == []


@pytest.mark.parametrize("with_words", [True, False])
async def test_chunks_are_found_by_words_only(state: State, retrieval: Retrieval, with_words: bool) -> None:
    store = await new_store(state)
    await add(state, store, block=await block_of([PAY, LEAVE, DOG], with_words=with_words))
    assert await texts(retrieval, store, "rex", ranking=Ranking(weights=Weights(0, 1))) == [DOG]


async def test_several_stores_and_queries_are_searched_together(state: State, retrieval: Retrieval) -> None:
    stores = [await new_store(state) for _ in range(3)]
    for store, text in zip(stores, (PAY, LEAVE, DOG), strict=True):
        await add(state, store, text)
    assert set(await texts(retrieval, stores, "annual leave", "office dog", maximum=2)) == {LEAVE, DOG}
    assert await texts(retrieval, [*stores, *stores], "salaries", maximum=1) == [PAY]


async def test_a_file_in_several_stores_is_found_once(state: State, retrieval: Retrieval) -> None:
    stores = [await new_store(state) for _ in range(2)]
    file = await add(state, stores[0], LEAVE)
    await add(state, stores[1], LEAVE, file_id=file)
    await add(state, stores[1], DOG)
    assert await texts(retrieval, stores, "annual leave", maximum=2) == [LEAVE, DOG]


async def test_only_files_whose_attributes_pass_the_filter_are_found(state: State, retrieval: Retrieval) -> None:
    store = await new_store(state)
    await add(state, store, LEAVE, year=2025)
    file = await add(state, store, DOG, year=2026)
    filters = parse_filter({"type": "gte", "key": "year", "value": 2026}, "filters")
    assert await texts(retrieval, store, "annual leave", filters=filters) == [DOG]
    await state.store_files.describe(store, OWNER, file, {"year": 2024})
    assert await texts(retrieval, store, "annual leave", filters=filters) == []


async def test_results_below_the_threshold_are_omitted(state: State, retrieval: Retrieval) -> None:
    store = await new_store(state)
    await add(state, store, PAY, LEAVE, DOG)
    first, second, _ = await retrieval.search([store], OWNER, ["annual leave"])
    between = Ranking(threshold=(first.score + second.score) / 2)
    assert await texts(retrieval, store, "annual leave", ranking=between) == [LEAVE]


async def test_the_next_search_sees_changes_by_another_process(state: State, retrieval: Retrieval, redis_url: str) -> None:
    store = await new_store(state)
    kept, removed = await add(state, store, LEAVE), await add(state, store, DOG)
    assert len(await texts(retrieval, store, "dog")) == 2
    other = State(connect(redis_url, timeout=20))
    await other.store_files.detach(store, OWNER, [await other.store_files.get(store, OWNER, removed)])
    assert await texts(retrieval, store, "dog") == [LEAVE]
    await add(other, store, PAY, file_id=kept)
    assert await texts(retrieval, store, "leave") == [PAY]
    await other.vector_stores.delete(store, OWNER)
    with pytest.raises(Missing):
        await texts(retrieval, store, "leave")
    await other.aclose()


async def content_of(state: State, retrieval: Retrieval, store: str) -> Content:
    async with retrieval.memory.using([await state.vector_stores.get(store, OWNER)], OWNER) as [content]:
        return content


async def test_a_block_is_read_once(state: State, retrieval: Retrieval) -> None:
    store = await new_store(state)
    await add(state, store, LEAVE, DOG)
    [first] = await texts(retrieval, store, "dog", maximum=1)
    content = await content_of(state, retrieval, store)
    await add(state, store, PAY)
    await texts(retrieval, store, "dog")
    again = await content_of(state, retrieval, store)
    assert first == DOG
    assert content.blocks.items() < again.blocks.items()
    assert all(again.blocks[name] is block for name, block in content.blocks.items())


async def test_a_chunk_that_is_erased_during_the_search_is_omitted(state: State, retrieval: Retrieval, redis_url: str) -> None:
    store = await new_store(state)
    file = await add(state, store, LEAVE)
    await texts(retrieval, store, "leave")
    record = await state.store_files.get(store, OWNER, file)
    await state.store_blocks.erase(store, [(file, record.block)])
    assert await texts(retrieval, store, "leave") == []


async def test_a_later_search_reads_a_block_that_was_missing(state: State, retrieval: Retrieval) -> None:
    store = await new_store(state)
    file = await add(state, store, LEAVE)
    await add(state, store, DOG)
    record = await state.store_files.get(store, OWNER, file)
    block = await state.store_files.read_block(record)
    await state.store_blocks.erase(store, [(file, record.block)])
    assert await texts(retrieval, store, "leave") == [DOG]
    await state.store_blocks.write(store, file, record.block, block)
    assert await texts(retrieval, store, "leave") == [LEAVE, DOG]


async def test_the_content_of_deleted_files_and_stores_is_removed_from_memory(state: State, retrieval: Retrieval) -> None:
    stores = [await new_store(state) for _ in range(3)]
    files = [await add(state, store, LEAVE) for store in stores]
    await texts(retrieval, stores, "leave")
    full = retrieval.memory.nbytes
    await state.store_files.describe(stores[0], OWNER, files[0], {"a": 1})
    await state.store_files.detach(stores[1], OWNER, [await state.store_files.get(stores[1], OWNER, files[1])])
    await state.vector_stores.delete(stores[2], OWNER)
    await retrieval.memory.remove_deleted()
    assert retrieval.memory.nbytes == full // 3
    assert await texts(retrieval, stores[:2], "leave") == [LEAVE]


async def test_the_least_recently_searched_store_is_removed_from_memory(state: State) -> None:
    stores = [await new_store(state) for _ in range(3)]
    for store in stores:
        await add(state, store, LEAVE)
    everything = retrieval_of(state)
    await texts(everything, stores, "leave")
    retrieval = retrieval_of(state, everything.memory.nbytes * 2 // 3)
    for store in (stores[0], stores[1], stores[0], stores[2]):
        assert await texts(retrieval, store, "leave") == [LEAVE]
    assert retrieval.memory.stores == [stores[0], stores[2]]


async def test_a_store_that_needs_too_much_memory_is_refused(state: State) -> None:
    store = await new_store(state)
    await add(state, store, LEAVE)
    for memory_bytes in (100, 2000):
        with pytest.raises(TooLarge, match=r"files\.search_memory_bytes"):
            await texts(retrieval_of(state, memory_bytes), store, "leave")


async def test_stores_that_need_too_much_memory_together_are_refused(state: State) -> None:
    stores = [await new_store(state) for _ in range(3)]
    for store in stores:
        await add(state, store, LEAVE)
    everything = retrieval_of(state)
    await texts(everything, stores, "leave")
    retrieval = retrieval_of(state, everything.memory.nbytes * 2 // 3)
    assert await texts(retrieval, stores[:2], "leave") == [LEAVE, LEAVE]
    with pytest.raises(TooLarge, match="fewer stores at a time"):
        await texts(retrieval, stores, "leave")


async def test_concurrent_searches_stay_within_the_memory(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each store fits, but not two of them."""
    stores = [await new_store(state) for _ in range(6)]
    for store in stores:
        for _ in range(5):
            await add(state, store, LEAVE, DOG, PAY)
    everything = retrieval_of(state)
    await texts(everything, stores, "leave")
    retrieval, most = retrieval_of(state, everything.memory.nbytes * 3 // 2 // len(stores)), 0
    grow = Reservation.grow

    async def growing(self: Reservation[Content], size: int) -> None:
        nonlocal most
        await grow(self, size)
        most = max(most, retrieval.memory.nbytes)

    monkeypatch.setattr(Reservation, "grow", growing)
    for _ in range(3):
        found = await asyncio.gather(*(texts(retrieval, store, "leave", maximum=1) for store in stores))
        assert found == [[LEAVE]] * len(stores)
    assert 0 < most <= retrieval.memory.max_bytes
    assert retrieval.memory.nbytes <= retrieval.memory.max_bytes


async def test_a_search_waits_for_the_memory_of_others_and_gets_a_503_if_that_takes_too_long(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = [await new_store(state) for _ in range(2)]
    for store in (one, other):
        await add(state, store, LEAVE)
    everything = retrieval_of(state)
    await texts(everything, one, "leave")
    memory = retrieval_of(state, everything.memory.nbytes * 3 // 2).memory
    first, second = [await state.vector_stores.get(store, OWNER) for store in (one, other)]
    waiting = asyncio.Event()
    wait_for_room = ContentCache.wait_for_room

    async def wait(self: ContentCache[Content], size: int) -> None:
        waiting.set()
        await wait_for_room(self, size)

    monkeypatch.setattr(ContentCache, "wait_for_room", wait)

    async def search() -> int:
        async with memory.using([second], OWNER) as [content]:
            return len(content.files)

    async with memory.using([first], OWNER):
        searching = asyncio.create_task(search())
        await waiting.wait()
    assert await searching == 1
    monkeypatch.setattr(content_cache, "WAITING_SECONDS", 0.01)
    async with memory.using([first], OWNER):
        with pytest.raises(Unavailable, match=r"files\.search_memory_bytes"):
            await search()
    assert await search() == 1
    assert memory.nbytes <= memory.max_bytes


async def test_the_attributes_of_files_count_as_memory(state: State, retrieval: Retrieval) -> None:
    store = await new_store(state)
    attributes: dict[str, Any] = {f"key {number}": "x" * 500 for number in range(16)}
    await add(state, store, LEAVE, **attributes)
    await texts(retrieval, store, "leave")
    assert retrieval.memory.nbytes > 16 * 500


async def test_a_store_of_another_model_or_dimension_is_refused(state: State, retrieval: Retrieval) -> None:
    right = await block_of([LEAVE])
    for other in (
        StoredBlock("other", right.dimension, right.texts, right.starts, right.vectors),
        StoredBlock(right.space, 128, right.texts, right.starts, right.vectors[:256]),
    ):
        store = await new_store(state)
        await add(state, store, block=other)
        with pytest.raises(BadRequest, match="new vector store"):
            await texts(retrieval, store, "leave")


async def test_a_foreign_or_expired_store_is_refused(state: State, retrieval: Retrieval) -> None:
    store, expired = await new_store(state), await new_store(state, active_at=1, days=1)
    with pytest.raises(Missing):
        await retrieval.search([store], "other", ["leave"])
    with pytest.raises(BadRequest, match="has expired"):
        await texts(retrieval, expired, "leave")


async def test_queries_that_cannot_be_embedded_are_refused(
    state: State, retrieval: Retrieval, caplog: pytest.LogCaptureFixture
) -> None:
    store = await new_store(state)
    await add(state, store, LEAVE)
    with pytest.raises(BadRequest, match="must not be blank"):
        await texts(retrieval, store, "leave", " ")
    with pytest.raises(Unavailable, match="could not be embedded: the server is down"):
        await texts(Retrieval(state, Failing(), 10_000_000), store, "leave")
    assert "vector stores cannot be searched: the server is down" in caplog.text


async def test_a_file_with_a_damaged_block_is_not_searched_and_gets_the_status_failed(
    state: State, retrieval: Retrieval
) -> None:
    good = await block_of([LEAVE, DOG])
    nan = np.full(512, np.nan, "<f2").tobytes()
    store = await new_store(state)
    await add(state, store, LEAVE)
    for damaged in (
        StoredBlock(good.space, 256, good.texts, good.starts, nan, good.words),
        StoredBlock(good.space, 256, good.texts, good.starts, good.vectors, good.words[:-1]),
    ):
        file = await add(state, store, block=damaged)
        for _ in range(2):
            assert await texts(retrieval, store, "leave") == [LEAVE]
        await _assert_left_out(state, store, file)


@pytest.mark.parametrize("texts_only", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
async def test_a_file_whose_block_is_damaged_in_redis_is_not_searched(
    state: State, retrieval: Retrieval, *, is_known: bool, texts_only: bool
) -> None:
    store = await new_store(state)
    file = await add(state, store, DOG)
    await add(state, store, LEAVE)
    if is_known:
        assert sorted(await texts(retrieval, store, "leave")) == sorted([DOG, LEAVE])
    block = (await state.store_files.get(store, OWNER, file)).block
    key = f"rmw:{{v{store[3:]}}}:b:{file[5:]}:{block}"
    if texts_only:
        await state.client.command("LSET", key, -1, b"x")
    else:
        await state.client.command("SET", key, b"x")
    assert await texts(retrieval, store, "leave") == [LEAVE]
    await _assert_left_out(state, store, file)
    assert await texts(retrieval, store, "leave") == [LEAVE]


async def _assert_left_out(state: State, store: str, file: str) -> None:
    record = await state.store_files.get(store, OWNER, file)
    assert (record.status, record.block) == ("failed", "")
    assert record.error is not None


async def test_a_block_of_another_dimension_is_not_damaged(state: State, retrieval: Retrieval) -> None:
    """The store is rebuilt with another model after the search has read its record."""
    store = await new_store(state)
    await add(state, store, LEAVE)
    before = await state.vector_stores.get(store, OWNER)
    files = [file async for file in state.store_files.each(store, OWNER)]
    await state.store_files.begin_again(store, OWNER, files, new_generation())
    file = await state.store_files.get(store, OWNER, files[0].id)
    assert await state.store_files.publish(file, OWNER, StoredBlock("other", 3, ["a"], [0], bytes(6)))
    async with retrieval.memory.using([before], OWNER) as [content]:
        assert not content.index.blocks
    assert (await state.store_files.get(store, OWNER, file.id)).status == "completed"


async def test_results_are_reranked_if_a_reranking_model_is_configured(state: State) -> None:
    store = await new_store(state)
    await add(state, store, *(f"the office dog {number}" for number in range(60)), "leave")

    async def post(path: str, body: dict[str, Any], caller: Any) -> Any:
        assert len(body["documents"]) == 50
        return PATHS[path](body)

    retrieval = Retrieval(state, EMBEDDER, 10_000_000, Reranker(post, "m", timeout=20))
    found = await retrieval.search([store], OWNER, ["office dog 7", "office dog 8"], maximum=3)
    assert {one.text for one in found[:2]} == {"the office dog 7", "the office dog 8"}
    assert [one.score for one in found] == pytest.approx([1, 1, 2 / 3])
    strict = Ranking(threshold=0.9)
    assert len(await texts(retrieval, store, "office dog 7", ranking=strict)) == 1
    assert await texts(retrieval, store, "leave", maximum=1, ranking=Ranking(rerank=False)) == ["leave"]


async def test_a_failed_reranking_fails_the_search(state: State) -> None:
    store = await new_store(state)
    await add(state, store, LEAVE)

    async def post(path: str, body: dict[str, Any], caller: Any) -> Any:
        error = UpstreamError("down")
        error.upstream_status = 500
        raise error

    retrieval = Retrieval(state, EMBEDDER, 10_000_000, Reranker(post, "m", timeout=20))
    with pytest.raises(Unavailable, match="could not be reranked: the reranking server answered 500"):
        await texts(retrieval, store, "leave", "pay")
