"""The worker: claims jobs, keeps the leases of those that it runs, and hands them back or ends them when it stops.

1. Of each response's record one holder has the token; whoever lost it is fenced by the scripts, and stops.
2. A lease is renewed by every append, and by the heartbeat where nothing is appended. A worker that could not renew one for
   most of its time stops the run before another may take it.
3. After Redis was away leases are over that are only late: for as long as one lasts, nobody's are taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from contextlib import ExitStack, suppress
from typing import Any

from ..crypto import Sealer, Unsealable
from ..engine.runner import Runner
from ..ids import random_part
from ..settings import Settings
from ..state import Deleted, Fenced, Job, State, StateUnavailable
from ..state.keys import Partition, stop_channel
from ..telemetry import job_span
from .claimed_job import JobRunner
from .event_log import DRAINED, LOST, SHUT_DOWN, EventLogWriter, Held
from .finalize import write_end

logger = logging.getLogger(__name__)

# The longest between two looks into the queue; messages tell sooner.
POLL = 1.0
# A lease that was not renewed for this share of its time is given up.
GIVEN_UP = 0.8
# How long a stopped worker waits for the ends of those jobs that ran out of time to be stored.
LAST_ENDS = 5.0


class Worker:
    def __init__(
        self, runner: Runner, state: State, sealer: Sealer, settings: Settings, scope: MutableMapping[str, Any] | None = None
    ) -> None:
        self._state = state
        self._settings = settings
        self._lease = settings.jobs.lease
        self._name = random_part()
        self._flusher = EventLogWriter(state.jobs, self._lease)
        self._jobs = JobRunner(runner, state, sealer, self._flusher, settings, scope)
        self._held: dict[str, Held] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._due = dict.fromkeys(state.queue.partitions)
        self._change = asyncio.Event()
        self._suspicion = asyncio.Event()
        self._suspected: set[str] = set()
        self._stopping = asyncio.Event()
        self._sweeps_from = 0.0

    async def run(self) -> None:
        """Run jobs until ``stop``, then finish the running ones within ``server.drain_timeout``."""
        with ExitStack() as stack:
            stack.enter_context(self._state.wakeups.on(stop_channel(self._name), self._told_to_stop))
            for partition in self._state.queue.partitions:
                stack.enter_context(self._state.wakeups.on(partition.events, self._told_of_job(partition)))
            loops = [asyncio.create_task(loop()) for loop in (self._flusher.run, self._beat, self._watch)]
            try:
                await self._claim()
                await self._drain()
            finally:
                for task in [*loops, *self._tasks]:
                    task.cancel()
                await asyncio.gather(*loops, *self._tasks, return_exceptions=True)

    def stop(self) -> None:
        """Has it claim no more; ``run`` returns when what it has is ended or handed back."""
        self._stopping.set()
        self._change.set()

    # -- claiming ----------------------------------------------------------------------------------------------------

    async def _claim(self) -> None:
        loop, pause = asyncio.get_running_loop(), min(POLL, self._lease / 3)
        look = loop.time()
        while not self._stopping.is_set():
            self._change.clear()
            try:
                if loop.time() >= look:  # however much else happens
                    look = loop.time() + pause
                    self._due |= dict.fromkeys(self._state.queue.partitions)
                    await self._sweep()
                await self._claim_due()
            except StateUnavailable as error:
                logger.warning("no jobs are claimed: %s", error.message)
                self._sweeps_from = loop.time() + self._lease
            with suppress(TimeoutError):
                async with asyncio.timeout_at(look):
                    await self._change.wait()

    @property
    def _has_room(self) -> bool:
        return len(self._tasks) < self._settings.jobs.concurrency and not self._stopping.is_set()

    @property
    def _sweeps(self) -> bool:
        return asyncio.get_running_loop().time() >= self._sweeps_from

    async def _claim_due(self) -> None:
        while self._due and self._has_room:
            partition = next(iter(self._due))
            del self._due[partition]
            job = await self._state.queue.claim(partition, self._lease, sweep=self._sweeps)
            if job is not None:
                self._due[partition] = None
                self._begin(job)

    async def _sweep(self) -> None:
        """Without room it looks after lost jobs all the same: writes their ends, and has those that begin again come first."""
        for partition in self._state.queue.partitions:
            while self._sweeps and not self._has_room and not self._stopping.is_set():
                job = await self._state.queue.claim(partition, self._lease, sweep=True, fresh=False)
                if job is None:
                    break
                await self._work(job, "settle")

    def _told_of_job(self, partition: Partition) -> Any:
        def told(_: bytes) -> None:
            self._due[partition] = None
            self._change.set()

        return told

    def _begin(self, job: str) -> None:
        task = asyncio.create_task(self._work(job))
        self._tasks[task] = job
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._change.set()

    async def _work(self, response_id: str, why: str = "run") -> None:
        """Whatever fails here, the lease ends, and the job is looked after again."""
        try:
            await self._take(response_id, why)
        except StateUnavailable as error:
            logger.warning("response %s is left to its lease: %s", response_id, error.message)
        except (Deleted, Fenced):
            logger.info("response %s is somebody else's", response_id)
        except Exception:
            logger.exception("a background response failed")

    async def _take(self, response_id: str, why: str) -> None:
        asked = asyncio.get_running_loop().time()
        attempts = self._settings.jobs.max_attempts
        taken = await self._state.jobs.take(response_id, why, worker=self._name, lease=self._lease, max_attempts=attempts)
        if taken.verdict == "held":
            await self._state.queue.renew([response_id], taken.left)
        elif taken.verdict == "run" and taken.job is not None:
            await self._run(taken.job, asked)
        elif taken.job is not None:
            await write_end(self._state, taken)
        elif why == "settle" and taken.verdict != "done":
            await self._state.queue.ready(response_id, first=True)
        else:
            await self._state.queue.drop(response_id)

    async def _run(self, job: Job, asked: float) -> None:
        held = self._held[job.response_id] = Held(job, asked)
        if job.response_id in self._suspected:
            self._suspicion.set()
        try:
            if self._stopping.is_set():
                held.stop(DRAINED)
            with job_span(job.response_id, job.owner):
                await self._jobs.run(held)
        except Unsealable:
            logger.warning("response %s needs a key that auth.secret_keys does not have here", job.response_id)
            await self._state.jobs.release(job)  # who looks when the lease in the queue is over may have it
        finally:
            if self._held.get(job.response_id) is held:  # a run that was lost may end after this worker has it again
                del self._held[job.response_id]

    # -- leases ------------------------------------------------------------------------------------------------------

    def _told_to_stop(self, message: bytes) -> None:
        """Of which of its jobs the worker is told that somebody took it; it may be any where a message may have been missed."""
        self._suspected |= {message.decode()} if message else self._held.keys()
        self._suspicion.set()

    async def _watch(self) -> None:
        """Stops the runs whose leases may be over soon."""
        loop, pause = asyncio.get_running_loop(), self._lease / 15
        while True:
            began = loop.time()
            await asyncio.sleep(pause)
            if loop.time() - began > 2 * pause:
                continue  # this process was stalled: the answers that came meanwhile tell what it still has
            for held in self._held.values():
                if loop.time() - held.renewed > GIVEN_UP * self._lease:
                    held.stop(LOST)

    async def _beat(self) -> None:
        """Renews the leases three times in their life; at once those of which it is told that somebody took them."""
        loop = asyncio.get_running_loop()
        queue_renewed = loop.time()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease / 15):
                    await self._suspicion.wait()
            self._suspicion.clear()
            now = loop.time()
            late = [held for held in self._held.values() if now - held.renewed > self._lease / 3]
            late += [self._held[job] for job in self._suspected if job in self._held]
            # Of a job that is just being taken the message may come before the answer to the taking.
            self._suspected &= set(self._tasks.values()) - self._held.keys()
            with suppress(StateUnavailable):  # _watch sees to it that this does not last
                await self._renew(late, now)
                if self._held and now - queue_renewed > self._lease / 3:
                    await self._state.queue.renew(list(self._held), self._lease)
                    queue_renewed = now

    async def _renew(self, late: list[Held], now: float) -> None:
        if not late:
            return
        answers = await self._state.jobs.renew([(held.job.response_id, held.job.token) for held in late], self._lease)
        for held, renewed in zip(late, answers, strict=True):
            if renewed:
                held.renewed = now
            else:
                held.stop(LOST)

    # -- stopping ----------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Hands back what has no output yet, and waits for the others."""
        for held in list(self._held.values()):
            if not held.has_begun:
                held.stop(DRAINED)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.server.drain_timeout)
        for held in list(self._held.values()):
            held.stop(SHUT_DOWN)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_ENDS)
