"""Tools that the client executes.

``function``, ``custom`` and ``tool_search`` are the client's own; ``local_shell``, ``shell`` and ``apply_patch`` act on the
user's machine. Whatever the model writes becomes a well-formed item, and malformed arguments are kept where nothing executes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..chat.patterns import as_pattern
from ..parts import INPUT_PARTS
from ..request import checks
from ..request.checks import Check, among, by_type, chain, fields, open_object
from ..types import Item, Tool
from .form import (
    NAME,
    CallForm,
    ItemKind,
    OfferedFunction,
    ToolKind,
    arguments_as_written,
    as_function,
    as_text,
    check_call_id,
    flat_name,
    function_form,
    paragraphs,
    parse_shallow,
    refuse_unsupported,
)

_name = partial(checks.string, pattern=NAME)


def _client_search(value: Any, path: str) -> str:
    """Check who executes a tool search."""
    if checks.one_of(value, path, {"server", "client"}) == "server":
        checks.unsupported(path, "tools are searched by the client only; set it to 'client'.")
    return "client"


def _call(
    kind: str, prefix: str, written: Callable[[Item], str], function: str | None = None, /, **required: Check
) -> ItemKind:
    """A call with a ``call_id``, these ``required`` members and an optional ``namespace``. ``written`` makes its arguments."""
    check = fields({"call_id": check_call_id, **required}, namespace=checks.string)
    return ItemKind(kind, prefix, check, "call", written, function=function)


def _text_or_parts(value: Any, path: str) -> Any:
    return value if isinstance(checks.string_or_array(value, path), str) else INPUT_PARTS(value, path)


def _output_kind(kind: str, prefix: str) -> ItemKind:
    check = fields({"call_id": check_call_id, "output": _text_or_parts})
    return ItemKind(kind, prefix, check, "output", output=lambda item: item["output"])


def _with_namespace(name: str, namespace: str | None) -> dict[str, str]:
    return {"name": name} if namespace is None else {"name": name, "namespace": namespace}


# -- function ----------------------------------------------------------------------------------------------------------


def _offer_function(tool: Tool, namespace: str | None) -> OfferedFunction:
    form = function_form(**_with_namespace(tool["name"], namespace))
    return OfferedFunction({**tool, "name": flat_name(namespace, tool["name"])}, form)


FUNCTION = ToolKind(
    types=("function",),
    items=(
        _call("function_call", "fc", arguments_as_written, name=checks.string, arguments=checks.string),
        _output_kind("function_call_output", "fco"),
    ),
    check=chain(
        fields(
            {"name": _name},
            parameters=checks.json_object,
            description=checks.string,
            strict=checks.boolean,
            defer_loading=checks.boolean,
        ),
        refuse_unsupported,
    ),
    offer=_offer_function,
    chosen_by=("name", "namespace"),
)

# -- custom: a function with one string, whose text the client sees as it grows ------------------------------------------

_grammar = fields({"syntax": among("lark", "regex"), "definition": checks.string})


def _offer_custom(tool: Tool, namespace: str | None) -> OfferedFunction:
    form = CallForm(
        item="custom_tool_call",
        prefix="ctc",
        members=_with_namespace(tool["name"], namespace),
        text="input",
        events="custom_tool_call_input",
        done=("input",),
        argument="input",
    )
    wanted = tool.get("format", {})
    description = paragraphs(tool.get("description"), _describe_format(wanted))
    pattern = as_pattern(wanted["definition"]) if wanted.get("syntax") == "regex" else None
    constraint = {} if pattern is None else {"pattern": pattern}
    member = {"type": "string", "description": "The whole input, as it is.", **constraint}
    function = as_function(flat_name(namespace, tool["name"]), description, {"input": member}, "input")
    return OfferedFunction({**function, "strict": True} if constraint else function, form)


def _describe_format(wanted: dict[str, Any]) -> str:
    if wanted.get("type") != "grammar":
        return "The input is free text, given as the string 'input'."
    kind = {"lark": "Lark grammar", "regex": "regular expression"}[wanted["syntax"]]
    return f"The input, given as the string 'input', must match this {kind}:\n{wanted['definition']}"


CUSTOM = ToolKind(
    types=("custom",),
    items=(
        _call(
            "custom_tool_call",
            "ctc",
            lambda item: as_text({"input": item["input"]}),
            name=checks.string,
            input=checks.string,
        ),
        _output_kind("custom_tool_call_output", "ctco"),
    ),
    check=chain(
        fields(
            {"name": _name},
            description=checks.string,
            defer_loading=checks.boolean,
            format=by_type({"text": checks.as_it_is, "grammar": _grammar}),
        ),
        refuse_unsupported,
    ),
    offer=_offer_custom,
    chosen_by=("name", "namespace"),
)

# -- tool_search: the client looks for deferred tools ----------------------------------------------------------------------

_SEARCH = "Searches for tools that are not offered yet. Those that it finds can be called afterwards."


def _offer_tool_search(tool: Tool, _namespace: str | None) -> OfferedFunction:
    form = CallForm(item="tool_search_call", prefix="tsc", members={"execution": "client"}, made=_make_search)
    given: Tool = {name: tool[name] for name in ("description", "parameters") if name in tool}
    default = as_function("tool_search", _SEARCH, {"query": {"type": "string"}}, "query")
    return OfferedFunction({**default, **given}, form)


def _make_search(arguments: str) -> dict[str, Any]:
    parsed = parse_shallow(arguments or "{}")
    return {"arguments": {"malformed_arguments": arguments} if parsed is None else parsed}


_by_client = fields(execution=_client_search)
_search_call = _call(
    "tool_search_call", "tsc", lambda item: as_text(item["arguments"]), "tool_search", arguments=checks.json_object
)
_tool_search = fields(execution=_client_search, description=checks.string, parameters=checks.json_object)

TOOL_SEARCH = ToolKind(
    types=("tool_search",),
    items=(
        replace(_search_call, check=chain(_by_client, _search_call.check)),
        # ``request.items`` checks its ``tools``; ``request.tools`` makes its output.
        ItemKind(
            "tool_search_output",
            "tso",
            chain(_by_client, fields({"call_id": check_call_id}, namespace=checks.string)),
            "output",
        ),
    ),
    check=lambda tool, path: _tool_search({"execution": "server", **tool}, path),
    offer=_offer_tool_search,
)

# -- arguments and items of tools for the user's machine -------------------------------------------------------------------


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


def _offer_local_shell(_tool: Tool, _namespace: str | None) -> OfferedFunction:
    form = CallForm(item="local_shell_call", prefix="lsh", made=_make_local_shell)
    text = {"type": "string"}
    members = {
        "command": {"type": "array", "items": text, "description": 'The program and its arguments, as ["bash", "-lc", "ls"].'},
        "working_directory": {**text, "description": "Where to run it."},
        "timeout_ms": {"type": "integer", "description": "Milliseconds after which it is ended."},
        "env": {"type": "object", "additionalProperties": text, "description": "Environment variables to set."},
    }
    return OfferedFunction(as_function("local_shell", "Runs a command on the user's machine.", members, "command"), form)


def _make_local_shell(arguments: str) -> dict[str, Any]:
    parsed = parse_shallow(arguments) or {}
    command, env = parsed.get("command"), parsed.get("env")
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    action = {
        "type": "exec",
        "command": _texts(command) or [arguments],  # not a program: the client reports the error to the model
        "env": {name: as_text(value) for name, value in env.items()} if isinstance(env, dict) else {},
        **_positive_integers(parsed, "timeout_ms"),
        **{name: parsed[name] for name in ("user", "working_directory") if isinstance(parsed.get(name), str)},
    }
    return {"action": action}


def _call_id_from_id(value: Item, path: str) -> Item:
    """Add a missing ``call_id``. In the reference, an output has the id of its call; some clients send a ``call_id``."""
    return value if "call_id" in value else {**value, "call_id": checks.required(value, "id", path, checks.string)}


LOCAL_SHELL = ToolKind(
    types=("local_shell",),
    items=(
        _call(
            "local_shell_call",
            "lsh",
            _action_arguments,
            "local_shell",
            action=open_object({"command": checks.strings}, type=among("exec"), env=checks.mapping),
        ),
        ItemKind(
            type="local_shell_call_output",
            prefix="lsho",
            check=chain(_call_id_from_id, fields({"call_id": check_call_id, "output": checks.string})),
            role="output",
            output=lambda item: item["output"],
        ),
    ),
    check=refuse_unsupported,
    offer=_offer_local_shell,
)

# -- shell: several commands ---------------------------------------------------------------------------------------------


def _environment(value: Any, path: str) -> dict[str, Any]:
    environment = checks.mapping(value, path)
    kind = checks.required(environment, "type", path, checks.string)
    if kind in ("container_auto", "container_reference"):
        checks.unsupported(f"{path}.type", "there are no containers for shells here; 'local' gives the commands to the client.")
    checks.one_of(kind, f"{path}.type", {"local"})
    if environment.get("skills"):
        checks.unsupported(f"{path}.skills", "it is not served yet.")
    return environment


def _offer_shell(_tool: Tool, _namespace: str | None) -> OfferedFunction:
    form = CallForm(item="shell_call", prefix="sh", made=_make_shell)
    members = {
        "commands": {"type": "array", "items": {"type": "string"}, "description": "Shell commands, run in this order."},
        "timeout_ms": {"type": "integer", "description": "Milliseconds after which they are ended."},
        "max_output_length": {"type": "integer", "description": "How many characters of output to keep."},
    }
    return OfferedFunction(as_function("shell", "Runs shell commands on the user's machine.", members, "commands"), form)


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


SHELL = ToolKind(
    types=("shell",),
    items=(
        _call("shell_call", "sh", _action_arguments, "shell", action=open_object({"commands": checks.strings})),
        ItemKind(
            type="shell_call_output",
            prefix="sho",
            check=fields({"call_id": check_call_id, "output": _command_outputs}),
            role="output",
            output=lambda item: "\n\n".join(map(_command_output, item["output"])),
        ),
    ),
    check=chain(refuse_unsupported, fields(environment=_environment)),
    offer=_offer_shell,
)

# -- apply_patch: one change of a file -----------------------------------------------------------------------------------

_OPERATIONS = ("create_file", "update_file", "delete_file")
_DIFF = (
    "Not for delete_file. For create_file: all lines of the file, each with a '+' before it. For update_file: hunks without "
    "line numbers. Each begins with a line '@@', or '@@ ' and the line that the section begins with; then come the lines, with "
    "a ' ' before those that stay (about three before and after a change), a '-' before those that go, a '+' before new ones."
)


def _offer_apply_patch(_tool: Tool, _namespace: str | None) -> OfferedFunction:
    form = CallForm(item="apply_patch_call", prefix="apc", made=_make_patch)
    members = {
        "type": {"type": "string", "enum": list(_OPERATIONS)},
        "path": {"type": "string", "description": "Path of the file, from the root of the workspace."},
        "diff": {"type": "string", "description": _DIFF},
    }
    return OfferedFunction(as_function("apply_patch", "Creates, changes or deletes a file.", members, "type", "path"), form)


def _make_patch(arguments: str) -> dict[str, Any]:
    parsed = parse_shallow(arguments) or {}
    nested = parsed.get("operation")
    operation: dict[str, Any] = nested if isinstance(nested, dict) else parsed
    kind, path, diff = (operation.get(name) for name in ("type", "path", "diff"))
    if not isinstance(path, str) or not isinstance(kind, str) or kind not in _OPERATIONS:
        return {"operation": {"type": "update_file", "path": "", "diff": arguments}}  # not a file: the client reports it
    text = {} if kind == "delete_file" else {"diff": as_text(diff or "")}
    return {"operation": {"type": kind, "path": path, **text}}


_written = fields({"path": checks.string, "diff": checks.string})
_operation = by_type(
    {"create_file": _written, "update_file": _written, "delete_file": fields({"path": checks.string})},
)


def _patch_output(item: Item) -> str:
    said = "The patch could not be applied." if item["status"] == "failed" else "The patch was applied."
    return f"{said}\n{item['output']}" if item.get("output") else said


APPLY_PATCH = ToolKind(
    types=("apply_patch",),
    items=(
        _call("apply_patch_call", "apc", lambda item: as_text(item["operation"]), "apply_patch", operation=_operation),
        ItemKind(
            type="apply_patch_call_output",
            prefix="apco",
            check=fields({"call_id": check_call_id, "status": checks.string}, output=checks.string),
            role="output",
            output=_patch_output,
            statuses=frozenset({"completed", "failed"}),
        ),
    ),
    check=refuse_unsupported,
    offer=_offer_apply_patch,
)
