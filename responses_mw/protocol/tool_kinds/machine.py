"""Tools for the user's machine: ``local_shell``, ``shell`` and ``apply_patch``.

A client acts on these calls. Whatever the model writes becomes a well-formed item, and malformed arguments are kept where
nothing executes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..request import checks
from ..types import Item, Tool
from .form import (
    CallForm,
    ItemKind,
    Offered,
    ToolKind,
    as_function,
    as_text,
    check_call,
    check_call_id,
    parse_shallow,
    refuse_unsupported,
)


def _texts(value: Any) -> list[str]:
    return [as_text(one) for one in value] if isinstance(value, list) else []


def _positive_integers(parsed: Mapping[str, Any], *names: str) -> dict[str, int]:
    return {name: parsed[name] for name in names if type(parsed.get(name)) is int and parsed[name] > 0}


def _action_arguments(item: Item) -> str:
    action = {name: value for name, value in item["action"].items() if value is not None}
    action.pop("type", None)
    if not action.get("env", True):
        del action["env"]
    return as_text(action)


# -- local_shell: one command --------------------------------------------------------------------------------------------


def _offer_local_shell(_tool: Tool, _namespace: str | None) -> Offered:
    form = CallForm(item="local_shell_call", prefix="lsh", made=_make_local_shell)
    text = {"type": "string"}
    members = {
        "command": {"type": "array", "items": text, "description": 'The program and its arguments, as ["bash", "-lc", "ls"].'},
        "working_directory": {**text, "description": "Where to run it."},
        "timeout_ms": {"type": "integer", "description": "Milliseconds after which it is ended."},
        "env": {"type": "object", "additionalProperties": text, "description": "Environment variables to set."},
    }
    return Offered(as_function("local_shell", "Runs a command on the user's machine.", members, "command"), form)


def _make_local_shell(arguments: str) -> dict[str, Any]:
    parsed = parse_shallow(arguments) or {}
    command, env = parsed.get("command"), parsed.get("env")
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    action = {
        "type": "exec",
        "command": _texts(command) or [arguments],  # no such program exists, which the client will report
        "env": {name: as_text(value) for name, value in env.items()} if isinstance(env, dict) else {},
        **_positive_integers(parsed, "timeout_ms"),
        **{name: parsed[name] for name in ("user", "working_directory") if isinstance(parsed.get(name), str)},
    }
    return {"action": action}


def _check_exec(value: Any, path: str) -> dict[str, Any]:
    action = checks.mapping(value, path)
    checks.required(action, "command", path, checks.strings)
    checks.one_of(action.get("type", "exec"), f"{path}.type", {"exec"})
    if "env" in action:
        action["env"] = checks.mapping(action["env"], f"{path}.env")
    return action


def _check_local_shell_output(value: Item, path: str) -> Item:
    """Check an output. In the reference its id is that of the call; some clients send a ``call_id``."""
    if "call_id" not in value:
        value["call_id"] = checks.required(value, "id", path, checks.string)
    check_call_id(value["call_id"], f"{path}.call_id")
    checks.required(value, "output", path, checks.string)
    return value


LOCAL_SHELL = ToolKind(
    types=("local_shell",),
    items=(
        ItemKind(
            type="local_shell_call",
            prefix="lsh",
            check=partial(check_call, action=_check_exec),
            role="call",
            arguments=_action_arguments,
            function="local_shell",
        ),
        ItemKind("local_shell_call_output", "lsho", _check_local_shell_output, "output", output=lambda item: item["output"]),
    ),
    check=refuse_unsupported,
    offer=_offer_local_shell,
)

# -- shell: several commands ---------------------------------------------------------------------------------------------


def _check_shell(tool: Tool, path: str) -> Tool:
    refuse_unsupported(tool, path)
    environment = checks.mapping(tool.get("environment", {"type": "local"}), f"{path}.environment")
    kind = checks.required(environment, "type", f"{path}.environment", checks.string)
    if kind in ("container_auto", "container_reference"):
        why = "there are no containers for shells here; 'local' gives the commands to the client."
        checks.unsupported(f"{path}.environment.type", why)
    checks.one_of(kind, f"{path}.environment.type", {"local"})
    if environment.get("skills"):
        checks.unsupported(f"{path}.environment.skills", "it is not served yet.")
    return tool


def _offer_shell(_tool: Tool, _namespace: str | None) -> Offered:
    form = CallForm(item="shell_call", prefix="sh", made=_make_shell)
    members = {
        "commands": {"type": "array", "items": {"type": "string"}, "description": "Shell commands, run in this order."},
        "timeout_ms": {"type": "integer", "description": "Milliseconds after which they are ended."},
        "max_output_length": {"type": "integer", "description": "How many characters of output to keep."},
    }
    return Offered(as_function("shell", "Runs shell commands on the user's machine.", members, "commands"), form)


def _make_shell(arguments: str) -> dict[str, Any]:
    parsed = parse_shallow(arguments) or {}
    commands = parsed.get("commands", parsed.get("command"))
    listed = _texts([commands] if isinstance(commands, str) else commands)
    if not listed:
        listed = [f"false # malformed arguments: {as_text([arguments])[1:-1]}"]  # a comment on one line
    return {"action": {"commands": listed, **_positive_integers(parsed, "timeout_ms", "max_output_length")}}


def _check_commands(value: Any, path: str) -> dict[str, Any]:
    action = checks.mapping(value, path)
    checks.required(action, "commands", path, checks.strings)
    return action


def _check_shell_output(value: Item, path: str) -> Item:
    checks.required(value, "call_id", path, check_call_id)
    listed = checks.required(value, "output", path, checks.array)
    return {**value, "output": [_check_command_output(one, f"{path}.output[{index}]") for index, one in enumerate(listed)]}


def _check_command_output(value: Any, path: str) -> dict[str, Any]:
    checked = checks.mapping(value, path)
    for name in ("stdout", "stderr"):
        checks.required(checked, name, path, checks.string)
    outcome = checks.required(checked, "outcome", path, checks.mapping)
    where = f"{path}.outcome"
    if checks.required(outcome, "type", where, partial(checks.one_of, supported={"exit", "timeout"})) == "exit":
        checks.required(outcome, "exit_code", where, checks.integer)
    return checked


def _shell_output(item: Item) -> str:
    return "\n\n".join(_command_output(one) for one in item["output"])


def _command_output(one: Mapping[str, Any]) -> str:
    outcome = one["outcome"]
    end = "Timed out." if outcome["type"] == "timeout" else f"Exit code: {outcome['exit_code']}"
    stderr = f"stderr:\n{one['stderr']}" if one["stderr"] else ""
    return "\n".join(text.rstrip("\n") for text in (one["stdout"], stderr, end) if text)


SHELL = ToolKind(
    types=("shell",),
    items=(
        ItemKind(
            type="shell_call",
            prefix="sh",
            check=partial(check_call, action=_check_commands),
            role="call",
            arguments=_action_arguments,
            function="shell",
        ),
        ItemKind("shell_call_output", "sho", _check_shell_output, "output", output=_shell_output),
    ),
    check=_check_shell,
    offer=_offer_shell,
)

# -- apply_patch: one change of a file -----------------------------------------------------------------------------------

_OPERATIONS = ("create_file", "update_file", "delete_file")
_DIFF = (
    "Not for delete_file. For create_file: all lines of the file, each with a '+' before it. For update_file: hunks without "
    "line numbers. Each begins with a line '@@', or '@@ ' and the line that the section begins with; then come the lines, with "
    "a ' ' before those that stay (about three before and after a change), a '-' before those that go, a '+' before new ones."
)


def _offer_apply_patch(_tool: Tool, _namespace: str | None) -> Offered:
    form = CallForm(item="apply_patch_call", prefix="apc", made=_make_patch)
    members = {
        "type": {"type": "string", "enum": list(_OPERATIONS)},
        "path": {"type": "string", "description": "Path of the file, from the root of the workspace."},
        "diff": {"type": "string", "description": _DIFF},
    }
    return Offered(as_function("apply_patch", "Creates, changes or deletes a file.", members, "type", "path"), form)


def _make_patch(arguments: str) -> dict[str, Any]:
    parsed = parse_shallow(arguments) or {}
    nested = parsed.get("operation")
    operation: dict[str, Any] = nested if isinstance(nested, dict) else parsed
    kind, path, diff = (operation.get(name) for name in ("type", "path", "diff"))
    if not isinstance(path, str) or not isinstance(kind, str) or kind not in _OPERATIONS:
        return {"operation": {"type": "update_file", "path": "", "diff": arguments}}  # no such file exists
    text = {} if kind == "delete_file" else {"diff": as_text(diff or "")}
    return {"operation": {"type": kind, "path": path, **text}}


def _check_operation(value: Any, path: str) -> dict[str, Any]:
    operation = checks.mapping(value, path)
    kind = checks.required(operation, "type", path, partial(checks.one_of, supported=_OPERATIONS))
    checks.required(operation, "path", path, checks.string)
    if kind != "delete_file":
        checks.required(operation, "diff", path, checks.string)
    return operation


def _check_patch_output(value: Item, path: str) -> Item:
    checks.required(value, "call_id", path, check_call_id)
    checks.required(value, "status", path, checks.string)
    checks.optional(value, path, output=checks.string)
    return value


def _patch_output(item: Item) -> str:
    said = "The patch could not be applied." if item["status"] == "failed" else "The patch was applied."
    return f"{said}\n{item['output']}" if item.get("output") else said


APPLY_PATCH = ToolKind(
    types=("apply_patch",),
    items=(
        ItemKind(
            type="apply_patch_call",
            prefix="apc",
            check=partial(check_call, operation=_check_operation),
            role="call",
            arguments=lambda item: as_text(item["operation"]),
            function="apply_patch",
        ),
        ItemKind(
            type="apply_patch_call_output",
            prefix="apco",
            check=_check_patch_output,
            role="output",
            output=_patch_output,
            statuses=frozenset({"completed", "failed"}),
        ),
    ),
    check=refuse_unsupported,
    offer=_offer_apply_patch,
)
