"""The tool kind `file_search`, which searches vector stores."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..errors import APIError, NotFound
from ..protocol import checks
from ..protocol.citations import Source
from ..protocol.search_results import CITE, file_listing
from ..protocol.tool_kinds.form import CallForm, as_function, parse_arguments
from ..protocol.types import Item, Tool
from ..settings.groups import ToolSettings
from . import ServedFunction, ServerTool, ToolContext, ToolResult
from .stores import Excerpt

logger = logging.getLogger(__name__)

MAX_STORES = 16
"""Maximum number of vector stores of a tool."""
_MAX_QUERIES = 8
_MAX_QUERY = 2_000
_MAX_TEXT = 300_000  # maximum number of characters of all results of a call
_FUNCTION = as_function(
    "file_search",
    "Search the files that the user has provided. Returns numbered excerpts of files. To search for several things, pass "
    f"several queries in one call. {CITE}",
    {
        "queries": {
            "type": "array",
            "items": {"type": "string"},
            "maxItems": _MAX_QUERIES,  # with constrained decoding, a small model might never end the array
            "description": "Questions or search terms.",
        }
    },
    "queries",
)


_definition = checks.closed_object(
    {"vector_store_ids": checks.each(partial(checks.string, pattern=r"vs_\w{1,128}"), max_length=MAX_STORES)},
    type=checks.among("file_search"),
    filters=checks.mapping,
    max_num_results=partial(checks.integer, minimum=1, maximum=50),
    ranking_options=checks.mapping,
)


class FileSearch(ServerTool):
    """The file search tool of one run. Excerpts are numbered across the whole history. Searches may run concurrently."""

    names_objects = True

    def __init__(self, tool: Tool, context: ToolContext) -> None:
        assert context.stores is not None
        self._tool = tool
        self._stores = context.stores
        self._context = context

    @staticmethod
    def check(tool: Tool, path: str, settings: ToolSettings) -> Tool:
        checked: Tool = _definition(tool, path)
        if not checked["vector_store_ids"]:
            checks.invalid(f"{path}.vector_store_ids", "the array is empty.", "empty_array")
        return checked

    async def check_access(self, path: str) -> None:
        """Raise `NotFound` if one of the stores does not exist or belongs to another owner."""
        for index, store_id in enumerate(self._tool["vector_store_ids"]):
            if not await self._stores.has_store(store_id, self._context.owner):
                message = f"Vector store with id '{store_id}' not found."
                raise NotFound(message, param=f"{path}.vector_store_ids[{index}]")

    async def open(self) -> list[ServedFunction]:
        form = CallForm(
            item="file_search_call",
            members={"results": None},
            made=lambda arguments: {"queries": _queries(arguments)},
            begins=("file_search_call.in_progress",),
            runs=("file_search_call.searching",),
            ends=("file_search_call.completed",),
            served=True,
        )
        return [ServedFunction(_FUNCTION, form, self.call, "file_search")]

    async def call(self, arguments: str) -> ToolResult:
        """Search for the `queries` in `arguments`. The result has `queries`, `results` and, after a failure, `error`."""
        queries = _queries(arguments)
        if not queries:
            return _failure('The arguments must be a JSON object with "queries", an array of strings.', queries)
        try:
            results = await self._search(queries)
        except APIError as error:
            return _failure(f"The search failed: {error.message}", queries)
        except TimeoutError:
            return _failure(f"The search took longer than {self._context.settings.timeout:g} seconds.", queries)
        return ToolResult(file_listing(results), {"queries": queries, "results": results})

    async def restore(self, items: Sequence[Item]) -> None:
        """Repeat searches whose results are not in the log of a background response, because `include` does not list them.

        If a search fails, tell the model that its results are no longer available.
        """
        for item in items:
            if item["type"] == "file_search_call" and item["status"] == "completed" and item.get("results") is None:
                try:
                    item["results"] = await self._search(item["queries"])
                except (APIError, TimeoutError) as error:
                    logger.warning("a file search could not be repeated: %s", error)

    async def _search(self, queries: Sequence[str]) -> list[dict[str, Any]]:
        context = self._context
        async with asyncio.timeout(context.settings.timeout):
            found = await self._stores.search(self._tool, queries, context.owner, context.caller)
        return self._number(found)

    def _number(self, found: Sequence[Excerpt]) -> list[dict[str, Any]]:
        """Return the results with their numbers. The texts have at most `_MAX_TEXT` characters in total."""
        results, left = [], _MAX_TEXT
        for one in found:
            text = one.text[:left]
            if not text:
                break
            left -= len(text)
            number = self._context.sources.number(one.file_id, text)
            self._context.sources.add(Source(number, one.filename, file_id=one.file_id))
            place = {"file_id": one.file_id, "filename": one.filename, "attributes": dict(one.attributes)}
            results.append({"number": number, **place, "score": one.score, "text": text})
        return results


def _queries(arguments: str) -> list[str]:
    """Return the queries in the arguments of a call. Models also write one `query`, or a string instead of an array."""
    parsed = parse_arguments(arguments) or {}
    given = parsed.get("queries", parsed.get("query"))
    listed = given if isinstance(given, list) else [given]
    texts = [one.strip()[:_MAX_QUERY] for one in listed if isinstance(one, str) and one.strip()]
    return list(dict.fromkeys(texts))[:_MAX_QUERIES]


def _failure(message: str, queries: list[str]) -> ToolResult:
    return ToolResult(message, {"queries": queries, "results": [], "error": message}, failed=True)
