"""A scripted model for Codex.

A script has one turn for the prompt and one after each tool result: which of them is due shows in the messages, so a request
that is sent again gets the same answer again. Where a history has been summed up, the results that it had count as before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support.strict import ChatRequest, Delta, StrictModel, tool_call

Turn = Callable[[ChatRequest], Delta]

SUMMARY = "The user wants the sum of 40 and 2; a command has told it already."
_SUMMING_UP = ("CONTEXT CHECKPOINT COMPACTION", "Write a summary of the whole conversation above")
"""What Codex tells the model to sum a history up, and what our server tells it."""
LONG = 50_000


class Unexpected(Exception):
    """The request does not fit the script."""


class Model(StrictModel):
    """Plays `turns`. `played` contains the turns so far."""

    def __init__(self) -> None:
        super().__init__("scripted")
        self.begin(())

    def begin(self, turns: tuple[Turn, ...], forgotten: int = 0) -> None:
        """Play other turns from now on. A summary replaces `forgotten` results."""
        self.turns, self.forgotten = turns, forgotten
        self.faults, self.played = [], set[int]()
        self.summed_up = set[str]()
        """By which words the model was asked for a summary."""

    def say(self, request: ChatRequest) -> list[Delta]:
        return [self._play(request)]

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
    """Return the number of tool results."""
    return sum(message["role"] == "tool" for message in request["messages"])


# -- turns ---------------------------------------------------------------------------------------------------------------


def say(text: str) -> Delta:
    return {"content": text}


def answer(text: str) -> Turn:
    return lambda _: say(text)


def call(name: str, **arguments: Any) -> Turn:
    """Call the tool whose name ends with `name`. The client does not know the namespace before it."""

    def turn(request: ChatRequest) -> Delta:
        return _call(offered(request, name)["name"], arguments, request)

    return turn


def long(turn: Turn) -> Turn:
    """Return `turn` with a usage that makes the history seem long."""
    return lambda request: {**turn(request), "prompt_tokens": LONG}


def write(name: str, text: str) -> Turn:
    """Call a tool that has one text as its argument, whatever the name of the argument."""

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
    """Continue with `turn` if the `last` message, or any tool result, contains the expected text."""

    def checked(request: ChatRequest) -> Delta:
        messages = request["messages"][-1:] if last else [one for one in request["messages"] if one["role"] == "tool"]
        shown = " ".join(map(_text, messages))
        if expected not in shown:
            raise Unexpected(f"the tool result should have {expected!r} in it, but is {shown[:300]}")
        return turn(request)

    return checked


def without(name: str, turn: Turn) -> Turn:
    """Continue with `turn` if no tool of that name is offered."""

    def checked(request: ChatRequest) -> Delta:
        if any(tool["function"]["name"] == name for tool in request.get("tools", [])):
            raise Unexpected(f"{name} should not be offered")
        return turn(request)

    return checked


def told(words: str, turn: Turn, *, before: Turn | None = None) -> Turn:
    """Continue with `turn` if the user has sent the `words`, otherwise with `before`, if given."""

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
    return tool_call(f"call_{results(request)}", name, json.dumps(arguments))
