"""Input items: check what a client sends as ``input`` and normalize it.

Items keep unknown fields, because clients send SDK objects back that have more fields than we sent. Nulls are removed, and the
content of a message becomes a list of parts. To add a type of item, add it to its ``ToolKind`` or to ``ITEMS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..chat.client_tools import BRINGS_TOOLS
from ..parts import ASSISTANT_PARTS, INPUT_PARTS, REASONING_PARTS, SUMMARY_PARTS
from ..tool_kinds.form import ItemKind
from ..tool_kinds.registry import TOOL_ITEMS
from ..types import Item
from . import checks
from .tools import check_brought_tools

Unseal = Callable[[str], str | None]
"""Opens an envelope. Returns None if it was not sealed with our keys."""

_role = checks.among("user", "assistant", "system", "developer")
_id = partial(checks.string, max_length=256)


def user_message(text: str) -> Item:
    """Return the user message for an ``input`` that is a string."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def text_of(item: Item) -> str:
    """The plain text of a reasoning item: its content, otherwise its summary."""
    return "\n".join(part["text"] for part in item.get("content") or item.get("summary") or ())


def parse_input(value: Any, path: str = "input", max_items: int | None = None) -> list[Item]:
    """Check ``input`` and return it as a list of items."""
    if isinstance(value, str):
        return [user_message(value)]
    if not isinstance(value, list):
        checks.wrong_type(path, "a string or an array of objects", value)
    return checks.each(item, max_length=max_items)(value, path)


def item(value: Any, path: str) -> Item:
    """Check one input item. Without a type, it is a message if it has a role, otherwise a reference."""
    given = checks.mapping(value, path)
    if "type" not in given:
        if not given.keys() & {"role", "id"}:
            checks.missing(f"{path}.type")
        given["type"] = "message" if "role" in given else "item_reference"
    kind = checks.string(given["type"], f"{path}.type")
    if kind in NOT_SERVED:
        checks.unsupported(f"{path}.type", f"items of type '{kind}' are not served (yet).")
    if kind not in ITEMS:
        checks.wrong_value(f"{path}.type", kind, ITEMS.keys())
    if "id" in given:
        _id(given["id"], f"{path}.id")
    if "status" in given:
        checks.one_of(given["status"], f"{path}.status", ITEMS[kind].statuses)
    checked: Item = ITEMS[kind].check(given, path)
    if kind in BRINGS_TOOLS:
        checked["tools"] = checks.required(checked, "tools", path, check_brought_tools)
    return checked


def _message(value: Item, path: str) -> Item:
    is_assistant = checks.required(value, "role", path, _role) == "assistant"
    content = value.get("content")
    if content is None:
        checks.missing(f"{path}.content")
    if isinstance(content, str):
        output = {"type": "output_text", "text": content, "annotations": []}
        return {**value, "content": [output] if is_assistant else [{"type": "input_text", "text": content}]}
    if not isinstance(content, list):
        checks.wrong_type(f"{path}.content", "a string or an array of objects", content)
    return {**value, "content": (ASSISTANT_PARTS if is_assistant else INPUT_PARTS)(content, f"{path}.content")}


_reasoning = checks.fields(summary=SUMMARY_PARTS, content=REASONING_PARTS, encrypted_content=checks.string)


def _compaction(value: Item, path: str) -> Item:
    """Keep only the envelope and the item's id. Other members are not sealed, so the model must not see them."""
    checks.required(value, "encrypted_content", path, checks.string)
    return {name: value[name] for name in ("id", "type", "encrypted_content", "created_by") if name in value}


def _item_reference(value: Item, path: str) -> Item:
    return {"type": "item_reference", "id": checks.required(value, "id", path, checks.string)}


ITEMS: dict[str, ItemKind] = {
    "message": ItemKind("message", "msg", _message),
    "reasoning": ItemKind("reasoning", "rs", lambda value, path: {"summary": [], **_reasoning(value, path)}),
    "item_reference": ItemKind("item_reference", "", _item_reference),
    "compaction": ItemKind("compaction", "cmp", _compaction),
    "compaction_trigger": ItemKind("compaction_trigger", "cmpt", checks.as_it_is),
    "additional_tools": ItemKind("additional_tools", "at", checks.fields(role=checks.among("developer"))),
    **TOOL_ITEMS,
}
ID_PREFIXES = {type_: kind.prefix for type_, kind in ITEMS.items() if kind.prefix}

NOT_SERVED = frozenset(
    {
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "file_search_call",
        "image_generation_call",
        "program",
        "program_output",
    }
)


# -- encrypted reasoning -----------------------------------------------------------------------------------------------
# With ``include: ["reasoning.encrypted_content"]``, a client that stores no responses here receives the text of a reasoning
# item as ``encrypted_content`` and sends it back later (OpenAI reference, "Encrypted reasoning items").


def unsealed(items: Sequence[Item], unseal: Unseal, *, offset: int = 0) -> list[Item]:
    """Restore the content of encrypted reasoning items.

    An item that cannot be opened may come from another server. Raise ``BadRequest`` only if it has no readable text and is in
    the request's own input (from ``offset`` on).
    """
    return [_unsealed(item, unseal, index - offset) for index, item in enumerate(items)]


def _unsealed(item: Item, unseal: Unseal, index: int) -> Item:
    if item["type"] != "reasoning" or "encrypted_content" not in item or item.get("content"):
        return item
    text = unseal(item["encrypted_content"])
    if text is not None:
        return {**item, "content": [{"type": "reasoning_text", "text": text}]}
    if index >= 0 and not text_of(item):
        checks.foreign_envelope(f"input[{index}].encrypted_content", f"input[{index}].encrypted_content")
    return item
