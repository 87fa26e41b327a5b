"""Check the tool definitions and the ``tool_choice`` of a request. The kinds of tools are in ``tool_kinds``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ...errors import BadRequest
from ..chat.client_tools import BRINGS_TOOLS, offered
from ..tool_kinds.form import NAME, CallForm, OfferedFunction
from ..tool_kinds.registry import SERVED_TOOLS, TOOL_KINDS, WEB_SEARCH
from ..types import Item, Tool
from . import checks

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


def check_number_of_tools(tools: Any, items: Any, *, maximum: int) -> None:
    """Refuse more than ``maximum`` tools in the request's ``tools``, their namespaces and the input ``items`` together.

    The tools have not been checked yet.
    """
    brought = (item.get("tools") for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
    number = _number_of(tools) + sum(map(_number_of, brought))
    if number > maximum:
        expected = f"Expected at most {maximum}, namespaces and input items included, but got {number}."
        message = f"Invalid 'tools': too many tools. {expected}"
        raise BadRequest(message, param="tools", code="array_above_max_length")


def _number_of(tools: Any) -> int:
    if not isinstance(tools, list):
        return 0
    return sum(1 + _number_of(tool.get("tools")) if isinstance(tool, dict) else 1 for tool in tools)


def check_tools(value: Any, path: str = "tools") -> list[Tool]:
    """Check the ``tools`` of a request."""
    tools: list[Tool] = _tools(value, path)
    if not any(tool["type"] == "tool_search" for tool in tools):
        _refuse_deferred(tools, path)
    return tools


def check_brought_tools(value: Any, path: str) -> list[Tool]:
    """Check the tools in an input item. They must be client tools. Deferred tools are allowed: a search has found them."""
    tools: list[Tool] = _tools(value, path)
    for index, tool in enumerate(tools):
        if tool["type"] in SERVED_TOOLS:
            checks.unsupported(f"{path}[{index}].type", f"a tool of type '{tool['type']}' must be in 'tools'.")
    return tools


_nested = checks.by_type({name: TOOL_KINDS[name].check for name in ("function", "custom")})
_namespace = checks.fields(
    {"name": partial(checks.string, pattern=NAME), "tools": checks.each(_nested)}, description=checks.string
)
_known_tool = checks.by_type({**{name: kind.check for name, kind in TOOL_KINDS.items()}, "namespace": _namespace})


def _tool(value: Any, path: str) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str):
        _refuse_not_served(kind, path)
    return _known_tool(value, path)


_tools = checks.each(_tool)


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


# -- tool_choice -------------------------------------------------------------------------------------------------------

MODES = frozenset({"none", "auto", "required"})
_CHOICES = TOOL_KINDS.keys() | {"namespace"}


def check_tool_choice(choice: Any, tools: Sequence[Tool], items: Sequence[Item] = (), *, max_length: int | None = None) -> Any:
    """Check a ``tool_choice``: a mode, one tool, or ``allowed_tools`` with at most ``max_length`` tools.

    It must name tools of the request or of its ``items``. The result has no nulls, and ``allowed_tools`` always has a ``mode``.
    """
    if isinstance(choice, str):
        checked: Any = checks.one_of(choice, "tool_choice", MODES)
        mode, can_call = choice, bool(tools) or any(item["type"] in BRINGS_TOOLS for item in items)
    else:
        checked = _choice_object(choice, _Selection(offered(tools, items), tools), max_length)
        mode, can_call = checked.get("mode", "required"), bool(checked.get("tools", True))
    if mode == "required" and not can_call:
        message = "Invalid 'tool_choice': 'required' must be specified with the 'tools' parameter."
        raise BadRequest(message, param="tool_choice", code="invalid_value")
    return checked


def choice_names(choice: Any, offered: Sequence[OfferedFunction]) -> frozenset[str] | None:
    """The names of the functions that a checked ``tool_choice`` selects; None for a mode, which names no functions."""
    if isinstance(choice, str):
        return None
    selection = _Selection(offered)
    chosen = choice["tools"] if choice["type"] == "allowed_tools" else [choice]
    groups = [selection.names(one) for one in chosen]
    distinct = {id(names): names for names in groups}.values()  # many choices can name one namespace
    return frozenset(name for names in distinct for name in names)


def _choice_object(choice: Any, selection: _Selection, max_length: int | None) -> dict[str, Any]:
    checked = checks.mapping(choice, "tool_choice")
    if checks.required(checked, "type", "tool_choice", checks.string) != "allowed_tools":
        return _one_choice(checked, "tool_choice", selection, _CHOICES | {"allowed_tools"})
    listed = checks.required(checked, "tools", "tool_choice", partial(checks.array, max_length=max_length))
    allowed = [_one_choice(one, f"tool_choice.tools[{index}]", selection, _CHOICES) for index, one in enumerate(listed)]
    mode = checks.one_of(checked.get("mode", "auto"), "tool_choice.mode", {"auto", "required"})
    return {**checked, "mode": mode, "tools": allowed}


def _one_choice(choice: Any, path: str, selection: _Selection, supported: Collection[str]) -> dict[str, Any]:
    checked = checks.mapping(choice, path)
    kind = checks.required(checked, "type", path, checks.string)
    _refuse_not_served(kind, path)
    checks.one_of(kind, f"{path}.type", supported)
    required, optional = _members(kind)
    for name in (*required, *(name for name in optional if name in checked)):
        checks.required(checked, name, path, checks.string)
    if checked not in selection:
        name = (*required, "type")[0]
        message = f"Invalid '{path}.{name}': '{checked[name]}' not found in the 'tools' parameter."
        raise BadRequest(message, param=f"{path}.{name}", code="invalid_value")
    return checked


class _Selection:
    """The functions and server-side tools that a choice can select.

    They are indexed by the members of a choice, so that checking many choices against many tools takes linear time.
    """

    def __init__(self, offered: Sequence[OfferedFunction], tools: Sequence[Tool] = ()) -> None:
        self._offered = offered
        self._served = {_served_as(tool) for tool in tools if tool["type"] in SERVED_TOOLS}
        self._known: dict[tuple[str, ...], dict[tuple[Any, ...], list[str]]] = {}

    def __contains__(self, choice: Mapping[str, Any]) -> bool:
        if choice["type"] in SERVED_TOOLS:
            return _served_as(choice) in self._served
        return bool(self.names(choice))

    def names(self, choice: Mapping[str, Any]) -> Sequence[str]:
        """The names of the functions that the choice selects."""
        required, optional = _members(choice["type"])
        members = tuple(name for name in (*required, *optional) if name in choice)
        index = self._known.get((choice["type"], *members))
        if index is None:
            index = self._known[(choice["type"], *members)] = {}
            for one in self._offered:
                if (values := _form_values(one.form, choice["type"], members)) is not None:
                    index.setdefault(values, []).append(one.name)
        return index.get(tuple(choice[name] for name in members), ())


def _served_as(tool: Mapping[str, Any]) -> tuple[str, str | None]:
    kind, label = tool["type"], tool.get("server_label")
    return "web_search" if kind in WEB_SEARCH.types else kind, None if label is None else str(label)


def _members(kind: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """The members that a choice of type ``kind`` must have, and those it may have."""
    if kind == "namespace":
        return ("name",), frozenset()
    return TOOL_KINDS[kind].chosen_by, TOOL_KINDS[kind].narrowed_by


def _form_values(form: CallForm, kind: str, members: Sequence[str]) -> tuple[Any, ...] | None:
    """The values that a choice of type ``kind`` must have in ``members`` to select the function; None if it never can."""
    if kind == "namespace":
        return (form.members.get("namespace"),)
    if form.item not in TOOL_KINDS[kind].calls:
        return None
    return tuple(form.members.get(name) for name in members)
