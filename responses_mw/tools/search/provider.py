"""Shared by all search providers: the interface, the query and its results, JSON over HTTP, and country names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import httpx
import orjson

from ...http import BodyRefused, read_body
from ...network import failure_reason
from ..tool import ToolResult

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

CallMCP = Callable[[dict[str, Any]], Awaitable[ToolResult]]
"""Calls the configured MCP tool with these arguments."""


class SearchFailed(Exception):
    """The search failed. The message is shown to the model and the client, and contains no URL, key or query."""


@dataclass(frozen=True, slots=True)
class Place:
    """The user's approximate location. ``country`` is a two-letter ISO code in capitals."""

    country: str | None = None
    region: str | None = None
    city: str | None = None
    timezone: str | None = None


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One result. Without a ``url``, it is the provider's own text, which cannot be cited."""

    title: str
    url: str
    text: str


@dataclass(frozen=True, slots=True)
class Query:
    """One search.

    ``count`` is the maximum number of results, and ``characters`` the maximum length of each one's text. ``allowed`` and
    ``blocked`` are domains, including their subdomains. A ``thorough`` search may be slower or more expensive.
    """

    text: str
    count: int = 10
    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    place: Place = Place()
    thorough: bool = False
    characters: int = 1_000

    def admits(self, url: str) -> bool:
        """Return whether the domain filters accept a result with this URL."""
        if not self.allowed and not self.blocked:
            return True
        try:
            host = plain_host(urlsplit(url).hostname or "")
        except ValueError:
            return False
        return (not self.allowed or _is_within(host, self.allowed)) and not _is_within(host, self.blocked)


class SearchProvider(Protocol):
    async def search(self, query: Query) -> list[SearchHit]:
        """Return the results, best first.

        A provider may ignore the filters and limits in ``query``, because the caller applies them again.

        Raises ``SearchFailed``.
        """


@dataclass(frozen=True, slots=True)
class ProviderOptions:
    """The arguments of a provider. ``url`` and ``key`` are the operator's settings; the ``timeout`` is in seconds."""

    http: httpx.AsyncClient
    url: str | None
    key: str
    timeout: float
    call_mcp: CallMCP | None = None

    async def fetch(self, name: str, request: httpx.Request) -> dict[str, Any]:
        """Send ``request`` to the provider ``name`` and return the JSON object it answers with. Raises ``SearchFailed``.

        The whole answer must arrive within the timeout, uncompressed, and have at most ``MAX_ANSWER_BYTES``.
        """
        request.headers["accept-encoding"] = "identity"
        request.extensions["timeout"] = httpx.Timeout(self.timeout).as_dict()
        try:
            async with asyncio.timeout(self.timeout):
                status, body = await _exchange(self.http, request)
        except BodyRefused as error:
            raise _failed(name, "sent an answer that is compressed or too large", str(error)) from None
        except (TimeoutError, httpx.TimeoutException):
            raise _failed(name, "did not answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _failed(name, f"cannot be reached: {failure_reason(error) or type(error).__name__}") from None
        if status != 200:
            raise _failed(name, _MEANINGS.get(status, "answered with an error"), f"HTTP {status}")
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise _failed(name, "did not return a JSON object")
        return answer


async def _exchange(http: httpx.AsyncClient, request: httpx.Request) -> tuple[int, bytes]:
    """Return status and body. The body of an error is not read. Raises ``BodyRefused``."""
    response = await http.send(request, stream=True)
    try:
        if response.status_code != 200:
            return response.status_code, b""
        return 200, await read_body(response, MAX_ANSWER_BYTES)
    finally:
        await response.aclose()


def _failed(name: str, what: str, detail: str | None = None) -> SearchFailed:
    logger.warning("web search: %s %s%s", name, what, f" ({detail})" if detail else "")
    return SearchFailed(f"The search provider {what}.")


def rows(answer: Any, *path: str) -> list[dict[str, Any]]:
    """Return the objects of the list at ``path``, or none if it is missing. Raises ``SearchFailed`` if it is not a list."""
    for name in path:
        answer = answer.get(name) if isinstance(answer, dict) else answer
        if answer is None:
            return []
    if not isinstance(answer, list):
        raise SearchFailed("The search provider did not return results.")
    return [row for row in answer if isinstance(row, dict)]


def text(row: dict[str, Any], *names: str) -> str:
    """Return the first non-blank string among these members."""
    return next((value.strip() for name in names if isinstance(value := row.get(name), str) and value.strip()), "")


def plain_host(name: str) -> str:
    """Return a domain in the form used in URLs: ASCII, lower case. Raises ``ValueError`` for an invalid domain."""
    return name.encode("idna").decode().lower() if not name.isascii() else name.lower()


def _is_within(host: str, domains: tuple[str, ...]) -> bool:
    return any(host == domain or host.endswith(f".{domain}") for domain in domains)


# -- countries ------------------------------------------------------------------------------------------------------------


class Country(NamedTuple):
    name: str
    """In English, as Tavily expects it."""
    language: str
    """The main language, as SearXNG expects it."""


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


def _parse_country(entry: str) -> tuple[str, Country]:
    code, *name, language = entry.split()
    return code, Country(" ".join(name), language)


COUNTRIES = dict(_parse_country(entry) for line in _COUNTRY_TABLE.split("\n") for entry in line.split("|") if entry)
"""Countries by ISO code."""
