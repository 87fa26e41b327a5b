"""One run makes one response. Streams, JSON, background jobs and the cache are all readers of the one iterator here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from .chains import Chains, Ground
from .config import Settings
from .errors import APIError, UpstreamError
from .protocol import document
from .protocol.assembler import Assembler, Options
from .protocol.chat import to_chat
from .protocol.events import Event
from .protocol.reasoning import unsealed
from .protocol.request import CreateResponse
from .protocol.types import Chunk
from .sealing import Sealer, Unsealable
from .upstream import Caller, ChatStream, Upstream
from .upstream.faults import as_response_error

logger = logging.getLogger(__name__)

_BROKEN = frozenset({"abort", "error"})
"""Finish reasons that tell of a fault, not of an end."""


class Runner:
    """Runs requests: history, chat turn, commit."""

    def __init__(self, upstream: Upstream, chains: Chains, sealer: Sealer, settings: Settings) -> None:
        self._upstream = upstream
        self._chains = chains
        self._sealer = sealer
        self._settings = settings

    async def run(self, request: CreateResponse, caller: Caller, *, grace: float | None) -> AsyncGenerator[list[Event], None]:
        """The events of one response, in batches: one for each read of the upstream.

        The first batch comes when the upstream has begun to answer, or after ``grace`` seconds (None: however long it takes).
        Until then a fault is raised as an ``APIError``; later it is the ``response.failed`` that ends the events.
        """
        dialect = await self._upstream.dialect(caller)
        model = await self._upstream.model(request.model, caller)
        ground = await self._chains.begin(request, caller.owner)
        items = unsealed(ground.items, partial(self._unseal, caller.owner), offset=len(ground.chain.items))
        chat = to_chat(request, items, dialect, model=model)
        created = document.create(request, response_id=ground.ids.response, model=request.model or model, created_at=_now())
        created["store"] = await self._chains.will_store(request)
        assembler = Assembler(created, ground.ids, self._options(request, ground))
        stream = self._upstream.chat(chat, caller)
        async with _begun(stream, grace) as (first, reads):
            yield assembler.start()
            events: list[Event] = []
            try:
                chunks = await first
                while chunks is not None:
                    for chunk in chunks:
                        events += assembler.feed(chunk)
                    if events:
                        yield events
                        events = []
                    chunks = await anext(reads, None)
                events = self._end_turn(assembler, stream.done)
            except Exception as error:  # the outer edge of a run: whatever happens, the stream ends in an event
                if grace is None:
                    raise
                _fail(assembler, error)
        await self._commit(ground, assembler, whole=grace is None)
        yield events + assembler.terminal()

    async def _commit(self, ground: Ground, assembler: Assembler, *, whole: bool) -> None:
        """Stores the response before its last event is seen. A fault is that event, or raised where the answer is ``whole``."""
        try:
            await self._chains.commit(ground, assembler.response)
        except APIError as error:
            if whole:
                raise
            assembler.fail("server_error", error.message)

    def _options(self, request: CreateResponse, ground: Ground) -> Options:
        choice = request.tool_choice
        limited = isinstance(choice, dict) and choice["type"] == "allowed_tools"
        return Options(
            summary=request.wants_summary,
            logprobs=request.wants_logprobs,
            think_tag=self._settings.think_tag,
            allowed=frozenset(tool["name"] for tool in choice["tools"]) if limited else None,
            single_call=request.parallel_tool_calls is False,
            used_call_ids=ground.chain.call_ids,
            seal=partial(self._seal, ground.owner) if "reasoning.encrypted_content" in request.include else None,
        )

    def _seal(self, owner: str, text: str) -> str:
        return self._sealer.seal(text.encode(), purpose="reasoning", owner=owner)

    def _unseal(self, owner: str, envelope: str) -> str | None:
        try:
            return self._sealer.open(envelope, purpose="reasoning", owner=owner).decode()
        except Unsealable:
            return None

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


def _fail(assembler: Assembler, error: Exception) -> None:
    if isinstance(error, UpstreamError):
        assembler.fail(*as_response_error(error))
    elif isinstance(error, APIError):
        assembler.fail("server_error", error.message)
    else:
        logger.error("response %s failed", assembler.response["id"], exc_info=error)
        assembler.fail("server_error", "The server had an error while making the response.")


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
