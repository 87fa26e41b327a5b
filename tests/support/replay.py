"""Events played back, as a client would that trusts nothing but them; and the laws that every stream must keep."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from responses_mw.protocol import sse
from responses_mw.protocol.response.events import TERMINAL, Event
from tests.support import spec

MODELS: dict[str, Any] = {
    name: model
    for model in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
    for name in typing.get_args(model.model_fields["type"].annotation)
}
"""openai-python's class for each type of event."""

PARTS = {"response.content_part": ("content", "content_index"), "response.reasoning_summary_part": ("summary", "summary_index")}
TEXTS = {
    "response.output_text": ("content", "content_index", "text"),
    "response.refusal": ("content", "content_index", "refusal"),
    "response.reasoning_text": ("content", "content_index", "text"),
    "response.reasoning_summary_text": ("summary", "summary_index", "text"),
}
LIFECYCLE = TERMINAL | {"response.created", "response.queued", "response.in_progress"}


class Replay:
    """Builds ``output`` out of events, one by one; complains about any that does not fit."""

    def __init__(self) -> None:
        self.response: dict[str, Any] = {}
        self.output: list[dict[str, Any]] = []
        self.ended = False
        self._numbers = 0
        self._open_item: int | None = None
        self._open_part: int | None = None

    def play(self, event: dict[str, Any]) -> None:
        assert not self.ended, "nothing comes after the terminal event"
        assert event["sequence_number"] == self._numbers
        self._numbers += 1
        kind = event["type"]
        if kind in LIFECYCLE:
            self._lifecycle(kind, event["response"])
        elif kind == "response.output_item.added":
            self._add(event)
        elif kind == "response.output_item.done":
            self._done(event)
        else:
            stem, _, step = kind.rpartition(".")
            assert event["output_index"] == self._open_item, "an event belongs to the open item"
            item = self.output[event["output_index"]]
            assert event["item_id"] == item["id"]
            if stem in PARTS:
                self._part(item, event, *PARTS[stem], step)
            elif stem in TEXTS:
                self._text(item, event, *TEXTS[stem], step)
            else:
                assert stem == "response.function_call_arguments"
                self._arguments(item, event, step)

    def _lifecycle(self, kind: str, response: dict[str, Any]) -> None:
        expected = ["response.created", ("response.in_progress", "response.queued")]
        if self._numbers <= 2:
            assert kind in expected[self._numbers - 1]
            assert response["output"] == []
        else:
            assert kind in TERMINAL
            self.ended = True
        assert response["id"] == self.response.get("id", response["id"])
        self.response = response

    def _add(self, event: dict[str, Any]) -> None:
        assert self._open_item is None, "items do not overlap"
        assert event["output_index"] == len(self.output), "output_index grows by one"
        item = event["item"]
        assert item["id"] not in {other["id"] for other in self.output}
        assert item["status"] == "in_progress"
        assert not item.get("content")
        assert not item.get("arguments")
        self._open_item = len(self.output)
        self.output.append(item)

    def _done(self, event: dict[str, Any]) -> None:
        assert event["output_index"] == self._open_item
        assert self._open_part is None, "parts are done before their item"
        item = self.output[event["output_index"]]
        assert event["item"] == {**item, "status": event["item"]["status"]}
        assert event["item"]["status"] in ("completed", "incomplete")
        item["status"] = event["item"]["status"]
        self._open_item = None

    def _part(self, item: dict[str, Any], event: dict[str, Any], holder: str, index: str, step: str) -> None:
        if step == "added":
            assert self._open_part is None, "parts do not overlap"
            assert event[index] == len(item[holder])
            item[holder].append(event["part"])
            self._open_part = event[index]
        else:
            assert event[index] == self._open_part
            assert event["part"] == item[holder][event[index]]
            self._open_part = None

    def _text(self, item: dict[str, Any], event: dict[str, Any], holder: str, index: str, member: str, step: str) -> None:
        assert event[index] == self._open_part, "deltas belong to the open part"
        part = item[holder][event[index]]
        if step == "delta":
            part[member] += event["delta"]
            part.get("logprobs", []).extend(event.get("logprobs", []))
        else:
            assert event[member] == part[member]
            assert event.get("logprobs") == part.get("logprobs")

    def _arguments(self, item: dict[str, Any], event: dict[str, Any], step: str) -> None:
        if step == "delta":
            item["arguments"] += event["delta"]
        else:
            assert event["arguments"] == item["arguments"]
            assert event["name"] == item["name"]


def decoded(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The data of the events as a client reads it."""
    return list(sse.decode(sse.encode(events)))


def check(events: Sequence[Event]) -> dict[str, Any]:
    """Holds the events of one whole response to all of the laws; returns the response that the last one carries."""
    replay = Replay()
    strict = ResponseStreamState(input_tools=omit, text_format=omit)
    for event, raw in zip(decoded(events), events, strict=True):
        assert event["type"] == raw.type
        strict.handle_event(MODELS[event["type"]].model_validate(event))
        if event["type"] in spec.EVENTS:
            assert spec.faults(event, spec.EVENTS[event["type"]]) == []
        replay.play(event)
    assert replay.ended, "the last event is a terminal one"
    response = replay.response
    if response["status"] == "failed":
        expected = [{**item, "status": "incomplete"} if item["status"] == "in_progress" else item for item in replay.output]
    else:
        expected = replay.output
        assert all(item["status"] == "completed" for item in expected[:-1]), "only the last item can be incomplete"
    assert response["output"] == expected
    return response
