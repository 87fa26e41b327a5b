"""Prompt templates: expand a request's ``prompt`` into a request without one (OpenAI guide, "Prompting").

1. A template provides ``instructions``, ``input`` and defaults for other parameters. Values in the request win; the
   template's input precedes the request's own.
2. ``{{name}}`` in the instructions and in the texts of the template's messages is replaced by the variable of that name.
   Values are not expanded again: placeholders in a user's text have no effect.
3. In a message, a variable may also be an image, a file or a text part. An image or a file splits the text around it.
4. A placeholder without a variable and a variable without a placeholder are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import BadRequest
from ..types import Item, Part
from . import checks
from .items import user_message

PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_.-]{0,63})\s*\}\}")
_part = checks.by_type(
    {
        "input_text": checks.fields({"text": checks.string}),
        **dict.fromkeys(("input_image", "input_file"), checks.as_it_is),
    }
)
_PATH = "prompt.variables"

Variables = Mapping[str, str | Part]


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """One version of a prompt. ``input`` is a result of ``items.parse_input``; ``defaults`` are request parameters."""

    instructions: str | None = None
    input: list[Item] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Names of the variables that the template needs."""
        return frozenset(name for text in self._texts() for name in PLACEHOLDER.findall(text))

    def _texts(self) -> Iterator[str]:
        yield self.instructions or ""
        for item in self.input:
            yield from (part["text"] for part in item.get("content", []) if "text" in part)


def variables(value: Any) -> dict[str, str | Part]:
    """Check ``prompt.variables``."""
    given = checks.mapping(value, _PATH)
    return {name: _variable(one, f"{_PATH}.{name}") for name, one in given.items()}


def _variable(value: Any, path: str) -> str | Part:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        checks.wrong_type(path, "a string or an object", value)
    part: Part = _part(value, path)
    return part


def filled(body: dict[str, Any], template: PromptTemplate, values: Variables) -> dict[str, Any]:
    """Merge the request ``body`` into the template. Raise ``BadRequest`` for missing or unknown variables."""
    for name in sorted(template.names - values.keys()):
        checks.missing(f"{_PATH}.{name}")
    for name in sorted(values.keys() - template.names):
        checks.unknown(f"{_PATH}.{name}")
    merged: dict[str, Any] = dict(template.defaults)
    if template.instructions is not None:
        merged["instructions"] = PLACEHOLDER.sub(lambda match: _text(match[1], values), template.instructions)
    merged |= {name: value for name, value in body.items() if value is not None and name != "prompt"}
    if template.input:
        merged["input"] = [*(_item(item, values) for item in template.input), *_own_input(body)]
    return merged


def _own_input(body: dict[str, Any]) -> list[Any]:
    own = body.get("input")
    if own is None:
        return []
    own = checks.string_or_array(own, "input")
    return [user_message(own)] if isinstance(own, str) else own


def _item(item: Item, values: Variables) -> Item:
    if "content" not in item:
        return item
    return {**item, "content": [filled for part in item["content"] for filled in _fill_part(part, values)]}


def _fill_part(part: Part, values: Variables) -> Iterator[Part]:
    if "text" not in part:
        yield part
    elif any(not _is_text(values[name]) for name in PLACEHOLDER.findall(part["text"])):
        yield from _split(part["text"], values)
    else:
        yield {**part, "text": PLACEHOLDER.sub(lambda match: _text(match[1], values), part["text"])}


def _split(text: str, values: Variables) -> Iterator[Part]:
    """Split a text with placeholders into parts."""
    pieces = PLACEHOLDER.split(text)  # alternating texts and names
    plain = pieces[0]
    for name, following in zip(pieces[1::2], pieces[2::2], strict=True):
        value = values[name]
        if _is_text(value):
            plain += _text(name, values) + following
            continue
        if plain:
            yield {"type": "input_text", "text": plain}
        assert isinstance(value, dict)
        yield value
        plain = following
    if plain:
        yield {"type": "input_text", "text": plain}


def _is_text(value: str | Part) -> bool:
    return isinstance(value, str) or value["type"] == "input_text"


def _text(name: str, values: Variables) -> str:
    value = values[name]
    if isinstance(value, str):
        return value
    if value["type"] != "input_text":
        message = f"Invalid '{_PATH}.{name}': images and files cannot be used in the prompt's instructions."
        raise BadRequest(message, param=f"{_PATH}.{name}", code="invalid_value")
    return str(value["text"])
