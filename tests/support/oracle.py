"""Checks that every stream must pass: the wire format, the official client's models and helper, and the order of events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2
import openai
from openai.types.responses import Response

from tests.support.replay import MODELS, Replay

if TYPE_CHECKING:
    from tests.support.servers import Ours

Event = dict[str, Any]

DONE = "data: [DONE]"
KEEP_ALIVE = ": keep-alive"


@dataclass(frozen=True)
class Streamed:
    """A stream that has been checked. `response` is the document of its terminal event."""

    raw: bytes
    events: list[Event]

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    @property
    def terminal(self) -> str:
        return str(self.events[-1]["type"])

    @property
    def response(self) -> dict[str, Any]:
        return dict(self.events[-1]["response"])

    @property
    def deltas(self) -> list[str]:
        return [event["delta"] for event in self.events if event["type"].endswith(".delta")]


async def stream(ours: Ours, *, done: bool = True, **body: Any) -> Streamed:
    """Request a stream, and check it."""
    response = await ours.http.post("/v1/responses", json={"input": "Hi", "model": "tiny", **body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return check(response.content, done=done)


async def whole(ours: Ours, **body: Any) -> dict[str, Any]:
    """Request JSON, and check that it is valid for the official client's strict model."""
    response = await ours.http.post("/v1/responses", json={"input": "Hi", "model": "tiny", **body})
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    Response.model_validate(document, strict=True)
    return document


def check(raw: bytes, *, done: bool = True) -> Streamed:
    """Check the bytes of a stream, which must end with `[DONE]` if `done` is true."""
    events = _events(raw, done=done)
    replay = Replay()
    for event in events:
        MODELS[event["type"]].model_validate(_with_a_listed_code(event))
        replay.play(event)
    replay.document()
    _check_order(events)
    _check_client(raw, events)
    return Streamed(raw, events)


def _with_a_listed_code(event: Event) -> Event:
    """Replace the only error code that the official client does not list, though clients know it."""
    response = event.get("response") or {}
    if (response.get("error") or {}).get("code") != "context_length_exceeded":
        return event
    return {**event, "response": {**response, "error": {**response["error"], "code": "invalid_prompt"}}}


def _events(raw: bytes, *, done: bool) -> list[Event]:
    *frames, rest = raw.decode().split("\n\n")
    assert rest == ""
    if done:
        assert frames.pop() == DONE
    events = []
    for frame in frames:
        if frame == KEEP_ALIVE:
            continue
        first, second = frame.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        assert second.startswith("data: {")
        if event["type"] != "keepalive":
            events.append(event)
    return events


def _check_order(events: list[Event]) -> None:
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"


class _Recorded(httpx2.BaseTransport):
    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=self.raw)


_recorded = _Recorded(b"")
_client = openai.OpenAI(
    base_url="http://recorded/v1", api_key="key", http_client=openai.DefaultHttpxClient(transport=_recorded)
)


def _check_client(raw: bytes, events: list[Event]) -> None:
    """Check that the strict helper `responses.stream()` accepts the stream and builds the same document."""
    _recorded.raw = raw
    with _client.responses.stream(model="tiny", input="Hi") as stream:
        for _ in stream:
            pass
        if events[-1]["type"] == "response.completed":
            final = stream.get_final_response()
            assert final.id == events[-1]["response"]["id"]
            assert [item.type for item in final.output] == [item["type"] for item in events[-1]["response"]["output"]]
