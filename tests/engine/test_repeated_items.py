"""Clients that send items of earlier turns again, although they continue a response or a conversation."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.oracle import whole
from tests.support.scripted import completion

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "Hi"}
ROLES = ["user", "assistant", "tool", "assistant", "tool"]


@pytest.fixture
def ours(start: Start) -> Ours:
    return start()


def _output(call: dict[str, Any], said: str = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": said}


def _without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "status")}


async def _respond(ours: Ours, upstream: ScriptedUpstream, *, call_id: str | None, **body: Any) -> dict[str, Any]:
    """Make a response that calls `f` with `call_id`, or that says something if this is None."""
    calls = [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    upstream.whole(completion({"content": "Good."} if call_id is None else {"tool_calls": calls}))
    return await whole(ours, tools=[TOOL], **body)


async def _listed(ours: Ours, response_id: str) -> list[str]:
    page = (await ours.http.get(f"/v1/responses/{response_id}/input_items?order=asc")).json()
    return [item["type"] for item in page["data"]]


@pytest.mark.parametrize(
    ("place", "resend"),
    [*product(("chain", "conversation"), ("call", "user", "everything")), ("conversation", "everything with ids")],
)
async def test_a_tool_loop_that_sends_items_again_shows_and_lists_them_once(
    ours: Ours, upstream: ScriptedUpstream, place: str, resend: str
) -> None:
    more = (
        {"conversation": (await ours.http.post("/v1/conversations", json={})).json()["id"]} if place == "conversation" else {}
    )
    history: list[dict[str, Any]] = [USER]
    response = await _respond(ours, upstream, call_id="a", input=[USER], **more)
    for call_id in ("b", None):
        call = response["output"][0]
        call = call if resend == "everything with ids" else _without_id(call)
        history += [call, _output(call)]
        said = {"call": history[-2:], "user": [one for one in history if one.get("type") != "function_call"]}.get(
            resend, history
        )
        more = more if place == "conversation" else {"previous_response_id": response["id"]}
        response = await _respond(ours, upstream, call_id=call_id, input=said, **more)
    assert [message["role"] for message in upstream.requests[-1].json["messages"]] == ROLES
    calls = ["message", "function_call", "function_call_output", "function_call", "function_call_output"]
    assert await _listed(ours, response["id"]) == calls
    if place == "conversation":
        page = (await ours.http.get(f"/v1/conversations/{more['conversation']}/items?order=asc")).json()
        assert [item["type"] for item in page["data"]] == [*calls, "message"]


async def test_a_new_message_before_an_output_goes_ahead_of_the_call_in_all_later_requests(
    ours: Ours, upstream: ScriptedUpstream
) -> None:
    first = await _respond(ours, upstream, call_id="a", input=[USER])
    said = [{"role": "user", "content": "Be brief."}, _output(first["output"][0])]
    second = await _respond(ours, upstream, call_id=None, input=said, previous_response_id=first["id"])
    asked = upstream.requests[-1].json["messages"]
    assert [message["role"] for message in asked] == ["user", "user", "assistant", "tool"]
    assert await _listed(ours, second["id"]) == ["message", "function_call", "message", "function_call_output"]
    await _respond(ours, upstream, call_id=None, input="And?", previous_response_id=second["id"])
    assert upstream.requests[-1].json["messages"][:4] == asked


@pytest.mark.parametrize("place", ["chain", "conversation"])
async def test_another_output_and_another_item_under_a_known_id_are_refused(
    ours: Ours, upstream: ScriptedUpstream, place: str
) -> None:
    more = (
        {"conversation": (await ours.http.post("/v1/conversations", json={})).json()["id"]} if place == "conversation" else {}
    )
    first = await _respond(ours, upstream, call_id="a", input=[USER], **more)
    call = first["output"][0]
    more = more or {"previous_response_id": first["id"]}
    other = {**call, "arguments": "{}"} if place == "conversation" else call
    refused = await ours.http.post("/v1/responses", json={"tools": [TOOL], "input": [other, _output(call)], **more})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0]")
    assert call["id"] in refused.json()["error"]["message"]
    second = await _respond(ours, upstream, call_id=None, input=[_output(call)], **more)
    more = more if place == "conversation" else {"previous_response_id": second["id"]}
    refused = await ours.http.post("/v1/responses", json={"tools": [TOOL], "input": [_output(call, "other")], **more})
    assert refused.status_code == 400
    assert "already has an output" in refused.json()["error"]["message"]
