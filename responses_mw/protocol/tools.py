"""Tool definitions and ``tool_choice`` of a request, checked. To accept another type of tool, add a line to ``TOOLS``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import BadRequest
from . import checks
from .items import FUNCTION_NAME
from .types import Tool

_NOT_YET = ("allowed_callers", "async", "defer_loading", "output_schema")


def check_tool(value: Any, path: str) -> Tool:
    """One entry of ``tools``, without its nulls."""
    tool = checks.mapping(value, path)
    kind = checks.required(tool, "type", path, checks.string)
    if kind not in TOOLS:
        if kind in _KNOWN_ELSEWHERE:
            checks.unsupported(f"{path}.type", f"tools of type '{kind}' are not served (yet).")
        checks.wrong_value(f"{path}.type", kind, TOOLS.keys())
    return TOOLS[kind](tool, path)


def _function(tool: Tool, path: str) -> Tool:
    checks.required(tool, "name", path, partial(checks.string, pattern=FUNCTION_NAME))
    if "parameters" in tool and not isinstance(tool["parameters"], dict):
        checks.wrong_type(f"{path}.parameters", "an object", tool["parameters"])
    if "description" in tool:
        checks.string(tool["description"], f"{path}.description")
    if "strict" in tool:
        checks.boolean(tool["strict"], f"{path}.strict")
    for name in _NOT_YET:
        if tool.get(name):
            checks.unsupported(f"{path}.{name}", "it is not served yet.")
    return tool


TOOLS: dict[str, Callable[[Tool, str], Tool]] = {"function": _function}

_KNOWN_ELSEWHERE = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "container",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)

MODES = frozenset({"none", "auto", "required"})


def check_tool_choice(choice: Any, tools: list[Tool]) -> Any:
    """``choice`` is ``none``, ``auto``, ``required``, a function by name, or ``allowed_tools``; it must fit the ``tools``.

    Returned without its nulls; ``allowed_tools`` always has its ``mode``.
    """
    if isinstance(choice, str):
        checked: Any = checks.one_of(choice, "tool_choice", MODES)
        mode, offered = choice, tools
    else:
        checked = _choice_object(choice, {tool["name"] for tool in tools})
        mode, offered = checked.get("mode", "required"), checked.get("tools", tools)
    if mode == "required" and not offered:
        message = "Invalid 'tool_choice': 'required' must be specified with the 'tools' parameter."
        raise BadRequest(message, param="tool_choice", code="invalid_value")
    return checked


def _choice_object(choice: Any, names: set[str]) -> dict[str, Any]:
    checked = checks.mapping(choice, "tool_choice")
    kind = checks.required(checked, "type", "tool_choice", checks.string)
    if kind == "function":
        return _named(checked, "tool_choice", names)
    if kind == "allowed_tools":
        listed = checks.required(checked, "tools", "tool_choice", checks.array)
        allowed = [_named(tool, f"tool_choice.tools[{index}]", names) for index, tool in enumerate(listed)]
        mode = checks.one_of(checked.get("mode", "auto"), "tool_choice.mode", {"auto", "required"})
        return {**checked, "mode": mode, "tools": allowed}
    if kind in _KNOWN_ELSEWHERE:
        checks.unsupported("tool_choice.type", f"tools of type '{kind}' are not served (yet).")
    return checks.wrong_value("tool_choice.type", kind, {"function", "allowed_tools"})


def _named(choice: Any, path: str, names: set[str]) -> dict[str, Any]:
    checked = checks.mapping(choice, path)
    checks.one_of(checks.required(checked, "type", path, checks.string), f"{path}.type", {"function"})
    name = checks.required(checked, "name", path, checks.string)
    if name not in names:
        message = f"Invalid '{path}.name': '{name}' not found in the 'tools' parameter."
        raise BadRequest(message, param=f"{path}.name", code="invalid_value")
    return checked
