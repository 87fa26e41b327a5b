"""Tools that the client defines: ``function``, ``custom`` and ``tool_search``."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..chat.patterns import as_pattern
from ..parts import INPUT_PARTS, content_parts
from ..request import checks
from ..types import Item, Tool
from .form import (
    NAME,
    CallForm,
    ItemKind,
    Offered,
    ToolKind,
    arguments_as_written,
    as_function,
    as_text,
    check_call,
    check_call_id,
    flat_name,
    function_form,
    paragraphs,
    parse_shallow,
    refuse_unsupported,
)

_name = partial(checks.string, pattern=NAME)


def _check_output(value: Item, path: str) -> Item:
    """Check an output that is a text or a list of content parts."""
    checks.required(value, "call_id", path, check_call_id)
    output = value.get("output")
    if output is None:
        checks.missing(f"{path}.output")
    if isinstance(output, str):
        return value
    if not isinstance(output, list):
        checks.wrong_type(f"{path}.output", "a string or an array of objects", output)
    return {**value, "output": content_parts(output, f"{path}.output", INPUT_PARTS)}


def _output_kind(kind: str, prefix: str) -> ItemKind:
    return ItemKind(kind, prefix, _check_output, "output", output=lambda item: item["output"])


def _with_namespace(name: str, namespace: str | None) -> dict[str, str]:
    return {"name": name} if namespace is None else {"name": name, "namespace": namespace}


# -- function ----------------------------------------------------------------------------------------------------------


def _check_function(tool: Tool, path: str) -> Tool:
    checks.required(tool, "name", path, _name)
    checks.optional(tool, path, parameters=checks.json_object, description=checks.string)
    checks.optional(tool, path, strict=checks.boolean, defer_loading=checks.boolean)
    return refuse_unsupported(tool, path)


def _offer_function(tool: Tool, namespace: str | None) -> Offered:
    form = function_form(**_with_namespace(tool["name"], namespace))
    return Offered({**tool, "name": flat_name(namespace, tool["name"])}, form)


FUNCTION = ToolKind(
    types=("function",),
    items=(
        ItemKind(
            type="function_call",
            prefix="fc",
            check=partial(check_call, name=checks.string, arguments=checks.string),
            role="call",
            arguments=arguments_as_written,
        ),
        _output_kind("function_call_output", "fco"),
    ),
    check=_check_function,
    offer=_offer_function,
    chosen_by=("name",),
    narrowed_by=frozenset({"namespace"}),
)

# -- custom: a function with one string, whose text the client sees as it grows ------------------------------------------


def _check_custom(tool: Tool, path: str) -> Tool:
    checks.required(tool, "name", path, _name)
    checks.optional(tool, path, description=checks.string, defer_loading=checks.boolean)
    refuse_unsupported(tool, path)
    return {**tool, "format": _check_format(tool["format"], f"{path}.format")} if "format" in tool else tool


def _check_format(value: Any, path: str) -> dict[str, Any]:
    checked = checks.mapping(value, path)
    kind = checks.one_of(checks.required(checked, "type", path, checks.string), f"{path}.type", {"text", "grammar"})
    if kind == "grammar":
        checks.required(checked, "syntax", path, partial(checks.one_of, supported={"lark", "regex"}))
        checks.required(checked, "definition", path, checks.string)
    return checked


def _offer_custom(tool: Tool, namespace: str | None) -> Offered:
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
    return Offered({**function, "strict": True} if constraint else function, form)


def _describe_format(wanted: dict[str, Any]) -> str:
    if wanted.get("type") != "grammar":
        return "The input is free text, given as the string 'input'."
    kind = {"lark": "Lark grammar", "regex": "regular expression"}[wanted["syntax"]]
    return f"The input, given as the string 'input', must match this {kind}:\n{wanted['definition']}"


CUSTOM = ToolKind(
    types=("custom",),
    items=(
        ItemKind(
            type="custom_tool_call",
            prefix="ctc",
            check=partial(check_call, name=checks.string, input=checks.string),
            role="call",
            arguments=lambda item: as_text({"input": item["input"]}),
        ),
        _output_kind("custom_tool_call_output", "ctco"),
    ),
    check=_check_custom,
    offer=_offer_custom,
    chosen_by=("name",),
    narrowed_by=frozenset({"namespace"}),
)

# -- tool_search: the client looks for deferred tools ----------------------------------------------------------------------

_SEARCH = "Searches for tools that are not offered yet. Those that it finds can be called afterwards."


def _check_tool_search(tool: Tool, path: str) -> Tool:
    if checks.one_of(tool.get("execution", "server"), f"{path}.execution", {"server", "client"}) == "server":
        checks.unsupported(f"{path}.execution", "tools are searched by the client only; set it to 'client'.")
    checks.optional(tool, path, description=checks.string, parameters=checks.json_object)
    return tool


def _check_search_item(value: Item, path: str, **required: checks.Check) -> Item:
    if checks.one_of(value.get("execution", "client"), f"{path}.execution", {"server", "client"}) == "server":
        checks.unsupported(f"{path}.execution", "tools are searched by the client only.")
    return check_call(value, path, **required)


def _offer_tool_search(tool: Tool, _namespace: str | None) -> Offered:
    form = CallForm(item="tool_search_call", prefix="tsc", members={"execution": "client"}, made=_make_search)
    given: Tool = {name: tool[name] for name in ("description", "parameters") if name in tool}
    default = as_function("tool_search", _SEARCH, {"query": {"type": "string"}}, "query")
    return Offered({**default, **given}, form)


def _make_search(arguments: str) -> dict[str, Any]:
    parsed = parse_shallow(arguments or "{}")
    return {"arguments": {"malformed_arguments": arguments} if parsed is None else parsed}


TOOL_SEARCH = ToolKind(
    types=("tool_search",),
    items=(
        ItemKind(
            type="tool_search_call",
            prefix="tsc",
            check=partial(_check_search_item, arguments=checks.json_object),
            role="call",
            arguments=lambda item: as_text(item["arguments"]),
            function="tool_search",
        ),
        # Its ``tools`` are checked with the item (``request.items``), its output is made in ``chat.client_tools``.
        ItemKind("tool_search_output", "tso", _check_search_item, "output"),
    ),
    check=_check_tool_search,
    offer=_offer_tool_search,
)
