"""Check the tools and the `tool_choice` of a request, and list the functions that represent the tools to the chat model.

1. If no names collide, a function's name depends only on its tool, so calls from earlier turns keep their names
   (`history_name`). Otherwise, `distinct` renames functions, and `namer` returns the resulting names for calls.
2. Tools in `additional_tools` and `tool_search_output` items can be called as well. If a tool is defined again, the new
   definition takes the position of the first one. The upstream's prefix cache depends on this stable order.
3. A deferred tool is not offered until a `tool_search_output` contains it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from .. import checks, json_limits
from ..tool_kinds.form import MAX_NAME, NAME, OfferedFunction, flat_name, paragraphs, refuse_chat_form
from ..tool_kinds.registry import SERVED_TOOLS, TOOL_ITEMS, TOOL_KINDS, UNSERVED
from ..types import Item, Tool

BRINGS_TOOLS = frozenset({"additional_tools", "tool_search_output"})  # types of the items that contain tool definitions
_MAX_SUFFIX = 8  # maximum length of the suffix of a numbered name

# -- definitions -------------------------------------------------------------------------------------------------------


def check_number_of_tools(tools: Any, items: Any) -> None:
    """Raise `BadRequest` if the unchecked `tools` and `items` define more than `MAX_TOOLS` tools and namespaces."""
    brought = (item.get("tools") for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
    number = _number_of(tools) + sum(map(_number_of, brought))
    if number > json_limits.MAX_TOOLS:
        expected = f"Expected at most {json_limits.MAX_TOOLS}, namespaces and input items included, but got {number}."
        checks.invalid("tools", f"too many tools. {expected}", "array_above_max_length")


def _number_of(tools: Any) -> int:
    if not isinstance(tools, list):
        return 0
    return sum(1 + _number_of(tool.get("tools")) if isinstance(tool, dict) else 1 for tool in tools)


def check_tools(value: Any, path: str = "tools") -> list[Tool]:
    """Check the `tools` of a request. Deferred tools are allowed only together with a `tool_search` tool."""
    tools: list[Tool] = _tools(value, path)
    if not any(tool["type"] == "tool_search" for tool in tools):
        _refuse_deferred(tools, path)
    return tools


def check_brought_tools(value: Any, path: str) -> list[Tool]:
    """Check the tools in an input item. Only tools that the client executes are allowed. They may be deferred."""
    tools: list[Tool] = _tools(value, path)
    for index, tool in enumerate(tools):
        _refuse_unserved(tool["type"], f"{path}[{index}]")
        if tool["type"] in SERVED_TOOLS:
            checks.unsupported(f"{path}[{index}].type", f"a tool of type '{tool['type']}' must be in 'tools'.")
    return tools


_nested = checks.by_type({name: TOOL_KINDS[name].check for name in ("function", "custom")})
_namespace = checks.fields(
    {"name": partial(checks.string, pattern=NAME), "tools": checks.each(_nested)}, description=checks.string
)
_tools = checks.each(checks.by_type({**{name: kind.check for name, kind in TOOL_KINDS.items()}, "namespace": _namespace}))


def _refuse_unserved(kind: str, path: str) -> None:
    if kind in UNSERVED.types:
        checks.unsupported(f"{path}.type", f"tools of type '{kind}' are not supported.")


def _refuse_deferred(tools: Sequence[Tool], path: str) -> None:
    for index, tool in enumerate(tools):
        where = f"{path}[{index}]"
        if tool.get("defer_loading"):
            why = "without a tool of type 'tool_search' that the client executes, nothing would ever load it."
            checks.unsupported(f"{where}.defer_loading", why)
        if tool["type"] == "namespace":
            _refuse_deferred(tool["tools"], f"{where}.tools")


# -- functions ---------------------------------------------------------------------------------------------------------


def offered(tools: Sequence[Tool], items: Sequence[Item]) -> list[OfferedFunction]:
    """Return the functions for the client-side tools in the checked `tools` and `items`. Each name is unique."""
    functions = [*_functions(tools, deferred=False)]
    for item in items:
        if item["type"] in BRINGS_TOOLS:
            functions += _functions(item["tools"], deferred=item["type"] == "tool_search_output")
    return distinct({_tool_key(one.form.item, one.form.members): one for one in functions}.values())


def _tool_key(kind: str, members: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that is the same for a tool and its calls.

    For a call, `kind` and `members` are the type and the members of its item. For a tool, they come from its `CallForm`.
    """
    kind = "mcp_call" if kind == "mcp_approval_request" else kind
    return kind, *(members.get(name) for name in ("namespace", "name", "server_label"))


def _functions(tools: Iterable[Tool], namespace: str | None = None, *, deferred: bool) -> Iterator[OfferedFunction]:
    for tool in tools:
        if tool["type"] == "namespace":
            yield from _functions(_described(tool, deferred=deferred), tool["name"], deferred=deferred)
        elif deferred or not tool.get("defer_loading"):
            offer = TOOL_KINDS[tool["type"]].offer
            if offer is not None:
                yield offer(tool, namespace)


def _described(namespace: Tool, *, deferred: bool) -> list[Tool]:
    """Return the tools of a namespace, without deferred tools unless `deferred`. Describe the namespace in the first tool."""
    tools = [tool for tool in namespace["tools"] if deferred or not tool.get("defer_loading")]
    about = namespace.get("description")
    if tools and about:
        note = f"About all tools whose names begin with {namespace['name']}__: {about}"
        tools[0] = {**tools[0], "description": paragraphs(tools[0].get("description"), note)}
    return tools


def search_output(tools: Sequence[Tool], names: Callable[[Item], str]) -> str:
    """Return a text that tells the model which `tools` were found. `names` returns the function name of a call item."""
    lines = []
    for one in _functions(tools, deferred=True):
        name = names({"type": one.form.item, **one.form.members})
        about = str(one.function.get("description") or "").partition("\n")[0]
        lines.append(f"- {name}: {about}" if about else f"- {name}")
    return "\n".join(["These tools were found and can be called now:", *lines]) if lines else "No tools were found."


# -- names of functions ------------------------------------------------------------------------------------------------


def distinct(functions: Iterable[OfferedFunction]) -> list[OfferedFunction]:
    """Rename functions so that each name is unique and valid in Chat Completions.

    MCP functions whose names collide are renamed to `<label>__<name>`. If names still collide, a number is added.
    """
    listed = [_rename(one, flat_name(None, one.name)) for one in functions]
    if not listed:
        return listed
    uses = Counter(one.name for one in listed)
    listed = [_with_label(one) if uses[one.name] > 1 else one for one in listed]
    taken = {one.name for one in listed}
    seen: set[str] = set()
    # Each number is tried only once, even for long names with the same beginning, so the work is linear.
    suffixes: defaultdict[str, Iterator[str]] = defaultdict(lambda: (f"_{number}" for number in count(2)))
    result = []
    for one in listed:
        name = one.name
        if name in seen:
            numbered = (name[: MAX_NAME - len(suffix)] + suffix for suffix in suffixes[name[: MAX_NAME - _MAX_SUFFIX]])
            name = next(new for new in numbered if new not in taken)
        taken.add(name)
        seen.add(name)
        result.append(_rename(one, name))
    return result


def _with_label(one: OfferedFunction) -> OfferedFunction:
    label = one.form.members.get("server_label")
    return one if label is None else _rename(one, flat_name(label, one.form.members["name"]))


def _rename(one: OfferedFunction, name: str) -> OfferedFunction:
    return one if one.name == name else replace(one, function={**one.function, "name": name})


def history_name(item: Item) -> str:
    """Return the function name for a call from an earlier turn. Without collisions, `offered` uses the same name."""
    return TOOL_ITEMS[item["type"]].function or flat_name(item.get("namespace"), item.get("name", ""))


def namer(functions: Sequence[OfferedFunction]) -> Callable[[Item], str]:
    """Return a callable that returns a call's function name: its name in `functions`, or else its `history_name`."""
    names = {_tool_key(one.form.item, one.form.members): one.name for one in reversed(functions)}
    return lambda item: names.get(_tool_key(item["type"], item)) or history_name(item)


# -- tool_choice -------------------------------------------------------------------------------------------------------
# A choice selects functions by a key: its type and the members in `ToolKind.chosen_by`. Functions are indexed by these keys,
# so that checking many choices against many tools takes linear time.

MODES = frozenset({"none", "auto", "required"})
_CHOICES = {
    "namespace": ("namespace", ("name",)),
    **{type_: (kind.types[0], kind.chosen_by) for type_, kind in TOOL_KINDS.items()},
}
"""Maps types of choices to the first element of the key, and to the names of the members whose values follow in the key."""
_KIND_OF_ITEM = {type_: kind for kind in TOOL_KINDS.values() for type_ in kind.items}

_Key = tuple[Any, ...]


def check_form_of_choice(choice: Any) -> None:
    """Raise `BadRequest` if the `tool_choice` cannot be valid, whatever the tools are."""
    if isinstance(choice, str):
        checks.one_of(choice, "tool_choice", MODES)
    else:
        kind = checks.required(checks.mapping(choice, "tool_choice"), "type", "tool_choice", checks.string)
        _refuse_unserved(kind, "tool_choice")
        checks.one_of(kind, "tool_choice.type", _CHOICES.keys() | {"allowed_tools"})


def check_tool_choice(choice: Any, tools: Sequence[Tool], items: Sequence[Item] = ()) -> Any:
    """Check a `tool_choice`: a mode, one tool, or `allowed_tools` with at most `MAX_TOOLS` tools. Its form has been checked.

    The result has no null members, and `allowed_tools` always has a `mode`. Raises `BadRequest` if the choice is invalid, names
    a tool that is not in `tools` or `items`, or requires a call although there are no tools. For MCP tools, only the label of
    the server is checked.
    """
    if isinstance(choice, str):
        checked: Any = choice
        mode, can_call = choice, bool(tools) or any(item["type"] in BRINGS_TOOLS for item in items)
    else:
        known = _by_choice(offered(tools, items)).keys() | {_served_key(tool) for tool in tools if tool["type"] in SERVED_TOOLS}
        checked = _choice_object(choice, known)
        mode, can_call = checked.get("mode", "required"), bool(checked.get("tools", True))
    if mode == "required" and not can_call:
        checks.invalid("tool_choice", "'required' must be specified with the 'tools' parameter.")
    return checked


def choice_names(choice: dict[str, Any], functions: Sequence[OfferedFunction]) -> frozenset[str]:
    """Return the names of the functions that a checked `tool_choice` selects. The choice must not be a mode."""
    chosen = choice["tools"] if choice["type"] == "allowed_tools" else [choice]
    index = _by_choice(functions)
    return frozenset(name for key in set(map(_choice_key, chosen)) for name in index.get(key, ()))


def _choice_object(choice: Any, known: Collection[_Key]) -> dict[str, Any]:
    checked = checks.mapping(choice, "tool_choice")
    if checked["type"] != "allowed_tools":
        return _one_choice(checked, "tool_choice", known)
    listed = checks.required(checked, "tools", "tool_choice", partial(checks.array, max_length=json_limits.MAX_TOOLS))
    allowed = [_one_choice(one, f"tool_choice.tools[{index}]", known) for index, one in enumerate(listed)]
    mode = checks.one_of(checked.get("mode", "auto"), "tool_choice.mode", {"auto", "required"})
    return {**checked, "mode": mode, "tools": allowed}


def _one_choice(choice: Any, path: str, known: Collection[_Key]) -> dict[str, Any]:
    checked = checks.mapping(choice, path)
    kind = checks.required(checked, "type", path, checks.string)
    _refuse_unserved(kind, path)
    refuse_chat_form(checked, path)
    checks.one_of(kind, f"{path}.type", _CHOICES.keys())
    _, members = _CHOICES[kind]
    for name in members:
        if name in checked or name == members[0]:
            checks.required(checked, name, path, checks.string)
    key = _choice_key(checked)
    if (key[:2] if kind in SERVED_TOOLS else key) not in known:  # the tools of an MCP server are not known yet
        name = (*members, "type")[0]
        checks.invalid(f"{path}.{name}", f"'{checked[name]}' not found in the 'tools' parameter.")
    return checked


def _choice_key(choice: Mapping[str, Any]) -> _Key:
    kind, members = _CHOICES[choice["type"]]
    return kind, *(choice[name] for name in members if name in choice)


def _served_key(tool: Tool) -> _Key:
    kind, members = _CHOICES[tool["type"]]
    return kind, *(str(tool.get(name)) for name in members[:1])  # the definition has not been checked yet


def _by_choice(functions: Sequence[OfferedFunction]) -> Mapping[_Key, list[str]]:
    """Map the key of each possible choice to the names of the functions that the choice selects."""
    index: defaultdict[_Key, list[str]] = defaultdict(list)
    for one in functions:
        kind, members, function = _KIND_OF_ITEM[one.form.item], one.form.members, one.name
        key = kind.types[0], *(members.get(name) for name in kind.chosen_by)
        for length in range(min(2, len(key)), len(key) + 1):
            index[key[:length]].append(function)
        if "namespace" in members:
            index["namespace", members["namespace"]].append(function)
    return index
