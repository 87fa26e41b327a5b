"""Brave Search (https://api-dashboard.search.brave.com/api-reference/web/search/get)."""

from __future__ import annotations

import html
import unicodedata
from dataclasses import dataclass
from typing import Any

from .provider import Place, ProviderOptions, Query, SearchHit, rows, text

_URL = "https://api.search.brave.com"
_COUNTRIES = "AR AT AU BE BR CA CH CL CN DE DK ES FI FR GB GR HK ID IN IT JP KR MX MY NL NO NZ PH PL PT RU SA SE TR TW US ZA"
_MAX_RESULTS = 20
_MAX_CHARACTERS, _MAX_WORDS = 400, 50
_MAX_STATE_CODE = 3


@dataclass(frozen=True, slots=True)
class Provider:
    options: ProviderOptions

    async def search(self, query: Query) -> list[SearchHit]:
        parameters = {
            "q": " ".join(query.text.split()[:_MAX_WORDS])[:_MAX_CHARACTERS],
            "count": str(min(query.count, _MAX_RESULTS)),
            "text_decorations": "false",
            "result_filter": "web",
        }
        if query.allowed or query.blocked:
            parameters["goggles"] = _goggles(query)
        if query.place.country and query.place.country in _COUNTRIES:  # Brave rejects any other
            parameters["country"] = query.place.country
        if query.thorough:
            parameters["extra_snippets"] = "true"
        headers = {"accept": "application/json", "x-subscription-token": self.options.key, **_place_headers(query.place)}
        url = f"{self.options.url or _URL}/res/v1/web/search"
        request = self.options.http.build_request("GET", url, params=parameters, headers=headers)
        answer = await self.options.fetch("brave", request)
        return [_hit(row) for row in rows(answer, "web", "results")]


def _goggles(query: Query) -> str:
    """Return the domain filters as a goggle (Brave's rules for reranking)."""
    allowed = ["$discard", *(f"$site={domain}" for domain in query.allowed)] if query.allowed else []
    return "\n".join([*allowed, *(f"$discard,site={domain}" for domain in query.blocked)])


def _place_headers(place: Place) -> dict[str, str]:
    region = place.region or ""
    state = "x-loc-state" if len(region) <= _MAX_STATE_CODE else "x-loc-state-name"
    headers = {
        "x-loc-country": place.country,
        state: region,
        "x-loc-city": place.city,
        "x-loc-timezone": place.timezone,
    }
    return {name: plain for name, value in headers.items() if value and (plain := _unaccented(value))}


def _unaccented(name: str) -> str:
    """Return a name in ASCII, for a header: ``Zürich`` becomes ``Zurich``. Names in other scripts become empty."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().strip()
    return plain if any(character.isalnum() for character in plain) else ""


def _hit(row: dict[str, Any]) -> SearchHit:
    """Convert a result. Titles and texts contain HTML entities even without decorations."""
    extra = row.get("extra_snippets")
    pieces = [
        text(row, "description"),
        *(piece for piece in (extra if isinstance(extra, list) else ()) if isinstance(piece, str)),
    ]
    return SearchHit(html.unescape(text(row, "title")), text(row, "url"), html.unescape("\n".join(filter(None, pieces))))
