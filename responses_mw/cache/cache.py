"""The response cache: look up answers, store them, and make an answer only once if identical requests arrive together.

1. Every failure is treated as a miss: Redis or the embeddings server is down or slow, or a record cannot be read.
2. The exact lookup comes first. Without an exact hit, the text is embedded in mode `semantic`. The answer to another request
   in the same partition is a semantic hit if the texts of both requests are similar enough and the guard accepts them.
3. The first of several identical requests without an exact hit takes a lock in Redis, the *flight*. The others, on any replica,
   wait for its answer, up to a timeout. The flight is renewed while the answer is made. It is released after a semantic hit,
   when the answer is cached or turns out not to be cacheable, or when the request ends, even after an error. Requests with
   `refresh` or `no_store` neither wait nor hold a flight.
4. A purge starts a new generation. An answer is stored only if the generation has not changed since the lookup.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ..auth import Gate
from ..crypto import Sealer
from ..errors import Unavailable
from ..ids import random_part
from ..protocol.request.create import CreateResponse
from ..protocol.types import Document, Item
from ..settings.groups import CacheSettings
from ..telemetry.context import annotate
from ..telemetry.metrics import CACHE_LOOKUPS, CACHE_MISSES
from ..threads import in_background
from . import guard
from .embeddings import MAX_TEXT_LENGTH, Embeddings
from .entry import Entry, Key, Uncacheable, items_of, key_of, pack, unpack
from .policy import Hit, Miss, Policy
from .store import Entries, EntryPage, LookupResult, RedisCommands

if TYPE_CHECKING:
    from .vectors import Match, Scan

logger = logging.getLogger(__name__)

MAX_WAIT = 5.0  # maximum seconds that a request waits for an identical one in progress. Most answers are complete by then
MAX_ENTRY_BYTES = 1024 * 1024
"""Maximum size of a cached answer in bytes, a few times the size of the longest text that a model writes."""
LEASE = 5.0  # seconds after which a flight expires unless it is renewed
STREAM_WAIT = 1.0
"""Maximum seconds that a streaming request waits for an identical one, because its client expects a first event."""
_NEAR = 0.15  # maximum difference between the threshold and a lower similarity that a miss reports
_FIRST_PAUSE, _MAX_PAUSE = 0.005, 0.1
_FAILURES = (Unavailable, TimeoutError, ValueError, LookupError, TypeError)
"""Exceptions raised if Redis is down or slow, or if a key holds a value that this server did not write."""


class Cache:
    """The cache of all owners. If `embeddings` is None, there are no semantic hits.

    `deployment` identifies everything besides the request that affects an answer. `memory_bytes` limits the memory for vectors
    in this process.
    """

    def __init__(
        self,
        redis: RedisCommands,
        embeddings: Embeddings | None,
        sealer: Sealer,
        settings: CacheSettings,
        *,
        deployment: str,
        memory_bytes: int,
    ) -> None:
        self.entries = Entries(redis, settings)
        self._embeddings = embeddings
        self._scan: Scan | None = None
        if embeddings is not None:
            from .vectors import Scan  # needs numpy, an optional dependency

            self._scan = Scan(self.entries, embeddings.space, memory_bytes)
        self._sealer = sealer
        self._settings = settings
        self._ending: set[asyncio.Task[None]] = set()  # tasks that release flights
        self._deployment = hashlib.sha256(f"{settings.namespace}\0{deployment}".encode()).hexdigest()

    def key(
        self, request: CreateResponse, items: Sequence[Item], *, owner: str, model: str, headers: Mapping[str, str]
    ) -> Key | Uncacheable:
        """Return the key of a request (see `key_of`). If the request is not cacheable, count a miss, and return the reason."""
        key = key_of(request, items, owner=owner, model=model, headers=headers, deployment=self._deployment)
        if isinstance(key, Uncacheable):
            _report_miss(key)
        return key

    async def aclose(self) -> None:
        """Wait for the flights that are being released in the background."""
        if self._ending:
            await asyncio.wait(self._ending)

    # -- lookup ---------------------------------------------------------------------------------------------------

    async def lookup(self, key: Key, policy: Policy, gate: Gate, *, streamed: bool = False, caller: Any = None) -> Hit | Miss:
        """Await `gate`, then look up the answer for `key`. Raises only the errors of `gate`.

        If an identical request is in progress, wait for its answer for up to `MAX_WAIT` seconds, or `STREAM_WAIT` seconds if
        `streamed`. Do not wait if `policy.read` or `policy.write` is false. A semantic lookup may request an embedding with the
        credential of `caller`. After a miss, generate the answer within the context manager `flight`, because identical
        requests may be waiting for it.
        """
        await gate()
        miss = Miss(key, policy, token=random_part() if policy.read and policy.write else None)
        wait = min(MAX_WAIT, STREAM_WAIT) if streamed else MAX_WAIT
        try:
            hit = await self._lookup(miss, wait, caller)
        except _FAILURES as error:
            logger.debug("cache lookup failed: %s", type(error).__name__)
            hit = None  # the answer is still stored if only the search timed out
            miss.because("failed")
        except BaseException:
            self._end(miss)  # release the waiting requests
            raise
        CACHE_LOOKUPS.add(1, {"result": hit.kind if hit else "miss"})
        if hit is None:
            _report_miss(miss)
            return miss
        self._end(miss)
        annotate(cache=hit.kind)
        return hit

    async def _lookup(self, miss: Miss, wait: float, caller: Any) -> Hit | None:
        key, policy = miss.key, miss.policy
        is_semantic = policy.mode == "semantic"
        scan = self._scan if is_semantic and len(key.text) <= MAX_TEXT_LENGTH else None
        if not policy.read:
            miss.because("refresh")
        found = await self._exact(miss, wait, scan)
        miss.generation = found.generation
        if found.verdict != "lead":
            miss.token = None
        if found.verdict == "hit" and policy.read and (entry := self._unpack(miss, key.exact, found.record)):
            return _hit("exact", 1.0, entry, found.left)
        if scan is None:
            if is_semantic:
                miss.because("too_long")
            return None
        assert self._embeddings is not None
        miss.vector = await self._embeddings.embed_or_warn(key.text, caller)
        return await self._nearest(miss, scan, found.page) if policy.read else None

    async def _exact(self, miss: Miss, wait: float, scan: Scan | None) -> LookupResult:
        """Repeat the exact lookup while another request is making the answer, for up to `wait` seconds."""
        until = asyncio.get_running_loop().time() + wait
        pause = _FIRST_PAUSE
        while True:
            known = scan.known(miss.key) if scan is not None else None
            async with asyncio.timeout(self._settings.timeout):
                if miss.policy.write:
                    await self.entries.register(miss.key.owner)
                found = await self.entries.lookup(miss.key, miss.token, LEASE, known)
            left = until - asyncio.get_running_loop().time()
            if found.verdict != "wait" or left <= 0:
                return found
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 1.5, _MAX_PAUSE)

    async def _nearest(self, miss: Miss, scan: Scan, page: EntryPage | None) -> Hit | None:
        """Return a hit for the nearest entry that the guard accepts, if any."""
        vector, threshold = miss.vector, miss.policy.threshold
        if vector is None:
            miss.because("embedding_failed")
            return None
        async with asyncio.timeout(self._settings.timeout):
            matches = await scan.nearest(miss.key, vector, threshold, page=page)
        if not matches and (nearest := scan.similarity(miss.key, vector, threshold - _NEAR)) is not None:
            miss.because("below_threshold", nearest)
        hits = (self._semantic_hit(miss, match) for match in matches)
        return next((hit for hit in hits if hit is not None), None)

    def _semantic_hit(self, miss: Miss, match: Match) -> Hit | None:
        entry = self._unpack(miss, match.entry, match.record)
        if entry is None or entry.signature is None:
            miss.because("unreadable")
            return None
        rule = guard.difference(entry.signature, _signature(miss), strict=self._settings.guard == "strict")
        if rule is not None:
            miss.because(f"guard:{rule}", match.similarity)
            return None
        return _hit("semantic", match.similarity, entry, match.left)

    def _unpack(self, miss: Miss, exact: str, data: bytes) -> Entry | None:
        try:
            return unpack(data, miss.key.owner, exact, self._sealer)
        except ValueError:
            logger.debug("a cached record cannot be read")
            miss.because("unreadable")
            return None

    # -- storing --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def flight(self, miss: Miss) -> AsyncIterator[None]:
        """Renew the flight of `miss`, if it has one, until the context exits. Then release it, unless `keep` has done so."""
        renewing = [self._renew(miss.key, miss.token)] if miss.token is not None else []
        try:
            async with in_background(*renewing):
                yield
        finally:
            self._end(miss)

    async def keep(self, miss: Miss, document: Document) -> bool:
        """Cache the answer in the finished response `document`, and return whether it was cached. Failures are not raised.

        `items_of` describes which answers are cacheable. Call this before the response is stored. Otherwise, the response could
        be deleted before the entry exists, and the entry would remain.
        """
        if not miss.policy.write or miss.generation is None:
            return False
        try:
            return await self._keep(miss, document, miss.generation)
        except _FAILURES as error:
            logger.debug("an answer was not cached: %s", type(error).__name__)
            return False

    async def _keep(self, miss: Miss, document: Document, generation: str) -> bool:
        key, ttl, items, vector = miss.key, miss.policy.ttl, items_of(document), miss.vector
        signature = _signature(miss) if items is not None and vector is not None else None
        entry = Entry(key.owner, key.exact, items, document["usage"], ttl, signature) if items is not None else None
        if entry is None or len(data := pack(entry, self._sealer)) > MAX_ENTRY_BYTES:
            self._end(miss, mark=LEASE)
            return False
        async with asyncio.timeout(self._settings.timeout):
            verdict = await self.entries.keep(
                key,
                data,
                generation=generation,
                token=miss.token or "",
                ttl=ttl,
                response=document["id"],
                vector=self._scan.stored(vector) if vector is not None and self._scan is not None else ("", b""),
            )
        if verdict == "kept":
            miss.token = None
        return verdict == "kept"

    async def _renew(self, key: Key, token: str) -> None:
        while True:
            await asyncio.sleep(LEASE / 3)
            try:
                if not await self.entries.renew(key, token, LEASE):
                    return
            except Unavailable:
                logger.debug("the lock of an answer in progress was not renewed")

    def _end(self, miss: Miss, *, mark: float = 0.0) -> None:
        """Release the flight in the background (see `Entries.release`)."""
        token, miss.token = miss.token, None
        if token is not None:
            task = asyncio.create_task(self._release(miss.key, token, mark))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _release(self, key: Key, token: str, mark: float) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout):
                await self.entries.release(key, token, mark=mark)
        except (Unavailable, TimeoutError):
            logger.debug("the lock of an answer in progress was not released; it expires")


def _signature(miss: Miss) -> guard.Signature:
    if miss.signature is None:
        miss.signature = guard.signature(miss.key.text, salt=miss.key.partition)
    return miss.signature


def _report_miss(miss: Miss | Uncacheable) -> None:
    CACHE_MISSES.add(1, {"reason": miss.reason})
    annotate(cache="miss", cache_reason=miss.reason)


def _hit(kind: str, similarity: float, entry: Entry, left: float) -> Hit:
    usage = None if entry.usage is None else {**entry.usage, "cache": kind}
    return Hit(kind, min(similarity, 1.0), max(0, round(entry.ttl - left)), entry.items, usage)
