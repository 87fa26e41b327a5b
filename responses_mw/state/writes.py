"""Write stored objects: charge them to the owner's quota, retry failed writes, and undo writes that were given up.

All replicas share an account of each owner's stored objects:

    rmw:{b<owner>}:expires      zset: stored objects, by expiry (ms)
    rmw:{b<owner>}:sizes        hash: the size of each object in bytes, and their sum

1. Objects and account are in different slots of a cluster, so no script can change both. Each script that writes an object
   reports the object's size, which is then entered in the account. A repeated report changes nothing.
2. The size of an object is reserved before it is written. If the report is lost, the reservation stays until it expires.
3. The quota is checked when a request arrives. The response may exceed the quota by a tenth, so that finished responses are
   rarely lost over a few bytes. Concurrent requests share that tenth.
4. The size of an object is that of its JSON before compression, like all limits of the state, plus an overhead.
5. If the account is unavailable, every write is admitted and counted in a metric.
6. When a write is given up, the client gets a response with `store: false` or an error with status 503. But a Redis that
   stalled after reading the command may have executed the write, or may still do so. As soon as Redis answers, a script
   removes what the write has stored, and sets a tombstone so that Redis refuses the write from then on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..lua import Script, load
from ..telemetry.metrics import LIMITS_REFUSED, LIMITS_UNCHECKED
from .client import Args, Client, Value
from .errors import Damaged, OverQuota, StateUnavailable
from .schema import Address
from .values import Item, StateOptions

logger = logging.getLogger(__name__)

[_ACCOUNT] = load("state", "account")

OVERHEAD = 2560
"""Upper bound of the overhead in bytes that the scripts charge for a response (lua/lib.lua)."""
DOCUMENT = 1024
"""Minimum difference in bytes between the JSON of a response and the JSON of its request."""
UNSETTLED = 3_600_000
"""Time to live of a reservation that no report replaces, in milliseconds."""
UNDONE_SECONDS = 3600
"""Seconds for which a write that was given up may still reach Redis."""
MAX_PENDING = 10_000
"""Maximum number of writes that wait to be undone while Redis is unavailable. A further write replaces the oldest one."""
MIN_PAUSE, MAX_PAUSE = 0.1, 2.0


class Quota:
    """The accounts of all owners' stored bytes, and the quota that limits each."""

    def __init__(self, client: Client, owner_bytes: int) -> None:
        """`owner_bytes` is the maximum number of bytes that an owner may store; 0 disables the quota and the account."""
        self._client = client
        self._maximum = owner_bytes
        self._final_maximum = owner_bytes + owner_bytes // 10

    @property
    def is_set(self) -> bool:
        return self._maximum > 0

    async def check(self, owner: str, size: int) -> None:
        """Raise OverQuota if the owner may not store the response to a request of `size` bytes."""
        if self.is_set and await self._charge(owner) + size + OVERHEAD + DOCUMENT > self._maximum:
            raise self._exceeded()

    async def reserve(self, write: Write) -> None:
        """Reserve space in the owner's quota for an object that is about to be written.

        Do nothing if `write.size` is None or no quota is set. Raises OverQuota if the quota would be exceeded.
        """
        if self.is_set and write.size is not None:
            maximum = self._final_maximum if write.is_admitted else self._maximum
            entry: Args = [write.address.tag + write.name, write.size + OVERHEAD, write.ttl]
            await self._charge(write.owner, entry, maximum=maximum)

    async def settle(self, owner: str, tag: str, report: Sequence[bytes | int], name: str = "") -> None:
        """Update the owner's account from a script's report.

        The report is made by `report` in `lua/lib.lua`. It has the time (us), then the name, bytes and time to live (ms) of
        each object. `tag` is prepended to these names. If `name` is not among them, that object was not written, and its
        reservation is removed.
        """
        if not self.is_set:
            return
        if name and name.encode() not in report:
            report = [*(report or [0]), name.encode(), 0, 0]
        if not report:
            return
        when, *values = report
        entries: Args = []
        for of, size, ttl in zip(values[::3], values[1::3], values[2::3], strict=True):
            assert isinstance(of, bytes)
            entries += (tag.encode() + of, size, ttl)
        await self._charge(owner, entries, when=int(when))

    async def log(self, owner: str, address: Address, size: int, ttl: int) -> None:
        """Charge the event log of a running background response to its owner. Raises OverQuota.

        `size` is the current size of the log in bytes. `ttl` is its time to live in milliseconds.
        """
        if self.is_set:
            await self._charge(owner, [f"{address.tag}e{address.random}", size, ttl], maximum=self._final_maximum)

    async def _charge(self, owner: str, entries: Sequence[Value] = (), *, when: int = 0, maximum: int = 0) -> int:
        """Update objects in the owner's account, and return the owner's stored bytes, or 0 if the account is unavailable.

        `entries` has the name, bytes and time to live (ms) of each object. `when` is the time of the report (us), or 0 for a
        reservation. Raises OverQuota if the update would exceed `maximum`; 0 means no limit.
        """
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


class Write(NamedTuple):
    """A write of an object by an idempotent script, which returns a verdict and a report (`lua/lib.lua`).

    address       the tag of the object's slot, and a random part that belongs to this write
    name          the object's name in the account, without the tag
    size          bytes to reserve; None bypasses the quota
    ttl           time to live of the reservation in milliseconds
    is_admitted   whether the request has passed `Quota.check`
    undo          the script that undoes the write, and its arguments; its keys are the same
    """

    script: Script
    address: Address
    keys: Sequence[str]
    args: Sequence[Value]
    owner: str
    name: str
    size: int | None
    ttl: int = UNSETTLED
    is_admitted: bool = False
    undo: tuple[Script, Args] | None = None


class Writer:
    """Writes objects, and undoes writes that were given up."""

    def __init__(self, client: Client, options: StateOptions) -> None:
        self.quota = Quota(client, options.owner_bytes)
        self._client = client
        self._patience = options.patience
        self._pending: dict[Address, Write] = {}
        self._task: asyncio.Task[None] | None = None

    async def write(self, write: Write) -> bytes:
        """Reserve the object's bytes, run the script, update the account, and return the script's verdict.

        Raises OverQuota and StateUnavailable. After a temporary failure, a write with `undo` is undone later.
        """
        await self.quota.reserve(write)
        verdict: bytes
        try:
            verdict, *report = await self._run_persistently(write)
        except StateUnavailable as error:  # the object may have been written, so the reservation stays
            if error.passing and write.undo is not None:
                self.undo(write)
            raise
        await self.quota.settle(write.owner, write.address.tag, report, write.name)
        return verdict

    async def _run_persistently(self, write: Write) -> Any:
        """Run the script, and retry it until the script or Redis has failed for `patience` seconds. Raises StateUnavailable.

        Without retries, a short stall of Redis would make clients repeat their requests, with other ids. An error that is not
        temporary is raised at once.
        """
        began, pause = time.monotonic(), 0.02
        while True:
            try:
                return await self._client.script(write.script, write.keys, write.args)
            except StateUnavailable as error:
                # `away_for` is 0 while other commands succeed, on another node or because they only read.
                if not error.passing or max(self._client.away_for, time.monotonic() - began) >= self._patience:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    def undo(self, write: Write) -> None:
        """Start a task that undoes a write as soon as Redis answers."""
        if len(self._pending) >= MAX_PENDING:
            lost = next(iter(self._pending))
            del self._pending[lost]
            logger.warning("the write of %s%s cannot be undone: it was given up, but may be stored", lost.tag, lost.random)
        self._pending[write.address] = write
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """Stop undoing writes. The remaining ones are not undone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause = MIN_PAUSE
        while self._pending:
            address = next(iter(self._pending))
            write = self._pending.pop(address)
            try:
                await self._undo(write)
                pause = MIN_PAUSE
            except Damaged:
                continue  # the client has logged it
            except StateUnavailable as error:
                logger.debug("a write cannot be undone now: %s", error.message)
                self._pending.setdefault(address, write)  # at the end, in case only this write fails
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)

    async def _undo(self, write: Write) -> None:
        assert write.undo is not None
        script, args = write.undo
        _, *report = await self._client.script(script, write.keys, args)
        await self.quota.settle(write.owner, write.address.tag, report, write.name)


def own_items(items: Iterable[Item], random: str) -> list[str]:
    """Return the ids of the items that a write created. These ids contain the write's `random` part."""
    return [item["id"] for item in items if random in item["id"]]
