"""Answers that were given before: looked up, kept, and made once where many ask at the same time.

1. Whatever goes wrong here is a miss: an error of Redis or of the embeddings, a record that cannot be read.
2. A hit is the same question (exact), or one of the same partition whose text is near enough and which the guard lets pass
   (semantic). The exact look-up comes first. The embedding is begun while the request is prepared and given up when the look-up
   finds the answer; where this process saw the same question answered before, it waits for that.
3. Who asks first makes the answer; who asks the same meanwhile waits for it, for a bounded time, on any replica. The flight is
   a lock in Redis that is renewed while the answer is made, and freed however that ends.
4. An answer is kept under the generation in which it was looked up: what was begun before a purge is not kept after it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from ..config import Settings
from ..errors import Unavailable
from ..ids import random_part
from ..protocol.request import CreateResponse
from ..protocol.types import Chunk, Document, Item
from ..sealing import Sealer
from ..telemetry import CACHE_LOOKUPS, told_cache
from . import guard, record
from .embedder import Ahead, Computing, Embedder, Headers, Scope
from .embeddings import Embeddings
from .key import Key, key_of
from .policy import Policy
from .replay import replay, unmarked
from .store import Entries, Found, Kept, Page, Redis, Stats

if TYPE_CHECKING:
    from .search import Index, Scan
    from .vectors import Vector

logger = logging.getLogger(__name__)

LEASE = 5.0
"""Seconds after which a flight is over whose maker was lost."""
STREAM_WAIT = 1.0
"""Longest wait of a stream for another's answer: its reader wants to see life."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
_NONE = Kept("", "none", b"")
_FAULTS = (Unavailable, TimeoutError, ValueError, LookupError, TypeError)
"""Redis is away, or slow; or in our keys stands what none of us wrote."""


@dataclass(frozen=True, slots=True)
class Hit:
    """An answer that was given before, as ``chunks`` for an assembler. ``kind`` is ``exact`` or ``semantic``; ``age`` is in
    seconds."""

    kind: str
    similarity: float
    age: int
    chunks: list[Chunk]

    @property
    def header(self) -> str:
        """The value of ``x-responses-cache``."""
        return f"{self.kind}; similarity={self.similarity:.4f}; age={self.age}"


@dataclass(slots=True)
class Miss:
    """There is no answer. What is needed to keep the one that is made now, and to tell those who wait for it."""

    key: Key
    policy: Policy
    generation: str | None = None
    """None where the cache did not answer: nothing is kept."""
    token: str | None = None
    """Of the flight, where others wait for us."""
    vector: Computing | None = None
    """That of the text, from the look-up to the end of the flight."""
    signature: guard.Signature | None = None
    """That of the text, where it was compared."""

    header = "miss"


class Cache:
    """The cache of all owners. ``redis`` is the state's client; ``embeddings`` are needed for the semantic mode only."""

    def __init__(self, redis: Redis, embeddings: Embeddings | None, sealer: Sealer, settings: Settings) -> None:
        self.counts: Counter[str] = Counter()
        """How often this process saw ``exact``, ``semantic``, ``miss``, ``refused`` (by the guard), ``failed`` and ``kept``."""
        self._redis = redis
        self._store = Entries(redis, settings)
        self._embeddings = embeddings
        self.embedder = Embedder(embeddings, self.counts, settings)
        self._sealer = sealer
        self._settings = settings
        self._search: Index | Scan | None = None
        self._releases: set[asyncio.Task[None]] = set()
        told = f"{settings.cache_namespace}\0{settings.upstream}\0{settings.think_tag}"
        self._deployment = hashlib.sha256(told.encode()).hexdigest()

    async def start(self) -> None:
        """Finds out who searches. Where Redis is away, the first request will."""
        if self._embeddings is None:
            return
        try:
            await self._searcher()
        except (Unavailable, TimeoutError):
            logger.debug("the cache does not answer yet")

    def key(
        self, request: CreateResponse, items: Sequence[Item], *, owner: str, model: str, headers: Mapping[str, str]
    ) -> Key | None:
        """As ``key_of``, for this deployment."""
        return key_of(request, items, owner=owner, model=model, headers=headers, deployment=self._deployment)

    # -- looking up -----------------------------------------------------------------------------------------------

    async def lookup(
        self,
        key: Key,
        policy: Policy,
        *,
        streamed: bool = False,
        ahead: Ahead | None = None,
        headers: Headers = None,
        scope: Scope = None,
    ) -> Hit | Miss:
        """The answer to ``key``, or what is needed to keep it. Waits for another who makes the same, a stream not for long.

        ``ahead`` is the embedding, if it was begun; ``headers`` and ``scope`` are the caller's, for it. The flight of a miss
        ends in ``flight``.
        """
        miss = Miss(key, policy, token=random_part() if policy.read and policy.write else None)
        wait = min(self._settings.cache_wait, STREAM_WAIT) if streamed else self._settings.cache_wait
        try:
            miss.vector = ahead.take(key.text) if ahead is not None else None
            if miss.vector is None:
                miss.vector = self.embedder.begin(key.text, key.owner, policy, headers, scope)
            hit = await self._lookup(miss, wait, headers, scope)
        except _FAULTS as error:
            logger.debug("the cache failed: %s", type(error).__name__)
            self.counts["failed"] += 1
            hit = None  # where only the comparison took too long, the answer can still be kept
        except BaseException:
            await self._end(miss)  # cancelled: those who wait need not wait on
            raise
        if hit is not None:
            self._end_soon(miss)
        result = hit.kind if hit else "miss"
        self.counts[result] += 1
        CACHE_LOOKUPS.add(1, {"result": result})
        told_cache(result)
        return miss if hit is None else hit

    async def _lookup(self, miss: Miss, wait: float, headers: Headers, scope: Scope) -> Hit | None:
        compares = self.embedder.compares(miss.key.text, miss.policy)
        if miss.vector is not None:
            self._sign_soon(miss)
        found = await self._exact(miss, wait, compares=compares)
        self.embedder.expect(miss.key, answered=found.verdict == "hit")
        miss.generation = found.generation
        if found.verdict != "lead":
            miss.token = None
        if found.verdict == "hit" and miss.policy.read:
            hit = self._hit("exact", 1.0, miss.key, miss.key.exact, (found.record, found.left))
            if hit is not None:
                return hit
        if not compares:
            return None
        if miss.vector is None:
            miss.vector = self.embedder.compute(miss.key.text, headers, scope)
            self._sign_soon(miss)
        return await self._near(miss, found.page) if miss.policy.read else None

    async def _exact(self, miss: Miss, wait: float, *, compares: bool) -> Found:
        """What lies under the whole key, once nobody makes it any more, or the wait is over."""
        until = asyncio.get_running_loop().time() + wait
        pause = _FIRST_PAUSE
        while True:
            known = self._search.known(miss.key) if compares and self._search is not None else None
            async with asyncio.timeout(self._settings.cache_timeout):
                if miss.policy.write:
                    await self._store.note(miss.key.owner)
                found = await self._store.lookup(miss.key, miss.token, LEASE, known)
            left = until - asyncio.get_running_loop().time()
            if found.verdict != "wait" or left <= 0:
                return found
            await asyncio.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    async def _near(self, miss: Miss, page: Page | None) -> Hit | None:
        """The nearest entry that the guard lets pass."""
        assert miss.vector is not None
        if not miss.vector.done():
            await asyncio.wait({miss.vector})  # a look-up that is cancelled does not wait for the embedding to end
        vector = miss.vector.result()
        if vector is None:
            return None
        async with asyncio.timeout(self._settings.cache_timeout):
            search = await self._searcher()
            found = await search.nearest(miss.key, vector, miss.policy.threshold, page=page)
        signature = self._signature(miss)
        for near in found:
            hit = self._hit("semantic", near.similarity, miss.key, near.entry, (near.record, near.left), signature)
            if hit is not None:
                return hit
        return None

    def _sign_soon(self, miss: Miss) -> None:
        """Has the text's signature made while Redis and the embedding are waited for."""
        asyncio.get_running_loop().call_soon(lambda: self._signature(miss))

    def _signature(self, miss: Miss) -> guard.Signature:
        """That of the text, made once."""
        if miss.signature is None:
            miss.signature = guard.signature(miss.key.text, salt=miss.key.partition)
        return miss.signature

    def _hit(
        self,
        kind: str,
        similarity: float,
        key: Key,
        entry: str,
        kept: tuple[bytes, float],
        asked: guard.Signature | None = None,
    ) -> Hit | None:
        """The hit that a kept record is; for one of another text, if its signature goes with what was ``asked``."""
        data, left = kept
        try:
            read = record.unpack(data, key.owner, entry, self._sealer, signed=asked is not None)
            chunks = replay(read)
        except (record.Unreadable, LookupError, TypeError):
            logger.debug("a record of the cache cannot be read")
            self.counts["failed"] += 1
            return None
        if asked is not None and (read.signature is None or self._refused(read.signature, asked)):
            return None
        return Hit(kind, min(similarity, 1.0), max(0, round(read.ttl - left)), chunks)

    def _refused(self, kept: guard.Signature, asked: guard.Signature) -> bool:
        reason = guard.difference(kept, asked, strict=self._settings.cache_guard == "strict")
        if reason is not None:
            self.counts["refused"] += 1
            logger.debug("a semantic hit is refused: %s", reason)
        return reason is not None

    async def _searcher(self) -> Index | Scan:
        """Who searches, by what the server offers."""
        if self._search is None:
            from .search import choose

            assert self._embeddings is not None
            self._search = await choose(self._store, self._redis, self._embeddings.space, self._settings)
        return self._search

    # -- keeping --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def flight(self, miss: Miss) -> AsyncIterator[None]:
        """While the answer to ``miss`` is made: those who ask the same wait for it. It ends with ``keep``, or here."""
        renewing = asyncio.create_task(self._renew(miss.key, miss.token)) if miss.token is not None else None
        try:
            yield
        finally:
            if renewing is not None:
                renewing.cancel()
            await self._end(miss)

    async def keep(self, miss: Miss, document: Document, *, summary: bool | None = None) -> bool:
        """Keeps a finished ``document``, if it is one to be kept; ``summary`` as in ``record.texts_of``. To be called before it
        is stored: whoever deletes it then finds the entry."""
        texts = record.texts_of(document, summary=summary)
        if not miss.policy.write or miss.generation is None:
            return False
        if texts is None:
            await self._end(miss, mark=LEASE)
            return False
        try:
            kept = await self._keep(miss, document, texts)
        except _FAULTS as error:
            logger.debug("an answer was not kept: %s", type(error).__name__)
            self.counts["failed"] += 1
            return False
        self.counts["kept"] += kept
        return kept

    async def _keep(self, miss: Miss, document: Document, texts: tuple[record.Text, ...]) -> bool:
        key, policy = miss.key, miss.policy
        signature = self._signature(miss) if miss.vector is not None else None
        entry = record.Entry(texts, unmarked(document["usage"]), policy.ttl, signature)
        data = record.pack(entry, key, self._sealer)
        if len(data) > self._settings.cache_entry_bytes:
            await self._end(miss, mark=LEASE)
            return False
        assert miss.generation is not None
        vector = await miss.vector if miss.vector is not None else None
        async with asyncio.timeout(self._settings.cache_timeout):
            verdict = await self._store.keep(
                key,
                data,
                generation=miss.generation,
                token=miss.token or "",
                ttl=policy.ttl,
                response=document["id"],
                vector=await self._keepable(vector),
            )
        if verdict == "kept":
            miss.token = None
            self.embedder.expect(key, answered=True)
        return verdict == "kept"

    async def _keepable(self, vector: Vector | None) -> Kept:
        """``vector`` as it is to be kept, if the text has one."""
        if vector is None:
            return _NONE
        try:
            return await (await self._searcher()).keepable(vector)
        except Unavailable:  # there is no index: the answer is still found by its text
            return _NONE

    async def _renew(self, key: Key, token: str) -> None:
        while True:
            await asyncio.sleep(LEASE / 3)
            try:
                if not await self._store.renew(key, token, LEASE):
                    return
            except Unavailable:
                logger.debug("a flight was not renewed")

    async def _end(self, miss: Miss, *, mark: float = 0.0) -> None:
        """Ends the flight without an answer, and what is done for it, also where the request was cancelled."""
        token, vector = miss.token, miss.vector
        miss.token = miss.vector = None
        if vector is not None:
            vector.cancel()
        with anyio.move_on_after(self._settings.cache_timeout, shield=True):
            if token is not None:  # at once: others wait for it
                await self._release(miss.key, token, mark)
            if vector is not None:
                await asyncio.wait({vector})

    def _end_soon(self, miss: Miss) -> None:
        """As ``_end``, beside what follows: who has its answer need not wait for it."""
        if miss.token is not None or not (miss.vector is None or miss.vector.done()):
            task = asyncio.create_task(self._end(miss))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def aclose(self) -> None:
        """Waits for what is being ended."""
        if self._releases:
            await asyncio.wait(self._releases)

    async def _release(self, key: Key, token: str, mark: float) -> None:
        try:
            await self._store.release(key, token, mark=mark)
        except Unavailable:
            logger.debug("a flight ends by itself")

    # -- forgetting -----------------------------------------------------------------------------------------------

    async def forget(self, owner: str, response_id: str) -> bool:
        """Removes the entry that was made of that response. Raises ``Unavailable``."""
        return await self._store.forget(owner, response_id)

    async def purge(self, owner: str | None = None) -> int:
        """Removes all entries, of ``owner`` or of everybody; answers that are being made now are not kept either. Answers how
        many there were. Raises ``Unavailable``."""
        return await self._store.purge(owner)

    async def stats(self, owner: str | None = None) -> Stats:
        """How much is kept, for ``owner`` or for everybody. Raises ``Unavailable``."""
        return await self._store.stats(owner)
