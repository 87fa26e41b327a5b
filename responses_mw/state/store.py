"""The state of all owners in one Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .conversations import Conversations
from .health import Health, Memory, check
from .idempotency import IdempotencyKeys
from .jobs import Jobs
from .ledger import Ledger
from .limits import Usage
from .pubsub import PubSub
from .queue import Queue
from .quota import Quota
from .responses import Responses
from .retractions import Retractions
from .schema import KEY_CHECK
from .scripts import script
from .values import Bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .client import Client

__all__ = ["State"]

_CHECK_KEYS = script("keys_check")

WEEK = 7 * 24 * 60 * 60


class State:
    """All parts of the state, behind one client.

    They are ``responses``, ``conversations``, the background ``jobs`` and their ``queue``, the owners' current ``usage``, the
    ``quota`` of what they have stored, the ``ledger`` of what they have used, and ``idempotency_keys``. ``wakeups`` delivers
    messages about what other processes have written.
    """

    def __init__(
        self,
        client: Client,
        *,
        ttl_seconds: int = WEEK,
        bounds: Bounds | None = None,
        patience: float = 10.0,
        partitions: int = 8,
        owner_bytes: int = 0,
    ) -> None:
        """``ttl_seconds``: lifetime of stored objects. ``patience``: seconds for which an idempotent write is retried while
        Redis is unavailable. ``partitions``: number of parts of the queue. ``owner_bytes``: quota of an owner (0: none)."""
        self.bounds = bounds = bounds or Bounds()
        self._ttl = ttl_seconds * 1000
        self.client = client
        self.quota = quota = Quota(client, owner_bytes=owner_bytes)
        self.retractions = retractions = Retractions(client, quota)
        self.conversations = Conversations(
            client, quota, retractions, ttl_seconds=ttl_seconds, bounds=bounds, patience=patience
        )
        self.responses = Responses(
            client,
            self.conversations,
            quota,
            retractions,
            ttl_seconds=ttl_seconds,
            bounds=bounds,
            patience=patience,
        )
        self.jobs = Jobs(client, quota, ttl_seconds=ttl_seconds, bounds=bounds, patience=patience)
        self.usage = Usage(client)
        self.ledger = Ledger(client)
        self.idempotency_keys = IdempotencyKeys(client)
        self.queue = Queue(client, self.usage, partitions=partitions)
        self.wakeups = PubSub(client)
        self._memory = Memory(client)

    async def check(self) -> Health:
        """Report the state of Redis, for readiness. Raises StateUnavailable."""
        return await check(self.client)

    async def nearly_full(self) -> bool:
        """Return whether Redis uses more than 90 % of maxmemory, so that no new responses should be stored. Cached for 5 s."""
        return await self._memory.nearly_full()

    async def check_keys(self, values: Sequence[str]) -> bool:
        """Return whether this replica's secret keys agree with the keys of the others.

        ``values`` has one value for each key, derived by a one-way function; the value of the encrypting key is first. The keys
        agree if one of the values is stored, or if none is stored yet; keys are rotated as ``old,new``, ``new,old``, ``new``.
        If they agree, the first value is stored. Stored values expire if they are not checked for the lifetime of a response.
        Raises StateUnavailable.
        """
        agree: int = await self.client.script(_CHECK_KEYS, [KEY_CHECK], [self._ttl, *values])
        return agree == 1

    async def aclose(self) -> None:
        """End all tasks and close every connection."""
        await self.end()
        await self.client.aclose()

    async def end(self) -> None:
        """End all tasks; the client stays open."""
        await self.retractions.aclose()
        await self.wakeups.aclose()
