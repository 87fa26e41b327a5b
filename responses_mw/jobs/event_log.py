"""Write the event logs of all jobs of a worker in one round trip, and finalize jobs that no worker completes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..engine.history import RunContext, commit
from ..errors import APIError, UpstreamError, WorkerLost
from ..ids import RunIds
from ..protocol import sse
from ..protocol.response.document import whole
from ..protocol.response.events import terminal_type
from ..protocol.response.replay import LogReplay
from ..protocol.types import Document, Event
from ..state import Batch, Chain, Damaged, Fenced, Job, Jobs, JobVerdict, OverBound, State, StateUnavailable, Taken
from ..tasks import by_size
from ..telemetry.ends import report_lost_job
from ..telemetry.metrics import EVENTS_APPENDED
from .queue_worker import StopReason

logger = logging.getLogger(__name__)

INTERVAL = 0.05  # minimum seconds between two round trips

EVENTS_BEFORE_OUTPUT = 3
"""Number of events before the first output: `response.created`, `response.queued` and `response.in_progress`."""


class ClaimedJob:
    """A job claimed by this worker, and its pending events. `renewed` is the loop time when the lease was last requested."""

    def __init__(self, job: Job, renewed: float) -> None:
        self.job = job
        self.began = self.renewed = renewed
        self.next_number = job.next_number
        self.sending: Batch | None = None
        self.sent = asyncio.Event()
        self.ending = False  # whether the pending events will be stored together with the response
        self.size = 0
        self.stopped: StopReason | None = None
        self.is_interrupted = False  # whether the run was stopped before its end
        self.turns: asyncio.Timeout | None = None  # expires if the job is stopped while its turns run
        self._pending: list[bytes] = []
        self._count = 0

    @property
    def name(self) -> str:
        return self.job.response_id

    @property
    def can_be_handed_back(self) -> bool:
        return not self.has_begun

    @property
    def has_begun(self) -> bool:
        """Whether any worker has produced output for the job."""
        return self.next_number + self._count > EVENTS_BEFORE_OUTPUT

    @property
    def has_grown(self) -> bool:
        """Whether this worker has produced output for the job."""
        return self.next_number + self._count > max(self.job.next_number, EVENTS_BEFORE_OUTPUT)

    @property
    def is_behind(self) -> bool:
        """Whether events must still be appended to the log."""
        return self.sending is not None or (self._count > 0 and not self.ending)

    def write(self, events: list[Event]) -> None:
        data = sse.encode(events)
        self._pending.append(data)
        self._count += len(events)
        self.size += len(data)

    def batch(self) -> Batch | None:
        """Remove and return the pending events, or return None if there are none."""
        if not self._count:
            return None
        first = self.next_number
        self.next_number += self._count
        batch = Batch(first, self.next_number - 1, b"".join(self._pending))
        self._pending, self._count = [], 0
        return batch

    def next_batch(self, protected: Callable[[Job, Batch], Batch]) -> Batch | None:
        """Return the batch to append, or None if no batch is ready or the lease is lost.

        `protected` returns a batch in its stored form. The same batch is returned until it is confirmed. After `ending` is set,
        no new batch is created.
        """
        if self.sending is None and not self.ending and (batch := self.batch()) is not None:
            self.sending = protected(self.job, batch)
        return self.sending if self.stopped is not StopReason.LOST else None

    def stop(self, why: StopReason) -> None:
        """Cancel the run. Only the first call has an effect."""
        if self.stopped is None:
            self.stopped = why
            self.sent.set()
            if self.turns is not None:
                self.turns.reschedule(0.0)


class EventLogWriter:
    """Collects the events of claimed jobs, and appends them to the logs while `run` is running."""

    def __init__(self, jobs: Jobs, lease: float) -> None:
        self._jobs = jobs
        self._lease = lease
        self._dirty: dict[ClaimedJob, None] = {}
        self._woken = asyncio.Event()

    def write(self, claimed: ClaimedJob, events: list[Event]) -> None:
        """Queue `events` to be appended in the next round trip."""
        claimed.write(events)
        self._dirty[claimed] = None
        self._woken.set()

    async def wait_until_written(self, claimed: ClaimedJob) -> None:
        """Wait until all queued events are in the log or the lease is lost."""
        while claimed.is_behind and claimed.stopped is not StopReason.LOST:
            claimed.sent.clear()
            await claimed.sent.wait()

    async def last(self, claimed: ClaimedJob) -> None:
        """Stop creating batches, and wait until the batch in transit is in the log or the lease is lost.

        The caller must store the pending events.
        """
        claimed.ending = True
        await self.wait_until_written(claimed)

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
        sending = {claimed: batch for claimed in dirty if (batch := claimed.next_batch(self._jobs.protected)) is not None}
        if not sending:
            return
        batches = [(claimed.job.response_id, claimed.job.token, batch) for claimed, batch in sending.items()]
        try:
            answers = await self._jobs.append(batches, self._lease)
        except Exception:
            logger.exception("could not write the events of %d background responses", len(batches))
            answers = [False] * len(batches)
        for (claimed, batch), appended in zip(sending.items(), answers, strict=True):
            if appended is not None:
                self._confirm(claimed, batch, began, appended=appended)
            if claimed.is_behind:  # send the batch again, which is idempotent, or send later events
                self._dirty[claimed] = None
                self._woken.set()

    @staticmethod
    def _confirm(claimed: ClaimedJob, batch: Batch, began: float, *, appended: bool) -> None:
        claimed.sending = None
        claimed.sent.set()
        if appended:
            claimed.renewed = began
            EVENTS_APPENDED.add(batch.last - batch.first + 1)
        else:
            claimed.stop(StopReason.LOST)


async def write_end(state: State, taken: Taken) -> Document:
    """Finalize a job that was taken as `lost`, `failed` or `cancelled`, and return its document.

    Raises `Fenced` if another worker has taken over the job, or if the job's log is missing. Raises `Deleted` if the response
    was deleted, or `StateUnavailable` if Redis fails.
    """
    assert taken.job is not None
    job, error, kind = taken.job, taken.job.error, ""
    if taken.verdict is JobVerdict.CANCELLED:
        error = None
    elif taken.verdict is not JobVerdict.FAILED or error is None:
        error, kind = {"code": "server_error", "message": WorkerLost().message}, WorkerLost.__name__
    document = await write_output(state, job, error)
    report_lost_job(job.response_id, job.owner, document["status"], error["code"] if error else "", kind)
    return document


async def write_output(state: State, job: Job, error: dict[str, str] | None) -> Document:
    """Finalize a job with its logged output, as `failed` or (without `error`) `cancelled`. Raises the errors of `write_end`."""
    output = await read_log(state, job)
    ends = output.end_running_call() if error else []
    output.cut()
    status = "failed" if error else "cancelled"
    document = {**job.document, "output": output.items, "status": status, "error": error}
    last = final_batch(document, job.next_number, ends)
    context = RunContext(await _chain(state, job), RunIds(response=job.response_id), job.input, job.owner, job.token)
    try:
        await commit(state, context, document, last)
    except (OverBound, Damaged):  # the conversation is full or damaged
        await commit(state, replace(context, chain=Chain.new()), document, last)
    await clean_up(state, job.response_id)
    return document


def final_batch(document: Document, number: int, before: Sequence[Event] = ()) -> Batch:
    """Return the final batch of a log, which begins with the sequence number `number`: events and the terminal event."""
    kind, last = terminal_type(document), number + len(before)
    event = Event(kind, {"type": kind, "response": whole(document), "sequence_number": last})
    return Batch(number, last, sse.encode([*before, event]), final=True)


async def clean_up(state: State, response_id: str) -> None:
    """Remove a finished job from the queue, and compress its log. Raises `StateUnavailable` if the removal fails."""
    await state.queue.drop(response_id)
    try:
        await state.jobs.compress(response_id)
    except StateUnavailable as error:  # the uncompressed log remains until it expires
        logger.debug("could not compress the log of response %s: %s", response_id, error.message)


async def read_log(state: State, job: Job) -> LogReplay:
    """Replay a claimed job's log up to the first gap or damage.

    Raises `Fenced` if the log was deleted or ends too early, or `StateUnavailable` if Redis fails.
    """
    output = LogReplay()
    while output.next_number < job.next_number:
        try:
            batches = await state.jobs.log(job.response_id, output.next_number - 1)
        except Damaged:
            break
        if not batches:
            raise Fenced(job.response_id)
        if not await by_size(sum(len(batch.data) for batch in batches), _replay, output, batches):
            logger.error("the event log of response %s is damaged after event %d", job.response_id, output.next_number - 1)
            break
    return output


def _replay(output: LogReplay, batches: list[Batch]) -> bool:
    """Replay the batches. Return False if there is a gap or a malformed event."""
    for batch in batches:
        if batch.first != output.next_number:
            return False
        try:
            output.read(batch.data)
        except (LookupError, TypeError, ValueError, UpstreamError):  # another program has written to the log
            return False
    output.join()
    return True


async def _chain(state: State, job: Job) -> Chain:
    """Return the history that the response continues, or an empty history if it was deleted, is damaged or is too large."""
    try:
        return await state.responses.before(job.document, job.owner)
    except APIError as error:
        if error.status >= 500 and not isinstance(error, Damaged):
            raise
        return Chain.new()
