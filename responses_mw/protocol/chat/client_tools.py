"""The functions that represent a request's tools to the chat model, and their names.

1. A function's name depends only on its tool (``flat_name``), so calls of earlier turns keep their names (``history_name``).
   If several functions have the same name, those of MCP servers become ``<label>__<name>``; of the others, all but the first
   are numbered. ``namer`` returns these names for calls.
2. Tools in ``additional_tools`` and ``tool_search_output`` items can be called too. If a tool is defined again, the new
   definition takes the place of the first, because the upstream's prefix cache depends on a stable order.
3. A deferred tool is not offered until a ``tool_search_output`` contains it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from ..tool_kinds.form import MAX_NAME, CallForm, OfferedFunction, flat_name, paragraphs
from ..tool_kinds.registry import TOOL_ITEMS, TOOL_KINDS
from ..types import Item, Tool

BRINGS_TOOLS = frozenset({"additional_tools", "tool_search_output"})
"""Types of the items that hold tools."""
_NUMBER_LENGTH = 8
"""Length of the longest suffix of a numbered name."""


def offered(tools: Sequence[Tool], items: Sequence[Item]) -> list[OfferedFunction]:
    """The functions for the client tools in checked ``tools`` and ``items``, each with a unique name.

    Tools that the server executes are skipped.
    """
    functions: dict[tuple[Any, ...], OfferedFunction] = {}
    for one in _flatten(tools, deferred=False):
        functions[_key(one.form)] = one
    for item in items:
        if item["type"] in BRINGS_TOOLS:
            for one in _flatten(item["tools"], deferred=item["type"] == "tool_search_output"):
                functions[_key(one.form)] = one
    return distinct(functions.values())


def search_output(tools: Sequence[Tool], names: Callable[[Item], str]) -> str:
    """The result of a tool search as the model sees it: each tool's name and the first line of its description."""
    lines = []
    for one in _flatten(tools, deferred=True):
        name = names({"type": one.form.item, **one.form.members})
        about = str(one.function.get("description") or "").partition("\n")[0]
        lines.append(f"- {name}: {about}" if about else f"- {name}")
    return "\n".join(["These tools were found and can be called now:", *lines]) if lines else "No tools were found."


def _key(form: CallForm) -> tuple[Any, ...]:
    """The key that all definitions of one tool share."""
    return form.item, form.members.get("namespace"), form.members.get("name")


def _flatten(tools: Iterable[Tool], *, deferred: bool) -> Iterator[OfferedFunction]:
    """The functions of client tools and namespaces, with or without the ``deferred`` ones."""
    for tool in tools:
        if tool["type"] == "namespace":
            yield from _flatten_namespace(tool, deferred=deferred)
        elif deferred or not tool.get("defer_loading"):
            offer = TOOL_KINDS[tool["type"]].offer
            if offer is not None:
                yield offer(tool, None)


def _flatten_namespace(namespace: Tool, *, deferred: bool) -> Iterator[OfferedFunction]:
    """The functions of a namespace. The first one's description includes the namespace's description."""
    name, about = namespace["name"], namespace.get("description")
    note = f"About all tools whose names begin with {name}__: {about}" if about else None
    for tool in namespace["tools"]:
        offer = TOOL_KINDS[tool["type"]].offer
        if offer is not None and (deferred or not tool.get("defer_loading")):
            described = {**tool, "description": paragraphs(tool.get("description"), note)} if note else tool
            yield offer(described, name)
            note = None


# -- names -------------------------------------------------------------------------------------------------------------


def distinct(functions: Iterable[OfferedFunction]) -> list[OfferedFunction]:
    """Give each function a unique name that Chat Completions accepts.

    If several functions have the same name, those of MCP servers become ``<label>__<name>``, so that the model can tell them
    apart. Of the others, the first keeps the name and the rest are numbered.
    """
    listed = [_rename(one, flat_name(None, one.name)) for one in functions]
    uses = Counter(one.name for one in listed)
    listed = [_with_label(one) if uses[one.name] > 1 else one for one in listed]
    taken = {one.name for one in listed}
    seen: set[str] = set()
    numbers: dict[str, Iterator[int]] = {}
    result = []
    for one in listed:
        name = one.name
        if name in seen:
            # Each number is tried only once, even for long names with the same beginning, so this is linear.
            number = numbers.setdefault(name[: MAX_NAME - _NUMBER_LENGTH], count(2))
            name = next(numbered for n in number if (numbered := _add_number(one.name, n)) not in taken)
        taken.add(name)
        seen.add(name)
        result.append(_rename(one, name))
    return result


def _with_label(one: OfferedFunction) -> OfferedFunction:
    label = one.form.members.get("server_label")
    return one if label is None else _rename(one, flat_name(label, one.form.members["name"]))


def _rename(one: OfferedFunction, name: str) -> OfferedFunction:
    return one if one.name == name else replace(one, function={**one.function, "name": name})


def _add_number(name: str, number: int) -> str:
    suffix = f"_{number}"
    return name[: MAX_NAME - len(suffix)] + suffix


def history_name(item: Item) -> str:
    """The function name for a call of an earlier turn: the name that ``offered`` gives its tool if no other tool has it."""
    return TOOL_ITEMS[item["type"]].function or flat_name(item.get("namespace"), item["name"])


def namer(functions: Sequence[OfferedFunction]) -> Callable[[Item], str]:
    """Return a function like ``history_name`` that uses the current name of a tool that is among ``functions``."""
    names = {_call_key(one.form.item, one.form.members): one.name for one in reversed(functions)}

    def name(item: Item) -> str:
        return names.get(_call_key(item["type"], item)) or history_name(item)

    return name


def _call_key(kind: str, members: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key of the tool that a call or an approval request is for."""
    kind = "mcp_call" if kind == "mcp_approval_request" else kind
    return kind, *(members.get(name) for name in ("namespace", "name", "server_label"))
