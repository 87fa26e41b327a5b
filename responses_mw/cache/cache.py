"""The response cache: look up answers, store them, and request an answer only once for identical concurrent requests.

1. Every failure is treated as a miss: Redis or the embeddings server is down or slow, or a record cannot be read.
2. The exact lookup comes first. It also finds aliases. Without a hit, the text is embedded in mode `semantic`. Entries of the
   same partition with a similar text are candidates, unless the guard finds a difference. A candidate is a hit if its text has
   the same words, or if the judge approves it. The judge is asked before the upstream (`before`) or together with it (`race`).
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
from ..backoff import Backoff
from ..crypto import Sealer
from ..embeddings import Embedder, NoEmbedding
from ..errors import Unavailable
from ..ids import random_part
from ..protocol.request.create import CreateResponse
from ..protocol.types import Document, Item
from ..settings.groups import CacheSettings
from ..tasks import in_background
from ..telemetry.context import WarningLimit, annotate
from ..telemetry.metrics import CACHE_LOOKUPS, CACHE_MISSES, CACHE_TOKENS_SAVED
from . import guard
from .entry import Entry, Key, Uncacheable, items_of, key_of, pack, unpack
from .judge import Judge
from .judging import Judging, Question, RequestAnswer
from .normal import same_words
from .policy import Candidate, Hit, Miss, Policy
from .store import FAILURES, Entries, EntryPage, Kept, LookupResult, LookupVerdict, RedisCommands

if TYPE_CHECKING:
    from ..embeddings.vector import Vector
    from .vectors import Match, Scan

logger = logging.getLogger(__name__)

MAX_WAIT = 5.0  # maximum seconds that a request waits for an identical one in progress. Most answers are complete by then
MAX_ENTRY_BYTES = 1024 * 1024
"""Maximum size of a cached answer in bytes, a few times the size of the longest text that a model writes."""
MAX_TEXT_LENGTH = 1000
"""Maximum length in characters of a text for semantic lookup. A single vector cannot distinguish longer texts."""
LEASE = 5.0  # seconds after which a flight expires unless it is renewed
STREAM_WAIT = 1.0
"""Maximum seconds that a streaming request waits for an identical one, because its client expects a first event."""
MAX_CANDIDATES = 2
_NEAR = 0.15  # maximum difference between the threshold and a lower similarity that a miss reports
_FIRST_PAUSE, _MAX_PAUSE = 0.005, 0.1


class Cache:
    """The cache of all owners. Without an embedder, there are no semantic hits. Without a judge, they need the same words.

    `deployment` identifies everything besides the request that affects an answer. `memory_bytes` limits the memory for vectors
    in this process.
    """

    def __init__(
        self,
        redis: RedisCommands,
        embedder: Embedder | None,
        sealer: Sealer,
        settings: CacheSettings,
        *,
        deployment: str,
        memory_bytes: int,
        judge: Judge | None = None,
    ) -> None:
        self.entries = Entries(redis, settings)
        self._judging = Judging(judge, self.entries, settings) if judge is not None else None
        self.embedder = embedder
        self.judge = judge
        self._warnings = WarningLimit()
        self._scan: Scan | None = None
        if embedder is not None:
            from .vectors import Scan  # needs numpy, an optional dependency

            self._scan = Scan(self.entries, embedder.space, memory_bytes)
        self._sealer = sealer
        self.settings = settings
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
        """End the judgements in progress, and wait for the flights that are being released in the background."""
        if self._judging is not None:
            await self._judging.aclose()
        if self._ending:
            await asyncio.wait(self._ending)

    # -- lookup ---------------------------------------------------------------------------------------------------

    async def lookup(
        self, key: Key, policy: Policy, gate: Gate, *, streamed: bool = False, caller: Any = None, model: str = ""
    ) -> Hit | Miss:
        """Await `gate`, then look up the answer for `key`. Raises only the errors of `gate`.

        If an identical request is in progress, wait for its answer for up to `MAX_WAIT` seconds, or `STREAM_WAIT` seconds if
        `streamed`. Do not wait if `policy.read` or `policy.write` is false. A semantic lookup may request an embedding and a
        judgement with the credential of `caller`, and a judgement by `model`. After a miss, generate the answer within the
        context manager `flight`, because identical requests may be waiting for it. If the miss has a judgement in progress,
        report its end with `report`.
        """
        await gate()
        miss = Miss(key, policy, token=random_part() if policy.read and policy.write else None)
        wait = min(MAX_WAIT, STREAM_WAIT) if streamed else MAX_WAIT
        try:
            found = await self._find(miss, wait, caller, model)
        except BaseException:
            self._end(miss)  # release the waiting requests
            raise
        if isinstance(found, Hit):
            self._end(miss)
        if isinstance(found, Hit) or found.judging is None:
            self.report(found)
        return found

    def report(self, found: Hit | Miss) -> None:
        """Record the result of a lookup in the metrics and the access line."""
        if isinstance(found, Miss):
            CACHE_LOOKUPS.add(1, {"result": "miss"})
            _report_miss(found)
            return
        CACHE_LOOKUPS.add(1, {"result": found.kind})
        if found.usage is not None:
            CACHE_TOKENS_SAVED.add(found.usage["total_tokens"])
        annotate(cache=found.kind, cache_reason="")

    def pause_judge(self) -> None:
        """Do not ask the judge for a few seconds, because the upstream is overloaded."""
        if self._judging is not None:
            self._judging.pause()

    def audit(self, hit: Hit, request_answer: RequestAnswer, caller: Any, model: str) -> None:
        """If it is this hit's turn, compare it in the background with a new answer, which `request_answer` gets."""
        if self._judging is not None and hit.source is not None:
            question = Question(hit.source.key, "", model, caller)
            self._judging.audit(question, hit.source.entry, request_answer)

    async def _find(self, miss: Miss, wait: float, caller: Any, model: str) -> Hit | Miss:
        try:
            hit = await self._lookup(miss, wait, caller)
        except FAILURES as error:
            logger.debug("cache lookup failed: %s", type(error).__name__)
            hit = None  # the answer is still stored if only the search timed out
            miss.because("failed")
        if hit is None and miss.candidates:
            hit = await self._judge(miss, caller, model)
        return hit or miss

    async def _judge(self, miss: Miss, caller: Any, model: str) -> Hit | None:
        """Begin to judge a candidate. In mode `race`, `miss.judging` is then the task.

        In mode `before`, wait for the verdict for up to `cache.judge_timeout` seconds, and return the hit if there is one.
        """
        if self._judging is None or miss.generation is None:
            miss.because("other_words", miss.candidates[0].similarity)
            return None
        question = Question(miss.key, miss.generation, model, caller)
        miss.judging = self._judging.begin(question, miss.candidates)
        miss.because("not_approved" if miss.judging else "not_judged", miss.candidates[0].similarity)
        if miss.judging is None or self.settings.judge == "race":
            return None
        await asyncio.wait({miss.judging}, timeout=self.settings.judge_timeout)
        hit, miss.judging = miss.approved, None
        return hit

    async def _lookup(self, miss: Miss, wait: float, caller: Any) -> Hit | None:
        key, policy = miss.key, miss.policy
        is_semantic = policy.mode == "semantic"
        scan = self._scan if is_semantic and len(key.text) <= MAX_TEXT_LENGTH else None
        if not policy.read:
            miss.because("refresh")
        found = await self._exact(miss, wait, scan)
        miss.generation = found.generation
        if found.verdict is not LookupVerdict.LEAD:
            miss.token = None
        if found.verdict is LookupVerdict.HIT and policy.read and (hit := self._known(miss, found)) is not None:
            return hit
        if scan is None:
            if is_semantic:
                miss.because("too_long" if self._scan is not None else "embedding_failed")
            return None
        miss.vector = await self._embed(key.text, caller)
        return await self._nearest(miss, scan, found.page) if policy.read else None

    def _known(self, miss: Miss, found: LookupResult) -> Hit | None:
        """Return the hit for an exact entry, or for an alias whose similarity reaches the threshold of this request."""
        if found.target and found.similarity < miss.policy.threshold:
            miss.because("below_threshold", found.similarity)
            return None
        entry = self._unpack(miss, found.target or miss.key.exact, found.record)
        if entry is None:
            return None
        return Candidate(miss.key, entry, found.similarity, found.left).hit("alias" if found.target else "exact")

    async def _embed(self, text: str, caller: Any) -> Vector | None:
        """Return the vector of `text`. Log a failure, and return None."""
        assert self.embedder is not None
        try:
            [vector] = await self.embedder.embed([text], caller)
        except NoEmbedding as error:
            # Without embeddings, the semantic cache has no hits, which nobody would notice without a warning.
            level = logging.WARNING if self._warnings.is_due() else logging.DEBUG
            logger.log(level, "no semantic cache: %s", error)
            return None
        return vector

    async def _exact(self, miss: Miss, wait: float, scan: Scan | None) -> LookupResult:
        """Repeat the exact lookup while another request is making the answer, for up to `wait` seconds."""
        until = asyncio.get_running_loop().time() + wait
        backoff = Backoff(_FIRST_PAUSE, _MAX_PAUSE, factor=1.5)
        judge = self._judging.judge.id if self._judging is not None and miss.policy.mode == "semantic" else ""
        while True:
            known = scan.known(miss.key) if scan is not None else None
            async with asyncio.timeout(self.settings.timeout):
                if miss.policy.write:
                    await self.entries.register(miss.key.owner)
                found = await self.entries.lookup(miss.key, miss.token, LEASE, known, judge=judge)
            left = until - asyncio.get_running_loop().time()
            if found.verdict is not LookupVerdict.WAIT or left <= 0:
                return found
            await asyncio.sleep(min(backoff.next(), left))

    async def _nearest(self, miss: Miss, scan: Scan, page: EntryPage | None) -> Hit | None:
        """Return a hit for the nearest entry with the same words, if any. Record the other entries as candidates."""
        vector, threshold = miss.vector, miss.policy.threshold
        if vector is None:
            miss.because("embedding_failed")
            return None
        async with asyncio.timeout(self.settings.timeout):
            matches = await scan.nearest(miss.key, vector, threshold, page=page)
        if not matches and (nearest := scan.similarity(miss.key, vector, threshold - _NEAR)) is not None:
            miss.because("below_threshold", nearest)
        for match in matches:
            candidate = self._candidate(miss, match)
            if candidate is not None and same_words(candidate.entry.text or "", miss.key.text):
                return candidate.hit()
            if candidate is not None and len(miss.candidates) < MAX_CANDIDATES:
                miss.candidates.append(candidate)
        return None

    def _candidate(self, miss: Miss, match: Match) -> Candidate | None:
        entry = self._unpack(miss, match.entry, match.record)
        if entry is None or entry.text is None or len(entry.text) > MAX_TEXT_LENGTH:
            miss.because("unreadable")
            return None
        rule = guard.difference(entry.text, miss.key.text)
        if rule is not None:
            miss.because(f"guard:{rule}", match.similarity)
            return None
        return Candidate(miss.key, entry, match.similarity, match.left)

    def _unpack(self, miss: Miss, exact: str, data: bytes) -> Entry | None:
        """Return the entry `exact` with this record, or None if it is unreadable or belongs to another partition."""
        try:
            entry = unpack(data, miss.key.owner, exact, self._sealer)
        except ValueError:
            entry = None
        if entry is None or (exact != miss.key.exact and not entry.is_in(miss.key.partition)):
            logger.debug("a cached record cannot be read")
            miss.because("unreadable")
            return None
        return entry

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

    async def keep(self, miss: Miss, document: Document, *, is_certain: bool = True) -> bool:
        """Cache the answer in the finished response `document`, and return whether it was cached. Failures are not raised.

        `is_certain` is whether the upstream said that the answer is complete. If not, it is not cached. `items_of` describes
        which other answers are not cacheable. Call this before the response is stored. Otherwise, the response could be deleted
        before the entry exists, and the entry would remain.
        """
        if not miss.policy.write or miss.generation is None:
            return False
        try:
            return await self._keep(miss, document, miss.generation, items_of(document) if is_certain else None)
        except FAILURES as error:
            logger.debug("an answer was not cached: %s", type(error).__name__)
            return False

    async def _keep(self, miss: Miss, document: Document, generation: str, items: list[Item] | None) -> bool:
        key, ttl, vector = miss.key, miss.policy.ttl, miss.vector
        text = key.text if vector is not None else None
        entry = Entry(key.owner, key.exact, items, document["usage"], ttl, text) if items is not None else None
        if entry is None or len(data := pack(entry, self._sealer)) > MAX_ENTRY_BYTES:
            self._end(miss, mark=LEASE)
            return False
        async with asyncio.timeout(self.settings.timeout):
            result = await self.entries.keep(
                key,
                data,
                generation=generation,
                token=miss.token or "",
                ttl=ttl,
                response=document["id"],
                vector=self._scan.stored(vector) if vector is not None and self._scan is not None else ("", b""),
            )
        if result is Kept.KEPT:
            miss.token = None
        return result is Kept.KEPT

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
            async with asyncio.timeout(self.settings.timeout):
                await self.entries.release(key, token, mark=mark)
        except (Unavailable, TimeoutError):
            logger.debug("the lock of an answer in progress was not released; it expires")


def _report_miss(miss: Miss | Uncacheable) -> None:
    CACHE_MISSES.add(1, {"reason": miss.reason})
    annotate(cache="miss", cache_reason=miss.reason)
