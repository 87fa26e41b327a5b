"""Workers ingest files into vector stores. Even if a worker is lost, no file is partly visible."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from responses_mw.embeddings import NoEmbedding
from responses_mw.embeddings.static import StaticEmbedder
from responses_mw.files import chunk_embedding, ingestion
from responses_mw.files.chunks import Chunking
from responses_mw.files.vector_stores import Addition
from responses_mw.jobs import ingestion as jobs
from responses_mw.jobs import queue_worker
from responses_mw.state import Missing, State, StateOptions, connect
from responses_mw.state.blocks import BlockName
from tests.chaos.ingestion import survive
from tests.support.alerts import assert_fires, scrape
from tests.support.ingestions import ALICE, AUTO, TEXT, Stores

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from responses_mw.embeddings.vector import Vector
    from tests.jobs.conftest import Run


class Embedder(StaticEmbedder):
    """An embedder that first raises the errors in `failing`, and then waits for `go`."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.failing = list[NoEmbedding]()
        self.batches = list[int]()
        self.cut = list[int]()  # sizes of the vectors of the next batches
        self.longest = 10**6
        self.refused = 0

    async def embed(self, texts: Sequence[str], caller: Any = None) -> list[Vector]:
        self.asked.set()
        await self.go.wait()
        self.batches.append(len(texts))
        if self.failing:
            raise self.failing.pop()
        if max(map(len, texts)) > self.longest:
            self.refused += 1
            raise NoEmbedding("the server answered 400", is_refusal=True)
        vectors = await super().embed(texts, caller)
        return [vector[: self.cut.pop(0)] for vector in vectors] if self.cut and len(vectors) == 1 else vectors


@pytest.fixture
def embedder() -> Embedder:
    return Embedder()


@pytest.fixture
async def state(redis_url: str) -> AsyncIterator[State]:
    state = State(connect(redis_url, timeout=20), StateOptions(owner_bytes=100_000_000))
    yield state
    await state.aclose()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_embedding, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(queue_worker, "POLL", 0.02)
    monkeypatch.setattr(jobs, "_FIRST_DELAY", 0.001)
    monkeypatch.setattr(jobs, "_MAX_DELAY", 0.001)


@pytest.fixture
def stores(state: State, embedder: Embedder) -> Stores:
    return Stores(state, embedder)


async def test_the_chunks_of_a_file_become_visible_with_their_offsets_and_vectors(
    stores: Stores, embedder: Embedder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    text = "\n\n".join(f"{TEXT} This is paragraph {number}." for number in range(400))
    file_id = await stores.upload(text.encode())
    store_id = await stores.create(file_id, chunking=Chunking(100, 20))
    async with stores.worker():
        file = await stores.ended(store_id, file_id)
    block = await stores.state.store_files.read_block(file)
    assert (file.status, file.chunks, file.size) == ("completed", len(block.texts), block.size)
    assert all(text[start:].startswith(chunk) for start, chunk in zip(block.starts, block.texts, strict=True))
    assert (block.space, len(block.vectors)) == (embedder.space, 2 * block.dimension * len(block.texts))
    assert embedder.batches[:2] == [chunk_embedding.BATCH, chunk_embedding.BATCH]
    [line] = [one.getMessage() for one in caplog.records if one.name == "responses_mw.ingestion"]
    assert line.startswith(f"ingestion of {file_id} ends outcome=completed owner=alice")
    assert f"store={store_id} attempt=1" in line
    assert f"chunks={file.chunks}" in line
    store = await stores.state.vector_stores.get(store_id, ALICE)
    assert (store.counts.completed, store.counts.total, store.size) == (1, 1, block.size)


@pytest.mark.parametrize(
    ("data", "name", "code", "reason"),
    [
        (b"\x89PNG\r\n\x1a\n123", "a.png", "unsupported_file", "image"),
        (b"PK\x03\x04 nonsense", "a.docx", "invalid_file", "malformed"),
        (b" \n", "a.txt", "invalid_file", "no text"),
    ],
)
async def test_an_unreadable_file_fails_with_a_readable_reason(
    stores: Stores, caplog: pytest.LogCaptureFixture, data: bytes, name: str, code: str, reason: str
) -> None:
    caplog.set_level(logging.INFO)
    file_id = await stores.upload(data, name)
    store_id = await stores.create(file_id)
    async with stores.worker():
        file = await stores.ended(store_id, file_id)
    assert file.status == "failed"
    assert file.error is not None
    assert file.error[0] == code
    assert reason in file.error[1]
    assert file.error[1].endswith(".")
    [record] = [one for one in caplog.records if one.name == "responses_mw.ingestion"]
    assert (record.levelname, "cause=client" in record.getMessage()) == ("INFO", True)  # nobody is alerted


async def test_failed_embeddings_are_retried_before_the_whole_file_is(stores: Stores, embedder: Embedder) -> None:
    embedder.failing = [NoEmbedding("the server is away", is_temporary=True) for _ in range(5)]
    file_id = await stores.upload()
    store_id = await stores.create(file_id)
    async with stores.worker():
        assert (await stores.ended(store_id, file_id)).status == "completed"
    assert len(embedder.batches) == 6


async def test_a_server_that_changes_the_size_of_its_vectors_does_not_damage_a_store(
    stores: Stores, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestion, "BATCH", 1)
    embedder.cut = [256, 128]
    file_id = await stores.upload(b"word " * 250)
    store_id = await stores.create(file_id, chunking=Chunking(100, 0))
    async with stores.worker():
        file = await stores.ended(store_id, file_id)
    assert (file.status, embedder.cut, len(embedder.batches)) == ("completed", [], 2 + 3)
    [block] = await stores.state.store_blocks.read_searched(store_id, [BlockName(file_id, file.block)])
    assert block is not None


async def test_a_file_fails_if_the_embeddings_server_is_down_for_too_long(
    stores: Stores, embedder: Embedder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "MAX_RETRIES", 1)
    embedder.failing = [NoEmbedding("the server is away", is_temporary=True) for _ in range(99)]
    file_id, before = await stores.upload(), scrape()
    store_id = await stores.create(file_id)
    async with stores.worker():
        file = await stores.ended(store_id, file_id)
    assert file.error == ("server_error", "The file could not be added after many retries: the server is away")
    assert "cause=server" in caplog.text
    assert f"WARNING responses_mw.jobs.ingestion: ingestion of {file_id} will be retried in 0 s: the server is away" in [
        f"{one.levelname} {one.name}: {one.getMessage()}" for one in caplog.records
    ]
    for alert in ("ResponsesIngestionRetried", "ResponsesIngestionFailed"):
        assert_fires(alert, before, scrape())


async def test_a_file_fails_if_the_embeddings_server_refuses_it(stores: Stores, embedder: Embedder) -> None:
    embedder.failing = [NoEmbedding("the server answered 400")]
    file_id = await stores.upload()
    store_id = await stores.create(file_id)
    async with stores.worker():
        file = await stores.ended(store_id, file_id)
    assert file.error is not None
    assert (file.error[0], "answered 400" in file.error[1]) == ("server_error", True)
    assert len(embedder.batches) == 1


async def test_texts_that_are_too_long_for_the_model_are_cut(stores: Stores, embedder: Embedder) -> None:
    embedder.longest = 1000
    file_id = await stores.upload((TEXT * 500).encode())
    store_id = await stores.create(file_id)
    async with stores.worker():
        file = await stores.ended(store_id, file_id)
    assert (file.status, embedder.refused) == ("completed", 2)  # only the first requests, at most 4000 and 2000 characters
    block = await stores.state.store_files.read_block(file)
    assert max(map(len, block.texts)) > 2000
    vectors = np.frombuffer(block.vectors, "<f2").reshape(len(block.texts), -1).astype(np.float32)
    embedder.longest = 10**6
    whole = np.stack(await embedder.embed(block.texts))
    assert (vectors * whole).sum(axis=1).min() > 0.95


async def test_a_file_of_another_embedding_model_fails(stores: Stores, embedder: Embedder) -> None:
    first, second = await stores.upload(), await stores.upload()
    store_id = await stores.create(first)
    async with stores.worker():
        await stores.ended(store_id, first)
        embedder.space = "another"
        await stores.service.add(store_id, ALICE, Addition(second, {}, AUTO))
        file = await stores.ended(store_id, second)
    assert file.error is not None
    assert "another embedding model" in file.error[1]


async def test_rebuilding_a_store_embeds_its_files_with_the_new_model(stores: Stores, embedder: Embedder) -> None:
    ids = [await stores.upload(), await stores.upload()]
    store_id = await stores.create(*ids)
    async with stores.worker():
        await stores.ended(store_id, ids[1])
    embedder.space = "another"
    assert await stores.service.rebuild(store_id, ALICE) == 2
    async with stores.worker():
        files = [await stores.ended(store_id, one) for one in ids]
    store = await stores.state.vector_stores.get(store_id, ALICE)
    assert (store.space, store.counts.completed, store.counts.total) == ("another", 2, 2)
    assert {(await stores.state.store_files.read_block(file)).space for file in files} == {"another"}


async def test_without_numpy_files_fail_with_the_missing_extra(state: State) -> None:
    stores = Stores(state, None)
    file_id = await stores.upload()
    store_id = await stores.create(file_id)
    async with stores.worker():
        file = await stores.ended(store_id, file_id)
    assert file.error is not None
    assert "numpy" in file.error[1]


async def test_another_worker_ingests_the_file_of_a_lost_worker(stores: Stores) -> None:
    file_id = await stores.upload()
    store_id = await stores.create(file_id)
    await stores.lose_worker()
    async with stores.worker():
        assert (await stores.ended(store_id, file_id)).status == "completed"


async def test_a_file_fails_after_it_has_lost_too_many_workers(stores: Stores) -> None:
    file_id = await stores.upload()
    store_id = await stores.create(file_id)
    for _ in range(jobs.MAX_ATTEMPTS):
        await stores.lose_worker()
    async with stores.worker():
        file = await stores.ended(store_id, file_id)
    assert file.error is not None
    assert (file.error[0], "harmful" in file.error[1]) == ("server_error", True)


async def test_a_worker_that_stops_hands_its_file_back_at_once(stores: Stores, embedder: Embedder) -> None:
    embedder.go.clear()
    file_id = await stores.upload()
    store_id = await stores.create(file_id)
    async with stores.worker(ends=False):
        await embedder.asked.wait()
    embedder.go.set()
    async with stores.worker():
        file = await stores.ended(store_id, file_id)
    assert file.status == "completed"
    assert await stores.state.client.command("KEYS", "rmw:{qf1}:attempts") == []


@pytest.mark.parametrize("change", ["store", "file", "removed", "cancelled", "again"])
async def test_an_obsolete_result_is_discarded_and_its_block_erased(stores: Stores, embedder: Embedder, change: str) -> None:
    embedder.go.clear()
    file_id, service = await stores.upload(), stores.service
    store_id = await stores.create()
    batch = await service.add_batch(store_id, ALICE, [Addition(file_id, {}, AUTO)])
    async with stores.worker():
        await embedder.asked.wait()
        if change == "store":
            await service.delete(store_id, ALICE)
        elif change == "file":
            await stores.library.delete(file_id, ALICE)
        elif change == "removed":
            await service.remove(store_id, ALICE, file_id)
        elif change == "cancelled":
            await service.cancel(store_id, ALICE, batch.id)
        else:
            await service.add(store_id, ALICE, Addition(file_id, {}, Chunking(100, 10)))
        embedder.go.set()
        if change == "again":
            assert (await stores.ended(store_id, file_id)).chunking == {"tokens": 100, "overlap": 10}
    assert len(await stores.keys("rmw:{v*")) == (change == "again")
    if change == "cancelled":
        assert (await stores.state.store_files.get(store_id, ALICE, file_id)).status == "cancelled"
    elif change != "again":
        with pytest.raises(Missing):
            await stores.state.store_files.get(store_id, ALICE, file_id)


async def test_a_worker_stops_ingesting_a_file_whose_result_is_obsolete(stores: Stores, embedder: Embedder) -> None:
    embedder.go.clear()
    file_id = await stores.upload()
    store_id = await stores.create(file_id)
    async with stores.worker(lease=0.3) as worker:
        await embedder.asked.wait()
        await stores.service.remove(store_id, ALICE, file_id)
        async with asyncio.timeout(60):
            while worker.running:
                await asyncio.sleep(0.005)
    assert embedder.batches == []


async def test_files_of_owners_over_their_quota_fail(redis_url: str, embedder: Embedder) -> None:
    state = State(connect(redis_url, timeout=20), StateOptions(owner_bytes=16_000))
    stores = Stores(state, embedder)
    file_id = await stores.upload((TEXT * 150).encode())
    store_id = await stores.create(file_id)
    async with stores.worker():
        file = await stores.ended(store_id, file_id)
    await state.aclose()
    assert file.error is not None
    assert "quota" in file.error[1].lower() or "storage" in file.error[1].lower()


async def test_malformed_entries_of_the_queue_are_removed(stores: Stores) -> None:
    client = stores.state.client
    await client.command("ZADD", "rmw:{qf1}:leases", 0, "junk", 0, "a:b:c:d")
    async with stores.worker():
        pass
    assert await stores.keys("rmw:{qf1}:leases") == []


async def test_a_file_with_too_many_chunks_fails(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingestion, "MAX_CHUNKS", 10)
    file_id = await stores.upload(TEXT.encode() * 1000)
    store_id = await stores.create(file_id, chunking=Chunking(100, 0))
    async with stores.worker():
        file = await stores.ended(store_id, file_id)
    assert file.error == ("invalid_file", "The file has more than 10 chunks. Use a chunking_strategy with larger chunks.")


async def test_the_official_client_uploads_and_polls(start: Any) -> None:
    stores = start(jobs__concurrency=0).client.vector_stores
    store = await stores.create(name="handbook")
    upload = {"vector_store_id": store.id, "poll_interval_ms": 10}
    file = await stores.files.upload_and_poll(file=("a.md", TEXT.encode()), **upload)
    failed = await stores.files.upload_and_poll(file=("a.png", b"\x89PNG\r\n\x1a\n"), **upload)
    assert (file.status, failed.status, failed.last_error.code) == ("completed", "failed", "unsupported_file")


async def test_files_survive_workers_that_are_killed_at_random_steps(run: Run, stores: Stores) -> None:
    settings = {"jobs__concurrency": 1, "jobs__lease": 2, "upstream__url": "http://127.0.0.1:9"}
    result = await survive(stores, 8, random.Random(1), lambda: run("worker", **settings).process, kills=2)
    assert result.problems == []
    assert result.statuses.total() == 8
