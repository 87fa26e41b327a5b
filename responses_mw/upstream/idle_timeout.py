"""Limit the time that the reader of an answer waits for the network."""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import UpstreamTimeout

_TICKS = 8


class IdleTimeout:
    """Cancels a reader that waits too long for the network.

    One periodic timer runs for the whole answer, and counts the consecutive ticks at which the reader is waiting. A timer for
    each read, or even reading the clock, would cost more than the read itself.
    """

    __slots__ = ("_is_cancelled", "_task", "_timeout", "_timer", "is_waiting", "ticks")

    def __init__(self) -> None:
        self.is_waiting = False
        """Whether the reader waits for the network. False while the reader's consumer processes the data."""
        self.ticks = 0
        """Number of consecutive ticks at which the reader was waiting. The reader resets this number after each read."""
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_cancelled = False

    def watch(self, timeout: float) -> None:
        """Limit each wait of the current task to `timeout` seconds. The limit may be up to an eighth longer."""
        self.close()
        self._task = asyncio.current_task()
        self._timeout = timeout
        self.ticks = 0
        self._arm()

    def check(self) -> None:
        """Raise `UpstreamTimeout` if this timeout alone cancelled the reader."""
        if self._is_cancelled and self._task is not None and self._task.uncancel() == 0:
            raise UpstreamTimeout(f"The upstream was silent for {self._timeout:g} seconds.") from None

    def close(self) -> None:
        self._task = None  # a cancelled task keeps its frames, which refer to this object
        if self._timer:
            self._timer.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout / _TICKS, self._tick)

    def _tick(self) -> None:
        if self.is_waiting:
            self.ticks += 1
        if self.ticks <= _TICKS:
            self._arm()
        elif self._task:
            self._is_cancelled = self._task.cancel()
