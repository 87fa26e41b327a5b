"""Items as the API gives them, one by one and in pages."""

from __future__ import annotations

from typing import Any

from ..protocol import document
from ..protocol.types import Item, Part
from ..state import Page

_PARTS = {"message": "content", "reasoning": "content", "function_call_output": "output"}
"""The member of an item that lists its parts."""

_TEXTS = frozenset({"text", "input_text", "output_text"})
_DEFAULTS: dict[str, dict[str, Any]] = {"output_text": {"annotations": []}, "input_image": {"detail": "auto"}}


def listed(page: Page, include: frozenset[str]) -> dict[str, Any]:
    """The list object of the reference."""
    items = page.items
    return {
        "object": "list",
        "data": [shown(item, include) for item in items],
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": page.has_more,
    }


def shown(item: Item, include: frozenset[str]) -> Item:
    """The item as the reference has it: who sent it may have left out a default, and called a text by another's name."""
    item = document.shown(item, include)
    member = _PARTS.get(item["type"], "")
    parts = item.get(member)
    if not isinstance(parts, list):
        return item
    kind = (
        "reasoning_text" if item["type"] == "reasoning" else "output_text" if item.get("role") == "assistant" else "input_text"
    )
    return {**item, member: [_shown_part(part, kind) for part in parts]}


def _shown_part(part: Part, text_kind: str) -> Part:
    kind = text_kind if part["type"] in _TEXTS else part["type"]
    return {**_DEFAULTS.get(kind, {}), **part, "type": kind}
