"""Web search providers. To add one, see docs/recipes/search-provider.md."""

from __future__ import annotations

import asyncio
import html
import logging
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import orjson

from ..http import BodyRefused, read_body
from ..network import failure_reason
from ..redaction import redacted
from . import ToolContext

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 8 * 1024 * 1024
_MAX_DETAIL = 500
MAX_SITES = 10
"""Maximum number of domains in the text of a query, whose length search engines limit."""
_MEANINGS = {
    401: "refused this server's key",
    402: "requires payment",
    403: "refused the request",
    429: "limits the rate of requests; try again later",
    432: "has no searches left in this server's plan",  # 432 and 433 are Tavily's
    433: "has no searches left in this server's plan",
}


class SearchFailed(Exception):
    """A search failed. The model and the client receive the message, so it must not contain a URL, a key or the query."""


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One search result. Without a `url`, `text` is the provider's own text, which cannot be cited."""

    title: str
    url: str
    text: str


@dataclass(frozen=True, slots=True)
class Query:
    """One search. `allowed` and `blocked` are up to 100 domains each, including their subdomains; () means no filter."""

    text: str  # at most 2,000 characters; `web_search` sets this and the other limits
    count: int = 10  # maximum number of results, at most 10
    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    place: Mapping[str, str] = field(default_factory=dict)
    """The tool's `user_location`. Its `country` may be missing, "", or any two capital letters, even of no country."""
    thorough: bool = False
    """Set for `search_context_size: high`: the search may be slower, and cost up to twice as much."""
    characters: int = 1_000
    """Maximum length of a result's text, at most 3,000. `WebSearch` cuts longer texts and marks the cut.

    If the provider's API can limit texts, request one character more, so that `WebSearch` notices a cut.
    """

    def with_sites(self) -> str:
        """Return the text with the domains as the operators `site:` and `-site:`. Above `MAX_SITES`, omit all domains."""
        if len(self.allowed) + len(self.blocked) > MAX_SITES:
            return self.text
        allowed = " OR ".join(f"site:{domain}" for domain in self.allowed)
        if len(self.allowed) > 1:
            allowed = f"({allowed})"
        return " ".join(filter(None, [self.text, allowed, *(f"-site:{domain}" for domain in self.blocked)]))

    def admits(self, url: str) -> bool:
        """Return whether a result with this URL passes the domain filters."""
        if not self.allowed and not self.blocked:
            return True
        try:
            host = plain_host(urlsplit(url).hostname or "").removesuffix(".")
        except ValueError:
            return False

        def is_within(domains: tuple[str, ...]) -> bool:
            return f".{host}".endswith(tuple(f".{domain}" for domain in domains))

        return (not self.allowed or is_within(self.allowed)) and not is_within(self.blocked)


def plain_host(name: str) -> str:
    """Return the domain `name` in ASCII and lower case, as in URLs. Raises `ValueError` if `name` cannot be encoded."""
    return name.encode("idna").decode().lower() if not name.isascii() else name.lower()


class SearchProvider:
    """Base class of the search providers. An instance is used in one run."""

    NAME: ClassVar[str] = ""
    """The provider's key in `SEARCH_PROVIDERS` of the settings."""
    URL: ClassVar[str | None] = None
    """The default of the setting `search.url`, or None if there is none."""

    def __init__(self, context: ToolContext) -> None:
        settings = context.search
        self.name = settings.provider
        self.url = settings.url or self.URL
        self.key = settings.api_key.get_secret_value() if settings.api_key else ""
        self._http = context.http
        self._timeout = context.settings.timeout

    async def search(self, query: Query) -> list[SearchHit]:
        """Return the results, best first. Raises `SearchFailed` if the provider returns an error or cannot be reached.

        Send the members of `query` that the provider's API supports. `count`, `allowed`, `blocked` and `characters` may be left
        out, because `WebSearch.call` enforces them. `place` and `thorough` have an effect only if they are sent.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        """Release the provider's own resources. By default, there are none."""

    async def fetch(self, method: str, path: str, *, headers: Mapping[str, str], **request: Any) -> dict[str, Any]:
        """Send a request to the provider and return the JSON object in the response.

        `request` are further arguments of `httpx.AsyncClient.stream`, such as `params` or `json`. An uncompressed object of at
        most `MAX_ANSWER_BYTES` must arrive with the status 200 within `tools.timeout`. Otherwise, `SearchFailed` is raised.
        """
        headers = {**headers, "accept-encoding": "identity"}
        sent = self._http.stream(method, f"{self.url}{path}", headers=headers, timeout=self._timeout, **request)
        try:
            answer = orjson.loads(await self._body(sent))
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise self._log_failure("did not return a JSON object")
        return answer

    async def _body(self, sent: AbstractAsyncContextManager[httpx.Response]) -> bytes:
        try:
            async with asyncio.timeout(self._timeout), sent as response:
                status = response.status_code
                if status == 200:
                    return await read_body(response, MAX_ANSWER_BYTES)
        except BodyRefused as error:
            raise self._log_failure("sent an answer that is compressed or too large", str(error)) from None
        except (TimeoutError, httpx.TimeoutException):
            raise self._log_failure("did not answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._log_failure(f"cannot be reached: {failure_reason(error) or type(error).__name__}") from None
        raise self._log_failure(_MEANINGS.get(status, "answered with an error"), f"HTTP {status}")

    def _log_failure(self, what: str, detail: str | None = None) -> SearchFailed:
        logger.warning("web search: %s %s%s", self.name, what, f" ({redacted(detail)})" if detail else "")
        return SearchFailed(f"The search provider {what}.")


def rows_of(answer: Any, *path: str) -> list[dict[str, Any]]:
    """Return the objects in the list at `path`, or [] if the list is missing. Raises `SearchFailed` if it is not a list."""
    for name in path:
        answer = answer.get(name) if isinstance(answer, dict) else answer
        if answer is None:
            return []
    if not isinstance(answer, list):
        raise SearchFailed("The search provider did not return results.")
    return [row for row in answer if isinstance(row, dict)]


def hits_of(rows: Iterable[dict[str, Any]], *, text_member: str) -> list[SearchHit]:
    """Return the results in `rows`, which have a `url`, a `title`, and a text or texts in `text_member`."""
    return [SearchHit(text_of(row, "title"), text_of(row, "url"), texts_of(row, text_member)) for row in rows]


def text_of(row: dict[str, Any], *names: str) -> str:
    """Return the first non-blank string among the members `names` of `row`, stripped, or "" if there is none."""
    return next((value.strip() for name in names if isinstance(value := row.get(name), str) and value.strip()), "")


def texts_of(row: dict[str, Any], *names: str) -> str:
    """Return the non-blank strings in the members `names` of `row`, one per line. A member is a string or a list of strings."""
    members = (value if isinstance(value := row.get(name), list) else [value] for name in names)
    return "\n".join(text.strip() for member in members for text in member if isinstance(text, str) and text.strip())


# -- countries ---------------------------------------------------------------------------------------------------------------

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
"""English names and main languages of the countries that search engines know best, by ISO code."""


# -- SearXNG: https://docs.searxng.org/dev/search_api.html ----------------------------------------------------------------


class SearXNG(SearchProvider):
    """A SearXNG instance. Its `settings.yml` must include `json` in `search.formats`.

    If `search.api_key` is set, it is sent as a bearer token, which a reverse proxy in front of the instance can check.
    """

    NAME = "searxng"

    async def search(self, query: Query) -> list[SearchHit]:
        params = {"q": query.with_sites(), "format": "json"}
        if (country := query.place.get("country", "")) in _COUNTRIES:
            params["language"] = f"{_COUNTRIES[country][1]}-{country}"
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        answer = await self.fetch("GET", "/search", params=params, headers=headers)
        hits = hits_of(rows_of(answer, "results"), text_member="content")
        if not hits and (silent := answer.get("unresponsive_engines")):
            raise self._log_failure("found nothing, and some of its engines did not answer", str(silent)[:_MAX_DETAIL])
        return hits


# -- Tavily: https://docs.tavily.com/documentation/api-reference/endpoint/search ------------------------------------------


class Tavily(SearchProvider):
    """Tavily. For a `thorough` query, the search depth is `advanced`, which costs two credits instead of one."""

    NAME = "tavily"
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
        return hits_of(rows_of(answer, "results"), text_member="content")


# -- Brave Search: https://api-dashboard.search.brave.com/api-reference/web/search/get ------------------------------------


class Brave(SearchProvider):
    """Brave Search. For a `thorough` query, extra snippets are requested."""

    NAME = "brave"
    URL = "https://api.search.brave.com"
    _PLACES = "AR AT AU BE BR CA CH CL CN DE DK ES FI FR GB GR HK ID IN IT JP KR MX MY NL NO NZ PH PL PT RU SA SE TR TW US ZA"
    _MAX_CHARACTERS, _MAX_WORDS = 400, 50

    async def search(self, query: Query) -> list[SearchHit]:
        text = " ".join(query.text.split()[: self._MAX_WORDS])[: self._MAX_CHARACTERS]
        params = {"q": text, "count": str(query.count), "text_decorations": "false", "result_filter": "web"}
        if query.allowed or query.blocked:  # a Goggle, which is Brave's format for reranking rules
            allowed = ["$discard", *(f"$site={domain}" for domain in query.allowed)] if query.allowed else []
            params["goggles"] = "\n".join([*allowed, *(f"$discard,site={domain}" for domain in query.blocked)])
        country = query.place.get("country")
        if country and country in self._PLACES:  # Brave rejects other countries
            params["country"] = country
        if query.thorough:
            params["extra_snippets"] = "true"
        headers = {"accept": "application/json", "x-subscription-token": self.key, **_place_headers(query.place)}
        answer = await self.fetch("GET", "/res/v1/web/search", params=params, headers=headers)
        return [_brave_hit(row) for row in rows_of(answer, "web", "results")]


def _place_headers(place: Mapping[str, str]) -> dict[str, str]:
    state = "x-loc-state" if len(place.get("region", "")) <= 3 else "x-loc-state-name"
    headers = {"country": "x-loc-country", "region": state, "city": "x-loc-city", "timezone": "x-loc-timezone"}
    return {header: plain for name, header in headers.items() if (plain := _unaccented(place.get(name, "")))}


def _unaccented(name: str) -> str:
    """Return `name` in ASCII for a header, such as `Zurich` for `Zürich`. Names in other scripts become empty."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().strip()
    return plain if any(character.isalnum() for character in plain) else ""


def _brave_hit(row: dict[str, Any]) -> SearchHit:
    # Titles and texts contain HTML entities, even if `text_decorations` is false.
    text = _unescaped(texts_of(row, "description", "extra_snippets"))
    return SearchHit(_unescaped(text_of(row, "title")), text_of(row, "url"), text)


def _unescaped(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:  # a numeric entity with thousands of digits
        return text


PROVIDERS: Mapping[str, type[SearchProvider]] = {kind.NAME: kind for kind in SearchProvider.__subclasses__() if kind.NAME}
"""Provider classes by their names in `search.provider`."""
