"""The search providers, each with a server that imitates its API, and with servers that fail."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw.settings.groups import SEARCH_PROVIDERS
from responses_mw.tools import search
from responses_mw.tools.search import MAX_ANSWER_BYTES, Query, SearchFailed, SearchHit, SearchProvider
from responses_mw.tools.web_search import WebSearch
from tests.support.configured import make_settings
from tests.support.paths import ROOT
from tests.support.scripted import Signal
from tests.support.search_servers import SEARXNG, SearchServer

from .context import context

if TYPE_CHECKING:
    from tests.support.servers import Serve

TAVILY = {
    "query": "capital of france",
    "follow_up_questions": None,
    "answer": None,
    "images": [],
    "results": [
        {
            "url": "https://en.wikipedia.org/wiki/Paris",
            "title": "Paris - Wikipedia",
            "content": "Paris is the capital and largest city of France.",
            "score": 0.91,
            "raw_content": None,
        },
        {
            "url": "https://www.britannica.com/place/Paris",
            "title": "Paris | Definition, Map, Population",
            "content": "Paris, city and capital of France.",
            "score": 0.83,
            "raw_content": None,
        },
    ],
    "response_time": 1.09,
    "request_id": "123e4567-e89b-12d3-a456-426614174111",
}

BRAVE = {
    "type": "search",
    "query": {"original": "capital of france", "show_strict_warning": False, "country": "us", "more_results_available": True},
    "mixed": {"type": "mixed", "main": [{"type": "web", "index": 0, "all": False}], "top": [], "side": []},
    "web": {
        "type": "search",
        "family_friendly": True,
        "results": [
            {
                "title": "Paris - Wikipedia",
                "url": "https://en.wikipedia.org/wiki/Paris",
                "is_source_local": False,
                "is_source_both": False,
                "description": "Paris is the capital &amp; largest city of France. It&#x27;s on the Seine.",
                "page_age": "2026-10-01T10:00:00",
                "profile": {"name": "Wikipedia", "url": "https://en.wikipedia.org/wiki/Paris", "long_name": "en.wikipedia.org"},
                "language": "en",
                "family_friendly": True,
                "type": "search_result",
                "subtype": "generic",
                "meta_url": {"scheme": "https", "netloc": "en.wikipedia.org", "hostname": "en.wikipedia.org", "path": "› wiki"},
                "extra_snippets": ["The City of Paris is the centre of the &Icirc;le-de-France region."],
            },
            {
                "title": "Paris | Definition, Map, Population",
                "url": "https://www.britannica.com/place/Paris",
                "description": "Paris, city and capital of France.",
                "type": "search_result",
            },
        ],
    },
}


@dataclass(frozen=True)
class Sample:
    """A sample answer of a provider's API, and the requests that it gets with the key `secret-key`."""

    answer: dict[str, Any]
    method: str
    path: str
    key: dict[str, str]
    """The header that carries the key."""
    requests: Sequence[tuple[Query, dict[str, Any]]]
    """Queries, and the query string or the JSON body that each becomes."""
    url: str = ""
    """The default of `search.url`, or "" if the setting is required."""


BRAVE_ALWAYS = {"text_decorations": "false", "result_filter": "web"}
PLACE = {"country": "CH", "region": "Kanton Zürich", "city": "Zürich", "timezone": "Europe/Zurich"}
SAMPLES = {
    "searxng": Sample(
        SEARXNG,
        "GET",
        "/search",
        {"authorization": "Bearer secret-key"},
        [
            (Query("wetter", place={"country": "AT", "city": "Wien"}), {"q": "wetter", "format": "json", "language": "de-AT"}),
            (Query("a", 3, place={"country": "XK"}, thorough=True, characters=500), {"q": "a", "format": "json"}),
            (Query("a", allowed=("x.com",)), {"q": "a site:x.com", "format": "json"}),
            (Query("a", blocked=("y.com", "z.com")), {"q": "a -site:y.com -site:z.com", "format": "json"}),
            (
                Query("a", allowed=("x.com", "y.com"), blocked=("z.com",)),
                {"q": "a (site:x.com OR site:y.com) -site:z.com", "format": "json"},
            ),
            (Query("a", allowed=tuple(f"x{n}.com" for n in range(11))), {"q": "a", "format": "json"}),
        ],
    ),
    "tavily": Sample(
        TAVILY,
        "POST",
        "/search",
        {"authorization": "Bearer secret-key"},
        [
            (Query("a", 3, place={"country": "XK"}, characters=500), {"query": "a", "max_results": 3, "search_depth": "basic"}),
            (
                Query("a", place={"country": "GB", "timezone": "Europe/London"}, thorough=True),
                {"query": "a", "max_results": 10, "search_depth": "advanced", "country": "united kingdom"},
            ),
            (
                Query("a", allowed=("x.com",)),
                {"query": "a", "max_results": 10, "search_depth": "basic", "include_domains": ["x.com"]},
            ),
            (
                Query("a", blocked=("y.com", "z.com")),
                {"query": "a", "max_results": 10, "search_depth": "basic", "exclude_domains": ["y.com", "z.com"]},
            ),
            (
                Query("a", allowed=("x.com",), blocked=("y.x.com",)),
                {
                    "query": "a",
                    "max_results": 10,
                    "search_depth": "basic",
                    "include_domains": ["x.com"],
                    "exclude_domains": ["y.x.com"],
                },
            ),
        ],
        "https://api.tavily.com",
    ),
    "brave": Sample(
        BRAVE,
        "GET",
        "/res/v1/web/search",
        {"x-subscription-token": "secret-key"},
        [
            (Query("a", 3, place={"country": "XK"}, characters=500), {"q": "a", "count": "3", **BRAVE_ALWAYS}),
            (Query("a", allowed=("x.com",)), {"q": "a", "count": "10", "goggles": "$discard\n$site=x.com", **BRAVE_ALWAYS}),
            (Query("a", blocked=("z.com",)), {"q": "a", "count": "10", "goggles": "$discard,site=z.com", **BRAVE_ALWAYS}),
            (
                Query("a", 10, ("x.com", "y.com"), ("z.com",), PLACE, thorough=True),
                {
                    "q": "a",
                    "count": "10",
                    **BRAVE_ALWAYS,
                    "goggles": "$discard\n$site=x.com\n$site=y.com\n$discard,site=z.com",
                    "country": "CH",
                    "extra_snippets": "true",
                },
            ),
        ],
        "https://api.search.brave.com",
    ),
}
Open = Callable[..., SearchProvider]


def test_every_provider_has_a_class_a_setting_tests_and_a_row_in_the_docs() -> None:
    assert set(search.PROVIDERS) == set(SEARCH_PROVIDERS) - {"none"} == set(SAMPLES)
    page, changes = ((ROOT / name).read_text().lower() for name in ("docs/guides/tools.md", "CHANGELOG.md"))
    assert [name for name in search.PROVIDERS if f"| `{name}` |" not in page or name not in changes] == []


def open_provider(http: httpx.AsyncClient, name: str, **settings: Any) -> SearchProvider:
    """Return the provider with this name in the settings."""
    return search.PROVIDERS[name](context(make_settings(search__provider=name, **settings), http))


class Recorder(httpx.AsyncBaseTransport):
    """Return no results, and record the URL of the request."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.url = request.url
        return httpx.Response(200, stream=httpx.ByteStream(b"{}"))


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if sample.url])
async def test_a_provider_has_a_default_url(name: str) -> None:
    recorder = Recorder()
    async with httpx.AsyncClient(transport=recorder) as client:
        assert await open_provider(client, name, search__api_key="secret-key").search(Query("a")) == []
    assert str(recorder.url.copy_with(query=None)) == SAMPLES[name].url + SAMPLES[name].path


@pytest.fixture
def server() -> SearchServer:
    return SearchServer()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        yield client


@pytest.fixture
def provider(serve: Serve, server: SearchServer, http: httpx.AsyncClient) -> Open:
    """Return a function that opens a provider by name, with `server` as its server."""

    def make(name: str, **settings: Any) -> SearchProvider:
        server.answer = SAMPLES[name].answer if server.answer is None else server.answer
        return open_provider(http, name, search__url=serve(server) + "/", search__api_key="secret-key", **settings)

    return make


@pytest.mark.parametrize("name", SAMPLES)
async def test_the_results_of_every_provider_are_parsed(provider: Open, name: str) -> None:
    found = await provider(name).search(Query("capital of france"))
    assert [(one.title, one.url) for one in found] == [
        ("Paris - Wikipedia", "https://en.wikipedia.org/wiki/Paris"),
        ("Paris | Definition, Map, Population", "https://www.britannica.com/place/Paris"),
    ]
    assert all("capital" in one.text for one in found)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample_covers_each_kind_of_query(name: str) -> None:
    queries = [query for query, _ in SAMPLES[name].requests]
    assert {(bool(query.allowed), bool(query.blocked)) for query in queries} == set(product([False, True], repeat=2))
    assert any(query.thorough for query in queries)
    assert len({query.count for query in queries}) > 1
    assert len({query.characters for query in queries}) > 1
    countries = {query.place["country"] for query in queries if query.place}
    assert "XK" in countries
    assert len(countries) > 1


@pytest.mark.parametrize(
    ("name", "query", "sent"),
    [
        pytest.param(name, query, sent, id=f"{name} {number}")
        for name, sample in SAMPLES.items()
        for number, (query, sent) in enumerate(sample.requests)
    ],
)
async def test_a_query_is_sent_in_the_form_of_the_providers_api(
    provider: Open, server: SearchServer, name: str, query: Query, sent: dict[str, Any]
) -> None:
    await provider(name).search(query)
    (asked,), sample = server.asked, SAMPLES[name]
    assert (asked.method, asked.path, asked.json or asked.parameters) == (sample.method, sample.path, sent)
    assert asked.headers.items() >= sample.key.items()


# -- single providers ----------------------------------------------------------------------------------------------------


async def test_searxng_without_results_fails_if_some_engines_did_not_respond(
    provider: Open, server: SearchServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.answer = {**SEARXNG, "results": []}
    with pytest.raises(SearchFailed, match="found nothing, and some of its engines did not answer"):
        await provider("searxng").search(Query("a"))
    assert "duckduckgo" in caplog.text
    server.answer = {**SEARXNG, "results": [], "unresponsive_engines": []}
    assert await provider("searxng").search(Query("a")) == []


async def test_brave_receives_the_location_as_headers_and_its_snippets_are_joined(provider: Open, server: SearchServer) -> None:
    found = await provider("brave").search(Query("a", place=PLACE))
    place_headers = {name: value for name, value in server.asked[0].headers.items() if name.startswith("x-loc-")}
    assert place_headers == {
        "x-loc-country": "CH",
        "x-loc-state-name": "Kanton Zurich",
        "x-loc-city": "Zurich",
        "x-loc-timezone": "Europe/Zurich",
    }
    assert found[0].text.splitlines() == [
        "Paris is the capital & largest city of France. It's on the Seine.",
        "The City of Paris is the centre of the Île-de-France region.",
    ]


async def test_queries_are_trimmed_to_what_brave_accepts(provider: Open, server: SearchServer) -> None:
    brave = provider("brave")
    await brave.search(Query("word " * 80, place={"country": "IS", "region": "CA", "city": "東京"}))
    await brave.search(Query("x" * 500))
    first, second = server.asked
    assert "country" not in first.parameters
    assert len(first.parameters["q"].split()) == 50
    assert len(second.parameters["q"]) == 400
    assert first.headers["x-loc-state"] == "CA"
    assert first.headers["x-loc-country"] == "IS"
    assert "x-loc-city" not in first.headers


async def test_a_brave_text_that_cannot_be_unescaped_is_returned_unchanged(provider: Open, server: SearchServer) -> None:
    text = f"&#{'9' * 5000};"
    server.answer = {"web": {"results": [{"title": text, "url": "https://a.example/", "description": text}]}}
    assert await provider("brave").search(Query("a")) == [SearchHit(text, "https://a.example/", text)]


async def test_a_brave_response_without_web_results_is_empty(provider: Open, server: SearchServer) -> None:
    server.answer = {"type": "search", "query": {"original": "a"}}
    assert await provider("brave").search(Query("a")) == []


async def test_malformed_members_of_a_brave_result_are_ignored(provider: Open, server: SearchServer) -> None:
    server.answer = {
        "web": {"results": [None, 1, {"title": 5, "url": "https://a", "description": None, "extra_snippets": [1, "b"]}]}
    }
    assert await provider("brave").search(Query("a")) == [SearchHit("", "https://a", "b")]


# -- servers that fail ---------------------------------------------------------------------------------------------------


def lists_as(instead: Any) -> Callable[[Any], Any]:
    """Return a function that copies an answer with `instead` in place of each list."""

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return instead
        return {name: copied(member) for name, member in value.items()} if isinstance(value, dict) else value

    return copied


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(
    ("status", "meaning"),
    [(401, "key"), (402, "payment"), (403, "refused"), (429, "limits the rate"), (432, "plan"), (500, "error"), (302, "error")],
)
async def test_a_provider_error_is_reported_without_its_details(
    provider: Open, server: SearchServer, name: str, status: int, meaning: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.status, server.answer = status, {"detail": {"error": "the key secret-key is bad for 'my query'"}}
    server.headers = {"location": "http://127.0.0.1:1/"}
    with pytest.raises(SearchFailed, match=meaning) as caught:
        await provider(name).search(Query("my query"))
    for told in (str(caught.value), caplog.text):
        assert "secret-key" not in told
        assert "my query" not in told
    assert f"{name} " in caplog.text
    assert len(server.asked) == 1


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(
    "answer",
    [b"", b"<html>", b"{", [1], "text", 7, lists_as(5), lists_as("x"), lists_as([3]), lists_as({"a": 1})],
    ids=["empty", "html", "cut", "array", "string", "number", "number as list", "string as list", "list of numbers", "object"],
)
async def test_a_malformed_answer_is_a_failure_or_an_empty_result(
    provider: Open, server: SearchServer, name: str, answer: Any
) -> None:
    server.answer = answer(SAMPLES[name].answer) if callable(answer) else answer
    try:
        found = await provider(name).search(Query("a"))
    except SearchFailed:
        return
    assert found == []


def strings_as(instead: Any, value: Any) -> Any:
    """Return a copy of `value` with `instead` in place of each string."""
    if isinstance(value, list):
        return [strings_as(instead, member) for member in value]
    if isinstance(value, dict):
        return {name: strings_as(instead, member) for name, member in value.items()}
    return instead if isinstance(value, str) else value


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("instead", [None, 5, {}])
async def test_members_that_should_be_strings_are_read_as_empty(
    provider: Open, server: SearchServer, name: str, instead: Any
) -> None:
    server.answer = strings_as(instead, SAMPLES[name].answer)
    assert set(await provider(name).search(Query("a"))) <= {SearchHit("", "", "")}


@pytest.mark.parametrize("name", SAMPLES)
async def test_a_provider_that_does_not_respond_times_out(provider: Open, server: SearchServer, name: str) -> None:
    server.before = Signal()
    with pytest.raises(SearchFailed, match="in time"):
        await provider(name, tools__timeout=0.05).search(Query("a"))


async def test_an_unreachable_provider_is_reported(http: httpx.AsyncClient) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(SearchFailed, match="cannot be reached"):
        await open_provider(http, "searxng", search__url=url).search(Query("a"))


async def test_an_answer_that_is_too_large_is_rejected(provider: Open, server: SearchServer) -> None:
    server.answer = b'{"results": []' + b" " * MAX_ANSWER_BYTES + b"}"
    with pytest.raises(SearchFailed, match="too large"):
        await provider("searxng").search(Query("a"))


async def test_a_compressed_answer_is_rejected(provider: Open, server: SearchServer) -> None:
    server.headers = {"content-encoding": "gzip"}
    server.answer = gzip.compress(b'{"results": []}')
    with pytest.raises(SearchFailed, match="compressed"):
        await provider("searxng").search(Query("a"))
    assert server.asked[0].headers["accept-encoding"] == "identity"


async def test_a_search_can_be_cancelled(provider: Open, server: SearchServer) -> None:
    server.before = Signal()
    task = asyncio.create_task(provider("searxng").search(Query("a")))
    while not server.asked:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_web_search_offers_no_function_without_a_provider() -> None:
    assert await WebSearch({"type": "web_search"}, context(make_settings())).open() == []
