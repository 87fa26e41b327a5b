"""Brave Search (https://api-dashboard.search.brave.com/api-reference/web/search/get)."""

from __future__ import annotations

import html
import unicodedata
from dataclasses import dataclass
from typing import Any

import httpx

from .fetch import fetch, rows, text
from .query import Found, Place, Query

URL = "https://api.search.brave.com"
_COUNTRIES = "AR AT AU BE BR CA CH CL CN DE DK ES FI FR GB GR HK ID IN IT JP KR MX MY NL NO NZ PH PL PT RU SA SE TR TW US ZA"
_MOST_RESULTS = 20
_MOST_CHARACTERS, _MOST_WORDS = 400, 50
_LONGEST_STATE_CODE = 3


@dataclass(frozen=True, slots=True)
class Brave:
    http: httpx.AsyncClient
    url: str
    key: str
    patience: float

    async def search(self, query: Query) -> list[Found]:
        parameters = {
            "q": " ".join(query.text.split()[:_MOST_WORDS])[:_MOST_CHARACTERS],
            "count": str(min(query.count, _MOST_RESULTS)),
            "text_decorations": "false",
            "result_filter": "web",
        }
        if query.allowed or query.blocked:
            parameters["goggles"] = _goggles(query)
        if query.place.country and query.place.country in _COUNTRIES:  # any other is an error there
            parameters["country"] = query.place.country
        if query.thorough:
            parameters["extra_snippets"] = "true"
        headers = {"accept": "application/json", "x-subscription-token": self.key, **_place_headers(query.place)}
        request = self.http.build_request("GET", f"{self.url}/res/v1/web/search", params=parameters, headers=headers)
        answer = await fetch(self.http, "brave", request, patience=self.patience)
        return [_found(row) for row in rows(answer, "web", "results")]


def _goggles(query: Query) -> str:
    """The filters as rules of a goggle: nothing but the allowed domains, or all but the blocked ones."""
    allowed = ["$discard", *(f"$site={domain}" for domain in query.allowed)] if query.allowed else []
    return "\n".join([*allowed, *(f"$discard,site={domain}" for domain in query.blocked)])


def _place_headers(place: Place) -> dict[str, str]:
    region = place.region or ""
    state = "x-loc-state" if len(region) <= _LONGEST_STATE_CODE else "x-loc-state-name"
    headers = {
        "x-loc-country": place.country,
        state: region,
        "x-loc-city": place.city,
        "x-loc-timezone": place.timezone,
    }
    return {name: plain for name, value in headers.items() if value and (plain := _unaccented(value))}


def _unaccented(name: str) -> str:
    """A name as a header can carry it: ``Zürich`` becomes ``Zurich``. Empty for one in another script."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().strip()
    return plain if any(character.isalnum() for character in plain) else ""


def _found(row: dict[str, Any]) -> Found:
    """Titles and texts come with HTML's entities, even without decorations."""
    extra = row.get("extra_snippets")
    pieces = [
        text(row, "description"),
        *(piece for piece in (extra if isinstance(extra, list) else ()) if isinstance(piece, str)),
    ]
    return Found(html.unescape(text(row, "title")), text(row, "url"), html.unescape("\n".join(filter(None, pieces))))
