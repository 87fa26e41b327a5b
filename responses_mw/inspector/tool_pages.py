"""The page of tools: which are configured, their calls, and recent responses that used them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..settings import Settings
from ..settings.groups import HostedTool, ToolServer
from ..state.recent import FAILED, Summary
from ..telemetry.instruments import OTHER
from .inspector_context import InspectorContext
from .queries import PERIODS, Query
from .rendering import Renderer

DEFAULT_PERIOD = "1d"
_LISTED = 20  # number of responses with failed calls


@dataclass(slots=True)
class Calls:
    """Calls of a tool by the running processes since they started."""

    calls: int = 0
    errors: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float | None:
        return self.seconds / self.calls if self.calls else None

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of `telemetry.process_facts`, which another version may have written."""
        calls, errors, seconds = (row.get(name) for name in ("calls", "errors", "seconds"))
        if isinstance(calls, int) and isinstance(errors, int) and isinstance(seconds, int | float):
            self.calls, self.errors, self.seconds = self.calls + calls, self.errors + errors, self.seconds + seconds


@dataclass(frozen=True, slots=True)
class ConfiguredTool:
    """A tool in the settings. `kind` and `server` are as in metrics, and `place` is its address.

    `rules` are the restrictions of its use.
    """

    name: str
    kind: str
    server: str
    place: str
    rules: Sequence[str] = ()
    is_served: bool = True


@dataclass(slots=True)
class ToolUse:
    """The responses that called tools of a kind."""

    kind: str
    responses: int = 0
    failed: int = 0
    with_errors: int = 0


def configured(settings: Settings, *, has_stores: bool) -> Iterator[ConfiguredTool]:
    """Yield the tools that this process serves, and those that it could serve."""
    tools = settings.tools
    hosted: tuple[tuple[HostedTool, str], ...] = (
        ("web_search", _search_place(settings)),
        ("file_search", "the vector stores" if has_stores else ""),
        ("code_interpreter", origin(tools.sandbox_url)),
    )
    for kind, place in hosted:
        rules = [] if place else ["not offered"] if kind in tools.omitted else ["requests get a 400"]
        yield ConfiguredTool(kind, kind, "", place, rules, is_served=bool(place))
    for label, server in tools.mcp_servers.items():
        yield ConfiguredTool(label, "mcp", label, origin(server.url), [*_rules(server)])


def _search_place(settings: Settings) -> str:
    search = settings.search
    if search.provider == "none":
        return ""
    return f"{search.provider}{f' at {origin(search.url)}' if search.url else ''}"


def _rules(server: ToolServer) -> Iterator[str]:
    """Yield the restrictions of an MCP server, without secrets and names of headers."""
    if server.authorization is not None:
        yield "with a token"
    if server.headers:
        yield f"{len(server.headers)} headers"
    if server.allowed_tools is not None:
        listed = server.allowed_tools if isinstance(server.allowed_tools, list) else server.allowed_tools.tool_names
        yield f"only {', '.join(listed)}" if listed is not None else "only some tools"
    approval = server.require_approval
    yield f"approval {approval if isinstance(approval, str) else 'always' if approval is None else 'of some tools'}"


def origin(url: str | None) -> str:
    """Return the origin of a URL, whose other parts may contain secrets."""
    parts = urlsplit(str(url or ""))
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}" if host else ""


def calls_of(replicas: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Calls]:
    """Add up the calls in the reports of the running processes, by kind and server."""
    found: defaultdict[tuple[str, str], Calls] = defaultdict(Calls)
    for replica in replicas:
        rows = replica.get("tools")
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict):
                found[str(row.get("kind", "")), str(row.get("server", ""))].add(row)
    return dict(found)


def uses_of(summaries: Sequence[Summary]) -> list[ToolUse]:
    """Return the number of responses by kind of tool that they called, the most used kind first."""
    found: dict[str, ToolUse] = {}
    for summary in summaries:
        for kind in summary.get("tools", ()):
            use = found.setdefault(kind, ToolUse(kind))
            use.responses += 1
            use.failed += summary.get("status") in FAILED
            use.with_errors += bool(summary.get("tool_errors"))
    return sorted(found.values(), key=lambda use: -use.responses)


class ToolPages:
    def __init__(self, context: InspectorContext, renderer: Renderer) -> None:
        self._state = context.state
        self._omitted = context.settings.tools.omitted
        self._configured = [*configured(context.settings, has_stores=context.retrieval is not None)]
        self._render = renderer.page

    def routes(self) -> list[BaseRoute]:
        return [Route("/ui/tools", self._page)]

    async def _page(self, request: Request) -> Response:
        query = Query.parse({"since": DEFAULT_PERIOD, **request.query_params})
        recent = await self._state.recent_window.read(query.wanted)
        calls = calls_of(await self._state.replicas.running())
        known = [(one, calls.pop((one.kind, one.server), Calls())) for one in self._configured]
        failed = [one for one in recent.summaries if one.get("tool_errors")][:_LISTED]
        return self._render(
            request,
            "tools.html",
            query=query,
            periods=[*PERIODS],
            known=known,
            others=sorted(calls.items()),
            omitted=self._omitted,
            uses=uses_of(recent.summaries),
            failed=failed,
            is_cut=recent.is_cut,
            other=OTHER,
        )
