"""Tavily (https://docs.tavily.com/documentation/api-reference/endpoint/search)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from .countries import COUNTRIES
from .fetch import fetch, rows, text
from .query import Found, Query

URL = "https://api.tavily.com"
_MOST_RESULTS = 20
_MOST_ALLOWED, _MOST_BLOCKED = 300, 150


@dataclass(frozen=True, slots=True)
class Tavily:
    http: httpx.AsyncClient
    url: str
    key: str
    patience: float

    async def search(self, query: Query) -> list[Found]:
        """A ``thorough`` query is an advanced search, which costs two credits in place of one."""
        body: dict[str, Any] = {"query": query.text, "max_results": min(query.count, _MOST_RESULTS)}
        body["search_depth"] = "advanced" if query.thorough else "basic"
        if query.allowed:
            body["include_domains"] = query.allowed[:_MOST_ALLOWED]
        if query.blocked:
            body["exclude_domains"] = query.blocked[:_MOST_BLOCKED]
        if country := COUNTRIES.get(query.place.country or ""):
            body["country"] = country.name
        request = self.http.build_request(
            "POST", f"{self.url}/search", json=body, headers={"authorization": f"Bearer {self.key}"}
        )
        answer = await fetch(self.http, "tavily", request, patience=self.patience)
        return [Found(text(row, "title"), text(row, "url"), text(row, "content")) for row in rows(answer, "results")]
