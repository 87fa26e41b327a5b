"""The tools that the client carries out: to the chat model each is a function; its calls are given back in their own form.

1. A function's name follows from the tool alone (``flat_name``), so that calls of earlier turns keep theirs: ``history_name``.
   Where two tools would have one name, that of an MCP server is called ``<label>__<name>``, and else the later one gets a
   number; ``namer`` finds it again.
2. Tools that stand in ``additional_tools`` and ``tool_search_output`` items may be called too. The last definition of a tool
   counts, at the place of its first: the upstream's prefix cache lives on an order that does not change.
3. A deferred tool is not offered until a ``tool_search_output`` brings it.
4. What the model writes gives a well-formed item, whatever it is; and nothing that is not understood is to be carried out.

To accept another type of tool, add a function and a line to ``_FLAT``; checks are in ``tools``.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from ..types import Item, Tool
from . import call_items as callitems
from .forms import CallForm, Offered, function
from .patterns import as_pattern

LONGEST_NAME = 64
"""Of a function, in Chat Completions."""

_OTHERS = re.compile(r"[^a-zA-Z0-9_-]")
_HASH_LENGTH = 8
_NUMBER_LENGTH = 8
"""Of the longest suffix that tells names apart."""


def offered(tools: Sequence[Tool], items: Sequence[Item]) -> list[Offered]:
    """The functions that the client's ``tools`` come to, and those that the ``items`` bring; each name once. Types of tools
    that are carried out here are passed over. ``tools`` and ``items`` have been checked."""
    found: dict[tuple[Any, ...], Offered] = {}
    for one in _flattened(tools, deferred=False):
        found[_key(one.form)] = one
    for item in items:
        if item["type"] in BRINGS_TOOLS:
            for one in _flattened(item["tools"], deferred=item["type"] == "tool_search_output"):
                found[_key(one.form)] = one
    return distinct(found.values())


BRINGS_TOOLS = frozenset({"additional_tools", "tool_search_output"})


def found(tools: Sequence[Tool], names: Callable[[Item], str]) -> str:
    """What the model reads of a search for tools: the ``names`` under which it can call them, and what they are for."""
    lines = []
    for one in _flattened(tools, deferred=True):
        name = names({"type": one.form.item, **one.form.members})
        about = str(one.function.get("description") or "").partition("\n")[0]
        lines.append(f"- {name}: {about}" if about else f"- {name}")
    return "\n".join([_FOUND, *lines]) if lines else _FOUND_NONE


_FOUND = "These tools were found and can be called now:"
_FOUND_NONE = "No tools were found."


def _key(form: CallForm) -> tuple[Any, ...]:
    """What makes a tool the same in another definition."""
    return form.item, form.members.get("namespace"), form.members.get("name")


def _flattened(tools: Iterable[Tool], *, deferred: bool) -> Iterator[Offered]:
    """``deferred``: those that are to be found by a search, too."""
    for tool in tools:
        if tool["type"] == "namespace":
            yield from _of_namespace(tool, deferred=deferred)
        elif tool["type"] in _FLAT and (deferred or not tool.get("defer_loading")):
            yield _FLAT[tool["type"]](tool, None)


def _of_namespace(namespace: Tool, *, deferred: bool) -> Iterator[Offered]:
    """Its functions; the first of them tells what the namespace is, once for all."""
    name, about = namespace["name"], namespace.get("description")
    told = f"About all tools whose names begin with {name}__: {about}" if about else None
    for tool in namespace["tools"]:
        if deferred or not tool.get("defer_loading"):
            described = {**tool, "description": _paragraphs(tool.get("description"), told)} if told else tool
            yield _FLAT[tool["type"]](described, name)
            told = None


# -- names -------------------------------------------------------------------------------------------------------------


def flat_name(namespace: str | None, name: str) -> str:
    """The function's name for a tool, of at most 64 letters, digits, ``_`` and ``-``: ``<namespace>__<name>``. Other characters
    become ``_``; what is too long is cut, and told apart by a hash."""
    whole = name if namespace is None else f"{namespace}__{name}"
    flat = _OTHERS.sub("_", whole) or "_"
    if len(flat) <= LONGEST_NAME:
        return flat
    digest = hashlib.sha256(f"{namespace or ''}\0{name}".encode()).hexdigest()[:_HASH_LENGTH]
    return f"{flat[: LONGEST_NAME - _HASH_LENGTH - 1]}_{digest}"


def distinct(functions: Iterable[Offered]) -> list[Offered]:
    """The same functions, each under a name of its own that the chat form can have. Of those with one name, an MCP server's are
    called ``<label>__<name>``, so that the model can tell them apart; of those that are left, the first keeps the name, the
    others are numbered."""
    listed = [_renamed(one, flat_name(None, one.name)) for one in functions]
    held = Counter(one.name for one in listed)
    listed = [_labelled(one) if held[one.name] > 1 else one for one in listed]
    taken = {one.name for one in listed}
    seen: set[str] = set()
    numbers: dict[str, Iterator[int]] = {}
    result = []
    for one in listed:
        name = one.name
        if name in seen:
            # Each number is tried once, also by long names that begin alike: so the work does not grow with their square.
            number = numbers.setdefault(name[: LONGEST_NAME - _NUMBER_LENGTH], count(2))
            name = next(numbered for n in number if (numbered := _numbered(one.name, n)) not in taken)
        taken.add(name)
        seen.add(name)
        result.append(_renamed(one, name))
    return result


def _labelled(one: Offered) -> Offered:
    label = one.form.members.get("server_label")
    return one if label is None else _renamed(one, flat_name(label, one.form.members["name"]))


def _renamed(one: Offered, name: str) -> Offered:
    return one if one.name == name else replace(one, function={**one.function, "name": name})


def _numbered(name: str, number: int) -> str:
    suffix = f"_{number}"
    return name[: LONGEST_NAME - len(suffix)] + suffix


def history_name(item: Item) -> str:
    """The name of the function that a call of an earlier turn called: the one that ``offered`` gives to the tool, if no other
    tool has it."""
    return _FIXED_NAMES.get(item["type"]) or flat_name(item.get("namespace"), item["name"])


def namer(functions: Sequence[Offered]) -> Callable[[Item], str]:
    """As ``history_name``, but a tool that is among ``functions`` has the name that it has there."""
    names = {_called(one.form.item, one.form.members): one.name for one in reversed(functions)}

    def name(item: Item) -> str:
        return names.get(_called(item["type"], item)) or history_name(item)

    return name


def _called(kind: str, members: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells which tool an item calls, or wants to call."""
    kind = "mcp_call" if kind == "mcp_approval_request" else kind
    return kind, *(members.get(name) for name in ("namespace", "name", "server_label"))


_FIXED_NAMES = {
    "apply_patch_call": "apply_patch",
    "code_interpreter_call": "python",
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "tool_search_call": "tool_search",
    "web_search_call": "web_search",
}


# -- one function for each type of tool --------------------------------------------------------------------------------


def _function(tool: Tool, namespace: str | None) -> Offered:
    form = function(tool["name"], **_within(namespace))
    return Offered({**tool, "name": flat_name(namespace, tool["name"])}, form)


def _within(namespace: str | None) -> dict[str, str]:
    return {} if namespace is None else {"namespace": namespace}


def _custom(tool: Tool, namespace: str | None) -> Offered:
    form = CallForm(
        item="custom_tool_call",
        prefix="ctc",
        members={"name": tool["name"], **_within(namespace)},
        text="input",
        events="custom_tool_call_input",
        done=("input",),
        argument="input",
    )
    wanted = tool.get("format", {})
    description = _paragraphs(tool.get("description"), _format(wanted))
    pattern = as_pattern(wanted["definition"]) if wanted.get("syntax") == "regex" else None
    constraint = {} if pattern is None else {"pattern": pattern}
    member = {"type": "string", "description": "The whole input, as it is.", **constraint}
    made = _as_function(flat_name(namespace, tool["name"]), description, {"input": member}, "input")
    return Offered({**made, "strict": True} if constraint else made, form)


def _format(wanted: dict[str, Any]) -> str:
    if wanted.get("type") != "grammar":
        return "The input is free text, given as the string 'input'."
    kind = {"lark": "Lark grammar", "regex": "regular expression"}[wanted["syntax"]]
    return f"The input, given as the string 'input', must match this {kind}:\n{wanted['definition']}"


def _tool_search(tool: Tool, _namespace: str | None) -> Offered:
    form = CallForm(item="tool_search_call", prefix="tsc", members={"execution": "client"}, made=callitems.tool_search)
    given: Tool = {name: tool[name] for name in ("description", "parameters") if name in tool}
    default = _as_function("tool_search", _SEARCH, {"query": {"type": "string"}}, "query")
    return Offered({**default, **given}, form)


def _local_shell(_tool: Tool, _namespace: str | None) -> Offered:
    form = CallForm(item="local_shell_call", prefix="lsh", made=callitems.local_shell)
    text = {"type": "string"}
    members = {
        "command": {"type": "array", "items": text, "description": 'The program and its arguments, as ["bash", "-lc", "ls"].'},
        "working_directory": {**text, "description": "Where to run it."},
        "timeout_ms": {"type": "integer", "description": "Milliseconds after which it is ended."},
        "env": {"type": "object", "additionalProperties": text, "description": "Environment variables to set."},
    }
    return Offered(_as_function("local_shell", "Runs a command on the user's machine.", members, "command"), form)


def _shell(_tool: Tool, _namespace: str | None) -> Offered:
    form = CallForm(item="shell_call", prefix="sh", made=callitems.shell)
    members = {
        "commands": {"type": "array", "items": {"type": "string"}, "description": "Shell commands, run in this order."},
        "timeout_ms": {"type": "integer", "description": "Milliseconds after which they are ended."},
        "max_output_length": {"type": "integer", "description": "How many characters of output to keep."},
    }
    return Offered(_as_function("shell", "Runs shell commands on the user's machine.", members, "commands"), form)


def _apply_patch(_tool: Tool, _namespace: str | None) -> Offered:
    form = CallForm(item="apply_patch_call", prefix="apc", made=callitems.apply_patch)
    members = {
        "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        "path": {"type": "string", "description": "Path of the file, from the root of the workspace."},
        "diff": {"type": "string", "description": _DIFF},
    }
    return Offered(_as_function("apply_patch", "Creates, changes or deletes a file.", members, "type", "path"), form)


_SEARCH = "Searches for tools that are not offered yet. Those that it finds can be called afterwards."
_DIFF = (
    "Not for delete_file. For create_file: all lines of the file, each with a '+' before it. For update_file: hunks without "
    "line numbers. Each begins with a line '@@', or '@@ ' and the line that the section begins with; then come the lines, with "
    "a ' ' before those that stay (about three before and after a change), a '-' before those that go, a '+' before new ones."
)


def _as_function(name: str, description: str, members: dict[str, Any], *required: str) -> Tool:
    parameters = {"type": "object", "properties": members, "required": list(required), "additionalProperties": False}
    return {"type": "function", "name": name, "description": description, "parameters": parameters}


def _paragraphs(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


_FLAT: dict[str, Callable[[Tool, str | None], Offered]] = {
    "function": _function,
    "custom": _custom,
    "tool_search": _tool_search,
    "local_shell": _local_shell,
    "shell": _shell,
    "apply_patch": _apply_patch,
}
