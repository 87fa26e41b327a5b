"""Writes the events of all running jobs of this process to their logs: one round trip for all, at most every 50 ms."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from ..protocol import sse
from ..protocol.response.events import Event
from ..state import Batch, Job, Jobs, StateUnavailable
from ..telemetry.metrics import EVENTS_APPENDED, LEASES_LOST

logger = logging.getLogger(__name__)

INTERVAL = 0.05

# Reasons to stop a run: the lease is lost; the worker drains before the run has output; the time to drain is over.
LOST, DRAINED, SHUT_DOWN = "lost", "drained", "shut down"
EVENTS_BEFORE_OUTPUT = 3
"""`response.created`, `response.queued` and `response.in_progress`."""


class ClaimedJob:
    """A job that this worker holds: its pending events, and the state of its lease."""

    def __init__(self, job: Job, renewed: float) -> None:
        """`renewed` is the event loop's time when the lease was requested."""
        self.job = job
        self.began = self.renewed = renewed
        self.next_number = job.next_number
        self.sending: Batch | None = None
        self.sent = asyncio.Event()
        self.ending = False
        self.size = 0
        self.stopped: str | None = None
        """The reason to stop the run, if it should stop."""
        self.task: asyncio.Task[None] | None = None
        self._pending: list[bytes] = []
        self._count = 0

    @property
    def has_begun(self) -> bool:
        """Whether the run has produced output."""
        return self.next_number + self._count > EVENTS_BEFORE_OUTPUT

    @property
    def has_grown(self) -> bool:
        """Whether this worker has produced output."""
        return self.next_number + self._count > max(self.job.next_number, EVENTS_BEFORE_OUTPUT)

    @property
    def is_interrupted(self) -> bool:
        """Whether the run was stopped before its end."""
        return self.stopped is not None and self.task is not None and self.task.cancelled()

    @property
    def is_behind(self) -> bool:
        """Whether there are events that are not in the log yet."""
        return self.sending is not None or self._count > 0

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            data = sse.encode([event])
            self._pending.append(data)
            self._count += 1
            self.size += len(data)

    def batch(self, *, final: bool = False) -> Batch | None:
        """Take the pending events as a batch; None if there are none."""
        if not self._count:
            return None
        first = self.next_number
        self.next_number += self._count
        batch = Batch(first, self.next_number - 1, b"".join(self._pending), final)
        self._pending, self._count = [], 0
        return batch

    def stop(self, why: str) -> None:
        """Cancel the run, and with it the request to the upstream. Only the first reason counts."""
        if self.stopped is None:
            self.stopped = why
            if why == LOST:
                LEASES_LOST.add()
            self.sent.set()
            if self.task is not None:
                self.task.cancel()


class EventLogWriter:
    """Collects the events of claimed jobs and appends them to the logs."""

    def __init__(self, jobs: Jobs, lease: float) -> None:
        self._jobs = jobs
        self._lease = lease
        self._dirty: dict[ClaimedJob, None] = {}
        self._woken = asyncio.Event()

    def write(self, claimed: ClaimedJob, events: list[Event]) -> None:
        """Queue the events for the next round trip."""
        claimed.write(events)
        self._dirty[claimed] = None
        self._woken.set()

    async def written(self, claimed: ClaimedJob) -> None:
        """Wait until all events so far are in the log."""
        while claimed.is_behind and claimed.stopped != LOST:
            claimed.sent.clear()
            await claimed.sent.wait()

    async def last(self, claimed: ClaimedJob) -> None:
        """Wait for the batch being sent and send no more: the pending events are stored with the response."""
        claimed.ending = True
        while claimed.sending is not None and claimed.stopped != LOST:
            claimed.sent.clear()
            await claimed.sent.wait()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._woken.wait()
            self._woken.clear()
            began = loop.time()
            dirty, self._dirty = self._dirty, {}
            await self._flush(dirty, began)
            await asyncio.sleep(max(0.0, began + INTERVAL - loop.time()))

    async def _flush(self, dirty: Iterable[ClaimedJob], began: float) -> None:
        sending = self._sending(dirty)
        if not sending:
            return
        batches = [(claimed.job.response_id, claimed.job.token, batch) for claimed, batch in sending.items()]
        try:
            answers = await self._jobs.append(batches, self._lease)
        except StateUnavailable:  # send the same batch again: appending is idempotent
            self._dirty = {**dict.fromkeys(sending), **self._dirty}
            self._woken.set()
            return
        except Exception:
            logger.exception("could not write the events of %d background responses", len(batches))
            answers = [False] * len(batches)
        for (claimed, batch), appended in zip(sending.items(), answers, strict=True):
            claimed.sending = None
            claimed.sent.set()
            if appended:
                claimed.renewed = began
                EVENTS_APPENDED.add(batch.last - batch.first + 1)
            else:
                claimed.stop(LOST)

    def _sending(self, dirty: Iterable[ClaimedJob]) -> dict[ClaimedJob, Batch]:
        """Return the batch to send for each job."""
        sending = {}
        for claimed in dirty:
            if claimed.sending is None and not claimed.ending:
                claimed.sending = claimed.batch()
            if claimed.sending is not None and claimed.stopped != LOST:
                sending[claimed] = claimed.sending
        return sending
