"""The account of what each owner has stored, shared by all replicas, and its quota.

    rmw:{b<owner>}:expires      zset: stored objects, by the time (ms) when they expire
    rmw:{b<owner>}:sizes        hash: the bytes of each, and their sum

1. Objects and account are in different slots of a cluster, so no script can change both. Each script that writes an object
   reports its size afterwards, and the account is set to that size. A repeated report changes nothing.
2. The size of an object is reserved before it is written. If its report is lost, the reservation stays until it expires.
3. A request is admitted by the quota when it arrives. Its response may exceed the quota by a tenth, so that finished
   responses are rarely lost over a few bytes. Concurrent requests share that tenth.
4. Sizes are measured as JSON before compression, like all limits of the state, plus an overhead for each object.
5. If the account is unavailable, everything is admitted and a metric counts it.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

from ..telemetry.metrics import LIMITS_REFUSED, LIMITS_UNCHECKED
from .errors import OverQuota, StateUnavailable
from .scripts import script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from .client import Client
    from .schema import Address

__all__ = ["Quota", "Report"]

logger = logging.getLogger(__name__)

_ACCOUNT = script("account")

Report: TypeAlias = "list[bytes | int]"
"""Time of the report (us), then name, bytes and time to live (ms) of each object, as made by ``report`` in ``lua/lib.lua``."""

# Upper bound of the overhead that the scripts count for a response (lua/lib.lua).
OVERHEAD = 2560
# Minimum difference in bytes between the JSON of a response and the JSON of its request.
DOCUMENT = 1024
# Time to live of a reservation that no report replaces, in milliseconds.
UNSETTLED = 3_600_000


class Quota:
    def __init__(self, client: Client, *, owner_bytes: int = 0) -> None:
        """``owner_bytes`` is the maximum number of bytes that an owner may store; 0 disables the quota and the account."""
        self._client = client
        self._maximum = owner_bytes
        self._final_maximum = owner_bytes + owner_bytes // 10

    @property
    def is_set(self) -> bool:
        return self._maximum > 0

    async def check(self, owner: str, size: int) -> None:
        """Raise OverQuota if the owner may not store the response to a request of ``size`` bytes."""
        if self.is_set and await self._charge(owner) + size + OVERHEAD + DOCUMENT > self._maximum:
            raise self._exceeded()

    @asynccontextmanager
    async def reserved(
        self, owner: str, tag: str, name: str, size: int | None, *, ttl: int = UNSETTLED, admitted: bool = False
    ) -> AsyncIterator[Report]:
        """Reserve ``size`` bytes for an object that the body writes, and settle the report that the body fills.

        ``ttl`` is the reservation's time to live in milliseconds. If ``size`` is None, nothing is reserved or refused.
        ``admitted``: the request has passed ``check``. An empty report means that nothing was written. Raises OverQuota.
        """
        report: Report = []
        if not self.is_set:
            yield report
            return
        if size is not None:
            maximum = self._final_maximum if admitted else self._maximum
            await self._charge(owner, [tag + name, size + OVERHEAD, ttl], maximum=maximum)
        yield report  # if the body raises, the object may have been written nevertheless: the reservation stays
        if name.encode() not in report:
            report = [*(report or [0]), name.encode(), 0, 0]
        await self.settle(owner, tag, report)

    async def settle(self, owner: str, tag: str, report: Sequence[bytes | int]) -> None:
        """Update the owner's account from a script's report. ``tag`` is prepended to the object names in it."""
        if not self.is_set or not report:
            return
        when, *values = report
        entries: list[str | bytes | int] = []
        for name, size, ttl in zip(values[::3], values[1::3], values[2::3], strict=True):
            assert isinstance(name, bytes)
            entries += (tag.encode() + name, size, ttl)
        await self._charge(owner, entries, when=int(when))

    async def log(self, owner: str, address: Address, size: int, ttl: int) -> None:
        """Count the event log of a running background response, which has grown to ``size`` bytes.

        ``ttl`` is in milliseconds. Raises OverQuota.
        """
        if self.is_set:
            await self._charge(owner, [f"{address.tag}e{address.random}", size, ttl], maximum=self._final_maximum)

    async def _charge(self, owner: str, entries: Sequence[str | bytes | int] = (), *, when: int = 0, maximum: int = 0) -> int:
        """Update objects and return the owner's stored bytes. Raises OverQuota if they exceed ``maximum`` (0: no limit)."""
        keys = [f"rmw:{{b{owner}}}:{part}" for part in ("expires", "sizes")]
        try:
            fits, used = await self._client.script(_ACCOUNT, keys, [maximum, when, *entries])
        except StateUnavailable as error:
            LIMITS_UNCHECKED.add(1, {"limit": "storage"})
            logger.debug("the account of an owner is unavailable: %s", error.message)
            return 0
        if not fits:
            raise self._exceeded()
        return int(used)

    def _exceeded(self) -> OverQuota:
        LIMITS_REFUSED.add(1, {"limit": "storage"})
        return OverQuota(self._maximum)
