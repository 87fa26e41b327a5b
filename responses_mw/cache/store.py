"""Cache entries in Redis: key names and Lua scripts. `lua/lib.lua` documents the keys.

Each owner has up to 16 shards with the prefixes `rmw:{c:<owner>:<0 to 15>}:`. All keys of a shard are in one cluster slot. A
partition is in one shard. Each shard gets an equal part of `cache.max_owner_bytes`. If possible, this part is at least
`MAX_PARTITION_BYTES`, so a low limit means fewer shards.

    rmw:{c}:owners    zset: owners by the time (s) until which they may have entries
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import orjson

from ..errors import Unavailable
from ..lua import Script, load
from ..settings.groups import CacheSettings
from .entry import Key

MAX_PARTITION_ENTRIES = 10_000
"""Maximum number of entries in a partition, and in a shard. A semantic lookup searches all entries of a partition."""
MAX_PARTITION_BYTES = 64 * 1024 * 1024
MAX_SHARDS = 16
_OWNERS = "rmw:{c}:owners"
_OWNER = re.compile(r"[a-z0-9]{1,64}")
_MIN_GENERATION_TTL_MS = 7 * 24 * 3600 * 1000
_PURGE_BATCH = 500
_REGISTER_INTERVAL = 60.0
_MAX_REGISTERED = 10_000
_LOOKUP_PAGE = 200  # maximum number of new vectors that a lookup returns
_MARGIN = 60  # seconds that the lists of entries outlive the entries


_LOOKUP, _READ, _SINCE, _KEEP, _FLIGHT, _VERDICT, _FORGET, _PURGE, _STATS = load(
    "cache", "lookup", "read", "since", "keep", "flight", "verdict", "forget", "purge", "stats", prefix="cache_"
)


FAILURES = (Unavailable, TimeoutError, ValueError, LookupError, TypeError)
"""Exceptions raised if Redis is down or slow, or if a key holds a value that this server did not write."""


class RedisCommands(Protocol):
    """The methods of `responses_mw.state.client.Client` that the cache uses. They raise `Unavailable` if Redis fails."""

    async def script(self, script: Any, keys: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any: ...

    async def scripts(self, script: Any, calls: Sequence[tuple[Sequence[str], Sequence[str | bytes | int]]]) -> list[Any]: ...

    async def pipeline(self, commands: Sequence[Sequence[str | bytes | int]]) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class EntryPage:
    """Entries that were added to a partition after entry number `after`.

    Each of `entries` is an id, a number and the bytes `<expiry (ms)>:<vector>`, which are empty if the entry has no vector in
    `space`. `last` is the number of the shard's newest entry. If the page is `full`, there may be more entries.
    """

    space: str
    after: int
    generation: str
    last: int
    entries: list[tuple[str, int, bytes]]
    full: bool

    @classmethod
    def parse(cls, space: str, after: int, limit: int, generation: bytes, reply: list[bytes]) -> EntryPage:
        """Parse the `reply` of `since` in `lua/lib.lua`."""
        last, *rest = reply
        entries = [(id_.decode(), int(at), kept) for id_, at, kept in zip(rest[::3], rest[1::3], rest[2::3], strict=True)]
        is_full = len(entries) >= limit
        return cls(space, after, generation.decode(), int(last), entries, is_full)


class LookupVerdict(Enum):
    """What an exact lookup has found."""

    HIT = b"hit"
    """There is an entry with this `record`, which expires in `left` seconds."""
    LEAD = b"lead"
    """This request makes the answer, and identical requests wait for it."""
    WAIT = b"wait"
    """Another request is making the answer."""
    ALONE = b"alone"
    """This request makes the answer, and no other request waits."""


class Kept(Enum):
    """The result of `Entries.keep`."""

    KEPT = b"kept"
    PURGED = b"purged"
    """The cache was purged since the lookup. Nothing was stored or released."""
    BOUND = b"bound"
    """The entry alone exceeds a limit. Nothing was stored or released."""


class Claim(Enum):
    """The result of `Entries.claim`."""

    APPROVED = b"y"
    REFUSED = b"n"
    BUSY = b"busy"
    """Another request has claimed the pair."""
    FULL = b"full"
    """The entry has the maximum number of verdicts."""
    GONE = b"gone"
    """The entry no longer exists."""
    CLAIMED = b"claimed"


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The result of an exact lookup. An alias led to another entry, `target`, whose question has this `similarity`."""

    verdict: LookupVerdict
    generation: str
    record: bytes = b""
    left: float = 0.0
    target: str = ""
    similarity: float = 1.0
    page: EntryPage | None = None  # the new entries of the partition, if requested


@dataclass(frozen=True, slots=True)
class Stats:
    """The size of the cache. `bytes` (of records and vectors) and `partitions` include expired entries. The others do not."""

    owners: int
    entries: int
    bytes: int
    partitions: int


class Entries:
    """The cache entries of all owners. If Redis fails, the methods raise `Unavailable`.

    `forget`, `purge` and `stats` raise `ValueError` if an owner is not 1 to 64 lower-case letters and digits.
    A *flight* is the lock of the request that makes an answer. Identical requests wait until it is released.
    """

    def __init__(self, redis: RedisCommands, settings: CacheSettings) -> None:
        self._redis = redis
        self._settings = settings
        self._registered: dict[str, float] = {}
        self._shards = max(1, min(settings.max_owner_bytes // MAX_PARTITION_BYTES, MAX_SHARDS))
        """Number of shards of an owner. If a new `cache.max_owner_bytes` changes it, many entries are no longer found."""

    # -- one entry ------------------------------------------------------------------------------------------------

    async def lookup(
        self, key: Key, token: str | None, lease: float, known: tuple[str, int] | None = None, *, judge: str = ""
    ) -> LookupResult:
        """Look up the entry with exactly this key, or with an alias of `judge`. If there is none, try to take its flight.

        The flight is taken for `lease` seconds, unless `token` is None, another request holds it, or `release` has marked it.
        `known` is a vector space and the number of the last entry that the caller has read. If `known` is not None and the
        verdict is LEAD or ALONE, the `page` of the result contains up to `_LOOKUP_PAGE` newer entries of the partition.
        """
        page_args: tuple[str | int, ...] = (key.partition, *known, _LOOKUP_PAGE) if known is not None else ()
        args = [key.exact, token or "", int(lease * 1000), judge, *page_args]
        found, generation, *rest = await self._redis.script(_LOOKUP, [self._key(key)], args)
        verdict = LookupVerdict(found)
        if verdict is LookupVerdict.HIT:
            record, left, *alias = rest
            target, similarity = (alias[0].decode(), float(alias[1])) if alias else ("", 1.0)
            if not 0 <= similarity <= 1:
                raise ValueError("the similarity of an alias is not from 0 to 1")
            return LookupResult(verdict, generation.decode(), record, left / 1000, target, similarity)
        page = EntryPage.parse(*known, _LOOKUP_PAGE, generation, rest[0]) if known is not None and rest[0] is not None else None
        return LookupResult(verdict, generation.decode(), page=page)

    async def read(self, key: Key, ids: Sequence[str]) -> list[tuple[bytes, float] | None]:
        """Return the record and the remaining seconds of each entry in `ids`, or None for an entry that no longer exists."""
        reply = await self._redis.script(_READ, [self._key(key)], ids)
        return [(found[0], found[1] / 1000) if found else None for found in reply]

    async def since(self, key: Key, space: str, after: int, limit: int) -> EntryPage:
        """Return up to `limit` entries with a number above `after` in the partition of `key`, with their vectors in `space`."""
        generation, reply = await self._redis.script(_SINCE, [self._key(key)], [key.partition, space, after, limit])
        return EntryPage.parse(space, after, limit, generation, reply)

    async def keep(
        self,
        key: Key,
        record: bytes,
        *,
        generation: str,
        token: str,
        ttl: int,
        response: str,
        vector: tuple[str, bytes] = ("", b""),
    ) -> Kept:
        """Store a record for `ttl` seconds, release the flight of `token`, and return KEPT. Older entries may be evicted.

        If `generation` is outdated because of a purge, return PURGED. If the entry alone exceeds a limit, return BOUND.
        `response` is the id of the response that has the answer. `vector` is the
        text's vector space and encoded vector. Both are empty if the text was not embedded.
        """
        space, encoded = vector
        facts = {
            "generation": generation,
            "token": token,
            "id": key.exact,
            "partition": key.partition,
            "response": response,
            "space": space,
            "ttl": ttl * 1000,
            "index_ttl": (self._settings.ttl + _MARGIN) * 1000,
            "partition_entries": MAX_PARTITION_ENTRIES,
            "partition_bytes": MAX_PARTITION_BYTES,
            "shard_entries": MAX_PARTITION_ENTRIES,
            "shard_bytes": self._settings.max_owner_bytes // self._shards,
        }
        await self.register(key.owner)
        reply: bytes = await self._redis.script(_KEEP, [self._key(key)], [orjson.dumps(facts), record, encoded])
        return Kept(reply)

    # -- verdicts -------------------------------------------------------------------------------------------------

    async def claim(self, key: Key, target: str, judge: str, lease: float) -> Claim:
        """Claim to judge whether the entry `target` answers the question of `key`. The claim expires after `lease` seconds."""
        return Claim(await self._decide("claim", key, target, judge, int(lease * 1000)))

    async def settle(self, key: Key, target: str, judge: str, *, is_approved: bool, generation: str, similarity: float) -> bool:
        """Record a verdict as long as the entry `target` exists. An approved phrasing becomes an alias of the entry.

        Return False if the entry no longer exists, or if the cache was purged since the lookup.
        """
        verdict = "y" if is_approved else "n"
        return bool(await self._decide("settle", key, target, judge, verdict, generation, f"{similarity:.4f}") == b"settled")

    async def reject(self, key: Key, target: str) -> bool:
        """Remove the entry `target` in the partition of `key`, and its aliases. Return whether there was an entry."""
        return bool(await self._decide("reject", key, target, ""))

    async def _decide(self, action: str, key: Key, target: str, judge: str, *args: str | int) -> Any:
        return await self._redis.script(_VERDICT, [self._key(key)], [action, target, key.exact, judge, *args])

    # -- flights --------------------------------------------------------------------------------------------------

    async def renew(self, key: Key, token: str, lease: float) -> bool:
        """Extend the flight to `lease` seconds from now. Return whether `token` still holds the flight."""
        return bool(await self._fly(key, token, "renew", lease))

    async def release(self, key: Key, token: str, *, mark: float = 0.0) -> None:
        """Release the flight of `token` without an answer. For `mark` seconds, no request waits for an answer to this key."""
        await self._fly(key, token, "mark" if mark else "release", mark)

    async def _fly(self, key: Key, token: str, action: str, seconds: float) -> Any:
        return await self._redis.script(_FLIGHT, [self._key(key)], [key.exact, token, action, int(seconds * 1000)])

    # -- an owner, and all ----------------------------------------------------------------------------------------

    async def register(self, owner: str) -> None:
        """Record that `owner` may have entries, so that `purge` and `stats` find the owner. Remove owners without entries.

        Call this before an answer is computed or stored. Redis is usually called only once a minute for each owner.
        """
        now = time.time()
        if self._registered.get(owner, 0.0) > now:
            return
        until = int(now) + self._settings.ttl + int(_REGISTER_INTERVAL) + _MARGIN
        await self._redis.pipeline([("ZADD", _OWNERS, "GT", until, owner), ("ZREMRANGEBYSCORE", _OWNERS, "-inf", int(now))])
        if len(self._registered) >= _MAX_REGISTERED:
            self._registered.clear()
        self._registered[owner] = now + _REGISTER_INTERVAL

    async def forget(self, owner: str, response: str) -> bool:
        """Remove the entry made from a response of `owner`. Return whether there was an entry."""
        return any(await self._each_shard(_FORGET, owner, response))

    async def purge(self, owner: str | None = None) -> int:
        """Remove the entries of `owner`, or of all owners if `owner` is None. Return the number of removed entries."""
        removed = 0
        for one in await self._owners() if owner is None else [owner]:
            is_first, left = 1, True
            while left:
                replies = await self._each_shard(_PURGE, one, is_first, _MIN_GENERATION_TTL_MS, _PURGE_BATCH)
                removed += sum(int(gone) for gone, _ in replies)
                is_first, left = 0, any(left for _, left in replies)
        return removed

    async def stats(self, owner: str | None = None) -> Stats:
        """Return the cache size of `owner`, or of all owners if `owner` is None."""
        totals = [0, 0, 0, 0]
        for one in await self._owners() if owner is None else [owner]:
            sums = [sum(map(int, counts)) for counts in zip(*await self._each_shard(_STATS, one), strict=True)]
            totals = [total + added for total, added in zip(totals, (sums[0] > 0, *sums), strict=True)]
        return Stats(*totals)

    async def _each_shard(self, script: Script, owner: str, *args: str | int) -> list[Any]:
        if not _OWNER.fullmatch(owner):
            raise ValueError("an owner must consist of lower-case letters and digits")
        return await self._redis.scripts(script, [([f"rmw:{{c:{owner}:{shard}}}:g"], args) for shard in range(MAX_SHARDS)])

    async def _owners(self) -> list[str]:
        [owners] = await self._redis.pipeline([("ZRANGEBYSCORE", _OWNERS, int(time.time()), "+inf")])
        return [owner.decode() for owner in owners]

    def _key(self, key: Key) -> str:
        assert _OWNER.fullmatch(key.owner), "an owner is a hash"
        return f"rmw:{{c:{key.owner}:{int(key.partition[:4], 16) % self._shards}}}:g"
