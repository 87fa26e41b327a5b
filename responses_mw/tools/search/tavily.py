"""Tavily (https://docs.tavily.com/documentation/api-reference/endpoint/search)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .provider import COUNTRIES, ProviderOptions, Query, SearchHit, rows, text

_URL = "https://api.tavily.com"
_MAX_RESULTS = 20
_MAX_ALLOWED, _MAX_BLOCKED = 300, 150


@dataclass(frozen=True, slots=True)
class Provider:
    options: ProviderOptions

    async def search(self, query: Query) -> list[SearchHit]:
        """Search. A ``thorough`` query is an advanced search, which costs two credits instead of one."""
        body: dict[str, Any] = {"query": query.text, "max_results": min(query.count, _MAX_RESULTS)}
        body["search_depth"] = "advanced" if query.thorough else "basic"
        if query.allowed:
            body["include_domains"] = query.allowed[:_MAX_ALLOWED]
        if query.blocked:
            body["exclude_domains"] = query.blocked[:_MAX_BLOCKED]
        if country := COUNTRIES.get(query.place.country or ""):
            body["country"] = country.name
        url, headers = f"{self.options.url or _URL}/search", {"authorization": f"Bearer {self.options.key}"}
        request = self.options.http.build_request("POST", url, json=body, headers=headers)
        answer = await self.options.fetch("tavily", request)
        return [SearchHit(text(row, "title"), text(row, "url"), text(row, "content")) for row in rows(answer, "results")]
