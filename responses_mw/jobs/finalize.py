"""Writes the end of a background response in place of its worker: the worker was lost, or the response was cancelled."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from ..engine.history import RunContext, commit_job
from ..errors import APIError, WorkerLost
from ..ids import RunIds
from ..protocol import sse
from ..protocol.response.replay import end, fold
from ..protocol.types import Document
from ..state import Batch, Chain, Damaged, Fenced, Job, OverBound, State, StateUnavailable, Taken
from ..telemetry import LEASES_LOST, report_lost_job
from ..threads import by_size

logger = logging.getLogger(__name__)


async def write_end(state: State, taken: Taken) -> Document:
    """Finalize a job that was taken as `lost`, `failed` or `cancelled`."""
    assert taken.job is not None
    job, error, kind = taken.job, taken.job.error, ""
    if taken.verdict == "cancelled":
        error = None
    elif taken.verdict != "failed" or error is None:
        LEASES_LOST.add()
        error, kind = {"code": "server_error", "message": WorkerLost().message}, WorkerLost.__name__
    document = await _write(state, job, "failed" if error else "cancelled", error)
    report_lost_job(job.response_id, job.owner, document["status"], error["code"] if error else "", kind)
    return document


async def write_failure(state: State, job: Job, message: str, code: str = "server_error") -> Document:
    """Finalize a job as failed, with the output in its log. Raises `Fenced` if another process holds it now."""
    return await _write(state, job, "failed", {"code": code, "message": message})


async def _write(state: State, job: Job, status: str, error: dict[str, str] | None) -> Document:
    log, size = await read_log(state, job)
    document = await by_size(size, fold, job.document, log)
    document.update(status=status, error=error)
    chain = await _chain(state, job)
    last = Batch(job.next_number, job.next_number, sse.encode([end(document, job.next_number)]), final=True)
    context = RunContext(chain, RunIds(response=job.response_id), job.input, job.owner, job.token)
    try:
        await commit_job(state, context, document, last)
    except (OverBound, Damaged):  # the conversation is full or damaged: store the response without it
        await commit_job(state, replace(context, chain=Chain.new()), document, last)
    await state.queue.drop(job.response_id)
    await compress_log(state, job.response_id)
    return document


async def compress_log(state: State, response_id: str) -> None:
    """Compress the log of a response that has ended. If that fails, the log stays as it is until it expires."""
    try:
        await state.jobs.compress(response_id)
    except StateUnavailable as error:
        logger.debug("could not compress the log of response %s: %s", response_id, error.message)


async def read_log(state: State, job: Job) -> tuple[list[dict[str, Any]], int]:
    """Return the events in the job's log up to the first gap or damage, and their size in bytes.

    The caller must hold the job, so that nobody else writes to the log. Raises `Fenced` if the log was deleted.
    """
    events: list[dict[str, Any]] = []
    number, size = -1, 0
    while number < job.next_number - 1:
        (batches,) = await state.jobs.logs([(job.response_id, number)])
        if isinstance(batches, Damaged):
            break
        if not batches:
            raise Fenced(job.response_id)  # it was deleted in the meantime
        for batch in batches:
            if batch.first != number + 1:
                logger.error("the event log of response %s has a gap after event %d", job.response_id, number)
                return events, size
            events += sse.decode(batch.data)
            number, size = batch.last, size + len(batch.data)
    return events, size


async def _chain(state: State, job: Job) -> Chain:
    """Return the history of the response, or an empty one if it was deleted or is damaged."""
    previous, conversation = job.document["previous_response_id"], job.document["conversation"]
    try:
        if previous:
            return await state.responses.chain(previous, job.owner)
        if conversation:
            return await state.conversations.chain(conversation["id"], job.owner)
    except APIError as error:
        if error.status >= 500 and not isinstance(error, Damaged):
            raise
    return Chain.new()
