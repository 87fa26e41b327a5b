"""Claim and run jobs, and renew their leases.

Each lease has a fencing token. The scripts reject writes with any other token. A worker stops a run if a write is rejected, or
if the lease was not renewed for most of its duration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from ..crypto import InvalidEnvelope, Sealer
from ..engine.runner import Runner
from ..ids import random_part
from ..settings.groups import JobSettings, RedisSettings
from ..state import Damaged, Deleted, Fenced, Job, Missing, State, StateUnavailable
from ..state.schema import QUEUE_EVENTS, stop_channel
from ..telemetry.context import WarningLimit, count_response, log_facts, report_failure
from ..telemetry.tracing import job_span
from .event_log import DRAINED, LOST, SHUT_DOWN, ClaimedJob, EventLogWriter, clean_up, write_end
from .job_runner import JobRunner

logger = logging.getLogger(__name__)

POLL = 1.0
"""Maximum seconds between two checks of the queue. Messages trigger earlier checks."""
DAMAGE_PAUSE = 1.0  # seconds after a damaged entry or record, because a damaged queue may have any number of them
GIVE_UP_AFTER = 0.8  # fraction of a lease's duration after which a run is stopped if the lease was not renewed
FINAL_WRITES_TIMEOUT = 5.0  # seconds after the drain to store the stopped jobs


class Worker:
    """Runs up to `jobs.concurrency` jobs at a time. `scope` is the ASGI scope for calls to an upstream in this process."""

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
        self._state = state
        self._concurrency = settings.concurrency
        self._drain_timeout = drain_timeout
        self._lease = settings.lease
        self._name = random_part()
        self._log_writer = EventLogWriter(state.jobs, self._lease)
        self._jobs = JobRunner(runner, state, sealer, self._log_writer, redis, scope)
        self._claimed: dict[str, ClaimedJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()
        self._suspicion = asyncio.Event()  # set when a job of this worker may have been cancelled by another process
        self._is_stopping = False
        self._sweeps_from = 0.0
        self._warnings = WarningLimit()

    async def run(self) -> None:
        """Claim and run jobs until `stop` is called, then wait up to `drain_timeout` seconds for running jobs."""
        on = self._state.wakeups.on
        with on(stop_channel(self._name), lambda _: self._suspicion.set()), on(QUEUE_EVENTS, lambda _: self._change.set()):
            running = (self._claim, self._log_writer.run, self._beat, self._watch)
            loops = [asyncio.create_task(self._keep_running(loop)) for loop in running]
            try:
                await loops[0]
                await self._drain()
            finally:
                for task in [*loops, *self._tasks]:
                    task.cancel()
                await asyncio.gather(*loops, *self._tasks, return_exceptions=True)

    async def _keep_running(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Run a loop until it returns. After an unexpected error, log the error and start the loop again."""
        while True:
            try:
                return await loop()
            except Exception:
                logger.exception("a loop of the worker failed and will be started again")
            await asyncio.sleep(self._lease / 15)

    @property
    def running(self) -> int:
        """The number of running jobs."""
        return len(self._tasks)

    def stop(self) -> None:
        """Stop claiming jobs. `run` returns when the claimed jobs have ended or are in the queue again, or after a timeout."""
        self._is_stopping = True
        self._change.set()

    async def _claim(self) -> None:
        pause = min(POLL, self._lease / 3)
        while not self._is_stopping:
            self._change.clear()
            await self._fill()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._change.wait()

    async def _fill(self) -> None:
        """Claim and start jobs while the queue has available jobs and this worker has capacity."""
        loop = asyncio.get_running_loop()
        try:
            while self._has_room and (
                job := await self._state.queue.claim(self._lease, sweep=loop.time() >= self._sweeps_from)
            ):
                self._start(job)
        except Damaged:  # the client has logged the damage
            return
        except StateUnavailable as error:
            level = logging.WARNING if self._warnings.is_due() else logging.DEBUG
            logger.log(level, "cannot claim background responses: %s", error.message)
            # Leases may have expired during an outage although their workers are alive.
            self._sweeps_from = loop.time() + self._lease

    @property
    def _has_room(self) -> bool:
        return len(self._tasks) < self._concurrency and not self._is_stopping and self._jobs.breaker.admits

    def _start(self, response_id: str) -> None:
        self._jobs.breaker.begin()
        task = asyncio.create_task(self._work(response_id))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._change.set()

    async def _work(self, response_id: str) -> None:
        """Claim and run the job, and log errors. After most errors, a worker claims the job again when its lease expires."""
        try:
            await self._take(response_id)
        except Damaged as error:
            logger.warning("removing response %.100r from the queue: %s", response_id, error.message)
            with suppress(StateUnavailable):
                with suppress(Missing):  # the entry is not an id
                    await self._state.jobs.abandon(response_id)
                await self._state.queue.drop(response_id)
            await asyncio.sleep(DAMAGE_PAUSE)
        except StateUnavailable as error:
            logger.warning("response %s will be retried when its lease expires: %s", response_id, error.message)
        except (Deleted, Fenced):
            logger.info("response %s was deleted, or another process has claimed it", response_id)
        except Exception:
            logger.exception("response %s failed", response_id)

    async def _take(self, response_id: str) -> None:
        asked = asyncio.get_running_loop().time()
        taken = await self._state.jobs.take(response_id, "run", worker=self._name, lease=self._lease)
        if taken.verdict != "run":
            self._jobs.breaker.skip()
        if taken.verdict == "held":
            await self._state.queue.renew([response_id], taken.left)
        elif taken.verdict == "run" and taken.job is not None:
            await self._run(taken.job, asked)
        elif taken.job is not None:
            await write_end(self._state, taken)
        elif taken.verdict == "done":  # its worker was lost before it could clean up
            await clean_up(self._state, response_id)
        else:
            await self._state.queue.drop(response_id)

    async def _run(self, job: Job, asked: float) -> None:
        claimed = self._claimed[job.response_id] = ClaimedJob(job, asked)
        try:
            if self._is_stopping:
                claimed.stop(DRAINED)
            with self._observed(claimed):
                await self._jobs.run(claimed)
        except InvalidEnvelope:
            logger.warning("response %s is encrypted with a key that is not in this worker's auth.secret_keys", job.response_id)
            await self._state.jobs.release(job)  # the worker that claims the job next may have the key
        finally:
            if self._claimed.get(job.response_id) is claimed:  # a lost run may end after this worker has claimed the job again
                del self._claimed[job.response_id]

    @contextmanager
    def _observed(self, claimed: ClaimedJob) -> Iterator[None]:
        job = claimed.job
        facts = {"worker": self._name, "attempt": job.attempts + 1, "retries": job.retries}
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

    async def _watch(self) -> None:
        """Stop runs whose leases are about to expire."""
        loop, pause = asyncio.get_running_loop(), self._lease / 15
        while True:
            began = loop.time()
            await asyncio.sleep(pause)
            if loop.time() - began > 2 * pause:
                continue  # this process was stalled, so let replies that have arrived renew the leases first
            for claimed in self._claimed.values():
                if claimed.stopped is None and loop.time() - claimed.renewed > GIVE_UP_AFTER * self._lease:
                    logger.warning("response %s is abandoned: its lease could not be renewed", claimed.job.response_id)
                    claimed.stop(LOST)

    async def _beat(self) -> None:
        """Renew the leases three times per lease duration, and immediately after a message about a cancelled job."""
        loop, pause = asyncio.get_running_loop(), self._lease / 3
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._suspicion.wait()
            self._suspicion.clear()
            try:
                is_complete = await self._renew(list(self._claimed.values()), loop.time())
            except StateUnavailable:
                is_complete = False
            pause = self._lease / (3 if is_complete else 15)  # if the outage lasts, `_watch` stops the runs

    async def _renew(self, held: list[ClaimedJob], now: float) -> bool:
        """Renew the leases of jobs. Return False if Redis is unavailable for some of the jobs."""
        if not held:
            return True
        answers = await self._state.jobs.renew([(claimed.job.response_id, claimed.job.token) for claimed in held], self._lease)
        for claimed, renewed in zip(held, answers, strict=True):
            if renewed:
                claimed.renewed = now
            elif renewed is not None:
                claimed.stop(LOST)
        await self._state.queue.renew([claimed.job.response_id for claimed in held], self._lease)
        return None not in answers

    async def _drain(self) -> None:
        """Return jobs without output to the queue, and wait for the other jobs. After the timeout, stop these jobs too."""
        for why, seconds in ((DRAINED, self._drain_timeout), (SHUT_DOWN, FINAL_WRITES_TIMEOUT)):
            for claimed in list(self._claimed.values()):
                if why == SHUT_DOWN or not claimed.has_begun:
                    claimed.stop(why)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=seconds)
