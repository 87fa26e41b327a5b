"""Runs with MCP tools: streamed, without streaming, and in continued responses."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.engine import turns
from tests.support.mcp_servers import TOKEN, Bearer, Older, weather
from tests.support.oracle import stream, whole
from tests.support.scripted import HELLO, Signal, call, completion, error, finish, json_answer, stream_answer, text, usage

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests.support.scripted import Chunk, ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

NOBODY = {"require_approval": "never"}


@pytest.fixture
def ours(start: Start) -> Ours:
    return start(tools__allow_private_urls=True)


@pytest.fixture
def server(serve: Serve) -> dict[str, Any]:
    """An entry of `tools` for a server that has `get_weather`, `fail` and other tools."""
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    return {"type": "mcp", "server_label": "w", "server_url": url, **NOBODY}


def _asks(name: str = "get_weather", *, index: int = 0, **arguments: Any) -> tuple[Chunk, ...]:
    """The chunks of a tool call, as vLLM streams them."""
    whole = json.dumps(arguments)
    head = call("", name=name, call_id=f"call_{name}_{index}", index=index)
    return head, call(whole[:4], index=index), call(whole[4:], index=index)


def _messages(upstream: ScriptedUpstream, turn: int) -> Any:
    return upstream.requests[turn].json["messages"]


@pytest.mark.both_mounts
async def test_an_mcp_tool_call_is_run_and_its_output_is_sent_to_the_model(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.stream(*_asks(city="Paris"), finish("tool_calls"), usage(10, 5))
    upstream.stream(text("It is sunny."), finish(), usage(40, 4))
    streamed = await stream(ours, tools=[server])
    listed, called, message = streamed.response["output"]
    assert (listed["type"], listed["server_label"]) == ("mcp_list_tools", "w")
    assert "get_weather" in [tool["name"] for tool in listed["tools"]]
    assert (called["type"], called["name"], called["server_label"]) == ("mcp_call", "get_weather", "w")
    assert (called["arguments"], called["output"], called["error"]) == ('{"city": "Paris"}', "Sunny in Paris.", None)
    assert message["content"][0]["text"] == "It is sunny."
    asked, answered = _messages(upstream, 1)[-2:]
    assert asked["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert (answered["role"], answered["tool_call_id"], answered["content"]) == (
        "tool",
        asked["tool_calls"][0]["id"],
        "Sunny in Paris.",
    )


async def test_the_events_of_an_mcp_call_have_the_order_of_the_reference(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.stream(*_asks(city="Paris"), finish("tool_calls"))
    upstream.stream(*HELLO)
    streamed = await stream(ours, tools=[server])
    assert streamed.types[2:16] == [
        "response.output_item.added",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.output_item.done",
        "response.output_item.added",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.delta",
        "response.mcp_call_arguments.delta",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
    ]


async def test_a_response_without_streaming_has_the_same_items(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    upstream.whole(completion({"tool_calls": [{"id": "c", "type": "function", "function": function}]}, "tool_calls"))
    upstream.whole(completion({"content": "Sunny."}))
    document = await whole(ours, tools=[server])
    assert [item["type"] for item in document["output"]] == ["mcp_list_tools", "mcp_call", "message"]
    assert document["output"][1]["output"] == "Sunny in Rome."
    assert document["status"] == "completed"


async def test_usage_sums_all_turns_and_reports_the_tool_output_tokens(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.stream(*_asks(city="Paris"), finish("tool_calls"), usage(10, 5))
    upstream.stream(text("Sunny."), finish(), usage(40, 4))
    counted = (await stream(ours, tools=[server])).response["usage"]
    assert (counted["input_tokens"], counted["output_tokens"], counted["total_tokens"]) == (50, 9, 59)
    assert counted["output_tokens_details"]["tool_output_tokens"] == 25


async def test_all_calls_of_a_turn_are_run_and_keep_their_order(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    slow, quick = _asks("sleep", seconds=0.2), _asks(index=1, city="Oslo")
    upstream.stream(*slow, *quick, finish("tool_calls"))
    upstream.stream(*HELLO)
    output = (await stream(ours, tools=[server])).response["output"]
    assert [(item["name"], item["output"]) for item in output[1:3]] == [("sleep", "slept"), ("get_weather", "Sunny in Oslo.")]


async def test_the_error_of_a_failed_tool_is_sent_to_the_model(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.stream(*_asks("fail", why="no luck"), finish("tool_calls"))
    upstream.stream(*HELLO)
    streamed = await stream(ours, tools=[server])
    failed = streamed.response["output"][1]
    assert (failed["status"], failed["output"]) == ("failed", None)
    assert "no luck" in json.dumps(failed["error"])
    assert "response.mcp_call.failed" in streamed.types
    assert streamed.terminal == "response.completed"
    assert "no luck" in _messages(upstream, 1)[-1]["content"]


async def test_arguments_that_are_not_json_fail_the_call_and_the_model_sees_the_error(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.stream(call("{not json", name="get_weather", call_id="c"), finish("tool_calls"))
    upstream.stream(*HELLO)
    streamed = await stream(ours, tools=[server])
    assert streamed.response["output"][1]["status"] == "failed"
    assert "not a JSON object" in _messages(upstream, 1)[-1]["content"]


async def test_a_turn_that_also_calls_a_function_ends_the_response_with_both_calls(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    clients = {"type": "function", "name": "mine", "parameters": {"type": "object", "properties": {}}}
    upstream.stream(*_asks(city="Rome"), *_asks("mine", index=1), finish("tool_calls"))
    first = (await stream(ours, tools=[server, clients])).response
    assert [item["type"] for item in first["output"]] == ["mcp_list_tools", "mcp_call", "function_call"]
    assert len(upstream.requests) == 1
    upstream.stream(*HELLO)
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "done"}
    second = await stream(ours, tools=[server, clients], previous_response_id=first["id"], input=[output])
    assert [item["type"] for item in second.response["output"]] == ["message"]  # the tools were listed before
    turn = _messages(upstream, 1)[-3:]
    assert [call["function"]["name"] for call in turn[0]["tool_calls"]] == ["get_weather", "mine"]
    assert [message.get("content") for message in turn] == [None, "Sunny in Rome.", "done"]


async def test_a_continued_response_includes_earlier_calls_and_does_not_list_tools_again(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.stream(*_asks(city="Paris"), finish("tool_calls"))
    upstream.stream(*HELLO)
    first = (await stream(ours, tools=[server])).response
    upstream.stream(*HELLO)
    second = (await stream(ours, tools=[server], previous_response_id=first["id"], input="And?")).response
    assert [item["type"] for item in second["output"]] == ["message"]
    roles = [message["role"] for message in _messages(upstream, 2)]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]


async def test_calls_beyond_max_tool_calls_are_dropped_and_the_next_turn_has_no_tools(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.stream(*_asks(city="Paris"), *_asks(index=1, city="Oslo"), finish("tool_calls"))
    upstream.stream(*HELLO)
    response = (await stream(ours, tools=[server], max_tool_calls=1)).response
    assert [item["type"] for item in response["output"]] == ["mcp_list_tools", "mcp_call", "message"]
    assert "tools" in upstream.requests[0].json
    assert "tools" not in upstream.requests[1].json


async def test_the_last_turn_is_requested_without_tools(
    start: Start, upstream: ScriptedUpstream, server: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MAX_TURNS", 2)
    ours = start(tools__allow_private_urls=True)
    upstream.stream(*_asks(city="Paris"), finish("tool_calls"))
    upstream.stream(*HELLO)
    assert (await stream(ours, tools=[server])).terminal == "response.completed"
    assert "tools" not in upstream.requests[1].json


async def test_a_truncated_call_is_not_run(ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]) -> None:
    upstream.stream(*_asks(city="Paris"), finish("length"))
    streamed = await stream(ours, tools=[server])
    assert streamed.terminal == "response.incomplete"
    assert (streamed.response["output"][1]["status"], streamed.response["output"][1]["output"]) == ("incomplete", None)


async def test_allowed_tools_limits_the_tools_offered_to_the_model(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.stream(*HELLO)
    await stream(ours, tools=[{**server, "allowed_tools": ["get_weather"]}])
    assert [tool["function"]["name"] for tool in upstream.requests[0].json["tools"]] == ["get_weather"]


async def test_tools_with_the_same_name_on_two_servers_are_prefixed_with_the_label(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    other = {**server, "server_label": "v", "allowed_tools": ["get_weather"]}
    upstream.stream(*HELLO)
    await stream(ours, tools=[{**server, "allowed_tools": ["get_weather"]}, other])
    names = [tool["function"]["name"] for tool in upstream.requests[0].json["tools"]]
    assert names == ["w__get_weather", "v__get_weather"]
    upstream.stream(*_asks(names[1], city="Kiel"), finish("tool_calls"))
    upstream.stream(*HELLO)
    response = (await stream(ours, tools=[{**server, "allowed_tools": ["get_weather"]}, other])).response
    called = next(item for item in response["output"] if item["type"] == "mcp_call")
    assert (called["server_label"], called["name"]) == ("v", "get_weather")
    assert _messages(upstream, 2)[-2]["tool_calls"][0]["function"]["name"] == names[1]


async def test_a_function_keeps_its_name_when_an_mcp_tool_has_the_same_one(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    mine = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
    upstream.stream(*_asks(city="Kiel"), finish("tool_calls"))
    output = (await stream(ours, tools=[{**server, "allowed_tools": ["get_weather", "sleep"]}, mine])).response["output"]
    names = [tool["function"]["name"] for tool in upstream.requests[0].json["tools"]]
    assert names == ["get_weather", "w__get_weather", "sleep"]
    assert [item["type"] for item in output] == ["mcp_list_tools", "function_call"]


async def test_a_forced_tool_choice_applies_only_to_the_first_turn(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.stream(*_asks(city="Paris"), finish("tool_calls"))
    upstream.stream(*HELLO)
    await stream(ours, tools=[server], tool_choice={"type": "mcp", "server_label": "w", "name": "get_weather"})
    assert upstream.requests[0].json["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    assert "tool_choice" not in upstream.requests[1].json


async def test_images_returned_by_a_tool_are_sent_to_the_model(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.stream(*_asks("picture"), finish("tool_calls"))
    upstream.stream(*HELLO)
    await stream(ours, tools=[server])
    assert "data:image/png;base64," in json.dumps(_messages(upstream, 1))


# -- approval ------------------------------------------------------------------------------------------------------------


async def test_a_call_that_needs_approval_waits_for_it(ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]) -> None:
    server = {**server, "require_approval": "always"}
    upstream.stream(*_asks(city="Paris"), finish("tool_calls"))
    first = (await stream(ours, tools=[server])).response
    request = first["output"][1]
    assert (request["type"], request["name"], request["arguments"]) == (
        "mcp_approval_request",
        "get_weather",
        '{"city": "Paris"}',
    )
    upstream.stream(*HELLO)
    approval = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    second = await stream(ours, tools=[server], previous_response_id=first["id"], input=[approval])
    called = second.response["output"][0]
    assert (called["type"], called["approval_request_id"], called["output"]) == ("mcp_call", request["id"], "Sunny in Paris.")
    assert _messages(upstream, 1)[-1]["content"] == "Sunny in Paris."


async def test_approval_works_without_a_store(ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]) -> None:
    server = {**server, "require_approval": "always"}
    upstream.stream(*_asks(city="Paris"), finish("tool_calls"))
    first = (await stream(ours, tools=[server], store=False)).response
    upstream.stream(*HELLO)
    approval = {"type": "mcp_approval_response", "approval_request_id": first["output"][1]["id"], "approve": True}
    history = [{"role": "user", "content": "Hi"}, *first["output"], approval]
    second = await stream(ours, tools=[server], store=False, input=history)
    assert [item["type"] for item in second.response["output"]] == ["mcp_call", "message"]


async def test_a_rejected_call_is_not_run_and_the_model_sees_the_reason(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    server = {**server, "require_approval": "always"}
    upstream.stream(*_asks(city="Paris"), finish("tool_calls"))
    first = (await stream(ours, tools=[server])).response
    upstream.stream(*HELLO)
    refusal = {
        "type": "mcp_approval_response",
        "approval_request_id": first["output"][1]["id"],
        "approve": False,
        "reason": "too cold",
    }
    second = await stream(ours, tools=[server], previous_response_id=first["id"], input=[refusal])
    assert [item["type"] for item in second.response["output"]] == ["message"]
    assert "too cold" in _messages(upstream, 1)[-1]["content"]


@pytest.mark.parametrize("has_tools", [True, False], ids=["with tools", "without tools"])
async def test_an_approval_of_an_unknown_request_is_a_400_naming_the_parameter(
    ours: Ours, server: dict[str, Any], has_tools: bool
) -> None:
    approval = {"type": "mcp_approval_response", "approval_request_id": "mcpr_none", "approve": True}
    body = {"model": "tiny", "input": [approval], "tools": [server] if has_tools else []}
    response = await ours.http.post("/v1/responses", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input[0].approval_request_id"
    assert "mcpr_none" in response.json()["error"]["message"]


# -- errors and secrets --------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(serve: Serve) -> dict[str, Any]:
    url = serve(Bearer(weather().streamable_http_app(stateless_http=True))) + "/mcp"
    return {"type": "mcp", "server_label": "g", "server_url": url, **NOBODY}


async def test_credentials_rejected_by_an_mcp_server_are_a_401(ours: Ours, guarded: dict[str, Any]) -> None:
    response = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "tools": [guarded]})
    assert response.status_code == 401
    assert "'g'" in response.json()["error"]["message"]


async def test_an_unreachable_mcp_server_is_a_424_naming_its_label(ours: Ours, free_url: str) -> None:
    tool = {"type": "mcp", "server_label": "away", "server_url": f"{free_url}/mcp"}
    response = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "tools": [tool]})
    assert response.status_code == 424
    assert response.json()["error"]["code"] == "external_connector_error"
    assert "'away'" in response.json()["error"]["message"]


async def test_an_upstream_error_after_a_tool_call_is_a_failed_response(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    upstream.whole(completion({"tool_calls": [{"id": "c", "type": "function", "function": function}]}, "tool_calls"))
    upstream.whole(error(), 400)
    response = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "tools": [server]})
    assert response.status_code == 200
    document = response.json()
    assert (document["status"], document["output"][1]["output"]) == ("failed", "Sunny in Rome.")


async def test_secrets_of_a_server_are_neither_echoed_nor_stored(
    ours: Ours, upstream: ScriptedUpstream, guarded: dict[str, Any]
) -> None:
    upstream.stream(*_asks(city="Paris"), finish("tool_calls"))
    upstream.stream(*HELLO)
    streamed = await stream(ours, tools=[{**guarded, "authorization": TOKEN}])
    assert streamed.response["output"][1]["output"] == "Sunny in Paris."
    assert TOKEN not in streamed.raw.decode()
    stored = await ours.http.get(f"/v1/responses/{streamed.response['id']}")
    assert stored.status_code == 200
    assert TOKEN not in stored.text


async def test_a_server_url_with_a_private_address_is_a_400_by_default(start: Start, server: dict[str, Any]) -> None:
    response = await start().http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "tools": [server]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[0].server_url"


def held(signals: tuple[Signal, Signal]) -> ASGIApp:
    """An MCP server that sets the first signal when a client deletes its session, and then waits for the second."""
    app, (asked, go) = Older(weather().streamable_http_app()), signals

    async def holding(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "DELETE":
            asked.set()
            await go.wait()
        await app(scope, receive, send)

    return holding


@pytest.mark.parametrize("ask", [stream, whole])
async def test_a_response_does_not_wait_for_an_mcp_session_to_close(
    ours: Ours, upstream: ScriptedUpstream, serve: Serve, monkeypatch: pytest.MonkeyPatch, ask: Any
) -> None:
    monkeypatch.setattr("responses_mw.tools.mcp_session._DELETE_TIMEOUT", 1000.0)
    asked, go = Signal(), Signal()
    server = {"type": "mcp", "server_label": "w", "server_url": serve(held((asked, go))) + "/mcp", **NOBODY}
    upstream.queue(stream_answer(*HELLO) if ask is stream else json_answer(completion({"content": "Hello"})))
    try:
        async with asyncio.timeout(30):
            await ask(ours, tools=[server])
            await asked.wait()
    finally:
        go.set()


async def test_a_response_waits_when_too_many_mcp_sessions_are_closing(
    ours: Ours, upstream: ScriptedUpstream, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.tools.mcp_session._DELETE_TIMEOUT", 1000.0)
    monkeypatch.setattr("responses_mw.tools.toolbox.MAX_CLOSING", 1)
    asked, go = Signal(), Signal()
    server = {"type": "mcp", "server_label": "w", "server_url": serve(held((asked, go))) + "/mcp", **NOBODY}
    for _ in range(2):
        upstream.queue(json_answer(completion({"content": "Hello"})))
    try:
        async with asyncio.timeout(30):
            await whole(ours, tools=[server])
            second = asyncio.create_task(whole(ours, tools=[server]))
            done, _ = await asyncio.wait({second}, timeout=0.5)
            assert not done
            go.set()
            await second
    finally:
        go.set()
