"""`context_management` within a response: tool results are compacted before the next turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.mcp_servers import weather
from tests.support.oracle import stream, whole
from tests.support.scripted import BrokenOff, call, completion, finish, text, usage

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

SUMMARY = "Paris is sunny."
ABOVE = [{"type": "compaction", "compact_threshold": 100}]
CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}


@pytest.fixture
def ours(start: Start) -> Ours:
    return start(tools__allow_private_urls=True, auth__secret_keys=["k" * 40], compaction__prompt="Sum it up.")


@pytest.fixture
def server(serve: Serve) -> dict[str, Any]:
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    return {"type": "mcp", "server_label": "w", "server_url": url, "require_approval": "never"}


async def test_tool_results_are_compacted_between_turns(ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]) -> None:
    upstream.pages["/tokenize"] = {"tokens": [*range(2000)]}
    upstream.stream(call('{"city": "Paris"}', name="get_weather", call_id="c"), finish("tool_calls"), usage(10, 5))
    upstream.stream(text(SUMMARY), finish(), usage(30, 4))
    upstream.stream(text("Sunny."), finish(), usage(20, 2))
    streamed = await stream(ours, input="How is Paris?", tools=[server], context_management=ABOVE)
    output = streamed.response["output"]
    assert [item["type"] for item in output] == ["mcp_list_tools", "mcp_call", "compaction", "message"]
    assert streamed.response["usage"]["total_tokens"] == 15 + 34 + 22
    asked, summing_up, going_on = (request.json for request in upstream.requests)
    assert [message["role"] for message in summing_up["messages"]] == ["user", "assistant", "tool", "user"]
    assert summing_up["messages"][2]["content"] == "Sunny in Paris."
    assert "tools" not in summing_up
    (told,) = going_on["messages"]
    assert SUMMARY in told["content"]
    assert going_on["tools"] == asked["tools"]

    upstream.whole(completion({"content": "Bye."}))
    await whole(ours, input="Thanks.", previous_response_id=streamed.response["id"])
    assert [message["role"] for message in upstream.requests[-1].json["messages"]] == ["user", "assistant", "user"]
    assert "Sunny in Paris." not in str(upstream.requests[-1].json)


async def test_a_response_can_compact_after_each_turn(ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]) -> None:
    upstream.pages["/tokenize"] = {"tokens": [*range(2000)]}
    for answer in (
        {"tool_calls": [CALL]},
        {"content": SUMMARY},
        {"tool_calls": [CALL]},
        {"content": SUMMARY},
        {"content": "So."},
    ):
        upstream.whole(completion(answer, "tool_calls" if "tool_calls" in answer else "stop"))
    document = await whole(ours, tools=[server], context_management=ABOVE)
    kinds = [item["type"] for item in document["output"]]
    assert kinds == ["mcp_list_tools", "mcp_call", "compaction", "mcp_call", "compaction", "message"]
    assert SUMMARY in str(upstream.requests[3].json["messages"][0])


async def test_a_failed_compaction_between_turns_fails_the_response(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.pages["/tokenize"] = {"tokens": [*range(2000)]}
    upstream.stream(call('{"city": "Paris"}', name="get_weather", call_id="c"), finish("tool_calls"), usage(10, 5))
    upstream.whole({"error": {"message": "no good", "type": "BadRequestError", "code": 400}}, 400)
    streamed = await stream(ours, tools=[server], context_management=ABOVE)
    assert streamed.terminal == "response.failed"
    assert [item["type"] for item in streamed.response["output"]] == ["mcp_list_tools", "mcp_call"]


async def test_a_compaction_whose_stream_breaks_off_twice_fails_the_response(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    upstream.pages["/tokenize"] = {"tokens": [*range(2000)]}
    upstream.stream(call('{"city": "Paris"}', name="get_weather", call_id="c"), finish("tool_calls"), usage(10, 5))
    for _ in range(2):
        upstream.stream(text("Paris is"), BrokenOff(), done=False)
    streamed = await stream(ours, tools=[server], context_management=ABOVE)
    assert streamed.terminal == "response.failed"
    assert [item["type"] for item in streamed.response["output"]] == ["mcp_list_tools", "mcp_call"]
    assert len(upstream.requests) == 3
