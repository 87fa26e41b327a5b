"""All kinds of tools, by the types of their definitions and of their items."""

from __future__ import annotations

from ..types import Item, Part
from .form import ItemKind, ToolKind
from .functions import CUSTOM, FUNCTION, TOOL_SEARCH
from .machine import APPLY_PATCH, LOCAL_SHELL, SHELL
from .served import CODE_INTERPRETER, MCP, WEB_SEARCH

_KINDS = (FUNCTION, CUSTOM, TOOL_SEARCH, LOCAL_SHELL, SHELL, APPLY_PATCH, MCP, CODE_INTERPRETER, WEB_SEARCH)

TOOL_KINDS: dict[str, ToolKind] = {type_: kind for kind in _KINDS for type_ in kind.types}
TOOL_ITEMS: dict[str, ItemKind] = {item.type: item for kind in _KINDS for item in kind.items}
SERVED_TOOLS = frozenset(type_ for type_, kind in TOOL_KINDS.items() if kind.offer is None)
"""Types of the tools that the server executes."""


def arguments_of(item: Item) -> str:
    """The arguments of a call, as the model would write them."""
    arguments = TOOL_ITEMS[item["type"]].arguments
    assert arguments is not None, "only calls have arguments"
    return arguments(item)


def output_of(item: Item) -> str | list[Part]:
    """What the model reads of an output item, or of a call that holds its own output."""
    output = TOOL_ITEMS[item["type"]].output
    assert output is not None, "only outputs and executed calls have output"
    return output(item)


def is_finished(item: Item) -> bool:
    """Whether a call that the server executes was executed. One that was cut off, or whose run ended before, was not."""
    return item.get("status", "completed") in ("completed", "failed")
