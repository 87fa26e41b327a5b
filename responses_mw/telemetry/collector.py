"""Collect facts about ended responses until they are written to Redis."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Collector:
    """JSON texts of this process that have not been written to Redis yet, each with the id of its response."""

    def __init__(self, maximum: int) -> None:
        """`maximum` is the maximum number of waiting texts. If there are more, the oldest ones are dropped."""
        self.is_on = False
        self._collecting = 0
        self._pending: deque[tuple[str, bytes]] = deque(maxlen=maximum)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect in the `with` block. Blocks may overlap, because the applications of a process end in any order."""
        self._collecting += 1
        self.is_on = True
        try:
            yield
        finally:
            self._collecting -= 1
            self.is_on = self._collecting > 0

    @property
    def is_full(self) -> bool:
        """Whether a further text replaces the oldest one."""
        return len(self._pending) == self._pending.maxlen

    def _append(self, response_id: str, text: bytes) -> None:
        self._pending.append((response_id, text))

    def take(self, maximum: int | None = None) -> list[tuple[str, bytes]]:
        """Remove and return the texts, the oldest first. With `maximum`, return no more than that."""
        waiting = len(self._pending)
        return [self._pending.popleft() for _ in range(waiting if maximum is None else min(maximum, waiting))]
