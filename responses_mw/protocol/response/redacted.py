"""Remove secrets from an upstream's own Responses API: from the results and errors of its tools, and from added members.

The texts of its model are not changed, like those of Chat Completions. Most answers consist only of these, and so cost nothing.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from ...redaction import redacted_values
from ..types import Document, Item
from .events import PARTS

_BY_MODEL = frozenset({"custom_tool_call", "function_call", "message", "reasoning"})
# Members that contain texts of the model, or values that this server checks or replaces.
_ITEM = frozenset(
    {"arguments", "call_id", "encrypted_content", "id", "input", "name", "namespace", "phase", "role", "status", "type"}
)
_PART = frozenset({"logprobs", "refusal", "text", "type"})
_EVENT = _ITEM | _PART | {"annotation_index", "code", "content_index", "delta", "item", "item_id", "output_index"}
_EVENT |= {"part", "sequence_number", "summary_index"}
_COUNTS = frozenset(
    {"cache_write_tokens", "cached_tokens", "input_tokens", "output_tokens", "reasoning_tokens", "total_tokens"}
)
_DETAILS = frozenset({"input_tokens_details", "output_tokens_details"})


def redacted_item(item: Item) -> Item:
    """Return a copy of `item` without secrets. Its id is unchanged, because this server replaces it."""
    if item["type"] not in _BY_MODEL:
        return redacted_values(item) | {name: item[name] for name in ("id", "type") if name in item}
    parts = {name: [*map(_part, item[name])] for name in PARTS if isinstance(item.get(name), list)}
    return _except(item, _ITEM | PARTS.keys()) | parts


def redacted_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an event about the model's texts without secrets. Its item, if it has one, is unchanged."""
    part = {"part": _part(event["part"])} if "part" in event else {}
    return _except(event, _EVENT) | part


def redacted_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `usage` without secrets."""
    details = {name: _except(usage[name], _COUNTS) for name in _DETAILS if isinstance(usage.get(name), dict)}
    return _except(usage, _COUNTS | details.keys()) | details


def redacted_members(ending: Document, names: AbstractSet[str], ours: Document) -> Document:
    """Return the members `names` of the upstream's response without secrets. Those that `ours` has already are omitted."""
    given = {name: ending[name] for name in names if ending[name] is not None}
    changed = {name: redacted_values(given[name]) for name in given.keys() & ours.keys() if given[name] != ours[name]}
    return changed | redacted_values({name: given[name] for name in given.keys() - ours.keys()})


def _part(part: Any) -> Any:
    if not isinstance(part, dict):
        return redacted_values(part)
    return _except(part, _PART)


def _except(holder: dict[str, Any], known: AbstractSet[str]) -> dict[str, Any]:
    """Return a copy of `holder` without secrets in members other than `known`."""
    others = {
        name: value for name, value in holder.items() if value and name not in known and not isinstance(value, int | float)
    }
    if not others:  # in most answers
        return {**holder}
    return {name: value for name, value in holder.items() if name not in others} | redacted_values(others)
