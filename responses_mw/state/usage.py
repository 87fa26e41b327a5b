"""Count each owner's usage across all replicas: request rate, open streams, background responses and daily totals.

Each process counts daily usage in memory, and adds its counts to Redis every `INTERVAL` seconds and when the process stops. A
killed process loses the counts that it has not added. Each day, at most `MAX_OWNERS` owners and at most `MAX_MODELS` models of
each owner are counted separately, and all further ones are counted together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from datetime import UTC, date, datetime
from typing import Literal, TypeAlias

from ..ids import random_part
from ..lua import load
from ..tasks import in_background
from ..telemetry.context import WarningLimit
from ..telemetry.metrics import MAX_MODELS, MAX_OWNERS, MAX_ROWS, OTHERS, USAGE, ModelUsage, OwnerUsage
from .client import Call, Client, Value
from .errors import Damaged, StateUnavailable

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["streams", "background"]

DAYS = 35  # lifetime of daily usage
INTERVAL = 10.0
BATCH = 500  # number of models of owners in one script call, which blocks Redis for a few milliseconds

_RATE, _ENTER, _RENEW, _ADD = load("state", "limit_rate", "limit_enter", "limit_renew", "usage_add")


@dataclass(frozen=True, slots=True)
class Rate:
    """The result of a rate limit check.

    passes        whether the request is allowed
    remaining     number of further requests that are allowed now
    reset         seconds until the full limit is available again
    retry_after   seconds until a request is allowed; 0 if this request passes
    """

    passes: bool
    remaining: int
    reset: float
    retry_after: float


class Usage:
    """The current usage of all owners. Every method except `renew` raises StateUnavailable if Redis fails.

    Entries (open streams and background responses) expire unless they are renewed, so a lost replica leaves nothing behind.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    async def request(self, owner: str, per_minute: int) -> Rate:
        """Check a request of `owner` against the limit of `per_minute`, and count the request if it is allowed."""
        passes, remaining, reset, wait = await self._client.script(_RATE, [_key(owner, "rate")], [per_minute])
        return Rate(passes == 1, remaining, reset / 1000, wait / 1000)

    async def enter(self, kind: Kind, owner: str, name: str, *, maximum: int, seconds: float) -> bool:
        """Add the entry `name` for `seconds`, or extend it. Return False if a new entry would exceed `maximum`."""
        return bool(await self._client.script(_ENTER, [_key(owner, kind)], [name, maximum, int(seconds * 1000)]))

    async def renew(self, kind: Kind, names: Mapping[str, Sequence[str]], seconds: float) -> None:
        """Extend the named entries of each owner to `seconds` from now. Skip entries whose server is unavailable."""
        ms = int(seconds * 1000)
        calls: list[Call] = [([_key(owner, kind)], [ms, *some]) for owner, some in names.items()]
        await self._client.scripts(_RENEW, calls, contained=True)

    async def leave(self, kind: Kind, owner: str, name: str) -> None:
        await self._client.command("ZREM", _key(owner, kind), name)


class Ledger:
    """The daily usage of all owners."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._batch: dict[str, OwnerUsage] = {}  # the last batch from `USAGE`, until Redis confirms that the batch was added
        self._token = ""

    @asynccontextmanager
    async def recording(self) -> AsyncIterator[None]:
        """Call `flush` every `INTERVAL` seconds until the context exits, and once more on exit. Failures are logged."""
        try:
            async with in_background(self._record()):
                yield
        finally:
            try:
                await self.flush()
            except StateUnavailable as error:
                logger.warning("the usage of %d owners is lost: %s", len(self._batch), error.message)

    async def _record(self) -> None:
        warnings = WarningLimit()
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self.flush()
            except StateUnavailable as error:  # the next flush repeats the batch
                level = logging.WARNING if warnings.is_due() else logging.DEBUG
                logger.log(level, "cannot record usage, will retry: %s", error.message)

    async def flush(self) -> None:
        """Add all usage that has not been stored yet to the daily totals in Redis.

        Raises StateUnavailable if Redis does not confirm a batch. The next call retries that batch.
        """
        if self._batch:
            await self._add()
        while batch := USAGE.take(BATCH):
            self._batch, self._token = batch, random_part()
            await self._add()

    async def _add(self) -> None:
        totals, by_model = _day_keys(datetime.now(UTC).date())
        limits: list[Value] = [MAX_OWNERS, OTHERS, DAYS * 24 * 3600, MAX_MODELS, 2 * MAX_ROWS]
        rows: list[Value] = []
        for owner, used in self._batch.items():
            for model, counts in used.models.items():
                rows += (owner, model, *astuple(counts))
        await self._client.script(_ADD, [totals, f"rmw:{{usage}}:batch:{self._token}", by_model], [*limits, *rows])
        self._batch = {}

    async def read(self, day: date) -> dict[str, OwnerUsage]:
        """Return each owner's usage on `day` (UTC). Raises StateUnavailable if Redis fails, or Damaged for invalid data."""
        stored, rows = await self._client.pipeline([("HGETALL", key) for key in _day_keys(day)])
        try:
            owners = {owner.decode(): _owner_usage(sums) for owner, sums in stored.items()}
            for name, sums in rows.items():
                owner, _, model = name.decode().partition(" ")
                if model and owner in owners:
                    _add_model(owners[owner], model, sums)
        except (ValueError, TypeError):
            raise Damaged("usage") from None
        return owners


def _owner_usage(sums: bytes) -> OwnerUsage:
    responses, given, cached, output = map(int, sums.split())
    return OwnerUsage(responses, given, cached, output)


def _add_model(used: OwnerUsage, model: str, sums: bytes) -> None:
    counts = ModelUsage(*map(int, sums.split()[:5]))  # a newer version may have added further numbers
    used.models[model] = counts
    used.requests_without_usage += counts.requests_without_usage


def _day_keys(day: date) -> tuple[str, str]:
    """Return the keys of the counters by owner, and by owner and model."""
    key = f"rmw:{{usage}}:{day.isoformat()}"
    return key, f"{key}:models"


def _key(owner: str, what: str) -> str:
    return f"rmw:{{l{owner}}}:{what}"
