"""Graceful shutdown: active runs get time to finish; the rest fail with a final event instead of being cut off."""

from __future__ import annotations

import asyncio
from types import AsyncGeneratorType, TracebackType
from typing import Any, Self

from ..errors import Unavailable

__all__ = ["ActiveRun", "Drain"]

_INTERVAL = 0.05
_UVICORN = "timeout graceful shutdown exceeded"
"""Part of the message with which the uvicorn of a host application cancels requests at shutdown. Cancellations for other
reasons have other messages."""


class Drain:
    """The active runs of this process, and whether it is stopping."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        """Set when the process begins to stop. Requests that have already arrived may still begin runs."""
        self.is_over = False
        """Whether the time to finish is over. Runs that begin now fail."""
        self.active: set[ActiveRun] = set()

    def begin(self) -> None:
        self.begun.set()

    async def fail_runs(self) -> None:
        """Fail the active runs, and wait until their responses are stored and their last events are sent."""
        self.begun.set()
        self.is_over = True
        while self.active:
            for run in self.active:
                run.interrupt()
            await asyncio.sleep(_INTERVAL)

    def ends_cancelled(self) -> bool:
        """Return whether the current task was cancelled because its request is overdue.

        If so, undo the cancellation, because the server would log it with a traceback.
        """
        task = asyncio.current_task()
        if not self.is_over or task is None:
            return False
        task.uncancel()
        return True

    def error(self) -> Unavailable:
        """Return the error for a run that the shutdown ends."""
        return Unavailable("The server is shutting down.")


class ActiveRun:
    """A context manager for one run, in the task that reads its events. Raises `Unavailable` on entry if the drain is over."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self.events: object = None
        """The iterator of the run's events, if known."""
        self._task: asyncio.Task[Any] | None = None
        self._is_interrupted = False
        self.can_interrupt = False

    def __enter__(self) -> Self:
        if self._drain.is_over:
            raise self._drain.error()
        self._task = asyncio.current_task()
        self._drain.active.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._drain.active.discard(self)

    @property
    def is_overdue(self) -> bool:
        """Whether the time to finish is over."""
        return self._drain.is_over

    def interruptible(self) -> Interruptible:
        """Let a shutdown interrupt the code inside at any await. The interruption raises `Unavailable`."""
        return Interruptible(self)

    def interrupt(self) -> None:
        """Interrupt the run if it is waiting inside `interruptible`. It is not waiting while its reader handles an event."""
        is_waiting = not isinstance(self.events, AsyncGeneratorType) or self.events.ag_running
        if self.can_interrupt and is_waiting and not self._is_interrupted and self._task is not None:
            self._is_interrupted = True
            self._task.cancel()

    def raise_interruption(self, error: asyncio.CancelledError) -> None:
        """Raise `Unavailable` instead of `error` if a shutdown caused it."""
        is_shutdown = self._is_interrupted or any(_UVICORN in str(argument) for argument in error.args)
        if is_shutdown and self._task is not None:
            self._task.uncancel()
            raise self._drain.error() from None


class Interruptible:
    """A context manager for the parts of a run that may be interrupted."""

    __slots__ = ("_run",)

    def __init__(self, run: ActiveRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run.can_interrupt = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._run.can_interrupt = False
        if isinstance(error, asyncio.CancelledError):
            self._run.raise_interruption(error)
