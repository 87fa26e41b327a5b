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
    from .quota import Quota
    from .schema import Address

__all__ = ["TOMBSTONE_SECONDS", "Retractions", "Undo", "own_items"]

logger = logging.getLogger(__name__)

# Seconds for which a write that was given up may still reach Redis.
TOMBSTONE_SECONDS = 3600
# Maximum number of writes to undo that are kept while Redis is unavailable. A further one replaces the oldest.
MAX_PENDING = 10_000
MIN_PAUSE, MAX_PAUSE = 0.1, 2.0


class Undo(NamedTuple):
    """How to undo a write."""

    script: Script
    """Takes the object's key and the tombstone as ``keys``, and returns its answer and a report."""
    keys: list[str]
    args: list[str | bytes | int]
    owner: str
    reserved: str
    """The name under which bytes of the quota were reserved for the object."""


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
        """Undo the write whose ids contain the parts of ``address`` as soon as Redis answers."""
        if len(self._pending) >= MAX_PENDING:
            lost = next(iter(self._pending))
            del self._pending[lost]
            logger.warning("the write of %s%s cannot be undone: it was given up, but may be stored", lost.tag, lost.random)
        self._pending[address] = undo
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """Stop. The remaining writes are not undone."""
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
