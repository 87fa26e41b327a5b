"""List all kinds of tools, by the types of their definitions (`TOOL_KINDS`) and of their items (`TOOL_ITEMS`).

The client executes `local_shell`, `shell` and `apply_patch` on the user's machine. `responses_mw.tools` checks the definitions
of server-side tools, because the allowed values depend on the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .. import checks
from ..checks import among, by_type, chain, fields, open_object
from ..search_results import file_output, web_output
from ..types import Item, Part, Tool
from .client_defined import CUSTOM, FUNCTION, TOOL_SEARCH
from .form import (
    USUAL_STATUSES,
    CallForm,
    ItemKind,
    OfferedFunction,
    Role,
    ToolKind,
    as_function,
    as_text,
    call_kind,
    check_call_id,
    output_kind,
    paragraphs,
    parse_shallow,
    refuse_unsupported,
)

_STRINGS = {"type": "array", "items": {"type": "string"}}


def _offer(
    name: str, description: str, made: Callable[[str], dict[str, Any]], required: tuple[str, ...], /, **properties: Any
) -> Callable[[Tool, str | None], OfferedFunction]:
    """Return a `ToolKind.offer` that always offers one function. `made` builds members of a call's item from the arguments."""
    function = OfferedFunction(as_function(name, description, properties, *required), CallForm(f"{name}_call", made=made))
    return lambda _tool, _namespace: function


def _texts(value: Any) -> list[str]:
    return [as_text(one) for one in value] if isinstance(value, list) else []


def _positive_integers(parsed: Mapping[str, Any], *names: str) -> dict[str, int]:
    return {name: parsed[name] for name in names if type(parsed.get(name)) is int and parsed[name] > 0}


def _action_arguments(item: Item) -> str:
    action = {name: value for name, value in item.get("action", {}).items() if value is not None}
    action.pop("type", None)
    if not action.get("env", True):
        del action["env"]
    return as_text(action)


# -- local_shell: one command --------------------------------------------------------------------------------------------


def _make_local_shell(arguments: str) -> dict[str, Any]:
    parsed = parse_shallow(arguments) or {}
    command, env = parsed.get("command"), parsed.get("env")
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    action = {
        "type": "exec",
        "command": _texts(command) or [arguments],  # not a program, so the client reports an error
        "env": {name: as_text(value) for name, value in env.items()} if isinstance(env, dict) else {},
        **_positive_integers(parsed, "timeout_ms"),
        **{name: parsed[name] for name in ("user", "working_directory") if isinstance(parsed.get(name), str)},
    }
    return {"action": action}


def _call_id_from_id(value: Item, path: str) -> Item:
    # In the OpenAI reference, an output's `id` is the id of its call. Some clients send a `call_id` instead.
    return value if "call_id" in value else {**value, "call_id": checks.required(value, "id", path, checks.string)}


LOCAL_SHELL = ToolKind(
    types=("local_shell",),
    items={
        "local_shell_call": call_kind(
            "lsh",
            "local_shell",
            _action_arguments,
            action=open_object({"command": checks.strings}, type=among("exec"), env=checks.mapping),
        ),
        "local_shell_call_output": ItemKind(
            prefix="lsho",
            check=chain(_call_id_from_id, fields({"call_id": check_call_id, "output": checks.string})),
            role=Role.OUTPUT,
        ),
    },
    check=refuse_unsupported,
    offer=_offer(
        "local_shell",
        "Run a command on the user's machine.",
        _make_local_shell,
        ("command",),
        command={**_STRINGS, "description": 'The program and its arguments, for example ["bash", "-lc", "ls"].'},
        working_directory={"type": "string", "description": "Directory in which to run the command."},
        timeout_ms={"type": "integer", "description": "Timeout of the command in milliseconds."},
        env={"type": "object", "additionalProperties": {"type": "string"}, "description": "Environment variables to set."},
    ),
)

# -- shell: several commands ---------------------------------------------------------------------------------------------


def _environment(value: Any, path: str) -> dict[str, Any]:
    environment = checks.mapping(value, path)
    kind = checks.required(environment, "type", path, checks.string)
    if kind in ("container_auto", "container_reference"):
        checks.unsupported(f"{path}.type", "there are no containers for shells here; 'local' gives the commands to the client.")
    checks.one_of(kind, f"{path}.type", {"local"})
    return _local(environment, path)


_local = fields(skills=checks.each(open_object({"name": checks.string, "description": checks.string, "path": checks.string})))


def _offer_shell(tool: Tool, namespace: str | None) -> OfferedFunction:
    """Return the function for a shell. Its description lists the skills on the user's machine."""
    shell = _shell(tool, namespace)
    skills = tool.get("environment", {}).get("skills", ())
    listed = "\n".join(f"- {skill['name']}: {skill['description']} ({skill['path']})" for skill in skills)
    if not listed:
        return shell
    about = f"Skills are folders with instructions. If a skill fits the task, read its file SKILL.md first. Skills:\n{listed}"
    return replace(shell, function={**shell.function, "description": paragraphs(shell.function["description"], about)})


def _make_shell(arguments: str) -> dict[str, Any]:
    parsed = parse_shallow(arguments) or {}
    commands = parsed.get("commands", parsed.get("command"))
    listed = _texts([commands] if isinstance(commands, str) else commands)
    if not listed:
        listed = [f"false # malformed arguments: {as_text([arguments])[1:-1]}"]  # as JSON, they fit in a comment on one line
    return {"action": {"commands": listed, **_positive_integers(parsed, "timeout_ms", "max_output_length")}}


_outcome = by_type({"exit": fields({"exit_code": checks.integer}), "timeout": checks.as_it_is})
_command_outputs = checks.each(open_object({"stdout": checks.string, "stderr": checks.string, "outcome": _outcome}))


def _command_output(one: Mapping[str, Any]) -> str:
    outcome = one["outcome"]
    end = "Timed out." if outcome["type"] == "timeout" else f"Exit code: {outcome['exit_code']}"
    stderr = f"stderr:\n{one['stderr']}" if one["stderr"] else ""
    return "\n".join(text.rstrip("\n") for text in (one["stdout"], stderr, end) if text)


_shell = _offer(
    "shell",
    "Run shell commands on the user's machine.",
    _make_shell,
    ("commands",),
    commands={**_STRINGS, "description": "Shell commands to run, in order."},
    timeout_ms={"type": "integer", "description": "Timeout of each command in milliseconds."},
    max_output_length={"type": "integer", "description": "Maximum number of characters of output to return."},
)

SHELL = ToolKind(
    types=("shell",),
    items={
        "shell_call": call_kind("sh", "shell", _action_arguments, action=open_object({"commands": checks.strings})),
        "shell_call_output": output_kind(
            "sho", _command_outputs, lambda item: "\n\n".join(map(_command_output, item["output"]))
        ),
    },
    check=chain(refuse_unsupported, fields(environment=_environment)),
    offer=_offer_shell,
)

# -- apply_patch: one change of a file -----------------------------------------------------------------------------------

_OPERATIONS = ("create_file", "update_file", "delete_file")
_DIFF = """\
The change. Omit it for delete_file.
For create_file, write all lines of the file, each with a '+' in front.
For update_file, write one or more hunks, without line numbers. Start a hunk with the line '@@', or with '@@ ' and the line \
that begins the surrounding class or function. Then write the lines of the hunk, each with one character in front: ' ' if the \
line is unchanged, '-' if it is removed, '+' if it is added. Include about three unchanged lines before and after each change.
Example of an update:
@@ def greet():
     name = "Ada"
-    print("Hi")
+    print(f"Hello, {name}")
     return name"""


def _make_patch(arguments: str) -> dict[str, Any]:
    parsed = parse_shallow(arguments) or {}
    nested = parsed.get("operation")
    operation: dict[str, Any] = nested if isinstance(nested, dict) else parsed
    kind, path, diff = (operation.get(name) for name in ("type", "path", "diff"))
    if not isinstance(path, str) or not isinstance(kind, str) or kind not in _OPERATIONS:
        return {"operation": {"type": "update_file", "path": "", "diff": arguments}}  # not a file, so the client reports it
    text = {} if kind == "delete_file" else {"diff": as_text(diff or "")}
    return {"operation": {"type": kind, "path": path, **text}}


_written = fields({"path": checks.string, "diff": checks.string})
_operation = by_type({"create_file": _written, "update_file": _written, "delete_file": fields({"path": checks.string})})


def _patch_output(item: Item) -> str:
    said = "The patch could not be applied." if item["status"] == "failed" else "The patch was applied."
    return f"{said}\n{item['output']}" if item.get("output") else said


APPLY_PATCH = ToolKind(
    types=("apply_patch",),
    items={
        "apply_patch_call": call_kind(
            "apc", "apply_patch", lambda one: as_text(one.get("operation", {})), operation=_operation
        ),
        "apply_patch_call_output": ItemKind(
            prefix="apco",
            check=fields({"call_id": check_call_id, "status": checks.string}, output=checks.string),
            role=Role.OUTPUT,
            output=_patch_output,
            statuses=frozenset({"completed", "failed"}),
        ),
    },
    check=refuse_unsupported,
    offer=_offer(
        "apply_patch",
        "Create, update or delete a file on the user's machine.",
        _make_patch,
        ("type", "path"),
        type={"type": "string", "enum": list(_OPERATIONS)},
        path={"type": "string", "description": "Path of the file, relative to the root of the workspace."},
        diff={"type": "string", "description": _DIFF},
    ),
)

# -- mcp ---------------------------------------------------------------------------------------------------------------

_listed_tool = open_object(
    {"name": checks.string, "input_schema": checks.json_object}, description=checks.string, annotations=checks.json_object
)
_requested = {"id": checks.string, "server_label": checks.string, "name": checks.string, "arguments": checks.string}


def _error(value: Any, path: str) -> Any:
    if not isinstance(value, str | dict):
        checks.wrong_type(path, "an object", value)
    return value


def _mcp_output(item: Item) -> str:
    output, error = item.get("output"), item.get("error")
    if output is not None or not isinstance(error, dict):
        return str(error or "") if output is None else str(output)
    content = error.get("message") or error.get("content") or ""  # a message, or the content of the tool's result
    blocks = content if isinstance(content, list) else [content]
    return "\n".join(as_text(block.get("text", block) if isinstance(block, dict) else block) for block in blocks)


MCP = ToolKind(
    types=("mcp",),
    items={
        "mcp_list_tools": ItemKind("mcpl", fields({"server_label": checks.string, "tools": checks.each(_listed_tool)})),
        "mcp_approval_request": ItemKind("mcpr", fields(_requested), Role.APPROVAL_REQUEST),
        "mcp_approval_response": ItemKind(
            "mcpa", fields({"approval_request_id": checks.string, "approve": checks.boolean}, reason=checks.string)
        ),
        "mcp_call": ItemKind(
            prefix="mcp",
            check=fields(_requested, output=checks.string, approval_request_id=checks.string, error=_error),
            role=Role.SERVED_CALL,
            output=_mcp_output,
            statuses=USUAL_STATUSES | {"calling", "failed"},
        ),
    },
    chosen_by=("server_label", "name"),
)

# -- code_interpreter --------------------------------------------------------------------------------------------------

_code_outputs = checks.each(by_type({"logs": fields({"logs": checks.string}), "image": fields({"url": checks.string})}))


def _code_output(item: Item) -> str:
    outputs = [one for one in item.get("outputs") or () if isinstance(one, dict)]
    return "\n".join(str(one.get("logs") or f"({one.get('type')})") for one in outputs) or "(no output)"


CODE_INTERPRETER = ToolKind(
    types=("code_interpreter",),
    items={
        "code_interpreter_call": ItemKind(
            prefix="ci",
            check=fields({"id": checks.string}, code=checks.string, container_id=checks.string, outputs=_code_outputs),
            role=Role.SERVED_CALL,
            arguments=lambda item: as_text({"code": item.get("code") or ""}),
            output=_code_output,
            function="python",
            statuses=USUAL_STATUSES | {"interpreting", "failed"},
        ),
    },
)

# -- web_search --------------------------------------------------------------------------------------------------------

_search_action = open_object(queries=checks.strings, sources=checks.array, type=checks.string, query=checks.string)


def _search_arguments(item: Item) -> str:
    action = dict(item.get("action") or {})
    queries = action.get("queries") or [""]
    kind = action.pop("type", "search")
    return as_text({"query": action.get("query") or queries[0]} if kind == "search" else action)


WEB_SEARCH = ToolKind(
    types=("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    items={
        "web_search_call": ItemKind(
            prefix="ws",
            check=fields({"id": checks.string}, action=_search_action, results=checks.array),
            role=Role.SERVED_CALL,
            arguments=_search_arguments,
            output=web_output,
            function="web_search",
            statuses=USUAL_STATUSES | {"searching", "failed"},
        ),
    },
)

# -- file_search -------------------------------------------------------------------------------------------------------


def _file_arguments(item: Item) -> str:
    return as_text({"queries": item.get("queries") or []})


FILE_SEARCH = ToolKind(
    types=("file_search",),
    items={
        "file_search_call": ItemKind(
            prefix="fs",
            check=fields({"id": checks.string, "queries": checks.strings}, results=checks.array, error=checks.string),
            role=Role.SERVED_CALL,
            arguments=_file_arguments,
            output=file_output,
            function="file_search",
            statuses=USUAL_STATUSES | {"searching", "failed"},
        ),
    },
)

# -- tools of OpenAI's platform -----------------------------------------------------------------------------------------
# Nobody executes them here. The settings decide whether they are omitted or refused.

UNSERVED = ToolKind(
    types=(
        *("computer", "computer_use", "computer_use_preview", "container", "image_generation"),
        "programmatic_tool_calling",
    ),
    items={},
)

# -- all kinds ---------------------------------------------------------------------------------------------------------

_KINDS = (
    *(FUNCTION, CUSTOM, TOOL_SEARCH, LOCAL_SHELL, SHELL, APPLY_PATCH),
    *(MCP, CODE_INTERPRETER, WEB_SEARCH, FILE_SEARCH, UNSERVED),
)

TOOL_KINDS: dict[str, ToolKind] = {type_: kind for kind in _KINDS for type_ in kind.types}
TOOL_ITEMS: dict[str, ItemKind] = {type_: item for kind in _KINDS for type_, item in kind.items.items()}
SERVED_TOOLS = frozenset(type_ for type_, kind in TOOL_KINDS.items() if kind.offer is None)
"""Types of the tools that the client does not execute."""


def arguments_of(item: Item) -> str:
    """Return the arguments of a call, as the model would write them."""
    return TOOL_ITEMS[item["type"]].arguments(item)


def output_of(item: Item) -> str | list[Part]:
    """Return a tool's output as the model sees it. `item` is an output item, or a call item that includes the output."""
    return TOOL_ITEMS[item["type"]].output(item)


def is_finished(item: Item) -> bool:
    """Return whether the server executed the call. It did not if the call was cut off, or if the run ended first."""
    return item.get("status", "completed") in ("completed", "failed")
