"""Input items: check what a caller sends as ``input`` and bring it into one form.

Items keep unknown fields, as SDK objects come back with more than was sent. Nulls are removed, and the content of a message
becomes a list of parts. To add a type of item, add it to its ``ToolKind`` or to the table here.
"""

from __future__ import annotations

from typing import Any

from ..chat.client_tools import BRINGS_TOOLS
from ..parts import ASSISTANT_PARTS, INPUT_PARTS, REASONING_PARTS, SUMMARY_PARTS, content_parts
from ..tool_kinds.form import ItemKind
from ..tool_kinds.registry import TOOL_ITEMS
from ..types import Item, Part
from . import checks
from .tools import check_brought_tools

ROLES = frozenset({"user", "assistant", "system", "developer"})


def user_message(text: str) -> Item:
    """The item that a bare string as ``input`` stands for."""
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
    return [item(one, f"{path}[{index}]") for index, one in enumerate(checks.array(value, path, max_length=max_items))]


def item(value: Any, path: str) -> Item:
    """Check one input item. Without a type it is a message if it has a role, otherwise a reference."""
    checked = checks.mapping(value, path)
    if "type" not in checked:
        if not checked.keys() & {"role", "id"}:
            checks.missing(f"{path}.type")
        checked["type"] = "message" if "role" in checked else "item_reference"
    kind = checks.string(checked["type"], f"{path}.type")
    if kind in NOT_SERVED:
        checks.unsupported(f"{path}.type", f"items of type '{kind}' are not served (yet).")
    if kind not in ITEMS:
        checks.wrong_value(f"{path}.type", kind, ITEMS.keys())
    if "id" in checked:
        checks.string(checked["id"], f"{path}.id", max_length=256)
    if "status" in checked:
        checks.one_of(checked["status"], f"{path}.status", ITEMS[kind].statuses)
    checked = ITEMS[kind].check(checked, path)
    if kind in BRINGS_TOOLS:
        checked["tools"] = checks.required(checked, "tools", path, check_brought_tools)
    return checked


def _message(value: Item, path: str) -> Item:
    role = checks.one_of(checks.required(value, "role", path, checks.string), f"{path}.role", ROLES)
    content = value.get("content")
    if content is None:
        checks.missing(f"{path}.content")
    if isinstance(content, str):
        return {**value, "content": [_text_part(role, content)]}
    if not isinstance(content, list):
        checks.wrong_type(f"{path}.content", "a string or an array of objects", content)
    parts = ASSISTANT_PARTS if role == "assistant" else INPUT_PARTS
    return {**value, "content": content_parts(content, f"{path}.content", parts)}


def _text_part(role: str, text: str) -> Part:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _reasoning(value: Item, path: str) -> Item:
    for name, parts in (("summary", SUMMARY_PARTS), ("content", REASONING_PARTS)):
        if name in value:
            listed = checks.array(value[name], f"{path}.{name}")
            value[name] = content_parts(listed, f"{path}.{name}", parts)
    checks.optional(value, path, encrypted_content=checks.string)
    return {**value, "summary": value.get("summary", [])}


def _compaction(value: Item, path: str) -> Item:
    """Keep the envelope only. Other members are not sealed, so the model must not see them."""
    checks.required(value, "encrypted_content", path, checks.string)
    return {name: value[name] for name in ("id", "type", "encrypted_content", "created_by") if name in value}


def _item_reference(value: Item, path: str) -> Item:
    checks.required(value, "id", path, checks.string)
    return {"type": "item_reference", "id": value["id"]}


def _additional_tools(value: Item, path: str) -> Item:
    checks.one_of(value.get("role", "developer"), f"{path}.role", {"developer"})
    return value


ITEMS: dict[str, ItemKind] = {
    "message": ItemKind("message", "msg", _message),
    "reasoning": ItemKind("reasoning", "rs", _reasoning),
    "item_reference": ItemKind("item_reference", "", _item_reference),
    "compaction": ItemKind("compaction", "cmp", _compaction),
    "compaction_trigger": ItemKind("compaction_trigger", "cmpt", lambda value, _path: value),
    "additional_tools": ItemKind("additional_tools", "at", _additional_tools),
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
