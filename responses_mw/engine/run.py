"""Keep the state of a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

from ..cache import Hit, Miss, Uncacheable
from ..errors import APIError, UpstreamError, without_traceback
from ..protocol.chat.chunks import Text
from ..protocol.request.create import CreateResponse
from ..protocol.response.builder import ResponseBuilder
from ..protocol.response.compaction import Compacted
from ..protocol.response.replay import Phase, Takeover
from ..protocol.tool_kinds.form import MAX_NAME
from ..protocol.types import Chunk, Event
from ..telemetry.answers import report_dropped, report_finish_reason
from ..telemetry.context import end_run
from ..tools import ToolResult
from ..tools.toolbox import Toolbox
from ..upstream.backends.base import OpenTurn, TurnState
from ..upstream.client import MAX_ANSWER_BYTES
from ..upstream.errors import as_response_error
from ..upstream.routing import Route
from ..upstream.stream import ChatStream
from .history import History, RunContext

logger = logging.getLogger(__name__)


class RunMode(Enum):
    """How a run reports errors, and who commits its response."""

    STREAMED = auto()
    """For a client that reads events. Errors are raised until the upstream answers or `upstream.status_grace` ends. Then the
    run waits for an overloaded upstream, and other errors become `response.failed`. The run commits before the last event."""
    WHOLE = auto()
    """For a client that reads the final document. An error is raised or, after a tool call has run, recorded in the document.
    The run commits the response. `Runner.run` creates only the terminal event."""
    DETACHED = auto()
    """For a background job, which commits the response together with its terminal event. The run does not yield this event.
    Errors are recorded in the document. An overload before the first output ends the run, because the job can be retried."""


class Outlet:
    """Sends deltas to the client without waking the task that reads the run's events.

    The outlet is used while that task waits for the upstream. If the outlet is ready, and a text that continues the last one
    arrives alone in a network read, the frame of its delta is passed to `send`. The run yields all other events.

    An outlet saves a fifth of the CPU time per token: 49 us instead of 62 us in the benchmark `steady`, on two busy cores.
    Remove outlets if they save less than 10 %.
    """

    __slots__ = ("is_ready", "send")

    def __init__(self) -> None:
        self.close()

    def open(self, is_ready: Callable[[], bool], send: Callable[[bytes], None]) -> None:
        """Pass deltas, each as a server-sent event, to `send` whenever `is_ready` returns true, until `close` is called."""
        self.is_ready = is_ready
        self.send = send

    def close(self) -> None:
        """Stop passing deltas to `send`. The run then yields all events, as with a new outlet."""
        self.open(lambda: False, lambda _: None)


@dataclass(slots=True, kw_only=True)
class Run(TurnState):
    """One response in progress."""

    route: Route
    """The upstream that the turns go to."""
    fallbacks: list[Route] = field(default_factory=list)
    """The other upstreams that turns can go to. The first one is next."""
    asked: CreateResponse
    """The request before its tools were checked for an upstream."""
    context: RunContext
    assembler: ResponseBuilder
    history: History
    """The history that the response continues and is committed to."""
    toolbox: Toolbox | None = None
    outlet: Outlet | None = None
    """The outlet that deltas may be passed to. If None, the run yields all events."""
    looked_up: Hit | Miss | Uncacheable | None = None
    """The result of the cache lookup, or None if the cache was not used."""
    turn: OpenTurn | None = None
    """The turn being read."""
    takeover: Takeover | None = None
    """The output of another worker that this run continues, or None."""
    first_events: list[Event] | None = None
    """The first events of a resumed run. If None, `ResponseBuilder.start` provides them."""
    phase: Phase = Phase.NOTHING
    """The phase that the turn had reached when another worker left it unfinished, or when the run failed."""
    continuations: int = 0
    """Number of times that this run tried to continue after an interruption."""
    reads_files_later: bool = False
    """Whether the items still name files, because the upstream of a background response could not be asked for its dialect."""
    earlier_continuations: int = 0
    """Number of times that other workers tried to continue the response after an interruption."""
    resends: int = 0
    """Number of times that the turn was sent again because of an interruption before new output."""
    tokens_kept: int = 0
    """Number of tokens in the last text that was continued."""
    opening: asyncio.Task[None] | None = None
    """The task that opens the first turn. Mode WHOLE opens it without a task."""
    is_streamed: bool = False
    """Whether a client reads the events. A turn that is interrupted before its output is then requested again."""
    is_status_sent: bool = False
    """Whether the HTTP status has been sent. Then an overload can no longer be reported as a status."""
    calls: Sequence[asyncio.Task[ToolResult]] = ()
    """The tool calls of the last turn."""
    received: int = 0
    """Bytes received in finished or interrupted turns and in tool results."""
    compacted: Compacted | None = None
    """The compaction that precedes the next turn, if one is due."""
    error: Exception | None = None
    """The error that ended the run."""

    @property
    def waits_for_upstream(self) -> bool:
        """Whether to wait for an overloaded upstream: true after the HTTP status has been sent, or if there is output."""
        return self.is_status_sent or bool(self.document["output"])

    @property
    def judging(self) -> asyncio.Task[Hit | None] | None:
        """The judgement of a cached answer that races against the upstream."""
        return self.looked_up.judging if isinstance(self.looked_up, Miss) else None

    async def wait_until_open(self) -> None:
        """Wait for the task `opening`, if there is one. Raises the error of the task."""
        if self.opening is not None:
            await self.opening
            self.opening = None

    async def is_open_within(self, seconds: float | None) -> bool:
        """Wait for the task `opening`, but not after an approval of `judging` or these seconds. Return whether it is done.

        An approval that comes as late as the answer is not used.
        """
        assert self.opening is not None
        loop = asyncio.get_running_loop()
        until = None if seconds is None else loop.time() + seconds
        waiting: set[asyncio.Task[Any]] = {self.opening} if self.judging is None else {self.opening, self.judging}
        while not self.opening.done():
            left = None if until is None else until - loop.time()
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done or (isinstance(self.looked_up, Miss) and self.looked_up.approved is not None):
                break
        return self.opening.done()

    def feed(self, chunks: Sequence[Chunk | Text]) -> list[Event]:
        """Add chunks to the response, and return the resulting events. Raises the same errors as `ResponseBuilder.feed`."""
        if self.messages is not None:
            self.messages.take(chunks)
        return self.assembler.feed(*chunks)

    def read(self, turn: OpenTurn) -> ChatStream:
        """Return the stream of `turn`. The stream omits texts that are sent through the outlet."""
        turn.stream.limit_text(self.assembler.text_size)
        if self.outlet is not None and self.messages is None:
            turn.stream.divert(partial(self._pass_on, self.outlet))
        return turn.stream

    def _pass_on(self, outlet: Outlet, text: Text) -> bool:
        """Add `text` to the response, and send its delta. Return False without doing so if one of them is not possible."""
        delta = self.assembler.delta(text) if outlet.is_ready() else None
        if delta is None:
            return False
        outlet.send(delta)
        return True

    def receive(self, size: int) -> None:
        """Add `size` to the bytes received. Raises `UpstreamError` if the total exceeds `MAX_ANSWER_BYTES`."""
        self.received += size
        if self.received > MAX_ANSWER_BYTES:
            raise UpstreamError(f"The response exceeds the maximum of {MAX_ANSWER_BYTES} bytes.")

    def refuse_calls(self) -> None:
        """Log the calls of the last turn that are not executed. Keep those that the model must see as refused."""
        answer, response_id = self.assembler.answer, self.document["id"]
        if answer.excluded:
            logger.warning("response %s: tool_choice excludes %s, which the model called", response_id, _names(answer.excluded))
        if answer.refused_calls:
            names = [item["name"] for item in answer.refused_calls if "name" in item]
            logger.warning("response %s: the model called %s, which was not offered", response_id, _names(names))
            self.refused_calls.setdefault(len(self.document["output"]), []).extend(answer.refused_calls)

    def conclude(self, now: int) -> None:
        """Complete the document after the last turn. `now` is the completion time in seconds since the epoch."""
        self.assembler.conclude(now)
        if self.messages is not None:
            self.document.update(self.messages.members(self.model, self.document["output"], self.results))

    def report(self) -> None:
        """Record the status, usage and error of the run for the log and the metrics. An unfinished run counts as cancelled."""
        end_run(self.document, turns=self.turns, error=self.error)
        builder = self.assembler
        if builder.dropped:
            report_dropped(self.model, builder.dropped)
            builder.dropped.clear()
        if builder.unknown_finish_reason is not None:
            report_finish_reason(self.model, builder.unknown_finish_reason)
            builder.unknown_finish_reason = None

    def fail(self, error: Exception, *, is_raised: bool = False) -> None:
        """Mark the document as failed, without the details of an error other than `APIError`. Log it unless `is_raised`."""
        self.error, self.phase = error, self.assembler.phase
        if isinstance(error, APIError):
            self.assembler.fail(**as_response_error(error))
        else:
            self.assembler.fail("server_error", "The server had an error while making the response.")
            if not is_raised:
                logger.error("response %s failed", self.document["id"], exc_info=error)
        if self.turn is not None:
            self.turn.span.fail(error)  # now that the document has the turn's usage
        if not is_raised:
            without_traceback(error)


def _names(names: Sequence[str]) -> str:
    return ", ".join(repr(name[:MAX_NAME]) for name in names[:_MAX_LOGGED])


_MAX_LOGGED = 8
