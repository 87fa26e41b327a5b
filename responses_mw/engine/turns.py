"""Request the turns of a run, execute tool calls and compactions between turns, and continue interrupted turns.

The part of a turn that the client has seen (`protocol.response.replay.Phase`) determines how an interrupted turn continues:

nothing            The upstream is asked again.
reasoning          The item is closed as incomplete, and the upstream is asked again. No chat template continues reasoning.
text of a message  The upstream continues the text if a check succeeds (`upstream.prompts`). Otherwise, the response fails.
server-side call   The call is closed as incomplete and not run, and the upstream is asked again.
anything else      The response fails, because no other answer can continue this output (for example, a call for the client).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from ..crypto import Sealer
from ..errors import BadRequest, UpstreamBrokeOff, UpstreamError, UpstreamTimeout, UpstreamUnreachable, WorkerLost
from ..ids import RunIds
from ..protocol.parts import reasoning_text
from ..protocol.request.checks import MAX_TOOLS
from ..protocol.request.items import user_message
from ..protocol.request.tools import distinct
from ..protocol.response import compaction, document
from ..protocol.response.compaction import Compacted
from ..protocol.response.events import Event
from ..protocol.response.replay import Phase, hides_result
from ..protocol.types import Document, Item
from ..settings.groups import CompactionSettings
from ..state import Chain
from ..telemetry.context import report_continuation
from ..telemetry.metrics import UPSTREAM_WAITS
from ..threads import by_size
from ..tools.toolbox import Toolbox
from ..upstream.backend import COMPACTION, Backend, OpenTurn
from .history import NO_HISTORY, RunContext
from .run import Run, RunMode

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
_FAULTS = frozenset({"abort", "error"})
"""Finish reasons that report a failure of the upstream."""

PROMPT = """\
Your context is full. Write a summary of the whole conversation above, from which you (or another model) will go on without \
seeing any of it. Do not go on with the work, do not call a tool and do not answer the user: write the summary alone.

It must hold, as briefly as it can:
- what the user wants, with every requirement, preference and correction; the current request word for word
- what was done and decided so far, and why; what failed
- facts, names, paths, identifiers, figures, code and results of tools that are still needed, exactly as they are
- how things stand, and what is to be done next"""


class TurnLoop:
    """Runs the turns of a response, and the tool calls between them."""

    def __init__(self, backend: Backend, compactor: Compaction, overload_timeout: float) -> None:
        """`overload_timeout` is the maximum wait for an unavailable upstream in seconds. 0 also disables continuations."""
        self._backend = backend
        self._compactor = compactor
        self.overload_timeout = overload_timeout

    @property
    def can_take_over(self) -> bool:
        """Whether runs can continue from another worker's output."""
        return self._backend.can_take_over and self.overload_timeout > 0

    # -- tools and the sequence of turns -------------------------------------------------------------------------------

    async def offer_tools(self, run: Run) -> None:
        """Open the run's toolbox, and set the functions that the model may call.

        Raises `BadRequest` if the request and its history have too many tools, and the errors of `Toolbox.open`.
        """
        run.offered = await self._backend.functions(run.request, run.context.items, run.context.size)
        if len(run.offered) > MAX_TOOLS:
            message = f"The request and its history have more than {MAX_TOOLS} tools."
            raise BadRequest(message, param="tools", code="array_above_max_length")
        if run.toolbox is not None:
            await run.toolbox.open()
            run.offered = distinct(run.offered + run.toolbox.offered)
            run.assembler.sources = run.toolbox.sources
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

        No turn follows if the model made no calls, if the client must run some of them, or if `turn` was the last one.
        """
        assembler = run.assembler
        events = assembler.end_turn()
        turn.span.finish(assembler.finish_reason)
        if events:
            yield events
        run.receive(turn.stream.received)
        if assembler.asked and run.toolbox is not None:
            async for events in self._run_tool_calls(run, run.toolbox):
                yield events
        run.turn = None
        await turn.aclose()
        if not (assembler.asked or assembler.has_left_out) or assembler.has_client_calls or run.is_last_turn:
            return
        await self._compact_if_due(run)
        if run.compacted is not None:
            yield add_compaction(run)
        await self._begin(run)

    async def _run_tool_calls(self, run: Run, toolbox: Toolbox) -> AsyncGenerator[list[Event], None]:
        """Run the turn's calls concurrently, and yield the events of their results in the order of the calls."""
        assembler = run.assembler
        asked = [(call.form, call.arguments, call.id or "") for call in assembler.asked if call.form is not None]
        run.calls = [asyncio.create_task(toolbox.call(*call)) for call in asked]
        for call in run.calls:
            result = await call
            run.receive(result.size)
            run.results[assembler.awaited["id"]] = result.content
            assembler.sources = toolbox.sources
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
        if run.turn is None:
            raise WorkerLost

    async def _insist(self, run: Run, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`. While the upstream is overloaded, repeat the attempt for up to `overload_timeout`.

        If the connection breaks before the answer begins, repeat the attempt at most `RESENDS` times. Raises the last error if
        the run does not wait for the upstream, or if no time is left, or less than the delay that the upstream asked for.
        """
        pause, deadline = FIRST_PAUSE, math.inf
        while True:
            try:
                return await attempt()
            except UpstreamError as error:
                broke_off = isinstance(error, UpstreamBrokeOff | UpstreamUnreachable)
                may_pass = run.waits_for_upstream if error.is_overload else broke_off and self._may_continue(run, Phase.NOTHING)
                if not may_pass:
                    raise
                deadline = min(deadline, time.monotonic() + self.overload_timeout)
                left, wanted = deadline - time.monotonic(), error.retry_after or 0.0
                if left <= 0 or wanted > left:
                    raise
                jitter = random.uniform(1, 1.25)  # noqa: S311 (clients must not come back all at once)
                wait = min(max(wanted, pause) * jitter, left)
                UPSTREAM_WAITS.add(1, {"status": str(error.status)})
                logger.info("response %s waits %.1f s for an upstream with status %d", run.document["id"], wait, error.status)
            await asyncio.sleep(wait)
            pause = min(2 * pause, MAX_PAUSE)

    async def _request(self, run: Run, phase: Phase, broken: OpenTurn | None = None) -> OpenTurn | None:
        """Request the current turn, and return it once its answer has begun. `phase` is what the client has seen of the turn.

        Return None if the client has seen text that the upstream cannot continue. Return `broken`, the interrupted turn, if its
        text already has the maximum number of tokens. Raises `APIError` if the request fails.
        """
        if phase is not Phase.TEXT:
            return await self._backend.begin(run)
        prefix = await self._backend.prefix(run, run.assembler.turn_begins_at)
        if prefix is None:
            return None
        run.tokens_kept = prefix.prefill.tokens
        maximum = run.request.max_output_tokens
        is_full = broken is not None and maximum is not None and prefix.prefill.tokens >= maximum
        turn = broken
        if not is_full:
            turn = await self._backend.begin(run, prefix.prefill)
            turn.span.continues(run.tokens_kept)
        run.assembler.join(prefix.text, is_trimmed=prefix.is_trimmed, usage=prefix.usage)
        if is_full:
            run.assembler.feed({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": {"completion_tokens": 0}})
        return turn

    # -- interrupted turns ---------------------------------------------------------------------------------------------

    def check_end(self, run: Run) -> None:
        """Raise `UpstreamBrokeOff` if the answer ended before it was complete, or if the upstream aborted it."""
        assembler = run.assembler
        if not (run.turn is None or run.turn.stream.done or assembler.ended):
            raise UpstreamBrokeOff("The upstream closed the connection before its answer was complete.")
        if assembler.finish_reason in _FAULTS:
            raise UpstreamBrokeOff("The upstream aborted its answer.")

    async def resume(self, run: Run, error: UpstreamError) -> AsyncGenerator[list[Event], None]:
        """Continue the turn interrupted by `error`, and yield the events that close its unfinished items.

        Afterwards, `run.turn` has a new answer to read, unless `run.assembler.ended` is true. Raises `error` if the turn cannot
        be continued, or the error of the request for the new answer if that fails.
        """
        assembler, turn, began = run.assembler, run.turn, time.monotonic()
        is_broken = isinstance(error, UpstreamBrokeOff | UpstreamTimeout)
        if is_broken and assembler.ended and assembler.finish_reason not in _FAULTS:
            return  # only the usage is missing
        phase = assembler.phase
        if turn is None or not is_broken or phase is Phase.FIXED or not self._may_continue(run, phase):
            raise error
        turn.span.fail(error)
        events = assembler.break_off()
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
        if not (has_more and self.overload_timeout and run.waits_for_upstream):
            return False
        run.continuations += 1
        run.resends += phase is Phase.NOTHING
        return True

    async def can_hand_over(self, run: Run) -> bool:
        """Return whether another worker can continue a failed or stopped background run."""
        phase = run.assembler.phase if run.error is None else run.phase
        logged = (document.shown(item, run.request.include) for item in run.document["output"])
        if not self.can_take_over or phase is Phase.FIXED or any(map(hides_result, logged)):
            return False
        if phase is not Phase.TEXT:
            return True
        try:
            return await self._backend.continues(run)
        except UpstreamError as error:
            return error.is_overload or error.status >= 500  # the other worker will ask the upstream again


def add_compaction(run: Run) -> list[Event]:
    """Add the run's compaction to the output, and return the events."""
    assert run.compacted is not None
    return run.assembler.add_whole(run.compacted.item, run.compacted.usage)


class Compaction:
    """Replaces histories with summaries that the upstream's model writes (see `protocol.response.compaction`).

    A summary is the answer of a separate run, which is never stored.
    """

    def __init__(
        self,
        backend: Backend,
        sealer: Sealer,
        settings: CompactionSettings,
        events_of: Callable[[Run, RunMode], AsyncGenerator[list[Event], None]],
    ) -> None:
        """`events_of` runs a prepared run and yields its events."""
        self._backend = backend
        self._sealer = sealer
        self._settings = settings
        self._events_of = events_of

    def is_wanted(self, run: Run) -> bool:
        """Return whether `run` may have to begin with a compaction."""
        return compaction.is_asked(run.context.input) or bool(run.request.context_management)

    async def due(self, run: Run) -> Compacted | None:
        """Return a compaction if the request asks for one, or if the next turn's input is too long. Otherwise, return None.

        The input is too long if it has more tokens than the request's threshold, and a summary can replace items. Raises
        `APIError` if the tokens cannot be counted or the compaction fails.
        """
        if compaction.is_asked(run.context.input):
            return await self.compact(run, await self.items(run))
        # The model must first see the results of approved calls.
        is_awaited = run.toolbox is not None and run.toolbox.approved is not None and not run.turns
        threshold = compaction.threshold_of(run.request)
        if threshold is None or is_awaited:
            return None
        items = await self.items(run)
        if not compaction.can_shrink(items) or not await self._backend.exceeds(run, items, threshold):
            return None
        return await self.compact(run, items)

    async def compact(self, run: Run, items: Sequence[Item]) -> Compacted:
        """Return a compaction of `items`, which the model would see in the next turn. Raises `APIError` if that fails."""
        inner, waiting = self.summary_run(run, items)
        async with aclosing(self._events_of(inner, RunMode.WHOLE)) as batches:
            async for _ in batches:
                pass
        error = inner.document["error"]
        if error is not None:  # a truncated summary would lose the rest of the history
            raise UpstreamError(error["message"], code=error["code"])
        summary = _text(inner.document)
        if not summary:
            raise UpstreamError("The upstream's model was asked for a summary but returned no text.")
        sealed = self._sealer.seal(compaction.envelope(summary, waiting), purpose=COMPACTION, owner=run.context.owner)
        return Compacted({"type": "compaction", "encrypted_content": sealed}, inner.document["usage"])

    def summary_run(self, run: Run, items: Sequence[Item]) -> tuple[Run, list[Item]]:
        """Return the run that writes the summary of `items`, and the user messages at the end, which follow the summary.

        Raises `BadRequest` if there is nothing to summarize.
        """
        matter, waiting = compaction.split_history(items)
        asked, ids, owner = [*matter, user_message(self._settings.prompt or PROMPT)], RunIds(), run.context.owner
        request = compaction.summary_request(run.request)
        context = RunContext(Chain.new(), ids, asked, owner, run.context.token, run.context.size)
        created = document.create(
            request, response_id=ids.response, model=run.document["model"], created_at=run.document["created_at"]
        )
        assembler = self._backend.builder(request, created, ids, owner, frozenset())
        turn = request, run.caller, run.model, context.chain.items, asked, created, context.size
        return Run(*turn, results=run.results, context=context, assembler=assembler, history=NO_HISTORY), waiting

    async def items(self, run: Run) -> list[Item]:
        """Return the items that the model would see in the next turn. Raises `BadRequest` if an item cannot be decrypted."""
        return await by_size(run.size, self._backend.items, run)


def _text(answer: Document) -> str:
    """Return the text of an answer or, if it has no text, its reasoning."""
    reasoning = "\n".join(reasoning_text(item) for item in answer["output"] if item["type"] == "reasoning")
    return document.output_text(answer).strip() or reasoning.strip()
