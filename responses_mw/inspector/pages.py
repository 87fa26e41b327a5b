"""The pages of the inspector, rendered on the server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ..errors import BadRequest, Forbidden
from ..state import StateUnavailable
from ..state.job_list import MAX_COUNTED, list_jobs
from ..state.recent import Ends, read_ends
from ..telemetry.audit import audit
from .api import client_of, find_report
from .events import follow_events, read_events, shown_events
from .forms import read_form
from .inspector_context import InspectorContext
from .live import INTERVAL, RETRY, LiveViews
from .queries import CACHE, KINDS, PERIODS, Query, read_number
from .rendering import Renderer
from .report import text_of
from .snippets import request_of, snippets
from .timeline import timeline
from .translation import translation

REFRESH_SECONDS = 3.0
"""Seconds between updates of the page *Background*."""
_MAX_OWNER = 256  # maximum length of the owner in a URL
RUNNING = frozenset({"queued", "in_progress"})
_TRACE_ID = re.compile(r"[0-9a-f]{32}")

_JUMPS = {"resp": "/ui/responses/{}", "conv": "/ui/conversations/{}", "vs": "/ui/files?store={}"}
"""Maps prefixes of ids to their pages."""


class Pages:
    """The pages about responses, and the overview."""

    def __init__(self, context: InspectorContext, renderer: Renderer) -> None:
        self._state = context.state
        self._shows_content = context.shows_content
        self._can_act = context.can_act
        self._jobs = context.jobs
        self._trace_url = context.ui.trace_url
        self._render = renderer.page
        self._live_views = LiveViews()

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/ui/responses", self._responses),
            Route("/ui/responses/live", self._live),
            Route("/ui/responses/{id}", self._response),
            Route("/ui/responses/{id}/text", self._text),
            Route("/ui/responses/{id}/events", self._events),
            Route("/ui/responses/{id}/{action}", self._act, methods=["POST"]),
            Route("/ui/jump", self._jump),
            Route("/ui/background", self._background),
        ]

    # -- pages -------------------------------------------------------------------------------------------------------------

    async def _responses(self, request: Request) -> Response:
        query = Query.parse(request.query_params)
        ends = await self._state.recent.ends()  # before the list, so that the live view misses no response
        page = await self._state.recent.page(query.wanted, before=query.before, limit=query.limit)
        known: dict[str, Any] = {"kinds": KINDS, "caches": CACHE, "periods": [*PERIODS], "ends": ".".join(ends)}
        return self._render(request, "responses.html", query=query, page=page, **known)

    async def _response(self, request: Request) -> Response:
        report = await find_report(self._state, request.path_params["id"])
        shows_content = self._shows_content and report.document is not None
        captured = await translation(self._state, report) if self._shows_content else None
        if shows_content or (captured is not None and captured.turns):
            audit("content shown", report.id, client_of(request))
        events = await read_events(self._state, report) if shows_content else []
        if captured is not None and not events:
            events = shown_events(captured.events)
        return self._render(
            request,
            "response.html",
            report=report,
            summary=report.summary,
            trace_url=self._link_to_trace(report.summary.get("trace_id")),
            shows_content=shows_content,
            is_running=report.status in RUNNING,
            can_act=self._can_act,
            timeline=timeline(report),
            events=events,
            translation=captured,
            snippets=snippets(request_of(report)) if shows_content else (),
        )

    def _link_to_trace(self, trace_id: Any) -> str | None:
        """Return the URL of a trace's page. The id comes from Redis, so it is checked before it becomes part of the URL."""
        if self._trace_url is None or not isinstance(trace_id, str) or not _TRACE_ID.fullmatch(trace_id):
            return None
        return self._trace_url.replace("{trace_id}", trace_id)

    async def _text(self, request: Request) -> Response:
        """Return the whole text of an item, for example with `?list=input&item=0`."""
        report = await find_report(self._state, request.path_params["id"])
        if not self._shows_content or report.document is None:
            raise Forbidden("The content of responses is shown only if ui.mode is content.")
        params, lists = request.query_params, {"input": report.input, "output": report.document.get("output") or ()}
        items, place = lists.get(params.get("list", "")), read_number(params.get("item", ""))
        if items is None or place is None or place >= len(items):
            raise BadRequest("There is no such item.")
        audit("content shown as text", report.id, client_of(request))
        return Response(text_of(items[place]), media_type="text/plain; charset=utf-8")

    async def _jump(self, request: Request) -> Response:
        """Redirect to the response, conversation or vector store with the entered id. Treat any other id as a request id."""
        wanted = request.query_params.get("id", "").strip()[:256]
        kind = wanted.partition("_")[0] if re.fullmatch(r"[A-Za-z0-9_-]+", wanted) else ""
        if kind not in _JUMPS and (one := await self._state.recent.of_request(wanted)):
            return RedirectResponse(f"/ui/responses/{quote(one)}", 303)
        page = _JUMPS.get(kind, "/ui/responses?request={}" if wanted else "/ui/responses")
        return RedirectResponse(page.format(quote(wanted)), 303)

    async def _background(self, request: Request) -> Response:
        owner = request.query_params.get("owner", "")[:_MAX_OWNER]
        jobs = await list_jobs(self._state.client, owner=owner)
        replicas = {one["worker"]: one["name"] for one in await self._state.replicas.running() if "worker" in one}
        values: dict[str, Any] = {"jobs": jobs, "owner": owner, "replicas": replicas, "can_act": self._can_act}
        return self._render(request, "background.html", counted=MAX_COUNTED, refresh_seconds=REFRESH_SECONDS, **values)

    # -- live views --------------------------------------------------------------------------------------------------------

    async def _live(self, request: Request) -> Response:
        """Send an event whenever responses that match the query have ended since the page was rendered (`after`)."""
        params = dict(request.query_params)
        ends = read_ends(request.headers.get("last-event-id") or params.pop("after", ""))
        params.pop("after", None)
        return self._live_views.response(self._new_responses(Query.parse(params), ends))

    async def _new_responses(self, query: Query, ends: Ends) -> AsyncGenerator[bytes, None]:
        yield RETRY
        while True:
            try:
                new, ends = await self._state.recent.after(ends, query.wanted)
            except StateUnavailable:
                return
            yield b"id: %b\ndata: %d\n\n" % (".".join(ends).encode(), len(new)) if new else b":\n\n"
            await asyncio.sleep(INTERVAL)

    async def _events(self, request: Request) -> Response:
        """Stream the number, type and text of each event of a running background response."""
        report = await find_report(self._state, request.path_params["id"])
        if not self._shows_content or report.document is None or self._jobs is None:
            raise Forbidden("The content of responses is shown only if ui.mode is content.")
        audit("events followed", report.id, client_of(request))
        after = read_number(request.headers.get("last-event-id") or request.query_params.get("after", ""))
        return self._live_views.response(follow_events(self._jobs, report.document, -1 if after is None else after))

    # -- actions -----------------------------------------------------------------------------------------------------------

    async def _act(self, request: Request) -> Response:
        await read_form(request)
        if not self._can_act or self._jobs is None:
            raise Forbidden("Actions are off: they need ui.actions, and are available only on servers, not on workers.")
        report, action = await find_report(self._state, request.path_params["id"]), request.path_params["action"]
        if action not in ("cancel", "delete", "requeue"):
            raise BadRequest("There is no such action.")
        audit(f"{action} by the inspector", report.id, client_of(request))
        if action == "delete":
            await self._jobs.delete(report.id, report.owner)
            return RedirectResponse("/ui/responses", 303)
        if action == "requeue":
            await self._jobs.requeue(report.id)
            return RedirectResponse("/ui/background", 303)
        await self._jobs.cancel(report.id, report.owner)
        return RedirectResponse(f"/ui/responses/{report.id}", 303)
