"""Input items of calls and of what belongs to them, checked. To accept another type, add a function and a line to ``CALLS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..chat.call_items import OPERATIONS
from ..types import Item
from . import checks
from .content_parts import INPUT_PARTS, content_parts
from .tools import check_brought_tools

ItemCheck = Callable[[Item, str], Item]

CALL_ID_LENGTH = 64

_USUAL = frozenset({"in_progress", "completed", "incomplete"})
STATUSES: Mapping[str, frozenset[str]] = {
    "message": _USUAL,
    "apply_patch_call_output": frozenset({"completed", "failed"}),
    "code_interpreter_call": _USUAL | {"interpreting", "failed"},
    "mcp_call": _USUAL | {"calling", "failed"},
    "web_search_call": _USUAL | {"searching", "failed"},
}
"""What the status of an item may be, where it differs from a message's."""

_call_id = partial(checks.string, max_length=CALL_ID_LENGTH)


# -- calls that the client carries out ---------------------------------------------------------------------------------


def _call(value: Item, path: str, **required: checks.Check) -> Item:
    """A call with these members, beside its ``call_id``; a ``namespace`` may be among the others."""
    members: dict[str, checks.Check] = {"call_id": _call_id, **required}
    for name, check in members.items():
        value[name] = checks.required(value, name, path, check)
    if "namespace" in value:
        checks.string(value["namespace"], f"{path}.namespace")
    return value


def _tool_search_call(value: Item, path: str) -> Item:
    _check_execution(value, path)
    return _call(value, path, arguments=_object)


def _check_execution(value: Item, path: str) -> None:
    if checks.one_of(value.get("execution", "client"), f"{path}.execution", {"server", "client"}) == "server":
        checks.unsupported(f"{path}.execution", "tools are searched by the client only.")


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        checks.wrong_type(path, "an object", value)
    return value  # its nulls are the tool's business


def _exec(value: Any, path: str) -> dict[str, Any]:
    action = checks.mapping(value, path)
    checks.required(action, "command", path, _strings)
    checks.one_of(action.get("type", "exec"), f"{path}.type", {"exec"})
    if "env" in action:
        action["env"] = checks.mapping(action["env"], f"{path}.env")
    return action


def _commands(value: Any, path: str) -> dict[str, Any]:
    action = checks.mapping(value, path)
    checks.required(action, "commands", path, _strings)
    return action


def _strings(value: Any, path: str) -> list[str]:
    return [checks.string(one, f"{path}[{index}]") for index, one in enumerate(checks.array(value, path))]


def _operation(value: Any, path: str) -> dict[str, Any]:
    operation = checks.mapping(value, path)
    kind = checks.required(operation, "type", path, partial(checks.one_of, supported=OPERATIONS))
    checks.required(operation, "path", path, checks.string)
    if kind != "delete_file":
        checks.required(operation, "diff", path, checks.string)
    return operation


# -- what the client says of them --------------------------------------------------------------------------------------


def _output(value: Item, path: str) -> Item:
    """A text, or a list of content parts."""
    checks.required(value, "call_id", path, _call_id)
    output = value.get("output")
    if output is None:
        checks.missing(f"{path}.output")
    if isinstance(output, str):
        return value
    if not isinstance(output, list):
        checks.wrong_type(f"{path}.output", "a string or an array of objects", output)
    return {**value, "output": content_parts(output, f"{path}.output", INPUT_PARTS)}


def _local_shell_output(value: Item, path: str) -> Item:
    """Its id is that of the call, in the reference; a ``call_id`` is what some clients send."""
    if "call_id" not in value:
        value["call_id"] = checks.required(value, "id", path, checks.string)
    _call_id(value["call_id"], f"{path}.call_id")
    checks.required(value, "output", path, checks.string)
    return value


def _shell_output(value: Item, path: str) -> Item:
    checks.required(value, "call_id", path, _call_id)
    listed = checks.required(value, "output", path, checks.array)
    return {**value, "output": [_of_command(one, f"{path}.output[{index}]") for index, one in enumerate(listed)]}


def _of_command(value: Any, path: str) -> dict[str, Any]:
    checked = checks.mapping(value, path)
    for name in ("stdout", "stderr"):
        checks.required(checked, name, path, checks.string)
    outcome = checks.required(checked, "outcome", path, checks.mapping)
    where = f"{path}.outcome"
    if checks.required(outcome, "type", where, partial(checks.one_of, supported={"exit", "timeout"})) == "exit":
        checks.required(outcome, "exit_code", where, checks.integer)
    return checked


def _patch_output(value: Item, path: str) -> Item:
    checks.required(value, "call_id", path, _call_id)
    checks.required(value, "status", path, checks.string)
    _check_texts(value, path, "output")
    return value


def _tool_search_output(value: Item, path: str) -> Item:
    _check_execution(value, path)
    return _call(value, path, tools=check_brought_tools)


def _additional_tools(value: Item, path: str) -> Item:
    checks.one_of(value.get("role", "developer"), f"{path}.role", {"developer"})
    return {**value, "tools": checks.required(value, "tools", path, check_brought_tools)}


# -- calls that were carried out by a server ---------------------------------------------------------------------------


def _mcp_list_tools(value: Item, path: str) -> Item:
    checks.required(value, "server_label", path, checks.string)
    tools = checks.required(value, "tools", path, checks.array)
    return {**value, "tools": [_mcp_tool(tool, f"{path}.tools[{index}]") for index, tool in enumerate(tools)]}


def _mcp_tool(value: Any, path: str) -> dict[str, Any]:
    tool = checks.mapping(value, path)
    checks.required(tool, "name", path, checks.string)
    checks.required(tool, "input_schema", path, _object)
    _check_texts(tool, path, "description")
    if "annotations" in tool:
        _object(tool["annotations"], f"{path}.annotations")
    return tool


def _mcp_request(value: Item, path: str) -> Item:
    """An ``mcp_approval_request``: what it says has the same names in an ``mcp_call``."""
    for name in ("id", "server_label", "name", "arguments"):
        checks.required(value, name, path, checks.string)
    return value


def _mcp_call(value: Item, path: str) -> Item:
    _mcp_request(value, path)
    _check_texts(value, path, "output", "approval_request_id")
    if not isinstance(value.get("error", ""), str | dict):
        checks.wrong_type(f"{path}.error", "an object", value["error"])
    return value


def _mcp_approval_response(value: Item, path: str) -> Item:
    checks.required(value, "approval_request_id", path, checks.string)
    checks.required(value, "approve", path, checks.boolean)
    _check_texts(value, path, "reason")
    return value


def _code_interpreter_call(value: Item, path: str) -> Item:
    checks.required(value, "id", path, checks.string)
    _check_texts(value, path, "code", "container_id")
    outputs = checks.array(value.get("outputs", []), f"{path}.outputs")
    for index, one in enumerate(outputs):
        where = f"{path}.outputs[{index}]"
        output = checks.mapping(one, where)
        kind = checks.required(output, "type", where, partial(checks.one_of, supported={"logs", "image"}))
        checks.required(output, {"logs": "logs", "image": "url"}[kind], where, checks.string)
    return value


def _web_search_call(value: Item, path: str) -> Item:
    checks.required(value, "id", path, checks.string)
    action = checks.mapping(value.get("action", {}), f"{path}.action")
    if "queries" in action:
        _strings(action["queries"], f"{path}.action.queries")
    if "sources" in action:
        checks.array(action["sources"], f"{path}.action.sources")
    _check_texts(action, f"{path}.action", "type", "query")
    if "results" in value:
        checks.array(value["results"], f"{path}.results")
    return {**value, "action": action}


def _check_texts(value: Mapping[str, Any], path: str, *names: str) -> None:
    for name in names:
        if name in value:
            checks.string(value[name], f"{path}.{name}")


CALLS: dict[str, ItemCheck] = {
    "function_call": partial(_call, name=checks.string, arguments=checks.string),
    "custom_tool_call": partial(_call, name=checks.string, input=checks.string),
    "tool_search_call": _tool_search_call,
    "local_shell_call": partial(_call, action=_exec),
    "shell_call": partial(_call, action=_commands),
    "apply_patch_call": partial(_call, operation=_operation),
    "function_call_output": _output,
    "custom_tool_call_output": _output,
    "tool_search_output": _tool_search_output,
    "local_shell_call_output": _local_shell_output,
    "shell_call_output": _shell_output,
    "apply_patch_call_output": _patch_output,
    "additional_tools": _additional_tools,
    "mcp_list_tools": _mcp_list_tools,
    "mcp_approval_request": _mcp_request,
    "mcp_approval_response": _mcp_approval_response,
    "mcp_call": _mcp_call,
    "code_interpreter_call": _code_interpreter_call,
    "web_search_call": _web_search_call,
}
