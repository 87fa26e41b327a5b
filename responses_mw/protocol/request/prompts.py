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
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..types import Item, Part
from . import checks
from .items import user_message

_PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_.-]{0,63})\s*\}\}")
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
        parts = (part for item in self.input for part in item.get("content", []))
        texts = [self.instructions or "", *(part["text"] for part in parts if "text" in part)]
        return frozenset(name for text in texts for name in _PLACEHOLDER.findall(text))


_part = checks.by_type(
    {
        "input_text": checks.fields({"text": checks.string}),
        **dict.fromkeys(("input_image", "input_file"), checks.as_it_is),
    }
)


def variables(value: Any) -> Variables:
    """Check ``prompt.variables``. Text parts become texts."""
    return {name: _variable(one, f"{_PATH}.{name}") for name, one in checks.mapping(value, _PATH).items()}


def _variable(value: Any, path: str) -> str | Part:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        checks.wrong_type(path, "a string or an object", value)
    part: Part = _part(value, path)
    return str(part["text"]) if part["type"] == "input_text" else part


def filled(body: dict[str, Any], template: PromptTemplate, values: Variables) -> dict[str, Any]:
    """Merge the request ``body`` into the template. Raise ``BadRequest`` for missing or unknown variables."""
    for name in sorted(template.names - values.keys()):
        checks.missing(f"{_PATH}.{name}")
    for name in sorted(values.keys() - template.names):
        checks.unknown(f"{_PATH}.{name}")
    merged: dict[str, Any] = dict(template.defaults)
    if template.instructions is not None:
        merged["instructions"] = _PLACEHOLDER.sub(lambda match: _text(match[1], values), template.instructions)
    merged |= {name: value for name, value in body.items() if value is not None and name != "prompt"}
    if template.input:
        own = checks.string_or_array(merged.get("input", []), "input")
        merged["input"] = [_filled_item(item, values) for item in template.input]
        merged["input"] += [user_message(own)] if isinstance(own, str) else own
    return merged


def _text(name: str, values: Variables) -> str:
    value = values[name]
    if not isinstance(value, str):
        checks.invalid(f"{_PATH}.{name}", "images and files cannot be used in the prompt's instructions.")
    return value


def _filled_item(item: Item, values: Variables) -> Item:
    if "content" not in item:
        return item
    return {**item, "content": [filled for part in item["content"] for filled in _filled_part(part, values)]}


def _filled_part(part: Part, values: Variables) -> list[Part]:
    """Fill the placeholders of a part. An image or a file splits its text into several parts."""
    if "text" not in part:
        return [part]
    pieces: list[str | Part] = [*_PLACEHOLDER.split(part["text"])]  # alternating texts and names
    pieces[1::2] = [values[str(name)] for name in pieces[1::2]]
    if all(isinstance(piece, str) for piece in pieces):
        return [{**part, "text": "".join(map(str, pieces))}]
    parts: list[Part] = []
    for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece, str)):
        run: list[Any] = [*group]
        if not is_text:
            parts += run
        elif any(run):
            parts.append({"type": "input_text", "text": "".join(run)})
    return parts
