"""The state of all owners in one Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from responses_mw.state.conversations import Conversations
from responses_mw.state.health import Health, Memory, check
from responses_mw.state.jobs import Jobs
from responses_mw.state.queue import Queue
from responses_mw.state.responses import Responses
from responses_mw.state.values import Bounds
from responses_mw.state.wakeups import Wakeups

if TYPE_CHECKING:
    from responses_mw.state.client import Client

__all__ = ["State"]

DAY = 24 * 60 * 60
WEEK = 7 * DAY


class State:
    """``responses``, ``conversations``, the background ``jobs`` and their ``queue`` behind one client, and how that one is.

    ``wakeups`` tells at once what others have written.
    """

    def __init__(
        self,
        client: Client,
        *,
        ttl_seconds: int = WEEK,
        log_ttl_seconds: int = DAY,
        bounds: Bounds | None = None,
        patience: float = 2.0,
        partitions: int = 8,
    ) -> None:
        """``ttl_seconds``: how long things are kept, ``log_ttl_seconds``: the event log of a background response after its end;
        ``patience``: how long a commit is tried while Redis is away (seconds); ``partitions`` of the queue."""
        bounds = bounds or Bounds()
        self.client = client
        self.conversations = Conversations(client, ttl_seconds=ttl_seconds, bounds=bounds)
        self.responses = Responses(
            client,
            self.conversations,
            ttl_seconds=ttl_seconds,
            log_ttl_seconds=log_ttl_seconds,
            bounds=bounds,
            patience=patience,
        )
        self.jobs = Jobs(client, ttl_seconds=ttl_seconds, bounds=bounds)
        self.queue = Queue(client, partitions=partitions)
        self.wakeups = Wakeups(client)
        self._memory = Memory(client)

    async def check(self) -> Health:
        """What the Redis says of itself, for readiness. Raises StateUnavailable."""
        return await check(self.client)

    async def nearly_full(self) -> bool:
        """Whether memory is above 90 % of maxmemory: new responses had better not be stored. Asks every 5 s at most."""
        return await self._memory.nearly_full()

    async def aclose(self) -> None:
        """Closes every connection."""
        await self.wakeups.aclose()
        await self.client.aclose()
