"""Write stored objects: charge them to the owner's quota, retry failed writes, and undo abandoned writes.

In a cluster, an object and its owner's account are in different slots, so no script can change both. Therefore, the object's
size is reserved before the object is written. The script that writes the object then reports the exact size. If the report is
lost, the reservation stays until it expires. The charged size is the size of the uncompressed JSON plus an overhead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, NoReturn

from ..backoff import Backoff
from ..lua import Script, load
from ..protocol.types import Item
from ..tasks import background_task
from ..telemetry.metrics import LIMITS_REFUSED, LIMITS_UNCHECKED
from .client import Args, Client, Value
from .errors import Damaged, OverQuota, StateUnavailable
from .models import StateOptions
from .schema import Address

logger = logging.getLogger(__name__)

[_ACCOUNT] = load("state", "account")

OVERHEAD = 2560  # maximum overhead in bytes that the scripts charge for a response (lua/lib.lua)
DOCUMENT = 1024  # minimum difference in bytes between the JSON of a response and the JSON of its request
UNSETTLED = 3_600_000  # time to live of a reservation in milliseconds
UNDONE_SECONDS = 3600  # maximum seconds that an abandoned write may take to reach Redis
MAX_PENDING = 10_000
"""Maximum number of writes that wait to be undone. A further write replaces the oldest one."""
MIN_PAUSE, MAX_PAUSE = 0.1, 2.0
FORGOTTEN_AFTER = 60.0  # seconds after which a failed write no longer shortens the retries of other writes


class Quota:
    """The accounts of stored bytes. Each owner may store up to `owner_bytes`; 0 disables the quota.

    If an account is unavailable, the quota does not apply. A metric counts how often this happens.
    """

    def __init__(self, client: Client, owner_bytes: int) -> None:
        self._client = client
        self._maximum = owner_bytes
        # A finished response may exceed the quota by a tenth, so that it is rarely lost over a few bytes.
        self._final_maximum = owner_bytes + owner_bytes // 10

    @property
    def is_set(self) -> bool:
        return self._maximum > 0

    async def check(self, owner: str, size: int) -> None:
        """Check that the quota allows a request of `size` bytes and a minimal response. Raises OverQuota if it does not."""
        if self.is_set and await self._charge(owner) + size + OVERHEAD + DOCUMENT > self._maximum:
            self._refuse()

    async def reserve(self, write: Write) -> None:
        """Reserve `write.size` bytes and overhead, or nothing if it is None. Raises OverQuota if they do not fit the quota."""
        if self.is_set and write.size is not None:
            maximum = self._final_maximum if write.is_admitted else self._maximum
            entry: Args = [write.address.tag + write.name, write.size + OVERHEAD, write.ttl]
            await self._charge(write.owner, entry, maximum=maximum)

    @asynccontextmanager
    async def hold(self, owner: str, name: str, size: int) -> AsyncIterator[None]:
        """Reserve `size` bytes during the `with` block, so that other writes cannot use them. Raises OverQuota."""
        if not self.is_set:
            yield
            return
        await self._charge(owner, [name, size, UNSETTLED], maximum=self._maximum)
        try:
            yield
        finally:
            await self._charge(owner, [name, 0, 0])

    async def settle(self, owner: str, tag: str, report: Sequence[bytes | int], name: str = "") -> None:
        """Update the owner's account from a script's report (lua/lib.lua). `tag` is prepended to the names in the report.

        If the report does not contain `name`, the reservation for `name` is removed.
        """
        if not self.is_set or not (report or name):
            return
        if name and name.encode() not in report:
            report = [*(report or [0]), name.encode(), 0, 0]  # the object was not written, so remove its reservation
        when, *values = report
        entries: Args = []
        for of, size, ttl in zip(values[::3], values[1::3], values[2::3], strict=True):
            assert isinstance(of, bytes)
            entries += (tag.encode() + of, size, ttl)
        await self._charge(owner, entries, when=int(when))

    async def log(self, owner: str, address: Address, size: int, ttl: int) -> None:
        """Set the charge for a running response's event log to `size` bytes for `ttl` milliseconds.

        Raises OverQuota if the owner would exceed the quota.
        """
        if self.is_set:
            await self._charge(owner, [f"{address.tag}e{address.random}", size, ttl], maximum=self._final_maximum)

    async def _charge(self, owner: str, entries: Sequence[Value] = (), *, when: int = 0, maximum: int = 0) -> int:
        """Update the account (lua/account.lua). Return the owner's stored bytes, or 0 if the account is unavailable.

        Raises OverQuota if the update would exceed `maximum` bytes; 0 means no maximum.
        """
        keys = [f"rmw:{{b{owner}}}:{part}" for part in ("expires", "sizes")]
        try:
            fits, used = await self._client.script(_ACCOUNT, keys, [maximum, when, *entries])
        except StateUnavailable as error:
            LIMITS_UNCHECKED.add(1, {"limit": "storage"})
            logger.debug("the account of an owner is unavailable: %s", error.message)
            return 0
        if not fits:
            self._refuse()
        return int(used)

    def _refuse(self) -> NoReturn:
        LIMITS_REFUSED.add(1, {"limit": "storage"})
        raise OverQuota(self._maximum)


class Write(NamedTuple):
    """A write of one object to Redis by an idempotent script.

    The script returns a verdict for the caller, followed by a report of stored sizes for `Quota.settle`.

    address       the tag of the object's slot, and a random part that belongs to this write
    name          the object's name in the account, without the tag
    size          bytes to reserve; None bypasses the quota
    ttl           time to live of the reservation in milliseconds
    is_admitted   whether the request has passed `Quota.check`
    undo          the script that undoes the write, and its arguments; its keys are those of the write; None if there is no undo
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
    """Writes objects, and undoes abandoned writes.

    Redis may execute a command after its client has given up. So the undo script also sets a tombstone, which makes the
    write's script refuse a late write.
    """

    def __init__(self, client: Client, options: StateOptions) -> None:
        self.quota = Quota(client, options.owner_bytes)
        self._client = client
        self._patience = options.patience
        self._failing_since: float | None = None  # when writes began to fail; None after a successful write
        self._last_failure = 0.0
        self._pending: dict[Address, Write] = {}
        self._task: asyncio.Task[None] | None = None

    async def write(self, write: Write) -> bytes:
        """Reserve the object's bytes, run the script, update the account, and return the script's verdict.

        Raises OverQuota if the object would exceed the quota, or StateUnavailable if Redis fails. After a temporary failure,
        a write with `undo` is undone later.
        """
        await self.quota.reserve(write)
        try:
            verdict, *report = await self._run_persistently(write)
        except StateUnavailable as error:  # the object may have been written, so the reservation stays
            if error.passing and write.undo is not None:
                self.undo(write)
            raise
        await self.quota.settle(write.owner, write.address.tag, report, write.name)
        return bytes(verdict)

    async def _run_persistently(self, write: Write) -> Any:
        """Run the script. Retry temporary failures until writes, or all commands, have failed for `patience` seconds."""
        began, backoff = time.monotonic(), Backoff(0.02, 0.5)
        while True:
            try:
                reply = await self._client.script(write.script, write.keys, write.args)
            except StateUnavailable as error:
                if not error.passing or self._record_failure(began) >= self._patience:
                    raise
            else:
                self._failing_since = None
                return reply
            await backoff.wait()

    def _record_failure(self, began: float) -> float:
        """Record the failure of a write that began at `began`. Return for how many seconds writes have failed."""
        # A read that succeeds resets `away_for`. A write to another node resets `_failing_since`, but not `began`.
        now = time.monotonic()
        since = self._failing_since if now - self._last_failure < FORGOTTEN_AFTER else None
        self._failing_since, self._last_failure = min(began, since or began), now
        return max(self._client.away_for, now - self._failing_since)

    def undo(self, write: Write) -> None:
        """Undo a write as soon as Redis answers. `write.undo` must not be None."""
        if len(self._pending) >= MAX_PENDING:
            lost = self._pending.pop(next(iter(self._pending))).address
            logger.warning("too many writes wait to be undone: the failed write of %s%s may be stored", lost.tag, lost.random)
        self._pending[write.address] = write._replace(args=())  # which may be large
        if self._task is None or self._task.done():
            self._task = background_task(self._undo_all())

    async def aclose(self) -> None:
        """Stop undoing writes, even if some writes have not been undone yet."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _undo_all(self) -> None:
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        while self._pending:
            address = next(iter(self._pending))
            write = self._pending.pop(address)
            assert write.undo is not None
            script, args = write.undo
            try:
                _, *report = await self._client.script(script, write.keys, args)
                self._failing_since = None
                await self.quota.settle(write.owner, address.tag, report, write.name)
                backoff.reset()
            except Damaged:
                continue  # the client has logged the damage
            except StateUnavailable as error:
                logger.debug("a write cannot be undone now: %s", error.message)
                self._pending.setdefault(address, write)  # at the end, in case only this write fails
                await backoff.wait()


def own_items(items: Iterable[Item], random: str) -> list[str]:
    """Return the ids of the items that the write created. Only these ids contain `random`."""
    return [item["id"] for item in items if random in item["id"]]
