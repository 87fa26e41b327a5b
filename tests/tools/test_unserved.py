"""Hosted tools that the server does not serve: omitted if the settings say so, otherwise refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.oracle import stream, whole
from tests.support.scripted import HELLO, completion
from tests.support.scripted_responses import ScriptedResponses, item, response
from tests.support.search_servers import SEARXNG, SearchServer

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
SEARCH = {"type": "web_search"}
IMAGE = {"type": "image_generation", "output_format": "png"}
PYTHON = {"type": "code_interpreter", "container": {"type": "auto"}}
FILES = {"type": "file_search", "vector_store_ids": ["vs_1"]}


async def refused(ours: Ours, **body: Any) -> dict[str, Any]:
    answer = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == "unsupported_parameter"
    return error


@pytest.mark.parametrize(
    "tool", [SEARCH, IMAGE, *({"type": f"web_search{rest}"} for rest in ("_2025_08_26", "_preview", "_preview_2025_03_11"))]
)
async def test_tools_that_clients_declare_by_default_are_omitted(
    ours: Ours, upstream: ScriptedUpstream, tool: dict[str, Any]
) -> None:
    upstream.whole(completion({"content": "Hello"}))
    body = {"model": "tiny", "input": "Hi", "tools": [tool, FUNCTION]}
    answer = await ours.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.headers["x-responses-not-offered"]) == (200, tool["type"])
    assert answer.json()["tools"][0] == tool
    assert [one["function"]["name"] for one in upstream.requests[0].json["tools"]] == ["f"]


async def test_a_request_without_unsupported_tools_has_no_header(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    answer = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "tools": [FUNCTION]})
    assert "x-responses-not-offered" not in answer.headers


async def test_each_omitted_type_is_logged_once(
    ours: Ours, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "responses_mw"):
        for _ in range(2):
            upstream.stream(*HELLO)
            assert (await stream(ours, tools=[SEARCH, IMAGE])).response["tools"] == [SEARCH, IMAGE]
            assert "tools" not in upstream.requests[-1].json
    logged = [record.getMessage() for record in caplog.records if "tools.omitted" in record.getMessage()]
    assert len(logged) == 2
    assert sum("search.provider" in line for line in logged) == 1
    assert sum("'image_generation'" in line for line in logged) == 1


@pytest.mark.parametrize("tool", [SEARCH, IMAGE])
@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(lambda tool: (tool, [tool, FUNCTION]), id="named"),
        pytest.param(lambda tool: ("required", [tool]), id="required"),
        pytest.param(
            lambda tool: ({"type": "allowed_tools", "mode": "auto", "tools": [tool, FUNCTION]}, [tool, FUNCTION]), id="allowed"
        ),
        pytest.param(
            lambda tool: ({"type": "allowed_tools", "mode": "required", "tools": [tool]}, [tool, FUNCTION]),
            id="allowed, required",
        ),
    ],
)
async def test_a_choice_that_names_an_omitted_tool_is_a_400(ours: Ours, tool: dict[str, Any], choose: Any) -> None:
    choice, tools = choose({"type": tool["type"]})
    assert (await refused(ours, tools=tools, tool_choice=choice))["param"].startswith("tool_choice")


async def test_required_chooses_among_the_other_tools(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    await stream(ours, tools=[IMAGE, FUNCTION], tool_choice="required")
    assert upstream.requests[0].json["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("tool", "named"),
    [
        (FILES, "vector stores"),
        ({"type": "computer_use_preview"}, "computer_use_preview"),
        ({"type": "computer"}, "computer"),
        ({"type": "programmatic_tool_calling"}, "programmatic_tool_calling"),
        (PYTHON, "tools.sandbox_url"),
    ],
)
async def test_any_other_unsupported_tool_is_a_400_with_the_reason(start: Start, tool: dict[str, Any], named: str) -> None:
    ours = start(files__enabled=False)
    error = await refused(ours, tools=[FUNCTION, tool])
    assert error["param"] == "tools[1].type"
    assert named in error["message"]


async def test_the_setting_lists_the_tools_that_are_omitted(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(tools__omitted="code_interpreter, file_search", files__enabled=False)
    upstream.stream(*HELLO)
    assert (await stream(ours, tools=[PYTHON, FILES])).response["tools"] == [PYTHON, FILES]
    assert "tools" not in upstream.requests[0].json
    assert "search.provider" in (await refused(ours, tools=[SEARCH]))["message"]
    assert (await refused(ours, tools=[IMAGE]))["param"] == "tools[0].type"


async def test_an_empty_setting_refuses_all_unsupported_tools(start: Start) -> None:
    ours = start(tools__omitted="")
    for tool in (SEARCH, IMAGE):
        await refused(ours, tools=[tool])


async def test_a_tool_that_is_served_is_not_omitted(start: Start, serve: Serve, upstream: ScriptedUpstream) -> None:
    ours = start(search__provider="searxng", search__url=serve(SearchServer(SEARXNG)))
    upstream.whole(completion({"content": "Hello"}))
    answer = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "tools": [SEARCH]})
    assert "x-responses-not-offered" not in answer.headers
    assert upstream.requests[0].json["tools"][0]["function"]["name"] == "web_search"


async def test_an_upstream_with_a_responses_api_gets_the_other_tools(start: Start) -> None:
    upstream = ScriptedResponses()
    ours = start(upstream=upstream, upstream__api="responses")
    upstream.whole(response(item()))
    await whole(ours, tools=[IMAGE, SEARCH, FILES, FUNCTION])
    assert upstream.requests[0].json["tools"] == [SEARCH, FILES, FUNCTION]
    await refused(ours, tools=[{"type": "computer"}])


async def test_a_background_response_also_omits_unsupported_tools(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(auth__secret_keys=["k" * 40])
    upstream.stream(*HELLO)
    body = {"model": "tiny", "input": "Hi", "tools": [IMAGE, FUNCTION], "background": True}
    answer = await ours.http.post("/v1/responses", json=body)
    assert answer.headers["x-responses-not-offered"] == "image_generation"
    await upstream.received(1)
    assert len(upstream.requests[0].json["tools"]) == 1
