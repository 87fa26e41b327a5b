"""The end of a process: runs have time to finish, then they fail instead of being cut off."""

from __future__ import annotations

import asyncio
from types import AsyncGeneratorType, TracebackType
from typing import Any, Self

from ..errors import Unavailable

__all__ = ["ActiveRun", "Drain"]

_INTERVAL = 0.05
_UVICORN = "timeout graceful shutdown exceeded"
"""Part of the message with which uvicorn cancels requests, where the drain is a host's. Clients that leave have another."""


class Drain:
    """The active runs of this process, and whether it is stopping."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        """Set when the process is stopping. Runs may still begin, for requests that have arrived."""
        self.is_over = False
        """Whether the time of the drain is over. Runs that begin now fail."""
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
        """Whether the current task was cancelled because its request is overdue. If so, end the cancellation: the server would
        log it with a traceback."""
        task = asyncio.current_task()
        if not self.is_over or task is None:
            return False
        task.uncancel()
        return True

    def error(self) -> Unavailable:
        """Return the error of a run that the drain ends."""
        return Unavailable("The server is shutting down.")


class ActiveRun:
    """A context manager for one run, in the task that reads its events. Raises `Unavailable` if the drain is over."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self.events: object = None
        """The generator of the run's events, if it is one."""
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
        """Whether the time of the drain is over."""
        return self._drain.is_over

    def interruptible(self) -> Interruptible:
        """Let the drain, or uvicorn's own, interrupt the code inside wherever it waits. Raises `Unavailable` then."""
        return Interruptible(self)

    def interrupt(self) -> None:
        """Interrupt the run if it waits inside `interruptible`. While its reader handles an event, it does not."""
        is_waiting = not isinstance(self.events, AsyncGeneratorType) or self.events.ag_running
        if self.can_interrupt and is_waiting and not self._is_interrupted and self._task is not None:
            self._is_interrupted = True
            self._task.cancel()

    def raise_interruption(self, error: asyncio.CancelledError) -> None:
        """Raise `Unavailable` in place of `error` if it is a shutdown's interruption."""
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
