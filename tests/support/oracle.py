"""What holds for every stream: the form on the wire, the official client's opinion, and the laws of the events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import httpx2
import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

if TYPE_CHECKING:
    from tests.support.servers import Ours

Event = dict[str, Any]

TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
DONE = "data: [DONE]"
KEEP_ALIVE = ": keep-alive"

_TYPES: dict[str, type[BaseModel]] = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(get_args(ResponseStreamEvent)[0])
}
# delta events: the members of the item and the part that they write to, and the event's index among the parts
_TEXTS = {
    "response.output_text.delta": ("content", "content_index", "text"),
    "response.refusal.delta": ("content", "content_index", "refusal"),
    "response.reasoning_text.delta": ("content", "content_index", "text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_index", "text"),
}
_MEMBERS = {
    "response.function_call_arguments": "arguments",
    "response.mcp_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
    "response.code_interpreter_call_code": "code",
}
_GROWING = {"arguments", "input", "code"}
_CARRIED_OUT = {"mcp_call", "mcp_list_tools", "web_search_call", "code_interpreter_call", "compaction"}


@dataclass(frozen=True)
class Streamed:
    """A stream that has been checked. ``response`` is the document of its terminal event."""

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
    """Asks for a stream, and checks all that holds for every one."""
    response = await ours.http.post("/v1/responses", json={"input": "Hi", "model": "tiny", **body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return check(response.content, done=done)


async def whole(ours: Ours, **body: Any) -> dict[str, Any]:
    """Asks for JSON, and checks that the official client knows every member of it."""
    response = await ours.http.post("/v1/responses", json={"input": "Hi", "model": "tiny", **body})
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    Response.model_validate(document, strict=True)
    return document


def check(raw: bytes, *, done: bool = True) -> Streamed:
    """``done`` tells whether ``[DONE]`` is expected."""
    events = _events(raw, done=done)
    for event in events:
        _TYPES[event["type"]].model_validate(event)
    _check_order(events)
    _check_replay(events)
    _check_client(raw, events)
    return Streamed(raw, events)


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
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] for event in events if event["type"] in TERMINAL] == [events[-1]["type"]]
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def _check_replay(events: list[Event]) -> None:
    """The events make the document: items do not overlap, and what was added and done is what the document has."""
    replay = _Replay()
    for event in events:
        replay.take(event)
    document = events[-1]["response"]
    if document["status"] == "failed":
        assert document["error"]["code"]
        assert document["error"]["message"]
        if replay.open is not None:
            assert replay.items[-1]["status"] == "in_progress"
            replay.items[-1]["status"] = "incomplete"
    else:
        assert document["error"] is None
        assert replay.open is None
    assert replay.items == document["output"]


class _Replay:
    """Makes the output out of the events, as a client does."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.open: int | None = None

    def take(self, event: Event) -> None:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert self.open is None
            assert event["output_index"] == len(self.items)
            self.open = event["output_index"]
            self.items.append(event["item"])
        elif kind == "response.output_item.done":
            item = self._item(event["output_index"])
            assert item["id"] == event["item"]["id"]
            if item["type"] in _CARRIED_OUT:  # what came of it is told by the last event only
                assert {name: event["item"][name] for name in item.keys() & _GROWING} == {
                    name: item[name] for name in item.keys() & _GROWING
                }
                item.update(event["item"])
            else:
                assert event["item"]["status"] in ("completed", "incomplete")
                item["status"] = event["item"]["status"]
            assert self.items[-1] == event["item"]
            self.open = None
        elif "item_id" in event:
            item = self._item(event["output_index"])
            assert item["id"] == event["item_id"]
            self._grow(item, event)

    def _item(self, index: int) -> dict[str, Any]:
        assert index == self.open
        return self.items[index]

    def _grow(self, item: dict[str, Any], event: Event) -> None:
        kind = event["type"]
        growing, _, ending = kind.rpartition(".")
        if growing in _MEMBERS and ending == "delta":
            item[_MEMBERS[growing]] += event["delta"]
        elif growing in _MEMBERS:
            assert all(item[name] == event[name] for name in {"name", _MEMBERS[growing]} & event.keys())
        elif item["type"] in _CARRIED_OUT:
            assert kind.startswith(f"response.{item['type']}.")
        elif kind == "response.output_text.annotation.added":
            part = item["content"][event["content_index"]]
            assert event["annotation_index"] == len(part["annotations"])
            part["annotations"].append(event["annotation"])
        elif kind.endswith("part.added"):
            parts, index = ("summary", "summary_index") if "summary" in kind else ("content", "content_index")
            assert event[index] == len(item[parts])
            item[parts].append(event["part"])
        elif kind.endswith("part.done"):
            assert (item["summary"] if "summary" in kind else item["content"])[-1] == event["part"]
        elif kind in _TEXTS:
            parts, index, text = _TEXTS[kind]
            part = item[parts][event[index]]
            part[text] += event["delta"]
            part.get("logprobs", []).extend(event.get("logprobs", []))
        else:
            parts, index, text = _TEXTS[kind.removesuffix(".done") + ".delta"]
            assert item[parts][event[index]][text] == event[text]


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
    """The strict helper ``responses.stream()`` takes it all, and comes to the same document."""
    _recorded.raw = raw
    with _client.responses.stream(model="tiny", input="Hi") as stream:
        for _ in stream:
            pass
        if events[-1]["type"] == "response.completed":
            final = stream.get_final_response()
            assert final.id == events[-1]["response"]["id"]
            assert [item.type for item in final.output] == [item["type"] for item in events[-1]["response"]["output"]]
