"""Claim and run background responses.

Each lease has a fencing token. The scripts reject writes with any other token. A worker stops a run if a write is rejected, or
if the lease was not renewed for most of its duration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ..crypto import InvalidEnvelope, Sealer
from ..engine.runner import Runner
from ..settings.groups import JobSettings, RedisSettings
from ..state import Damaged, Deleted, Fenced, Job, JobVerdict, Missing, State, StateUnavailable, TakeReason
from ..telemetry.context import log_facts, report_failure
from ..telemetry.ends import count_response
from ..telemetry.tracing import job_span
from .event_log import ClaimedJob, EventLogWriter, clean_up, write_end
from .job_runner import JobRunner
from .queue_worker import POLL, QueueWorker

logger = logging.getLogger(__name__)

REST = 5  # checks of the queue after which a retry that waits for an unavailable upstream is checked again
DAMAGE_PAUSE = 1.0  # seconds after a damaged entry or record, because a damaged queue may have any number of them
TAKE_OVER_INTERVAL = 60.0  # seconds between checks of the queues of older releases


class Worker(QueueWorker[ClaimedJob]):
    """Runs up to `jobs.concurrency` background responses at a time.

    `scope` is the ASGI scope for calls to an upstream in this process.
    """

    jobs = "background responses"

    def __init__(
        self,
        runner: Runner,
        state: State,
        sealer: Sealer,
        settings: JobSettings,
        redis: RedisSettings,
        scope: MutableMapping[str, Any] | None = None,
        *,
        drain_timeout: float,
    ) -> None:
        limits = {"lease": settings.lease, "drain_timeout": drain_timeout}
        super().__init__(state.queue, state.wakeups, concurrency=settings.concurrency, **limits)
        self._state = state
        self._responses = state.queue
        self._upstreams = runner.factory.upstreams
        self._log_writer = EventLogWriter(state.jobs, self._lease)
        self._jobs = JobRunner(runner, state, sealer, self._log_writer, redis, scope)
        self._is_paused = False

    def _loops(self) -> list[Callable[[], Awaitable[None]]]:
        return [self._log_writer.run, self._take_over]

    async def _take_over(self) -> None:
        """Take over the jobs in the queues of older releases, whose replicas may add jobs until the last one has stopped."""
        while True:
            with suppress(StateUnavailable):
                if moved := await self._responses.take_over():
                    logger.info("%d background responses in the queue of an older release were taken over", moved)
                    self._change.set()
            await asyncio.sleep(TAKE_OVER_INTERVAL)

    def _takes_waiting(self) -> bool:
        """Return false while all endpoints are ejected, so that only jobs that must end are claimed. Log changes."""
        is_paused = not self._upstreams.is_available
        if is_paused and not self._is_paused:
            logger.warning("no endpoint is available, so background responses wait")
        elif self._is_paused and not is_paused:
            logger.info("an endpoint is available again: resuming background responses")
        self._is_paused = is_paused
        return not is_paused

    async def _work(self, job: str, *, was_waiting: bool) -> None:
        """Take the job, run or end it, and log errors. After most errors, a worker claims it again when its lease expires."""
        try:
            await self._take(job, TakeReason.RUN if was_waiting else TakeReason.SETTLE)
        except Damaged as error:
            logger.warning("removing response %.100r from the queue: %s", job, error.message)
            with suppress(StateUnavailable):
                with suppress(Missing):  # the entry is not an id
                    await self._state.jobs.abandon(job)
                await self._state.queue.drop(job)
            await asyncio.sleep(DAMAGE_PAUSE)
        except StateUnavailable as error:
            logger.warning("response %s will be retried when its lease expires: %s", job, error.message)
        except (Deleted, Fenced):
            logger.info("response %s was deleted, or another process has claimed it", job)
        except Exception:
            logger.exception("response %s failed", job)

    async def _take(self, response_id: str, why: TakeReason) -> None:
        asked = asyncio.get_running_loop().time()
        taken = await self._state.jobs.take(response_id, why, worker=self.name, lease=self._lease)
        if taken.verdict is JobVerdict.HELD:
            await self._state.queue.renew([response_id], taken.left)
        elif why is TakeReason.SETTLE and taken.verdict in (JobVerdict.WAITING, JobVerdict.MISSING):
            await self._state.queue.renew([response_id], REST * POLL)  # a missing job may not have been written yet
        elif taken.verdict is JobVerdict.RUN and taken.job is not None:
            await self._run(taken.job, asked)
        elif taken.job is not None:
            await write_end(self._state, taken)
        elif taken.verdict is JobVerdict.DONE:  # its worker was lost before it could clean up
            await clean_up(self._state, response_id)
        else:
            await self._state.queue.drop(response_id)

    async def _run(self, job: Job, asked: float) -> None:
        claimed = ClaimedJob(job, asked)
        with self._hold(claimed):
            try:
                with self._observe(claimed):
                    await self._jobs.run(claimed)
            except InvalidEnvelope:
                logger.warning(
                    "response %s is encrypted with a key that is not in this worker's auth.secret_keys", job.response_id
                )
                await self._state.jobs.release(job)  # the worker that claims the job next may have the key

    @contextmanager
    def _observe(self, claimed: ClaimedJob) -> Iterator[None]:
        job = claimed.job
        facts = {"worker": self.name, "attempt": job.attempts + 1, "retries": job.retries}
        with job_span(job.response_id, job.owner) as request:
            log_facts(logger, f"job {job.response_id} starts", {**request.facts(), **facts})
            try:
                yield
            except Exception as error:
                request.fail(error)
                request.outcome = "interrupted"
                raise
            finally:
                facts["seconds"] = round(asyncio.get_running_loop().time() - claimed.began, 3)
                count_response(request, "background")
                report_failure(request, **facts)
                log_facts(logger, f"job {job.response_id} ends", {**request.facts(), **facts})

    def _described(self, claimed: ClaimedJob) -> str:
        return f"response {claimed.name}"

    async def _renew_claims(self, held: Sequence[ClaimedJob]) -> list[bool | None]:
        return await self._state.jobs.renew([(claimed.name, claimed.job.token) for claimed in held], self._lease)
