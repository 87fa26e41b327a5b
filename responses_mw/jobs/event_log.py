"""The events of all running jobs of this process on their way to the logs: a round trip for all, at most every 50 ms."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from ..protocol import sse
from ..protocol.response.events import Event
from ..state import Batch, Job, Jobs, StateUnavailable
from ..telemetry import EVENTS_APPENDED, LEASES_LOST

logger = logging.getLogger(__name__)

INTERVAL = 0.05

# Why a run is stopped: somebody else has the job; its worker stops, and hands it back, or must end it.
LOST, DRAINED, SHUT_DOWN = "lost", "drained", "shut down"
# created, queued and in_progress are no output.
_NO_OUTPUT = 3


class Held:
    """A job in this worker's hands: what is to be written to its log, and until when its lease lasts."""

    __slots__ = ("_count", "_pending", "ending", "job", "next_number", "renewed", "sending", "sent", "size", "stopped", "task")

    def __init__(self, job: Job, renewed: float) -> None:
        """``renewed`` is when (the loop's time) its lease was asked for."""
        self.job = job
        self.renewed = renewed
        self.next_number = job.next_number
        self.sending: Batch | None = None
        self.sent = asyncio.Event()
        self.ending = False
        self.size = 0
        self.stopped: str | None = None
        """Why the run is to stop, if it is."""
        self.task: asyncio.Task[None] | None = None
        self._pending: list[bytes] = []
        self._count = 0

    @property
    def has_begun(self) -> bool:
        """Whether more was made than the events that tell that it runs."""
        return self.next_number + self._count > _NO_OUTPUT

    @property
    def is_behind(self) -> bool:
        """Whether something was made that does not stand in the log yet."""
        return self.sending is not None or self._count > 0

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            data = sse.encode([event])
            self._pending.append(data)
            self._count += 1
            self.size += len(data)

    def batch(self, *, final: bool = False) -> Batch | None:
        """What is pending, from now on under way; None if there is nothing."""
        if not self._count:
            return None
        first = self.next_number
        self.next_number += self._count
        batch = Batch(first, self.next_number - 1, b"".join(self._pending), final)
        self._pending, self._count = [], 0
        return batch

    def stop(self, why: str) -> None:
        """Ends the run, and with it the call of the upstream. The first reason counts."""
        if self.stopped is None:
            self.stopped = why
            if why == LOST:
                LEASES_LOST.add()
            self.sent.set()
            if self.task is not None:
                self.task.cancel()


class EventLogWriter:
    def __init__(self, jobs: Jobs, lease: float) -> None:
        self._jobs = jobs
        self._lease = lease
        self._dirty: dict[Held, None] = {}
        self._woken = asyncio.Event()

    def write(self, held: Held, events: list[Event]) -> None:
        """Has the events written to the job's log, soon."""
        held.write(events)
        self._dirty[held] = None
        self._woken.set()

    async def written(self, held: Held) -> None:
        """Waits until all that was made so far stands in the log."""
        while held.is_behind and held.stopped != LOST:
            held.sent.clear()
            await held.sent.wait()

    async def last(self, held: Held) -> None:
        """Waits until nothing is under way, and takes no more: what is still pending goes with the job's end."""
        held.ending = True
        while held.sending is not None and held.stopped != LOST:
            held.sent.clear()
            await held.sent.wait()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._woken.wait()
            self._woken.clear()
            began = loop.time()
            dirty, self._dirty = self._dirty, {}
            await self._flush(dirty, began)
            await asyncio.sleep(max(0.0, began + INTERVAL - loop.time()))

    async def _flush(self, dirty: Iterable[Held], began: float) -> None:
        under_way = self._under_way(dirty)
        if not under_way:
            return
        batches = [(held.job.response_id, held.job.token, batch) for held, batch in under_way.items()]
        try:
            answers = await self._jobs.append(batches, self._lease)
        except StateUnavailable:  # the same batch again: should it have been written, that changes nothing
            self._dirty = {**dict.fromkeys(under_way), **self._dirty}
            self._woken.set()
            return
        except Exception:
            logger.exception("the events of %d background responses cannot be written", len(batches))
            answers = [False] * len(batches)
        for (held, batch), appended in zip(under_way.items(), answers, strict=True):
            held.sending = None
            held.sent.set()
            if appended:
                held.renewed = began
                EVENTS_APPENDED.add(batch.last - batch.first + 1)
            else:
                held.stop(LOST)

    def _under_way(self, dirty: Iterable[Held]) -> dict[Held, Batch]:
        """What is to be sent now of each."""
        under_way = {}
        for held in dirty:
            if held.sending is None and not held.ending:
                held.sending = held.batch()
            if held.sending is not None and held.stopped != LOST:
                under_way[held] = held.sending
        return under_way
