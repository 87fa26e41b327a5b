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


def check_tool_choice(choice: Any, tools: list[Tool]) -> None:
    """``choice`` is ``none``, ``auto``, ``required``, a function by name, or ``allowed_tools``; it must fit the ``tools``."""
    if isinstance(choice, str):
        mode = checks.one_of(choice, "tool_choice", MODES)
    else:
        mode = _check_choice_object(choice, {tool["name"] for tool in tools})
    if mode == "required" and not tools:
        raise BadRequest("Tool choice 'required' must be specified with 'tools' parameter.", param="tool_choice")


def _check_choice_object(choice: Any, names: set[str]) -> str:
    checked = checks.mapping(choice, "tool_choice")
    kind = checks.required(checked, "type", "tool_choice", checks.string)
    if kind == "function":
        _check_named(checked, "tool_choice", names)
        return "required"
    if kind == "allowed_tools":
        for index, tool in enumerate(checks.required(checked, "tools", "tool_choice", checks.array)):
            path = f"tool_choice.tools[{index}]"
            _check_named(checks.mapping(tool, path), path, names)
        return checks.one_of(checked.get("mode", "auto"), "tool_choice.mode", {"auto", "required"})
    if kind in _KNOWN_ELSEWHERE:
        checks.unsupported("tool_choice.type", f"tools of type '{kind}' are not served (yet).")
    return checks.wrong_value("tool_choice.type", kind, {"function", "allowed_tools"})


def _check_named(choice: dict[str, Any], path: str, names: set[str]) -> None:
    checks.one_of(checks.required(choice, "type", path, checks.string), f"{path}.type", {"function"})
    name = checks.required(choice, "name", path, checks.string)
    if name not in names:
        raise BadRequest(f"Tool choice '{name}' not found in 'tools' parameter.", param=f"{path}.name", code="invalid_value")
