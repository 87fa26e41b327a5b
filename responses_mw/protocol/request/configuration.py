"""Checks of `reasoning` and `text`, and `configuration_update` items, which replace some of their members.

A `configuration_update` in the history or the input sets the reasoning effort, the text format or the verbosity. Each of them
stays in effect until a later update replaces it, and takes precedence over the request's own parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from .. import checks
from ..checks import among, closed_object
from ..types import Item

CONFIGURATION_UPDATE = "configuration_update"

_effort = among("none", "minimal", "low", "medium", "high", "xhigh", "max")
_summary = among("auto", "concise", "detailed")
_reasoning_options = closed_object(
    effort=_effort,
    summary=_summary,
    generate_summary=_summary,
    context=among("auto", "current_turn", "all_turns"),
    mode=among("standard", "pro"),
)


def check_reasoning(value: Any, path: str) -> dict[str, Any]:
    reasoning: dict[str, Any] = _reasoning_options(value, path)
    if "mode" in reasoning:  # "pro" is a hint: OpenAI's models would work longer
        reasoning["mode"] = "standard"
    deprecated = reasoning.pop("generate_summary", None)
    return {"summary": deprecated, **reasoning} if deprecated else reasoning


_json_schema = checks.fields(
    {"name": partial(checks.string, pattern=r"[a-zA-Z0-9_-]{1,64}"), "schema": checks.json_object},
    strict=checks.boolean,
    description=checks.string,
)


def _check_schema(value: dict[str, Any], path: str) -> dict[str, Any]:
    if "schema" not in value and isinstance(value.get("json_schema"), dict):
        checks.chat_name(f"{path}.json_schema", f"its members 'name', 'schema' and 'strict' in '{path}'")
    return _json_schema(value, path)


_format = checks.by_type({"text": checks.as_it_is, "json_object": checks.as_it_is, "json_schema": _check_schema})
check_text = closed_object(format=_format, verbosity=among("low", "medium", "high"))

_update = checks.fields(reasoning=closed_object(effort=_effort), text=check_text)


def check_update(item: Item, path: str) -> Item:
    if not item.keys() & {"reasoning", "text"}:
        checks.missing(f"{path}.reasoning")
    return _update(item, path)


def updates(items: Sequence[Item]) -> dict[str, dict[str, Any]]:
    """Return the members of `reasoning` and `text` that the updates in `items` set."""
    merged: dict[str, dict[str, Any]] = {}
    for item in items:
        if item["type"] == CONFIGURATION_UPDATE:
            for name in ("reasoning", "text"):
                merged[name] = {**merged.get(name, {}), **item.get(name, {})}
    return merged
