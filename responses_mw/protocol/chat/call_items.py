"""Items of calls, and what the chat form has in their place: a function's arguments and a tool's text.

A client acts on these items. What the model wrote malformed is kept in them, but nowhere where it would be carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from ...errors import TooLarge
from ..request import checks
from ..response.citations import listing
from ..types import Item, Part
from .tool_calls import parse_arguments

MAX_NESTING = 128
"""How deep the arguments of a call may be nested that are sent as an object: JSON encoders have an end."""
OPERATIONS = frozenset({"create_file", "update_file", "delete_file"})
NOT_APPROVED = "The user did not approve this call."

# -- from the model's arguments to the members of an item --------------------------------------------------------------


def tool_search(arguments: str) -> dict[str, Any]:
    parsed = _parsed(arguments or "{}")
    return {"arguments": {"malformed_arguments": arguments} if parsed is None else parsed}


def local_shell(arguments: str) -> dict[str, Any]:
    parsed = _parsed(arguments) or {}
    command, env = parsed.get("command"), parsed.get("env")
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    action = {
        "type": "exec",
        "command": _texts(command) or [arguments],  # there is no such program, and the client will say so
        "env": {name: _text(value) for name, value in env.items()} if isinstance(env, dict) else {},
        **_whole_numbers(parsed, "timeout_ms"),
        **{name: parsed[name] for name in ("user", "working_directory") if isinstance(parsed.get(name), str)},
    }
    return {"action": action}


def shell(arguments: str) -> dict[str, Any]:
    parsed = _parsed(arguments) or {}
    commands = parsed.get("commands", parsed.get("command"))
    listed = _texts([commands] if isinstance(commands, str) else commands)
    if not listed:
        listed = [f"false # malformed arguments: {_text([arguments])[1:-1]}"]  # a comment, on one line
    return {"action": {"commands": listed, **_whole_numbers(parsed, "timeout_ms", "max_output_length")}}


def apply_patch(arguments: str) -> dict[str, Any]:
    parsed = _parsed(arguments) or {}
    nested = parsed.get("operation")
    operation: dict[str, Any] = nested if isinstance(nested, dict) else parsed
    kind, path, diff = (operation.get(name) for name in ("type", "path", "diff"))
    if not isinstance(path, str) or not isinstance(kind, str) or kind not in OPERATIONS:
        return {"operation": {"type": "update_file", "path": "", "diff": arguments}}  # there is no such file
    text = {} if kind == "delete_file" else {"diff": _text(diff or "")}
    return {"operation": {"type": kind, "path": path, **text}}


def _parsed(arguments: str) -> dict[str, Any] | None:
    parsed = parse_arguments(arguments)
    try:
        checks.depth([parsed], MAX_NESTING)
    except TooLarge:
        return None
    return parsed


def _texts(value: Any) -> list[str]:
    return [_text(one) for one in value] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _whole_numbers(parsed: Mapping[str, Any], *names: str) -> dict[str, int]:
    return {name: parsed[name] for name in names if type(parsed.get(name)) is int and parsed[name] > 0}


# -- from an item to the function's arguments --------------------------------------------------------------------------


def arguments_of(item: Item) -> str:
    """The arguments that the call's item stands for, as the model would write them."""
    return _ARGUMENTS[item["type"]](item)


def _as_written(item: Item) -> str:
    return item["arguments"] or "{}"


def _action(item: Item) -> str:
    action = {name: value for name, value in item["action"].items() if value is not None}
    action.pop("type", None)
    if not action.get("env", True):
        del action["env"]
    return _text(action)


def _search(item: Item) -> str:
    action = dict(item.get("action") or {})
    queries = action.get("queries") or [""]
    kind = action.pop("type", "search")
    return _text({"query": action.get("query") or queries[0]} if kind == "search" else action)


_ARGUMENTS: dict[str, Callable[[Item], str]] = {
    "function_call": _as_written,
    "mcp_call": _as_written,
    "mcp_approval_request": _as_written,
    "custom_tool_call": lambda item: _text({"input": item["input"]}),
    "tool_search_call": lambda item: _text(item["arguments"]),
    "local_shell_call": _action,
    "shell_call": _action,
    "apply_patch_call": lambda item: _text(item["operation"]),
    "code_interpreter_call": lambda item: _text({"code": item.get("code") or ""}),
    "web_search_call": _search,
}


# -- from an item to what the model reads of the call's result ---------------------------------------------------------


def output_of(item: Item) -> str | list[Part]:
    """What the item of an output says, or the item of a call that has its output in itself."""
    return _OUTPUTS[item["type"]](item)


def has_output(item: Item) -> bool:
    """Whether the item of such a call was carried out; one that was cut, or whose run ended before, was not."""
    return item.get("status", "completed") in ("completed", "failed")


def _shell_output(item: Item) -> str:
    """Each command's output, in order: what it wrote, and how it ended."""
    return "\n\n".join(_command_output(one) for one in item["output"])


def _command_output(one: Mapping[str, Any]) -> str:
    outcome = one["outcome"]
    end = "Timed out." if outcome["type"] == "timeout" else f"Exit code: {outcome['exit_code']}"
    stderr = f"stderr:\n{one['stderr']}" if one["stderr"] else ""
    return "\n".join(text.rstrip("\n") for text in (one["stdout"], stderr, end) if text)


def _patch_output(item: Item) -> str:
    said = "The patch could not be applied." if item["status"] == "failed" else "The patch was applied."
    return f"{said}\n{item['output']}" if item.get("output") else said


def _mcp_output(item: Item) -> str:
    output, error = item.get("output"), item.get("error")
    if output is not None or error is None:
        return output or ""
    return _error_text(error)


def _error_text(error: Any) -> str:
    """``error`` of an MCP call: a text, one with a message, or the content of the tool's own answer."""
    if not isinstance(error, dict):
        return _text(error)
    content = error.get("message") or error.get("content") or ""
    blocks = content if isinstance(content, list) else [content]
    return "\n".join(_text(block.get("text", block) if isinstance(block, dict) else block) for block in blocks)


def _code_output(item: Item) -> str:
    outputs = [one for one in item.get("outputs") or () if isinstance(one, dict)]
    return "\n".join(str(one.get("logs") or f"({one.get('type')})") for one in outputs) or "(no output)"


def _search_output(item: Item) -> str:
    if item.get("error"):
        return _text(item["error"])
    if "results" in item:
        return listing(item["results"])
    sources = (item.get("action") or {}).get("sources") or ()
    urls = [str(source["url"]) for source in sources if isinstance(source, dict) and "url" in source]
    return "\n".join(["The results are not shown again.", *urls])


_OUTPUTS: dict[str, Callable[[Item], str | list[Part]]] = {
    "function_call_output": lambda item: item["output"],
    "custom_tool_call_output": lambda item: item["output"],
    "local_shell_call_output": lambda item: item["output"],
    "shell_call_output": _shell_output,
    "apply_patch_call_output": _patch_output,
    "mcp_call": _mcp_output,
    "code_interpreter_call": _code_output,
    "web_search_call": _search_output,
}
