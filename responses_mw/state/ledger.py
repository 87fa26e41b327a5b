"""Usage of each owner by day (UTC), added up over all replicas.

    rmw:{usage}:<YYYY-MM-DD>    hash: each owner's responses, and input, cached and output tokens; for ``DAYS`` days
    rmw:{usage}:batch:<random>  string: set if the batch was added, so that a repeat changes nothing; for an hour

1. Requests do not wait: each process counts in memory, and adds its counts every ``INTERVAL`` seconds and when it stops.
2. A killed process loses the counts that it has not added.
3. A day has at most ``MAX_OWNERS`` owners. Further owners are counted together as ``_OTHER``.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from ..ids import random_part
from ..telemetry.metrics import MAX_OWNERS, OTHERS, USAGE, OwnerUsage
from .errors import Damaged, StateUnavailable
from .scripts import script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .client import Client

__all__ = ["Ledger"]

logger = logging.getLogger(__name__)

DAYS = 35
INTERVAL = 10.0
BATCH = 500
"""Maximum number of owners in one call of the script, which blocks Redis for a few milliseconds."""
_ADD = script("usage_add")


class Ledger:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._batch: dict[str, OwnerUsage] = {}
        """Taken from the meter, and possibly added already."""
        self._token = ""

    @asynccontextmanager
    async def recording(self) -> AsyncIterator[None]:
        """Record the usage that this process counts until the context exits."""
        task = asyncio.create_task(self._record())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._record_last()

    async def _record(self) -> None:
        is_late = False
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self.flush()
                is_late = False
            except StateUnavailable as error:  # the next flush repeats the batch
                logger.log(logging.DEBUG if is_late else logging.WARNING, "usage will be recorded later: %s", error.message)
                is_late = True

    async def _record_last(self) -> None:
        try:
            await self.flush()
        except StateUnavailable as error:
            logger.warning("the usage of %d owners is lost: %s", len(self._batch), error.message)

    async def flush(self) -> None:
        """Record what was counted since the last call. Raises StateUnavailable; the next call repeats the batch."""
        if self._batch:
            await self._add()
        while batch := USAGE.take(BATCH):
            self._batch, self._token = batch, random_part()
            await self._add()

    async def _add(self) -> None:
        keys = [_key(datetime.now(UTC).date()), f"rmw:{{usage}}:batch:{self._token}"]
        rows: list[str | int] = []
        for owner, used in self._batch.items():
            rows += (owner, *used.values())
        await self._client.script(_ADD, keys, [MAX_OWNERS, OTHERS, DAYS * 24 * 3600, *rows])
        self._batch = {}

    async def read(self, day: date) -> dict[str, OwnerUsage]:
        """Return the usage of each owner on a day. Raises StateUnavailable, including for a damaged record."""
        stored: dict[bytes, bytes] = await self._client.command("HGETALL", _key(day))
        try:
            return {owner.decode(): OwnerUsage(*map(int, sums.split())) for owner, sums in stored.items()}
        except (ValueError, TypeError):
            raise Damaged("usage") from None


def _key(day: date) -> str:
    return f"rmw:{{usage}}:{day.isoformat()}"
