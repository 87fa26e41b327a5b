"""Stores expire, and interrupted changes are completed later."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from responses_mw.errors import NotSupported, RateLimited
from responses_mw.file_parts import create_stores
from responses_mw.files import FileLibrary, vector_stores
from responses_mw.files.chunks import Chunking
from responses_mw.files.indexing import Indexing
from responses_mw.files.vector_stores import Addition, VectorStores
from responses_mw.state import Missing, State, StateUnavailable, connect
from responses_mw.state.blocks import StoredBlock
from responses_mw.state.files import File, new_file_id
from responses_mw.state.store_erasures import Due
from responses_mw.state.store_keys import Range

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from responses_mw.state.store_file_records import StoreFile
    from responses_mw.state.vector_stores import VectorStore

OWNER = "anonymous"
BLOCK = StoredBlock("builtin", 2, ["a b c", "c d"], [0, 4], bytes(8))


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[State]:
    state = State(connect(redis_url, timeout=10))
    yield state
    await state.aclose()


class Queued:
    """Records the queued jobs. Raises `error` instead, if it is set."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, str, str, str]] = []
        self.error: Exception | None = None

    async def __call__(self, store_id: str, owner: str, file_ids: Sequence[str], generation: str) -> None:
        if self.error is not None:
            raise self.error
        self.jobs += [(store_id, owner, file_id, generation) for file_id in file_ids]


@pytest.fixture
def queued() -> Queued:
    return Queued()


@pytest.fixture
def stores(state: State, queued: Queued) -> VectorStores:
    return VectorStores(state, queued)


async def create(
    stores: VectorStores, state: State, files: int = 1, days: int | None = None
) -> tuple[VectorStore, list[StoreFile]]:
    added = list[Addition]()
    for _ in range(files):
        file = File(new_file_id(), "a.txt", "assistants", 5, int(time.time()), None, "")
        await state.files.create(file, OWNER)
        added.append(Addition(file.id, {}, Chunking()))
    store = await stores.create(OWNER, "handbook", "", {}, days, added)
    return store, [await state.store_files.get(store.id, OWNER, one.file_id) for one in added]


async def all_due(state: State) -> None:
    """Make all checks due now."""
    members = await state.client.command("ZRANGE", "rmw:{stores}:due", 0, -1)
    await state.store_erasures.schedule([Due.of(member.decode()) for member in members], 0)


async def scheduled(state: State) -> int:
    return int(await state.client.command("ZCARD", "rmw:{stores}:due"))


async def keys(state: State, pattern: str) -> int:
    return len(await state.client.command("KEYS", pattern))


async def test_added_files_are_queued(stores: VectorStores, state: State, queued: Queued) -> None:
    store, files = await create(stores, state, files=2)
    assert queued.jobs == [(store.id, OWNER, file.id, file.generation) for file in files]


async def test_a_file_whose_job_was_lost_is_queued_again_until_it_is_done(
    stores: VectorStores, state: State, queued: Queued
) -> None:
    queued.error = StateUnavailable("it is slow")
    store, [file] = await create(stores, state)
    queued.error = None
    assert await stores.do_due() == 0
    await all_due(state)
    assert await stores.do_due() == 1
    assert queued.jobs == [(store.id, OWNER, file.id, file.generation)]
    assert await stores.do_due() == 0
    await state.store_files.publish(file, OWNER, BLOCK)
    assert await scheduled(state) == 0


@pytest.mark.parametrize("end", ["fail", "detach", "add"])
async def test_a_file_that_is_not_waiting_is_not_queued_again(
    stores: VectorStores, state: State, queued: Queued, end: str
) -> None:
    store, [file] = await create(stores, state)
    if end == "fail":
        await state.store_files.fail(file, OWNER, "server_error", "x")
    elif end == "detach":
        await state.store_files.detach(store.id, OWNER, [file])
    else:
        await stores.add(store.id, OWNER, Addition(file.id, {}, Chunking()))
    queued.jobs.clear()
    await all_due(state)
    await stores.do_due()
    assert len(queued.jobs) == (end == "add")
    assert await scheduled(state) == (end == "add")


async def test_malformed_checks_do_not_prevent_others(stores: VectorStores, state: State) -> None:
    name = "a" * 25
    for member in ("x", ":::::", f"{OWNER}:short:::", f"{OWNER}:{name}::b1:", "a}{b:" + f"{name}:::", b"\xff"):
        await state.client.command("ZADD", "rmw:{stores}:due", 1, member)
    store, [file] = await create(stores, state, days=1)
    await state.store_erasures.schedule([Due(OWNER, store.id, file.id, "b1")], 2)
    for _ in range(2):
        await stores.do_due()
    assert await state.client.command("ZCOUNT", "rmw:{stores}:due", "-inf", int(time.time())) == 0
    assert await scheduled(state) == 6 + 2  # the store and its file


async def test_a_block_without_a_record_is_erased(stores: VectorStores, state: State) -> None:
    store, [file] = await create(stores, state)
    await state.store_erasures.schedule_new_block(store.id, OWNER, file.id, "b1")  # as if a worker had died while publishing
    await state.client.command("RPUSH", f"rmw:{{v{store.id[3:]}}}:b:{file.id[5:]}:b1", "x")
    await all_due(state)
    await stores.do_due()
    assert await keys(state, "rmw:{v*") == 0


async def test_a_block_with_a_record_is_kept(stores: VectorStores, state: State) -> None:
    store, [file] = await create(stores, state)
    await state.store_files.publish(file, OWNER, BLOCK)
    file = await state.store_files.get(store.id, OWNER, file.id)
    await state.store_erasures.schedule_blocks(store.id, OWNER, [(file.id, file.block)])  # then the process has died
    await all_due(state)
    await stores.do_due()
    assert await keys(state, "rmw:{v*") == 1
    assert await scheduled(state) == 0


async def test_an_expired_store_keeps_only_its_record_for_a_month(stores: VectorStores, state: State) -> None:
    store, [file] = await create(stores, state, days=1)
    await state.store_files.publish(file, OWNER, BLOCK)
    await all_due(state)
    await stores.do_due()
    assert (await stores.records.get(store.id, OWNER)).counts.completed == 1
    assert await scheduled(state) == 1
    await state.client.command("HSET", f"rmw:{{f{OWNER}}}:vs:{store.id[3:]}", "active", int(time.time()) - 25 * 3600)
    await all_due(state)
    await stores.do_due()
    found = await stores.records.get(store.id, OWNER)
    assert (found.is_expired, found.counts.total, found.size) == (True, 0, 0)
    assert await keys(state, "rmw:{v*") == 0
    assert await scheduled(state) == 1
    await all_due(state)
    await stores.do_due()
    assert (await stores.records.get(store.id, OWNER)).is_expired
    await state.client.command("HSET", f"rmw:{{f{OWNER}}}:vs:{store.id[3:]}", "active", int(time.time()) - 31 * 24 * 3600)
    await all_due(state)
    await stores.do_due()
    assert await keys(state, "rmw:{f*}:vs*") + await scheduled(state) == 0


async def test_an_interrupted_deletion_is_completed(stores: VectorStores, state: State) -> None:
    store, [file, _] = await create(stores, state, files=2)
    await state.store_files.publish(file, OWNER, BLOCK)
    await state.store_erasures.schedule([Due(OWNER, store.id)], 0)
    await state.vector_stores.delete(store.id, OWNER)  # then the process has died
    await all_due(state)
    await stores.do_due()
    assert await keys(state, "rmw:{v*") + await keys(state, "rmw:{f*}:vs*") + await keys(state, "rmw:{f*}:of:*") == 0
    await all_due(state)
    await stores.do_due()
    assert await scheduled(state) == 0


async def test_other_stores_are_checked_despite_a_damaged_record(stores: VectorStores, state: State, queued: Queued) -> None:
    store, [one, two] = await create(stores, state, files=2)
    queued.jobs.clear()
    await state.client.command("SET", f"rmw:{{f{OWNER}}}:vs:{store.id[3:]}:f:{one.id[5:]}", "x")
    await all_due(state)
    await stores.do_due()
    assert [file_id for _, _, file_id, _ in queued.jobs] == [two.id]


async def test_the_text_of_a_file_is_returned_without_overlaps(stores: VectorStores, state: State) -> None:
    store, [file] = await create(stores, state)
    assert await stores.text(store.id, OWNER, file.id) == []
    await state.store_files.publish(file, OWNER, BLOCK)
    assert await stores.text(store.id, OWNER, file.id) == ["a b ", "c d"]


async def test_files_cannot_be_added_to_a_deleted_store(stores: VectorStores, state: State, queued: Queued) -> None:
    store, [file] = await create(stores, state)
    await stores.delete(store.id, OWNER)
    queued.jobs.clear()
    with pytest.raises(Missing, match=store.id):
        await stores.add(store.id, OWNER, Addition(file.id, {}, Chunking()))
    assert queued.jobs == []


async def test_rebuilding_a_store_changes_its_embedding_model(stores: VectorStores, state: State, queued: Queued) -> None:
    store, files = await create(stores, state, files=2)
    await state.store_files.publish(files[0], OWNER, BLOCK)
    queued.jobs.clear()
    assert await stores.rebuild(store.id, OWNER) == 2
    found = await stores.records.get(store.id, OWNER)
    assert (found.space, found.dimension, found.size, found.counts.in_progress) == ("", 0, 0, 2)
    assert await keys(state, "rmw:{v*") == 0
    assert not await state.store_files.publish(files[1], OWNER, BLOCK)  # the block of the old model
    for file in [await state.store_files.get(store.id, OWNER, one.id) for one in files]:
        assert (store.id, OWNER, file.id, file.generation) in queued.jobs
        assert await state.store_files.publish(file, OWNER, StoredBlock("server", 3, ["a"], [0], bytes(6)))
    assert (await stores.records.get(store.id, OWNER)).space == "server"
    await all_due(state)
    await stores.do_due()
    assert await scheduled(state) == 0


async def test_an_expired_file_is_removed_from_its_stores(stores: VectorStores, state: State) -> None:
    store, [file] = await create(stores, state)
    await state.store_files.publish(file, OWNER, BLOCK)
    library = FileLibrary(state.files, state.store_files, None, 1024)
    await state.files.delete(file.id, OWNER)  # then the process has died, or the record has expired
    await state.files.schedule(file.id, OWNER, 0)
    await library.erase_due()
    assert (await stores.records.get(store.id, OWNER)).counts.total == 0
    assert await keys(state, "rmw:{v*") == 0


async def test_a_damaged_store_can_be_deleted(stores: VectorStores, state: State) -> None:
    for damage in (("HSET", "metadata", "{"), ("SET", "x")):
        store, [file] = await create(stores, state)
        await state.store_files.publish(file, OWNER, BLOCK)
        command, *words = damage
        await state.client.command(command, f"rmw:{{f{OWNER}}}:vs:{store.id[3:]}", *words)
        await stores.delete(store.id, OWNER)
        assert await keys(state, "rmw:{v*") + await keys(state, "rmw:{f*}:vs*") == 0


async def test_an_index_needs_a_search_module(stores: VectorStores, state: State) -> None:
    store, _ = await create(stores, state)
    assert not await state.chunk_index.is_supported()
    with pytest.raises(NotSupported, match="no search module"):
        await Indexing(state).build(store.id, OWNER)


async def test_an_owner_with_too_many_waiting_files_cannot_add_more(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_stores, "MAX_WAITING", 2)
    stores = create_stores(state)
    store, [file] = await create(stores, state)
    await stores.add(store.id, OWNER, Addition(file.id, {}, Chunking()))  # the old job is dropped only when it is claimed
    before, again = await stores.records.get(store.id, OWNER), Addition(file.id, {}, Chunking())
    for call in (
        stores.add(store.id, OWNER, again),
        stores.add_batch(store.id, OWNER, [again]),
        stores.create(OWNER, "another", "", {}, None, [again]),
    ):
        with pytest.raises(RateLimited, match="would wait to be added"):
            await call
    assert (await stores.records.page(OWNER, Range())).stores == [before]
    job = await state.ingestion_queue.claim(60, sweep=False)
    assert job is not None
    await state.ingestion_queue.drop(job)
    await stores.add(store.id, OWNER, Addition(file.id, {}, Chunking()))
