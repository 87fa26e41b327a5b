"""Cache the latest summaries in memory, for pages that aggregate thousands of them.

Reading and decoding 10,000 summaries takes about 0.1 s of CPU. The window therefore reads only the summaries that were added
since its last use. It is emptied after `KEEP` seconds without use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from .recent import Ends, Recent, RecentFilter, Summary, latest_first

MAX = 10_000
"""Maximum number of summaries in the window and in a `Reading`. They take about 20 MB."""
KEEP = 300.0
MAX_ROUNDS = 10
"""Maximum number of round trips for an update. If these do not suffice, all summaries are read again."""
_LEFT_OUT = ("phases", "redis", "trace_id", "replica")
"""Members that are not cached, because only the page of one response shows them. They would take a third of the memory."""


class Reading(NamedTuple):
    """Matching summaries, latest first. If `is_cut`, older ones may match too."""

    summaries: list[Summary]
    is_cut: bool


class RecentWindow:
    """The latest `MAX` summaries, shared by all readers."""

    def __init__(self, recent: Recent) -> None:
        self._recent = recent
        self._updating = asyncio.Lock()
        self._held: dict[str, Summary] = {}  # by id, because the first reading may overlap with the next one
        self._ends: Ends | None = None
        self._is_whole = False
        self._release: asyncio.TimerHandle | None = None

    async def read(self, wanted: RecentFilter) -> Reading:
        """Return up to `MAX` matching summaries, latest first. Raises StateUnavailable if Redis fails.

        Criteria other than the time also apply to summaries that are older than the window.
        """
        async with self._updating:
            await self._update()
        oldest = next((one["ended"] for one in self._held.values()), 0.0)
        is_cut = not self._is_whole and oldest > wanted.since
        if is_cut and not wanted.is_all:
            page = await self._recent.page(wanted, limit=MAX)
            return Reading(page.summaries, page.next is not None)
        found = [one for one in reversed(self._held.values()) if one["ended"] >= wanted.since]
        return Reading(latest_first(found if wanted.is_all else [*filter(wanted.matches, found)]), is_cut)

    async def _update(self) -> None:
        if self._ends is None or not await self._follow(self._ends):
            await self._begin()
        self._keep()

    async def _follow(self, ends: Ends) -> bool:
        """Add the summaries that were written since the last update. Return False if there are too many."""
        for _ in range(MAX_ROUNDS):
            new, self._ends = await self._recent.after(ends)
            if self._ends == ends:
                return True
            self._add(new)
            ends = self._ends
        return False

    async def _begin(self) -> None:
        ends = await self._recent.ends()  # first, so that the next update misses none
        page = await self._recent.page(limit=MAX)
        self._held = {}
        self._add(reversed(page.summaries))
        self._ends, self._is_whole = ends, page.next is None

    def _add(self, summaries: Iterable[Summary]) -> None:
        for summary in summaries:
            for name in _LEFT_OUT:
                summary.pop(name, None)
            self._held[summary["id"]] = summary
        if (extra := len(self._held) - MAX) > 0:
            self._is_whole = False
            for name in [*islice(self._held, extra)]:
                del self._held[name]

    def _keep(self) -> None:
        """Keep the window for another `KEEP` seconds."""
        if self._release is not None:
            self._release.cancel()
        self._release = asyncio.get_running_loop().call_later(KEEP, self._empty)

    def _empty(self) -> None:
        self._held, self._ends = {}, None
