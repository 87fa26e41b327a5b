"""Look up the answers of runs in the cache, and store new ones."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from ..cache import Cache, Hit, Miss, Policy, Uncacheable
from ..protocol.request.create import CreateResponse
from ..protocol.response.document import output_text
from ..protocol.types import Document, Event
from ..tasks import by_size
from ..telemetry.context import annotate
from ..telemetry.metrics import CACHE_RACES
from ..upstream import Caller
from .run import Run


class RunCache:
    """The cache of runs. If there is no cache, lookups find nothing, and no answer is stored."""

    def __init__(self, cache: Cache | None, create: Callable[[CreateResponse, Caller], Awaitable[Document | None]]) -> None:
        """`create` creates a response without storing it. It returns None if that fails."""
        self._cache = cache
        self._create = create

    async def look_up(self, run: Run, policy: Policy | None, *, streamed: bool) -> None:
        """Set `run.looked_up`. Do nothing without a cache or a policy, or if the policy is off."""
        cache = self._cache
        if cache is None or policy is None or policy.is_off:
            return
        caller, context = run.caller, run.context
        names = {"owner": caller.owner, "model": f"{run.route.upstream.name}\0{run.model}"}
        key = await by_size(context.size, cache.key, run.request, context.items, **names, headers=caller.headers)
        if isinstance(key, Uncacheable):
            run.looked_up = key
        else:
            # A hit never reaches the upstream, so the cache checks the caller.
            gate = partial(run.route.upstream.verify, caller)
            run.looked_up = await cache.lookup(key, policy, gate, streamed=streamed, caller=caller, model=run.model)
        annotate(cache_status=run.looked_up.header)

    def replay(self, run: Run, hit: Hit) -> list[Event]:
        """Complete the response of `run` with the items of `hit`, and return the events before the terminal event."""
        return run.assembler.start() + self.complete(run, hit)

    def complete(self, run: Run, hit: Hit) -> list[Event]:
        """Like `replay`, for a response whose first events have been sent."""
        events: list[Event] = []
        for item in hit.items:
            events += run.assembler.add_whole(item)
        run.conclude(int(time.time()))
        run.document["usage"] = hit.usage
        if self._cache is not None and hit.source is not None:
            self._cache.audit(hit, partial(self._answer_again, _alone(run), run.caller), run.caller, run.model)
        return events

    async def _answer_again(self, request: CreateResponse, caller: Caller) -> str | None:
        document = await self._create(request, caller)
        return output_text(document) if document is not None and document["status"] == "completed" else None

    async def race(self, run: Run) -> Hit | None:
        """Wait until the first turn is open, or until the judge approves a cached answer. Then stop opening the turn.

        Return the hit if the judge was first. Raises the errors of `Run.wait_until_open`.
        """
        miss = run.looked_up
        if self._cache is None or not isinstance(miss, Miss) or miss.judging is None or run.opening is None:
            await run.wait_until_open()
            return None
        found = None
        try:
            if await run.is_open_within(None):
                await run.wait_until_open()
            else:
                run.opening.cancel()  # the run waits for the end of the task when it closes
                found = miss.approved
        finally:
            CACHE_RACES.add(1, {"result": "lost" if found is None else "won"})
            miss.judging = None
            result = found or miss
            self._cache.report(result)
            annotate(cache_status=result.header)
        return found

    def flight(self, run: Run) -> AbstractAsyncContextManager[None]:
        """Return a context manager in which identical requests wait for the answer of `run`."""
        if self._cache is None or not isinstance(run.looked_up, Miss):
            return nullcontext()
        return self._cache.flight(run.looked_up)

    async def keep(self, run: Run) -> None:
        """Store the answer of `run` if it was looked up and not found."""
        if self._cache is not None and isinstance(run.looked_up, Miss):
            await self._cache.keep(run.looked_up, run.document, is_certain=run.assembler.has_known_end)

    def pause_judge(self) -> None:
        """Do not ask the judge for a few seconds, because the upstream is overloaded."""
        if self._cache is not None:
            self._cache.pause_judge()


def _alone(run: Run) -> CreateResponse:
    """Return the request of `run` with its whole history as input, so that a repetition changes no stored object."""
    elsewhere: dict[str, Any] = {"previous_response_id": None, "conversation": None, "prompt": None}
    return replace(run.request, items=list(run.context.items), store=False, stream=False, **elsewhere)
