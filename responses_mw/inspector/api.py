"""The inspector's JSON endpoints: recent responses, a single response, jobs, and processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import APIError, NotFound
from ..state import State
from ..state.job_list import list_jobs
from ..telemetry.audit import audit
from .queries import Query
from .report import ResponseReport, report_of

PREFIX = "/admin/api"


class JSON(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_json(error: APIError) -> JSON:
    return JSON(error.body(), error.status)


class InspectorAPI:
    """The endpoints below `PREFIX`. They include texts of responses only if `shows_content` is set."""

    def __init__(self, state: State, keys: Mapping[str, str], *, shows_content: bool) -> None:
        """`keys` maps owners to the names of their API keys."""
        self._state = state
        self._keys = keys
        self._shows_content = shows_content

    def routes(self) -> list[Route]:
        return [
            Route(f"{PREFIX}/responses", self._responses),
            Route(f"{PREFIX}/responses/{{id}}", self._response),
            Route(f"{PREFIX}/jobs", self._jobs),
            Route(f"{PREFIX}/replicas", self._replicas),
        ]

    async def _responses(self, request: Request) -> Response:
        """List recent responses, with the parameters of `Query`. To get the next page, pass `next` as `before`."""
        query = Query.parse(request.query_params)
        page = await self._state.recent.page(query.wanted, before=query.before, limit=query.limit)
        return JSON({"data": page.summaries, "next": str(page.next) if page.next is not None else None})

    async def _response(self, request: Request) -> Response:
        report = await find_report(self._state, request.path_params["id"])
        content = self._shows_content and request.query_params.get("content") == "true"
        if content and report.document is not None:
            audit("content shown as JSON", report.id, client_of(request))
        return JSON(report.as_json(content=content))

    async def _jobs(self, request: Request) -> Response:
        jobs = await list_jobs(self._state.client)
        return JSON({**asdict(jobs), "keys": {o: self._keys[o] for o in jobs.owners if o in self._keys}})

    async def _replicas(self, request: Request) -> Response:
        return JSON({"data": await self._state.replicas.running()})


async def find_report(state: State, response_id: str) -> ResponseReport:
    """Return the report of a response. Raises `NotFound` if nothing is known about it."""
    report = await report_of(state, response_id)
    if report is None:
        raise NotFound("Nothing is known about this response: it has expired, was deleted, or never existed.")
    return report


def client_of(request: Request) -> str:
    return request.client.host if request.client is not None else ""
