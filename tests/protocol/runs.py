"""Assemblers with ids that tests can foresee, and runs of them from the first event to the last."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from responses_mw.errors import UpstreamError
from responses_mw.ids import RunIds
from responses_mw.protocol.request.create import parse
from responses_mw.protocol.request.tools import offered
from responses_mw.protocol.response import document
from responses_mw.protocol.response.assembler import Assembler
from responses_mw.protocol.response.builder import ResponseOptions
from responses_mw.protocol.response.events import Event
from tests.support.replay import check

PLAIN = ResponseOptions()


class CountedIds(RunIds):
    def __init__(self, used: int = 0) -> None:
        super().__init__()
        self._counter = count(used)

    def item(self, prefix: str) -> str:
        return f"{prefix}_{next(self._counter)}"


def assembler(options: ResponseOptions = PLAIN, ids: CountedIds | None = None, **request: Any) -> Assembler:
    parsed = parse({"model": "m", "input": "Hi", **request})
    created = document.create(parsed, response_id="resp_1", model="m", created_at=1_700_000_000)
    assembling = Assembler(created, ids or CountedIds(), options)
    assembling.offer(offered(parsed.tools, parsed.items), parsed.tool_choice)
    return assembling


def chunk(**delta: Any) -> dict[str, Any]:
    """A chunk with one choice; `finish_reason` and `logprobs` belong to that, the rest to its delta."""
    choice = {name: delta.pop(name) for name in ("finish_reason", "logprobs") if name in delta}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **choice}]}


def fragment(index: int = 0, arguments: Any = None, **members: Any) -> dict[str, Any]:
    """A fragment of a tool call; `name` belongs to its function."""
    function = {"name": members.pop("name")} if "name" in members else {}
    if arguments is not None:
        function["arguments"] = arguments
    return {"index": index, "function": function, **members}


def run(chunks: Iterable[dict[str, Any]], options: ResponseOptions = PLAIN, **request: Any) -> list[Event]:
    """The events of a response of one turn. What the assembler refuses ends it, as in the runner, in `response.failed`."""
    assembling = assembler(options, **request)
    events = assembling.start()
    try:
        for one in chunks:
            events += assembling.feed(one)
        events += assembling.end_turn()
        assembling.conclude(1_700_000_001)
    except UpstreamError as error:
        assembling.fail("server_error", error.message)
    return events + assembling.terminal()


def respond(*chunks: dict[str, Any], options: ResponseOptions = PLAIN, **request: Any) -> dict[str, Any]:
    """The response that a run ends with, after all the laws were checked on its events."""
    return check(run(chunks, options, **request))


def output(*chunks: dict[str, Any], options: ResponseOptions = PLAIN, **request: Any) -> list[Any]:
    """What the response says, shortly: texts by kind, calls by name and arguments."""
    return [said(item) for item in respond(*chunks, options=options, **request)["output"]]


def said(item: dict[str, Any]) -> Any:
    if item["type"] == "function_call":
        return (item["name"], item["arguments"])
    if item["type"] == "reasoning":
        return ("reasoning", "".join(part["text"] for part in item.get("content") or item["summary"]))
    return [(part["type"], part.get("text", part.get("refusal"))) for part in item["content"]]
