"""Add files to vector stores, as jobs of a queue.

The file's record is authoritative. The queue only determines which worker ingests the file. A worker publishes its result for a
generation of the file (see `state/store_files.py`), so two workers with the same job do no harm. The result becomes visible
atomically.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..embeddings import NoEmbedding
from ..errors import Unavailable
from ..files.ingestion import Ingestion, IngestionFailed, failure_of
from ..state import Damaged, State, StateFull, StateUnavailable
from ..state.queue import IngestionJob
from ..state.store_file_records import StoreFile
from ..telemetry.context import WarningLimit
from ..telemetry.ingestions import IngestionReport, report_ingestion
from .queue_worker import QueueWorker, StopReason

if TYPE_CHECKING:
    from ..files.indexing import Indexing

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 10
"""Number of lost workers after which a file fails, because it may be the file that crashes them.

That is unlikely, as each file is parsed in a process of its own. If workers are killed every second, some files lose three.
"""
MAX_RETRIES = 20
"""Maximum number of retries while the embeddings server, the storage or Redis is unavailable. They take about ten minutes."""
_FIRST_DELAY, _MAX_DELAY = 1.0, 30.0  # seconds until a retry


class ClaimedFile:
    """A file that this worker adds to a vector store."""

    can_be_handed_back = True

    def __init__(self, job: IngestionJob, renewed: float) -> None:
        self.job = job
        self.name = job.name
        self.renewed = renewed
        self.stopped: StopReason | None = None
        self._timeout: asyncio.Timeout | None = None  # expires if the job is stopped while it runs

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raise TimeoutError in the `with` block as soon as the job is stopped."""
        if self.stopped:
            raise TimeoutError
        self._timeout = asyncio.timeout(None)
        try:
            async with self._timeout:
                yield
        finally:
            self._timeout = None

    def stop(self, why: StopReason) -> None:
        if self.stopped is None:
            self.stopped = why
            if self._timeout is not None:
                self._timeout.reschedule(0.0)


class IngestionWorker(QueueWorker[ClaimedFile]):
    """Adds up to `concurrency` files to vector stores at a time."""

    jobs = "files for vector stores"

    def __init__(
        self, ingestion: Ingestion, indexing: Indexing | None, state: State, *, concurrency: int, lease: float
    ) -> None:
        """`indexing` is None if numpy is not installed."""
        super().__init__(state.ingestion_queue, state.wakeups, concurrency=concurrency, lease=lease, drain_timeout=lease)
        self._ingestion = ingestion
        self._indexing = indexing
        self._state = state
        self._files = state.store_files
        self._ingestions = state.ingestion_queue
        self._retry_warnings = WarningLimit()

    async def _work(self, job: str, *, was_waiting: bool) -> None:
        """Add the file to its store, and log errors. After most errors, a worker claims it again when its lease expires."""
        try:
            await self._take(job)
        except Damaged as error:
            logger.warning("removing %.200r from the queue: %s", job, error.message)
            await self._ingestions.drop(job)
        except StateUnavailable as error:
            logger.warning("cannot ingest %.200r, will retry when its lease expires: %s", job, error.message)
        except Exception:
            logger.exception("the ingestion of %.200r failed", job)

    async def _take(self, name: str) -> None:
        began = asyncio.get_running_loop().time()
        file = await self._get_pending(name)
        if file is None:  # it was removed, added again or cancelled, or its worker was lost after it had published the result
            await self._ingestions.drop(name)
            return
        claimed, attempt = ClaimedFile(IngestionJob.of(name), began), await self._ingestions.count_attempt(name)
        with self._hold(claimed), report_ingestion(file.id, file.store_id, claimed.job.owner, attempt) as report:
            if attempt > MAX_ATTEMPTS:
                message = f"The server stopped {MAX_ATTEMPTS} times while it read the file, which may be harmful."
                await self._fail(claimed, file, IngestionFailed("server_error", message, "server"), report)
            else:
                await self._ingest(claimed, file, report)

    async def _get_pending(self, name: str) -> StoreFile | None:
        """Return the record of the file if it still waits for the result of the job."""
        try:
            job = IngestionJob.of(name)
        except ValueError:
            return None
        return await self._files.get_pending(job.store_id, job.owner, job.file_id, job.generation)

    async def _ingest(self, claimed: ClaimedFile, file: StoreFile, report: IngestionReport) -> None:
        try:
            async with claimed.running():
                await self._publish(claimed, file, report)
        except TimeoutError:
            if claimed.stopped is None:
                raise
            await self._hand_back(claimed, report)
        except Exception as error:
            if (failure := failure_of(error)) is not None:
                await self._fail(claimed, file, failure, report)
            elif isinstance(error, NoEmbedding | Unavailable):
                await self._retry(claimed, file, error, report)
            else:
                logger.exception("the ingestion of %s failed", file.id)
                unexpected = IngestionFailed("server_error", "The server failed while it added the file.", "server")
                await self._fail(claimed, file, unexpected, report)
        else:
            await self._ingestions.drop(claimed.name)

    async def _publish(self, claimed: ClaimedFile, file: StoreFile, report: IngestionReport) -> None:
        block = await self._ingestion.ingest(file, claimed.job.owner)
        if await self._state.nearly_full():
            raise StateFull("its memory is nearly full")
        is_wanted = await self._files.publish(file, claimed.job.owner, block)
        if is_wanted and self._indexing is not None:
            await self._indexing.add(file.store_id, claimed.job.owner, file.id)
        report.request.outcome = "completed" if is_wanted else "cancelled"
        report.chunks, report.bytes = len(block.texts), block.size

    async def _fail(self, claimed: ClaimedFile, file: StoreFile, failure: IngestionFailed, report: IngestionReport) -> None:
        if await self._files.fail(file, claimed.job.owner, failure.code, str(failure)):
            report.fail(failure.code, str(failure), failure.cause)
        else:
            report.request.outcome = "cancelled"
        await self._ingestions.drop(claimed.name)

    async def _retry(self, claimed: ClaimedFile, file: StoreFile, error: Exception, report: IngestionReport) -> None:
        """Let a worker ingest the file later. After too many retries, the file fails."""
        retries = await self._ingestions.count_retry(claimed.name)
        if retries > MAX_RETRIES:
            failure = IngestionFailed("server_error", f"The file could not be added after many retries: {error}", "server")
            await self._fail(claimed, file, failure, report)
            return
        report.request.outcome = "retried"
        delay = min(_MAX_DELAY, _FIRST_DELAY * (1 << (retries - 1)))
        level = logging.WARNING if self._retry_warnings.is_due() else logging.INFO
        logger.log(level, "ingestion of %s will be retried in %.0f s: %s", file.id, delay, error)
        await self._ingestions.count_attempt(claimed.name, -1)
        await self._ingestions.renew([claimed.name], delay)

    async def _hand_back(self, claimed: ClaimedFile, report: IngestionReport) -> None:
        if claimed.stopped is StopReason.LOST:
            report.request.outcome = "lost"
            return
        report.request.outcome = "requeued"
        await self._ingestions.count_attempt(claimed.name, -1)
        await self._ingestions.ready(claimed.name, first=True)

    async def _renew_claims(self, held: Sequence[ClaimedFile]) -> list[bool | None]:
        """Return which files still wait for these results. The lease itself is only in the queue."""
        return [await self._get_pending(claimed.name) is not None for claimed in held]
