"""The tool kind `web_search`, including `web_search_preview` and the dated names of both types."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..protocol import checks
from ..protocol.citations import Source
from ..protocol.search_results import CITE, web_listing
from ..protocol.tool_kinds.form import CallForm, as_function, parse_arguments
from ..protocol.tool_kinds.registry import WEB_SEARCH
from ..protocol.types import Tool
from ..settings.groups import ToolSettings
from . import ServedFunction, ServerTool, ToolContext, ToolResult
from .mcp_search import MCPSearch
from .search import PROVIDERS, Query, SearchFailed, SearchHit, SearchProvider, plain_host

_SIZES: Mapping[str, tuple[int, int]] = {"low": (3, 500), "medium": (6, 1_000), "high": (10, 3_000)}
"""Maps `search_context_size` to the maximum number of results and the maximum number of characters per result."""
_MAX_QUERY = 2_000
_MAX_TITLE = 300
_MAX_URL = 2_048
_MAX_DOMAINS = 100
_FUNCTION = as_function(
    "web_search",
    f"Search the web. Returns numbered results with title, URL and excerpt. {CITE}",
    {"query": {"type": "string", "description": "Search query."}},
    "query",
)


def _content_types(value: Any, path: str) -> list[Any]:
    kinds = checks.each(checks.among("text", "image"))(value, path)
    if kinds and "text" not in kinds:  # images are never returned
        checks.unsupported(path, "only text can be searched.")
    return kinds


def _domains(value: Any, path: str) -> list[Any]:
    for index, domain in enumerate(checks.array(value, path, max_length=_MAX_DOMAINS)):
        place = f"{path}[{index}]"
        try:
            plain_host(checks.string(domain, place, max_length=253, pattern=r"[\w-]+(\.[\w-]+)*"))
        except UnicodeError:
            checks.wrong_value(place, domain, {"example.com"})
    return list(value)


_name = partial(checks.string, max_length=256, pattern=r"[^\x00-\x1f\x7f]*")
_definition = checks.closed_object(
    type=checks.among(*WEB_SEARCH.types),
    external_web_access=checks.boolean,  # if false, the tool is not offered to the model
    search_content_types=_content_types,
    image_settings=checks.mapping,  # no images are returned
    search_context_size=checks.among(*_SIZES),
    filters=checks.closed_object(allowed_domains=_domains, blocked_domains=_domains),
    user_location=checks.closed_object(
        type=checks.among("approximate"),
        country=partial(checks.string, pattern="[A-Za-z]{2}"),
        city=_name,
        region=_name,
        timezone=_name,
    ),
)


class WebSearch(ServerTool):
    """The web search of one run. Without a provider, or if `external_web_access` is false, it offers no function.

    Results are numbered across the whole history, and a URL keeps its number. Searches may run concurrently.
    """

    def __init__(self, tool: Tool, context: ToolContext) -> None:
        name = context.search.provider
        self.provider: SearchProvider | None = None
        if name != "none" and tool.get("external_web_access", True):
            self.provider = MCPSearch(context) if "/" in name else PROVIDERS[name](context)
        self._options = _options(tool)
        self._sources = context.sources

    @staticmethod
    def check(tool: Tool, path: str, settings: ToolSettings) -> Tool:
        return _definition(tool, path)

    async def open(self) -> list[ServedFunction]:
        if self.provider is None:
            return []
        form = CallForm(
            item="web_search_call",
            made=lambda arguments: {"action": _action(arguments)},
            begins=("web_search_call.in_progress",),
            runs=("web_search_call.searching",),
            ends=("web_search_call.completed",),
            served=True,
        )
        return [ServedFunction(_FUNCTION, form, self.call, "web_search")]

    async def aclose(self) -> None:
        if self.provider is not None:
            await self.provider.aclose()

    async def call(self, arguments: str) -> ToolResult:
        """Search for the `query` in `arguments`. The result has `action`, `results` and, after a failure, `error`."""
        assert self.provider is not None
        action, text = _action(arguments), _query(arguments)
        if text is None:
            return _failure('The arguments must be a JSON object with a string "query".', action)
        query = Query(text, **self._options)
        try:
            hits = await self.provider.search(query)
        except SearchFailed as error:
            return _failure(f"The search failed: {error}", action)
        results = self._number([hit for hit in hits if _is_usable(hit, query)][: query.count], query.characters)
        sources = [{"type": "url", "url": result["url"]} for result in results if result["url"]]
        return ToolResult(web_listing(results), {"action": {**action, "sources": sources}, "results": results})

    def _number(self, hits: list[SearchHit], maximum: int) -> list[dict[str, Any]]:
        """Return the results with their numbers, and with texts of at most `maximum` characters."""
        results: dict[int, dict[str, Any]] = {}
        for hit in hits:
            title = " ".join(hit.title.split())[:_MAX_TITLE] or hit.url
            number = self._sources.number(*filter(None, [hit.url]))
            if hit.url and self._sources.get(number) is None:
                self._sources.add(Source(number, title, url=hit.url))
            excerpt = hit.text if len(hit.text) <= maximum else hit.text[:maximum].rstrip() + " ..."
            results.setdefault(number, {"number": number, "url": hit.url, "title": title, "snippet": excerpt})
        return list(results.values())


def _options(tool: Tool) -> dict[str, Any]:
    filters, location = tool.get("filters", {}), tool.get("user_location", {})
    size = tool.get("search_context_size", "medium")
    count, characters = _SIZES[size]
    return {
        "count": count,
        "characters": characters,
        "allowed": tuple(map(plain_host, filters.get("allowed_domains", ()))),
        "blocked": tuple(map(plain_host, filters.get("blocked_domains", ()))),
        "place": {**location, "country": location.get("country", "").upper()},
        "thorough": size == "high",
    }


def _action(arguments: str) -> dict[str, Any]:
    query = _query(arguments) or ""
    return {"type": "search", "query": query, "queries": [query]}


def _query(arguments: str) -> str | None:
    query = (parse_arguments(arguments) or {}).get("query")
    return query.strip()[:_MAX_QUERY] if isinstance(query, str) and query.strip() else None


def _is_usable(hit: SearchHit, query: Query) -> bool:
    """Return whether the URL of `hit` is valid and passes the filters. Without filters, a result with a text needs no URL."""
    if not hit.url:
        return bool(hit.text) and not query.allowed and not query.blocked
    is_url = hit.url.startswith(("http://", "https://")) and hit.url.isprintable() and len(hit.url) <= _MAX_URL
    return is_url and query.admits(hit.url)


def _failure(message: str, action: dict[str, Any]) -> ToolResult:
    return ToolResult(message, {"action": action, "results": [], "error": message}, failed=True)
