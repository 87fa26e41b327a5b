"""What each owner has stored, counted for all replicas together, and how much that may be.

    rmw:{b<owner>}:expires      zset: stored objects, by the time (ms) when they expire
    rmw:{b<owner>}:sizes        hash: the bytes of each, and their sum

1. The objects lie in other slots of a cluster than the account, so no script can change both. Each script that writes an object
   reports what is there afterwards; the account is set to that, never changed by it, so a repeated report changes nothing.
2. What is about to be written is reserved first. If nobody learns what became of it, the reservation stands until it expires.
3. Whether something may be stored is decided when it is asked for. What was admitted may end a tenth beyond the quota, so that
   few answers are not stored for want of some bytes; requests that run at a time do not get further than that together.
4. Sizes are those of JSON before compression, as all bounds of the state, and something for each object.
5. Where the account cannot be reached, everything passes and a metric counts it.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

from ..telemetry import LIMITS_REFUSED, LIMITS_UNCHECKED
from .errors import OverQuota, StateUnavailable
from .scripts import script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from .client import Client
    from .keys import Address

__all__ = ["Quota", "Report"]

logger = logging.getLogger(__name__)

_ACCOUNT = script("account")

Report: TypeAlias = "list[bytes | int]"
"""When it was so (microseconds), then name, bytes and milliseconds to live of each object: ``report`` in ``lua/lib.lua``."""

# At least what the scripts count for a response besides its JSON (lua/lib.lua).
OVERHEAD = 2560
# The JSON of a response has at least so many bytes more than that of its request.
DOCUMENT = 1024
# Reservations that no report replaces expire after so many milliseconds.
UNSETTLED = 3_600_000


class Quota:
    def __init__(self, client: Client, *, owner_bytes: int = 0) -> None:
        """``owner_bytes`` is the most that an owner may have stored; with 0 there is no limit, and nothing is counted."""
        self._client = client
        self._most = owner_bytes
        self._most_in_the_end = owner_bytes + owner_bytes // 10

    @property
    def is_set(self) -> bool:
        return self._most > 0

    async def check(self, owner: str, size: int) -> None:
        """Raise OverQuota if the owner may not store the response of a request of so many bytes."""
        if self.is_set and await self._charge(owner) + size + OVERHEAD + DOCUMENT > self._most:
            raise self._exceeded()

    @asynccontextmanager
    async def reserved(
        self, owner: str, tag: str, name: str, size: int | None, *, ttl: int = UNSETTLED, admitted: bool = False
    ) -> AsyncIterator[Report]:
        """Reserve ``size`` bytes for an object that is about to be written, and settle with what is put into the report.

        ``ttl`` is in milliseconds; with a ``size`` of None nothing is reserved or refused. ``admitted``: the request for it was
        checked before. An empty report: nothing was written. Raises OverQuota.
        """
        report: Report = []
        if not self.is_set:
            yield report
            return
        if size is not None:
            most = self._most_in_the_end if admitted else self._most
            await self._charge(owner, [tag + name, size + OVERHEAD, ttl], most=most)
        yield report  # where this raises, it may have been written all the same
        if name.encode() not in report:
            report = [*(report or [0]), name.encode(), 0, 0]
        await self.settle(owner, tag, report)

    async def settle(self, owner: str, tag: str, report: Sequence[bytes | int]) -> None:
        """Enter what a script has reported of objects with ``tag``."""
        if not self.is_set or not report:
            return
        when, *values = report
        entries: list[str | bytes | int] = []
        for name, size, ttl in zip(values[::3], values[1::3], values[2::3], strict=True):
            assert isinstance(name, bytes)
            entries += (tag.encode() + name, size, ttl)
        await self._charge(owner, entries, when=int(when))

    async def log(self, owner: str, address: Address, size: int, ttl: int) -> None:
        """Count the event log of a running background response, which has grown to ``size``. Raises OverQuota."""
        if self.is_set:
            await self._charge(owner, [f"{address.tag}e{address.random}", size, ttl], most=self._most_in_the_end)

    async def _charge(self, owner: str, entries: Sequence[str | bytes | int] = (), *, when: int = 0, most: int = 0) -> int:
        """Enter objects; the bytes that the owner has stored then. Raises OverQuota beyond ``most``, unless that is 0."""
        keys = [f"rmw:{{b{owner}}}:{part}" for part in ("expires", "sizes")]
        try:
            fits, used = await self._client.script(_ACCOUNT, keys, [most, when, *entries])
        except StateUnavailable as error:
            LIMITS_UNCHECKED.add(1, {"limit": "storage"})
            logger.debug("the account of what an owner has stored: %s", error.message)
            return 0
        if not fits:
            raise self._exceeded()
        return int(used)

    def _exceeded(self) -> OverQuota:
        LIMITS_REFUSED.add(1, {"limit": "storage"})
        return OverQuota(self._most)
