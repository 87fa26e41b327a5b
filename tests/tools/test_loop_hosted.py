"""Runs with web search and the code interpreter, and tools in background responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.mcp_servers import TOKEN, Bearer, Watched, weather
from tests.support.oracle import stream
from tests.support.sandbox import launcher, levels
from tests.support.scripted import HELLO, call, completion, finish, text
from tests.support.search_servers import SEARXNG, SearchServer

if TYPE_CHECKING:
    from tests.support.scripted import Chunk, ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

SECRET = "a secret that all the replicas of the deployment have"
SEARCH = {"type": "web_search"}
PYTHON = {"type": "code_interpreter", "container": {"type": "auto"}}


def _asks(name: str, **arguments: Any) -> tuple[Chunk, ...]:
    whole = json.dumps(arguments)
    return call("", name=name, call_id="c"), call(whole[:9]), call(whole[9:])


@pytest.fixture
def searching(start: Start, serve: Serve) -> Ours:
    return start(search__provider="searxng", search__url=serve(SearchServer(SEARXNG)))


@pytest.mark.both_mounts
async def test_a_web_search_is_run_and_its_sources_are_cited(searching: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*_asks("web_search", query="capital of france"), finish("tool_calls"))
    upstream.stream(text("Paris [1], says [B](https://www.britannica.com/place/Paris)."), finish())
    streamed = await stream(searching, tools=[SEARCH])
    searched, message = streamed.response["output"]
    assert (searched["type"], searched["status"]) == ("web_search_call", "completed")
    assert searched["action"] == {"type": "search", "query": "capital of france", "queries": ["capital of france"]}
    assert "results" not in searched
    cited = message["content"][0]["annotations"]
    assert [(one["type"], one["url"]) for one in cited] == [
        ("url_citation", "https://en.wikipedia.org/wiki/Paris"),
        ("url_citation", "https://www.britannica.com/place/Paris"),
    ]
    assert "largest city of France" in upstream.requests[1].json["messages"][-1]["content"]


async def test_citation_markers_of_a_web_search_become_links(searching: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*_asks("web_search", query="capital of france"), finish("tool_calls"))
    upstream.stream(text("It is Paris"), text(" 【"), text("2"), text("】."), text(" 【9】"), finish())
    streamed = await stream(searching, tools=[SEARCH])
    part = streamed.response["output"][1]["content"][0]
    link = "([britannica.com](https://www.britannica.com/place/Paris))"
    assert part["text"] == f"It is Paris {link}."
    (cited,) = part["annotations"]
    assert part["text"][cited["start_index"] : cited["end_index"]] == link
    assert cited["url"] == "https://www.britannica.com/place/Paris"
    (event,) = [one for one in streamed.events if one["type"] == "response.output_text.annotation.added"]
    assert event["annotation"] == cited


async def test_citation_markers_are_removed_in_later_responses_without_the_tool(
    searching: Ours, upstream: ScriptedUpstream
) -> None:
    upstream.stream(*_asks("web_search", query="capital of france"), finish("tool_calls"))
    upstream.stream(*HELLO)
    first = (await stream(searching, tools=[SEARCH])).response
    upstream.stream(text("Paris【1】"), finish())
    second = (await stream(searching, previous_response_id=first["id"], input="And?")).response
    part = second["output"][0]["content"][0]
    assert "【" not in part["text"]
    assert [one["url"] for one in part["annotations"]] == ["https://en.wikipedia.org/wiki/Paris"]


async def test_brackets_stay_in_answers_without_searches(searching: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(text("Paris【1】 "), finish())
    part = (await stream(searching)).response["output"][0]["content"][0]
    assert (part["text"], part["annotations"]) == ("Paris【1】 ", [])


async def test_the_events_of_a_web_search_have_the_order_of_the_reference(searching: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*_asks("web_search", query="capital of france"), finish("tool_calls"))
    upstream.stream(text("Paris [1]."), finish())
    streamed = await stream(searching, tools=[SEARCH])
    assert streamed.types[2:14] == [
        "response.output_item.added",
        "response.web_search_call.in_progress",
        "response.web_search_call.searching",
        "response.web_search_call.completed",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.annotation.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]


async def test_search_sources_and_results_are_shown_only_with_include(searching: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*_asks("web_search", query="capital of france"), finish("tool_calls"))
    upstream.stream(*HELLO)
    include = ["web_search_call.action.sources", "web_search_call.results"]
    shown = (await stream(searching, tools=[SEARCH], include=include)).response
    assert [source["url"] for source in shown["output"][0]["action"]["sources"]] == [
        "https://en.wikipedia.org/wiki/Paris",
        "https://www.britannica.com/place/Paris",
    ]
    assert len(shown["output"][0]["results"]) == 2
    plain = (await searching.http.get(f"/v1/responses/{shown['id']}")).json()
    assert "results" not in plain["output"][0]
    asked = (await searching.http.get(f"/v1/responses/{shown['id']}", params={"include[]": include})).json()
    assert asked["output"] == shown["output"]


async def test_a_continued_response_includes_earlier_search_results_and_can_cite_them(
    searching: Ours, upstream: ScriptedUpstream
) -> None:
    upstream.stream(*_asks("web_search", query="capital of france"), finish("tool_calls"))
    upstream.stream(*HELLO)
    first = (await stream(searching, tools=[SEARCH])).response
    upstream.stream(text("See [2]."), finish())
    second = (await stream(searching, tools=[SEARCH], previous_response_id=first["id"], input="And?")).response
    contents = [message.get("content") for message in upstream.requests[2].json["messages"]]
    assert any(content and "largest city of France" in content for content in contents)
    cited = second["output"][0]["content"][0]["annotations"]
    assert [one["url"] for one in cited] == ["https://www.britannica.com/place/Paris"]


async def test_urls_in_search_results_sent_by_a_client_are_not_fetched(
    searching: Ours, upstream: ScriptedUpstream, serve: Serve
) -> None:
    watched = Watched(weather().streamable_http_app(stateless_http=True))
    url = serve(watched) + "/mcp"
    claim = {
        "type": "web_search_call",
        "id": "ws_1",
        "action": {"type": "open_page", "url": url, "sources": [{"type": "url", "url": url}]},
        "results": [{"number": 2**31, "url": url, "title": "T", "snippet": ""}, {"number": "x"}, 7],
    }
    upstream.stream(text(f"See [Me]({url})."), finish())
    streamed = await stream(searching, tools=[SEARCH], input=[claim, {"role": "user", "content": "Hi"}])
    assert [one["url"] for one in streamed.response["output"][0]["content"][0]["annotations"]] == [url]
    assert watched.methods == []


async def test_web_search_with_external_web_access_false_is_not_offered(start: Start, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    streamed = await stream(start(), tools=[{**SEARCH, "external_web_access": False}])
    assert "tools" not in upstream.requests[0].json
    assert streamed.terminal == "response.completed"


@pytest.fixture(scope="session")
def sandbox() -> Iterator[dict[str, str]]:
    with ExitStack() as stack:
        yield {
            "tools__sandbox_url": launcher(stack)(levels()[0], token="a-token-of-the-sandbox").url,
            "tools__sandbox_token": "a-token-of-the-sandbox",
        }


async def test_a_continued_response_runs_code_in_the_same_container(
    start: Start, upstream: ScriptedUpstream, sandbox: dict[str, str]
) -> None:
    ours = start(**sandbox)
    upstream.stream(*_asks("python", code='n = 41\nprint("set")'), finish("tool_calls"))
    upstream.stream(*HELLO)
    first = await stream(ours, tools=[PYTHON], include=["code_interpreter_call.outputs"])
    ran = first.response["output"][0]
    assert (ran["type"], ran["code"]) == ("code_interpreter_call", 'n = 41\nprint("set")')
    assert ran["outputs"] == [{"type": "logs", "logs": "set"}]
    assert first.types[2:4] == ["response.output_item.added", "response.code_interpreter_call.in_progress"]
    assert [kind for kind in first.types if "code_interpreter_call" in kind][-3:] == [
        "response.code_interpreter_call_code.done",
        "response.code_interpreter_call.interpreting",
        "response.code_interpreter_call.completed",
    ]
    upstream.stream(*_asks("python", code="n + 1"), finish("tool_calls"))
    upstream.stream(*HELLO)
    second = await stream(ours, tools=[PYTHON], previous_response_id=first.response["id"], input="And one more?")
    assert second.response["output"][0]["container_id"] == ran["container_id"]
    assert second.response["output"][0]["outputs"] is None
    assert upstream.requests[3].json["messages"][-1]["content"] == "42"


@pytest.mark.parametrize("by", ["the tool", "an item", "the model"])
async def test_a_container_id_of_another_owner_gives_no_access_to_the_container(
    start: Start, upstream: ScriptedUpstream, sandbox: dict[str, str], by: str
) -> None:
    ours = start(**sandbox)
    upstream.stream(*_asks("python", code="secret = 'forty-one'"), finish("tool_calls"))
    upstream.stream(*HELLO)
    container = (await stream(ours, tools=[PYTHON])).response["output"][0]["container_id"]
    ours.http.headers["authorization"] = "Bearer another"
    claim = {"type": "code_interpreter_call", "id": "ci_1", "code": "", "container_id": container, "status": "completed"}
    given: dict[str, dict[str, Any]] = {
        "the tool": {"tools": [{**PYTHON, "container": container}]},
        "an item": {"tools": [PYTHON], "input": [claim, {"role": "user", "content": "Hi"}]},
        "the model": {"tools": [{"type": "mcp", "server_label": "code_interpreter", "require_approval": "never"}]},
    }
    named = {"container_id": container} if by == "the model" else {}
    upstream.stream(*_asks("python", code="secret", **named), finish("tool_calls"))
    upstream.stream(*HELLO)
    await stream(ours, **given[by])
    read = upstream.requests[3].json["messages"][-1]["content"]
    assert ("not found" if by == "the model" else "NameError") in read
    assert "forty-one" not in read


async def test_tools_run_in_background_with_encrypted_credentials(
    start: Start, serve: Serve, upstream: ScriptedUpstream
) -> None:
    ours = start(tools__allow_private_urls=True, auth__secret_keys=[SECRET])
    url = serve(Bearer(weather().streamable_http_app(stateless_http=True))) + "/mcp"
    tool = {"type": "mcp", "server_label": "g", "server_url": url, "require_approval": "never", "authorization": TOKEN}
    upstream.stream(*_asks("get_weather", city="Paris"), finish("tool_calls"))
    upstream.stream(*HELLO)
    created = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "tools": [tool], "background": True})
    assert created.status_code == 200, created.text
    assert TOKEN not in created.text
    async with asyncio.timeout(60):
        while (document := (await ours.http.get(f"/v1/responses/{created.json()['id']}")).json())["status"] in (
            "queued",
            "in_progress",
        ):
            await asyncio.sleep(0.02)
    assert document["status"] == "completed"
    assert document["output"][1]["output"] == "Sunny in Paris."
    log = await ours.http.get(f"/v1/responses/{document['id']}", params={"stream": "true"})
    assert "response.mcp_call.completed" in log.text
    assert TOKEN not in log.text


async def test_code_can_read_uploaded_files_of_the_caller_only(
    start: Start, upstream: ScriptedUpstream, sandbox: dict[str, str]
) -> None:
    ours = start(**sandbox)
    file = await ours.client.files.create(file=("days.csv", b"city,days"), purpose="user_data")
    tools = [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": [file.id]}}]
    function = {"name": "python", "arguments": json.dumps({"code": "open('days.csv').read()"})}
    upstream.whole(completion({"tool_calls": [{"id": "c", "type": "function", "function": function}]}, "tool_calls"))
    upstream.whole(completion({"content": "Hello"}))
    body = {"model": "tiny", "input": "Hi", "tools": tools}
    answer = await ours.http.post("/v1/responses", json=body, headers={"authorization": f"Bearer {ours.client.api_key}"})
    assert answer.status_code == 200, answer.text
    refused = await ours.http.post("/v1/responses", json=body, headers={"authorization": "Bearer another"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].container.file_ids[0]")
    assert len(upstream.requests) == 2
    assert upstream.requests[1].json["messages"][-1]["content"] == "'city,days'"


async def test_without_files_the_container_gets_none(start: Start, sandbox: dict[str, str]) -> None:
    ours = start(**sandbox, files__enabled=False)
    tools = [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["file-1"]}}]
    answer = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "tools": tools})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].container.file_ids")
