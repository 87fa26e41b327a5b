"""Claim the jobs of a queue, renew their leases, and hand them back when the process stops.

A worker stops a job if the job's lease was not renewed for most of its duration. Another worker then claims the job.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from ..ids import random_part
from ..state import Damaged, StateUnavailable
from ..state.pubsub import PubSub
from ..state.queue import Queue
from ..state.schema import stop_channel
from ..telemetry.context import WarningLimit

logger = logging.getLogger(__name__)

POLL = 1.0
"""Maximum seconds between two checks of the queue. Messages trigger earlier checks."""
GIVE_UP_AFTER = 0.8  # fraction of a lease's duration after which a job is stopped if the lease was not renewed
FINAL_WRITES_TIMEOUT = 5.0  # seconds after the drain to store the stopped jobs


class StopReason(Enum):
    """Why a job is stopped."""

    LOST = auto()
    """Its lease is lost, or its result is obsolete."""
    DRAINED = auto()
    """The worker drains before the job has output."""
    SHUT_DOWN = auto()
    """The drain has timed out."""


class Claimed(Protocol):
    """A job claimed by this worker. `renewed` is the loop time when the lease was last requested."""

    renewed: float
    stopped: StopReason | None

    @property
    def name(self) -> str:
        """The job in the queue."""

    @property
    def can_be_handed_back(self) -> bool:
        """Whether the job can be stopped without losing output that another worker cannot continue."""

    def stop(self, why: StopReason) -> None:
        """Stop the job. Only the first call has an effect."""


C = TypeVar("C", bound=Claimed)


class QueueWorker(ABC, Generic[C]):
    """Runs up to `concurrency` jobs of a queue at a time."""

    jobs = "jobs"
    """Name of the jobs in logs."""

    def __init__(self, queue: Queue, messages: PubSub, *, concurrency: int, lease: float, drain_timeout: float) -> None:
        """`lease` is the duration of a lease in seconds. `stop` waits up to `drain_timeout` seconds for running jobs."""
        self.name = random_part()
        self._queue = queue
        self._messages = messages
        self._concurrency = concurrency
        self._lease = lease
        self._drain_timeout = drain_timeout
        self._claimed: dict[str, C] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()
        self._suspicion = asyncio.Event()  # set when a job of this worker may have been cancelled by another process
        self._is_stopping = False
        self._sweeps_from = 0.0
        self._warnings = WarningLimit()

    @abstractmethod
    async def _work(self, job: str, *, was_waiting: bool) -> None:
        """Run or end a claimed job. `was_waiting` is false if only jobs with expired leases were claimed."""

    @abstractmethod
    async def _renew_claims(self, held: Sequence[C]) -> list[bool | None]:
        """Renew the claims of jobs, and return whether they still belong to this worker, or None if that is unknown."""

    def _loops(self) -> list[Callable[[], Awaitable[None]]]:
        """Return further loops that run until the worker stops."""
        return []

    def _takes_waiting(self) -> bool:
        """Return whether waiting jobs are claimed now, besides those whose leases have expired."""
        return True

    async def run(self) -> None:
        """Claim and run jobs until `stop` is called, then wait up to `drain_timeout` seconds for running jobs."""
        with ExitStack() as stack:
            stack.enter_context(self._messages.on(stop_channel(self.name), lambda _: self._suspicion.set()))
            stack.enter_context(self._messages.on(self._queue.events, lambda _: self._change.set()))
            running = [self._claim, self._beat, self._watch, *self._loops()]
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
            while self._has_room:
                sweep, waiting = loop.time() >= self._sweeps_from, self._takes_waiting()
                job = await self._queue.claim(self._lease, sweep=sweep, waiting=waiting)
                if job is None:
                    break
                self._start(self._work(job, was_waiting=waiting))
        except Damaged:  # the client has logged the damage
            return
        except StateUnavailable as error:
            level = logging.WARNING if self._warnings.is_due() else logging.DEBUG
            logger.log(level, "cannot claim %s: %s", self.jobs, error.message)
            # Leases may have expired during an outage although their workers are alive.
            self._sweeps_from = loop.time() + self._lease

    @property
    def _has_room(self) -> bool:
        return len(self._tasks) < self._concurrency and not self._is_stopping

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._change.set()

    @contextmanager
    def _hold(self, claimed: C) -> Iterator[None]:
        """Renew the lease of a job in the `with` block. If the worker is stopping, stop the job at once."""
        self._claimed[claimed.name] = claimed
        try:
            if self._is_stopping:
                claimed.stop(StopReason.DRAINED)
            yield
        finally:
            if self._claimed.get(claimed.name) is claimed:  # a lost job may end after this worker has claimed it again
                del self._claimed[claimed.name]

    async def _watch(self) -> None:
        """Stop jobs whose leases are about to expire."""
        loop, pause = asyncio.get_running_loop(), self._lease / 15
        while True:
            began = loop.time()
            await asyncio.sleep(pause)
            if loop.time() - began > 2 * pause:
                continue  # this process was stalled, so let replies that have arrived renew the leases first
            for claimed in self._claimed.values():
                if claimed.stopped is None and loop.time() - claimed.renewed > GIVE_UP_AFTER * self._lease:
                    logger.warning("%s is abandoned: its lease could not be renewed", self._described(claimed))
                    claimed.stop(StopReason.LOST)

    def _described(self, claimed: C) -> str:
        return f"job {claimed.name}"

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
            pause = self._lease / (3 if is_complete else 15)  # if the outage lasts, `_watch` stops the jobs

    async def _renew(self, held: list[C], now: float) -> bool:
        """Renew the leases of jobs. Return False if Redis is unavailable for some of the jobs."""
        if not held:
            return True
        answers = await self._renew_claims(held)
        for claimed, renewed in zip(held, answers, strict=True):
            if renewed:
                claimed.renewed = now
            elif renewed is not None:
                claimed.stop(StopReason.LOST)
        await self._queue.renew([claimed.name for claimed in held], self._lease)
        return None not in answers

    async def _drain(self) -> None:
        """Return jobs without output to the queue, and wait for the other jobs. After the timeout, stop these jobs too."""
        for why, seconds in ((StopReason.DRAINED, self._drain_timeout), (StopReason.SHUT_DOWN, FINAL_WRITES_TIMEOUT)):
            for claimed in list(self._claimed.values()):
                if why is StopReason.SHUT_DOWN or claimed.can_be_handed_back:
                    claimed.stop(why)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=seconds)


AnyWorker: TypeAlias = QueueWorker[Any]
