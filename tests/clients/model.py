"""A model that does as it is told: ``call NAME ARGUMENTS`` lines of the user's last message are its tool calls.

Those after a line ``then`` come when the calls before have their results. At the end it tells the results; without any, what the
user said, and with what the history begins, so that a lost history shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.clients.cases import MODEL
from tests.codex.model import app, nonsense

ChatRequest = dict[str, Any]
Delta = dict[str, Any]

THOUGHTS = ("I am told what ", "to do.")
_PIECE = 7


@dataclass
class Model:
    """``faults`` are what it had to say against the requests, since they were last emptied."""

    faults: list[str] = field(default_factory=list)

    def app(self) -> Starlette:
        return app(MODEL, self._chat)

    async def _chat(self, http: Request) -> Response:
        request: ChatRequest = await http.json()
        if faults := list(nonsense(request)):
            self.faults += faults
            return JSONResponse({"object": "error", "message": "; ".join(faults), "type": "BadRequestError", "code": 400}, 400)
        return StreamingResponse(_frames(_deltas(request)), media_type="text/event-stream")


def _deltas(request: ChatRequest) -> Iterator[Delta]:
    yield from ({"reasoning": thought} for thought in THOUGHTS)
    if calls := _calls(request):
        yield from calls
        return
    text = _answer(request)
    for start in range(0, len(text), _PIECE):
        yield {"content": text[start : start + _PIECE]}


def _frames(deltas: Iterator[Delta]) -> Iterator[bytes]:
    envelope = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    reason = "stop"
    for delta in ({"role": "assistant", "content": ""}, *deltas):
        reason = "tool_calls" if "tool_calls" in delta else reason
        yield _frame({**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _frame({**envelope, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    yield _frame({**envelope, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def _since_user(request: ChatRequest) -> tuple[str, list[dict[str, Any]]]:
    """The user's last message, and what came after it."""
    messages = request["messages"]
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
    return _text(messages[last]), messages[last + 1 :]


def _calls(request: ChatRequest) -> list[Delta]:
    """The deltas of the calls that are due: none where no such tool is offered."""
    told, since = _since_user(request)
    done = sum(bool(message.get("tool_calls")) for message in since)
    stages = told.split("\nthen\n")
    lines = stages[done].splitlines() if done < len(stages) else []
    names = [tool["function"]["name"] for tool in request.get("tools", [])]
    deltas: list[Delta] = []
    for line in lines:
        word, name, arguments = [*line.split(" ", 2), "", ""][:3]
        offered = [one for one in names if one == name] or [one for one in names if name in one]
        if word == "call" and offered:
            index = sum("id" in delta["tool_calls"][0] for delta in deltas)
            deltas += _call(index, f"call_{len(request['messages'])}_{index}", offered[0], arguments)
    return deltas


def _call(index: int, call_id: str, name: str, arguments: str) -> Iterator[Delta]:
    function = {"name": name, "arguments": ""}
    yield {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
    for start in range(0, len(arguments), _PIECE):
        yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[start : start + _PIECE]}}]}


def _answer(request: ChatRequest) -> str:
    told, since = _since_user(request)
    results = [_text(message) for message in since if message["role"] == "tool"]
    if request.get("response_format"):
        return json.dumps({"answer": "; ".join(results) or told})
    if results:
        return "RESULT " + " | ".join(results)
    first = next((_text(message) for message in request["messages"] if message["role"] == "user"), "")
    return f"ECHO {told}, and first: {' '.join(first.split()[:2])}"
