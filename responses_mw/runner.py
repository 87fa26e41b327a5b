"""One run makes one response. Streams, JSON, background jobs and the cache are all readers of the one iterator here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from .config import Settings
from .errors import APIError, UpstreamError
from .ids import RunIds
from .protocol import document
from .protocol.assembler import Assembler, Options
from .protocol.chat import to_chat
from .protocol.events import Event
from .protocol.request import CreateResponse
from .protocol.types import Chunk
from .upstream import Caller, ChatStream, Upstream
from .upstream.faults import as_response_error

logger = logging.getLogger(__name__)

_BROKEN = frozenset({"abort", "error"})
"""Finish reasons that tell of a fault, not of an end."""


class Runner:
    def __init__(self, upstream: Upstream, settings: Settings) -> None:
        self._upstream = upstream
        self._settings = settings

    async def run(self, request: CreateResponse, caller: Caller, *, grace: float | None) -> AsyncGenerator[list[Event], None]:
        """The events of one response, in batches: one for each read of the upstream.

        The first batch comes when the upstream has begun to answer, or after ``grace`` seconds (None: however long it takes).
        Until then a fault is raised as an ``APIError``; later it is the ``response.failed`` that ends the events.
        """
        dialect = await self._upstream.dialect(caller)
        model = await self._upstream.model(request.model, caller)
        chat = to_chat(request, request.items, dialect, model=model)
        run_ids = RunIds()
        created = document.create(request, response_id=run_ids.response, model=request.model or model, created_at=_now())
        created["store"] = False
        assembler = Assembler(created, run_ids, self._options(request))
        stream = self._upstream.chat(chat, caller)
        async with _begun(stream, grace) as (first, reads):
            yield assembler.start()
            try:
                chunks = await first
                while chunks is not None:
                    events = [event for chunk in chunks for event in assembler.feed(chunk)]
                    if events:
                        yield events
                    chunks = await anext(reads, None)
                events = self._end_turn(assembler, stream.done)
            except Exception as error:  # noqa: BLE001 (the outer edge of a run: whatever happens, the stream ends in an event)
                events = _fail(assembler, error)
        yield events + assembler.terminal()

    def _options(self, request: CreateResponse) -> Options:
        choice = request.tool_choice
        limited = isinstance(choice, dict) and choice["type"] == "allowed_tools"
        return Options(
            summary=request.wants_summary,
            logprobs=request.wants_logprobs,
            think_tag=self._settings.think_tag,
            allowed=frozenset(tool["name"] for tool in choice["tools"]) if limited else None,
            single_call=request.parallel_tool_calls is False,
        )

    def _end_turn(self, assembler: Assembler, done: bool) -> list[Event]:
        if not (done or assembler.ended):
            raise UpstreamError("The upstream broke off its answer.")
        if assembler.finish_reason in _BROKEN:
            raise UpstreamError("The upstream aborted its answer.")
        events = assembler.end_turn()
        assembler.conclude(_now())
        return events


def _now() -> int:
    return int(time.time())


def _fail(assembler: Assembler, error: Exception) -> list[Event]:
    if isinstance(error, UpstreamError):
        assembler.fail(*as_response_error(error))
    elif isinstance(error, APIError):
        assembler.fail("server_error", error.message)
    else:
        logger.error("response %s failed", assembler.response["id"], exc_info=error)
        assembler.fail("server_error", "The server had an error while making the response.")
    return []


@asynccontextmanager
async def _begun(
    stream: ChatStream, grace: float | None
) -> AsyncIterator[tuple[asyncio.Task[list[Chunk] | None], AsyncGenerator[list[Chunk], None]]]:
    """The first read of ``stream`` as a task that has had ``grace`` seconds, and the iterator of the others.

    Raises what the first read raised, if that came in time. On leaving, the connection is closed.
    """
    reads = aiter(stream)
    first = asyncio.create_task(_next(reads))
    try:
        await asyncio.wait({first}, timeout=grace)
        if first.done():
            first.result()
        yield first, reads
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await reads.aclose()


async def _next(reads: AsyncGenerator[list[Chunk], None]) -> list[Chunk] | None:
    return await anext(reads, None)
