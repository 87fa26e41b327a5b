"""Input items: what a caller may send as ``input``, checked and brought into one form.

An item keeps the fields that are not known here (SDK objects come back with more than they were sent with); nulls go. The
content of a message is a list of parts afterwards. To accept another type of item, add a function and a line to ``ITEMS``.
"""

from __future__ import annotations

from typing import Any

from ..types import Item, Part
from . import checks
from .calls import CALL_ID_LENGTH, CALLS, STATUSES, ItemCheck
from .content_parts import ASSISTANT_PARTS, INPUT_PARTS, REASONING_PARTS, SUMMARY_PARTS, content_parts

__all__ = ["CALL_ID_LENGTH", "ID_PREFIXES", "ITEMS", "item", "parse_input", "user_message"]

ROLES = frozenset({"user", "assistant", "system", "developer"})

ID_PREFIXES = {
    "additional_tools": "at",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "code_interpreter_call": "ci",
    "compaction": "cmp",
    "compaction_trigger": "cmpt",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "function_call": "fc",
    "function_call_output": "fco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
    "message": "msg",
    "reasoning": "rs",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "web_search_call": "ws",
}


def user_message(text: str) -> Item:
    """The item that a bare string stands for."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def parse_input(value: Any, path: str = "input", max_items: int | None = None) -> list[Item]:
    """``input`` as a list of items, at most ``max_items`` of them."""
    if isinstance(value, str):
        return [user_message(value)]
    if not isinstance(value, list):
        checks.wrong_type(path, "a string or an array of objects", value)
    return [item(one, f"{path}[{index}]") for index, one in enumerate(checks.array(value, path, max_length=max_items))]


def item(value: Any, path: str) -> Item:
    """One input item. Without a type it is a message, if it has a role, or else a reference."""
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
        checks.one_of(checked["status"], f"{path}.status", STATUSES.get(kind, STATUSES["message"]))
    return ITEMS[kind](checked, path)


# -- one function for each type of item --------------------------------------------------------------------------------


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
    return (
        {"type": "output_text", "text": text, "annotations": []}
        if role == "assistant"
        else {"type": "input_text", "text": text}
    )


def _reasoning(value: Item, path: str) -> Item:
    for name, parts in (("summary", SUMMARY_PARTS), ("content", REASONING_PARTS)):
        if name in value:
            listed = checks.array(value[name], f"{path}.{name}")
            value[name] = content_parts(listed, f"{path}.{name}", parts)
    if "encrypted_content" in value:
        checks.string(value["encrypted_content"], f"{path}.encrypted_content")
    return {**value, "summary": value.get("summary", [])}


def _compaction(value: Item, path: str) -> Item:
    """The envelope alone: what else it says is not sealed, and the model must not be told it."""
    checks.required(value, "encrypted_content", path, checks.string)
    return {name: value[name] for name in ("id", "type", "encrypted_content", "created_by") if name in value}


def _item_reference(value: Item, path: str) -> Item:
    checks.required(value, "id", path, checks.string)
    return {"type": "item_reference", "id": value["id"]}


ITEMS: dict[str, ItemCheck] = {
    "message": _message,
    "reasoning": _reasoning,
    "item_reference": _item_reference,
    "compaction": _compaction,
    "compaction_trigger": lambda value, _path: value,
    **CALLS,
}

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
