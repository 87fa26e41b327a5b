"""SearXNG (https://docs.searxng.org/dev/search_api.html). Its settings must have ``json`` among ``search.formats``."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from .countries import COUNTRIES
from .fetch import fetch, rows, text
from .query import Found, Query, SearchFailed

_MOST_SITES = 10  # as operators of the query: engines bound its length


@dataclass(frozen=True, slots=True)
class SearXNG:
    """``key``, if set, is sent as a bearer token, for an instance behind a proxy that wants one."""

    http: httpx.AsyncClient
    url: str
    key: str | None
    patience: float

    async def search(self, query: Query) -> list[Found]:
        parameters = {"q": _with_sites(query), "format": "json"}
        if country := COUNTRIES.get(query.place.country or ""):
            parameters["language"] = f"{country.language}-{query.place.country}"
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        request = self.http.build_request("GET", f"{self.url}/search", params=parameters, headers=headers)
        answer = await fetch(self.http, "searxng", request, patience=self.patience)
        results = rows(answer, "results")
        if not results and answer.get("unresponsive_engines"):
            raise SearchFailed("None of the search engines answered.")
        return [Found(text(row, "title"), text(row, "url"), text(row, "content")) for row in results]


def _with_sites(query: Query) -> str:
    """The query with its domains as operators, which most engines know; what comes from the others is filtered afterwards."""
    if len(query.allowed) + len(query.blocked) > _MOST_SITES:
        return query.text
    allowed = " OR ".join(f"site:{domain}" for domain in query.allowed)
    if len(query.allowed) > 1:
        allowed = f"({allowed})"
    return " ".join(filter(None, [query.text, allowed, *(f"-site:{domain}" for domain in query.blocked)]))
