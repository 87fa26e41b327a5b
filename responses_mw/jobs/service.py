"""Create, follow, cancel and delete background responses, and run the worker of this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import orjson

from ..auth import Gate
from ..crypto import Sealer
from ..engine.run import Run
from ..errors import BadRequest, NotSupported, Unavailable
from ..protocol import sse
from ..protocol.types import Document
from ..settings import JobSettings, RedisSettings
from ..state import Batch, Damaged, Deleted, Fenced, State, StateFull, StateUnavailable
from ..telemetry.context import annotate
from ..telemetry.tracing import queueing_span, with_trace_context
from ..threads import background_task
from .event_log import write_end
from .follower import Followers
from .job_runner import secrets_purpose
from .worker import Worker

logger = logging.getLogger(__name__)

RUNNING = frozenset({"queued", "in_progress"})
_CREATION_TIMEOUT = 5.0  # seconds after which a worker removes a reserved job from the queue if the job is not stored
_CANCEL_ATTEMPTS = 10
_CANCEL_BACKOFF = 0.05


class JobService:
    """Creates, follows, cancels and deletes background responses. If this process has a `worker`, also runs them.

    Call `start`, `work`, `stop`, `drain` and `aclose` in this order. Each of these calls may be repeated or omitted.
    """

    def __init__(
        self, state: State, sealer: Sealer, settings: JobSettings, redis: RedisSettings, worker: Worker | None = None
    ) -> None:
        self._state = state
        self._sealer = sealer
        self._worker = worker
        self._followers = Followers(state)
        self._lease = settings.lease
        self._keys_agree = redis.url is None  # an embedded store has no other replicas
        self._following: asyncio.Task[None] | None = None
        self._working: asyncio.Task[None] | None = None
        self._stopped = False

    async def check_secrets(self) -> None:
        """Check that every replica can decrypt the credential that is stored with a job. An embedded Redis needs no check.

        Raises `NotSupported` if `auth.secret_keys` is not set or differs between replicas, or `StateUnavailable` without Redis.
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
        """Store a run as a queued job and return the job's document.

        `body` is the request from which `run` was prepared. `gate` first checks the caller's credential. Raises the errors of
        `gate`, or `OverBound`, `OverQuota` or `Unavailable` if the job cannot be stored.
        """
        await gate()
        if not run.document["store"]:
            raise StateFull("its memory is nearly full")
        with queueing_span(run.document["id"]):
            return await self._create(run, body)

    async def _create(self, run: Run, body: dict[str, Any]) -> Document:
        start = sse.encode(run.assembler.start(queued=True))
        document, owner = run.document, run.context.owner
        request = {name: value for name, value in body.items() if name not in ("input", "tools")}
        # Tools may contain credentials too, for example for MCP servers.
        secrets = {"headers": with_trace_context(run.caller.headers), "tools": body.get("tools")}
        sealed = self._sealer.seal(orjson.dumps(secrets), purpose=secrets_purpose(document["id"]), owner=owner)
        await self._state.queue.reserve(document["id"], owner, _CREATION_TIMEOUT)
        try:
            await self._state.jobs.create(document, request, run.context.input, owner, sealed, Batch(0, 1, start))
        except Deleted:
            raise Unavailable("Storing the response took too long; try again.") from None
        try:
            await self._state.queue.ready(document["id"])
        except StateUnavailable as error:  # the job is stored, and the check after _CREATION_TIMEOUT queues it
            logger.warning("response %s is stored, but will be queued later: %s", document["id"], error.message)
        annotate(outcome="queued", stored=True)
        return document

    def follow(self, document: Document, *, after: int = -1) -> AsyncGenerator[Batch, None]:
        """Yield the batches of events after event number `after`; -1 yields all. See `Followers.follow`."""
        return self._followers.follow(document, after)

    async def cancel(self, response_id: str, owner: str) -> Document:
        """Cancel a background response unless it has ended, and return its document.

        Raises `Missing` if the owner has no such response, or `BadRequest` if it is not a background response. Raises
        `Unavailable` if it cannot be cancelled now.
        """
        for _ in range(_CANCEL_ATTEMPTS):
            document = (await self._state.responses.get(response_id, owner)).document
            if not document["background"]:
                raise BadRequest("Cannot cancel a synchronous response.", param="response_id")
            if document["status"] not in RUNNING:
                return document
            taken = await self._state.jobs.take(response_id, "cancel", worker="", lease=self._lease, owner=owner)
            if taken.job is None:
                continue  # the response has just ended
            if taken.worker:
                await self._state.jobs.tell(taken.worker, response_id)
            try:
                return await write_end(self._state, taken)
            except Fenced:
                # Another request cancels the response too. An immediate retry would fence that request.
                await asyncio.sleep(_CANCEL_BACKOFF)
        raise Unavailable("The response could not be cancelled; try again.")

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
        """Finalize a response whose worker was lost, or queue a waiting response that is missing from the queue.

        Other responses stay as they are. Raises `StateUnavailable` if Redis fails.
        """
        taken = await self._state.jobs.take(response_id, "settle", worker="", lease=self._lease)
        if taken.unseen and await self._state.queue.restore(response_id, taken.unseen):
            logger.warning("response %s was missing from the queue and has been put back", response_id)
        if taken.job is not None:
            try:
                await write_end(self._state, taken)
            except (Deleted, Fenced):
                logger.debug("response %s was finalized by another process", response_id)

    def start(self) -> None:
        """Start the task that checks stalled streams, because a worker or a message may be lost.

        For each stalled stream, the task calls `settle` and then reads the event log.
        """
        self._following = self._following or background_task(self._followers.run(self.settle))

    def work(self) -> None:
        """Start claiming jobs if this process has a worker. The upstream must be available."""
        if self._worker is not None and not self._stopped:
            self._working = self._working or background_task(self._worker.run())

    def is_working(self) -> bool:
        """Return whether this process claims jobs now."""
        return self._working is not None and not self._working.done() and not self._stopped

    @property
    def running(self) -> int:
        """The number of background responses that this process runs now."""
        return self._worker.running if self._worker is not None else 0

    def stop(self) -> None:
        """Stop claiming jobs, and close the streams of background responses, so that clients resume on another replica."""
        self._stopped = True
        self._followers.close()
        if self._worker is not None:
            self._worker.stop()

    async def drain(self) -> None:
        """Call `stop`, and wait until the worker's jobs have ended or are in the queue again."""
        self.stop()
        if self._working is not None and not self._working.done():
            await asyncio.wait({self._working})  # if the worker fails, `background_task` logs the error

    async def aclose(self) -> None:
        try:
            await self.drain()
        finally:
            tasks = [task for task in (self._following, self._working) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
