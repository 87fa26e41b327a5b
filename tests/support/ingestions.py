"""Vector stores without HTTP: uploads, stores, and workers in this process that fill them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from responses_mw.files import FileLibrary
from responses_mw.files.chunks import Chunking
from responses_mw.files.extraction import Extractor
from responses_mw.files.indexing import Indexing
from responses_mw.files.ingestion import Ingestion
from responses_mw.files.vector_stores import Addition, VectorStores
from responses_mw.jobs import IngestionWorker
from responses_mw.state.queue import IngestionJob

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from responses_mw.embeddings import Embedder
    from responses_mw.state import State
    from responses_mw.state.store_file_records import StoreFile

ALICE = "alice"
LEASE = 60.0
AUTO = Chunking()
TEXT = "Every employee has 28 days of annual leave."


class Stores:
    """The stores of one owner, and workers that fill them."""

    def __init__(self, state: State, embedder: Embedder | None) -> None:
        self.state = state
        self.library = FileLibrary(state.files, state.store_files, None, 10_000_000)
        self.service = VectorStores(state, self._enqueue)
        self.ingestion = Ingestion(self.library, Extractor(), embedder)

    async def _enqueue(self, store_id: str, owner: str, file_ids: Sequence[str], generation: str) -> None:
        await self.state.ingestion_queue.enqueue([IngestionJob(owner, store_id, one, generation) for one in file_ids])

    async def upload(self, data: bytes = TEXT.encode(), name: str = "a.txt") -> str:
        async def chunks() -> AsyncIterator[bytes]:
            yield data

        uploaded = await self.library.upload(chunks(), ALICE)
        return (await self.library.create(uploaded, name, "assistants", None, ALICE)).id

    async def create(self, *file_ids: str, chunking: Chunking = AUTO) -> str:
        files = [Addition(one, {}, chunking) for one in file_ids]
        return (await self.service.create(ALICE, "handbook", "", {}, None, files)).id

    async def ended(self, store_id: str, file_id: str) -> StoreFile:
        async with asyncio.timeout(60):
            while (file := await self.state.store_files.get(store_id, ALICE, file_id)).status == "in_progress":
                await asyncio.sleep(0.005)
        return file

    @asynccontextmanager
    async def worker(self, *, lease: float = LEASE, ends: bool = True) -> AsyncIterator[IngestionWorker]:
        """Run a worker until all jobs have ended."""
        worker = IngestionWorker(self.ingestion, Indexing(self.state), self.state, concurrency=2, lease=lease)
        task = asyncio.create_task(worker.run())
        yield worker
        if ends:
            await self.assert_queue_is_empty()
        worker.stop()
        await asyncio.wait_for(task, 60)

    async def lose_worker(self) -> None:
        """Claim a job and count the attempt, as a worker does that is killed then. Let its lease expire."""
        queue = self.state.ingestion_queue
        job = await queue.claim(LEASE, sweep=True)
        assert job is not None
        await queue.count_attempt(job)
        await queue.renew([job], 0.0)

    async def keys(self, pattern: str) -> list[bytes]:
        return sorted(await self.state.client.command("KEYS", pattern))

    async def assert_queue_is_empty(self) -> None:
        async with asyncio.timeout(60):
            while any(not key.endswith((b":clock", b":owners")) for key in await self.keys("rmw:{qf1}:*")):
                await asyncio.sleep(0.005)
