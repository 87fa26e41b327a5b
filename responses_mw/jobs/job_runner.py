"""Run one claimed job, and decide whether and when to retry it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import MutableMapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import orjson

from ..crypto import InvalidEnvelope, Sealer
from ..engine.history import commit
from ..engine.run import Run, RunMode
from ..engine.runner import Runner
from ..engine.turns import MAX_CONTINUATIONS
from ..errors import (
    APIError,
    Unauthorized,
    Unavailable,
    UpstreamError,
    WorkerLost,
)
from ..protocol import sse
from ..protocol.request.create import parse
from ..protocol.response.replay import Takeover
from ..settings.groups import RedisSettings
from ..state import (
    Batch,
    Chain,
    Damaged,
    Deleted,
    Fenced,
    Job,
    JobVerdict,
    OverBound,
    OverQuota,
    State,
    StateUnavailable,
    Taken,
)
from ..tasks import by_size
from ..telemetry.context import annotate, end_run, report_continuation
from ..telemetry.metrics import JOBS_RETRIED
from ..telemetry.tracing import link_to_request
from ..upstream import Caller
from ..upstream.errors import as_response_error
from ..upstream.routing import Route
from .event_log import EVENTS_BEFORE_OUTPUT, ClaimedJob, EventLogWriter, clean_up, read_log, write_end, write_output
from .queue_worker import StopReason
from .retry import retry_delay, retry_reason

logger = logging.getLogger(__name__)

KEY_ROLLOUT_SECONDS = 3600.0
"""Seconds after its creation that a job waits for a replica with its key. A new key may not have reached all replicas."""
_LOG_STEP = 1024 * 1024  # growth in bytes of a running job's log before it is charged to the owner's quota
TIMEOUT_FACTOR = 20  # jobs wait this many times longer for the upstream than streams (`upstream.overload_timeout`)


class JobRunner:
    def __init__(
        self,
        runner: Runner,
        state: State,
        sealer: Sealer,
        log_writer: EventLogWriter,
        redis: RedisSettings,
        scope: MutableMapping[str, Any] | None,
    ) -> None:
        self._runner = runner
        self._upstreams = runner.factory.upstreams
        self._state = state
        self._sealer = sealer
        self._log_writer = log_writer
        self._retry_timeout = TIMEOUT_FACTOR * self._upstreams.default.settings.overload_timeout
        self._scope = scope
        self._is_embedded = redis.url is None
        # Each token of the response is an event of a few hundred bytes in the log.
        self._max_log_bytes = 8 * state.options.response_bytes

    async def run(self, claimed: ClaimedJob) -> None:
        """Run the job until the job ends, returns to the queue or is stopped.

        Raises:

        `InvalidEnvelope`    this replica cannot decrypt the job's secrets, but another replica may have the key
        `Deleted`            the response was deleted
        `Fenced`             another process has leased the job, or its log is missing
        `StateUnavailable`   Redis fails
        """
        job = claimed.job
        try:
            run = await self._resume(claimed)
        except APIError as error:
            if isinstance(error, StateUnavailable) and not isinstance(error, Damaged):
                raise
            if isinstance(error, WorkerLost):
                await write_end(self._state, Taken(JobVerdict.LOST, job))
                return
            if not await self._retry(claimed, error, None):
                document = await write_output(self._state, job, as_response_error(error))
                end_run(document, turns=0, error=error)
            return
        await self._produce(claimed, run)
        if claimed.stopped is StopReason.LOST:
            annotate(outcome="lost")
        elif not await self._leave(claimed, run):
            await self._end(claimed, run)

    async def _leave(self, claimed: ClaimedJob, run: Run) -> bool:
        """Requeue a job that was stopped or needs a retry. Return False if this worker must finalize the job."""
        if not claimed.is_interrupted:
            return await self._retry(claimed, run.error, run)
        if not await self._can_go_on(claimed, run):
            run.fail(Unavailable("The server was stopped before the response was complete."))
            return False
        await self._flush(claimed)
        job = claimed.job
        await self._state.jobs.release(replace(job, continuations=job.continuations + run.continuations))
        annotate(outcome="requeued")
        await self._state.queue.ready(job.response_id, first=True)
        return True

    async def _resume(self, claimed: ClaimedJob) -> Run:
        job = claimed.job
        secrets = self._secrets(job)
        link_to_request(secrets["headers"])
        annotate(is_captured=bool(secrets.get("is_captured")))  # older releases do not write it
        # Parsing checks the items that define tools. The run uses the stored items, which have ids.
        body = {**job.body, "tools": secrets["tools"], "input": job.input}
        parsed = await by_size(job.size, parse, body)
        caller = Caller(job.owner, secrets["headers"], self._scope, model=parsed.model)
        if job.retries or not self._upstreams.of(caller).pool.is_available:
            await self._upstreams.probe(caller)  # do not blame this request for an upstream that is already unavailable
        # Always stream from the upstream, because a client may follow the response.
        request = replace(parsed, items=job.input, stream=True, size=job.size)
        route = await self._runner.factory.route(request, caller)
        return await self._runner.factory.resume(request, caller, job, await self._read_takeover(claimed, route), route)

    async def _read_takeover(self, claimed: ClaimedJob, route: Route) -> Takeover | None:
        """Return the output of an earlier worker, if any. Raises `WorkerLost` if the output cannot be continued."""
        job = claimed.job
        if job.next_number <= EVENTS_BEFORE_OUTPUT:
            return None
        if not route.can_take_over:
            raise WorkerLost
        log = await read_log(self._state, job)
        claimed.size = log.size
        takeover = Takeover(log)
        if log.next_number < job.next_number or not takeover.can_go_on:
            raise WorkerLost
        report_continuation(job.response_id, reason="worker", phase=takeover.phase)
        return takeover

    async def _can_go_on(self, claimed: ClaimedJob, run: Run | None) -> bool:
        """Return whether another worker can continue the job if this worker stops it."""
        return run is None or not claimed.has_begun or await self._runner.turns.can_hand_over(run)

    def _secrets(self, job: Job) -> dict[str, Any]:
        """Decrypt the job's secrets. Raises `InvalidEnvelope` if another replica may have the key, otherwise `Unauthorized`."""
        if job.credential is None:
            raise Unauthorized("The credential that the response was created with has expired.")
        try:
            opened = self._sealer.open(job.credential, purpose=secrets_purpose(job.response_id), owner=job.owner)
        except InvalidEnvelope:
            # With an embedded store, the key was lost with the previous process, and no replica has it.
            shared = self._sealer.is_shared or not self._is_embedded
            if shared and time.time() < job.document["created_at"] + KEY_ROLLOUT_SECONDS:
                raise
            message = "The response's credential is encrypted with a key that is not in auth.secret_keys."
            raise Unauthorized(message) from None
        secrets: dict[str, Any] = orjson.loads(opened)
        return secrets

    async def _produce(self, claimed: ClaimedJob, run: Run) -> None:
        """Run the job's turns until their end or `claimed.stop`, and write all events except the terminal event."""
        if claimed.stopped:  # a timeout of 0 would let the first turn send its request
            claimed.is_interrupted = True
            return
        claimed.turns = asyncio.timeout(None)
        try:
            async with claimed.turns:
                await self._turns(claimed, run)
        except TimeoutError:
            if not claimed.turns.expired():
                raise
            claimed.is_interrupted = True
        finally:
            claimed.turns = None

    async def _turns(self, claimed: ClaimedJob, run: Run) -> None:
        counted = 0
        async with aclosing(self._runner.run_prepared(run, RunMode.DETACHED)) as batches:
            async for events in batches:
                self._log_writer.write(claimed, events)
                if run.assembler.answer.asked:  # a worker that takes over must know which calls were made
                    await self._log_writer.wait_until_written(claimed)
                if claimed.size > self._max_log_bytes:
                    run.fail(UpstreamError("The answer is too long to be stored."))
                    return
                if claimed.size - counted >= _LOG_STEP:
                    counted = claimed.size
                    try:
                        await self._state.jobs.count_log(claimed.job, counted)
                    except OverQuota as error:
                        run.fail(error)
                        return

    async def _end(self, claimed: ClaimedJob, run: Run) -> None:
        """Store the response together with its last events. While Redis is unavailable, retry until the lease is lost."""
        annotate(outcome="lost")  # until the response is stored
        await self._log_writer.last(claimed)
        number, rest = claimed.next_number, claimed.batch()
        before = rest.data if rest is not None else b""
        while claimed.stopped is not StopReason.LOST:
            data = before + sse.encode(run.assembler.terminal())
            last = Batch(number, claimed.next_number, data, final=True)
            try:
                await commit(self._state, run.context, run.document, last)
            except (OverBound, Damaged) as error:
                if not run.context.chain.items and isinstance(error, Damaged):
                    break  # the record itself is damaged
                run.fail(UpstreamError(error.message, cause=error.cause))
                run.context = replace(run.context, chain=Chain.new())
            except StateUnavailable as error:
                logger.warning("response %s cannot be stored yet: %s", claimed.job.response_id, error.message)
                await asyncio.sleep(0.2)
            except (Deleted, Fenced):
                break
            else:
                run.report()
                await clean_up(self._state, claimed.job.response_id)
                break

    async def _retry(self, claimed: ClaimedJob, error: Exception | None, run: Run | None) -> bool:
        """Requeue the job if the upstream was unavailable, another worker can continue the job and there is time left.

        `error` is the reason why the run ended. Return False if this worker must finalize the job.
        """
        why = retry_reason(error)
        if why is None:
            return False
        assert isinstance(error, UpstreamError)
        if run is not None and not self._upstreams.is_available:  # the error may concern only the model or prompt of this run
            with suppress(UpstreamError):
                await self._upstreams.probe(run.caller)  # an endpoint that answers is readmitted
        job, is_broken = claimed.job, why == "broken"
        if run is not None:
            job = replace(job, continuations=job.continuations + run.continuations + is_broken)
        if claimed.has_begun and job.continuations > MAX_CONTINUATIONS:
            return False
        elapsed = asyncio.get_running_loop().time() - claimed.began
        waits_longer = job.retries and not claimed.has_grown
        left = job.retry_seconds - elapsed if waits_longer else self._retry_timeout
        if left <= 0 or not await self._can_go_on(claimed, run):
            return False
        await self._flush(claimed)
        annotate(error=error, outcome="requeued")
        shown = as_response_error(error)
        # A run that was interrupted is treated as an attempt, because the request itself may crash the upstream.
        if await self._state.jobs.retry(job, shown, seconds=self._retry_timeout, is_attempt=is_broken):
            pause = min(left, retry_delay(job.retries, error))
            await self._state.queue.renew([job.response_id], pause)
            JOBS_RETRIED.add(1, {"reason": why})
            logger.info("response %s waits %.1f s for the upstream: %s", job.response_id, pause, why)
        return True

    async def _flush(self, claimed: ClaimedJob) -> None:
        """Append this worker's pending output to the event log, and stop appending further events."""
        if claimed.has_grown:
            await self._log_writer.wait_until_written(claimed)
        await self._log_writer.last(claimed)


def secrets_purpose(response_id: str) -> str:
    return f"job {response_id}"
