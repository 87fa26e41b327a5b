"""Vector stores with ingested files: the helpers of the official client, and searches afterwards."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from openai.types import VectorStore

    from tests.support.servers import Ours, Start

QUICK: Any = {"poll_interval_ms": 10}
LEAVE = ("leave.md", b"# Leave\n\nEvery employee has 28 days of annual leave.")
PAY = ("pay.txt", b"Salaries are paid at the end of the month.")
IMAGE = ("photo.png", b"\x89PNG\r\n\x1a\n")


@pytest.fixture
async def store(ours: Ours) -> VectorStore:
    return await ours.client.vector_stores.create(name="handbook")


async def texts(ours: Ours, store: VectorStore, query: str, **options: Any) -> list[str]:
    page = await ours.client.vector_stores.search(store.id, query=query, **options)
    return [one.content[0].text for one in page.data]


@pytest.mark.both_mounts
async def test_an_uploaded_file_is_found(ours: Ours, store: VectorStore) -> None:
    file = await ours.client.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=LEAVE, **QUICK)
    assert (file.status, file.last_error) == ("completed", None)
    found = await ours.client.vector_stores.retrieve(store.id)
    assert (found.status, found.file_counts.completed, found.file_counts.total) == ("completed", 1, 1)
    assert found.usage_bytes == file.usage_bytes > len(LEAVE[1])
    assert await texts(ours, store, "How many days of leave do I have?") == [LEAVE[1].decode()]
    content = await ours.client.vector_stores.files.content(file.id, vector_store_id=store.id)
    assert "".join(part.text or "" for part in content.data) == LEAVE[1].decode()


async def test_a_file_is_added_with_attributes_and_polled(ours: Ours, store: VectorStore) -> None:
    upload = await ours.client.files.create(file=PAY, purpose="assistants")
    options: Any = {
        "attributes": {"year": 2026},
        "chunking_strategy": {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 0}},
    }
    files = ours.client.vector_stores.files
    file = await files.create_and_poll(upload.id, vector_store_id=store.id, **options, **QUICK)
    assert file.status == "completed"
    assert await texts(ours, store, "salary", filters={"type": "eq", "key": "year", "value": 2026}) == [PAY[1].decode()]
    assert await texts(ours, store, "salary", filters={"type": "eq", "key": "year", "value": 2025}) == []
    await files.update(upload.id, vector_store_id=store.id, attributes={"year": 2025})
    assert await texts(ours, store, "salary", filters={"type": "eq", "key": "year", "value": 2025}) == [PAY[1].decode()]


async def test_a_batch_is_uploaded_and_polled(ours: Ours, store: VectorStore) -> None:
    batches = ours.client.vector_stores.file_batches
    batch = await batches.upload_and_poll(store.id, files=[LEAVE, PAY, IMAGE], **QUICK)
    assert (batch.status, batch.file_counts.completed, batch.file_counts.failed) == ("completed", 2, 1)
    [failed] = [one async for one in batches.list_files(batch.id, vector_store_id=store.id, filter="failed")]
    assert failed.last_error is not None
    assert failed.last_error.code == "unsupported_file"
    assert len(await texts(ours, store, "money")) == 2
    upload = await ours.client.files.create(file=PAY, purpose="assistants")
    again = await batches.create_and_poll(store.id, file_ids=[upload.id], **QUICK)
    assert again.file_counts.completed == 1
    assert (await ours.client.vector_stores.retrieve(store.id)).file_counts.total == 4


async def test_the_files_of_a_new_store_are_ingested(ours: Ours) -> None:
    upload = await ours.client.files.create(file=LEAVE, purpose="assistants")
    store = await ours.client.vector_stores.create(file_ids=[upload.id])
    assert (await ours.client.vector_stores.files.poll(upload.id, vector_store_id=store.id, **QUICK)).status == "completed"
    assert await texts(ours, store, "leave") == [LEAVE[1].decode()]


async def test_a_file_that_another_replica_has_ingested_is_found(start: Start) -> None:
    ours, other = start(files__ingestion_concurrency=0), start()
    store = await ours.client.vector_stores.create(name="handbook")
    await ours.client.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=LEAVE, **QUICK)
    for one in (ours, other):
        assert await texts(one, store, "leave") == [LEAVE[1].decode()]
    await other.client.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=PAY, **QUICK)
    assert len(await texts(ours, store, "leave")) == 2


async def test_the_synchronous_client_adds_and_finds_a_file(ours: Ours, tmp_path: Path) -> None:
    client, path = ours.sync_client, tmp_path / "handbook.md"
    path.write_bytes(LEAVE[1])

    def found() -> list[tuple[str, str]]:
        store = client.vector_stores.create(name="handbook")
        with path.open("rb") as stream:
            client.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=stream, **QUICK)
        page = client.vector_stores.search(store.id, query=["leave", "holidays"], max_num_results=1)
        return [(one.filename, one.content[0].text) for one in page.data]

    assert await asyncio.to_thread(found) == [("handbook.md", LEAVE[1].decode())]
