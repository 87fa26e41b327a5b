"""One run makes one response. Streams, JSON, background jobs and the cache are all readers of the one iterator here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import anyio

from .chains import Chains, Ground
from .config import Settings
from .errors import APIError, BadRequest, UpstreamError
from .protocol import document
from .protocol.assembler import Assembler
from .protocol.chat import to_chat
from .protocol.events import Event
from .protocol.options import Options
from .protocol.reasoning import unsealed
from .protocol.request import CreateResponse
from .protocol.types import Document
from .sealing import Sealer, Unsealable
from .upstream import Caller, ChatStream, Upstream
from .upstream.faults import as_response_error

logger = logging.getLogger(__name__)

_BROKEN = frozenset({"abort", "error"})
"""Finish reasons that tell of a fault, not of an end."""


@dataclass(slots=True)
class Run:
    """One response in the making."""

    request: CreateResponse
    caller: Caller
    model: str
    """The upstream's name of it."""
    ground: Ground
    assembler: Assembler
    stream: ChatStream | None = None

    @property
    def document(self) -> Document:
        return self.assembler.response


class Runner:
    """Runs requests: history, chat turn, commit."""

    def __init__(self, upstream: Upstream, chains: Chains, sealer: Sealer, settings: Settings) -> None:
        self._upstream = upstream
        self._chains = chains
        self._sealer = sealer
        self._settings = settings

    def run(self, request: CreateResponse, caller: Caller, *, grace: float | None) -> AsyncGenerator[list[Event], None]:
        """The events of one foreground response, in batches: one for each read of the upstream. It is stored before the last.

        The first batch comes when the upstream has begun to answer, or after ``grace`` seconds (None: however long it takes).
        Until then a fault is raised as an ``APIError``; later it is the ``response.failed`` that ends the events (with None, it
        is raised however late).
        """
        return self._events(partial(self.prepare, request, caller), Assembler.start, grace, commit=True)

    def turns(self, run: Run, start: Callable[[Assembler], list[Event]]) -> AsyncGenerator[list[Event], None]:
        """All events of a background ``run`` but the terminal one, for which its document is ready then. ``start`` makes the
        first of them."""

        async def begin() -> Run:
            return run

        return self._events(begin, start, 0, commit=False)

    async def prepare(self, request: CreateResponse, caller: Caller) -> Run:
        """Reads what ``request`` stands on and makes its document; the upstream has not been asked yet."""
        model = await self._upstream.model(request.model, caller)
        ground = await self._chains.begin(request, caller.owner)
        created = document.create(request, response_id=ground.ids.response, model=request.model or model, created_at=_now())
        created["store"] = await self._chains.will_store(request)
        return Run(request, caller, model, ground, Assembler(created, ground.ids, self._options(request, ground)))

    async def resume(self, request: CreateResponse, caller: Caller, created: Document, token: str) -> Run:
        """The run of a background response that was ``created`` before, by ``prepare`` on any replica. The items of ``request``
        have their ids; ``token`` is that of who runs it."""
        model = await self._upstream.model(request.model, caller)
        ground = await self._chains.rejoin(request, caller.owner, created["id"], token)
        return Run(request, caller, model, ground, Assembler(created, ground.ids, self._options(request, ground)))

    async def _events(
        self,
        begin: Callable[[], Awaitable[Run]],
        start: Callable[[Assembler], list[Event]],
        grace: float | None,
        *,
        commit: bool,
    ) -> AsyncGenerator[list[Event], None]:
        run = await begin()
        async with self._opening(run, grace) as opened:
            yield start(run.assembler)
            stream = await opened
            async for chunks in stream:
                events = run.assembler.feed(*chunks)
                if events:
                    yield events
            yield self._end_turn(run, stream)
        if commit:
            await self._commit(run, whole=grace is None)
            yield run.assembler.terminal()

    @asynccontextmanager
    async def _opening(self, run: Run, grace: float | None) -> AsyncIterator[asyncio.Task[ChatStream]]:
        """The first turn's answer, as a task that has had ``grace`` seconds; on leaving, its connection closes.

        Raises what the task raised, if that came in time. A later fault is the end of the run; without a ``grace``, it is
        raised too.
        """
        opened = asyncio.create_task(self._open(run))
        try:
            await asyncio.wait({opened}, timeout=grace)
            if opened.done():
                opened.result()
            try:
                yield opened
            except Exception as error:  # the outer edge of a run: whatever happens, the stream ends in an event
                if grace is None:
                    raise
                fail(run, error)
        finally:
            opened.cancel()
            with anyio.CancelScope(shield=True):  # of a run that is cancelled, each step here would be as well
                await asyncio.gather(opened, return_exceptions=True)
                if run.stream is not None:
                    await run.stream.aclose()

    async def _open(self, run: Run) -> ChatStream:
        """Sends the chat request, and waits for the first read of the answer."""
        dialect = await self._upstream.dialect(run.caller)
        ground = run.ground
        items = unsealed(ground.items, partial(self._unseal, ground.owner), offset=len(ground.chain.items))
        chat = to_chat(run.request, items, dialect, model=run.model)
        run.stream = self._upstream.chat(chat, run.caller)
        await run.stream.open()
        return run.stream

    async def _commit(self, run: Run, *, whole: bool) -> None:
        """Stores the response before its last event is seen. A fault is that event, or raised where the answer is ``whole``."""
        try:
            await self._chains.commit(run.ground, run.document)
        except APIError as error:
            if whole:
                raise
            run.assembler.fail("server_error", error.message)

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

    def _end_turn(self, run: Run, stream: ChatStream) -> list[Event]:
        assembler = run.assembler
        if not (stream.done or assembler.ended):
            raise UpstreamError("The upstream broke off its answer.")
        if assembler.finish_reason in _BROKEN:
            raise UpstreamError("The upstream aborted its answer.")
        events = assembler.end_turn()
        assembler.conclude(_now())
        return events


def _now() -> int:
    return int(time.time())


def fail(run: Run, error: Exception) -> None:
    """Makes ``error`` the end of the run's document."""
    if isinstance(error, UpstreamError):
        run.assembler.fail(*as_response_error(error))
    elif isinstance(error, BadRequest):
        run.assembler.fail("invalid_prompt", error.message)
    elif isinstance(error, APIError):
        run.assembler.fail("server_error", error.message)
    else:
        logger.error("response %s failed", run.document["id"], exc_info=error)
        run.assembler.fail("server_error", "The server had an error while making the response.")
