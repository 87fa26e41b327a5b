"""The state of all owners in one Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from responses_mw.state.conversations import Conversations
from responses_mw.state.health import Health, Memory, check
from responses_mw.state.responses import Responses
from responses_mw.state.values import Bounds

if TYPE_CHECKING:
    from responses_mw.state.client import Client

__all__ = ["State"]

WEEK = 7 * 24 * 60 * 60


class State:
    """``responses`` and ``conversations`` behind one client, and how that one is."""

    def __init__(self, client: Client, *, ttl_seconds: int = WEEK, bounds: Bounds | None = None, patience: float = 2.0) -> None:
        """``ttl_seconds``: how long things are kept; ``patience``: how long a commit is tried while Redis is away (seconds)."""
        bounds = bounds or Bounds()
        self.client = client
        self.conversations = Conversations(client, ttl_seconds=ttl_seconds, bounds=bounds)
        self.responses = Responses(client, self.conversations, ttl_seconds=ttl_seconds, bounds=bounds, patience=patience)
        self._memory = Memory(client)

    async def check(self) -> Health:
        """What the Redis says of itself, for readiness. Raises StateUnavailable."""
        return await check(self.client)

    async def nearly_full(self) -> bool:
        """Whether memory is above 90 % of maxmemory: new responses had better not be stored. Asks every 5 s at most."""
        return await self._memory.nearly_full()

    async def aclose(self) -> None:
        """Closes every connection."""
        await self.client.aclose()
