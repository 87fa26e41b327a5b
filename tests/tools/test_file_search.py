"""The file search tool: validation, results for the model and the caller, and numbering."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import ResponseFileSearchToolCall

from responses_mw.errors import BadRequest, Unavailable
from responses_mw.files.ranking import Found
from responses_mw.files.tool_search import ToolSearch
from responses_mw.protocol.search_results import file_output, sources_of
from responses_mw.protocol.types import Tool
from responses_mw.tools.file_search import FileSearch
from responses_mw.tools.stores import StoreSearch
from responses_mw.tools.toolbox import Tools
from tests.support.configured import make_settings

from .context import context

TOOL = {"type": "file_search", "vector_store_ids": ["vs_1"]}
LEAVE = Found("file-1", "leave.pdf", {"year": 2026}, 0.75, "20 days")
TRAVEL = Found("file-2", "travel.md", {}, 0.5, "by train")


class Shelf(StoreSearch):
    """Vector stores that return the same excerpts for every query."""

    def __init__(self, *found: Found, error: Exception | None = None) -> None:
        self.found, self.error = found, error
        self.asked: list[tuple[Tool, Sequence[str], str]] = []

    def check(self, tool: Tool, path: str) -> None: ...

    async def has_store(self, store_id: str, owner: str) -> bool:
        return True

    async def search(self, tool: Tool, queries: Sequence[str], owner: str, caller: Any) -> Sequence[Found]:
        self.asked.append((tool, queries, owner))
        if self.error:
            raise self.error
        return self.found


class Stuck(Shelf):
    async def search(self, tool: Tool, queries: Sequence[str], owner: str, caller: Any) -> Sequence[Found]:
        await asyncio.Event().wait()
        raise AssertionError


def search(shelf: Shelf, earlier: Any = (), **settings: Any) -> FileSearch:
    return FileSearch(TOOL, context(make_settings(**settings), earlier=earlier, stores=shelf))


def asking(*queries: str) -> str:
    return json.dumps({"queries": queries})


def check(**members: Any) -> Tool:
    ours = make_settings()
    # The checks need no stores and no vectors.
    stores = ToolSearch(None, None)  # type: ignore[arg-type]
    tools = Tools(ours.tools, ours.search, context(ours).http, context(ours).sealer, stores)
    return tools.check([{**TOOL, **members}])[0]


# -- validation ----------------------------------------------------------------------------------------------------------


def test_documented_parameters_are_accepted_and_nulls_dropped() -> None:
    comparison = {"type": "eq", "key": "year", "value": 2026}
    tool = {
        "vector_store_ids": ["vs_1", "vs_2"],
        "filters": {"type": "and", "filters": [comparison, comparison]},
        "max_num_results": 50,
        "ranking_options": {
            "ranker": "auto",
            "score_threshold": 0.5,
            "hybrid_search": {"embedding_weight": 1, "text_weight": 0.2},
        },
    }
    assert check(**tool) == {"type": "file_search", **tool}
    assert check(filters=None, max_num_results=None, ranking_options=None) == TOOL


@pytest.mark.parametrize(
    ("member", "param"),
    [
        ({"vector_store_ids": None}, "vector_store_ids"),
        ({"vector_store_ids": []}, "vector_store_ids"),
        ({"vector_store_ids": ["file-1"]}, "vector_store_ids[0]"),
        ({"vector_store_ids": ["vs_1:x"]}, "vector_store_ids[0]"),
        ({"vector_store_ids": ["vs_1"] * 17}, "vector_store_ids"),
        ({"max_num_results": 0}, "max_num_results"),
        ({"max_num_results": 51}, "max_num_results"),
        ({"filters": {"type": "like", "key": "a", "value": "b"}}, "filters.type"),
        ({"filters": {"type": "or", "filters": [{"type": "eq", "key": "a"}]}}, "filters.filters[0].value"),
        ({"filters": []}, "filters"),
        ({"ranking_options": {"ranker": "best"}}, "ranking_options.ranker"),
        ({"ranking_options": {"score_threshold": 2}}, "ranking_options.score_threshold"),
        ({"ranking_options": {"hybrid_search": {"text_weight": 1}}}, "ranking_options.hybrid_search.embedding_weight"),
        ({"ranking_options": {"hybrid_search": {"text_weight": 0, "embedding_weight": 0}}}, "ranking_options.hybrid_search"),
        ({"rewrite_query": True}, "rewrite_query"),
    ],
)
def test_invalid_parameters_get_a_400_that_names_their_path(member: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check(**member)
    assert caught.value.param == f"tools[0].{param}"


# -- results -------------------------------------------------------------------------------------------------------------


async def test_the_model_sees_numbered_excerpts_and_the_item_has_the_queries_and_results() -> None:
    shelf = Shelf(LEAVE, TRAVEL)
    result = await search(shelf).call(asking(" leave ", "holidays", "leave"))
    assert not result.failed
    assert '<result cite="【1】" file="leave.pdf">\n20 days\n</result>' in result.content
    assert '<result cite="【2】" file="travel.md">\nby train\n</result>' in result.content
    assert shelf.asked[0][:2] == (TOOL, ["leave", "holidays"])
    item = {"type": "file_search_call", "id": "fs_1", "status": "completed", **result.members}
    parsed = ResponseFileSearchToolCall.model_validate(item)
    assert parsed.queries == ["leave", "holidays"]
    assert parsed.results is not None
    assert [(one.file_id, one.filename, one.score, one.text) for one in parsed.results] == [
        ("file-1", "leave.pdf", 0.75, "20 days"),
        ("file-2", "travel.md", 0.5, "by train"),
    ]
    assert file_output(item) == result.content


async def test_an_excerpt_keeps_its_number_across_the_searches_of_a_history() -> None:
    first = await search(Shelf(LEAVE)).call(asking("a"))
    item = {"type": "file_search_call", **first.members}
    page = {"number": 7, "url": "https://a", "title": "A", "snippet": ""}
    later = search(Shelf(TRAVEL, LEAVE), earlier=[item, {"type": "web_search_call", "results": [page]}])
    results = (await later.call(asking("b"))).members["results"]
    assert [(one["number"], one["file_id"]) for one in results] == [(8, "file-2"), (1, "file-1")]
    assert [source.file_id for source in sources_of([{"type": "file_search_call", "results": results}])] == ["file-1", "file-2"]


@pytest.mark.parametrize(
    ("arguments", "queries"),
    [
        ('{"query": "a"}', ["a"]),
        ('{"queries": "a"}', ["a"]),
        ('{"queries": ["a", 1, "", "b"]}', ["a", "b"]),
        (asking(*map(str, range(20))), [*map(str, range(8))]),
        (asking("x" * 5_000), ["x" * 2_000]),
    ],
)
async def test_queries_are_read_as_models_write_them(arguments: str, queries: list[str]) -> None:
    result = await search(Shelf(LEAVE)).call(arguments)
    assert result.members["queries"] == queries


@pytest.mark.parametrize("arguments", ["", "[]", "{}", '{"queries": []}', '{"queries": [" "]}', '{"queries": {"a": 1}}'])
async def test_a_call_without_queries_fails_and_describes_the_arguments(arguments: str) -> None:
    result = await search(shelf := Shelf(LEAVE)).call(arguments)
    assert result.failed
    assert '"queries"' in result.content
    assert result.members["results"] == []
    assert not shelf.asked


async def test_a_search_without_results_is_reported_to_the_model() -> None:
    result = await search(Shelf()).call(asking("a"))
    assert not result.failed
    assert "no results" in result.content


async def test_a_failed_search_is_reported_to_the_model() -> None:
    error = Unavailable("The query could not be embedded: no connection.")
    result = await search(Shelf(error=error)).call(asking("a"))
    assert result.failed
    assert result.content == "The search failed: The query could not be embedded: no connection."
    assert result.members == {"queries": ["a"], "results": [], "error": result.content}


async def test_a_search_that_takes_too_long_fails() -> None:
    result = await search(Stuck(), tools__timeout=0.001).call(asking("a"))
    assert result.failed
    assert "longer than 0.001 seconds" in result.content


async def test_results_beyond_the_maximum_total_length_are_omitted() -> None:
    shelf = Shelf(*(Found(f"file-{n}", "a.md", {}, 0.5, str(n) * 100_000) for n in range(5)))
    result = await search(shelf).call(asking("a"))
    assert [len(one["text"]) for one in result.members["results"]] == [100_000] * 3
    assert len(result.content) < 301_000
