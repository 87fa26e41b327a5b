"""The replies of the demo models. Rules are tried in order, and the first that matches the conversation produces the reply.

Call arguments and structured output fit their JSON schema. They are filled with names and numbers from the user's text.
Structured output also uses the results of tools. Values that are not found there get a default of the right type. `format`,
`pattern` and `multipleOf` are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import cycle, takewhile
from math import inf
from typing import Any, NamedTuple

from .prompts import text_of
from .request import ChatRequest


class Reply(NamedTuple):
    """A text or calls, each with a function name and JSON arguments. `demo-thinker` also sends `thought` as reasoning."""

    thought: str
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def reply_to(request: ChatRequest) -> Reply:
    """Return the reply of the first rule that applies. Raises `ValueError` if no value can be generated for a schema."""
    return next(reply for rule in _RULES if (reply := rule(request)) is not None)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# -- tools ---------------------------------------------------------------------------------------------------------------


def _make_call(request: ChatRequest) -> Reply | None:
    """Call a tool if `tool_choice` requires it. Otherwise, call the matching tools, unless a tool has just answered."""
    if request.named_function is not None:
        functions = [function for function in request.functions if function["name"] == request.named_function]
        return _call(request, functions, f"I have to call {request.named_function}.")
    functions = _wanted_functions(request)
    if request.must_call:
        return _call(request, functions or request.functions[:1], "I have to call a tool.")
    if not functions or request.messages[-1]["role"] == "tool":
        return None
    names = " and ".join(function["name"] for function in functions)
    return _call(request, functions, f"The user's words fit {names}. I call and wait for the result.")


def _wanted_functions(request: ChatRequest) -> list[dict[str, Any]]:
    """Return the functions whose names share a word with the user's text, and those that search if the text is a question.

    Without parallel calls, return only the first one.
    """
    said = _keywords(request.user_text) | ({"search"} if request.user_text.endswith("?") else set())
    functions = [function for function in request.functions if said & _keywords(function["name"])]
    return functions[:1] if request.is_single_call else functions


def _keywords(text: str) -> set[str]:
    """Return the significant words of `text` in lower case: only "weather" for both `getWeather` and "get the weather"."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", text)
    return {word.lower() for word in _WORD.findall(spaced)} - _COMMON_WORDS


def _call(request: ChatRequest, functions: list[dict[str, Any]], thought: str) -> Reply:
    return Reply(thought, calls=tuple((one["name"], _json(_arguments(one, request.user_text))) for one in functions))


def _arguments(function: dict[str, Any], text: str) -> Any:
    schema = function.get("parameters") or {"type": "object"}
    arguments = fill(schema, text)
    if isinstance(arguments, dict) and "search" in _keywords(function["name"]):
        arguments |= {name: value for name, value in {"query": text, "queries": [text]}.items() if name in arguments}
    return arguments


_RESULT = re.compile(r'<result cite="(【\d+】)"[^>]*>\n(.*?)\n</result>', re.DOTALL)
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]?")


def _cite(request: ChatRequest) -> Reply | None:
    """Repeat the sentence of the search results that shares most words with the user's text, and cite it."""
    found = [result for _, content in _tool_results(request) for result in _RESULT.findall(content)]
    sentences = [(sentence.strip(), cite) for cite, text in found for sentence in _SENTENCE.findall(text)]
    asked = _keywords(request.user_text)
    best = max(sentences, key=lambda one: len(asked & _keywords(one[0])), default=None)
    return best and Reply("The search has found something. I pass on the sentence that fits best.", " ".join(best))


def _answer_from_results(request: ChatRequest) -> Reply | None:
    """Repeat the results of tools if the last messages are results."""
    sentences = [f"{name} says: {_in_words(content)}." for name, content in _tool_results(request)]
    return Reply("The tools have answered. I pass on what they say.", " ".join(sentences)) if sentences else None


def _tool_results(request: ChatRequest) -> list[tuple[str, str]]:
    """Return the name and result of each tool message at the end of the conversation, in order."""
    calls = [call for message in request.messages for call in message.get("tool_calls") or ()]
    names = {call["id"]: call["function"]["name"] for call in calls}
    last = takewhile(lambda message: message["role"] == "tool", reversed(request.messages))
    return [(names.get(message.get("tool_call_id"), "The tool"), text_of(message)) for message in last][::-1]


def _in_words(result: str) -> str:
    try:
        value = json.loads(result)
    except ValueError:
        return result.strip().rstrip(".")
    return ", ".join(f"{key} {part}" for key, part in value.items()) if isinstance(value, dict) else str(value)


# -- structured output ---------------------------------------------------------------------------------------------------


def _fill_format(request: ChatRequest) -> Reply | None:
    """Fill the schema of `response_format`. For `json_object`, reply with the text and its names and numbers."""
    kind = request.format["type"]
    if kind == "text":
        return None
    text = "\n".join([request.user_text, *(content for _, content in _tool_results(request))])
    if kind == "json_schema":
        schema = request.format["json_schema"].get("schema") or {}
        return Reply("I look in the text for the values that the schema requires.", _json(fill(schema, text)))
    found = {"text": text, "names": _names(text), "numbers": _numbers(text)}
    return Reply("The user wants JSON. I fill it with what the text contains.", _json(found))


# -- text ----------------------------------------------------------------------------------------------------------------


def _recall(request: ChatRequest) -> Reply | None:
    """Answer "What is my ...?" with what the user said in "my ... is ...", or say that the user has not said it."""
    asked = re.search(r"\bmy ([\w ]+?)\s*\?", request.user_text, re.IGNORECASE)
    if asked is None:
        return None
    told = re.compile(rf"\bmy {re.escape(asked[1])} is ([^.?!,;\n]+)", re.IGNORECASE)
    texts = [text_of(message) for message in request.messages if message["role"] == "user"]
    said = [found[1] for text in texts for found in told.finditer(text)]
    thought = f"The user asks for their {asked[1]}. I look through the conversation."
    return Reply(thought, f"Your {asked[1]} is {said[-1].strip()}." if said else f"You have not told me your {asked[1]}.")


_OPERATORS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}
_OPERATOR_WORD = re.compile("|".join(map(re.escape, _OPERATORS)))
_SUM = re.compile(r"(?<![\w.])\d{1,15}(?:\.\d{1,9})?(?:\s*[-+*/]\s*\d{1,15}(?:\.\d{1,9})?){1,9}")


def _calculate(request: ChatRequest) -> Reply | None:
    """Calculate an expression such as "17 * 23 + 4" or "3 plus 4"."""
    found = _SUM.search(_OPERATOR_WORD.sub(lambda word: _OPERATORS[word[0]], request.user_text.lower()))
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
    terms = [Fraction(0)]
    for operator, number in re.findall(r"([-+*/])\s*([\d.]+)", f"+ {expression}"):
        value = Fraction(number)
        if operator == "*":
            terms[-1] *= value
        elif operator == "/":
            terms[-1] /= value
        else:
            terms.append(value if operator == "+" else -value)
    return sum(terms, Fraction(0))


def _count(request: ChatRequest) -> Reply | None:
    """Reply with numbers to texts such as "Count to 20"."""
    found = re.search(r"\bcount to ([1-9]\d{0,3})\b", request.user_text, re.IGNORECASE)
    if found is None:
        return None
    return Reply(f"The user wants {found[1]} numbers, one by one.", " ".join(map(str, range(1, int(found[1]) + 1))))


def _describe(request: ChatRequest) -> Reply:
    """Describe the words of any other text, and repeat the instructions that apply."""
    text = request.user_text
    words = _WORD.findall(text)
    if not words:
        return Reply("There are no words to talk about.", "You wrote no words.")
    said = f"You wrote {len(words)} {'word' if len(words) == 1 else 'words'}: “{_clipped(text)}”"
    longest = f"The longest is “{max(words, key=len)}”, the last is “{words[-1]}”."
    instructions = [text_of(message) for message in request.messages if message["role"] in ("system", "developer")]
    told = [f"I was told: “{_clipped(' '.join(instructions))}”"] if any(instructions) else []
    thought = f"This is neither a sum nor a task for a tool. I count {len(words)} words and look at the longest."
    return Reply(thought, " ".join([*told, said, longest]))


def _clipped(text: str) -> str:
    words = text.split()
    return " ".join(words[:24]) + (" …" if len(words) > 24 else "")


_RULES: tuple[Callable[[ChatRequest], Reply | None], ...] = (
    _make_call,
    _fill_format,
    _cite,
    _answer_from_results,
    _recall,
    _calculate,
    _count,
    _describe,
)


# -- values of a text ----------------------------------------------------------------------------------------------------

# Words that are never used as values.
_COMMON_WORDS = frozenset(
    """
    a about all an and any are as at be by can could do does for from get give has have how i in into is it its let me
    my name no not of on or out please say should show so some tell than that the their them then there these this to
    use was we were what when where which who why will with would you your
    """.split()  # noqa: SIM905 (a list of seventy strings would be harder to read)
)
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_NAME = re.compile(r"\b[A-ZÀ-ÖØ-Þ][\w'-]*(?: [A-ZÀ-ÖØ-Þ][\w'-]*)*")
_NUMBER = re.compile(r"(?<![\w.])-?\d{1,15}(?:\.\d{1,15})?")
_NULL = {"type": "null"}
_DEEP = 4  # levels of nesting beyond which optional values are null or empty
_TOO_DEEP = 16


def fill(schema: dict[str, Any], text: str) -> Any:
    """Generate a value for the JSON `schema` from `text`.

    Raises `AttributeError`, `LookupError`, `TypeError` or `ValueError` if the schema is invalid or there is no value.
    """
    return _Values(schema, text).value(schema, 0)


def _numbers(text: str) -> list[float]:
    return [float(number) if "." in number else int(number) for number in _NUMBER.findall(text)]


def _names(text: str) -> list[str]:
    """Return the capitalised words of `text`, with adjacent words joined. Single words at the start of sentences come last."""
    sure: list[str] = []
    unsure: list[str] = []
    for found in _NAME.finditer(text):
        words = found[0].split()
        starts = text[: found.start()].rstrip(" ")[-1:] in ("", *".?!:\n")
        while words and words[0].lower() in _COMMON_WORDS:
            words.pop(0)
        if words:
            (unsure if starts and len(words) == len(found[0].split()) == 1 else sure).append(" ".join(words))
    return sure + unsure


class _Values:
    """Fills one schema with the names and numbers of a text. They are used in turn."""

    def __init__(self, root: dict[str, Any], text: str) -> None:
        self._text = text
        self._definitions = {
            f"#/{member}/{name}": definition
            for member in ("$defs", "definitions")
            for name, definition in root.get(member, {}).items()
        }
        names, numbers = _names(text), _numbers(text)
        self._offered = {"string": len(names), "integer": len(numbers), "number": len(numbers)}
        long_words = [word for word in _WORD.findall(text) if word.lower() not in _COMMON_WORDS]
        self._names = cycle(names or long_words or [text])
        self._numbers = cycle(numbers or [0])

    def value(self, schema: Any, depth: int) -> Any:
        """Return a value for `schema`. `depth` is its level of nesting."""
        if depth > _TOO_DEEP:
            raise ValueError("the schema is nested too deeply")
        if "$ref" in schema:
            return self.value(self._definitions[schema["$ref"]], depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return next(filter(self._mentions, schema["enum"]), schema["enum"][0])
        if options := schema.get("anyOf") or schema.get("oneOf"):
            is_null = depth >= _DEEP and _NULL in options
            option = _NULL if is_null else next((option for option in options if option != _NULL), _NULL)
            return self.value(option, depth + 1)
        return self._value_of_type(_kind(schema), schema, depth)

    def _value_of_type(self, kind: str, schema: dict[str, Any], depth: int) -> Any:
        match kind:
            case "object":
                properties = schema.get("properties", {})
                wanted = schema.get("required", properties)
                return {name: self.value(properties.get(name, {}), depth + 1) for name in wanted}
            case "array":
                return self._array(schema, depth)
            case "string":
                name = next(self._names)
                return name[: schema.get("maxLength", len(name))].ljust(schema.get("minLength", 0), ".")
            case "integer" | "number":
                return self._number(schema, is_integer=kind == "integer")
            case "boolean":
                return True
            case "null":
                return None
        raise ValueError(f"Invalid type: {kind}")

    def _mentions(self, value: object) -> bool:
        return re.search(rf"\b{re.escape(str(value))}\b", self._text, re.IGNORECASE) is not None

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        items = schema.get("items", {})
        minimum, maximum = schema.get("minItems", 0), schema.get("maxItems", _TOO_DEEP)
        offered = self._offered.get(_kind(items), int(depth < _DEEP))
        return [self.value(items, depth + 1) for _ in range(min(max(offered, minimum), maximum))]

    def _number(self, schema: dict[str, Any], *, is_integer: bool) -> float:
        low, high = schema.get("exclusiveMinimum", -inf), schema.get("exclusiveMaximum", inf)
        distance = 1 if is_integer else min(1, (high - low) / 2)
        minimum, maximum = schema.get("minimum", low + distance), schema.get("maximum", high - distance)
        limited: float = min(max(next(self._numbers), minimum), maximum)
        return int(limited) if is_integer else limited


def _kind(schema: dict[str, Any]) -> str:
    """Return the type of `schema`, or the first of several that is not null. Without a type, return "object" or "string"."""
    kind = schema.get("type") or ("object" if schema.keys() & {"properties", "$ref"} else "string")
    if isinstance(kind, list):
        return next((one for one in kind if one != "null"), "null")
    return str(kind)
