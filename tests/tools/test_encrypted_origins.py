"""Clients that drop the member `upstream` of items keep encrypted copies: `include: ["reasoning.encrypted_content"]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.oracle import stream, whole
from tests.support.scripted import HELLO, completion, delta, finish, reasoning, text
from tests.tools.test_upstream_calls import GOOGLE, MINE, SIGNED, _ask, _messages, server

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

__all__ = ["server"]  # a fixture

SEALED: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}
HI = {"role": "user", "content": "Hi"}


@pytest.fixture
def ours(start: Start) -> Ours:
    return start(tools__allow_private_urls=True, auth__secret_keys=["k" * 32])


def _calls(*call_ids: str, **members: Any) -> list[dict[str, Any]]:
    function = {"name": "mine", "arguments": "{}"}
    return [
        {"index": index, "id": one, "type": "function", "function": function, **members} for index, one in enumerate(call_ids)
    ]


async def _asked(
    ours: Ours, upstream: ScriptedUpstream, calls: list[dict[str, Any]], *, streamed: bool = True, **more: Any
) -> list[dict[str, Any]]:
    """The output of a turn with these calls."""
    if streamed:
        upstream.stream(*(delta(tool_calls=[one]) for one in calls), finish("tool_calls"))
        response = (await stream(ours, input=[HI], tools=[MINE], **SEALED, **more)).response
    else:
        upstream.whole(completion({"tool_calls": calls}, "tool_calls"))
        response = await whole(ours, input=[HI], tools=[MINE], **SEALED, **more)
    output: list[dict[str, Any]] = response["output"]
    return output


def _without_member(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name != "upstream"} for item in items]


def _outputs(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": one, "output": "done"} for one in calls]


async def _sent(
    ours: Ours, upstream: ScriptedUpstream, items: list[dict[str, Any]], tools: Any = (MINE,)
) -> list[dict[str, Any]]:
    """The messages that the upstream gets if a client sends `items` and the outputs of calls."""
    upstream.whole(completion({"content": "Good."}))
    await whole(ours, input=[HI, *items, *_outputs(items)], tools=list(tools), **SEALED)
    return _messages(upstream)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_drops_the_member_sends_the_calls_as_the_model_wrote_them(
    ours: Ours, upstream: ScriptedUpstream, streamed: bool
) -> None:
    calls = _calls(SIGNED, "0", "0", extra_content=GOOGLE)
    output = await _asked(ours, upstream, calls, streamed=streamed)
    assert [item["type"] for item in output] == ["function_call"] * 3 + ["reasoning"]
    messages = await _sent(ours, upstream, _without_member(output))
    assert [{**one, "index": index} for index, one in enumerate(messages[1]["tool_calls"])] == calls
    assert [one["tool_call_id"] for one in messages[2:]] == [SIGNED, "0", "0"]
    assert messages == await _sent(ours, upstream, output)


@pytest.mark.parametrize("calls", [_calls("c1", extra_content=GOOGLE), _calls(SIGNED)])
async def test_copies_are_made_of_members_and_of_ids_that_clients_do_not_get(
    ours: Ours, upstream: ScriptedUpstream, calls: list[dict[str, Any]]
) -> None:
    *_, last = await _asked(ours, upstream, calls)
    assert (last["type"], last["summary"], "content" in last) == ("reasoning", [], False)
    assert "thought" not in str(_without_member([last]))


async def test_a_turn_without_members_to_keep_has_no_copies(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    assert [item["type"] for item in await _asked(ours, upstream, _calls("c1", "c2"))] == ["function_call"] * 2
    upstream.stream(_ask("a"), finish("tool_calls"))
    upstream.stream(*HELLO)
    answer = (await stream(ours, tools=[server], **SEALED)).response
    assert [item["type"] for item in answer["output"]] == ["mcp_list_tools", "mcp_call", "message"]


async def test_a_response_without_encrypted_reasoning_has_no_copies(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*(delta(tool_calls=[one]) for one in _calls(SIGNED)), finish("tool_calls"))
    assert len((await stream(ours, tools=[MINE], store=False)).response["output"]) == 1


async def test_a_turn_that_was_cut_has_no_copies(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*(delta(tool_calls=[one]) for one in _calls(SIGNED)), finish("length"))
    response = (await stream(ours, tools=[MINE], **SEALED)).response
    assert (response["status"], [item["type"] for item in response["output"]]) == ("incomplete", ["function_call"])


async def test_copies_restore_the_turn_of_calls_of_the_client_and_of_the_server(
    ours: Ours, upstream: ScriptedUpstream, server: dict[str, Any]
) -> None:
    signed = delta(tool_calls=[{**_calls("m", extra_content=GOOGLE)[0], "index": 2}])
    asked = (reasoning("Hm."), text("Look."), _ask(SIGNED), _ask("b", 1), signed, finish("tool_calls"))
    upstream.stream(*asked)
    output = (await stream(ours, input=[HI], tools=[server, MINE], **SEALED)).response["output"]
    assert output[-1]["type"] == "reasoning"
    messages = await _sent(ours, upstream, _without_member(output), (server, MINE))
    assert messages == await _sent(ours, upstream, output, (server, MINE))
    assert [one["id"] for one in messages[1]["tool_calls"]] == [SIGNED, "b", "m"]
    assert (messages[1]["content"], messages[1]["reasoning"]) == ("Look.", "Hm.")


@pytest.mark.parametrize("place", ["chain", "conversation"])
async def test_copies_do_not_change_the_prompts_of_stored_histories(ours: Ours, upstream: ScriptedUpstream, place: str) -> None:
    prompts = []
    manners: list[dict[str, Any]] = [{}, {"include": SEALED["include"]}]
    for more in manners:
        if place == "conversation":
            more["conversation"] = (await ours.http.post("/v1/conversations", json={})).json()["id"]
        upstream.stream(*(delta(tool_calls=[one]) for one in _calls("0", "0", extra_content=GOOGLE)), finish("tool_calls"))
        first = (await stream(ours, tools=[MINE], **more)).response
        second = more if place == "conversation" else {**more, "previous_response_id": first["id"]}
        upstream.stream(*HELLO)
        said = (await stream(ours, tools=[MINE], input=_outputs(first["output"]), **second)).response
        third = more if place == "conversation" else {**more, "previous_response_id": said["id"]}
        upstream.stream(*HELLO)
        await stream(ours, tools=[MINE], input="And?", **third)
        prompts.append((upstream.requests[-2].json["messages"], upstream.requests[-1].json["messages"]))
    (before, after), sealed = prompts
    assert (before, after) == sealed
    assert after[: len(before)] == before
    assert [one["extra_content"] for one in before[1]["tool_calls"]] == [GOOGLE, GOOGLE]


async def test_copies_of_another_owner_are_a_400(ours: Ours, upstream: ScriptedUpstream) -> None:
    output = await _asked(ours, upstream, _calls(SIGNED))
    body = {"model": "tiny", "input": [HI, *_without_member(output), *_outputs(output)], "tools": [MINE], **SEALED}
    answer = await ours.http.post("/v1/responses", json=body, headers={"authorization": "Bearer somebody else"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_encrypted_content")


async def test_a_member_that_a_client_sends_takes_precedence_over_its_copy(ours: Ours, upstream: ScriptedUpstream) -> None:
    output = await _asked(ours, upstream, _calls(SIGNED))
    messages = await _sent(ours, upstream, [{**output[0], "upstream": {"id": "own"}}, output[1]])
    assert messages[1]["tool_calls"][0]["id"] == "own"
