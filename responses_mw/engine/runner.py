"""Run requests. Streams, JSON, background jobs, WebSockets and cache hits all use the same event iterator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import anyio

from ..auth import Gate
from ..cache import Cache, Hit, Miss, Policy, Uncacheable
from ..crypto import Sealer
from ..errors import APIError, BadRequest, UpstreamError, without_traceback
from ..ids import RunIds
from ..protocol.request.create import CreateResponse
from ..protocol.response import compaction, document
from ..protocol.response.events import Event
from ..protocol.response.replay import Takeover
from ..protocol.types import Document, Item
from ..settings.groups import CompactionSettings, UpstreamSettings
from ..state import Job
from ..telemetry.context import annotate, begin_run, end_run
from ..telemetry.tracing import with_trace_context
from ..threads import by_size
from ..tools.toolbox import Tools
from ..upstream import Caller, Upstream
from ..upstream.backend import Backend
from .history import History, RunContext
from .run import ActiveRun, Drain, Outlet, Run, RunMode
from .turns import Compaction, TurnLoop, add_compaction


class Runner:
    """Runs requests. A foreground run reads a history, requests turns from the backend, and commits the response."""

    def __init__(
        self,
        upstream: Upstream,
        backend: Backend,
        history: History,
        tools: Tools,
        sealer: Sealer,
        compaction_settings: CompactionSettings,
        upstream_settings: UpstreamSettings,
        cache: Cache | None,
    ) -> None:
        self._upstream = upstream
        self._backend = backend
        self._history = history
        self._tools = tools
        self._cache = cache
        self._compaction = Compaction(backend, sealer, compaction_settings, self.run_prepared)
        self.drain = Drain()
        self.turns = TurnLoop(backend, self._compaction, upstream_settings.overload_timeout)
        self._status_grace = upstream_settings.status_grace

    # -- entry points ------------------------------------------------------------------------------------------------

    def run(
        self,
        request: CreateResponse,
        caller: Caller,
        mode: RunMode,
        *,
        policy: Policy | None = None,
        history: History | None = None,
        outlet: Outlet | None = None,
    ) -> AsyncGenerator[list[Event], None]:
        """Make one foreground response, and yield its events in batches, usually one for each read from the upstream.

        The first batch is yielded when the upstream begins to answer. It is yielded earlier after a cache hit, or if approved
        calls run first. In mode STREAMED, the run waits at most `upstream.status_grace` seconds for the answer. In mode WHOLE,
        a batch may be empty. Events that are passed to `outlet` are not yielded.

        If `policy` is None, the cache is not used. If `history` is None, the runner's history is used. `RunMode` describes when
        `APIError` is raised.
        """

        async def begin() -> Run:
            run = await self.prepare(request, caller, history)
            run.outlet = outlet
            if self._cache is not None and policy is not None and not policy.is_off:
                await self._look_up(self._cache, run, policy, streamed=mode is RunMode.STREAMED)
            if mode is RunMode.WHOLE:
                run.assembler.discard_events()
            return run

        active = ActiveRun(self.drain)
        active.events = events = self._events(begin, mode, active)
        return events

    def not_offered(self, request: CreateResponse) -> list[str]:
        """Return the types of the request's tools that are not offered to the model for lack of a search provider."""
        return self._tools.not_offered(request.tools)

    def run_prepared(self, run: Run, mode: RunMode) -> AsyncGenerator[list[Event], None]:
        """Make the response of a prepared run, and yield its events in batches."""

        async def begin() -> Run:
            return run

        return self._events(begin, mode, ActiveRun(Drain()))  # with its own drain, because only the caller ends this run

    async def create_without_model(
        self, request: CreateResponse, caller: Caller, history: History
    ) -> AsyncGenerator[list[Event], None]:
        """Make and commit a response without output, and yield its events. WebSocket clients use this with `generate: false`.

        Raises `APIError` if the request is refused, for example because its input ends with a `compaction_trigger`.
        """
        await self._upstream.verify(caller)
        run = await self.prepare(request, caller, history)
        if compaction.is_asked(run.context.input):
            message = "A compaction_trigger cannot be sent with generate: false, because it asks the model for a summary."
            raise BadRequest(message, param="generate", code="mutually_exclusive_parameters")
        yield run.assembler.start()
        run.assembler.conclude(_now())
        yield await self._commit(run, RunMode.STREAMED)

    async def count_tokens(self, request: CreateResponse, caller: Caller) -> int:
        """Return the number of input tokens of the first model call for `request`. Raises `APIError` if counting fails."""
        with ActiveRun(self.drain) as active, active.interruptible():
            run = await self.prepare(request, caller)
            begin_run(run.document, streams=None)
            if compaction.is_asked(run.context.input):
                inner, _ = self._compaction.summary_run(run, await self._compaction.items(run))
                return await self._backend.count(inner)
            try:
                await self.turns.offer_tools(run)
                return await self._backend.count(run)
            finally:
                if run.toolbox is not None:
                    await self._tools.close(run.toolbox)

    async def compact(self, request: CreateResponse, caller: Caller) -> Document:
        """Compact the history and input of `request`, and return a `response.compaction`. Raises `APIError` if that fails."""
        with ActiveRun(self.drain) as active, active.interruptible():
            run = await self.prepare(request, caller)
            items = await self._compaction.items(run)
            run.compacted = await self._compaction.compact(run, items)
        add_compaction(run)
        end_run({**run.document, "status": "completed"}, turns=1)
        return compaction.document(run.document, items, run.context.ids)

    async def check(self, run: Run) -> None:
        """Check a background `run` before it is queued.

        Raises `BadRequest` if the run has too many tools, if its calls and outputs do not match, or if the upstream's API
        cannot express the request. Runs with server-side tools or compaction are not checked, because the check would have to
        contact the tool servers or the model. Errors of the upstream are ignored.
        """
        if run.toolbox is not None or self._compaction.is_wanted(run):
            return
        with suppress(UpstreamError):  # the upstream may be available again when the run begins
            await self.turns.offer_tools(run)
            await self._backend.check(run)

    async def probe(self, caller: Caller) -> None:
        """Raise `UpstreamError` if the upstream is unavailable."""
        await self._upstream.probe(caller)

    # -- preparation --------------------------------------------------------------------------------------------------

    async def prepare(self, request: CreateResponse, caller: Caller, history: History | None = None) -> Run:
        """Prepare a run without calling the model. If `history` is None, the runner's history is used.

        Raises `APIError` if the request cannot be served.
        """
        history = history or self._history
        request = self._checked(request)
        model = await self._upstream.model(request.model, caller)
        context = await history.begin(request, caller.owner)
        created = document.create(request, response_id=context.ids.response, model=request.model or model, created_at=_now())
        created["tools"] = self._tools.echo(created["tools"])
        created["store"] = await history.will_store(request, context)
        if request.enable_response_messages:
            created |= {"input_messages": None, "output_messages": None}  # set at the end of the run
        return self._new_run(request, caller, model, context, created, history)

    def _checked(self, request: CreateResponse) -> CreateResponse:
        if not request.tools:
            return request
        return replace(request, tools=self._tools.check(request.tools, request.tool_choice))

    async def resume(self, request: CreateResponse, caller: Caller, job: Job, takeover: Takeover | None) -> Run:
        """Return the run for the background response of `job`. The items of `request` must have ids.

        `takeover` is the output of another worker, or None if there is none yet. Raises `APIError` if the run cannot begin.
        """
        request = self._checked(request)
        model = await self._upstream.model(request.model, caller)
        used, output = len(request.items), list[Item]()
        if takeover is not None:
            used, output = max(used, takeover.ids_used(job.response_id.removeprefix("resp_"))), takeover.items
        ids = RunIds(response=job.response_id, used=used)
        context = await self._history.rejoin(request, caller.owner, ids, job.token)
        run = self._new_run(request, caller, model, context, dict(job.document), self._history, output)
        run.earlier_continuations = job.continuations
        if takeover is None:
            run.first_events = run.assembler.resume(job.next_number)
        else:
            run.takeover, run.turns, run.phase = takeover, takeover.calls, takeover.phase
            run.first_events = run.assembler.take_over(takeover, job.next_number)
        return run

    def _new_run(
        self,
        request: CreateResponse,
        caller: Caller,
        model: str,
        context: RunContext,
        created: Document,
        history: History,
        output: Sequence[Item] = (),
    ) -> Run:
        """Return a new run. `output` is the output of another worker."""
        begin_run(created, streams=request.stream)
        call_ids = context.chain.call_ids
        assembler = self._backend.builder(request, created, context.ids, caller.owner, call_ids)
        headers = with_trace_context(caller.headers) if request.tools else {}
        gate = self._gate(caller)
        toolbox = self._tools.toolbox(request.tools, [*context.items, *output], context.input, headers, caller.owner, gate)
        messages = self._backend.messages(request)
        turn = request, caller, model, context.chain.items, context.input, created, context.size, messages
        return Run(*turn, context=context, assembler=assembler, history=history, toolbox=toolbox)

    def _gate(self, caller: Caller) -> Gate:
        return partial(self._upstream.verify, caller)

    # -- the cache ----------------------------------------------------------------------------------------------------

    async def _look_up(self, cache: Cache, run: Run, policy: Policy, *, streamed: bool) -> None:
        caller, context = run.caller, run.context
        key = await by_size(
            context.size, cache.key, run.request, context.items, owner=caller.owner, model=run.model, headers=caller.headers
        )
        if isinstance(key, Uncacheable):
            run.looked_up = key
        else:
            gate = self._gate(caller)  # a hit never reaches the upstream, so the cache checks the caller
            run.looked_up = await cache.lookup(key, policy, gate, streamed=streamed, caller=caller)
        annotate(cache_status=run.looked_up.header)

    def _replay_hit(self, run: Run, hit: Hit) -> list[Event]:
        events = run.assembler.start()
        for item in hit.items:
            events += run.assembler.add_whole(item)
        run.conclude(_now())
        run.document["usage"] = hit.usage
        return events

    def _flight(self, run: Run) -> AbstractAsyncContextManager[None]:
        """Return a context manager. Until it exits, identical requests wait for the answer of `run`."""
        if self._cache is None or not isinstance(run.looked_up, Miss):
            return nullcontext()
        return self._cache.flight(run.looked_up)

    # -- events -------------------------------------------------------------------------------------------------------

    async def _events(
        self, begin: Callable[[], Awaitable[Run]], mode: RunMode, active: ActiveRun
    ) -> AsyncGenerator[list[Event], None]:
        with active:
            with active.interruptible():
                run = await begin()
            if isinstance(run.looked_up, Hit):
                yield self._replay_hit(run, run.looked_up)
                yield await self._commit(run, mode)
                return
            async with self._flight(run), self._opening(run, mode, active):
                yield run.assembler.start() if run.first_events is None else run.first_events
                await run.opened()
                if run.compacted is not None or run.toolbox is not None:
                    async for events in self.turns.before(run):
                        yield events
                async for events in self._turns(run):
                    yield events
                run.conclude(_now())
                if self._cache is not None and isinstance(run.looked_up, Miss):
                    await self._cache.keep(run.looked_up, run.document)
            if mode is not RunMode.DETACHED:
                yield await self._commit(run, mode)

    async def _turns(self, run: Run) -> AsyncGenerator[list[Event], None]:
        while run.turn is not None:
            try:
                async for chunks in run.read(run.turn):
                    events = run.feed(chunks)
                    if events:
                        yield events
                self.turns.check_end(run)
            except UpstreamError as error:
                async for events in self.turns.resume(run, error):
                    yield events
                if not run.assembler.ended:
                    continue
            async for events in self.turns.after(run, run.turn):
                yield events

    @asynccontextmanager
    async def _opening(self, run: Run, mode: RunMode, active: ActiveRun) -> AsyncIterator[None]:
        """Open the first turn. Raise or record an error of the run as `mode` requires. On exit, release the run's resources."""
        try:
            with active.interruptible():
                await self._open(run, mode)
            try:
                with active.interruptible():
                    yield
            except GeneratorExit:
                if active.drain.is_over:  # the server closes the connection of a client that does not read
                    run.fail(self.drain.error())
                    with anyio.CancelScope(shield=True):
                        await self._commit(run, mode)
                raise
            except Exception as error:  # the outer edge of a run: whatever happens, the stream ends with an event
                # The run that writes a summary has no toolbox, but shares the results of the run that it summarizes.
                is_raised = mode is RunMode.WHOLE and (run.toolbox is None or not run.results)
                run.fail(error, is_raised=is_raised)
                if is_raised:
                    raise
        finally:
            await self._close(run)

    async def _open(self, run: Run, mode: RunMode) -> None:
        if mode is RunMode.WHOLE:
            await self.turns.open(run)
            return
        run.opening = asyncio.create_task(self.turns.open(run))
        await asyncio.wait({run.opening}, timeout=self._status_grace if mode is RunMode.STREAMED else 0.0)
        if mode is RunMode.DETACHED:
            return
        if run.opening.done():
            run.opening.result()
        run.is_status_sent = True

    async def _close(self, run: Run) -> None:
        tasks = [*run.calls] if run.opening is None else [run.opening, *run.calls]
        for task in tasks:
            task.cancel()
        run.report()
        if tasks or run.turn:
            with anyio.CancelScope(shield=True):  # a cancelled run must complete these steps too
                if tasks:
                    await asyncio.gather(*tasks, return_exceptions=True)
                    run.opening, run.calls = None, ()  # a cancelled task keeps its frames, which refer to the run
                if run.turn is not None:
                    await run.turn.aclose()
        if run.toolbox is not None:
            await self._tools.close(run.toolbox)

    async def _commit(self, run: Run, mode: RunMode) -> list[Event]:
        """Store the response, and return its terminal event. An error is raised in mode WHOLE, otherwise the response fails."""
        try:
            await run.history.commit(run.context, run.document, self._gate(run.caller))
        except APIError as error:
            if mode is RunMode.WHOLE:
                raise
            run.error = without_traceback(error)
            run.assembler.fail("server_error", error.message)
        run.report()
        return run.assembler.terminal()


def _now() -> int:
    return int(time.time())
