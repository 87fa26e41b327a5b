"""Entries in Redis: the names of the keys, and the commands.

An owner has up to sixteen shards, ``rmw:{c:<owner>:<0 to 15>}:...``, each in one slot of a Redis Cluster; a partition lies in
one of them. There are as many as full partitions fit in the owner's bounds, each with an equal part of these: so no shard is
smaller than a partition may be, and where the bounds are small, one shard has all of them. What a step reads and writes is one
script (``lib.lua`` tells what lies where). Another owner's entries are in other keys, and what is read is checked against the
owner and the key that it was kept under.

    rmw:{c}:owners    zset: owners by the time (s) until which they may have entries, for what concerns them all
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from ..config import Settings
from . import scripts
from .key import Key
from .scripts import Script

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_SHARDS = 16
OWNERS = "rmw:{c}:owners"
_OWNER = re.compile(r"[a-z0-9]{1,64}")
_REMEMBER_MS = 7 * 24 * 3600 * 1000
_PURGED_AT_ONCE = 500
_NOTED_FOR = 60.0
_MOST_NOTED = 10_000
_READ_ALONG = 200
"""So many vectors of a partition come with a look-up at most."""
_MARGIN = 60
"""How many seconds longer than any entry the lists of entries are kept."""


class Redis(Protocol):
    """What is needed of the state's client. Each call is one round trip, and raises ``Unavailable``."""

    @property
    def is_cluster(self) -> bool: ...

    async def script(self, script: Any, keys: Sequence[str], args: Sequence[str | bytes | int] = ()) -> Any: ...

    async def scripts(self, script: Any, calls: Sequence[tuple[Sequence[str], Sequence[str | bytes | int]]]) -> list[Any]: ...

    async def pipeline(self, commands: Sequence[Sequence[str | bytes | int]]) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class Page:
    """What was kept in a partition after the entry of number ``after``: of each of ``entries`` id, number, and expiry and
    vector in ``space`` (empty for one without). ``last`` is the last number that was given away, ``first`` the first that is
    still there; ``removals`` is another one whenever an entry was removed with its response, and ``full`` tells that there
    may be more."""

    space: str
    after: int
    generation: str
    last: int
    first: int
    removals: str
    entries: list[tuple[str, int, bytes]]
    full: bool

    @classmethod
    def of(cls, space: str, after: int, most: int, generation: bytes, told: list[bytes]) -> Page:
        """As ``since`` of ``lib.lua`` tells it, asked for at ``most`` so many."""
        last, first, removals, *rest = told
        entries = [(one.decode(), int(at), kept) for one, at, kept in zip(rest[::3], rest[1::3], rest[2::3], strict=True)]
        is_full = len(entries) >= most
        return cls(space, after, generation.decode(), int(last), int(first), removals.decode(), entries, is_full)


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up found. ``verdict``:

    hit     the ``record``, which is there for ``left`` more seconds
    lead    none; we make the answer, and others wait for it
    wait    none; another makes the answer
    alone   none; nobody waits for whoever makes it
    """

    verdict: str
    generation: str
    record: bytes = b""
    left: float = 0.0
    page: Page | None = None
    """Of the partition, where one was asked for and there is no hit."""


@dataclass(frozen=True, slots=True)
class Stats:
    """How much is kept. ``bytes`` are those of records and vectors; some may have expired since the last write."""

    owners: int
    entries: int
    bytes: int
    partitions: int


class Kept(NamedTuple):
    """A vector as it is kept: its ``space``, who finds it (``form``: ``scan``, ``index``, or ``none`` where there is none), its
    bytes, and for an index those of its head."""

    space: str
    form: str
    data: bytes
    head: bytes = b""


class Entries:
    """All entries of all owners."""

    def __init__(self, redis: Redis, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._redis = redis
        self._settings = settings
        self._clock = clock
        self._noted: dict[str, float] = {}
        self._longest = (settings.cache_ttl + _MARGIN) * 1000
        self._shards = _shards(settings)

    # -- one entry ------------------------------------------------------------------------------------------------

    async def lookup(self, key: Key, token: str | None, lease: float, known: tuple[str, int] | None = None) -> Found:
        """The record under ``key``. Where there is none, ``token`` has it made for ``lease`` seconds, unless another does; and
        what was kept in the partition since is read: ``known`` is a space and the last number in it."""
        of_partition: tuple[str | int, ...] = (key.partition, *known, _READ_ALONG) if known is not None else ()
        args = [key.exact, token or "", int(lease * 1000), *of_partition]
        verdict, generation, *rest = await self._redis.script(scripts.LOOKUP, [self._key(key)], args)
        if verdict == b"hit":
            return Found("hit", generation.decode(), rest[0], rest[1] / 1000)
        page = Page.of(*known, _READ_ALONG, generation, rest[0]) if known is not None else None
        return Found(verdict.decode(), generation.decode(), page=page)

    async def read(self, key: Key, ids: Sequence[str]) -> list[tuple[bytes, float] | None]:
        """The records of entries of the partition, and how many seconds each is there; None for one that is gone."""
        reply = await self._redis.script(scripts.READ, [self._key(key)], ids)
        return [(found[0], found[1] / 1000) if found else None for found in reply]

    async def keep(self, key: Key, record: bytes, *, generation: str, token: str, ttl: int, response: str, vector: Kept) -> str:
        """Keeps a record for ``ttl`` seconds. Ends the flight of ``token``. Answers ``kept``, ``purged`` or ``bound``."""
        settings = self._settings
        facts = {
            "generation": generation,
            "token": token,
            "id": key.exact,
            "partition": key.partition,
            "response": response,
            "space": vector.space,
            "form": vector.form,
            "ttl": ttl * 1000,
            "longest": self._longest,
            "partition_entries": settings.cache_partition_entries,
            "partition_bytes": settings.cache_partition_bytes,
            "shard_entries": settings.cache_owner_entries // self._shards,
            "shard_bytes": settings.cache_owner_bytes // self._shards,
        }
        await self.note(key.owner)
        args = [orjson.dumps(facts), record, vector.data, vector.head]
        reply: bytes = await self._redis.script(scripts.KEEP, [self._key(key)], args)
        return reply.decode()

    async def renew(self, key: Key, token: str, lease: float) -> bool:
        """Goes on making the answer under ``key``; False where nobody waits for us any more."""
        return bool(await self._fly(key, token, "renew", lease))

    async def release(self, key: Key, token: str, *, mark: float = 0.0) -> None:
        """Ends the making of an answer without one. ``mark`` tells for so many seconds that it is none to be kept, so that
        those who wait do not wait again for one another."""
        await self._fly(key, token, "mark" if mark else "release", mark)

    async def _fly(self, key: Key, token: str, what: str, seconds: float) -> Any:
        return await self._redis.script(scripts.FLIGHT, [self._key(key)], [key.exact, token, what, int(seconds * 1000)])

    # -- vectors --------------------------------------------------------------------------------------------------

    async def since(self, key: Key, space: str, after: int, most: int) -> Page:
        """What was kept in the partition after the entry of number ``after``."""
        generation, told = await self._redis.script(scripts.SINCE, [self._key(key)], [key.partition, space, after, most])
        return Page.of(space, after, most, generation, told)

    async def search(
        self, key: Key, index: str, space: str, field: str, vector: bytes, most: int, threshold: float
    ) -> list[tuple[str, bytes, bytes, float]] | None:
        """The at most so many entries of the partition that the server's ``index`` finds nearest to a vector, with that
        similarity: of each id, vector, record (empty where it is to be read by itself), and for how many seconds it is there.
        By the ``field`` of whole vectors (``vector``), or by ``head``: then they are all, or, where that is too many, None."""
        args: list[str | bytes | int] = [index, space, key.partition, field, vector, most, str(threshold)]
        entries = await self._redis.script(scripts.SEARCH, [self._key(key)], args)
        if entries is None:
            return None
        return [(id_.decode(), kept, record, left / 1000) for id_, kept, record, left in entries]

    async def commands(self, *commands: Sequence[str | bytes | int]) -> list[Any]:
        """Plain commands, in one round trip."""
        return await self._redis.pipeline(commands)

    # -- an owner, and all ----------------------------------------------------------------------------------------

    async def forget(self, owner: str, response: str) -> bool:
        """Removes what was kept of ``owner``'s response with that id, wherever it lies."""
        return any(await self._each_shard(scripts.FORGET, owner, response, _REMEMBER_MS))

    async def note(self, owner: str) -> None:
        """Notes that ``owner`` may have entries, before an answer is begun or kept: who empties the cache of all owners looks
        for them. Once in a while."""
        now = self._clock()
        if self._noted.get(owner, 0.0) > now:
            return
        until = int(now) + self._settings.cache_ttl + int(_NOTED_FOR) + _MARGIN
        await self.commands(("ZADD", OWNERS, "GT", until, owner))
        if len(self._noted) >= _MOST_NOTED:
            self._noted.clear()
        self._noted[owner] = now + _NOTED_FOR

    async def purge(self, owner: str | None = None) -> int:
        """Removes all entries of ``owner``, or (None) of everybody. Answers how many there were."""
        removed = 0
        for one in await self._owners() if owner is None else [owner]:
            removed += await self._purge(one)
        return removed

    async def _purge(self, owner: str) -> int:
        replies = await self._each_shard(scripts.PURGE, owner, 1, _REMEMBER_MS, _PURGED_AT_ONCE)
        removed = sum(int(gone) for gone, _ in replies)
        while any(left for _, left in replies):
            replies = await self._each_shard(scripts.PURGE, owner, 0, _REMEMBER_MS, _PURGED_AT_ONCE)
            removed += sum(int(gone) for gone, _ in replies)
        return removed

    async def stats(self, owner: str | None = None) -> Stats:
        """How much is kept for ``owner``, or (None) for everybody."""
        owners = await self._owners() if owner is None else [owner]
        totals = [0, 0, 0]
        having = 0
        for one in owners:
            shards = await self._each_shard(scripts.STATS, one)
            sums = [sum(int(shard[place]) for shard in shards) for place in range(3)]
            having += sums[0] > 0
            totals = [total + added for total, added in zip(totals, sums, strict=True)]
        return Stats(having, *totals)

    async def _each_shard(self, script: Script, owner: str, *args: str | int) -> list[Any]:
        if not _OWNER.fullmatch(owner):
            raise ValueError("an owner is told by lower-case letters and digits")
        return await self._redis.scripts(script, [([f"rmw:{{c:{owner}:{shard}}}:g"], args) for shard in range(MOST_SHARDS)])

    async def _owners(self) -> list[str]:
        now = int(self._clock())
        _, owners = await self.commands(("ZREMRANGEBYSCORE", OWNERS, "-inf", now), ("ZRANGE", OWNERS, 0, -1))
        return [owner.decode() for owner in owners]

    def _key(self, key: Key) -> str:
        assert _OWNER.fullmatch(key.owner), "an owner is a hash"
        return f"rmw:{self.slot(key)}:g"

    def slot(self, key: Key) -> str:
        """The hash tag, with its braces, of the shard in which the partition of ``key`` lies."""
        return f"{{c:{key.owner}:{int(key.partition[:4], 16) % self._shards}}}"


def _shards(settings: Settings) -> int:
    """How many shards an owner has. Other settings put other partitions in a shard: what was kept before is not found then."""
    of_entries = settings.cache_owner_entries // settings.cache_partition_entries
    of_bytes = settings.cache_owner_bytes // settings.cache_partition_bytes
    return max(1, min(of_entries, of_bytes, MOST_SHARDS))
