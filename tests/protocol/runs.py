"""Assemblers with predictable ids, and whole runs of them."""

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
from responses_mw.protocol.types import Event
from tests.support.replay import check

PLAIN = ResponseOptions()
TOOLS = [{"type": "function", "name": "unused", "parameters": None}]
"""Offered where a test names no tools, because calls come to a client only if it offered functions."""


class CountedIds(RunIds):
    def __init__(self, used: int = 0) -> None:
        super().__init__()
        self._counter = count(used)

    def item(self, prefix: str) -> str:
        return f"{prefix}_{next(self._counter)}"


def assembler(options: ResponseOptions = PLAIN, ids: CountedIds | None = None, **request: Any) -> Assembler:
    parsed = parse({"model": "m", "input": "Hi", "tools": TOOLS, **request})
    created = document.create(parsed, response_id="resp_1", model="m", created_at=1_700_000_000)
    assembling = Assembler(created, ids or CountedIds(), options)
    assembling.offer(offered(parsed.tools, parsed.items), parsed.tool_choice)
    return assembling


def chunk(**delta: Any) -> dict[str, Any]:
    """Return a chunk with one choice. `finish_reason` and `logprobs` are members of the choice, the others of its delta."""
    choice = {name: delta.pop(name) for name in ("finish_reason", "logprobs") if name in delta}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **choice}]}


def fragment(index: int = 0, arguments: Any = None, **members: Any) -> dict[str, Any]:
    """Return a fragment of a tool call. `name` is a member of its function."""
    function = {"name": members.pop("name")} if "name" in members else {}
    if arguments is not None:
        function["arguments"] = arguments
    return {"index": index, "function": function, **members}


def run(chunks: Iterable[dict[str, Any]], options: ResponseOptions = PLAIN, **request: Any) -> list[Event]:
    """Return the events of a response with one turn. As in the runner, errors of the assembler end it with `response.failed`."""
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
    """Check all laws for the events of a run, and return the final response."""
    return check(run(chunks, options, **request))


def output(*chunks: dict[str, Any], options: ResponseOptions = PLAIN, **request: Any) -> list[Any]:
    """Return a summary of the output: texts by kind, calls by name and arguments."""
    return [said(item) for item in respond(*chunks, options=options, **request)["output"]]


def said(item: dict[str, Any]) -> Any:
    if item["type"] == "function_call":
        return (item["name"], item["arguments"])
    if item["type"] == "reasoning":
        return ("reasoning", "".join(part["text"] for part in item.get("content") or item["summary"]))
    return [(part["type"], part.get("text", part.get("refusal"))) for part in item["content"]]
