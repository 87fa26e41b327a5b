"""Request the turns of a run, execute tool calls and compactions between turns, and continue interrupted turns.

The part of a turn that the client has seen (`protocol.response.replay.Phase`) determines how an interrupted turn continues:

nothing            The upstream is asked again.
reasoning          The item is closed as incomplete, and the upstream is asked again. No chat template continues reasoning.
text of a message  The upstream continues the text if a check succeeds (`upstream.continuation`). Otherwise, the response fails.
server-side call   The call is closed as incomplete and not run, and the upstream is asked again.
anything else      The response fails, because no other answer can continue this output (for example, a call for the client).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TypeVar

from ..backoff import Backoff
from ..errors import (
    BadRequest,
    UpstreamAnsweredError,
    UpstreamBrokeOff,
    UpstreamError,
    UpstreamStartedOver,
    UpstreamTimeout,
    UpstreamUnreachable,
    WorkerLost,
)
from ..protocol.json_limits import MAX_TOOLS
from ..protocol.request.tools import distinct
from ..protocol.response import compaction, document
from ..protocol.response.replay import Phase, hides_result
from ..protocol.types import Event
from ..telemetry.context import report_continuation
from ..telemetry.metrics import UPSTREAM_WAITS
from ..tools.toolbox import Toolbox
from ..upstream.backends.base import OpenTurn
from .compaction import Compaction, add_compaction
from .run import Run
from .run_factory import RunFactory

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TURNS = 64
"""Maximum number of turns of a response. The last turn offers no server-side tools."""
FIRST_PAUSE = 0.25
MAX_PAUSE = 8.0
"""First and maximum pause, in seconds before jitter, between requests to an overloaded upstream."""
MAX_CONTINUATIONS = 3
"""Maximum number of times that a response is continued after an interruption, by all workers together."""
RESENDS = 1
"""Maximum number of resends of a turn that is interrupted before its first output. The prompt itself may crash servers."""


class TurnLoop:
    """Runs the turns of a response, and the tool calls between them."""

    def __init__(self, compactor: Compaction, factory: RunFactory, on_overload: Callable[[], None] = lambda: None) -> None:
        """`on_overload` is called whenever an upstream is overloaded."""
        self._on_overload = on_overload
        self._compactor = compactor
        self._factory = factory

    # -- tools and the sequence of turns -------------------------------------------------------------------------------

    async def offer_tools(self, run: Run) -> None:
        """Open the run's toolbox, and set the functions that the model may call.

        Raises `BadRequest` if the request and its history have too many tools, and the errors of `Toolbox.open`.
        """
        run.offered = await run.route.backend.functions(run.request, run.context.items, run.context.size)
        if len(run.offered) > MAX_TOOLS:
            message = f"The request and its history have more than {MAX_TOOLS} tools."
            raise BadRequest(message, param="tools", code="array_above_max_length")
        if run.toolbox is not None:
            await run.toolbox.open()
            run.offered = distinct(run.offered + run.toolbox.offered)
        run.assembler.offer(run.offered, run.request.tool_choice)

    async def open(self, run: Run) -> None:
        """Prepare the tools, compact the history if that is due, and begin the first turn.

        If a compaction or approved calls precede the first turn, `before` begins it. If another worker has completed the last
        turn, no turn begins. Raises `APIError` if one of these steps fails.
        """
        await self.offer_tools(run)
        if run.takeover is not None and run.takeover.is_over:
            return
        if run.phase is Phase.NOTHING:
            await self._compact_if_due(run)
            if run.toolbox is not None and run.toolbox.approvals:
                await run.history.claim(run.toolbox.approvals, run.caller.owner, run.document["id"])
            if run.compacted is not None or (run.toolbox is not None and run.toolbox.approved is not None):
                return
        await self._begin(run)

    async def before(self, run: Run) -> AsyncGenerator[list[Event], None]:
        """Emit the compaction and the MCP tool lists, and run the approved calls, if there are any. Yield all events.

        Begin the first turn if `open` has not begun it. If the client asked only for a compaction, no turn begins.
        """
        if run.compacted is not None:
            yield add_compaction(run)
            if compaction.is_asked(run.context.input):
                return
            await self._begin(run)
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
            await self._begin(run)

    async def after(self, run: Run, turn: OpenTurn) -> AsyncGenerator[list[Event], None]:
        """Finish `turn`, run its tool calls, compact the history if that is due, and begin the next turn. Yield all events.

        After a draft without calls, the next turn requests the answer in the request's format. Otherwise, no turn follows if
        the model made no calls, if the client must run some of them, or if `turn` was the last one.
        """
        assembler = run.assembler
        if events := await self._end(run, turn):
            yield events
        run.receive(turn.stream.received)
        if assembler.answer.asked and run.toolbox is not None:
            async for events in self._run_tool_calls(run, run.toolbox):
                yield events
        run.refuse_calls()
        run.turn = None
        await turn.aclose()
        run.draft_begins_at = None
        if assembler.answer.needs_answer and not _continues(run):
            run.draft_begins_at = assembler.turn_begins_at
            await self._begin(run)
            return
        if not _continues(run):
            if events := assembler.end_without_calls():
                yield events
            return
        await self._compact_if_due(run)
        if run.compacted is not None:
            yield add_compaction(run)
        await self._begin(run)

    async def _end(self, run: Run, turn: OpenTurn) -> list[Event]:
        """End `turn`, and return the events of its remaining items."""
        if text := run.assembler.uncounted:
            run.assembler.count_held(await run.route.backend.count_text(run, text))
        events = run.assembler.end_turn()
        turn.span.finish(run.assembler.answer.finish_reason)
        return events

    async def _run_tool_calls(self, run: Run, toolbox: Toolbox) -> AsyncGenerator[list[Event], None]:
        """Run the turn's calls concurrently, and yield the events of their results in the order of the calls."""
        assembler = run.assembler
        asked = [(call.function, call.arguments, call.id or "") for call in assembler.answer.asked if call.function is not None]
        run.calls = [asyncio.create_task(toolbox.call(*call)) for call in asked]
        for call in run.calls:
            result = await call
            run.receive(result.size)
            run.results[assembler.awaited["id"]] = result.content
            yield assembler.settle(result.members, failed=result.failed)

    async def _compact_if_due(self, run: Run) -> None:
        run.resends = 0
        run.compacted = await self._insist(run, partial(self._compactor.due, run))

    # -- requests to the upstream --------------------------------------------------------------------------------------

    async def _begin(self, run: Run) -> None:
        """Begin a turn, or continue another worker's turn. Raises `WorkerLost` if another worker's turn cannot be continued."""
        run.turns += 1
        run.is_last_turn = run.assembler.is_exhausted or run.turns >= MAX_TURNS
        phase, run.phase, run.resends = run.phase, Phase.NOTHING, 0
        run.turn = await self._insist(run, partial(self._request, run, phase))
        if run.turn is None and not run.assembler.ended:
            raise WorkerLost

    async def _insist(self, run: Run, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`. While the upstream is overloaded, repeat the attempt for up to `overload_timeout`.

        If the connection breaks before the answer begins, repeat the attempt at most `RESENDS` times. Raises the last error if
        the run does not wait for the upstream, or if no time is left, or less than the delay that the upstream asked for.
        """
        backoff, deadline = Backoff(FIRST_PAUSE, MAX_PAUSE, jitter=0.25), math.inf
        while True:
            try:
                return await attempt()
            except UpstreamError as error:
                if error.is_overload:
                    self._on_overload()
                if error.may_succeed_elsewhere and await self._falls_back(run):
                    continue
                if not self._may_repeat(run, error):
                    raise
                deadline = min(deadline, time.monotonic() + run.route.overload_timeout)
                left, wanted = deadline - time.monotonic(), error.retry_after or 0.0
                if left <= 0 or wanted > left:
                    raise
                wait = min(backoff.next(wanted), left) if error.is_overload or not run.route.has_other_endpoints else 0.0
                UPSTREAM_WAITS.add(1, {"status": str(error.status)})
                logger.info("response %s waits %.1f s for an upstream with status %d", run.document["id"], wait, error.status)
            await asyncio.sleep(wait)

    def _may_repeat(self, run: Run, error: UpstreamError) -> bool:
        """Return whether to repeat an attempt that failed with `error`. If its connection broke, count the continuation."""
        if error.is_overload:
            return run.waits_for_upstream
        broke_off = isinstance(error, UpstreamBrokeOff | UpstreamUnreachable) and not isinstance(error, UpstreamAnsweredError)
        return broke_off and self._may_continue(run, Phase.NOTHING)

    async def _falls_back(self, run: Run) -> bool:
        """Move `run` to another upstream if one can replace its own."""
        api = run.route.api
        if not (run.fallbacks and await self._factory.fall_back(run)):
            return False
        if run.route.api != api:
            await self.offer_tools(run)
        return True

    async def _request(self, run: Run, phase: Phase, broken: OpenTurn | None = None) -> OpenTurn | None:
        """Request the current turn, and return it once its answer has begun. `phase` is what the client has seen of the turn.

        Return None if the client has seen text that the upstream cannot continue. If the text already has the maximum number
        of tokens, end the turn and return `broken`, the interrupted answer, or None if another worker has read that. Raises
        `APIError` if the request fails.
        """
        if phase is not Phase.TEXT:
            return await self._request_from_start(run)
        prefix = await run.route.backend.prefix(run, run.assembler.turn_begins_at)
        if prefix is None:
            return None
        run.tokens_kept = prefix.prefill.tokens
        maximum = run.request.max_output_tokens
        is_full = maximum is not None and prefix.prefill.tokens >= maximum
        turn = broken
        if not is_full:
            turn = await run.route.backend.begin(run, prefix.prefill)
            turn.span.continues(run.tokens_kept)
        assert prefix.seam is not None
        run.assembler.join(prefix.seam, prefix.usage)
        if is_full:
            run.assembler.feed({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": {"completion_tokens": 0}})
        return turn

    async def _request_from_start(self, run: Run) -> OpenTurn:
        prefix = await run.route.backend.unfinished_prefix(run)
        turn = await run.route.backend.begin(run, None if prefix is None else prefix.prefill)
        if prefix is not None and prefix.seam is not None:
            run.assembler.expect(prefix.seam)
        run.assembler.is_draft = turn.is_draft
        return turn

    # -- interrupted turns ---------------------------------------------------------------------------------------------

    def check_end(self, run: Run) -> None:
        """Raise `UpstreamError` if the answer is incomplete (see `ResponseBuilder.check_end`)."""
        run.assembler.check_end(done=run.turn is None or run.turn.stream.done)

    async def resume(self, run: Run, error: UpstreamError) -> AsyncGenerator[list[Event], None]:
        """Continue the turn interrupted by `error`, and yield the events that close its unfinished items.

        Afterwards, `run.turn` has a new answer to read, unless `run.assembler.ended` is true. Raises `error` if the turn cannot
        be continued, or the error of the request for the new answer if that fails.
        """
        assembler, turn, began = run.assembler, run.turn, time.monotonic()
        is_broken = isinstance(error, UpstreamBrokeOff | UpstreamTimeout)
        has_finished = assembler.ended and assembler.answer.finish_reason is not None
        if is_broken and has_finished and not isinstance(error, UpstreamStartedOver):
            return  # only the usage is missing
        phase = assembler.phase
        if turn is None or not is_broken or phase is Phase.FIXED or not self._may_continue(run, phase):
            raise error
        events = assembler.break_off()
        turn.span.fail(error)  # now that the document has the partial output
        if events:
            yield events
        await turn.aclose()
        run.receive(turn.stream.received)
        run.turn = await self._insist(run, partial(self._request, run, phase, turn))
        if run.turn is None:
            raise error
        report_continuation(
            run.document["id"],
            reason="timeout" if isinstance(error, UpstreamTimeout) else "broken",
            phase=phase,
            tokens=run.tokens_kept if phase is Phase.TEXT else 0,
            pause=time.monotonic() - began,
        )

    def _may_continue(self, run: Run, phase: Phase) -> bool:
        """Return whether a run that was interrupted in `phase` may be continued. If so, count the continuation."""
        if phase is not Phase.NOTHING:
            run.resends = 0
        elif run.resends == RESENDS:
            return False
        has_more = run.earlier_continuations + run.continuations < MAX_CONTINUATIONS
        goes_on = run.waits_for_upstream or run.is_streamed or run.route.has_other_endpoints
        if not (has_more and run.route.overload_timeout and goes_on):
            return False
        run.continuations += 1
        run.resends += phase is Phase.NOTHING
        return True

    async def can_hand_over(self, run: Run) -> bool:
        """Return whether another worker can continue a failed or stopped background run."""
        phase = run.assembler.phase if run.error is None else run.phase
        logged = (document.shown(item, run.request.include) for item in run.document["output"])
        if not run.route.can_take_over or phase is Phase.FIXED or any(map(hides_result, logged)):
            return False
        if phase is not Phase.TEXT:
            return True
        try:
            return await run.route.backend.continues(run)
        except UpstreamError as error:
            return error.is_overload or error.status >= 500  # the other worker will ask the upstream again


def _continues(run: Run) -> bool:
    """Return whether another turn follows the one that has ended."""
    answer = run.assembler.answer
    has_answers = bool(answer.asked or answer.has_left_out or answer.refused_calls)
    return has_answers and not (answer.has_client_calls or run.is_last_turn)
