"""Replay events as a client without other information would, and check the rules that every stream must follow."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from responses_mw.protocol import sse
from responses_mw.protocol.types import Event
from tests.support import spec

TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
MODELS: dict[str, Any] = {
    name: model
    for model in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
    for name in typing.get_args(model.model_fields["type"].annotation)
}
"""openai-python's class for each type of event."""

_PARTS = {
    "response.content_part": ("content", "content_index"),
    "response.reasoning_summary_part": ("summary", "summary_index"),
}
_TEXTS = {
    "response.output_text": ("content", "content_index", "text"),
    "response.refusal": ("content", "content_index", "refusal"),
    "response.reasoning_text": ("content", "content_index", "text"),
    "response.reasoning_summary_text": ("summary", "summary_index", "text"),
}
_MEMBERS = {
    "response.function_call_arguments": "arguments",
    "response.mcp_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
    "response.code_interpreter_call_code": "code",
}
_ANNOTATION = "response.output_text.annotation"
_SERVED = {"mcp_call", "mcp_list_tools", "file_search_call", "web_search_call", "code_interpreter_call", "compaction"}
"""Items made here: their results come with the event that ends them."""
_WHOLE = {"mcp_approval_request"}
"""Items that are complete when they are added."""
_LIFECYCLE = TERMINAL | {"response.created", "response.queued", "response.in_progress"}


class Replay:
    """Builds `output` from events, one by one, and asserts that each is valid at its place."""

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
        if kind in _LIFECYCLE:
            self._lifecycle(kind, event["response"])
        elif kind == "response.output_item.added":
            self._add(event)
        elif kind == "response.output_item.done":
            self._done(event)
        else:
            self._grow(event)

    def document(self) -> dict[str, Any]:
        """Return the response of the terminal event, which must equal the one built from the events."""
        assert self.ended, "the last event is a terminal one"
        response = self.response
        if response["status"] == "failed":
            assert response["error"]["code"]
            assert response["error"]["message"]
            if self._open_item is not None:
                assert self.output[-1]["status"] == "in_progress"
                self.output[-1]["status"] = "incomplete"
        else:
            assert response["error"] is None
            assert self._open_item is None
            cut = [item["type"] for item in self.output[:-1] if item.get("status") == "incomplete"]
            assert not {*cut} - _SERVED - {"reasoning"}, (
                "only the last item, and what the upstream broke off, can be incomplete"
            )
        assert response["output"] == self.output
        return response

    def _lifecycle(self, kind: str, response: dict[str, Any]) -> None:
        expected = [["response.created"], ["response.in_progress", "response.queued"]]
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
        assert item.get("status", "in_progress") == "in_progress"
        assert item["type"] in _WHOLE or not any(item.get(member) for member in ("content", *_MEMBERS.values()))
        self._open_item = len(self.output)
        self.output.append(item)

    def _done(self, event: dict[str, Any]) -> None:
        assert event["output_index"] == self._open_item
        assert self._open_part is None, "parts are done before their item"
        item, done = self.output[event["output_index"]], event["item"]
        if item["type"] in _SERVED:
            kept = item.keys() & {"id", "type", *_MEMBERS.values()}
            assert {name: done[name] for name in kept} == {name: item[name] for name in kept}
            item.update(done)
        else:
            assert done["status"] in ("completed", "incomplete")
            item["status"] = done["status"]
            if "upstream" in done:  # members of a call may arrive after its beginning
                item["upstream"] = item.get("upstream", {}) | done["upstream"]
            if item["type"] == "reasoning" and "encrypted_content" in done:  # it is encrypted when it is complete
                item["encrypted_content"] = done["encrypted_content"]
        assert done == item
        self._open_item = None

    def _grow(self, event: dict[str, Any]) -> None:
        stem, _, step = event["type"].rpartition(".")
        assert event["output_index"] == self._open_item, "an event belongs to the open item"
        item = self.output[event["output_index"]]
        assert event["item_id"] == item["id"]
        if stem in _PARTS:
            self._part(item, event, *_PARTS[stem], step)
        elif stem in _TEXTS:
            self._text(item, event, *_TEXTS[stem], step)
        elif stem in _MEMBERS:
            self._member(item, event, _MEMBERS[stem], step)
        elif stem == _ANNOTATION:
            annotations = item["content"][event["content_index"]]["annotations"]
            assert event["annotation_index"] == len(annotations)
            annotations.append(event["annotation"])
        else:
            assert item["type"] in _SERVED
            assert stem == f"response.{item['type']}"

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

    def _member(self, item: dict[str, Any], event: dict[str, Any], member: str, step: str) -> None:
        if step == "delta":
            item[member] += event["delta"]
        else:
            assert all(event[name] == item[name] for name in {"name", member} & event.keys())


def decoded(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the data of the events as a client reads it."""
    return list(sse.decode(sse.encode(events)))


def check(events: Sequence[Event]) -> dict[str, Any]:
    """Check the events of one whole response against all rules, and return the response of the last event."""
    replay = Replay()
    strict = ResponseStreamState(input_tools=omit, text_format=omit)
    for event, raw in zip(decoded(events), events, strict=True):
        assert event["type"] == raw.type
        strict.handle_event(MODELS[event["type"]].model_validate(event))
        if event["type"] in spec.EVENTS:
            assert spec.faults(event, spec.EVENTS[event["type"]]) == []
        replay.play(event)
    return replay.document()
