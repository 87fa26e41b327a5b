"""Web search: the tools ``web_search`` and ``web_search_preview`` and their dated names, with the provider that is set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import orjson

from ..protocol.request import checks
from ..protocol.response.citations import listing, sources_of
from ..protocol.types import Item, Tool
from ..settings import Settings
from .result import Result
from .search import Found, Place, Provider, Query, SearchFailed
from .search.query import plain_host

TYPES = frozenset({"web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"})

_SIZES: Mapping[str, tuple[int, int]] = {"low": (3, 500), "medium": (6, 1_000), "high": (10, 3_000)}
"""Results, and characters of each, that the model is given by ``search_context_size``."""
_LONGEST_QUERY = 2_000
_LONGEST_TITLE = 300
_LONGEST_URL = 2_048
_MOST_DOMAINS = 100
_DOMAIN = r"[\w-]+(\.[\w-]+)*"
_NAME = r"[^\x00-\x1f\x7f]*"
_COUNTRY = r"[A-Za-z]{2}"


def check_web_search(tool: Tool, path: str, settings: Settings) -> Tool:
    """An entry of ``tools`` of one of ``TYPES``, without its nulls. Raises ``BadRequest`` with the path of what is wrong."""
    checked = checks.members(tool, path, _MEMBERS, others="refuse")
    if settings.web_search == "none" and checked.get("external_web_access", True):
        checks.unsupported(
            f"{path}.type", "this server has no web search; its operator can configure one (setting 'web_search')."
        )
    return checked


def _content_types(value: Any, path: str) -> list[Any]:
    for index, kind in enumerate(checks.array(value, path)):
        if checks.one_of(kind, f"{path}[{index}]", {"text", "image"}) == "image":
            checks.unsupported(f"{path}[{index}]", "the search finds texts only.")
    return list(value)


def _domains(value: Any, path: str) -> list[Any]:
    for index, domain in enumerate(checks.array(value, path, max_length=_MOST_DOMAINS)):
        place = f"{path}[{index}]"
        try:
            plain_host(checks.string(domain, place, max_length=253, pattern=_DOMAIN))
        except UnicodeError:
            checks.wrong_value(place, domain, {"example.com"})
    return list(value)


_name = partial(checks.string, max_length=256, pattern=_NAME)
_MEMBERS: dict[str, checks.Check] = {
    "type": lambda value, path: checks.one_of(value, path, TYPES),
    "external_web_access": checks.boolean,  # false: nothing but the live web could be searched, so the tool is not offered
    "search_content_types": _content_types,
    "search_context_size": lambda value, path: checks.one_of(value, path, _SIZES),
    "filters": partial(checks.members, checks={"allowed_domains": _domains, "blocked_domains": _domains}, others="refuse"),
    "user_location": partial(
        checks.members,
        checks={
            "type": lambda value, path: checks.one_of(value, path, {"approximate"}),
            "country": partial(checks.string, pattern=_COUNTRY),
            "city": _name,
            "region": _name,
            "timezone": _name,
        },
        others="refuse",
    ),
}


class WebSearch:
    """The web search of one run. ``sources`` are all that it may cite, with those of ``earlier`` items of its chain.

    Searches may run at the same time. Results are numbered over the whole chain, and an address keeps the number that it had.
    """

    def __init__(self, tool: Tool, provider: Provider, settings: Settings, earlier: Iterable[Item] = ()) -> None:
        """``tool`` has been checked."""
        self._provider = provider
        self._options = _options(tool, settings.web_search_results)
        self._excerpt = _SIZES[tool.get("search_context_size", "medium")][1]
        self.sources: list[dict[str, Any]] = sources_of(earlier)
        self._numbers: dict[str, int] = {source["url"]: source["number"] for source in self.sources}
        self._last = max(self._numbers.values(), default=0)

    def definition(self) -> Tool:
        """The function that the model is offered, in the flat form of ``tools``."""
        return {
            "type": "function",
            "name": "web_search",
            "description": "Searches the web. Gives numbered results, each with its title, URL and an excerpt. "
            "Cite those that you use, by number as in [1] or by a Markdown link to the URL.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What to search for."}},
                "required": ["query"],
                "additionalProperties": False,
            },
        }

    def action(self, arguments: str) -> dict[str, Any]:
        """What the call's item shows before it is answered."""
        query = _query(arguments) or ""
        return {"type": "search", "query": query, "queries": [query]}

    async def call(self, arguments: str) -> Result:
        """Searches. The members are ``action`` and ``results``, and ``error`` where the search failed."""
        action, text = self.action(arguments), _query(arguments)
        if text is None:
            return _failure('The arguments must be a JSON object with a "query" that is a text.', action)
        query = Query(text, **self._options)
        try:
            found = await self._provider.search(query)
        except SearchFailed as error:
            return _failure(f"The search failed: {error}", action)
        results = self._numbered([one for one in found if _is_usable(one, query)][: query.count])
        sources = [{"type": "url", "url": result["url"]} for result in results if result["url"]]
        return Result(listing(results), {"action": {**action, "sources": sources}, "results": results})

    def _numbered(self, found: list[Found]) -> list[dict[str, Any]]:
        results: dict[int, dict[str, Any]] = {}
        for one in found:
            number = self._number(one)
            excerpt = one.text if len(one.text) <= self._excerpt else one.text[: self._excerpt].rstrip() + " ..."
            result = {"number": number, "url": one.url, "title": _title(one), "snippet": excerpt}
            results.setdefault(number, result)
        return list(results.values())

    def _number(self, found: Found) -> int:
        if found.url in self._numbers:
            return self._numbers[found.url]
        self._last += 1
        if found.url:
            self._numbers[found.url] = self._last
            self.sources.append({"number": self._last, "url": found.url, "title": _title(found)})
        return self._last


def _options(tool: Tool, most: int) -> dict[str, Any]:
    """The members of every ``Query`` of a run."""
    filters, location = tool.get("filters", {}), tool.get("user_location", {})
    size = tool.get("search_context_size", "medium")
    country = location.get("country")
    return {
        "count": min(_SIZES[size][0], most),
        "allowed": tuple(plain_host(domain) for domain in filters.get("allowed_domains", ())),
        "blocked": tuple(plain_host(domain) for domain in filters.get("blocked_domains", ())),
        "place": Place(
            country.upper() if country else None, location.get("region"), location.get("city"), location.get("timezone")
        ),
        "thorough": size == "high",
    }


def _query(arguments: str) -> str | None:
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    query = given.get("query") if isinstance(given, dict) else None
    return query.strip()[:_LONGEST_QUERY] if isinstance(query, str) and query.strip() else None


def _is_usable(found: Found, query: Query) -> bool:
    """Whether a result can be shown: it has a text or an address, and passes the filters."""
    if not found.url:
        return bool(found.text) and not query.allowed and not query.blocked
    return found.url.startswith(("http://", "https://")) and len(found.url) <= _LONGEST_URL and query.admits(found.url)


def _title(found: Found) -> str:
    return " ".join(found.title.split())[:_LONGEST_TITLE] or found.url


def _failure(message: str, action: dict[str, Any]) -> Result:
    return Result(message, {"action": action, "results": [], "error": message}, failed=True)
