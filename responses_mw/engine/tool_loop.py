"""The turns of a run: what precedes the first, the tool calls that end one, and whether another follows."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TypeVar

from ..errors import BadRequest, UpstreamBrokeOff, UpstreamError, UpstreamUnreachable
from ..protocol.chat.client_tools import distinct
from ..protocol.response import compaction
from ..protocol.response.events import Event
from ..upstream.backend import Backend, OpenTurn
from ..upstream.client import MAX_ANSWER_BYTES
from .compaction import Compaction
from .run import REQUEST_LIMITS, Run

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE = 0.25
MAX_PAUSE = 8.0
"""Seconds between two requests to an overloaded upstream that does not say how long to wait."""
RESENDS = 1
"""How often a turn is sent again whose connection broke off before the first output: its prompt may be what kills servers."""
_FAULTS = frozenset({"abort", "error"})
"""Finish reasons that report a failure of the upstream."""


class ToolLoop:
    """Drives the turns of runs."""

    def __init__(self, backend: Backend, compactor: Compaction, *, max_turns: int, overload_timeout: float) -> None:
        self._backend = backend
        self._compactor = compactor
        self._max_turns = max_turns
        self._overload_timeout = overload_timeout

    async def offer_tools(self, run: Run) -> None:
        """Connect to the tools that run here, and collect the functions that the model may call."""
        run.offered = await self._backend.functions(run.request, run.context.items, run.context.size)
        if len(run.offered) > REQUEST_LIMITS.tools:
            message = f"The request and its history have more than {REQUEST_LIMITS.tools} tools."
            raise BadRequest(message, param="tools", code="array_above_max_length")
        if run.toolbox is not None:
            await run.toolbox.open()
            run.offered = distinct(run.offered + run.toolbox.offered)
            run.assembler.sources = run.toolbox.sources
        run.assembler.offer(run.offered, run.request.tool_choice)

    async def open(self, run: Run) -> None:
        """Prepare the tools and begin the first turn, unless a compaction or approved calls come before it."""
        await self.offer_tools(run)
        run.compacted = await self._wait_out_overload(run, partial(self._compactor.due, run))
        if run.compacted is None and (run.toolbox is None or run.toolbox.approved is None):
            await self._begin_turn(run)

    async def before(self, run: Run) -> AsyncGenerator[list[Event], None]:
        """Yield the events that precede the first turn: a compaction, lists of tools and approved calls."""
        if run.compacted is not None:
            yield add_compaction(run)
            if compaction.is_asked(run.context.input):
                return
            await self._begin_turn(run)
        if run.toolbox is None:
            return
        if run.toolbox.listings:
            yield run.assembler.list_tools(run.toolbox.listings)
        if run.toolbox.approved is not None:
            run.assembler.offer(run.toolbox.approved_functions, "auto")
            yield run.assembler.feed(run.toolbox.approved) + run.assembler.end_turn()
            run.assembler.offer(run.offered, run.request.tool_choice)
            async for events in self._run_tool_calls(run):
                yield events
            await self._begin_turn(run)

    async def turn(self, run: Run, turn: OpenTurn) -> AsyncGenerator[list[Event], None]:
        """Finish the turn that was read, run its tool calls, and begin the next turn if one follows.

        Another turn follows if calls were run or left out, and none is the client's to run. A compaction precedes it if one is
        due.
        """
        events = self._end_turn(run, turn)
        if events:
            yield events
        run.receive(turn.stream.received, MAX_ANSWER_BYTES)
        async for events in self._run_tool_calls(run):
            yield events
        run.turn = None
        await turn.aclose()
        assembler = run.assembler
        if not (assembler.asked or assembler.has_left_out) or assembler.has_client_calls or run.is_last_turn:
            return
        run.compacted = await self._wait_out_overload(run, partial(self._compactor.due, run))
        if run.compacted is not None:
            yield add_compaction(run)
        await self._begin_turn(run)

    async def _begin_turn(self, run: Run) -> None:
        run.turns += 1
        run.is_last_turn = run.assembler.is_exhausted or run.turns >= self._max_turns
        run.turn = await self._wait_out_overload(run, partial(self._backend.begin, run.turn_request()))

    async def _wait_out_overload(self, run: Run, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what `attempt` returns, repeating it while the upstream is overloaded, up to `upstream.overload_timeout`.

        Waits with exponential back-off, and at least as long as the upstream asks. Raises the overload at once if the run
        does not wait for the upstream, or if the upstream asks to wait longer than the timeout. A connection that broke off
        is an overload `RESENDS` times.
        """
        loop = asyncio.get_running_loop()
        pause, deadline, broken = FIRST_PAUSE, math.inf, 0
        while True:
            try:
                return await attempt()
            except UpstreamError as error:
                broke_off = not error.is_overload and isinstance(error, UpstreamBrokeOff | UpstreamUnreachable)
                broken += broke_off
                may_pass = error.is_overload or (broke_off and broken <= RESENDS)
                if not (may_pass and run.waits_for_upstream):
                    raise
                deadline = min(deadline, loop.time() + self._overload_timeout)
                left, wanted = deadline - loop.time(), error.retry_after or 0.0
                if left <= 0 or wanted > left:
                    raise
                jitter = random.uniform(1, 1.25)  # noqa: S311 (clients must not come back all at once)
                wait = min(max(wanted, pause) * jitter, left)
                logger.info("response %s waits %.1f s for an upstream with status %d", run.document["id"], wait, error.status)
            await asyncio.sleep(wait)
            pause = min(2 * pause, MAX_PAUSE)

    def _end_turn(self, run: Run, turn: OpenTurn) -> list[Event]:
        assembler = run.assembler
        if not (turn.stream.done or assembler.ended):
            raise UpstreamBrokeOff("The upstream broke off its answer.")
        if assembler.finish_reason in _FAULTS:
            raise UpstreamError("The upstream aborted its answer.")
        events = assembler.end_turn()
        turn.span.finish(assembler.finish_reason)
        return events

    async def _run_tool_calls(self, run: Run) -> AsyncGenerator[list[Event], None]:
        """Run the calls of the turn concurrently and yield the events of their results in the calls' order."""
        toolbox, assembler = run.toolbox, run.assembler
        if toolbox is None or not assembler.asked:
            return
        asked = [(call.form, call.arguments) for call in assembler.asked if call.form is not None]
        run.calls = [asyncio.create_task(toolbox.call(form, arguments)) for form, arguments in asked]
        for call in run.calls:
            result = await call
            run.receive(result.size, MAX_ANSWER_BYTES)
            run.results[assembler.awaited["id"]] = result.content
            assembler.sources = toolbox.sources
            yield assembler.settle(result.members, failed=result.failed)


def add_compaction(run: Run) -> list[Event]:
    """Add the run's compaction to its output."""
    assert run.compacted is not None
    return run.assembler.add_whole(run.compacted.item, "cmp", run.compacted.usage)
