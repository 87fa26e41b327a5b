"""Run requests. Streams, JSON, background jobs, WebSockets and cache hits all use the same event iterator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio

from ..cache import Cache, Hit, Policy
from ..crypto import Sealer
from ..errors import APIError, BadRequest, UpstreamError, without_traceback
from ..protocol.request.create import CreateResponse
from ..protocol.response import compaction
from ..protocol.types import Document, Event
from ..settings.groups import CompactionSettings
from ..telemetry.context import end_run
from ..upstream import Caller
from ..upstream.routing import Upstreams
from .captured_events import capture_events
from .compaction import Compaction, add_compaction
from .drain import ActiveRun, Drain
from .history import History
from .run import Outlet, Run, RunMode
from .run_cache import RunCache
from .run_checks import RunChecks
from .run_factory import RunFactory
from .turns import TurnLoop


class Runner:
    """Runs requests. A foreground run reads a history, requests turns from the backend, and commits the response."""

    def __init__(
        self,
        factory: RunFactory,
        upstreams: Upstreams,
        sealer: Sealer,
        compaction_settings: CompactionSettings,
        cache: Cache | None,
        drain: Drain,
    ) -> None:
        self.factory = factory
        self._upstreams = upstreams
        self._cache = RunCache(cache, self._create_unstored)
        self._compaction = Compaction(sealer, compaction_settings, self.run_prepared)
        self.drain = drain
        self.turns = TurnLoop(self._compaction, factory, self._cache.pause_judge)
        self.checks = RunChecks(factory, self._compaction, self.turns, self.drain)

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

        If `policy` is None, the cache is not used. If `history` is None, the factory's history is used. `RunMode` describes
        when `APIError` is raised.
        """

        async def begin() -> Run:
            run = await self.factory.prepare(request, caller, history)
            run.outlet = outlet
            await self._cache.look_up(run, policy, streamed=mode is RunMode.STREAMED)
            if mode is RunMode.WHOLE:
                run.assembler.discard_events()
            return run

        active = ActiveRun(self.drain)
        active.events = events = self._events(begin, mode, active)
        return capture_events(events) if mode is RunMode.STREAMED else events

    def run_prepared(self, run: Run, mode: RunMode) -> AsyncGenerator[list[Event], None]:
        """Make the response of a prepared run, and yield its events in batches."""

        async def begin() -> Run:
            return run

        events = self._events(begin, mode, ActiveRun(Drain()))  # with its own drain, because only the caller ends this run
        return capture_events(events) if mode is RunMode.DETACHED else events

    async def create_without_model(
        self, request: CreateResponse, caller: Caller, history: History
    ) -> AsyncGenerator[list[Event], None]:
        """Make and commit a response without output, and yield its events. WebSocket clients use this with `generate: false`.

        Raises `APIError` if the request is refused, for example because its input ends with a `compaction_trigger`.
        """
        await self._upstreams.verify(caller)
        run = await self.factory.prepare(request, caller, history)
        if compaction.is_asked(run.context.input):
            message = "A compaction_trigger cannot be sent with generate: false, because it asks the model for a summary."
            raise BadRequest(message, param="generate", code="mutually_exclusive_parameters")
        yield run.assembler.start()
        run.assembler.conclude(_now())
        yield await self._commit(run, RunMode.STREAMED)

    async def compact(self, request: CreateResponse, caller: Caller) -> Document:
        """Compact the history and input of `request`, and return a `response.compaction`. Raises `APIError` if that fails."""
        with ActiveRun(self.drain) as active, active.interruptible:
            run = await self.factory.prepare(request, caller)
            items = await self._compaction.items(run)
            run.compacted = await self._compaction.compact(run, items)
        add_compaction(run)
        end_run({**run.document, "status": "completed"}, turns=1)
        return compaction.document(run.document, items, run.context.ids)

    async def _create_unstored(self, request: CreateResponse, caller: Caller) -> Document | None:
        """Make a response to a request with `store: false`. Return None if that fails."""
        document: Document | None = None
        try:
            async for events in self.run(request, caller, RunMode.WHOLE):
                document = events[-1].data["response"] if events else document
        except (APIError, RunFailed):
            return None
        return document

    # -- events -------------------------------------------------------------------------------------------------------

    async def _events(
        self, begin: Callable[[], Awaitable[Run]], mode: RunMode, active: ActiveRun
    ) -> AsyncGenerator[list[Event], None]:
        with active, _OwnErrors():
            with active.interruptible:
                run = await begin()
            if isinstance(run.looked_up, Hit):
                yield self._cache.replay(run, run.looked_up)
                yield await self._commit(run, mode)
                return
            async with self._cache.flight(run), self._opening(run, mode, active):
                yield run.assembler.start() if run.first_events is None else run.first_events
                hit = await self._cache.race(run)
                if hit is not None:
                    yield self._cache.complete(run, hit)
                else:
                    async for events in self._answer(run):
                        yield events
            if mode is not RunMode.DETACHED:
                yield await self._commit(run, mode)

    async def _answer(self, run: Run) -> AsyncGenerator[list[Event], None]:
        """Complete the response with the answer of the upstream."""
        if run.compacted is not None or run.toolbox is not None:
            async for events in self.turns.before(run):
                yield events
        async for events in self._turns(run):
            yield events
        if run.assembler.ended:  # the text of another worker already has the maximum number of tokens
            yield run.assembler.end_turn()
        run.conclude(_now())
        await self._cache.keep(run)

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
            with active.interruptible:
                await self._open(run, mode)
            try:
                with active.interruptible:
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
        if mode is RunMode.WHOLE and run.judging is None:
            await self.turns.open(run)
            return
        run.is_streamed = mode is RunMode.STREAMED
        run.opening = asyncio.create_task(self.turns.open(run))
        if mode is RunMode.WHOLE:
            return
        is_open = await run.is_open_within(run.route.upstream.settings.status_grace if mode is RunMode.STREAMED else 0.0)
        if mode is RunMode.DETACHED:
            return
        if is_open:
            run.opening.result()
        run.is_status_sent = True

    async def _close(self, run: Run) -> None:
        tasks = [*run.calls] if run.opening is None else [run.opening, *run.calls]
        for task in tasks:
            task.cancel()
        run.report()
        if tasks or run.turn:
            run.assembler.update_document()  # for the span of the turn
            with anyio.CancelScope(shield=True):  # a cancelled run must complete these steps too
                if tasks:
                    await asyncio.gather(*tasks, return_exceptions=True)
                    run.opening, run.calls = None, ()  # a cancelled task keeps its frames, which refer to the run
                if run.turn is not None:
                    await run.turn.aclose()
        if run.toolbox is not None:
            await self.factory.close(run.toolbox)

    async def _commit(self, run: Run, mode: RunMode) -> list[Event]:
        """Store the response, and return its terminal event. An error is raised in mode WHOLE, otherwise the response fails."""
        try:
            await run.history.commit(run.context, run.document, partial(run.route.upstream.verify, run.caller))
        except APIError as error:
            if mode is RunMode.WHOLE:
                raise
            run.error = without_traceback(error)
            run.assembler.fail("server_error", error.message)
        run.report()
        return run.assembler.terminal()


class RunFailed(Exception):
    """A run failed with an `OSError`. Callers treat an `OSError` as one of the client's connection."""


class _OwnErrors:
    """A context manager that raises `RunFailed` instead of an `OSError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise RunFailed(f"{type(error).__name__}: {error}") from error


def _now() -> int:
    return int(time.time())
