"""The web search tool: validation, results for the model and the caller, and numbering."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseFunctionWebSearch
from pydantic import ValidationError

from responses_mw import Settings
from responses_mw.errors import BadRequest
from responses_mw.protocol.search_results import sources_of
from responses_mw.protocol.tool_kinds.registry import WEB_SEARCH
from responses_mw.settings.groups import SEARCH_PROVIDERS
from responses_mw.tools.search import Query, SearchFailed, SearchHit, SearchProvider
from responses_mw.tools.web_search import WebSearch
from tests.support.configured import make_settings

from .context import context

TAVILY = make_settings(search__provider="tavily", search__api_key="secret")


class Shelf(SearchProvider):
    """A provider that returns the given results for every query."""

    def __init__(self, *found: SearchHit, error: str | None = None) -> None:
        self.found, self.error = list(found), error
        self.queries: list[Query] = []

    async def search(self, query: Query) -> list[SearchHit]:
        self.queries.append(query)
        if self.error:
            raise SearchFailed(self.error)
        return self.found


A = SearchHit("A", "https://a.example/1", "about a")
B = SearchHit("B", "https://b.example/1", "about b")
C = SearchHit("C", "https://sub.a.example/1", "about c")


def search(shelf: Shelf, settings: Settings = TAVILY, earlier: Any = (), **tool: Any) -> WebSearch:
    search = WebSearch(check({"type": "web_search", **tool}), context(settings, earlier=earlier))
    search.provider = shelf
    return search


def check(tool: dict[str, Any], path: str = "tools[0]") -> dict[str, Any]:
    return WebSearch.check(tool, path, TAVILY.tools)


def asking(query: str) -> str:
    return json.dumps({"query": query})


# -- validation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WEB_SEARCH.types)
def test_every_type_name_of_web_search_is_accepted(kind: str) -> None:
    assert check({"type": kind}) == {"type": kind}


def test_documented_parameters_are_accepted_and_nulls_dropped() -> None:
    tool = {
        "type": "web_search",
        "external_web_access": True,
        "filters": {"allowed_domains": ["example.com", "münchen.de"], "blocked_domains": None},
        "search_context_size": "low",
        "user_location": {
            "type": "approximate",
            "city": "Zürich",
            "country": "ch",
            "region": None,
            "timezone": "Europe/Zurich",
        },
    }
    checked = check(tool)
    assert checked["filters"] == {"allowed_domains": ["example.com", "münchen.de"]}
    assert checked["user_location"] == {"type": "approximate", "city": "Zürich", "country": "ch", "timezone": "Europe/Zurich"}


@pytest.mark.parametrize(
    ("member", "param"),
    [
        ({"external_web_access": "no"}, "external_web_access"),
        ({"search_content_types": ["image"]}, "search_content_types"),
        ({"search_content_types": ["video"]}, "search_content_types[0]"),
        ({"image_settings": "large"}, "image_settings"),
        ({"search_context_size": "huge"}, "search_context_size"),
        ({"filters": {"allowed_domains": ["https://example.com"]}}, "filters.allowed_domains[0]"),
        ({"filters": {"allowed_domains": ["a.com\n$site=b.com"]}}, "filters.allowed_domains[0]"),
        ({"filters": {"allowed_domains": ["ü" * 80 + ".de"]}}, "filters.allowed_domains[0]"),
        ({"filters": {"blocked_domains": ["a.com"] * 101}}, "filters.blocked_domains"),
        ({"filters": {"domains": []}}, "filters.domains"),
        ({"user_location": {"type": "exact"}}, "user_location.type"),
        ({"user_location": {"type": "approximate", "country": "Germany"}}, "user_location.country"),
        ({"user_location": {"type": "approximate", "city": "Bonn\r\nX-Evil: 1"}}, "user_location.city"),
        ({"user_location": {"type": "approximate", "street": "1"}}, "user_location.street"),
        ({"return_token_budget": 5}, "return_token_budget"),
    ],
)
def test_unsupported_or_invalid_parameters_are_a_400_with_their_path(member: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check({"type": "web_search", **member}, "tools[3]")
    assert caught.value.param == f"tools[3].{param}"
    assert caught.value.status == 400


def test_search_content_types_with_text_and_image_is_accepted() -> None:
    tool = {"type": "web_search", "search_content_types": ["text", "image"], "image_settings": {"size": "small"}}
    assert check(tool) == tool


def test_external_web_access_true_is_accepted() -> None:
    tool = {"type": "web_search", "external_web_access": True}
    assert check(tool) == tool


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        *(({"search__provider": name}, " and ".join(required)) for name, required in SEARCH_PROVIDERS.items() if required),
        ({"search__provider": "search"}, "pattern"),
        ({"search__provider": "finder/search"}, "mcp_servers"),
        ({"search__provider": "searxng", "search__url": "searx.example"}, "http://"),
    ],
)
def test_incomplete_or_invalid_search_settings_are_refused(settings: dict[str, Any], lacking: str) -> None:
    with pytest.raises(ValidationError, match=lacking):
        make_settings(**settings)


# -- results -------------------------------------------------------------------------------------------------------------


async def test_the_model_sees_numbered_results_and_the_item_has_the_query_and_sources() -> None:
    result = await search(Shelf(A, B)).call(asking(" capital of france "))
    assert not result.failed
    assert '<result cite="【1】">\nA\nhttps://a.example/1\nabout a\n</result>' in result.content
    assert '<result cite="【2】">\nB\nhttps://b.example/1\nabout b\n</result>' in result.content
    assert result.members["action"] == {
        "type": "search",
        "query": "capital of france",
        "queries": ["capital of france"],
        "sources": [{"type": "url", "url": A.url}, {"type": "url", "url": B.url}],
    }
    assert result.members["results"][1] == {"number": 2, "url": B.url, "title": "B", "snippet": "about b"}
    item = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": result.members["action"]}
    assert ResponseFunctionWebSearch.model_validate(item).action.type == "search"


async def test_a_url_keeps_its_number_across_the_searches_of_a_history() -> None:
    shelf = Shelf(A, B)
    first = search(shelf)
    item = {"type": "web_search_call", **(await first.call(asking("a"))).members}
    later = search(shelf, earlier=[item, {"type": "message"}])
    shelf.found = [B, C, B]
    assert [result["number"] for result in (await later.call(asking("b"))).members["results"]] == [2, 3]
    shelf.found = [A]
    assert [result["number"] for result in (await later.call(asking("c"))).members["results"]] == [1]
    assert [source.url for source in sources_of([item])] == [A.url, B.url]


@pytest.mark.parametrize(("size", "count", "length"), [("low", 3, 500), ("medium", 6, 1_000), ("high", 10, 3_000)])
async def test_search_context_size_limits_the_number_of_results_and_the_snippet_length(
    size: str, count: int, length: int
) -> None:
    shelf = Shelf(*(SearchHit("T " * 500, f"https://example.com/{n}", "x" * 5_000) for n in range(30)))
    result = await search(shelf, search_context_size=size).call(asking("a"))
    assert len(result.members["results"]) == count
    assert all(len(one["snippet"]) == length + len(" ...") for one in result.members["results"])
    assert len(result.content) < count * (length + 400) + 300
    assert (shelf.queries[0].count, shelf.queries[0].characters) == (count, length)
    assert shelf.queries[0].thorough == (size == "high")


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"allowed_domains": ["a.example"]}, [A, C]),
        ({"allowed_domains": ["A.EXAMPLE"], "blocked_domains": ["sub.a.example"]}, [A]),
        ({"blocked_domains": ["a.example"]}, [B]),
        ({"allowed_domains": ["example"]}, [A, B, C]),
        ({"allowed_domains": ["xample"]}, []),
    ],
)
async def test_results_that_do_not_match_the_filters_are_dropped(filters: dict[str, Any], expected: list[SearchHit]) -> None:
    shelf = Shelf(A, B, C, SearchHit("", "", "a text of no address"), SearchHit("", "http://[", "broken"))
    result = await search(shelf, filters=filters).call(asking("a"))
    assert [one["url"] for one in result.members["results"]] == [one.url for one in expected]
    assert ("no results" in result.content) == (not expected)


async def test_a_trailing_dot_in_the_host_does_not_evade_the_filters() -> None:
    dotted = SearchHit("D", "https://a.example./1", "about a")
    blocked = await search(Shelf(dotted), filters={"blocked_domains": ["a.example"]}).call(asking("a"))
    allowed = await search(Shelf(dotted), filters={"allowed_domains": ["a.example"]}).call(asking("a"))
    assert blocked.members["results"] == []
    assert [one["url"] for one in allowed.members["results"]] == [dotted.url]


async def test_internationalized_domains_match_in_unicode_and_punycode() -> None:
    there = SearchHit("M", "https://www.xn--mnchen-3ya.de/a", "text")
    other = SearchHit("M", "https://www.münchen.de/b", "text")
    result = await search(Shelf(there, other, A), filters={"allowed_domains": ["münchen.de"]}).call(asking("a"))
    assert [one["url"] for one in result.members["results"]] == [there.url, other.url]


async def test_results_with_invalid_urls_are_dropped() -> None:
    shelf = Shelf(
        SearchHit("x", "javascript:alert(1)", "x"),
        SearchHit("x", "", ""),
        SearchHit("x", "https://a/" + "x" * 3000, "x"),
        SearchHit("x", "https://a/\nb", "x"),
        A,
    )
    assert [one["url"] for one in (await search(shelf).call(asking("a"))).members["results"]] == [A.url]


@pytest.mark.parametrize("arguments", ["", "{", "[]", '"a"', "{}", '{"query": 1}', '{"query": "  "}'])
async def test_arguments_without_a_query_fail_the_call_and_the_model_sees_the_error(arguments: str) -> None:
    shelf = Shelf(A)
    result = await search(shelf).call(arguments)
    assert result.failed
    assert '"query"' in result.content
    assert result.members["action"] == {"type": "search", "query": "", "queries": [""]}
    assert shelf.queries == []


async def test_the_reason_of_a_failed_search_is_sent_to_the_model() -> None:
    result = await search(Shelf(error="The search provider did not answer in time.")).call(asking("secret plan"))
    assert result.failed
    assert result.content == "The search failed: The search provider did not answer in time."
    assert result.members["action"] == {"type": "search", "query": "secret plan", "queries": ["secret plan"]}
    assert result.members["error"] == result.content


async def test_the_offered_function_requires_the_arguments_that_the_tool_reads() -> None:
    (served,) = await search(Shelf(A)).open()
    definition = served.function
    assert definition["name"] == "web_search"
    assert definition["parameters"]["required"] == ["query"]
    assert not (await served.call(json.dumps(dict.fromkeys(definition["parameters"]["required"], "x")))).failed


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, -1, 0, True, 1.5])
async def test_an_invalid_result_number_sent_by_a_client_is_ignored(number: Any) -> None:
    forged = {"number": number, "url": C.url, "title": "", "snippet": ""}
    earlier = [{"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}, "results": [forged]}]
    result = await search(Shelf(A, B), earlier=earlier).call('{"query": "a"}')
    assert [one["number"] for one in result.members["results"]] == [1, 2]
