"""Unstored responses that a connection keeps in memory, and evicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.scripted import HELLO, call, error, finish, frame, text
from tests.support.websocket import UVICORN, opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.oracle import Event
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

Chat = list[tuple[str, str]]


def asked(upstream: ScriptedUpstream, number: int = -1) -> Chat:
    """Role and text of the messages of a chat request."""
    return [(message["role"], _text(message["content"])) for message in upstream.requests[number].json["messages"]]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def is_unknown(event: Event, response_id: str) -> bool:
    assert event["error"]["message"] == f"Previous response with id '{response_id}' not found."
    assert event["error"]["param"] == "previous_response_id"
    return (event["status"], event["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.both_mounts
async def test_an_unstored_response_can_be_continued_on_its_connection(ws: Ours, upstream: ScriptedUpstream) -> None:
    for _ in range(3):
        upstream.stream(*HELLO)
    async with opened(ws) as socket:
        first = await socket.response("One", store=False, instructions="Be brief.")
        second = await socket.response("Two", store=False, previous_response_id=first["id"])
        await socket.response("Three", store=False, previous_response_id=second["id"], stream_id="fork")
    assert asked(upstream) == [
        ("user", "One"),
        ("assistant", "Hello"),
        ("user", "Two"),
        ("assistant", "Hello"),
        ("user", "Three"),
    ]


async def test_the_access_line_gives_the_reason_a_continuation_is_not_stored(
    ws: Ours, upstream: ScriptedUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "responses_mw.access")
    upstream.stream(*HELLO)
    upstream.stream(*HELLO)
    async with opened(ws) as socket:
        first = await socket.response("One", store=False)
        second = await socket.response("Two", previous_response_id=first["id"])
    assert second["store"] is False
    [line] = [text for text in caplog.messages if f"response={second['id']}" in text]
    assert "unstored=previous_response" in line


async def test_an_unstored_response_is_unknown_on_another_connection_and_over_http(
    ws: Ours, upstream: ScriptedUpstream
) -> None:
    upstream.stream(*HELLO)
    async with opened(ws) as one, opened(ws) as other:
        first = await one.response("One", store=False)
        assert is_unknown(await other.error("Two", previous_response_id=first["id"]), first["id"])
    answer = await ws.http.post("/v1/responses", json={"input": "Two", "previous_response_id": first["id"]})
    assert answer.status_code == 400
    assert (await ws.http.get(f"/v1/responses/{first['id']}", headers={"authorization": "Bearer key"})).status_code == 404


async def test_an_unknown_response_cannot_be_continued(ws: Ours) -> None:
    async with opened(ws) as socket:
        assert is_unknown(await socket.error(previous_response_id="resp_unknown"), "resp_unknown")


async def test_a_stored_response_can_be_continued_on_another_connection(ws: Ours, upstream: ScriptedUpstream) -> None:
    for _ in range(3):
        upstream.stream(*HELLO)
    async with opened(ws) as one, opened(ws) as other:
        first = await one.response("One")
        second = await other.response("Two", previous_response_id=first["id"], store=False)
        await other.response("Three", previous_response_id=second["id"], store=False)
    assert [role for role, _ in asked(upstream)] == ["user", "assistant", "user", "assistant", "user"]


async def test_a_continuation_of_an_unstored_response_is_not_stored(ws: Ours, upstream: ScriptedUpstream) -> None:
    for _ in range(3):
        upstream.stream(*HELLO)
    async with opened(ws) as socket:
        first = await socket.response("One", store=False)
        second = await socket.response("Two", previous_response_id=first["id"])
        assert second["store"] is False
        third = await socket.response("Three", previous_response_id=second["id"])
    for response in (second, third):
        got = await ws.http.get(f"/v1/responses/{response['id']}", headers={"authorization": "Bearer key"})
        assert got.status_code == 404


async def test_a_refused_continuation_evicts_the_previous_response(patient_ws: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    upstream.whole(error("no"), 400)
    async with opened(patient_ws) as socket:
        first = await socket.response("One", store=False)
        assert (await socket.error("Two", store=False, previous_response_id=first["id"]))["status"] == 400
        assert is_unknown(await socket.error("Two", store=False, previous_response_id=first["id"]), first["id"])


async def test_a_failed_continuation_evicts_the_previous_response(ws: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    upstream.stream(text("Hel"), frame(error("broken", 500)), done=False)
    async with opened(ws) as socket:
        first = await socket.response("One", store=False)
        await socket.create("Two", store=False, previous_response_id=first["id"])
        assert (await socket.events())[-1]["type"] == "response.failed"
        assert is_unknown(await socket.error("Two", store=False, previous_response_id=first["id"]), first["id"])


async def test_an_invalid_continuation_evicts_the_previous_response(ws: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    async with opened(ws) as socket:
        first = await socket.response("One", store=False)
        await socket.error("Two", temperature=9, previous_response_id=first["id"])
        assert is_unknown(await socket.error("Two", previous_response_id=first["id"]), first["id"])


@pytest.mark.parametrize("store", [True, False])
async def test_a_response_with_generate_false_can_be_continued(ws: Ours, upstream: ScriptedUpstream, store: bool) -> None:
    upstream.stream(*HELLO)
    prompt = [{"role": "developer", "content": "Speak like a pirate."}]
    async with opened(ws) as socket:
        await socket.create(prompt, generate=False, store=store)
        events = await socket.events()
        assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
        assert [event["sequence_number"] for event in events] == [0, 1, 2]
        prepared = events[-1]["response"]
        assert (prepared["status"], prepared["output"], prepared["usage"]) == ("completed", [], None)
        assert not upstream.requests
        await socket.response("Hi", previous_response_id=prepared["id"], store=store)
    assert asked(upstream) == [("developer", "Speak like a pirate."), ("user", "Hi")]


async def test_the_oldest_responses_are_evicted_at_the_memory_limit(start_ws: Start, upstream: ScriptedUpstream) -> None:
    for _ in range(4):
        upstream.stream(*HELLO)
    async with opened(start_ws(limits__memory_bytes=40_000)) as socket:
        old = await socket.response("x" * 6000, store=False)
        new = await socket.response("x" * 6000, store=False)
        assert is_unknown(await socket.error(previous_response_id=old["id"]), old["id"])
        assert await socket.response("Two", store=False, previous_response_id=new["id"])
        huge = await socket.response("x" * 20_000, store=False)
        assert is_unknown(await socket.error(previous_response_id=huge["id"]), huge["id"])


async def test_a_function_call_output_follows_its_unstored_call_on_the_connection(ws: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(call("{}", name="look", call_id="call_1"), finish("tool_calls"))
    upstream.stream(*HELLO)
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    async with opened(ws) as socket:
        first = await socket.response("Look", store=False, tools=tools)
        output = {"type": "function_call_output", "call_id": "call_1", "output": "a cat"}
        await socket.response([output], store=False, tools=tools, previous_response_id=first["id"])
    messages = upstream.requests[-1].json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == "call_1"


async def test_a_response_that_could_not_be_stored_can_be_continued_on_its_connection(
    start_at: Callable[..., Ours], upstream: ScriptedUpstream
) -> None:
    ours = start_at("proxy", uvicorn=UVICORN, redis__url="redis://127.0.0.1:1", redis__timeout=0.2)
    upstream.stream(*HELLO)
    upstream.stream(*HELLO)
    async with opened(ours) as socket:
        first = await socket.response("One")
        assert first["store"] is False
        await socket.response("Two", previous_response_id=first["id"])
    assert [role for role, _ in asked(upstream)] == ["user", "assistant", "user"]


async def test_a_websocket_receives_a_cache_hit(start_ws: Start, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    async with opened(start_ws(cache__mode="exact")) as socket:
        first = await socket.response("One")
        second = await socket.response("One")
    assert first["id"] != second["id"]
    assert first["output_text"] == second["output_text"] == "Hello"
    assert len(upstream.requests) == 1
