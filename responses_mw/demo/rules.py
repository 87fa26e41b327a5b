"""What the demo models say: a list of rules, each of which replies to a conversation or passes it to the next.

Each reply has a thought, which ``demo-thinker`` sends as reasoning.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from .request import ChatRequest, NamedTool, Tool
from .values import COMMON_WORDS, SourceText, Values

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ModelCall", "Reply", "reply_to"]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A tool call. ``arguments`` is JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's thought, followed by a text or by calls."""

    thought: str
    text: str = ""
    calls: tuple[ModelCall, ...] = ()


def reply_to(request: ChatRequest) -> Reply:
    """Return the reply of the first rule that has one. Raises `SchemaError` for a schema that cannot be filled."""
    return next(reply for rule in RULES if (reply := rule(request)) is not None)


def last_user_text(request: ChatRequest) -> str:
    return next((message.text for message in reversed(request.messages) if message.role == "user"), "")


# Tools


def make_forced_call(request: ChatRequest) -> Reply | None:
    """Call the tool that ``tool_choice`` names, or any tool if it is "required"."""
    if isinstance(request.tool_choice, NamedTool):
        named = request.tool_choice.function.name
        tools = [tool for tool in request.offered_tools if tool.function.name == named]
        return _call(request, tools, f"I have to call {named}.")
    if request.tool_choice == "required":
        tools = _wanted_tools(request) or request.offered_tools[:1]
        return _call(request, tools, "I have to call a tool.")
    return None


def make_wanted_call(request: ChatRequest) -> Reply | None:
    """Call the tools that fit the user's text, unless the last message is a tool's result."""
    tools = _wanted_tools(request)
    if not tools or request.messages[-1].role == "tool":
        return None
    names = " and ".join(tool.function.name for tool in tools)
    return _call(request, tools, f"The user's words fit {names}. I call and wait for the result.")


def _wanted_tools(request: ChatRequest) -> list[Tool]:
    """Return the tools whose names share a word with the user's text, only the first if calls must not be parallel.

    If there are none, return the tool whose description shares the most words.
    """
    said = _keywords(last_user_text(request))
    by_name = [tool for tool in request.offered_tools if said & _keywords(tool.function.name)]
    if by_name:
        return by_name if request.parallel_tool_calls is not False else by_name[:1]
    shared = [len(said & _keywords(tool.function.description or "")) for tool in request.offered_tools]
    return [request.offered_tools[shared.index(max(shared))]] if any(shared) else []


def _keywords(text: str) -> set[str]:
    """Return the significant words: only "weather" for ``getWeather`` and for "get the weather"."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", text)
    return {word.lower() for word in SourceText(spaced).words} - COMMON_WORDS


def _call(request: ChatRequest, tools: list[Tool], thought: str) -> Reply:
    text = SourceText(last_user_text(request))
    calls = [
        ModelCall(tool.function.name, _json(Values(tool.function.parameters or {"type": "object"}, text).fill()))
        for tool in tools
    ]
    return Reply(thought, calls=tuple(calls))


def answer_from_results(request: ChatRequest) -> Reply | None:
    """Repeat the results of tools if they are the last messages."""
    results = _tool_results(request)
    if not results:
        return None
    sentences = [f"{name} says: {_in_words(content)}." for name, content in results]
    return Reply("The tools have answered. I pass on what they say.", " ".join(sentences))


def _tool_results(request: ChatRequest) -> list[tuple[str, str]]:
    """Return the name and result of each tool message at the end of the conversation, in order."""
    names = {call.id: call.function.name for message in request.messages for call in message.tool_calls or []}
    results = []
    for message in reversed(request.messages):
        if message.role != "tool":
            break
        results.append((names.get(message.tool_call_id or "", "The tool"), message.text))
    return results[::-1]


def _in_words(result: str) -> str:
    """Format a JSON object as "key value, key value" and other JSON as a string. Strip the final periods of plain text."""
    try:
        value = json.loads(result)
    except ValueError:
        return result.strip().rstrip(".")
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return str(value)


# Structured output


def fill_format(request: ChatRequest) -> Reply | None:
    """Fill the schema of ``response_format`` with values from the text. For ``json_object``, return the text and its values."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    results = [content for _, content in _tool_results(request)]
    text = SourceText("\n".join([last_user_text(request), *results]))
    if wanted.type == "json_schema":
        return Reply(
            "I look in the text for the values that the schema requires.",
            _json(Values(wanted.schema_to_fill, text).fill()),
        )
    found = {"text": text.text, "names": text.names, "numbers": text.numbers}
    return Reply("The user wants JSON. I fill it with what the text contains.", _json(found))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# Text


def recall(request: ChatRequest) -> Reply | None:
    """Answer "What is my ...?" if the user said "my ... is ..." earlier."""
    asked = re.search(r"\bmy ([\w ]+?)\s*\?", last_user_text(request), re.IGNORECASE)
    if asked is None:
        return None
    told = re.compile(rf"\bmy {re.escape(asked[1])} is ([^.?!,;\n]+)", re.IGNORECASE)
    said = [found[1] for message in request.messages if message.role == "user" for found in told.finditer(message.text)]
    thought = f"The user asks for their {asked[1]}. I look through the conversation."
    return Reply(thought, f"Your {asked[1]} is {said[-1].strip()}." if said else f"You have not told me your {asked[1]}.")


_OPERATORS = {"plus": "+", "minus": "-", "times": "*", "multiplied by": "*", "divided by": "/", "×": "*", "÷": "/"}
_OPERATOR_WORD = re.compile("|".join(map(re.escape, _OPERATORS)))
_SUM = re.compile(r"(?<![\w.])\d{1,15}(?:\.\d{1,9})?(?:\s*[-+*/]\s*\d{1,15}(?:\.\d{1,9})?){1,9}")
_STEP = re.compile(r"([-+*/])\s*([\d.]+)")


def calculate(request: ChatRequest) -> Reply | None:
    """Calculate an expression whose operators are signs or words: "17 * 23 + 4", "3 plus 4"."""
    text = _OPERATOR_WORD.sub(lambda word: _OPERATORS[word[0]], last_user_text(request).lower())
    found = _SUM.search(text)
    if found is None:
        return None
    expression = " ".join(re.findall(r"[\d.]+|[-+*/]", found[0]))
    thought = f"The user wants to know {expression}. I take products first, then sums, from left to right."
    try:
        result = _evaluate(expression)
    except ZeroDivisionError:
        return Reply(thought, f"{expression} has no value: it divides by zero.")
    return Reply(thought, f"{expression} = {result if result.denominator == 1 else float(result)}.")


def _evaluate(expression: str) -> Fraction:
    """Return the exact value of numbers joined by ``+ - * /``. Raises `ZeroDivisionError`."""
    terms = [Fraction(0)]
    for operator, number in _STEP.findall(f"+ {expression}"):
        value = Fraction(number)
        if operator == "*":
            terms[-1] *= value
        elif operator == "/":
            terms[-1] /= value
        else:
            terms.append(value if operator == "+" else -value)
    return sum(terms, Fraction(0))


def count(request: ChatRequest) -> Reply | None:
    """Count, as in "Count to 20" or "Count from 5 to 1"."""
    found = re.search(r"\bcount (?:from (\d{1,4}) )?to (\d{1,4})\b", last_user_text(request), re.IGNORECASE)
    if found is None:
        return None
    first, last = int(found[1] or 1), int(found[2])
    step = 1 if first <= last else -1
    numbers = range(first, last + step, step)
    return Reply(f"The user wants {len(numbers)} numbers, one by one.", " ".join(map(str, numbers)))


def describe(request: ChatRequest) -> Reply:
    """Describe any other text: its words, and the instructions that apply."""
    text = last_user_text(request)
    words = SourceText(text).words
    if not words:
        return Reply("There are no words to talk about.", "You wrote no words.")
    said = f"You wrote {len(words)} {'word' if len(words) == 1 else 'words'}: “{_clipped(text)}”"
    longest = f"The longest is “{max(words, key=len)}”, the last is “{words[-1]}”."
    instructions = [message.text for message in request.messages if message.role in ("system", "developer")]
    told = [f"I was told: “{_clipped(' '.join(instructions))}”"] if any(instructions) else []
    thought = f"This is neither a sum nor a task for a tool. I count {len(words)} words and look at the longest."
    return Reply(thought, " ".join([*told, said, longest]))


def _clipped(text: str, max_words: int = 24) -> str:
    words = text.split()
    return " ".join(words[:max_words]) + (" …" if len(words) > max_words else "")


RULES: tuple[Callable[[ChatRequest], Reply | None], ...] = (
    make_forced_call,
    make_wanted_call,
    fill_format,
    answer_from_results,
    recall,
    calculate,
    count,
    describe,
)
