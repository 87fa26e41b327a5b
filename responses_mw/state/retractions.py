"""Undoes commits that were given up, because their clients were told ``store: false``.

Redis may have executed such a commit, or may execute it yet: it read the command and then stalled. As soon as it answers, the
response is deleted if the commit's token wrote it, and a tombstone refuses the commit from then on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

from .errors import Damaged, StateUnavailable
from .scripts import script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .client import Client
    from .keys import Address
    from .quota import Quota

__all__ = ["DELETE", "Retractions"]

logger = logging.getLogger(__name__)

DELETE = script("delete")

# Seconds for which a commit may still be on its way to a Redis that answers again.
TOMBSTONE_SECONDS = 3600
# Retractions kept while Redis is away. A further one drops the oldest.
MAX_PENDING = 10_000
MIN_PAUSE, MAX_PAUSE = 0.1, 2.0


class _Commit(NamedTuple):
    owner: str
    token: str
    item_ids: Sequence[str]
    """Ids of the items that it appends to its conversation."""


class Retractions:
    """The commits to undo, and the task that does so while there are any."""

    def __init__(self, client: Client, quota: Quota) -> None:
        self._client = client
        self._quota = quota
        self._pending: dict[Address, _Commit] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, address: Address, owner: str, token: str, item_ids: Sequence[str]) -> None:
        """Undo the commit with ``token`` as soon as Redis answers."""
        if len(self._pending) >= MAX_PENDING:
            lost = next(iter(self._pending))
            del self._pending[lost]
            logger.warning("response resp_%s%s was given up, but may be stored", lost.tag, lost.random)
        own = [item_id for item_id in item_ids if address.random in item_id]  # the others were there before
        self._pending[address] = _Commit(owner, token, own)
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
            commit = self._pending.pop(address)
            try:
                await self._retract(address, commit)
                pause = MIN_PAUSE
            except Damaged:
                continue  # the client has logged it
            except StateUnavailable as error:
                logger.debug("a commit cannot be undone now: %s", error.message)
                self._pending.setdefault(address, commit)  # behind the others, in case this one alone fails
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)

    async def _retract(self, address: Address, commit: _Commit) -> None:
        keys = [address.record, address.tombstone]
        args: list[str | bytes | int] = [commit.owner, commit.token, TOMBSTONE_SECONDS * 1000, commit.token]
        _, *report = await self._client.script(DELETE, keys, [*args, *commit.item_ids])
        # Nothing was written: end the reservation.
        await self._quota.settle(commit.owner, address.tag, report or [0, f"r{address.random}".encode(), 0, 0])
