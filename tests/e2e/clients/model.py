"""A model that does as it is told: `call NAME ARGUMENTS` lines of the user's last message are its tool calls.

Those after a line `then` come when the calls before have their results. At the end it tells the results; without any, what the
user said, and with what the history begins, so that a lost history shows.
"""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.clients.cases import MODEL
from tests.support.strict import ChatRequest, Delta, StrictModel, message_text, tool_call

THOUGHTS = "I am told what to do."


class Model(StrictModel):
    def __init__(self) -> None:
        super().__init__(MODEL)

    def say(self, request: ChatRequest) -> list[Delta]:
        return [{"reasoning": THOUGHTS}, *(_calls(request) or [{"content": _answer(request)}])]


def _since_user(request: ChatRequest) -> tuple[str, list[dict[str, Any]]]:
    """The user's last message, and what came after it."""
    messages = request["messages"]
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
    return message_text(messages[last]), messages[last + 1 :]


def _calls(request: ChatRequest) -> list[Delta]:
    """The calls that are due: none where no such tool is offered."""
    told, since = _since_user(request)
    done = sum(bool(message.get("tool_calls")) for message in since)
    stages = told.split("\nthen\n")
    lines = stages[done].splitlines() if done < len(stages) else []
    names = [tool["function"]["name"] for tool in request.get("tools", [])]
    calls: list[Delta] = []
    for line in lines:
        word, name, arguments = [*line.split(" ", 2), "", ""][:3]
        offered = [one for one in names if one == name] or [one for one in names if name in one]
        if word == "call" and offered:
            index = len(calls)
            calls.append(tool_call(f"call_{len(request['messages'])}_{index}", offered[0], arguments, index))
    return calls


def _answer(request: ChatRequest) -> str:
    told, since = _since_user(request)
    results = [message_text(message) for message in since if message["role"] == "tool"]
    if request.get("response_format"):
        return json.dumps({"answer": "; ".join(results) or told})
    if results:
        return "RESULT " + " | ".join(results)
    first = next((message_text(message) for message in request["messages"] if message["role"] == "user"), "")
    return f"ECHO {told}, and first: {' '.join(first.split()[:2])}"
