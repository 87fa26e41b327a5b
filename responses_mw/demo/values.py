"""Fill a JSON schema with values from a text, for the arguments and the structured output of the demo models.

An enum gets the member that the text mentions, a number one of the text's numbers. A string gets what the text says about its
property ("the city is Paris"), otherwise one of the text's names ("Ada Lovelace", "London"). If the text has no such value, a
default of the right type is used (0, an empty list). ``pattern`` and ``multipleOf`` are ignored.
"""

from __future__ import annotations

import re
from itertools import cycle
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMMON_WORDS", "SchemaError", "SourceText", "Values"]

# Words that are never used as values.
COMMON_WORDS = frozenset(
    """
    a about all an and any are as at be by can could do does for from get give has have how i in into is it its let me
    my name no not of on or out please say should show so some tell than that the their them then there these this to
    use was we were what when where which who why will with would you your
    """.split()  # noqa: SIM905 (a list of seventy strings would be harder to read)
)
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_NAME = re.compile(r"\b[A-ZÀ-ÖØ-Þ][\w'-]*(?: [A-ZÀ-ÖØ-Þ][\w'-]*)*")
_NUMBER = re.compile(r"(?<![\w.])-?\d{1,15}(?:\.\d{1,15})?")
_DEEP = 4  # levels of nesting beyond which optional values are null or empty
_TOO_DEEP = 16

# Each format: its pattern in a text, and the default value.
_FORMATS = {
    "date": (re.compile(r"\d{4}-\d\d-\d\d"), "2025-01-01"),
    "time": (re.compile(r"\d\d:\d\d:\d\d"), "12:00:00"),
    "date-time": (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "2025-01-01T12:00:00Z"),
    "email": (re.compile(r"[\w.+-]+@[\w-]+\.[\w.]+\w"), "nobody@example.com"),
    "uri": (re.compile(r"https?://[^\s\"'<>]+"), "https://example.com/"),
}


class SchemaError(ValueError):
    """The schema cannot be filled."""


class SourceText:
    """A text and the values that it contains."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.words = _WORD.findall(text)
        self.names = _names(text)
        self.numbers = [float(number) if "." in number else int(number) for number in _NUMBER.findall(text)]

    def mentions(self, value: object) -> bool:
        return re.search(rf"\b{re.escape(str(value))}\b", self.text, re.IGNORECASE) is not None

    def says(self, label: str) -> str | None:
        """Return what the text says that ``label`` is: "Paris" for ``city`` in "my city is Paris."."""
        noun = re.escape(label.replace("_", " "))
        said = re.search(rf"\b{noun}(?: is|:| =)\s*[\"']?([^\"'.,;?!\n]+)", self.text, re.IGNORECASE)
        return said[1].strip() or None if said else None


def _names(text: str) -> list[str]:
    """Return capitalised words, adjacent ones joined. A single word that begins a sentence may not be a name and comes last."""
    sure: list[str] = []
    unsure: list[str] = []
    for found in _NAME.finditer(text):
        words = found[0].split()
        before = text[: found.start()].rstrip(" ")
        starts = not before or before[-1] in ".?!:\n"
        while words and words[0].lower() in COMMON_WORDS:
            words.pop(0)
        if words:
            (unsure if starts and len(words) == len(found[0].split()) == 1 else sure).append(" ".join(words))
    return sure + unsure


class Values:
    """Fills one schema, using the names and numbers of the text in turn."""

    def __init__(self, schema: dict[str, Any], text: SourceText) -> None:
        self._root = schema
        self._text = text
        long_words = [word for word in text.words if word.lower() not in COMMON_WORDS]
        self._names = cycle(text.names or long_words or [text.text])
        self._numbers: Iterator[float] = cycle(text.numbers or [0])
        self._makers = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": self._boolean,
            "null": self._null,
        }

    def fill(self) -> Any:
        """Return a value for the schema. Raises `SchemaError`."""
        try:
            return self._value(self._root, "", 0)
        except (AttributeError, KeyError, TypeError) as malformed:
            raise SchemaError(f"the schema is malformed: {malformed}") from malformed

    def _value(self, schema: Any, label: str, depth: int) -> Any:
        schema = self._resolved(schema)
        if depth > _TOO_DEEP:
            raise SchemaError("the schema is nested too deeply")
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._member(schema["enum"])
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return self._value(self._option(options, depth), label, depth + 1)
        kind = _kind(schema)
        if kind not in self._makers:
            raise SchemaError(f"Invalid type: {kind}")
        return self._makers[kind](schema, label, depth)

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """Return the schema itself, or the definition that its ``$ref`` names."""
        for _ in range(_TOO_DEEP):
            if not isinstance(schema, dict):
                raise SchemaError(f"a schema must be an object, not {schema!r}")
            if "$ref" not in schema:
                return schema
            schema = self._definition(str(schema["$ref"]))
        raise SchemaError("the schema refers to itself endlessly")

    def _definition(self, reference: str) -> Any:
        found: Any = self._root
        for step in reference.removeprefix("#").strip("/").split("/"):
            if step and (not isinstance(found, dict) or step not in found):
                raise SchemaError(f"no definition at {reference}")
            found = found[step] if step else found
        return found

    def _member(self, members: Any) -> Any:
        if not isinstance(members, list) or not members:
            raise SchemaError("enum must be a list with members")
        return next((member for member in members if self._text.mentions(member)), members[0])

    def _option(self, options: list[Any], depth: int) -> Any:
        """Return the first option that is not null, or null if the nesting is deep."""
        null = {"type": "null"}
        if depth >= _DEEP and null in options:
            return null
        return next((option for option in options if option != null), null)

    def _object(self, schema: dict[str, Any], label: str, depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        wanted = schema.get("required", properties)
        return {name: self._value(properties.get(name, {}), name, depth + 1) for name in wanted}

    def _array(self, schema: dict[str, Any], label: str, depth: int) -> list[Any]:
        items = self._resolved(schema.get("items", {}))
        minimum, maximum = schema.get("minItems", 0), schema.get("maxItems", _TOO_DEEP)
        if "enum" in items:
            mentioned = [member for member in items["enum"] if self._text.mentions(member)]
            return mentioned[:maximum] if len(mentioned) >= minimum else items["enum"][:minimum]
        count = min(max(self._offers(items, depth), minimum), maximum)
        return [self._value(items, label, depth + 1) for _ in range(count)]

    def _offers(self, items: dict[str, Any], depth: int) -> int:
        """Return the number of items that the text has values for."""
        if _kind(items) in ("integer", "number"):
            return len(self._text.numbers)
        if _kind(items) == "string":
            return len(self._text.names)
        return 0 if depth >= _DEEP else 1

    def _string(self, schema: dict[str, Any], label: str, depth: int) -> str:
        if schema.get("format") in _FORMATS:
            pattern, plain = _FORMATS[schema["format"]]
            found = pattern.search(self._text.text)
            return found[0] if found else plain
        said = self._text.says(label) if label else None
        value = said or next(self._names)
        return value[: schema.get("maxLength", len(value))].ljust(schema.get("minLength", 0), ".")

    def _integer(self, schema: dict[str, Any], label: str, depth: int) -> int:
        return int(self._number(schema, label, depth))

    def _number(self, schema: dict[str, Any], label: str, depth: int) -> float:
        said = SourceText(self._text.says(label) or "").numbers if label else []
        value = said[0] if said else next(self._numbers)
        minimum = schema.get("minimum", schema.get("exclusiveMinimum", -inf) + 1)
        maximum = schema.get("maximum", schema.get("exclusiveMaximum", inf) - 1)
        limited: float = min(max(value, minimum), maximum)
        return limited

    def _boolean(self, schema: dict[str, Any], label: str, depth: int) -> bool:
        return not any(self._text.mentions(word) for word in ("no", "not", "never", "false"))

    def _null(self, schema: dict[str, Any], label: str, depth: int) -> None:
        return None


def _kind(schema: dict[str, Any]) -> str:
    """Return the type of a value for ``schema``: the first that is not null."""
    kind = schema.get("type") or ("object" if "properties" in schema else "string")
    if isinstance(kind, list):
        return next((one for one in kind if one != "null"), "null")
    return str(kind)
