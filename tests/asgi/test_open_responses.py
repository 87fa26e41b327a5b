"""The requirements of the Open Responses compliance suite, over HTTP and WebSocket.

`scripts/e2e compliance` runs the suite itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import spec
from tests.support.scripted import HELLO, call, completion, delta, error, finish, reasoning, text, usage
from tests.support.websocket import UVICORN, opened

if TYPE_CHECKING:
    from tests.support.scripted import Chunk, ScriptedUpstream
    from tests.support.servers import Ours, Start

WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
CALLER = {"authorization": "Bearer key"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
TALK: Any = [
    {"type": "message", "role": "user", "content": "We launch on Tuesday."},
    {"type": "message", "role": "assistant", "content": "Understood."},
]
CALL = (call("{}", name="get_weather", call_id="call_1"), finish("tool_calls"), usage())
THOUGHT = (reasoning("Hm."), text("Hello"), finish(), usage())
REQUESTS: dict[str, tuple[dict[str, Any], tuple[Chunk, ...], list[str]]] = {
    "a message": ({"input": TALK[:1]}, HELLO, ["message"]),
    "phases": (
        {"input": [{**TALK[1], "phase": "commentary"}, {**TALK[1], "phase": "final_answer"}, *TALK[:1]]},
        HELLO,
        ["message"],
    ),
    "a system message": ({"input": [{**TALK[0], "role": "system"}, *TALK[:1]]}, HELLO, ["message"]),
    "a tool": ({"input": "Hi", "tools": [WEATHER]}, CALL, ["function_call"]),
    "an image": ({"input": [{**TALK[0], "content": [{"type": "input_text", "text": "Hi"}, IMAGE]}]}, HELLO, ["message"]),
    "several turns": ({"input": [*TALK, *TALK[:1]]}, HELLO, ["message"]),
    "reasoning": ({"input": "Hi"}, THOUGHT, ["reasoning", "message"]),
    "a summary": ({"input": "Hi", "reasoning": {"summary": "auto"}}, THOUGHT, ["reasoning", "message"]),
    "a refusal": ({"input": "Hi"}, (delta(refusal="No."), finish(), usage()), ["message"]),
    "an answer that is cut": ({"input": "Hi", "max_output_tokens": 16}, (text("Hel"), finish("length")), ["message"]),
}


@pytest.fixture
def ours(start_at: Start) -> Ours:
    return start_at(
        "proxy",
        uvicorn=UVICORN,
        server__reasoning_events="open_responses",
        auth__secret_keys=["k" * 33],
        upstream__status_grace=60,
    )


def conforms(value: Any, schema: str) -> Any:
    assert spec.faults(value, schema) == []
    return value


def events_conform(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check each event of a response; return the document in the last one."""
    for event in events:
        conforms(event, spec.EVENTS[event["type"]])
    return dict(conforms(events[-1]["response"], "ResponseResource"))


@pytest.mark.parametrize(("body", "chunks", "types"), REQUESTS.values(), ids=REQUESTS)
async def test_streamed_json_stored_and_websocket_responses_conform(
    ours: Ours, upstream: ScriptedUpstream, body: dict[str, Any], chunks: tuple[Chunk, ...], types: list[str]
) -> None:
    for _ in range(3):
        upstream.stream(*chunks)
    body = {"model": "tiny", **body}
    streamed = await ours.http.post("/v1/responses", json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    whole = await ours.http.post("/v1/responses", json=body)
    assert whole.headers["content-type"].startswith("application/json")
    stored = await ours.http.get(f"/v1/responses/{whole.json()['id']}")
    async with opened(ours) as socket:
        await socket.send(type="response.create", **body)
        on_socket = await socket.events()
    documents = [
        events_conform([json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]),
        conforms(whole.json(), "ResponseResource"),
        conforms(stored.json(), "ResponseResource"),
        events_conform(on_socket),
    ]
    assert [[item["type"] for item in document["output"]] for document in documents] == [types] * 4
    assert {document["status"] for document in documents} == {"incomplete" if "max_output_tokens" in body else "completed"}


async def test_a_compaction_conforms_and_can_start_a_new_history_on_a_websocket(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "They launch on Tuesday."}, counts=usage()["usage"]))
    upstream.stream(*HELLO)
    body = {"model": "tiny", "input": TALK, "prompt_cache_key": "key"}
    compacted = await ours.http.post("/v1/responses/compact", json=body, headers=CALLER)
    output = conforms(compacted.json(), "CompactResource")["output"]
    assert "compaction" in [item["type"] for item in output]
    async with opened(ours) as socket:
        await socket.create([*output, *TALK[:1]], store=False, tools=[])
        assert events_conform(await socket.events())["status"] == "completed"


async def test_a_compaction_without_a_model_is_refused(ours: Ours) -> None:
    refused = await ours.http.post("/v1/responses/compact", json={"input": TALK})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


async def test_errors_on_a_websocket_conform_and_leave_the_connection_usable(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    upstream.whole(error("no such thing", 400), 400)
    upstream.stream(*HELLO)
    async with opened(ours) as socket:
        missing = await socket.error("Go on.", store=False, previous_response_id="resp_missing")
        first = await socket.response("One", store=False)
        refused = await socket.error("Two", store=False)
        output = {"type": "function_call_output", "call_id": "call_missing", "output": "of no call"}
        failed = await socket.error([output], store=False, previous_response_id=first["id"])
        evicted = await socket.error("Three", store=False, previous_response_id=first["id"])
        assert (await socket.response("Four", store=False))["output"]
    for event in (missing, refused, failed, evicted):
        conforms(event, "WebSocketErrorEvent")
    assert [event["error"]["code"] for event in (missing, evicted)] == ["previous_response_not_found"] * 2
