"""Interrupt active runs at the end of a graceful shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import AsyncGeneratorType
from typing import Any, Self

from ..errors import Unavailable

_DRAIN_INTERVAL = 0.05


class Drain:
    """The graceful shutdown of this process. Runs that are still active after the grace period fail."""

    def __init__(self, is_shutdown: Callable[[asyncio.CancelledError], bool] = lambda _: False) -> None:
        """`is_shutdown` tells whether a cancellation comes from a server that shuts down, rather than from its client."""
        self.is_shutdown = is_shutdown
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


class Interruptible:
    """A context manager whose body the shutdown may interrupt at any `await`. The interruption raises `Unavailable`."""

    def __init__(self, drain: Drain) -> None:
        self.drain = drain
        self.task: asyncio.Task[Any] | None = None
        """The task that runs the body."""
        self._is_interrupted = False
        self._is_entered = False

    def __enter__(self) -> None:
        self._is_entered = True

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._is_entered = False
        if not isinstance(error, asyncio.CancelledError) or self.task is None:
            return
        if self._is_interrupted or self.drain.is_shutdown(error):
            self.task.uncancel()
            raise self.drain.error() from None

    def interrupt(self) -> None:
        """Cancel the task, at most once. Do nothing outside the body."""
        if self._is_entered and not self._is_interrupted and self.task is not None:
            self._is_interrupted = True
            self.task.cancel()


class ActiveRun:
    """A context manager that registers a run with the drain. After the grace period, the drain interrupts the run.

    The task that reads the run's events must enter the context. Entering raises `Unavailable` if the grace period has ended.
    """

    def __init__(self, drain: Drain) -> None:
        self.drain = drain
        self.events: object = None
        """The iterator of the run's events, or None if it is unknown."""
        self.interruptible = Interruptible(drain)
        """The context in which the shutdown may interrupt the run."""

    def __enter__(self) -> Self:
        if self.drain.is_over:
            raise self.drain.error()
        self.interruptible.task = asyncio.current_task()
        self.drain.active.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.drain.active.discard(self)
        self.interruptible.task = None  # a cancelled task keeps its frames, which refer to this object

    def interrupt(self) -> None:
        """Interrupt the run, unless its task handles an event."""
        if not isinstance(self.events, AsyncGeneratorType) or self.events.ag_running:
            self.interruptible.interrupt()
