"""The providers of web search. To add a provider, see CONTRIBUTING.md."""

from __future__ import annotations

import asyncio
import html
import logging
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import orjson

from ..http import BodyRefused, read_body
from ..network import failure_reason
from . import ToolContext

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 8 * 1024 * 1024
_MEANINGS = {
    401: "refused this server's key",
    402: "requires payment",
    403: "refused the request",
    429: "limits the rate of requests; try again later",
    432: "has no searches left in this server's plan",  # 432 and 433 are Tavily's
    433: "has no searches left in this server's plan",
}


class SearchFailed(Exception):
    """The search failed. The error's message is sent to the model and the client, so it contains no URL, key or query."""


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One search result. If `url` is empty, `text` is the provider's own text, which cannot be cited."""

    title: str
    url: str
    text: str


@dataclass(frozen=True, slots=True)
class Query:
    """One search for `text`, which has at most 2,000 characters.

    - `count` is the maximum number of results, at most 10.
    - `characters` is the maximum length of a result's text, at most 3,000. `WebSearch` cuts longer texts.
    - `allowed` and `blocked` are domains, at most 100 each. A domain includes its subdomains.
    - `place` is the `user_location` of the tool. Its `country`, if any, is two letters in upper case, not always a country.
    - `thorough` requests a search that may be slower or more expensive.
    """

    text: str
    count: int = 10
    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    place: Mapping[str, str] = field(default_factory=dict)
    thorough: bool = False
    characters: int = 1_000

    def admits(self, url: str) -> bool:
        """Return whether a result with this URL passes the domain filters."""
        if not self.allowed and not self.blocked:
            return True
        try:
            host = plain_host(urlsplit(url).hostname or "")
        except ValueError:
            return False

        def is_within(domains: tuple[str, ...]) -> bool:
            return f".{host}".endswith(tuple(f".{domain}" for domain in domains))

        return (not self.allowed or is_within(self.allowed)) and not is_within(self.blocked)


def plain_host(name: str) -> str:
    """Return the domain `name` as it appears in URLs, in ASCII and lower case. Raises `ValueError` if it is invalid."""
    return name.encode("idna").decode().lower() if not name.isascii() else name.lower()


class SearchProvider:
    """Base class of the search providers. An instance is used in one run.

    `url` is the setting `search.url` or, by default, the provider's `URL`.
    """

    URL: ClassVar[str | None] = None

    def __init__(self, context: ToolContext) -> None:
        settings = context.search
        self.name = settings.provider
        self.url = settings.url or self.URL
        self.key = settings.api_key.get_secret_value() if settings.api_key else ""
        self._http = context.http
        self._timeout = context.settings.timeout

    async def search(self, query: Query) -> list[SearchHit]:
        """Return the results, best first. Raises `SearchFailed` if the provider returns an error or cannot be reached.

        Pass on the filters and limits of `query` that the provider's API supports, so that no results are fetched only to be
        discarded. `WebSearch` applies all of them to the results again.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        """End all searches and release resources."""

    async def fetch(self, method: str, path: str, *, headers: Mapping[str, str], **request: Any) -> dict[str, Any]:
        """Send a request to the provider and return the JSON object in the response.

        `request` are further arguments of `httpx.AsyncClient.stream`, such as `params` or `json`. Raises `SearchFailed` if the
        whole response does not arrive within `tools.timeout`, if its status is not 200, or if its body is compressed, longer
        than `MAX_ANSWER_BYTES` or not a JSON object.
        """
        url, headers = f"{self.url}{path}", {**headers, "accept-encoding": "identity"}
        sent = self._http.stream(method, url, headers=headers, timeout=self._timeout, **request)
        try:
            async with asyncio.timeout(self._timeout), sent as response:
                status = response.status_code
                body = await read_body(response, MAX_ANSWER_BYTES) if status == 200 else b""
        except BodyRefused as error:
            raise self._failed("sent an answer that is compressed or too large", str(error)) from None
        except (TimeoutError, httpx.TimeoutException):
            raise self._failed("did not answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._failed(f"cannot be reached: {failure_reason(error) or type(error).__name__}") from None
        if status != 200:
            raise self._failed(_MEANINGS.get(status, "answered with an error"), f"HTTP {status}")
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise self._failed("did not return a JSON object")
        return answer

    def _failed(self, what: str, detail: str | None = None) -> SearchFailed:
        logger.warning("web search: %s %s%s", self.name, what, f" ({detail})" if detail else "")
        return SearchFailed(f"The search provider {what}.")


def rows_of(answer: Any, *path: str) -> list[dict[str, Any]]:
    """Return the objects in the list at `path`, or no objects if `path` is missing.

    Raises `SearchFailed` if there is another value at `path`.
    """
    for name in path:
        answer = answer.get(name) if isinstance(answer, dict) else answer
        if answer is None:
            return []
    if not isinstance(answer, list):
        raise SearchFailed("The search provider did not return results.")
    return [row for row in answer if isinstance(row, dict)]


def text_of(row: dict[str, Any], *names: str) -> str:
    """Return the first of the members `names` that is a non-blank string, or "" if there is none."""
    return next((value.strip() for name in names if isinstance(value := row.get(name), str) and value.strip()), "")


# -- SearXNG: https://docs.searxng.org/dev/search_api.html ----------------------------------------------------------------


class SearXNG(SearchProvider):
    """SearXNG. The instance's `search.formats` must include `json`.

    If `search.api_key` is set, it is sent as a bearer token for a proxy in front of the instance.
    """

    _MAX_SITES = 10  # sites become operators in the query, whose length search engines limit

    async def search(self, query: Query) -> list[SearchHit]:
        params = {"q": self._with_sites(query), "format": "json"}
        if (country := query.place.get("country", "")) in _COUNTRIES:
            params["language"] = f"{_COUNTRIES[country][1]}-{country}"
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        answer = await self.fetch("GET", "/search", params=params, headers=headers)
        results = rows_of(answer, "results")
        if not results and answer.get("unresponsive_engines"):
            raise SearchFailed("None of the search engines answered.")
        return [SearchHit(text_of(row, "title"), text_of(row, "url"), text_of(row, "content")) for row in results]

    def _with_sites(self, query: Query) -> str:
        """Return the text of the query with the domains as `site:` operators.

        Some search engines ignore the operators. `WebSearch` filters their results.
        """
        if len(query.allowed) + len(query.blocked) > self._MAX_SITES:
            return query.text
        allowed = " OR ".join(f"site:{domain}" for domain in query.allowed)
        if len(query.allowed) > 1:
            allowed = f"({allowed})"
        return " ".join(filter(None, [query.text, allowed, *(f"-site:{domain}" for domain in query.blocked)]))


# -- Tavily: https://docs.tavily.com/documentation/api-reference/endpoint/search ------------------------------------------


class Tavily(SearchProvider):
    """Tavily. For a `thorough` query, the search depth is `advanced`, which costs two credits instead of one."""

    URL = "https://api.tavily.com"

    async def search(self, query: Query) -> list[SearchHit]:
        body: dict[str, Any] = {"query": query.text, "max_results": query.count}
        body["search_depth"] = "advanced" if query.thorough else "basic"
        if query.allowed:
            body["include_domains"] = query.allowed
        if query.blocked:
            body["exclude_domains"] = query.blocked
        if (country := query.place.get("country", "")) in _COUNTRIES:
            body["country"] = _COUNTRIES[country][0]
        answer = await self.fetch("POST", "/search", json=body, headers={"authorization": f"Bearer {self.key}"})
        return [
            SearchHit(text_of(row, "title"), text_of(row, "url"), text_of(row, "content")) for row in rows_of(answer, "results")
        ]


# -- Brave Search: https://api-dashboard.search.brave.com/api-reference/web/search/get ------------------------------------


class Brave(SearchProvider):
    """Brave Search. For a `thorough` query, extra snippets are requested."""

    URL = "https://api.search.brave.com"
    _PLACES = "AR AT AU BE BR CA CH CL CN DE DK ES FI FR GB GR HK ID IN IT JP KR MX MY NL NO NZ PH PL PT RU SA SE TR TW US ZA"
    _MAX_CHARACTERS, _MAX_WORDS = 400, 50

    async def search(self, query: Query) -> list[SearchHit]:
        params = {
            "q": " ".join(query.text.split()[: self._MAX_WORDS])[: self._MAX_CHARACTERS],
            "count": str(query.count),
            "text_decorations": "false",
            "result_filter": "web",
        }
        if query.allowed or query.blocked:
            params["goggles"] = _goggles(query)
        country = query.place.get("country")
        if country and country in self._PLACES:  # Brave rejects other countries
            params["country"] = country
        if query.thorough:
            params["extra_snippets"] = "true"
        headers = {"accept": "application/json", "x-subscription-token": self.key, **_place_headers(query.place)}
        answer = await self.fetch("GET", "/res/v1/web/search", params=params, headers=headers)
        return [_brave_hit(row) for row in rows_of(answer, "web", "results")]


def _goggles(query: Query) -> str:
    """Return the domain filters as a Goggle, which is Brave's format for reranking rules."""
    allowed = ["$discard", *(f"$site={domain}" for domain in query.allowed)] if query.allowed else []
    return "\n".join([*allowed, *(f"$discard,site={domain}" for domain in query.blocked)])


def _place_headers(place: Mapping[str, str]) -> dict[str, str]:
    state = "x-loc-state" if len(place.get("region", "")) <= 3 else "x-loc-state-name"
    headers = {"country": "x-loc-country", "region": state, "city": "x-loc-city", "timezone": "x-loc-timezone"}
    return {header: plain for name, header in headers.items() if (plain := _unaccented(place.get(name, "")))}


def _unaccented(name: str) -> str:
    """Return `name` in ASCII for a header. For example, `Zürich` becomes `Zurich`. Names in other scripts become empty."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().strip()
    return plain if any(character.isalnum() for character in plain) else ""


def _brave_hit(row: dict[str, Any]) -> SearchHit:
    """Convert a result of Brave. Titles and texts contain HTML entities even if `text_decorations` is false."""
    extra = row.get("extra_snippets")
    pieces = [text_of(row, "description"), *(extra if isinstance(extra, list) else ())]
    text = "\n".join(piece for piece in pieces if piece and isinstance(piece, str))
    return SearchHit(html.unescape(text_of(row, "title")), text_of(row, "url"), html.unescape(text))


PROVIDERS: Mapping[str, type[SearchProvider]] = {"searxng": SearXNG, "tavily": Tavily, "brave": Brave}
"""The classes of the providers, by their names in `search.provider`."""


# -- countries: the ISO code, the English name (for Tavily) and the main language (for SearXNG) ----------------------------

_COUNTRY_TABLE = """
AE united arab emirates ar|AR argentina es|AT austria de|AU australia en|BE belgium nl|BG bulgaria bg|BR brazil pt|CA canada en
CH switzerland de|CL chile es|CN china zh|CO colombia es|CZ czech republic cs|DE germany de|DK denmark da|EE estonia et
EG egypt ar|ES spain es|FI finland fi|FR france fr|GB united kingdom en|GR greece el|HR croatia hr|HU hungary hu
ID indonesia id|IE ireland en|IL israel he|IN india en|IS iceland is|IT italy it|JP japan ja|KE kenya en|KR south korea ko
LT lithuania lt|LU luxembourg fr|LV latvia lv|MA morocco ar|MX mexico es|MY malaysia ms|NG nigeria en|NL netherlands nl
NO norway no|NZ new zealand en|PE peru es|PH philippines en|PK pakistan en|PL poland pl|PT portugal pt|RO romania ro
RS serbia sr|RU russia ru|SA saudi arabia ar|SE sweden sv|SG singapore en|SI slovenia sl|SK slovakia sk|TH thailand th
TR turkey tr|TW taiwan zh|UA ukraine uk|US united states en|UY uruguay es|VN vietnam vi|ZA south africa en
"""
_COUNTRIES: Mapping[str, tuple[str, str]] = {
    entry[:2]: (entry[3:-3], entry[-2:]) for entry in _COUNTRY_TABLE.strip().replace("\n", "|").split("|")
}
