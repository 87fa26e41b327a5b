"""A search tool of an MCP server, and the formats in which such tools return results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from responses_mw.errors import APIError
from responses_mw.protocol.types import Part
from responses_mw.tools import ToolResult
from responses_mw.tools.mcp_search import MCPSearch
from responses_mw.tools.search import Query, SearchFailed, SearchHit, SearchProvider
from tests.support.configured import make_settings

from .context import context


class Finder:
    """A search tool that returns `result`, or one whose server is unreachable."""

    def __init__(self, result: ToolResult | None) -> None:
        self.result = result
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def call(self, name: str, arguments: dict[str, Any], *, approved: bool) -> ToolResult:
        self.asked.append((name, arguments))
        if self.result is None:
            raise APIError("The MCP server 'finder' cannot be reached.")
        return self.result


def mcp(finder: Finder) -> SearchProvider:
    settings = make_settings(
        search__provider="finder/search",
        tools__mcp_servers={"finder": {"url": "http://127.0.0.1:1/mcp"}},
    )
    provider = MCPSearch(context(settings))
    provider.server = finder  # type: ignore[assignment]
    return provider


PAGES = [SearchHit("A", "https://a.example/x", "about a"), SearchHit("B", "https://b.example/y", "about b")]


@pytest.mark.parametrize(
    "document",
    [
        {"results": [{"title": "A", "url": "https://a.example/x", "content": "about a"}, {"name": "B", "link": "https://b.example/y", "snippet": "about b"}]},
        [{"title": "A", "url": "https://a.example/x", "text": "about a"}, {"title": "B", "url": "https://b.example/y", "description": "about b"}],
        {"web": {"results": [{"title": "A", "url": "https://a.example/x", "description": "about a"}, {"title": "B", "href": "https://b.example/y", "content": "about b"}]}},
        {"results": None, "organic": [{"title": "A", "link": "https://a.example/x", "snippet": "about a"}, {"title": "B", "link": "https://b.example/y", "snippet": "about b"}]},
    ],
)  # fmt: skip
async def test_the_usual_json_formats_of_search_tools_are_parsed(document: Any) -> None:
    finder = Finder(ToolResult(json.dumps(document)))
    assert await mcp(finder).search(Query("a b")) == PAGES
    assert finder.asked == [("search", {"query": "a b"})]


@pytest.mark.parametrize(
    "text",
    [
        "Title: A\nURL: https://a.example/x\nDescription: about a\n\nTitle: B\nURL: https://b.example/y\nDescription: about b",
        "**Title:** A\n**URL:** https://a.example/x\n---\n**Title:** B\n**URL:** https://b.example/y",
        "SearchHit two:\n\n1. [A](https://a.example/x) - about a\n\n2. [B](https://b.example/y) - about b",
    ],
)
async def test_text_with_urls_is_split_into_results(text: str) -> None:
    found = await mcp(Finder(ToolResult(text))).search(Query("a"))
    assert [(one.title.strip("* "), one.url) for one in found] == [("A", PAGES[0].url), ("B", PAGES[1].url)]
    assert all(one.text in text for one in found)


@pytest.mark.parametrize(
    ("answer", "text"),
    [("Paris is the capital.", "Paris is the capital."), ("42", "42"), ("true", "true"), ('"Paris, France"', "Paris, France")],
)
async def test_text_without_urls_is_one_result(answer: str, text: str) -> None:
    assert await mcp(Finder(ToolResult(answer))).search(Query("a")) == [SearchHit("", "", text)]


@pytest.mark.parametrize("answer", [" ", "null", '""', "{}"])
async def test_an_empty_answer_has_no_results(answer: str) -> None:
    assert await mcp(Finder(ToolResult(answer))).search(Query("a")) == []


async def test_the_text_parts_of_an_answer_are_parsed() -> None:
    parts: list[Part] = [
        {"type": "input_text", "text": "[A](https://a.example/x)"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
        {"type": "input_text", "text": "[B](https://b.example/y)"},
    ]
    assert [one.title for one in await mcp(Finder(ToolResult(parts))).search(Query("a"))] == ["A", "B"]


@pytest.mark.parametrize("content", ["no such tool", ""])
async def test_a_failed_search_tool_raises_search_failed(content: str) -> None:
    with pytest.raises(SearchFailed, match=content or "failed"):
        await mcp(Finder(ToolResult(content, failed=True))).search(Query("a"))


async def test_a_search_tool_with_an_unreachable_server_raises_search_failed() -> None:
    with pytest.raises(SearchFailed, match="'finder' cannot be reached"):
        await mcp(Finder(None)).search(Query("a"))
