"""Judge near matches: at most one request to the judge for a lookup, and one for each pair of questions, on all replicas.

1. A pair must be claimed in Redis before it is judged. The verdict is stored there, refusals as well, and lives as long as the
   entry. An approved phrasing becomes an alias of the entry.
2. A judgement continues after its request has ended, because the next request can use its verdict. A claim expires if its
   process dies or its judge fails.
3. A share of the hits, `cache.audit`, is compared with a new answer. An entry whose answer differs is removed.
4. The judge is not asked while it is paused: after a failure, or while the upstream is overloaded. `cache.judge_max_per_minute`
   limits the requests of this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..settings.groups import CacheSettings
from ..tasks import background_task
from ..telemetry.context import WarningLimit
from ..telemetry.metrics import CACHE_ALIASES, CACHE_AUDIT, CACHE_JUDGE_TOKENS, CACHE_JUDGED
from .entry import Entry, Key
from .judge import Judge, NoVerdict, Opinion
from .policy import Candidate, Hit
from .store import FAILURES, Claim, Entries

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLAIM_MARGIN = 30.0
"""Seconds added to the timeout of the judge until the pair of a failed judgement can be claimed again."""
FAILURE_PAUSE = 1.0
OVERLOAD_PAUSE = 5.0
"""Seconds during which the judge is not asked after a failure, and after the upstream was overloaded."""
MAX_CONCURRENT = 32
_MINUTE = 60.0


RequestAnswer: TypeAlias = Callable[[], Awaitable[str | None]]
"""Requests a new answer to a question. The result is None if there is no complete answer."""


class Question(NamedTuple):
    """A question without an exact answer: its key, the cache's generation at its lookup, the model, and the caller."""

    key: Key
    generation: str
    model: str
    caller: Any


class Judging:
    """Judges the candidates of lookups in tasks of its own, which `aclose` ends."""

    def __init__(self, judge: Judge, entries: Entries, settings: CacheSettings) -> None:
        self.judge = judge
        self._entries = entries
        self._settings = settings
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unasked: set[asyncio.Task[Any] | None] = set()
        """Tasks that have not asked the judge yet. Each of them asks at most once."""
        self._paused_until = 0.0
        self._minute, self._asked = 0.0, 0
        self._audits_due = 0.0
        self._warnings = WarningLimit()

    async def aclose(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def pause(self, seconds: float = OVERLOAD_PAUSE) -> None:
        """Do not ask the judge for the next seconds."""
        self._paused_until = max(self._paused_until, time.monotonic() + seconds)

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def begin(self, question: Question, candidates: Sequence[Candidate]) -> asyncio.Task[Hit | None] | None:
        """Start a task that judges the nearest candidate that has no verdict yet. Its result is a hit if the judge approves.

        Return None if there are no candidates, or if the judge cannot be asked now.
        """
        if not candidates or not self._may_ask():
            return None
        return self._begin(self._decide(question, candidates))

    def audit(self, question: Question, entry: Entry, request_answer: RequestAnswer) -> None:
        """If it is this hit's turn, compare it with a new answer in a task. Remove `entry` if the answers differ."""
        self._audits_due += self._settings.audit
        if self._audits_due < 1 or not self._may_ask():
            return
        self._audits_due %= 1
        self._begin(self._audit(question, entry, request_answer))

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # The context of the request would collect the facts of the judge's request as its own.
        task = Context().run(background_task, work)
        for tasks in (self._tasks, self._unasked):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task

    def _may_ask(self) -> bool:
        now = time.monotonic()
        if now - self._minute >= _MINUTE:
            self._minute, self._asked = now, 0
        is_left = self._asked + len(self._unasked) < self._settings.judge_max_per_minute
        return is_left and not self.is_paused and len(self._tasks) < MAX_CONCURRENT

    async def _decide(self, question: Question, candidates: Sequence[Candidate]) -> Hit | None:
        try:
            for candidate in candidates:
                claim = await self._claim(question, candidate)
                if claim is Claim.APPROVED:
                    return await self._settle(question, candidate, is_approved=True)
                if claim is Claim.CLAIMED:
                    return await self._judge(question, candidate)
        except FAILURES as error:
            logger.debug("cannot read or store a verdict: %s", type(error).__name__)
        return None

    async def _claim(self, question: Question, candidate: Candidate) -> Claim:
        lease = self._settings.judge_timeout + CLAIM_MARGIN
        async with asyncio.timeout(self._settings.timeout):
            return await self._entries.claim(question.key, candidate.entry.key, self.judge.id, lease)

    async def _judge(self, question: Question, candidate: Candidate) -> Hit | None:
        opinion = await self._ask(question, candidate.entry)
        if opinion is None:
            return None
        is_approved = opinion.probability >= self.judge.minimum
        CACHE_JUDGED.add(1, {"verdict": "approved" if is_approved else "refused"})
        hit = await self._settle(question, candidate, is_approved=is_approved)
        if hit is not None:
            CACHE_ALIASES.add(1)
        return hit

    async def _ask(self, question: Question, entry: Entry) -> Opinion | None:
        texts = entry.text or "", entry.answer, question.key.text
        return await self._opinion(self.judge.same_question(*texts, model=question.model, caller=question.caller))

    async def _opinion(self, ask: Coroutine[Any, Any, Opinion]) -> Opinion | None:
        """Return the opinion that the judge is asked for. If the judge fails, pause it, and return None."""
        self._asked += 1
        self._unasked.discard(asyncio.current_task())
        try:
            async with asyncio.timeout(self._settings.judge_timeout):
                opinion = await ask
        except (NoVerdict, TimeoutError) as error:
            self._fail(error)
            return None
        CACHE_JUDGE_TOKENS.add(opinion.tokens)
        return opinion

    def _fail(self, error: NoVerdict | TimeoutError) -> None:
        CACHE_JUDGED.add(1, {"verdict": "failed"})
        self.pause(OVERLOAD_PAUSE if getattr(error.__cause__, "is_overload", False) else FAILURE_PAUSE)
        reason = str(error) or f"the judge did not answer within {self._settings.judge_timeout:g} seconds"
        logger.log(logging.WARNING if self._warnings.is_due() else logging.DEBUG, "no verdict for the cache: %s", reason)

    async def _settle(self, question: Question, candidate: Candidate, *, is_approved: bool) -> Hit | None:
        async with asyncio.timeout(self._settings.timeout):
            is_settled = await self._entries.settle(
                question.key,
                candidate.entry.key,
                self.judge.id,
                is_approved=is_approved,
                generation=question.generation,
                similarity=candidate.similarity,
            )
        return candidate.hit() if is_approved and is_settled else None

    # -- audits ---------------------------------------------------------------------------------------------------

    async def _audit(self, question: Question, entry: Entry, request_answer: RequestAnswer) -> None:
        fresh = await request_answer()
        is_same = None if fresh is None else await self._compare(question, entry.answer, fresh)
        CACHE_AUDIT.add(1, {"verdict": "failed" if is_same is None else "same" if is_same else "different"})
        if is_same is False:
            logger.info("a cached answer was removed, because a new answer to the question differs")
            with suppress(*FAILURES):  # the entry expires
                async with asyncio.timeout(self._settings.timeout):
                    await self._entries.reject(question.key, entry.key)

    async def _compare(self, question: Question, cached: str, fresh: str) -> bool | None:
        """Return whether both answers say the same thing, or None if the judge gives no verdict."""
        ask = self.judge.same_answer(question.key.text, cached, fresh, model=question.model, caller=question.caller)
        opinion = await self._opinion(ask)
        return None if opinion is None else opinion.probability >= self.judge.minimum
