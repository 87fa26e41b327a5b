"""Writes the end of a background response in place of its worker: the worker was lost, or the response was cancelled."""

from __future__ import annotations

import logging
from dataclasses import replace

from ..engine.history import RunContext, commit
from ..errors import APIError, WorkerLost
from ..ids import RunIds
from ..protocol import sse
from ..protocol.response.document import end
from ..protocol.response.replay import LogReplay
from ..protocol.types import Document
from ..state import Batch, Chain, Damaged, Fenced, Job, OverBound, State, StateUnavailable, Taken
from ..telemetry.context import report_lost_job
from ..telemetry.metrics import LEASES_LOST
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
    output = await read_log(state, job)
    output.cut()
    document = {**job.document, "output": output.items, "status": status, "error": error}
    chain = await _chain(state, job)
    last = Batch(job.next_number, job.next_number, sse.encode([end(document, job.next_number)]), final=True)
    context = RunContext(chain, RunIds(response=job.response_id), job.input, job.owner, job.token)
    try:
        await commit(state, context, document, last)
    except (OverBound, Damaged):  # the conversation is full or damaged: store the response without it
        await commit(state, replace(context, chain=Chain.new()), document, last)
    await state.queue.drop(job.response_id)
    await compress_log(state, job.response_id)
    return document


async def compress_log(state: State, response_id: str) -> None:
    """Compress the log of a response that has ended. If that fails, the log stays as it is until it expires."""
    try:
        await state.jobs.compress(response_id)
    except StateUnavailable as error:
        logger.debug("could not compress the log of response %s: %s", response_id, error.message)


async def read_log(state: State, job: Job) -> LogReplay:
    """Replay the job's log up to the first gap or damage. Only one page of it is in memory at a time.

    The caller must hold the job, so that nobody else writes to the log. Raises `Fenced` if the log was deleted.
    """
    output = LogReplay()
    while output.next_number < job.next_number:
        (batches,) = await state.jobs.logs([(job.response_id, output.next_number - 1)])
        if isinstance(batches, Damaged):
            break
        if not batches:
            raise Fenced(job.response_id)  # it was deleted in the meantime
        if not await by_size(sum(len(batch.data) for batch in batches), _replay, output, batches):
            logger.error("the event log of response %s has a gap after event %d", job.response_id, output.next_number - 1)
            break
    return output


def _replay(output: LogReplay, batches: list[Batch]) -> bool:
    """Take the batches up to the first gap. Return whether there is none."""
    for batch in batches:
        if batch.first != output.next_number:
            return False
        output.read(batch.data)
    output.join()
    return True


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
