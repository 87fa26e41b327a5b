"""A scripted model with a strict Chat Completions server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tests.support.scripted import Answer, Asked, ScriptedUpstream, delta, error, finish, json_answer, stream_answer, usage

ChatRequest = dict[str, Any]
Delta = dict[str, Any]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PIECE = 7


class StrictModel(ScriptedUpstream):
    """A server of one model. `faults` lists the errors of the requests that it refused."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.models = [{"id": model, "object": "model", "created": 1, "owned_by": "vllm"}]
        self.faults: list[str] = []

    def unscripted(self, asked: Asked) -> Answer:
        request: ChatRequest = asked.json
        if faults := list(nonsense(request)):
            self.faults += faults
            return json_answer(error("; ".join(faults)), 400)
        said = self.say(request)
        reason = "tool_calls" if any("tool_calls" in one for one in said) else "stop"
        pieces = [delta(**piece) for one in said for piece in _pieces(one)]
        prompt = max(one.get("prompt_tokens", 10) for one in said)
        return stream_answer(delta(role="assistant", content=""), *pieces, finish(reason), usage(prompt, 5))

    def say(self, request: ChatRequest) -> list[Delta]:
        """Return the output of the model: text, reasoning and tool calls. Subclasses have a script."""
        raise NotImplementedError


def message_text(message: dict[str, Any]) -> str:
    """Return the text of a chat message, whether it is in parts or not."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def tool_call(call_id: str, name: str, arguments: str, index: int = 0) -> Delta:
    """Return a whole tool call."""
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}


def _pieces(said: Delta) -> Iterator[Delta]:
    """Cut the output as a server streams it: a few characters at a time."""
    for kind in ("reasoning", "content"):
        yield from ({kind: piece} for piece in _cut(said.get(kind, "")))
    for call in said.get("tool_calls", ()):
        function = call["function"]
        yield {"tool_calls": [{**call, "function": {"name": function["name"], "arguments": ""}}]}
        for piece in _cut(function["arguments"]):
            yield {"tool_calls": [{"index": call["index"], "function": {"arguments": piece}}]}


def _cut(text: str) -> Iterable[str]:
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


# -- validation of requests ----------------------------------------------------------------------------------------------


def nonsense(request: ChatRequest) -> Iterator[str]:
    """Yield the faults of a chat request."""
    functions = [tool.get("function", {}) for tool in request.get("tools", [])]
    names = [function.get("name", "") for function in functions]
    yield from (f"the tool name {name!r} is not allowed" for name in names if not _NAME.fullmatch(name))
    yield from (f"the tool {name!r} is there twice" for name in {name for name in names if names.count(name) > 1})
    for function in functions:
        if function.get("parameters", {"type": "object"}).get("type") != "object":
            yield f"the parameters of {function.get('name')!r} are no object"
    yield from _broken_turns(request["messages"])


def _broken_turns(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield calls without a result, results without a call, and arguments that are not JSON."""
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
