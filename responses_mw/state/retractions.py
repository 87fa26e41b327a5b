"""Undo writes that were given up: commits whose response said ``store: false``, and writes to conversations that got a 503.

A Redis that stalled after it read the command may have executed such a write, or may still do so. As soon as Redis answers, a
script removes what the write has stored, and its tombstone makes Redis refuse the write from then on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

from .errors import Damaged, StateUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..lua import Script
    from .client import Client
    from .keys import Address
    from .quota import Quota

__all__ = ["TOMBSTONE_SECONDS", "Retractions", "Undo", "own_items"]

logger = logging.getLogger(__name__)

# Seconds for which a write may still be on its way to a Redis that answers again.
TOMBSTONE_SECONDS = 3600
# Retractions kept while Redis is away. A further one drops the oldest.
MAX_PENDING = 10_000
MIN_PAUSE, MAX_PAUSE = 0.1, 2.0


class Undo(NamedTuple):
    """How a write is undone."""

    script: Script
    """Its ``keys`` are that of the object and the tombstone; it answers with a report."""
    keys: list[str]
    args: list[str | bytes | int]
    owner: str
    reserved: str
    """The name of the object for which bytes of the quota were reserved."""


def own_items(item_ids: Iterable[str], random: str) -> list[str]:
    """Return the ids of the items that the write created: they contain its ``random`` part. The others existed before."""
    return [item_id for item_id in item_ids if random in item_id]


class Retractions:
    """The writes to undo, and the task that does so while there are any."""

    def __init__(self, client: Client, quota: Quota) -> None:
        self._client = client
        self._quota = quota
        self._pending: dict[Address, Undo] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, address: Address, undo: Undo) -> None:
        """Undo the write whose ids have the parts in ``address`` as soon as Redis answers."""
        if len(self._pending) >= MAX_PENDING:
            lost = next(iter(self._pending))
            del self._pending[lost]
            logger.warning("the write of %s%s was given up, but may be stored", lost.tag, lost.random)
        self._pending[address] = undo
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """Give the rest up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause = MIN_PAUSE
        while self._pending:
            address = next(iter(self._pending))
            undo = self._pending.pop(address)
            try:
                await self._retract(address, undo)
                pause = MIN_PAUSE
            except Damaged:
                continue  # the client has logged it
            except StateUnavailable as error:
                logger.debug("a write cannot be undone now: %s", error.message)
                self._pending.setdefault(address, undo)  # behind the others, in case this one alone fails
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)

    async def _retract(self, address: Address, undo: Undo) -> None:
        _, *report = await self._client.script(undo.script, undo.keys, undo.args)
        name = undo.reserved.encode()
        if name not in report:  # nothing was written: end the reservation
            report = [*(report or [0]), name, 0, 0]
        await self._quota.settle(undo.owner, address.tag, report)
