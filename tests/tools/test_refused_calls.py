"""Calls that nobody can execute: of functions that nobody offers, or that `tool_choice` excludes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.engine import turns
from tests.support.mcp_servers import weather
from tests.support.oracle import stream, whole
from tests.support.scripted import HELLO, call, completion, delta, finish, text, usage

if TYPE_CHECKING:
    from tests.support.scripted import Chunk, ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

FUNCTION = {"type": "function", "name": "f"}
MCP_ONLY = [{"type": "mcp", "server_label": "w", "require_approval": "never"}]
UNSERVED_SEARCH = [{"type": "web_search"}]


@pytest.fixture
def servers(serve: Serve) -> dict[str, Any]:
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    return {"w": {"url": url, "allowed_tools": ["get_weather", "fail"]}}


@pytest.fixture
def ours(start: Start, servers: dict[str, Any]) -> Ours:
    return start(tools__mcp_servers=servers, auth__secret_keys=["a secret that all the replicas of the deployment have"])


def _asks(name: str = "nosuch", arguments: str = '{"a": 1}', index: int = 0) -> Chunk:
    return call(arguments, name=name, call_id=f"call_{index}", index=index)


def _asks_whole(name: str = "nosuch") -> Any:
    function = {"name": name, "arguments": '{"a": 1}'}
    return completion({"tool_calls": [{"id": "call_0", "type": "function", "function": function}]}, "tool_calls")


def _messages(upstream: ScriptedUpstream, turn: int) -> Any:
    return upstream.requests[turn].json["messages"]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("tools", "told"),
    [
        (MCP_ONLY, "There is no tool named 'nosuch'. The available tools are: get_weather, fail."),
        (UNSERVED_SEARCH, "There is no tool named 'nosuch'. No tools are available. Answer without tools."),
        ([], "There is no tool named 'nosuch'. No tools are available. Answer without tools."),
    ],
    ids=["mcp", "web_search", "none"],
)
async def test_the_model_is_informed_that_a_tool_does_not_exist(
    ours: Ours, upstream: ScriptedUpstream, tools: list[dict[str, Any]], told: str, streamed: bool
) -> None:
    if streamed:
        upstream.stream(_asks(), finish("tool_calls"), usage(10, 5))
        upstream.stream(*HELLO)
        response = (await stream(ours, tools=tools)).response
    else:
        upstream.whole(_asks_whole())
        upstream.whole(completion({"content": "Hello"}))
        response = await whole(ours, tools=tools)
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"] if item["type"] != "mcp_list_tools"] == ["message"]
    asked, answered = _messages(upstream, 1)[-2:]
    assert asked["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "nosuch", "arguments": '{"a": 1}'}}
    ]
    assert answered == {"role": "tool", "tool_call_id": "call_0", "content": told}
    if streamed:
        assert response["usage"]["input_tokens"] > 10  # both turns count


async def test_a_chain_and_a_conversation_can_be_continued_after_a_refused_call(ours: Ours, upstream: ScriptedUpstream) -> None:
    conversation = (await ours.http.post("/v1/conversations", json={})).json()["id"]
    upstream.stream(_asks(), finish("tool_calls"))
    upstream.stream(*HELLO)
    await stream(ours, tools=MCP_ONLY, conversation=conversation)
    upstream.stream(_asks(), finish("tool_calls"))
    upstream.stream(*HELLO)
    first = (await stream(ours)).response
    for more in ({"conversation": conversation}, {"previous_response_id": first["id"]}):
        upstream.stream(*HELLO)
        assert (await stream(ours, **more)).terminal == "response.completed"
        assert [message["role"] for message in _messages(upstream, -1)] == ["user", "assistant", "user"]


async def test_a_call_that_can_be_run_beside_one_that_cannot_is_run(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(text("Let me see."), _asks(), _asks("get_weather", '{"city": "Paris"}', index=1), finish("tool_calls"))
    upstream.stream(*HELLO)
    response = (await stream(ours, tools=MCP_ONLY)).response
    assert [item["type"] for item in response["output"]] == ["mcp_list_tools", "message", "mcp_call", "message"]
    contents = [message["content"] for message in _messages(upstream, 1) if message["role"] == "tool"]
    assert sorted(contents) == [
        "Sunny in Paris.",
        "There is no tool named 'nosuch'. The available tools are: get_weather, fail.",
    ]


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_a_name_that_is_nearly_the_name_of_an_mcp_tool_is_run_if_the_request_allows_it(
    ours: Ours, upstream: ScriptedUpstream, choice: str
) -> None:
    upstream.stream(_asks("w.get-weather<|channel|>commentary", '{"city": "Paris"}'), finish("tool_calls"))
    upstream.stream(*HELLO)
    response = (await stream(ours, tools=MCP_ONLY, tool_choice=choice)).response
    called = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert [(item["name"], item["output"]) for item in called] == (
        [("get_weather", "Sunny in Paris.")] if choice == "auto" else []
    )


async def test_a_client_with_functions_gets_the_call_of_an_unknown_one(ours: Ours, upstream: ScriptedUpstream) -> None:
    for tool in (FUNCTION, {"type": "custom", "name": "c"}, {"type": "shell"}):
        upstream.stream(_asks(), finish("tool_calls"))
        response = (await stream(ours, tools=[*MCP_ONLY, tool])).response
        assert [(item["type"], item["name"]) for item in response["output"][1:]] == [("function_call", "nosuch")]


async def test_refused_calls_count_towards_the_maximum_of_calls(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(_asks("get_weather", '{"city": "Paris"}'), _asks(index=1), _asks(index=2), finish("tool_calls"))
    upstream.stream(_asks(), finish("tool_calls"))
    response = (await stream(ours, tools=MCP_ONLY, max_tool_calls=2)).response
    assert [item["type"] for item in response["output"]] == ["mcp_list_tools", "mcp_call", "message"]
    assert response["output"][-1]["content"][0]["text"].startswith("No tool was called. The model called 'nosuch'")
    assert len([message for message in _messages(upstream, 1) if message["role"] == "tool"]) == 2
    assert "tools" not in upstream.requests[1].json
    assert len(upstream.requests) == 2


async def test_a_model_that_calls_only_unknown_tools_is_stopped_at_the_maximum_number_of_turns(
    ours: Ours, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MAX_TURNS", 3)
    for _ in range(3):
        upstream.stream(_asks(), finish("tool_calls"))
    response = (await stream(ours)).response
    assert response["status"] == "completed"
    assert response["output_text"] == "No tool was called. The model called 'nosuch', which the request does not allow."
    assert [len(_messages(upstream, turn)) for turn in range(3)] == [1, 3, 5]


async def test_a_truncated_call_of_an_unknown_tool_ends_the_response(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(_asks(arguments='{"a'), finish("length"))
    assert (await stream(ours)).terminal == "response.incomplete"
    assert len(upstream.requests) == 1


async def test_a_background_response_continues_after_a_refused_call(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(_asks(), finish("tool_calls"))
    upstream.stream(*HELLO)
    events = await ours.client.responses.create(model="tiny", input="Hi", background=True, stream=True)
    *_, last = [event async for event in events]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["message"]


@pytest.mark.parametrize("message", [{"content": ""}, {"content": "Let me see."}])
@pytest.mark.parametrize(
    "choice", ["none", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}]
)
async def test_an_excluded_call_is_logged_and_the_answer_says_that_nothing_was_called(
    ours: Ours, upstream: ScriptedUpstream, choice: Any, message: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    upstream.stream(delta(**message), _asks("g"), finish("tool_calls"))
    streamed = await stream(ours, tools=[FUNCTION, {**FUNCTION, "name": "g"}], tool_choice=choice)
    said = message["content"] or "No tool was called. The model called 'g', which the request does not allow."
    assert (streamed.terminal, streamed.response["output_text"]) == ("response.completed", said)
    assert [item["type"] for item in streamed.response["output"]] == ["message"]
    assert "tool_choice excludes 'g', which the model called" in caplog.text


async def test_an_answer_with_a_format_follows_a_refused_call(
    start: Start, servers: dict[str, Any], upstream: ScriptedUpstream
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    wanted = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    ours = start(upstream__dialect="ollama", tools__mcp_servers=servers)  # asks with the tools first, and then for the format
    upstream.stream(_asks(), finish("tool_calls"))
    upstream.stream(text("Let me see."), finish())
    upstream.stream(text('{"a": 1}'), finish())
    response = (await stream(ours, tools=MCP_ONLY, text=wanted)).response
    assert (response["status"], response["output"][-1]["content"][0]["text"]) == ("completed", '{"a": 1}')
    assert [message["role"] for message in _messages(upstream, -1)] == ["user", "assistant", "tool"]


async def test_long_arguments_of_a_refused_call_are_not_sent_again(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(call(f'{{"q": "{"a" * 20_000}"}}', name="nothing", call_id="c"), finish("tool_calls"))
    upstream.stream(*HELLO)
    assert (await stream(ours)).response["output_text"] == "Hello"
    [_, called, refused] = _messages(upstream, -1)
    assert called["tool_calls"][0]["function"] == {"name": "nothing", "arguments": "{}"}
    assert "There is no tool named 'nothing'." in refused["content"]
