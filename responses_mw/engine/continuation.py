"""Continue a run whose upstream is unavailable or was interrupted.

What the client has seen decides how the turn continues (`protocol.response.seam.Phase`):

nothing            The upstream is asked again.
reasoning          The item is closed as incomplete, and the upstream is asked again: no chat template continues reasoning.
text of a message  If the upstream is proven to continue a text (`upstream.prefill`), it does. Otherwise the response fails.
server-side call   The call is closed as incomplete and not run, and the upstream is asked again.
anything else      The response fails, because a client executes the calls that it sees.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TypeVar

from ..errors import UpstreamBrokeOff, UpstreamError, UpstreamTimeout, UpstreamUnreachable, WorkerLost
from ..protocol.response.events import Event
from ..protocol.response.seam import Phase
from ..telemetry.metrics import UPSTREAM_WAITS
from ..telemetry.report import report_continuation
from ..upstream.backend import Backend, OpenTurn
from ..upstream.client import MAX_ANSWER_BYTES
from .run import Run

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE = 0.25
MAX_PAUSE = 8.0
"""Seconds (before jitter) between requests to an overloaded upstream that does not say how long to wait."""
MAX_CONTINUATIONS = 3
"""Maximum number of times that a response is continued after an interruption, by all workers together."""
RESENDS = 1
"""How often to resend a turn that was interrupted before its first output. The prompt may be what crashes the servers."""
_FAULTS = frozenset({"abort", "error"})
"""Finish reasons that report a failure of the upstream."""


class Continuation:
    """Opens the turns of runs, and continues interrupted ones."""

    def __init__(self, backend: Backend, timeout: float) -> None:
        """After each interruption, the upstream may be unavailable for `timeout` seconds. 0 turns continuation off."""
        self._backend = backend
        self._timeout = timeout

    @property
    def is_on(self) -> bool:
        return self._timeout > 0

    async def open(self, run: Run, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`. Repeat it while the upstream is overloaded or unavailable, up to the timeout.

        Waits with exponential backoff, and at least as long as the upstream asks. Raises the error at once if the run does
        not wait for the upstream, or if the upstream asks to wait longer than the timeout. A failed connection is retried
        `RESENDS` times.
        """
        run.resends = 0
        return await self._open(run, attempt)

    async def _open(self, run: Run, attempt: Callable[[], Awaitable[T]]) -> T:
        pause, deadline = FIRST_PAUSE, math.inf
        while True:
            try:
                return await attempt()
            except UpstreamError as error:
                broke_off = isinstance(error, UpstreamBrokeOff | UpstreamUnreachable)
                may_pass = run.waits_for_upstream if error.is_overload else broke_off and self._may_continue(run, Phase.NOTHING)
                if not may_pass:
                    raise
                deadline = min(deadline, time.monotonic() + self._timeout)
                left, wanted = deadline - time.monotonic(), error.retry_after or 0.0
                if left <= 0 or wanted > left:
                    raise
                jitter = random.uniform(1, 1.25)  # noqa: S311 (clients must not come back all at once)
                wait = min(max(wanted, pause) * jitter, left)
                UPSTREAM_WAITS.add(1, {"status": str(error.status)})
                logger.info("response %s waits %.1f s for an upstream with status %d", run.document["id"], wait, error.status)
            await asyncio.sleep(wait)
            pause = min(2 * pause, MAX_PAUSE)

    async def begin(self, run: Run) -> OpenTurn:
        """Begin a turn, or continue one that another worker left. Raises `WorkerLost` if that turn cannot be continued."""
        phase, run.phase = run.phase, Phase.NOTHING
        turn = await self.open(run, partial(self._continued if phase is Phase.TEXT else self._again, run, None))
        if turn is None:
            raise WorkerLost
        return turn

    async def can_hand_over(self, run: Run, phase: Phase) -> bool:
        """Return whether another worker can continue a run that stopped in `phase`."""
        if phase is not Phase.TEXT:
            return phase is not Phase.FIXED
        try:
            return await self._backend.continues(run.turn_request())
        except UpstreamError as error:
            return error.is_overload or error.status >= 500  # the other worker will ask it again

    def check_end(self, run: Run) -> None:
        """Raise `UpstreamBrokeOff` if the answer has ended but is not complete."""
        assembler = run.assembler
        if not (run.turn is None or run.turn.stream.done or assembler.ended):
            raise UpstreamBrokeOff("The upstream closed the connection before its answer was complete.")
        if assembler.finish_reason in _FAULTS:
            raise UpstreamBrokeOff("The upstream aborted its answer.")

    async def resume(self, run: Run, error: UpstreamError) -> AsyncGenerator[list[Event], None]:
        """Continue the turn that `error` interrupted. Yield the events that close the items that cannot be continued.

        Afterwards, the run has another answer to read, unless its `assembler` has `ended`. Raises `error` if the turn cannot be
        continued.
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
        run.receive(turn.stream.received, MAX_ANSWER_BYTES)
        run.turn = await self._open(run, partial(self._continued if phase is Phase.TEXT else self._again, run, turn))
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
        """Return whether a run that was interrupted in `phase` may be continued, and count it if so."""
        if phase is not Phase.NOTHING:
            run.resends = 0
        elif run.resends == RESENDS:
            return False
        if run.earlier_continuations + run.continuations >= MAX_CONTINUATIONS or not (self.is_on and run.waits_for_upstream):
            return False
        run.continuations += 1
        run.resends += phase is Phase.NOTHING
        return True

    async def _again(self, run: Run, _broken: OpenTurn | None) -> OpenTurn:
        return await self._backend.begin(run.turn_request())

    async def _continued(self, run: Run, broken: OpenTurn | None) -> OpenTurn | None:
        """Open an answer that continues the text of the message; None unless the upstream is proven to continue texts."""
        prefix = await self._backend.prefix(run.turn_request(), run.assembler.turn_begins_at)
        if prefix is None:
            return None
        run.tokens_kept = prefix.prefill.tokens
        maximum = run.request.max_output_tokens
        is_full = broken is not None and maximum is not None and prefix.prefill.tokens >= maximum
        turn = broken if is_full else await self._backend.begin(run.turn_request(prefix.prefill))
        run.assembler.join(prefix.text, is_trimmed=prefix.is_trimmed, usage=prefix.usage)
        if is_full:
            run.assembler.feed({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": {"completion_tokens": 0}})
        return turn
