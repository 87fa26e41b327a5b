"""The metric of tool calls: their number and duration, by kind, server and error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.mcp_servers import weather
from tests.support.metrics import sample_value
from tests.support.oracle import stream
from tests.support.scripted import HELLO, call, finish
from tests.support.search_servers import SEARXNG, SearchServer

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start


def counted(kind: str, server: str = "", error: str = "") -> float:
    labels = {"responses_mw_tool_kind": kind, "responses_mw_tool_server": server, "error_type": error}
    return sample_value("gen_ai_execute_tool_duration_seconds_count", labels) or 0.0


@pytest.fixture
def url(serve: Serve) -> str:
    return serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"


async def called(
    start: Start, upstream: ScriptedUpstream, name: str, arguments: str, tool: dict[str, Any], **settings: Any
) -> None:
    """Run a response whose model calls one tool once."""
    upstream.stream(call(arguments, name=name, call_id="c"), finish("tool_calls"))
    upstream.stream(*HELLO)
    assert (await stream(start(**settings), tools=[tool])).response["status"] == "completed"


async def test_a_call_of_a_configured_server_is_counted_under_its_label(
    start: Start, upstream: ScriptedUpstream, url: str
) -> None:
    before = counted("mcp", "the-weather"), counted("mcp", "the-weather", "tool_error")
    server = {"url": url, "require_approval": "never", "allowed_tools": ["*"]}
    settings = {"tools__allow_private_urls": True, "tools__mcp_servers": {"the-weather": server}}
    tool = {"type": "mcp", "server_label": "the-weather"}
    await called(start, upstream, "get_weather", '{"city": "Paris"}', tool, **settings)
    await called(start, upstream, "fail", "{}", tool, **settings)
    assert (counted("mcp", "the-weather"), counted("mcp", "the-weather", "tool_error")) == (before[0] + 1, before[1] + 1)


async def test_a_call_of_a_server_that_is_not_configured_is_counted_as_other(
    start: Start, upstream: ScriptedUpstream, url: str
) -> None:
    before = counted("mcp", "_OTHER")
    tool = {"type": "mcp", "server_label": "invented-by-a-client", "server_url": url, "require_approval": "never"}
    await called(start, upstream, "get_weather", '{"city": "Paris"}', tool, tools__allow_private_urls=True)
    assert counted("mcp", "_OTHER") == before + 1
    assert counted("mcp", "invented-by-a-client") == 0


async def test_a_web_search_is_counted(start: Start, upstream: ScriptedUpstream, serve: Serve) -> None:
    before = counted("web_search")
    provider = {"search__provider": "searxng", "search__url": serve(SearchServer(SEARXNG))}
    await called(start, upstream, "web_search", '{"query": "paris"}', {"type": "web_search"}, **provider)
    assert counted("web_search") == before + 1


async def test_a_file_search_is_counted(start: Start, ours: Ours, upstream: ScriptedUpstream) -> None:
    before = counted("file_search"), counted("file_search", error="tool_error")
    store = (await ours.http.post("/v1/vector_stores", json={"name": "empty"})).json()
    tool = {"type": "file_search", "vector_store_ids": [store["id"]]}
    await called(start, upstream, "file_search", '{"queries": ["leave"]}', tool)
    await called(start, upstream, "file_search", "{}", tool)
    assert (counted("file_search"), counted("file_search", error="tool_error")) == (before[0] + 1, before[1] + 1)
