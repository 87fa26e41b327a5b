"""Web search by a tool of one of the operator's MCP servers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import orjson

from ..errors import APIError
from . import ToolContext, ToolResult
from .mcp import MCPServer
from .search import Query, SearchFailed, SearchHit, SearchProvider, rows_of, text_of

_LISTS = (("results",), ("web", "results"), ("organic",), ("data",))
_URL = re.compile(r"https?://[^\s<>\"\])}]+")
_LABELLED = re.compile(r"^\W*title\W*:\s*(?P<title>.+)$", re.IGNORECASE | re.MULTILINE)
_LINK = re.compile(r"\[(?P<title>[^\]\n]+)\]\(https?://")


class MCPSearch(SearchProvider):
    """A search tool of one of the operator's MCP servers.

    The setting `search.provider` is `label/tool`. The tool is called with `{"query": ...}`. Its result may have these forms:

    1. JSON: a list of objects, or an object that contains such a list as `results`, `web.results`, `organic` or `data`.
    2. Text with URLs: each paragraph that contains a URL is one result. A title is recognized as `Title: ...` or in a Markdown
       link.
    3. Text without URLs: the whole text is one result, which cannot be cited.
    """

    def __init__(self, context: ToolContext) -> None:
        super().__init__(context)
        label, _, self._tool = self.name.partition("/")
        self.server = MCPServer({"type": "mcp", "server_label": label}, context)

    async def aclose(self) -> None:
        await self.server.aclose()

    async def search(self, query: Query) -> list[SearchHit]:
        try:
            result = await self.server.call(self._tool, {"query": query.text}, approved=True)  # by the operator
        except APIError as error:
            raise SearchFailed(error.message) from None
        answer = _as_text(result)
        if result.failed:
            raise SearchFailed(answer or "The search tool failed.")
        return list(_read(answer))


def _as_text(result: ToolResult) -> str:
    if isinstance(result.content, str):
        return result.content
    return "\n\n".join(part["text"] for part in result.content if part.get("type") == "input_text")


def _read(answer: str) -> Iterator[SearchHit]:
    """Yield the results in the text that a search tool returned."""
    try:
        document = orjson.loads(answer)
    except orjson.JSONDecodeError:
        yield from _read_text(answer)
        return
    paths = [()] if isinstance(document, list) else _LISTS
    for row in next((found for path in paths if (found := rows_of(document, *path))), []):
        content = text_of(row, "content", "snippet", "description", "text", "summary", "markdown")
        yield SearchHit(text_of(row, "title", "name"), text_of(row, "url", "link", "href"), content)


def _read_text(answer: str) -> Iterator[SearchHit]:
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n|^-{3,}$", answer, flags=re.MULTILINE)]
    results = [(paragraph, place[0]) for paragraph in paragraphs if (place := _URL.search(paragraph))]
    if not results and answer.strip():
        yield SearchHit("", "", answer.strip())
    for paragraph, url in results:
        title = _LABELLED.search(paragraph) or _LINK.search(paragraph)
        yield SearchHit(title["title"].strip() if title else "", url.rstrip(".,;:'*_"), paragraph)
