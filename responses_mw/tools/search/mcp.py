"""A search tool of an MCP server, called with ``{"query": ...}``. Its answer may have any of these forms:

1. JSON: a list of objects, or an object with such a list as ``results``, ``web.results``, ``organic`` or ``data``.
2. Text: paragraphs that each contain the URL of a result (``Title: ...``, ``URL: ...``, Markdown, or anything else).
3. Text without a URL: one result, which cannot be cited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from ...errors import APIError
from ..tool import ToolResult
from .provider import ProviderOptions, Query, SearchFailed, SearchHit, rows, text

_LISTS = (("results",), ("web", "results"), ("organic",), ("data",))
_URL = re.compile(r"https?://[^\s<>\"\])}]+")
_LABELLED = re.compile(r"^\W*title\W*:\s*(?P<title>.+)$", re.IGNORECASE | re.MULTILINE)
_LINK = re.compile(r"\[(?P<title>[^\]\n]+)\]\(https?://")


@dataclass(frozen=True, slots=True)
class Provider:
    """Calls the tool through ``options.call_mcp``, which has its own timeout and raises ``APIError`` if it cannot connect."""

    options: ProviderOptions

    async def search(self, query: Query) -> list[SearchHit]:
        assert self.options.call_mcp is not None
        try:
            result = await self.options.call_mcp({"query": query.text})
        except APIError as error:
            raise SearchFailed(error.message) from None
        answer = _as_text(result)
        if result.failed:
            raise SearchFailed(answer or "The search tool failed.")
        return list(read(answer))


def _as_text(result: ToolResult) -> str:
    if isinstance(result.content, str):
        return result.content
    return "\n\n".join(part["text"] for part in result.content if part.get("type") == "input_text")


def read(answer: str) -> Iterator[SearchHit]:
    """Yield the results in a search tool's answer."""
    try:
        document = orjson.loads(answer)
    except orjson.JSONDecodeError:
        yield from _read_text(answer)
        return
    for row in _rows(document):
        content = text(row, "content", "snippet", "description", "text", "summary", "markdown")
        yield SearchHit(text(row, "title", "name"), text(row, "url", "link", "href"), content)


def _rows(document: Any) -> list[dict[str, Any]]:
    if isinstance(document, list):
        return rows(document)
    return next((found for path in _LISTS if (found := rows(document, *path))), [])


def _read_text(answer: str) -> Iterator[SearchHit]:
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n|^-{3,}$", answer, flags=re.MULTILINE)]
    results = [(paragraph, place[0]) for paragraph in paragraphs if (place := _URL.search(paragraph))]
    if not results and answer.strip():
        yield SearchHit("", "", answer.strip())
    for paragraph, url in results:
        title = _LABELLED.search(paragraph) or _LINK.search(paragraph)
        yield SearchHit(title["title"].strip() if title else "", url.rstrip(".,;:'*_"), paragraph)
