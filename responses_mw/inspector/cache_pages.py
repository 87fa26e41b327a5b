"""The cache page: hits, reasons of misses, the judge's verdicts, a comparison of two texts, and the purge."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ..cache import Cache
from ..cache.explain import Comparer, describe
from ..errors import BadRequest, Forbidden, NotSupported, Unavailable
from ..state.recent import Summary
from ..tasks import by_size
from ..telemetry.audit import audit
from .api import client_of
from .charts import hits_plot
from .forms import read_form
from .inspector_context import InspectorContext
from .queries import PERIODS, Query, read_number
from .rendering import Renderer

MAX_FORM = 32 * 1024
COUNT_TIMEOUT = 5.0  # seconds to compute the size of the cache, which takes a script call for each owner and shard
DEFAULT_PERIOD = "1d"
_MAX_ROWS = 10
_BYTES = 500  # approximate size of a summary

REASONS = {
    "not_found": "no answer to this question, or to a similar one, is cached, or it has expired",
    "below_threshold": "the nearest question is not similar enough",
    "guard": "the questions differ in a number, a name, a negation or another detail",
    "not_approved": "the judge refused the nearest question, failed, or was slower than the upstream",
    "not_judged": "the judge was not asked: it is paused, or has reached its limit",
    "other_words": "there is no judge, and the nearest question has other words",
    "too_long": "the text is too long to be compared",
    "embedding_failed": "the embeddings server failed",
    "failed": "Redis failed, or did not answer in time",
    "unreadable": "the stored answer is damaged, or encrypted with another key",
    "refresh": "the request asked for a new answer",
    "uncacheable": "requests of this kind are never cached",
}
"""The meaning of each reason of a miss, or of its part before the colon."""


@dataclass(slots=True)
class Lookups:
    """The number of lookups by result, and the tokens of the cached answers (`saved`)."""

    name: str = ""
    exact: int = 0
    semantic: int = 0
    miss: int = 0
    unused: int = 0
    saved: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.exact + self.semantic + self.miss

    @property
    def rate(self) -> float | None:
        """The share of hits, or None if there were no lookups."""
        return (self.exact + self.semantic) / self.total if self.total else None

    def add(self, result: str | None, reason: str, number: int, tokens: int) -> None:
        """Add a `number` of responses with this result of the lookup, and with their `tokens`."""
        if result is None:
            self.unused += number
        elif result == "miss":
            self.miss += number
            self.reasons[reason] += number
        else:
            self.exact += number if result == "exact" else 0
            self.semantic += number if result == "semantic" else 0
            self.saved += tokens


class Group(NamedTuple):
    """The facts by which responses are grouped."""

    owner: str
    model: str
    result: str | None
    reason: str


Groups: TypeAlias = Mapping[Group, Sequence[int]]
"""The number of responses of each group, and their tokens."""


def grouped(summaries: Sequence[Summary]) -> Groups:
    """Group responses, because there are many fewer groups than responses."""
    groups: defaultdict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for one in summaries:
        get = one.get
        group = groups[get("owner", ""), get("model", ""), get("cache"), get("cache_reason", "")]
        group[0] += 1
        group[1] += (get("tokens_in") or 0) + (get("tokens_out") or 0)
    return {Group(*key): counts for key, counts in groups.items()}


def lookups_by(name_of: Callable[[Group], str], groups: Groups) -> list[Lookups]:
    """Return the lookups by the name of their group, the most frequent first."""
    found: dict[str, Lookups] = {}
    for group, (number, tokens) in groups.items():
        name = name_of(group)
        found.setdefault(name, Lookups(name)).add(group.result, group.reason, number, tokens)
    return sorted((one for one in found.values() if one.total), key=lambda one: -one.total)


def _counted(summaries: Sequence[Summary], seconds: float) -> dict[str, Any]:
    """Return the values that the page shows about responses of the last `seconds`."""
    every, groups = Lookups(), grouped(summaries)
    for group, (number, tokens) in groups.items():
        every.add(group.result, group.reason, number, tokens)
    return {
        "every": every,
        "plot": hits_plot(summaries, time.time(), seconds),
        "reasons": [(reason, count, meaning(reason)) for reason, count in every.reasons.most_common(_MAX_ROWS)],
        "owners": lookups_by(attrgetter("owner"), groups)[:_MAX_ROWS],
        "models": lookups_by(attrgetter("model"), groups)[:_MAX_ROWS],
    }


def meaning(reason: str) -> str:
    return REASONS.get(reason, REASONS.get(reason.partition(":")[0], ""))


class CachePages:
    def __init__(self, context: InspectorContext, renderer: Renderer) -> None:
        self._context = context
        self._state = context.state
        self._render = renderer.page

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/ui/cache", self._page),
            Route("/ui/cache/explain", self._explain, methods=["POST"]),
            Route("/ui/cache/purge", self._purge, methods=["POST"]),
        ]

    async def _page(self, request: Request) -> Response:
        return await self._show(request)

    async def _show(self, request: Request, **shown: Any) -> Response:
        params = dict(request.query_params)
        counts, purged = params.pop("size", "") == "true", params.pop("purged", "")
        query = Query.parse({"since": DEFAULT_PERIOD, **params})
        recent = await self._state.recent_window.read(query.wanted)
        oldest = recent.summaries[-1].get("ended", 0.0) if recent.is_cut and recent.summaries else query.wanted.since
        seconds = max(60.0, time.time() - oldest)
        values: dict[str, Any] = {
            "query": query,
            "is_cut": recent.is_cut,
            "judge": await self._judge(),
            "size": await self._size(query.wanted.owner) if counts else None,
            "purged": read_number(purged),
            **await by_size(_BYTES * len(recent.summaries), _counted, recent.summaries, seconds),
        }
        options = {"periods": [*PERIODS], "cache": self._context.cache, "can_act": self._context.can_act}
        return self._render(request, "cache.html", **{**values, **options, "texts": {}, "lines": (), **shown})

    async def _judge(self) -> Counter[str]:
        """Return the judge's verdicts in all running processes since they started."""
        total: Counter[str] = Counter()
        for replica in await self._state.replicas.running():
            facts = replica.get("judge")
            if isinstance(facts, dict):
                total.update({str(name): count for name, count in facts.items() if isinstance(count, int)})
        return total

    async def _size(self, owner: str) -> Any:
        try:
            async with asyncio.timeout(COUNT_TIMEOUT):
                return await self._cache().entries.stats(self._context.owner_named(owner) or None)
        except TimeoutError:
            raise Unavailable("There are too many owners to count their entries: choose one.") from None
        except ValueError as error:
            raise BadRequest(f"'owner': {error}.", param="owner") from None

    def _cache(self) -> Cache:
        if self._context.cache is None:
            raise NotSupported("This process has no cache.")
        return self._context.cache

    # -- actions -----------------------------------------------------------------------------------------------------------

    async def _explain(self, request: Request) -> Response:
        """Compare two texts as the cache does. The judge is asked only if actions are on, because it uses tokens."""
        form, cache = await read_form(request, MAX_FORM), self._cache()
        texts = {name: form.get(name, "").strip() for name in ("one", "other", "answer", "model")}
        if not texts["one"] or not texts["other"]:
            raise BadRequest("Enter two questions.")
        judge = cache.judge if self._context.can_act else None
        comparer = Comparer(cache.embedder, judge, cache.settings)
        found = await comparer.compare(texts["one"], texts["other"], answer=texts["answer"], model=texts["model"])
        lines = [line.partition(": ")[::2] for line in describe(found, cache.settings)]
        return await self._show(request, texts=texts, lines=lines)

    async def _purge(self, request: Request) -> Response:
        """Remove the entries of an owner, or of all owners if the form has `all`."""
        form = await read_form(request)
        if not self._context.can_act:
            raise Forbidden("Actions are off: they need ui.actions, and are available only on servers, not on workers.")
        owner = self._context.owner_named(form.get("owner", "").strip())
        if not owner and form.get("all") != "on":
            raise BadRequest("Enter an owner, or choose all.")
        try:
            removed = await self._cache().entries.purge(owner or None)
        except ValueError as error:
            raise BadRequest(f"'owner': {error}.", param="owner") from None
        audit("cache purged by the inspector", client=client_of(request), owner=owner or "all")
        return RedirectResponse(f"/ui/cache?purged={removed}", 303)
