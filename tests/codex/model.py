"""A scripted model behind a Chat Completions server that refuses what a strict one would.

A script has one turn for the prompt and one after each tool result: which of them is due shows in the messages, so a request
that is sent again gets the same answer again. Where a history has been summed up, the results that it had count as before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

ChatRequest = dict[str, Any]
Delta = dict[str, Any]
Turn = Callable[[ChatRequest], Delta]

SUMMARY = "The user wants the sum of 40 and 2; a command has told it already."
_SUMMING_UP = ("CONTEXT CHECKPOINT COMPACTION", "Write a summary of the whole conversation above")
"""What Codex tells the model to sum a history up, and what our server tells it."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PIECE = 7
LONG = 50_000


class Unexpected(Exception):
    """The request is not what the script goes on from."""


def app(model: str, chat: Callable[[Request], Awaitable[Response]]) -> Starlette:
    """A server of one model, which ``chat`` answers for."""

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": model, "object": "model", "created": 1, "owned_by": "vllm"}]})

    async def answer(http: Request) -> Response:
        if await http.body() == b"{}":  # it asks whether its credential is good
            return JSONResponse({"object": "error", "message": "no messages", "type": "BadRequestError", "code": 400}, 400)
        return await chat(http)

    return Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", answer, methods=["POST"])])


@dataclass
class Model:
    """Plays ``turns``; ``faults`` are what it had to say against the requests, ``played`` the turns that came about."""

    turns: tuple[Turn, ...] = ()
    faults: list[str] = field(default_factory=list)
    played: set[int] = field(default_factory=set)
    requests: list[ChatRequest] = field(default_factory=list)
    summed_up: set[str] = field(default_factory=set)
    """By which words the model was asked for a summary."""
    forgotten: int = 0
    """How many results a summary stands for."""

    def begin(self, turns: tuple[Turn, ...], forgotten: int = 0) -> None:
        self.turns, self.faults, self.played, self.requests = turns, [], set(), []
        self.summed_up, self.forgotten = set(), forgotten

    def app(self) -> Starlette:
        return app("scripted", self._chat)

    async def _chat(self, http: Request) -> Response:
        request: ChatRequest = await http.json()
        self.requests.append(request)
        if faults := list(nonsense(request)):
            self.faults += faults
            return JSONResponse({"object": "error", "message": "; ".join(faults), "type": "BadRequestError", "code": 400}, 400)
        return StreamingResponse(_frames(self._play(request), request["model"]), media_type="text/event-stream")

    def _play(self, request: ChatRequest) -> Delta:
        last = _text(request["messages"][-1])
        if asked := [words for words in _SUMMING_UP if words in last]:
            self.summed_up.update(asked)
            return say(SUMMARY)
        is_short = any(SUMMARY in _text(message) for message in request["messages"])
        number = results(request) + (self.forgotten if is_short else 0)
        if number >= len(self.turns):
            self.faults.append(f"there are {number} tool results, and the script has but {len(self.turns)} turns")
            return say("I am done.")
        try:
            delta = self.turns[number](request)
        except Unexpected as error:
            self.faults.append(f"turn {number}: {error}")
            return say("I am at a loss.")
        self.played.add(number)
        return delta


def _text(message: dict[str, Any]) -> str:
    return json.dumps(message.get("content"), ensure_ascii=False)


def results(request: ChatRequest) -> int:
    """How many tool results there are."""
    return sum(message["role"] == "tool" for message in request["messages"])


def _frames(delta: Delta, model: str) -> Iterator[bytes]:
    envelope = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
    reason = "tool_calls" if delta.get("tool_calls") else "stop"
    choices: list[tuple[Delta, str | None]] = [({"role": "assistant", "content": ""}, None)]
    choices += [(piece, None) for piece in _pieces(delta)]
    choices.append(({}, reason))
    for piece, finish in choices:
        yield _frame({**envelope, "choices": [{"index": 0, "delta": piece, "finish_reason": finish}]})
    prompt = delta.get("prompt_tokens", 10)
    usage = {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5}
    yield _frame({**envelope, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _pieces(delta: Delta) -> Iterator[Delta]:
    """The delta as a server streams it: a few characters at a time."""
    text = delta.get("content", "")
    for start in range(0, len(text), _PIECE):
        yield {"content": text[start : start + _PIECE]}
    for index, call in enumerate(delta.get("tool_calls", ())):
        function = call["function"]
        head = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        yield {"tool_calls": [head]}
        for start in range(0, len(function["arguments"]), _PIECE):
            fragment = {"arguments": function["arguments"][start : start + _PIECE]}
            yield {"tool_calls": [{"index": index, "function": fragment}]}


# -- what a strict server refuses ----------------------------------------------------------------------------------------


def nonsense(request: ChatRequest) -> Iterator[str]:
    """What is wrong with a chat request."""
    functions = [tool.get("function", {}) for tool in request.get("tools", [])]
    names = [function.get("name", "") for function in functions]
    yield from (f"the tool name {name!r} is not allowed" for name in names if not _NAME.fullmatch(name))
    yield from (f"the tool {name!r} is there twice" for name in {name for name in names if names.count(name) > 1})
    for function in functions:
        if function.get("parameters", {"type": "object"}).get("type") != "object":
            yield f"the parameters of {function.get('name')!r} are no object"
    yield from _broken_turns(request["messages"])


def _broken_turns(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Calls without a result, results without a call, arguments that are no JSON."""
    waiting: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                yield f"the result {message['tool_call_id']!r} belongs to no call"
            waiting.discard(message["tool_call_id"])
            continue
        yield from (f"the call {call!r} has no result" for call in sorted(waiting))
        waiting = {call["id"] for call in message.get("tool_calls") or ()}
        for call in message.get("tool_calls") or ():
            try:
                json.loads(call["function"]["arguments"])
            except ValueError:
                yield f"the arguments of {call['function']['name']!r} are no JSON"
    yield from (f"the call {call!r} has no result" for call in sorted(waiting))


# -- turns ---------------------------------------------------------------------------------------------------------------


def say(text: str) -> Delta:
    return {"content": text}


def answer(text: str) -> Turn:
    return lambda _: say(text)


def call(name: str, **arguments: Any) -> Turn:
    """Calls the tool whose name ends so: what stands before it, of a namespace, is not the client's."""

    def turn(request: ChatRequest) -> Delta:
        return _call(offered(request, name)["name"], arguments, request)

    return turn


def long(turn: Turn) -> Turn:
    """The ``turn``, of a history that is said to be long."""
    return lambda request: {**turn(request), "prompt_tokens": LONG}


def write(name: str, text: str) -> Turn:
    """Calls a tool that takes one text, whatever that is called."""

    def turn(request: ChatRequest) -> Delta:
        tool = offered(request, name)
        texts = [
            key for key, schema in tool.get("parameters", {}).get("properties", {}).items() if schema.get("type") == "string"
        ]
        if len(texts) != 1:
            raise Unexpected(f"{name} should take one text, but takes {texts}")
        return _call(tool["name"], {texts[0]: text}, request)

    return turn


def after(expected: str, turn: Turn, *, last: bool = True) -> Turn:
    """Goes on with ``turn`` where the ``last`` message, or any tool result, has the expected text in it."""

    def checked(request: ChatRequest) -> Delta:
        messages = request["messages"][-1:] if last else [one for one in request["messages"] if one["role"] == "tool"]
        shown = " ".join(map(_text, messages))
        if expected not in shown:
            raise Unexpected(f"the tool result should have {expected!r} in it, but is {shown[:300]}")
        return turn(request)

    return checked


def told(words: str, turn: Turn, *, before: Turn | None = None) -> Turn:
    """Goes on with ``turn`` where the user has said the ``words``; with another, if any, ``before``."""

    def checked(request: ChatRequest) -> Delta:
        if words in " ".join(_text(message) for message in request["messages"] if message["role"] == "user"):
            return turn(request)
        if before is None:
            raise Unexpected(f"the user should have said {words!r}")
        return before(request)

    return checked


def offered(request: ChatRequest, name: str) -> dict[str, Any]:
    functions = [tool["function"] for tool in request.get("tools", [])]
    found = [function for function in functions if function["name"] == name]
    found = found or [function for function in functions if function["name"].endswith(name)]
    if len(found) != 1:
        names = ", ".join(function["name"] for function in functions) or "none"
        raise Unexpected(f"no tool {name} is offered, only: {names}")
    return dict(found[0])


def _call(name: str, arguments: dict[str, Any], request: ChatRequest) -> Delta:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": f"call_{results(request)}", "type": "function", "function": function}]}
