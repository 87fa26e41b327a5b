"""Search the web with a tool of an MCP server that the operator has configured."""

from __future__ import annotations

import re
from collections.abc import Iterator

import orjson

from ..errors import APIError
from . import ToolContext
from .mcp import MCPServer
from .search import Query, SearchFailed, SearchHit, SearchProvider, rows_of, text_of

_LISTS = (("results",), ("web", "results"), ("organic",), ("data",))
_URL = re.compile(r"https?://[^\s<>\"\])}]+")
# In linear time, because the texts of web pages may be hostile.
_LABELLED = re.compile(r"^[^\w\n]*+title[^\w\n:]*+:\s*+(?P<title>.+)$", re.IGNORECASE | re.MULTILINE)
_LINK = re.compile(r"\[(?P<title>[^\[\]\n]++)\]\(https?://")


class MCPSearch(SearchProvider):
    """Searches with an MCP tool. The setting `search.provider` names it as `label/tool`. It is called with `{"query": ...}`.

    The tool returns JSON or text. JSON is a list of objects, or an object with such a list as its member `results`,
    `web.results`, `organic` or `data`. A JSON string, number or boolean is a text. In a text, each paragraph with a URL is one
    result. Its title is in a line `Title: ...` or in a Markdown link. A text without URLs is one result that cannot be cited.
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
        content = result.content
        if isinstance(content, list):
            content = "\n\n".join(part["text"] for part in content if part.get("type") == "input_text")
        if result.failed:
            raise SearchFailed(content or "The search tool failed.")
        return list(_read(content))


def _read(answer: str) -> Iterator[SearchHit]:
    try:
        document = orjson.loads(answer)
    except orjson.JSONDecodeError:
        document = answer
    if isinstance(document, str | int | float):
        yield from _read_text(document if isinstance(document, str) else answer)
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
