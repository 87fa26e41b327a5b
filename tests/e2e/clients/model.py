"""A model that follows instructions: its tool calls are the lines `call NAME ARGUMENTS` of the user's last message.

Those after a line `then` come when the calls before have their results. At the end it tells the results; without any, what the
user said, and with what the history begins, so that a lost history shows. As on an older vLLM, a format prevents calls.

The calls of `sign NAME ARGUMENTS` have a signature, without which the model refuses them in a history, as Gemini does.
"""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.clients.cases import MODEL
from tests.support.strict import ChatRequest, Delta, StrictModel, message_text, tool_call

THOUGHTS = "I am told what to do."
SIGNATURE = {"google": {"thought_signature": "c2lnbmVk"}}


class Model(StrictModel):
    def __init__(self) -> None:
        super().__init__(MODEL)
        self.pages["/version"] = {"version": "0.31.0"}

    def say(self, request: ChatRequest) -> list[Delta]:
        called = [one for message in request["messages"] for one in message.get("tool_calls", ())]
        if any("signed" in one["id"] and one.get("extra_content") != SIGNATURE for one in called):
            self.faults.append("a call came back without its signature")
        calls = [] if request.get("response_format") else _calls(request)
        return [{"reasoning": THOUGHTS}, *(calls or [{"content": _answer(request)}])]


def _since_user(request: ChatRequest) -> tuple[str, list[dict[str, Any]]]:
    """Return the user's last message, and the messages after it."""
    messages = request["messages"]
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
    return message_text(messages[last]), messages[last + 1 :]


def _calls(request: ChatRequest) -> list[Delta]:
    """Return the calls that are due, or none if no such tool is offered."""
    told, since = _since_user(request)
    done = sum(bool(message.get("tool_calls")) for message in since)
    stages = told.split("\nthen\n")
    lines = stages[done].splitlines() if done < len(stages) else []
    names = [tool["function"]["name"] for tool in request.get("tools", [])]
    calls: list[Delta] = []
    for line in lines:
        word, name, arguments = [*line.split(" ", 2), "", ""][:3]
        offered = [one for one in names if one == name] or [one for one in names if name in one]
        if word in ("call", "sign") and offered:
            kind = "signed" if word == "sign" else "call"
            index = len(calls)
            delta = tool_call(f"{kind}_{len(request['messages'])}_{index}", offered[0], arguments, index)
            if word == "sign":
                delta["tool_calls"][0]["extra_content"] = SIGNATURE
            calls.append(delta)
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
