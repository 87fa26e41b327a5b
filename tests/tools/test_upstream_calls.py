"""The model sees its calls again as it wrote them: with its ids, their members, and all calls of a turn in one message."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.protocol.test_history import SERVED
from tests.support.mcp_servers import weather
from tests.support.oracle import stream, whole
from tests.support.scripted import HELLO, call, completion, delta, finish, reasoning, text

if TYPE_CHECKING:
    from tests.support.scripted import Chunk, ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

SIGNED = "call_28fde5__thought__" + "EoRfCkoLAXkI" * 20
MINE = {"type": "function", "name": "mine", "parameters": {"type": "object", "properties": {}}}
GOOGLE = {"google": {"thought_signature": "CpkB"}}


@pytest.fixture
def ours(start: Start) -> Ours:
    return start(tools__allow_private_urls=True)


@pytest.fixture
def server(serve: Serve) -> dict[str, Any]:
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    return {"type": "mcp", "server_label": "w", "server_url": url, "require_approval": "never"}


def _ask(call_id: str, index: int = 0, name: str = "get_weather") -> Chunk:
    return call(json.dumps({"city": f"C{index}"}), name=name, call_id=call_id, index=index)


def _messages(upstream: ScriptedUpstream, turn: int = -1) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = upstream.requests[turn].json["messages"]
    return messages


def _ids(messages: list[dict[str, Any]]) -> list[Any]:
    """The ids of the calls of each assistant message, and of each tool message."""
    return [
        [one["id"] for one in message["tool_calls"]] if "tool_calls" in message else message["tool_call_id"]
        for message in messages
        if "tool_calls" in message or message["role"] == "tool"
    ]


async def _conversation(ours: Ours) -> str:
    return str((await ours.http.post("/v1/conversations", json={})).json()["id"])


@pytest.mark.parametrize("place", ["chain", "conversation", "client"])
async def test_a_history_repeats_the_messages_of_the_tool_loop(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any], place: str
) -> None:
    """The calls of the first turn are parallel. One has late text after it, which belongs to the first turn as well."""
    upstream.stream(reasoning("Hm."), text("Look."), _ask("a1B2c3D4e"), _ask(SIGNED, 1), text("Both."), finish("tool_calls"))
    upstream.stream(_ask("a1B2c3D4e"), finish("tool_calls"))
    upstream.stream(text("Sunny."), finish())
    more: dict[str, Any] = {"conversation": await _conversation(ours)} if place == "conversation" else {}
    first = (await stream(ours, tools=[server], **more)).response
    in_loop = _messages(upstream)
    assert [message["role"] for message in in_loop] == ["user", "assistant", "tool", "tool", "assistant", "tool"]
    assert _ids(in_loop) == [["a1B2c3D4e", SIGNED], "a1B2c3D4e", SIGNED, ["a1B2c3D4e"], "a1B2c3D4e"]
    assert (in_loop[1]["content"], in_loop[1]["reasoning"]) == ("Look.\nBoth.", "Hm.")
    said: Any = "And?"
    if place == "client":
        said, more = (
            [{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "And?"}],
            {"store": False},
        )
    elif place == "chain":
        more = {"previous_response_id": first["id"]}
    upstream.stream(*HELLO)
    await stream(ours, tools=[server], input=said, **more)
    without_reasoning = [{name: message[name] for name in message if name != "reasoning"} for message in in_loop]
    assert _messages(upstream)[:6] == without_reasoning
    assert [message["content"] for message in _messages(upstream)[6:]] == ["Sunny.", "And?"]


async def test_calls_of_the_client_and_of_the_server_in_one_turn_are_one_message(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    asked = (_ask("a"), _ask("b", 1, "mine"), _ask("c", 2), _ask("d", 3, "mine"))
    upstream.stream(*asked, finish("tool_calls"))
    first = (await stream(ours, tools=[server, MINE])).response
    outputs = [{"type": "function_call_output", "call_id": name, "output": name} for name in "db"]
    upstream.stream(*HELLO)
    await stream(ours, tools=[server, MINE], previous_response_id=first["id"], input=outputs)
    assert _ids(_messages(upstream)) == [["a", "b", "c", "d"], "a", "b", "c", "d"]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("place", ["chain", "conversation", "client"])
async def test_a_call_for_the_client_goes_back_with_its_id_and_members(
    ours: Ours, upstream: ScriptedUpstream, place: str, streamed: bool
) -> None:
    function = {"name": "mine", "arguments": "{}", "thought_signature": "s"}
    calls = [{"id": SIGNED, "type": "function", "function": function, "extra_content": GOOGLE, "index": 0}]
    calls.append({"id": "0", "type": "function", "function": {"name": "mine", "arguments": "{}"}, "index": 1})
    calls.append({"id": "0", "type": "function", "function": {"name": "mine", "arguments": "{}"}, "index": 2})
    if streamed:
        upstream.stream(*(delta(tool_calls=[one]) for one in calls), finish("tool_calls"))
    else:
        upstream.whole(completion({"tool_calls": calls}, "tool_calls"))
    more: dict[str, Any] = {"conversation": await _conversation(ours)} if place == "conversation" else {}
    first = (await stream(ours, tools=[MINE], **more)).response if streamed else await whole(ours, tools=[MINE], **more)
    call_ids = [item["call_id"] for item in first["output"]]
    assert len(set(call_ids)) == 3
    assert max(map(len, call_ids)) <= 64
    said = [{"type": "function_call_output", "call_id": one, "output": "done"} for one in call_ids]
    if place == "client":
        said, more = [{"role": "user", "content": "Hi"}, *first["output"], *said], {"store": False}
    elif place == "chain":
        more = {"previous_response_id": first["id"]}
    upstream.whole(completion({"content": "Good."}))
    await whole(ours, tools=[MINE], input=said, **more)
    messages = _messages(upstream)
    assert _ids(messages) == [[SIGNED, "0", "0"], SIGNED, "0", "0"]
    assert [{**one, "index": index} for index, one in enumerate(messages[1]["tool_calls"])] == calls


async def test_members_that_arrive_after_the_beginning_of_a_call_are_kept(ours: Ours, upstream: ScriptedUpstream) -> None:
    late = delta(tool_calls=[{"index": 0, "extra_content": GOOGLE}])
    upstream.stream(_ask("a", name="mine"), late, finish("tool_calls"))
    first = (await stream(ours, tools=[MINE])).response
    assert first["output"][0]["upstream"] == {"call": {"extra_content": GOOGLE}}


async def test_an_id_that_is_too_long_for_an_item_is_forgotten(
    ours: Ours, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.stream(_ask("x" * 70_000, name="mine"), finish("tool_calls"))
    assert "upstream" not in (await stream(ours, tools=[MINE])).response["output"][0]
    assert "were dropped, because they have" in caplog.text


async def test_an_ordinary_call_for_the_client_has_no_further_member(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(_ask("a", name="mine"), finish("tool_calls"))
    assert "upstream" not in (await stream(ours, tools=[MINE])).response["output"][0]


async def test_an_approved_call_and_a_declined_one_keep_the_id_and_the_message_of_the_model(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    tools = [server | {"require_approval": {"always": {"tool_names": ["get_weather"]}, "never": {"tool_names": ["long"]}}}]
    long = call('{"size": 3}', name="long", call_id="b", index=1)
    upstream.stream(text("Look."), _ask(SIGNED), long, _ask("c", 2), finish("tool_calls"))
    first = (await stream(ours, tools=tools)).response
    requests = [item["id"] for item in first["output"] if item["type"] == "mcp_approval_request"]
    answers = [
        {"type": "mcp_approval_response", "approval_request_id": one, "approve": approve}
        for one, approve in zip(requests, (True, False), strict=True)
    ]
    upstream.stream(*HELLO)
    second = (await stream(ours, tools=tools, previous_response_id=first["id"], input=answers)).response
    in_run = _messages(upstream)
    assert _ids(in_run) == [[SIGNED, "b", "c"], SIGNED, "b", "c"]
    assert [message["content"] for message in in_run[1:3]] == ["Look.", "Sunny in C0."]
    upstream.stream(*HELLO)
    await stream(ours, tools=tools, previous_response_id=second["id"], input="And?")
    assert _messages(upstream)[: len(in_run)] == in_run


@pytest.mark.parametrize("kind", SERVED)
async def test_items_of_a_client_always_become_the_same_messages(ours: Ours, upstream: ScriptedUpstream, kind: str) -> None:
    item = {**SERVED[kind][0], "id": "item_0123456789abcdef"}
    said = [{"role": "user", "content": "x"}, item, {"role": "user", "content": "y"}]
    for _ in range(2):
        upstream.whole(completion({"content": "Good."}))
        document = await whole(ours, input=said)
    first, second = _messages(upstream, 0), _messages(upstream, 1)
    assert first == second
    assert _ids(first) == [["item_0123456789abcdef"], "item_0123456789abcdef"]
    upstream.whole(completion({"content": "Good."}))
    await whole(ours, input="z", previous_response_id=document["id"])
    assert _messages(upstream)[: len(first)] == first
