"""SearXNG (https://docs.searxng.org/dev/search_api.html). Its ``search.formats`` must include ``json``."""

from __future__ import annotations

from dataclasses import dataclass

from .provider import COUNTRIES, ProviderOptions, Query, SearchFailed, SearchHit, rows, text

_MAX_SITES = 10  # sites become operators in the query, whose length search engines limit


@dataclass(frozen=True, slots=True)
class Provider:
    """A SearXNG instance. The key, if set, is sent as a bearer token, for a proxy in front of the instance."""

    options: ProviderOptions

    async def search(self, query: Query) -> list[SearchHit]:
        parameters = {"q": _with_sites(query), "format": "json"}
        if country := COUNTRIES.get(query.place.country or ""):
            parameters["language"] = f"{country.language}-{query.place.country}"
        key, http = self.options.key, self.options.http
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = http.build_request("GET", f"{self.options.url}/search", params=parameters, headers=headers)
        answer = await self.options.fetch("searxng", request)
        results = rows(answer, "results")
        if not results and answer.get("unresponsive_engines"):
            raise SearchFailed("None of the search engines answered.")
        return [SearchHit(text(row, "title"), text(row, "url"), text(row, "content")) for row in results]


def _with_sites(query: Query) -> str:
    """Add the domains to the query as operators. Results of engines that ignore them are filtered afterwards."""
    if len(query.allowed) + len(query.blocked) > _MAX_SITES:
        return query.text
    allowed = " OR ".join(f"site:{domain}" for domain in query.allowed)
    if len(query.allowed) > 1:
        allowed = f"({allowed})"
    return " ".join(filter(None, [query.text, allowed, *(f"-site:{domain}" for domain in query.blocked)]))
