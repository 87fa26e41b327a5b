"""Keep the state of a run, and interrupt active runs at the end of a graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from types import AsyncGeneratorType
from typing import Any, Self

from ..cache import Hit, Miss, Uncacheable
from ..errors import APIError, Unavailable, UpstreamError, without_traceback
from ..protocol.chat.chunks import Text
from ..protocol.response.builder import ResponseBuilder
from ..protocol.response.compaction import Compacted
from ..protocol.response.events import Event
from ..protocol.response.replay import Phase, Takeover
from ..protocol.types import Chunk
from ..telemetry.context import end_run
from ..tools import ToolResult
from ..tools.toolbox import Toolbox
from ..upstream.backend import OpenTurn, TurnState
from ..upstream.client import MAX_ANSWER_BYTES
from ..upstream.errors import as_response_error
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
    The run commits the response. `Runner.run` creates only the events that contain the document."""
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
    """Number of times that this run was continued after an interruption."""
    earlier_continuations: int = 0
    """Number of times that other workers continued the response after an interruption."""
    resends: int = 0
    """Number of times that the turn was sent again because of an interruption before new output."""
    tokens_kept: int = 0
    """Number of tokens in the last text that was continued."""
    opening: asyncio.Task[None] | None = None
    """The task that opens the first turn. Mode WHOLE opens it without a task."""
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

    async def opened(self) -> None:
        """Wait for the task `opening`, if there is one. Raises the error of the task."""
        if self.opening is not None:
            await self.opening
            self.opening = None

    def feed(self, chunks: Sequence[Chunk | Text]) -> list[Event]:
        """Add chunks to the response, and return the resulting events. Raises the same errors as `ResponseBuilder.feed`."""
        if self.messages is not None:
            self.messages.take(chunks)
        return self.assembler.feed(*chunks)

    def read(self, turn: OpenTurn) -> ChatStream:
        """Return the stream of `turn`. The stream omits texts that are sent through the outlet."""
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

    def conclude(self, now: int) -> None:
        """Complete the document after the last turn. `now` is the completion time in seconds since the epoch."""
        self.assembler.conclude(now)
        if self.messages is not None:
            self.document.update(self.messages.members(self.model, self.document["output"], self.results))

    def report(self) -> None:
        """Record the status, usage and error of the run for the log and the metrics. An unfinished run counts as cancelled."""
        continuations = self.continuations + (self.takeover is not None)
        end_run(self.document, turns=self.turns, continuations=continuations, error=self.error)

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


_DRAIN_INTERVAL = 0.05
_UVICORN = "timeout graceful shutdown exceeded"
"""Part of the message with which uvicorn cancels requests when the host application shuts down."""


class Drain:
    """The graceful shutdown of this process. Runs that are still active after the grace period fail."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        """Set when the process begins to stop. Requests that have arrived may still begin runs."""
        self.is_over = False
        """Whether the grace period has ended. New runs then fail."""
        self.active: set[ActiveRun] = set()

    async def fail_runs(self) -> None:
        """Fail the active runs, and wait until their responses are stored and their last events are sent."""
        self.begun.set()
        self.is_over = True
        while self.active:
            for run in self.active:
                run.interrupt()
            await asyncio.sleep(_DRAIN_INTERVAL)

    def ends_cancelled(self) -> bool:
        """Return whether the grace period has ended. If so, undo the cancellation of the current task."""
        task = asyncio.current_task()
        if not self.is_over or task is None:
            return False
        task.uncancel()  # the server would log the cancellation with a traceback
        return True

    def error(self) -> Unavailable:
        """Return the error for a run that the shutdown interrupts."""
        return Unavailable("The server is shutting down.")


class ActiveRun:
    """A context manager that registers a run with the drain. After the grace period, the drain interrupts the run.

    The task that reads the run's events must enter the context. Entering raises `Unavailable` if the grace period has ended.
    """

    def __init__(self, drain: Drain) -> None:
        self.drain = drain
        self.events: object = None
        """The iterator of the run's events, or None if it is unknown."""
        self._task: asyncio.Task[Any] | None = None
        self._is_interrupted = False
        self._can_interrupt = False

    def __enter__(self) -> Self:
        if self.drain.is_over:
            raise self.drain.error()
        self._task = asyncio.current_task()
        self.drain.active.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.drain.active.discard(self)
        self._task = None  # a cancelled task keeps its frames, which refer to this object

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Allow the shutdown to interrupt the body at any `await`. The interruption raises `Unavailable`."""
        self._can_interrupt = True
        try:
            yield
        except asyncio.CancelledError as error:
            is_shutdown = self._is_interrupted or any(_UVICORN in str(argument) for argument in error.args)
            if not is_shutdown or self._task is None:
                raise
            self._task.uncancel()
            raise self.drain.error() from None
        finally:
            self._can_interrupt = False

    def interrupt(self) -> None:
        """Cancel the run's task, at most once. Do nothing outside `interruptible`, or while the task handles an event."""
        is_waiting = not isinstance(self.events, AsyncGeneratorType) or self.events.ag_running
        if self._can_interrupt and is_waiting and not self._is_interrupted and self._task is not None:
            self._is_interrupted = True
            self._task.cancel()
