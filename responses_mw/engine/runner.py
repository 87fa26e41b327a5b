"""One run makes one response. Streams, JSON, background jobs and the cache are all readers of the one iterator here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import anyio

from .. import telemetry
from ..auth import Gate
from ..cache import Cache, Hit, Miss, Policy, mark
from ..cache.policy import HEADER as CACHE_HEADER
from ..crypto import Sealer
from ..errors import APIError, BadRequest, UpstreamError
from ..protocol.chat.client_tools import distinct, offered
from ..protocol.request.create import CreateResponse
from ..protocol.response import compaction, document
from ..protocol.response.assembler import Assembler
from ..protocol.response.events import Event
from ..protocol.response.passthrough import ResponsesPassthrough
from ..protocol.types import Document
from ..protocol.vllm.response_messages import ResponseMessages
from ..settings import Settings
from ..threads import by_size
from ..tools import Tools
from ..upstream import Caller, ChatStream, Upstream
from .compaction import Compaction
from .history import History, RunContext
from .run import Run, fail, options
from .turns import Backend, ChatBackend, ResponsesBackend

logger = logging.getLogger(__name__)

_BROKEN = frozenset({"abort", "error"})
"""Finish reasons that tell of a fault, not of an end."""


class Runner:
    """Runs requests: history, chat turn, commit."""

    def __init__(
        self,
        upstream: Upstream,
        chains: History,
        tools: Tools,
        sealer: Sealer,
        settings: Settings,
        cache: Cache | None = None,
    ) -> None:
        self._upstream = upstream
        self._chains = chains
        self._tools = tools
        self._cache = cache
        self._sealer = sealer
        self._settings = settings
        self._relays = settings.upstream_api == "responses"
        """The upstream carries out the tools, and makes the events."""
        self._turns: Backend = (ResponsesBackend if self._relays else ChatBackend)(upstream, sealer, settings)
        self._compaction = Compaction(self._turns, sealer, settings, partial(self.turns, start=Assembler.start, grace=None))

    def run(
        self,
        request: CreateResponse,
        caller: Caller,
        *,
        grace: float | None,
        policy: Policy | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncGenerator[list[Event], None]:
        """The events of one foreground response, in batches: one for each read of the upstream. It is stored before the last.

        The first batch comes when the upstream has begun to answer, or after ``grace`` seconds (None: however long it takes).
        Until then a fault is raised as an ``APIError``; later it is the ``response.failed`` that ends the events. With None, it
        is raised however late, and the events have no frames: only their documents count. ``policy`` is what the run uses of
        the cache; what that says is put in ``headers``.
        """

        async def begin() -> Run:
            run = await found()
            if grace is None:
                run.assembler.discard_events()
            return run

        async def found() -> Run:
            if self._cache is None or policy is None or policy.is_off:
                return await self.prepare(request, caller)
            run = await self.prepare(request, caller)
            run.found = await self._look_up(self._cache, run, policy, streamed=grace is not None)
            if self._relays and isinstance(run.found, Hit):  # it is kept as chunks
                shape = options(request, run.ground, self._sealer, self._settings)
                run.assembler = Assembler(run.document, run.ground.ids, replace(shape, think_tag=None, seal=None))
            if run.found is not None and headers is not None:
                headers[CACHE_HEADER] = run.found.header
            return run

        return self._events(begin, Assembler.start, grace, commit=True)

    async def _look_up(self, cache: Cache, run: Run, policy: Policy, *, streamed: bool) -> Hit | Miss | None:
        caller = run.caller
        if run.request.enable_response_messages:
            return None  # an answer that was kept does not tell them
        key = await by_size(
            run.ground.size,
            cache.key,
            run.request,
            run.ground.items,
            owner=caller.owner,
            model=run.model,
            headers=caller.headers,
        )
        if key is None:
            return None
        gate = self._gate(caller)  # a hit never reaches the upstream
        return await cache.lookup(key, policy, gate, streamed=streamed, headers=caller.headers, scope=caller.scope)

    def turns(
        self, run: Run, start: Callable[[Assembler], list[Event]], grace: float | None = 0
    ) -> AsyncGenerator[list[Event], None]:
        """All events of a background ``run`` (or one within another) but the terminal one, for which its document is ready
        then. ``start`` makes the first of them; ``grace`` is that of ``run``."""

        async def begin() -> Run:
            return run

        return self._events(begin, start, grace, commit=False)

    def on(self, chains: History) -> Runner:
        """This runner, for runs that stand on other ``chains``."""
        return Runner(self._upstream, chains, self._tools, self._sealer, self._settings, self._cache)

    async def prepared(self, request: CreateResponse, caller: Caller) -> AsyncGenerator[list[Event], None]:
        """The events of a response to which the model adds nothing: later ones stand on it (WebSocket: ``generate: false``)."""
        await self._gate(caller)()
        run = await self.prepare(request, caller)
        if compaction.is_asked(run.ground.input):
            message = "A compaction_trigger asks the model for a summary: it cannot be sent with generate: false."
            raise BadRequest(message, param="generate", code="mutually_exclusive_parameters")
        yield run.assembler.start()
        run.assembler.conclude(_now())
        yield await self._commit(run, whole=False)

    async def count_tokens(self, request: CreateResponse, caller: Caller) -> int:
        """How many tokens the model would be shown first for ``request``. Raises ``APIError`` as ``run`` does."""
        run = await self.prepare(request, caller)
        if compaction.is_asked(run.ground.input):
            return await self._turns.count(self._compaction.asking(run))
        try:
            await self._offer(run)
            return await self._turns.count(run)
        finally:
            if run.toolbox is not None:
                await run.toolbox.aclose()

    async def compact(self, request: CreateResponse, caller: Caller) -> Document:
        """The history that ``request`` stands on, compacted (``response.compaction``). Raises ``APIError`` as ``run`` does."""
        run = await self.prepare(request, caller)
        run.compacted = await self._compaction.compact(run)
        self._tell_compacted(run)
        return compaction.document(run.document)

    async def prepare(self, request: CreateResponse, caller: Caller) -> Run:
        """Reads what ``request`` stands on and makes its document; the upstream has not been asked yet."""
        request = self._checked(request)
        model = await self._upstream.model(request.model, caller)
        ground = await self._chains.begin(request, caller.owner)
        created = document.create(request, response_id=ground.ids.response, model=request.model or model, created_at=_now())
        created["tools"] = self._tools.echo(created["tools"])
        created["store"] = await self._chains.will_store(request, ground)
        if request.enable_response_messages:
            created |= {"input_messages": None, "output_messages": None}  # they are known in the end
        return self._run(request, caller, model, ground, created)

    async def check(self, run: Run) -> None:
        """Raises ``BadRequest`` for a background ``run`` that could only fail: its items do not fit together, or the upstream's
        dialect cannot say what it asks for. What servers of tools would have to be asked for, the run itself finds out."""
        if run.toolbox is not None or self._compaction.is_wanted(run):
            return
        with suppress(UpstreamError):  # it may be back when the run begins
            await self._offer(run)
            await self._turns.check(run)

    async def resume(self, request: CreateResponse, caller: Caller, created: Document, token: str) -> Run:
        """The run of a background response that was ``created`` before, by ``prepare`` on any replica. The items of ``request``
        have their ids; ``token`` is that of who runs it."""
        request = self._checked(request)
        model = await self._upstream.model(request.model, caller)
        ground = await self._chains.rejoin(request, caller.owner, created["id"], token)
        return self._run(request, caller, model, ground, created)

    def _gate(self, caller: Caller) -> Gate:
        return partial(self._upstream.verify, caller)

    def _checked(self, request: CreateResponse) -> CreateResponse:
        """``request`` with its tools checked; a relaying upstream checks them itself."""
        if self._relays or not request.tools:
            return request
        return replace(request, tools=self._tools.check(request.tools))

    def _run(self, request: CreateResponse, caller: Caller, model: str, ground: RunContext, created: Document) -> Run:
        telemetry.annotate(response=created)
        if self._relays:
            is_open = self._settings.reasoning_events == "open_responses"
            relaying = ResponsesPassthrough(created, ground.ids, self._tools.echo, open_reasoning=is_open)
            return Run(request, caller, model, ground, relaying)
        assembler = Assembler(created, ground.ids, options(request, ground, self._sealer, self._settings))
        headers = telemetry.with_trace_context(caller.headers) if request.tools else {}
        toolbox = self._tools.toolbox(request.tools, ground.items, ground.input, headers, ground.owner, self._gate(caller))
        messages = ResponseMessages() if request.enable_response_messages else None
        return Run(request, caller, model, ground, assembler, toolbox, messages=messages)

    async def _events(
        self,
        begin: Callable[[], Awaitable[Run]],
        start: Callable[[Assembler], list[Event]],
        grace: float | None,
        *,
        commit: bool,
    ) -> AsyncGenerator[list[Event], None]:
        run = await begin()
        if isinstance(run.found, Hit):
            yield self._replay_hit(run, run.found, start)
            yield await self._commit(run, whole=grace is None)
            return
        async with self._flight(run), self._opening(run, grace) as opened:
            yield start(run.assembler)
            await opened
            async for events in self._before(run):
                yield events
            while run.stream is not None:
                async for chunks in run.stream:
                    events = run.feed(chunks)
                    if events:
                        yield events
                async for events in self._next_turn(run, run.stream):
                    yield events
            run.conclude(_now())
            await self._keep(run)
        if commit:
            yield await self._commit(run, whole=grace is None)

    def _replay_hit(self, run: Run, hit: Hit, start: Callable[[Assembler], list[Event]]) -> list[Event]:
        """All events but the last of an answer that is known."""
        events = start(run.assembler) + run.feed(hit.chunks) + run.assembler.end_turn()
        run.conclude(_now())
        mark(run.document, hit.kind)
        return events

    async def _keep(self, run: Run) -> None:
        if self._cache is not None and isinstance(run.found, Miss):
            summary = run.request.wants_summary if self._relays else None
            await self._cache.keep(run.found, run.document, summary=summary)

    @asynccontextmanager
    async def _flight(self, run: Run) -> AsyncIterator[None]:
        """While the run lasts, others that ask the same wait for its answer."""
        if self._cache is None or not isinstance(run.found, Miss):
            yield
            return
        async with self._cache.flight(run.found):
            yield

    @asynccontextmanager
    async def _opening(self, run: Run, grace: float | None) -> AsyncIterator[asyncio.Task[None]]:
        """The first turn's answer, as a task that has had ``grace`` seconds; on leaving, all that the run has open ends.

        Raises what the task raised, if that came in time. A later fault is the end of the run; without a ``grace``, it is
        raised too.
        """
        opened = asyncio.create_task(self._open(run))
        try:
            await asyncio.wait({opened}, timeout=grace)
            if opened.done() and grace != 0:
                opened.result()
            try:
                yield opened
            except Exception as error:  # the outer edge of a run: whatever happens, the stream ends in an event
                if run.turn is not None:
                    run.turn.fail(error)
                if grace is None and not run.results:
                    raise
                fail(run, error)
        finally:
            await self._close(run, opened)

    async def _close(self, run: Run, opened: asyncio.Task[None]) -> None:
        for task in (opened, *run.calls):
            task.cancel()
        if run.turn is not None:
            run.turn.close()
        with anyio.CancelScope(shield=True):  # of a run that is cancelled, each step here would be as well
            await asyncio.gather(opened, *run.calls, return_exceptions=True)
            if run.stream is not None:
                await run.stream.aclose()
            if run.toolbox is not None:
                await run.toolbox.aclose()

    async def _open(self, run: Run) -> None:
        """Makes the tools ready and begins the first turn, unless there are calls to carry out before it."""
        await self._offer(run)
        run.compacted = await self._compaction.due(run)
        if run.compacted is None and (run.toolbox is None or run.toolbox.approved is None):
            await self._turns.begin(run)

    async def _offer(self, run: Run) -> None:
        if self._relays:
            return
        run.offered = await by_size(run.ground.size, offered, run.request.tools, run.ground.items)
        if len(run.offered) > self._settings.max_tools:
            message = f"The request and its history have more than {self._settings.max_tools} tools."
            raise BadRequest(message, param="tools", code="array_above_max_length")
        if run.toolbox is not None:
            await run.toolbox.open()
            run.offered = distinct(run.offered + run.toolbox.offered)
            run.assembler.sources = run.toolbox.sources
        run.assembler.rules.offer(run.offered, run.request.tool_choice)

    def _tell_compacted(self, run: Run) -> list[Event]:
        assert run.compacted is not None
        return run.assembler.add_whole(run.compacted.item, "cmp", run.compacted.usage)

    async def _before(self, run: Run) -> AsyncGenerator[list[Event], None]:
        """What comes before the first turn: a compaction, lists of tools, and calls that have been approved."""
        if run.compacted is not None:
            yield self._tell_compacted(run)
            if compaction.is_asked(run.ground.input):
                return
            await self._turns.begin(run)
        if run.toolbox is None:
            return
        if run.toolbox.listings:
            yield run.assembler.list_tools(run.toolbox.listings)
        if run.toolbox.approved is not None:
            rules = run.assembler.rules
            rules.offer(run.toolbox.approved_functions, "auto")
            yield run.assembler.feed(run.toolbox.approved) + run.assembler.end_turn()
            rules.offer(run.offered, run.request.tool_choice)
            async for events in self._run_tool_calls(run):
                yield events
            await self._turns.begin(run)

    async def _run_tool_calls(self, run: Run) -> AsyncGenerator[list[Event], None]:
        """Carries out the calls that the turn asks of us, all at a time; their results are told in the calls' order."""
        toolbox, assembler = run.toolbox, run.assembler
        if toolbox is None or not assembler.asked:
            return
        asked = [(call.form, call.arguments) for call in assembler.asked if call.form is not None]
        run.calls = [asyncio.create_task(toolbox.call(form, arguments)) for form, arguments in asked]
        for call in run.calls:
            result = await call
            run.receive(result.size, self._settings.max_answer_bytes)
            run.results[assembler.awaited["id"]] = result.content
            assembler.sources = toolbox.sources
            yield assembler.settle(result.members, failed=result.failed)

    async def _next_turn(self, run: Run, stream: ChatStream) -> AsyncGenerator[list[Event], None]:
        """Ends the turn and carries out its calls. Where some were, or were left out, and none waits for the client, another
        turn begins; before it comes a compaction, if one is due."""
        events = self._end_turn(run, stream)
        if events:
            yield events
        run.receive(stream.received, self._settings.max_answer_bytes)
        async for events in self._run_tool_calls(run):
            yield events
        assembler = run.assembler
        run.stream = None
        await stream.aclose()
        goes_on = assembler.asked or assembler.rules.has_left_out
        if not goes_on or assembler.is_clients or run.is_last_turn:
            return
        run.compacted = await self._compaction.due(run)
        if run.compacted is not None:
            yield self._tell_compacted(run)
        await self._turns.begin(run)

    async def _commit(self, run: Run, *, whole: bool) -> list[Event]:
        """Stores the response, then gives its last event. A fault is that event, or raised where the answer is ``whole``."""
        try:
            await self._chains.commit(run.ground, run.document, self._gate(run.caller))
        except APIError as error:
            if whole:
                raise
            run.assembler.fail("server_error", error.message)
        return run.assembler.terminal()

    def _end_turn(self, run: Run, stream: ChatStream) -> list[Event]:
        assembler = run.assembler
        if not (stream.done or assembler.ended):
            raise UpstreamError("The upstream broke off its answer.")
        if assembler.finish_reason in _BROKEN:
            raise UpstreamError("The upstream aborted its answer.")
        events = assembler.end_turn()
        if run.turn is not None:
            run.turn.finish(assembler.finish_reason)
        return events


def _now() -> int:
    return int(time.time())
