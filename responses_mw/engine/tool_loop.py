"""The turns of a run: what precedes the first turn, how tool calls are run, and whether another turn follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

from ..errors import BadRequest
from ..protocol.request.tools import distinct
from ..protocol.response import compaction
from ..protocol.response.events import Event
from ..protocol.response.seam import Phase
from ..tools import Toolbox
from ..upstream.backend import Backend, OpenTurn
from ..upstream.client import MAX_ANSWER_BYTES
from .compaction import Compaction
from .continuation import Continuation
from .run import REQUEST_LIMITS, Run

MAX_TURNS = 64
"""Maximum turns of a response. The last one offers no server-side tools."""


class ToolLoop:
    """Runs the turns of a response, and the tool calls between them."""

    def __init__(self, backend: Backend, compactor: Compaction, continuation: Continuation) -> None:
        self._backend = backend
        self._compactor = compactor
        self._continuation = continuation

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
        if run.takeover is not None and run.takeover.is_over:
            return
        if run.phase is not Phase.NOTHING:
            await self._begin_turn(run)
            return
        run.compacted = await self._continuation.open(run, partial(self._compactor.due, run))
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
            async for events in self._run_tool_calls(run, run.toolbox):
                yield events
            await self._begin_turn(run)

    async def turn(self, run: Run, turn: OpenTurn) -> AsyncGenerator[list[Event], None]:
        """Finish the turn that was read, run its tool calls, and begin the next turn if one follows.

        Another turn follows if calls were run or left out, none is for the client, and this was not the last turn allowed. If a
        compaction is due, it comes first.
        """
        events = self._end_turn(run, turn)
        if events:
            yield events
        run.receive(turn.stream.received, MAX_ANSWER_BYTES)
        if run.assembler.asked and run.toolbox is not None:
            async for events in self._run_tool_calls(run, run.toolbox):
                yield events
        run.turn = None
        await turn.aclose()
        assembler = run.assembler
        if not (assembler.asked or assembler.has_left_out) or assembler.has_client_calls or run.is_last_turn:
            return
        run.compacted = await self._continuation.open(run, partial(self._compactor.due, run))
        if run.compacted is not None:
            yield add_compaction(run)
        await self._begin_turn(run)

    async def _begin_turn(self, run: Run) -> None:
        run.turns += 1
        run.is_last_turn = run.assembler.is_exhausted or run.turns >= MAX_TURNS
        run.turn = await self._continuation.begin(run)

    def _end_turn(self, run: Run, turn: OpenTurn) -> list[Event]:
        assembler = run.assembler
        events = assembler.end_turn()
        turn.span.finish(assembler.finish_reason)
        return events

    async def _run_tool_calls(self, run: Run, toolbox: Toolbox) -> AsyncGenerator[list[Event], None]:
        """Run the calls of the turn concurrently. Yield the events of their results in the order of the calls."""
        assembler = run.assembler
        asked = [(call.form, call.arguments, call.id or "") for call in assembler.asked if call.form is not None]
        run.calls = [asyncio.create_task(toolbox.call(*call)) for call in asked]
        for call in run.calls:
            result = await call
            run.receive(result.size, MAX_ANSWER_BYTES)
            run.results[assembler.awaited["id"]] = result.content
            assembler.sources = toolbox.sources
            yield assembler.settle(result.members, failed=result.failed)


def add_compaction(run: Run) -> list[Event]:
    """Add the run's compaction to its output."""
    assert run.compacted is not None
    return run.assembler.add_whole(run.compacted.item, run.compacted.usage)
