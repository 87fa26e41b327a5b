"""Tool definitions and ``tool_choice`` of a request, checked. To accept another type of tool, add a line to ``TOOLS`` and one
to ``_CHOSEN``.

What a type that is carried out here may say depends on settings: its members are checked where it is (``responses_mw.tools``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ...errors import BadRequest
from ..chat.client_tools import BRINGS_TOOLS, offered
from ..chat.forms import CallForm, Offered
from ..types import Item, Tool
from . import checks

NAME = r"[a-zA-Z0-9_-]{1,128}"
"""Of a function, a custom tool or a namespace; what is too long for the upstream is cut on the way there."""

_NOT_YET = ("allowed_callers", "async", "output_schema")


def check_number_of_tools(tools: Any, items: Any, *, maximum: int) -> None:
    """Refuses more than ``maximum`` tools in all: in a request's ``tools``, in their namespaces, and in its input ``items``.
    Neither has been checked."""
    brought = (item.get("tools") for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
    found = _number_of(tools) + sum(map(_number_of, brought))
    if found > maximum:
        expected = f"Expected at most {maximum}, namespaces and input items included, but got {found}."
        message = f"Invalid 'tools': too many tools. {expected}"
        raise BadRequest(message, param="tools", code="array_above_max_length")


def _number_of(tools: Any) -> int:
    if not isinstance(tools, list):
        return 0
    return sum(1 + _number_of(tool.get("tools")) if isinstance(tool, dict) else 1 for tool in tools)


def check_tools(value: Any, path: str = "tools") -> list[Tool]:
    """``tools`` as a list of checked tools."""
    tools = [check_tool(tool, f"{path}[{index}]") for index, tool in enumerate(checks.array(value, path))]
    if not any(tool["type"] == "tool_search" for tool in tools):
        _refuse_deferred(tools, path)
    return tools


def check_tool(value: Any, path: str) -> Tool:
    """One entry of ``tools``, without its nulls."""
    tool = checks.mapping(value, path)
    kind = checks.required(tool, "type", path, checks.string)
    _refuse_not_served(kind, path)
    if kind not in TOOLS:
        checks.wrong_value(f"{path}.type", kind, TOOLS.keys())
    return TOOLS[kind](tool, path)


def check_brought_tools(value: Any, path: str) -> list[Tool]:
    """The tools of an item: those that the client carries out. Any may be deferred: a search has found them."""
    tools = [check_tool(tool, f"{path}[{index}]") for index, tool in enumerate(checks.array(value, path))]
    for index, tool in enumerate(tools):
        if tool["type"] in SERVED:
            checks.unsupported(f"{path}[{index}].type", f"a tool of type '{tool['type']}' must stand in 'tools'.")
    return tools


def _refuse_not_served(kind: str, path: str) -> None:
    if kind in NOT_SERVED:
        checks.unsupported(f"{path}.type", f"tools of type '{kind}' are not served (yet).")


def _refuse_deferred(tools: Sequence[Tool], path: str) -> None:
    for index, tool in enumerate(tools):
        where = f"{path}[{index}]"
        if tool.get("defer_loading"):
            why = "without a tool of type 'tool_search' that the client executes, nothing would ever load it."
            checks.unsupported(f"{where}.defer_loading", why)
        if tool["type"] == "namespace":
            _refuse_deferred(tool["tools"], f"{where}.tools")


# -- one function for each type of tool --------------------------------------------------------------------------------


def _function(tool: Tool, path: str) -> Tool:
    _check_name(tool, path)
    _check_parameters(tool, path)
    _check_optional(tool, path, description=checks.string, strict=checks.boolean, defer_loading=checks.boolean)
    _refuse_not_yet(tool, path)
    return tool


def _custom(tool: Tool, path: str) -> Tool:
    _check_name(tool, path)
    _check_optional(tool, path, description=checks.string, defer_loading=checks.boolean)
    _refuse_not_yet(tool, path)
    return {**tool, "format": _format(tool["format"], f"{path}.format")} if "format" in tool else tool


def _format(value: Any, path: str) -> dict[str, Any]:
    checked = checks.mapping(value, path)
    kind = checks.one_of(checks.required(checked, "type", path, checks.string), f"{path}.type", {"text", "grammar"})
    if kind == "grammar":
        checks.required(checked, "syntax", path, partial(checks.one_of, supported={"lark", "regex"}))
        checks.required(checked, "definition", path, checks.string)
    return checked


def _namespace(tool: Tool, path: str) -> Tool:
    _check_name(tool, path)
    _check_optional(tool, path, description=checks.string)
    listed = checks.required(tool, "tools", path, checks.array)
    return {**tool, "tools": [_nested(one, f"{path}.tools[{index}]") for index, one in enumerate(listed)]}


def _nested(value: Any, path: str) -> Tool:
    tool = checks.mapping(value, path)
    kind = checks.one_of(checks.required(tool, "type", path, checks.string), f"{path}.type", {"function", "custom"})
    return TOOLS[kind](tool, path)


def _tool_search(tool: Tool, path: str) -> Tool:
    if checks.one_of(tool.get("execution", "server"), f"{path}.execution", {"server", "client"}) == "server":
        checks.unsupported(f"{path}.execution", "tools are searched by the client only; set it to 'client'.")
    _check_optional(tool, path, description=checks.string)
    _check_parameters(tool, path)
    return tool


def _shell(tool: Tool, path: str) -> Tool:
    _refuse_not_yet(tool, path)
    environment = checks.mapping(tool.get("environment", {"type": "local"}), f"{path}.environment")
    kind = checks.required(environment, "type", f"{path}.environment", checks.string)
    if kind in ("container_auto", "container_reference"):
        why = "there are no containers for shells here; 'local' gives the commands to the client."
        checks.unsupported(f"{path}.environment.type", why)
    checks.one_of(kind, f"{path}.environment.type", {"local"})
    if environment.get("skills"):
        checks.unsupported(f"{path}.environment.skills", "it is not served yet.")
    return tool


def _plain(tool: Tool, path: str) -> Tool:
    _refuse_not_yet(tool, path)
    return tool


def _served(tool: Tool, _path: str) -> Tool:
    return tool


def _check_name(tool: Tool, path: str) -> None:
    checks.required(tool, "name", path, partial(checks.string, pattern=NAME))


def _check_parameters(tool: Tool, path: str) -> None:
    if "parameters" in tool and not isinstance(tool["parameters"], dict):
        checks.wrong_type(f"{path}.parameters", "an object", tool["parameters"])


def _check_optional(tool: Tool, path: str, **members: checks.Check) -> None:
    for name, check in members.items():
        if name in tool:
            check(tool[name], f"{path}.{name}")


def _refuse_not_yet(tool: Tool, path: str) -> None:
    for name in _NOT_YET:
        if tool.get(name):
            checks.unsupported(f"{path}.{name}", "it is not served yet.")


WEB_SEARCH = frozenset({"web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"})
SERVED = WEB_SEARCH | {"code_interpreter", "mcp"}
"""Types of tools that are carried out here."""

TOOLS: dict[str, Callable[[Tool, str], Tool]] = {
    "function": _function,
    "custom": _custom,
    "namespace": _namespace,
    "tool_search": _tool_search,
    "local_shell": _plain,
    "shell": _shell,
    "apply_patch": _plain,
    **dict.fromkeys(SERVED, _served),
}

NOT_SERVED = frozenset(
    {
        "computer",
        "computer_use",
        "computer_use_preview",
        "container",
        "file_search",
        "image_generation",
        "programmatic_tool_calling",
    }
)


# -- tool_choice -------------------------------------------------------------------------------------------------------

MODES = frozenset({"none", "auto", "required"})


def check_tool_choice(choice: Any, tools: Sequence[Tool], items: Sequence[Item] = (), *, max_length: int | None = None) -> Any:
    """Check a ``tool_choice``: a mode, one tool, or ``allowed_tools`` with at most ``max_length`` tools. It must name
    tools of the request or of its ``items``.

    Returned without its nulls; ``allowed_tools`` always has its ``mode``.
    """
    if isinstance(choice, str):
        checked: Any = checks.one_of(choice, "tool_choice", MODES)
        mode, can_call = choice, bool(tools) or any(item["type"] in BRINGS_TOOLS for item in items)
    else:
        checked = _choice_object(choice, _Choosable(tools, [one.form for one in offered(tools, items)]), max_length)
        mode, can_call = checked.get("mode", "required"), bool(checked.get("tools", True))
    if mode == "required" and not can_call:
        message = "Invalid 'tool_choice': 'required' must be specified with the 'tools' parameter."
        raise BadRequest(message, param="tool_choice", code="invalid_value")
    return checked


def choice_names(choice: Any, offered: Sequence[Offered]) -> frozenset[str] | None:
    """The names of those functions that a checked ``tool_choice`` means; None for a mode, which means no function."""
    if isinstance(choice, str):
        return None
    chosen = choice["tools"] if choice["type"] == "allowed_tools" else [choice]
    meant: defaultdict[_Kind, set[_Values]] = defaultdict(set)
    for one in chosen:
        kind = _kind_of(one)
        meant[kind].add(_chosen_values(one, kind))
    return frozenset(one.name for one in offered if any(_values(one.form, kind) in values for kind, values in meant.items()))


def _choice_object(choice: Any, choosable: _Choosable, max_length: int | None) -> dict[str, Any]:
    checked = checks.mapping(choice, "tool_choice")
    if checks.required(checked, "type", "tool_choice", checks.string) != "allowed_tools":
        return _one_choice(checked, "tool_choice", choosable, {*_CHOSEN, "allowed_tools"})
    listed = checks.required(checked, "tools", "tool_choice", partial(checks.array, max_length=max_length))
    allowed = [_one_choice(one, f"tool_choice.tools[{index}]", choosable, _CHOSEN.keys()) for index, one in enumerate(listed)]
    mode = checks.one_of(checked.get("mode", "auto"), "tool_choice.mode", {"auto", "required"})
    return {**checked, "mode": mode, "tools": allowed}


def _one_choice(choice: Any, path: str, choosable: _Choosable, supported: Collection[str]) -> dict[str, Any]:
    checked = checks.mapping(choice, path)
    kind = checks.required(checked, "type", path, checks.string)
    _refuse_not_served(kind, path)
    checks.one_of(kind, f"{path}.type", supported)
    row = _CHOSEN[kind]
    for name in row.required:
        checks.required(checked, name, path, checks.string)
    for name in row.optional & checked.keys():
        checks.string(checked[name], f"{path}.{name}")
    if checked not in choosable:
        where = f"{path}.{(*row.required, 'type')[0]}"
        message = f"Invalid '{where}': '{checked[where.rpartition('.')[2]]}' not found in the 'tools' parameter."
        raise BadRequest(message, param=where, code="invalid_value")
    return checked


_Kind: TypeAlias = tuple[str, tuple[str, ...]]
"""The type of a choice, and the members by which it chooses."""
_Values: TypeAlias = tuple[Any, ...]


class _Choosable:
    """What a choice can mean, by its type and members: many choices among many tools are looked up, not compared."""

    def __init__(self, tools: Sequence[Tool], forms: Sequence[CallForm]) -> None:
        self._served = {_served_as(tool) for tool in tools if tool["type"] in SERVED}
        self._forms = forms
        self._known: dict[_Kind, set[_Values | None]] = {}

    def __contains__(self, choice: Mapping[str, Any]) -> bool:
        """Whether there is such a function, or a tool that is carried out here."""
        if choice["type"] in SERVED:
            return _served_as(choice) in self._served
        kind = _kind_of(choice)
        if kind not in self._known:
            self._known[kind] = {_values(form, kind) for form in self._forms}
        return _chosen_values(choice, kind) in self._known[kind]


def _served_as(tool: Mapping[str, Any]) -> tuple[str, str | None]:
    kind, label = tool["type"], tool.get("server_label")
    return "web_search" if kind in WEB_SEARCH else kind, None if label is None else str(label)


def _kind_of(choice: Mapping[str, Any]) -> _Kind:
    return choice["type"], tuple(name for name in _CHOSEN[choice["type"]].members if name in choice)


def _chosen_values(choice: Mapping[str, Any], kind: _Kind) -> _Values:
    return tuple(choice[name] for name in kind[1])


def _values(form: CallForm, kind: _Kind) -> _Values | None:
    """What choices of that kind compare of a function; None if they cannot mean it."""
    row = _CHOSEN[kind[0]]
    if row.items and form.item not in row.items:
        return None
    return tuple(form.members.get(row.named.get(name, name)) for name in kind[1])


@dataclass(frozen=True, slots=True)
class _Chosen:
    """How a choice of one type is matched with the forms of the functions."""

    items: frozenset[str]
    """Types of the calls' items; none: any."""
    required: tuple[str, ...] = ()
    """Members that the choice and the form have in common."""
    optional: frozenset[str] = frozenset()
    named: Mapping[str, str] = field(default_factory=dict)
    """Members that the form calls otherwise."""

    @property
    def members(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


_CHOSEN = {
    "function": _Chosen(frozenset({"function_call"}), ("name",), frozenset({"namespace"})),
    "custom": _Chosen(frozenset({"custom_tool_call"}), ("name",), frozenset({"namespace"})),
    "namespace": _Chosen(frozenset(), ("name",), named={"name": "namespace"}),
    "mcp": _Chosen(frozenset({"mcp_call", "mcp_approval_request"}), ("server_label",), frozenset({"name"})),
    "code_interpreter": _Chosen(frozenset({"code_interpreter_call"})),
    **dict.fromkeys(WEB_SEARCH, _Chosen(frozenset({"web_search_call"}))),
    **{kind: _Chosen(frozenset({f"{kind}_call"})) for kind in ("apply_patch", "local_shell", "shell", "tool_search")},
}
