"""Create, follow, cancel and delete background responses, and run the workers of this process.

A follower streams the event log of one response to one client. It has a position in the log, but no buffer. A follower at the
end of its log receives new batches as messages from the worker. If the client is slow, its follower reads from the log when the
client is ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import orjson

from ..auth import Gate
from ..backoff import Backoff
from ..crypto import Sealer
from ..engine.run import Run
from ..errors import BadRequest, NotSupported, Unavailable
from ..protocol import sse
from ..protocol.types import Document
from ..settings.groups import JobSettings, RedisSettings
from ..state import Batch, Damaged, Deleted, Fenced, Missing, State, StateFull, StateUnavailable, TakeReason
from ..state.jobs import fills_page
from ..state.schema import response_address
from ..tasks import background_task
from ..telemetry.context import annotate, current_request
from ..telemetry.tracing import queueing_span, with_trace_context
from .event_log import final_batch, write_end
from .job_runner import secrets_purpose
from .queue_worker import AnyWorker
from .worker import Worker

logger = logging.getLogger(__name__)

RUNNING = frozenset({"queued", "in_progress"})
_CREATION_TIMEOUT = 5.0  # seconds after which a worker removes a reserved job from the queue if the job is not stored
_CANCEL_ATTEMPTS = 15
_MIN_CANCEL_PAUSE, _MAX_CANCEL_PAUSE = 0.05, 1.0  # seconds between two attempts

POLL = 2.0  # seconds without a new batch after which a response is checked
PATIENCE = 60.0  # seconds without Redis after which a stream is closed
_PAUSE = 0.5
_LOST = "The response was deleted, or the state store lost it."
_REWOUND = "Redis lost its last events"


class JobService:
    """Creates, follows, cancels and deletes background responses. Also runs the `workers` of this process.

    Call `work`, `stop`, `drain` and `aclose` in this order. All but `aclose` may be omitted, and all may be repeated.
    """

    def __init__(
        self, state: State, sealer: Sealer, settings: JobSettings, redis: RedisSettings, workers: Sequence[AnyWorker] = ()
    ) -> None:
        self._state = state
        self._sealer = sealer
        self._workers = workers
        self._followers: set[_Follower] = set()
        self._checked: set[str] = set()  # responses that a follower has settled within the last `POLL` seconds
        self._lease = settings.lease
        self._keys_agree = redis.url is None  # an embedded store has no other replicas
        self._working = list[asyncio.Task[None]]()
        self._stopped = False

    async def check_secrets(self) -> None:
        """Check that every replica can decrypt the credential that is stored with a job. An embedded Redis needs no check.

        Raises `NotSupported` if `auth.secret_keys` is unset or differs between replicas, or `StateUnavailable` if Redis fails.
        """
        if self._keys_agree:
            return
        need = "Background responses need 'auth.secret_keys' (RESPONSES_MW_AUTH_SECRET_KEYS)"
        if not self._sealer.is_shared:
            message = f"{need}, the same on every replica, because the credential of a job is stored encrypted."
            raise NotSupported(message, param="background")
        self._keys_agree = await self._state.check_keys(self._sealer.key_ids)
        if not self._keys_agree:
            message = f"{need} that are the same on every replica, but the keys of this replica differ."
            raise NotSupported(message, param="background")

    async def create(self, run: Run, body: dict[str, Any], gate: Gate) -> Document:
        """Store a run as a queued job and return the job's document. Call `check_secrets` first.

        `body` is the request from which `run` was prepared. `gate` first checks the caller's credential. Raises the same errors
        as `gate`, or `OverBound`, `OverQuota` or `Unavailable` if the job cannot be stored.
        """
        await gate()
        # A response with `store: false` is kept for a short time, and needs memory too.
        if await self._state.nearly_full() if not run.request.store else not run.document["store"]:
            raise StateFull("its memory is nearly full")
        with queueing_span(run.document["id"]):
            return await self._create(run, body)

    async def _create(self, run: Run, body: dict[str, Any]) -> Document:
        start = sse.encode(run.assembler.start(queued=True))
        document, owner = run.document, run.context.owner
        request = {name: value for name, value in body.items() if name not in ("input", "tools")}
        sealed = self._seal_secrets(run, body)
        await self._state.queue.reserve(document["id"], owner, _CREATION_TIMEOUT)
        try:
            await self._state.jobs.create(document, request, run.context.input, owner, sealed, Batch(0, 1, start))
        except Deleted:
            raise Unavailable("Storing the response took too long; try again.") from None
        try:
            await self._state.queue.ready(document["id"])
        except StateUnavailable as error:  # the job is stored, and the check after _CREATION_TIMEOUT queues it
            logger.warning("response %s is stored, but cannot be queued yet: %s", document["id"], error.message)
        annotate(outcome="queued", stored=document["store"])
        return document

    def _seal_secrets(self, run: Run, body: dict[str, Any]) -> str:
        # Tools may contain credentials too, for example for MCP servers.
        secrets = {
            "headers": with_trace_context(run.caller.headers),
            "tools": body.get("tools"),
            "is_captured": (request := current_request()) is not None and request.is_captured,
        }
        purpose = secrets_purpose(run.document["id"])
        return self._sealer.seal(orjson.dumps(secrets), purpose=purpose, owner=run.context.owner)

    async def follow(self, document: Document, after: int = -1) -> AsyncGenerator[Batch, None]:
        """Yield the batches of a background response after event number `after`, first from the log and then as they arrive.

        The first batch may be empty. The last batch is `final`, unless this process stops or Redis is unavailable for
        `PATIENCE` seconds. If the log cannot be read further, the last batch is `response.failed`. The first read of the log
        raises `BadRequest` if the log has expired, or if the response is running and its log has not reached event `after`. It
        raises `StateUnavailable` if Redis fails.
        """
        follower = _Follower(self._state, document, after, self._check, is_closed=self._stopped)
        self._followers.add(follower)
        try:
            channel = response_address(document["id"]).events
            announced = partial(self._state.jobs.announced, document["id"])
            with self._state.wakeups.on(channel, lambda message: follower.announce(announced(message))):
                # An empty batch tells the client that it is connected.
                batches = await follower.read(first=True) or [Batch(after + 1, after, b"")]
                while batches:
                    for batch in batches:
                        if batch.first > follower.number + 1:
                            yield follower.report_broken("events are missing in its log")
                            return
                        yield follower.advance(batch)
                    batches = await follower.next()
        finally:
            self._followers.discard(follower)

    async def cancel(self, response_id: str, owner: str) -> Document:
        """Cancel a background response unless it has ended, and return its document.

        Raises `Missing` if the owner has no such response, or `BadRequest` if it is not a background response. Raises
        `Unavailable` if it cannot be cancelled now.
        """
        backoff = Backoff(_MIN_CANCEL_PAUSE, _MAX_CANCEL_PAUSE)
        for _ in range(_CANCEL_ATTEMPTS):
            document = (await self._state.responses.get(response_id, owner)).document
            if not document["background"]:
                raise BadRequest("Cannot cancel a synchronous response.", param="response_id")
            if document["status"] not in RUNNING:
                return document
            taken = await self._state.jobs.take(response_id, TakeReason.CANCEL, worker="", lease=self._lease, owner=owner)
            if taken.worker:
                await self._state.jobs.tell(taken.worker, response_id)
            if taken.job is not None:
                with suppress(Fenced):
                    return await write_end(self._state, taken)
            # The response has just ended, or another request is cancelling it.
            await backoff.wait()
        raise Unavailable("The response could not be cancelled; try again.")

    async def requeue(self, response_id: str) -> None:
        """Let the next worker with capacity run a background response, before all other jobs. For the operator.

        If a worker runs it, the worker loses it, and another one continues its answer, or fails it if that is not possible. If
        it waits for a retry, the wait ends. If no worker has claimed it yet, it keeps its place in the queue.

        Raises `Missing` if there is no such response, or `BadRequest` if it has ended or is being cancelled.
        """
        requeued = await self._state.jobs.requeue(response_id)
        if requeued is None:
            raise BadRequest("The response has ended, or is being cancelled.", param="response_id")
        if not await self._state.queue.restore(response_id, requeued.owner):
            await self._state.queue.ready(response_id, first=True)
        if requeued.worker:
            await self._state.jobs.tell(requeued.worker, response_id)

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete a response. A queued or running response is first cancelled.

        Raises `Missing` if the owner has no such response, or `Unavailable` if it cannot be cancelled or deleted now.
        """
        with suppress(Damaged):  # a damaged response can still be deleted
            document = (await self._state.responses.get(response_id, owner)).document
            if document["status"] in RUNNING:
                await self.cancel(response_id, owner)
        await self._state.responses.delete(response_id, owner)

    async def settle(self, response_id: str) -> None:
        """Finalize a response that no worker will complete, or queue a waiting response that is missing from the queue.

        Other responses stay as they are. Raises `StateUnavailable` if Redis fails.
        """
        taken = await self._state.jobs.take(response_id, TakeReason.SETTLE, worker="", lease=self._lease)
        if taken.unseen and await self._state.queue.restore(response_id, taken.unseen):
            logger.warning("response %s was missing from the queue and has been put back", response_id)
        if taken.job is not None:
            try:
                await write_end(self._state, taken)
            except (Deleted, Fenced):
                logger.debug("response %s was finalized by another process", response_id)

    async def _check(self, response_id: str) -> None:
        """Settle a response for all of its followers in this process, at most once in `POLL` seconds. Log errors."""
        if response_id in self._checked:
            return
        self._checked.add(response_id)
        asyncio.get_running_loop().call_later(POLL, self._checked.discard, response_id)
        try:
            await self.settle(response_id)
        except StateUnavailable:
            logger.debug("response %s cannot be finalized yet", response_id)
        except Exception:
            logger.exception("could not finalize response %s", response_id)

    def work(self) -> None:
        """Start claiming jobs if this process has workers. If the wrapped app is the upstream, it must have started."""
        if not self._working and not self._stopped:
            self._working = [background_task(worker.run()) for worker in self._workers]

    def is_working(self) -> bool:
        """Return whether this process claims jobs now."""
        return bool(self._working) and not any(task.done() for task in self._working) and not self._stopped

    @property
    def running(self) -> int:
        """The number of background responses that this process runs now."""
        return sum(worker.running for worker in self._workers if isinstance(worker, Worker))

    def stop(self) -> None:
        """Stop claiming jobs, and close the streams of background responses, so that clients resume on another replica."""
        self._stopped = True
        for follower in self._followers:
            follower.close()
        for worker in self._workers:
            worker.stop()

    async def drain(self) -> None:
        """Call `stop`, and wait until the workers' jobs have ended or are in their queues again."""
        self.stop()
        if self._working:
            await asyncio.wait(self._working)  # if a worker fails, `background_task` logs the error

    async def aclose(self) -> None:
        try:
            await self.drain()
        finally:
            for task in self._working:
                task.cancel()
            await asyncio.gather(*self._working, return_exceptions=True)


class _Follower:
    """Reads one log for one client. `number` is the number of the last event that was passed to the client."""

    def __init__(
        self, state: State, document: Document, number: int, check: Callable[[str], Awaitable[None]], *, is_closed: bool
    ) -> None:
        self._state = state
        self._document = document
        self._check = check
        self.response_id: str = document["id"]
        self.number = number
        self._is_closed = is_closed
        self._is_at_end = False  # whether the follower has passed the final batch or must stop
        self._is_behind = False  # whether the log may have batches after the page that was read last
        self._has_news = False
        self._waiter: asyncio.Future[Batch | None] | None = None

    def announce(self, batch: Batch | None) -> None:
        """Report a new `batch`, or None if the log may have new batches."""
        if self._waiter is None or self._waiter.done():
            self._has_news = True
        else:
            self._waiter.set_result(batch if batch is not None and batch.first == self.number + 1 else None)

    def close(self) -> None:
        """Close the stream without a terminal event, so that the client resumes on another replica."""
        self._is_closed = True
        self.announce(None)

    def advance(self, batch: Batch) -> Batch:
        """Advance the position past `batch`, and return the batch's events after the old position."""
        seen, self.number = self.number, max(self.number, batch.last)
        self._is_at_end = batch.final
        if batch.first > seen:
            return batch
        return Batch(seen + 1, batch.last, sse.skip(batch.data, seen + 1 - batch.first), final=batch.final)

    async def next(self) -> list[Batch]:
        """Wait for the next batches. Return an empty list if the stream must be closed."""
        batches: list[Batch] = []
        while not (batches or self._is_at_end or self._is_closed):
            batch = None if self._is_behind else await self._wait_for_news()
            batches = [batch] if batch is not None else await self.read()
        return batches

    async def _wait_for_news(self) -> Batch | None:
        """Return the next announced batch, or None if the next batch must be read from the log.

        After `POLL` seconds without news, check the response, because a worker or a message may be lost.
        """
        if not self._has_news:
            waiter: asyncio.Future[Batch | None] = asyncio.get_running_loop().create_future()
            self._waiter = waiter
            await asyncio.wait({waiter}, timeout=POLL)
            self._waiter = None
            if waiter.done():
                return waiter.result()
            await self._check(self.response_id)
        self._has_news = False
        return None

    async def read(self, *, first: bool = False) -> list[Batch]:
        """Read the next batches. Return an empty list if the log has no new batches, or if the stream must be closed.

        The `first` read raises the errors of `follow`. While Redis is unavailable, later reads are repeated for `PATIENCE`
        seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while not (self._is_closed or self._is_at_end):
            try:
                return await self._read_page() or await self._end(first=first)
            except StateUnavailable as error:
                if first:
                    raise
                if isinstance(error, Damaged):
                    return [self.report_broken(error.reason)]
                self._is_at_end = loop.time() > deadline
                await asyncio.sleep(_PAUSE)
        return []

    async def _end(self, *, first: bool) -> list[Batch]:
        """Handle the end of the log. Return an empty list if the response is running, otherwise the last batches."""
        number = self.number
        try:
            last, has_ended = await self._state.jobs.progress(self.response_id)
        except Missing:
            return [self._failed(_LOST)]
        if first and last <= number and has_ended:
            return [Batch(number + 1, number, b"", final=True)]
        if first and last < number:
            message = f"Response '{self.response_id}' has no event {number} yet; its last one is {last}."
            raise BadRequest(message, param="starting_after", code="invalid_value")
        # If Redis has lost events that were read here, another worker writes other events with the same numbers.
        if last < number or (last == number and has_ended):
            return [self.report_broken(_REWOUND)]
        return await self._read_last_page(first=first) if has_ended else []

    async def _read_last_page(self, *, first: bool) -> list[Batch]:
        batches = await self._read_page()  # the response may have ended between the two reads
        if not batches and first:
            message = f"The events of response '{self.response_id}' have expired; the response itself can still be retrieved."
            raise BadRequest(message, param="stream", code="stream_expired")
        self._is_at_end = not batches
        return batches

    async def _read_page(self) -> list[Batch]:
        batches = await self._state.jobs.log(self.response_id, self.number)
        self._is_behind = fills_page(batches)
        return batches

    def report_broken(self, reason: str) -> Batch:
        """Log the `reason` that no further events can be read, and return the terminal event for the client."""
        logger.error("response %s cannot be followed beyond event %d: %s", self.response_id, self.number, reason)
        return self._failed(f"The events of the response cannot be read: {reason}.")

    def _failed(self, message: str) -> Batch:
        """Return a `response.failed` event as the final batch. The event's number is valid for this client only."""
        error = {"code": "server_error", "message": message}
        return final_batch({**self._document, "status": "failed", "error": error}, self.number + 1)
