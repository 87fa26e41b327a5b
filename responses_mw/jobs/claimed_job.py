"""One job in a worker's hands: from the request that was stored to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import MutableMapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson

from ..crypto import Sealer, Unsealable
from ..engine.history import commit_job
from ..engine.run import Run, limits_of
from ..engine.runner import Runner
from ..errors import APIError, Unauthorized, UpstreamError
from ..protocol import sse
from ..protocol.request.create import parse
from ..settings import Settings
from ..state import Batch, Chain, Deleted, Fenced, Job, OverBound, OverQuota, State, StateUnavailable
from ..telemetry import link_to_request
from ..threads import by_size
from ..upstream import Caller
from .background import purpose
from .event_log import DRAINED, LOST, SHUT_DOWN, EventLogWriter, Held
from .finalize import write_failure

logger = logging.getLogger(__name__)

KEY_COMES_WITHIN = 3600.0
"""Seconds after its creation for which a job waits for a replica that has its key: keys are being rolled out."""
_LOG_STEP = 1024 * 1024
"""The log of a running job is counted as stored each time that it has grown by so many bytes."""
_NOT_IN_TIME = "The server was stopped before the response was complete."


class JobRunner:
    """Runs jobs as ``settings`` say; ``scope`` is what calls in this process inherit from."""

    def __init__(
        self,
        runner: Runner,
        state: State,
        sealer: Sealer,
        flusher: EventLogWriter,
        settings: Settings,
        scope: MutableMapping[str, Any] | None,
    ) -> None:
        self._runner = runner
        self._state = state
        self._sealer = sealer
        self._flusher = flusher
        self._scope = scope
        self._settings = settings
        self._limits = limits_of(settings)
        # A log holds every token as an event of some hundred bytes.
        self._longest_log = 16 * settings.state.max_response_bytes

    async def run(self, held: Held) -> None:
        """Runs the job to its end, or until it is stopped. Raises ``Unsealable`` where another replica may have the key."""
        job = held.job
        try:
            run = await self._resume(job)
        except StateUnavailable:
            raise
        except APIError as error:
            await write_failure(self._state, job, error.message, "invalid_prompt" if error.status == 400 else "server_error")
            return
        await self._produce(held, run)
        if held.stopped == DRAINED and not held.has_begun:
            await self._hand_back(held)
        elif held.stopped != LOST:
            await self._end(held, run)

    async def _resume(self, job: Job) -> Run:
        secrets = self._secrets(job)
        link_to_request(secrets["headers"])
        caller = Caller(job.owner, secrets["headers"], self._scope)
        # Items that bring tools are parsed with them; the ones that run have their ids.
        body = {**job.body, "tools": secrets["tools"], "input": job.input}
        parsed = await by_size(job.size, parse, body, self._limits)
        # It is streamed from the upstream in any case: somebody may follow it.
        request = replace(parsed, items=job.input, stream=True, size=job.size)
        return await self._runner.resume(request, caller, dict(job.document), job.token)

    def _secrets(self, job: Job) -> dict[str, Any]:
        """What the job runs with: the caller's ``headers``, and the ``tools``."""
        if job.credential is None:
            raise Unauthorized("The credential that the response was created with has expired.")
        try:
            opened = self._sealer.open(job.credential, purpose=purpose(job.response_id), owner=job.owner)
        except Unsealable:
            # Embedded, it is of a key that ended with the process before: no replica has it.
            shared = self._sealer.is_shared or self._settings.redis.url is not None
            if shared and time.time() < job.document["created_at"] + KEY_COMES_WITHIN:
                raise
            message = "The response's credential is sealed with a key that is not in auth.secret_keys."
            raise Unauthorized(message) from None
        secrets: dict[str, Any] = orjson.loads(opened)
        return secrets

    async def _produce(self, held: Held, run: Run) -> None:
        """All events but the terminal one. A stop cancels it here, which closes the upstream's connection."""
        held.task = asyncio.create_task(self._turns(held, run))
        if held.stopped:
            held.task.cancel()
        try:
            await asyncio.wait({held.task})
        finally:
            held.task.cancel()
            await asyncio.gather(held.task, return_exceptions=True)
        if not held.task.cancelled():
            held.task.result()
        elif held.stopped == SHUT_DOWN:
            run.assembler.fail("server_error", _NOT_IN_TIME)

    async def _turns(self, held: Held, run: Run) -> None:
        number, counted = held.job.next_number, 0
        async with aclosing(self._runner.run_detached(run, lambda assembler: assembler.resume(number))) as batches:
            async for events in batches:
                self._flusher.write(held, events)
                if run.assembler.asked:  # who takes over must know of the calls that were carried out
                    await self._flusher.written(held)
                if held.size > self._longest_log:
                    run.fail(UpstreamError("The answer is longer than what is stored."))
                    return
                if held.size - counted >= _LOG_STEP:
                    counted = held.size
                    try:
                        await self._state.jobs.count_log(held.job, counted)
                    except OverQuota as error:
                        run.fail(error)
                        return

    async def _end(self, held: Held, run: Run) -> None:
        """Stores the response, with the last events. Tried for as long as the lease lasts."""
        await self._flusher.last(held)
        number, rest = held.next_number, held.batch()
        before = rest.data if rest is not None else b""
        while held.stopped != LOST:
            data = before + sse.encode(run.assembler.terminal())
            try:
                await self._commit(run, Batch(number, held.next_number, data, final=True))
            except StateUnavailable as error:
                logger.warning("response %s cannot be stored yet: %s", held.job.response_id, error.message)
                await asyncio.sleep(0.2)
            except OverBound as error:
                run.fail(UpstreamError(error.message))
                run.context = replace(run.context, chain=Chain.new())
            except (Deleted, Fenced):
                break
            else:
                await self._state.queue.drop(held.job.response_id)
                break

    async def _commit(self, run: Run, last: Batch) -> None:
        await commit_job(self._state, run.context, run.document, last)

    async def _hand_back(self, held: Held) -> None:
        await self._flusher.last(held)
        await self._state.jobs.release(held.job)
        await self._state.queue.ready(held.job.response_id, first=True)
