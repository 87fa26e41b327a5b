"""Any tool of an MCP server that searches: called with ``{"query": ...}``, and read whatever form its answer has.

1. JSON: a list of objects, or an object that holds one as ``results``, ``web.results``, ``organic`` or ``data``.
2. Text: paragraphs, each with the URL of a result (``Title: ...``, ``URL: ...``, Markdown, or anything else).
3. A text without any URL is one result, which cannot be cited.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from ...errors import APIError
from ..result import Result
from .fetch import rows, text
from .query import Found, Query, SearchFailed

CallMCP = Callable[[dict[str, Any]], Awaitable[Result]]
"""Calls the configured tool with these arguments."""

_LISTS = (("results",), ("web", "results"), ("organic",), ("data",))
_URL = re.compile(r"https?://[^\s<>\"\])}]+")
_LABELLED = re.compile(r"^\W*title\W*:\s*(?P<title>.+)$", re.IGNORECASE | re.MULTILINE)
_LINK = re.compile(r"\[(?P<title>[^\]\n]+)\]\(https?://")


@dataclass(frozen=True, slots=True)
class MCPTool:
    """``call`` has a time-out of its own; what it cannot do is a failed result, or an ``APIError`` where it cannot connect."""

    call: CallMCP

    async def search(self, query: Query) -> list[Found]:
        try:
            result = await self.call({"query": query.text})
        except APIError as error:
            raise SearchFailed(error.message) from None
        answer = _as_text(result)
        if result.failed:
            raise SearchFailed(answer or "The search tool failed.")
        return list(read(answer))


def _as_text(result: Result) -> str:
    if isinstance(result.content, str):
        return result.content
    return "\n\n".join(part["text"] for part in result.content if part.get("type") == "input_text")


def read(answer: str) -> Iterator[Found]:
    """The results in what a search tool answered."""
    try:
        document = orjson.loads(answer)
    except orjson.JSONDecodeError:
        yield from _read_text(answer)
        return
    for row in _rows(document):
        content = text(row, "content", "snippet", "description", "text", "summary", "markdown")
        yield Found(text(row, "title", "name"), text(row, "url", "link", "href"), content)


def _rows(document: Any) -> list[dict[str, Any]]:
    if isinstance(document, list):
        return rows(document)
    return next((found for path in _LISTS if (found := rows(document, *path))), [])


def _read_text(answer: str) -> Iterator[Found]:
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n|^-{3,}$", answer, flags=re.MULTILINE)]
    results = [(paragraph, place[0]) for paragraph in paragraphs if (place := _URL.search(paragraph))]
    if not results and answer.strip():
        yield Found("", "", answer.strip())
    for paragraph, url in results:
        title = _LABELLED.search(paragraph) or _LINK.search(paragraph)
        yield Found(title["title"].strip() if title else "", url.rstrip(".,;:'*_"), paragraph)
