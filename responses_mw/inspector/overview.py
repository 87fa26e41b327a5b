"""The overview: plots of the last hour, checks, warnings, failures, processes, and changed settings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..settings import changed
from ..state.recent import FAILED, RecentFilter
from .charts import plots, sample_plot
from .inspector_context import InspectorContext
from .rendering import Renderer
from .texts import duration
from .vitals import Vitals

MAX_WARNINGS = 20


class ShownWarning(NamedTuple):
    """A warning of a process."""

    time: float
    process: str
    logger: str
    text: str
    times: int


class Overview:
    """The inspector's first page: recent failures and measurements, the replicas and their warnings, and results of checks."""

    def __init__(self, context: InspectorContext, renderer: Renderer, vitals: Vitals) -> None:
        self._state = context.state
        self._changed = changed(context.settings)
        self._render = renderer.page
        self._vitals = vitals

    def routes(self) -> list[BaseRoute]:
        return [Route("/ui", self._overview)]

    async def _overview(self, request: Request) -> Response:
        now = time.time()
        health = await self._state.check()
        recent = await self._state.recent_window.read(RecentFilter(since=now - 3600))
        replicas = await self._state.replicas.running()
        failed = [one for one in recent.summaries if one["status"] in FAILED]
        values: dict[str, Any] = {
            "health": health,
            "failed": failed[:8],
            "failures": len(failed),
            "ended": len(recent.summaries),
            "endpoints": _endpoints(replicas),
            "backlog": await self._state.queue.backlog(),
            "replicas": replicas,
            "warnings": sorted(_warnings(replicas), reverse=True)[:MAX_WARNINGS],
            "findings": self._vitals.findings,
            "checked": self._vitals.checked,
            "changed": self._changed,
        }
        drawn = [*plots(recent.summaries, now), *self._sampled(now)]
        return self._render(request, "overview.html", plots=drawn, now=now, **values)

    def _sampled(self, now: float) -> Iterator[Any]:
        samples = self._vitals.samples
        ages = [(one.time, one.age) for one in samples]
        yield sample_plot("Age of the oldest waiting job", ages, now, lambda age: duration(age) if age else "none")
        yield sample_plot("Latency of Redis", [(one.time, one.latency) for one in samples], now, duration)


def _endpoints(replicas: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return the URLs of the endpoints, and whether a process has left out the endpoint."""
    found: dict[str, bool] = {}
    for report in replicas:
        for one in report.get("endpoints", ()):
            if isinstance(one, dict):
                url = str(one.get("url", ""))
                found[url] = bool(one.get("ejected")) or found.get(url, False)
    return found


def _warnings(replicas: Sequence[Mapping[str, Any]]) -> Iterator[ShownWarning]:
    """Yield the warnings that processes have reported. Another version may have written them."""
    for report in replicas:
        listed = report.get("warnings")
        for warning in listed if isinstance(listed, list) else ():
            match warning:
                case [float() | int() as moment, str(logger), str(text), int(times)]:
                    yield ShownWarning(moment, str(report["name"]), logger.removeprefix("responses_mw."), text, times)
