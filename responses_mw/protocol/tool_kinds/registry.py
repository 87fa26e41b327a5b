"""All tool kinds, indexed by the types of their definitions and items.

This module describes the tools that the server executes (``mcp``, ``code_interpreter``, ``web_search``).
``responses_mw.tools`` checks their definitions, because the allowed values depend on the settings.
"""

from __future__ import annotations

from typing import Any

from ..request import checks
from ..request.checks import by_type, fields, open_object
from ..response.citations import listing
from ..types import Item, Part
from .client import APPLY_PATCH, CUSTOM, FUNCTION, LOCAL_SHELL, SHELL, TOOL_SEARCH
from .form import USUAL_STATUSES, ItemKind, ToolKind, arguments_as_written, as_text

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
    if output is not None or error is None:
        return output or ""
    return _mcp_error(error)


def _mcp_error(error: Any) -> str:
    """The text of an error, which is a string or an object with a message or with the content of the tool's answer."""
    if not isinstance(error, dict):
        return as_text(error)
    content = error.get("message") or error.get("content") or ""
    blocks = content if isinstance(content, list) else [content]
    return "\n".join(as_text(block.get("text", block) if isinstance(block, dict) else block) for block in blocks)


MCP = ToolKind(
    types=("mcp",),
    items=(
        ItemKind("mcp_list_tools", "mcpl", fields({"server_label": checks.string, "tools": checks.each(_listed_tool)})),
        ItemKind(
            type="mcp_approval_request",
            prefix="mcpr",
            check=fields(_requested),
            role="approval_request",
            arguments=arguments_as_written,
        ),
        ItemKind(
            type="mcp_approval_response",
            prefix="mcpa",
            check=fields({"approval_request_id": checks.string, "approve": checks.boolean}, reason=checks.string),
        ),
        ItemKind(
            type="mcp_call",
            prefix="mcp",
            check=fields(_requested, output=checks.string, approval_request_id=checks.string, error=_error),
            role="served_call",
            arguments=arguments_as_written,
            output=_mcp_output,
            statuses=USUAL_STATUSES | {"calling", "failed"},
        ),
    ),
    chosen_by=("server_label", "name"),
)

# -- code_interpreter --------------------------------------------------------------------------------------------------

_code_outputs = checks.each(by_type({"logs": fields({"logs": checks.string}), "image": fields({"url": checks.string})}))


def _code_output(item: Item) -> str:
    outputs = [one for one in item.get("outputs") or () if isinstance(one, dict)]
    return "\n".join(str(one.get("logs") or f"({one.get('type')})") for one in outputs) or "(no output)"


CODE_INTERPRETER = ToolKind(
    types=("code_interpreter",),
    items=(
        ItemKind(
            type="code_interpreter_call",
            prefix="ci",
            check=fields({"id": checks.string}, code=checks.string, container_id=checks.string, outputs=_code_outputs),
            role="served_call",
            arguments=lambda item: as_text({"code": item.get("code") or ""}),
            output=_code_output,
            function="python",
            statuses=USUAL_STATUSES | {"interpreting", "failed"},
        ),
    ),
)

# -- web_search --------------------------------------------------------------------------------------------------------

_search_action = open_object(queries=checks.strings, sources=checks.array, type=checks.string, query=checks.string)


def _search_arguments(item: Item) -> str:
    action = dict(item.get("action") or {})
    queries = action.get("queries") or [""]
    kind = action.pop("type", "search")
    return as_text({"query": action.get("query") or queries[0]} if kind == "search" else action)


def _search_output(item: Item) -> str:
    if item.get("error"):
        return as_text(item["error"])
    if "results" in item:
        return listing(item["results"])
    sources = (item.get("action") or {}).get("sources") or ()
    urls = [str(source["url"]) for source in sources if isinstance(source, dict) and "url" in source]
    return "\n".join(["The results are not shown again.", *urls])


WEB_SEARCH = ToolKind(
    types=("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    items=(
        ItemKind(
            type="web_search_call",
            prefix="ws",
            check=fields({"id": checks.string}, action=_search_action, results=checks.array),
            role="served_call",
            arguments=_search_arguments,
            output=_search_output,
            function="web_search",
            statuses=USUAL_STATUSES | {"searching", "failed"},
        ),
    ),
)

# -- all of them -------------------------------------------------------------------------------------------------------

_KINDS = (FUNCTION, CUSTOM, TOOL_SEARCH, LOCAL_SHELL, SHELL, APPLY_PATCH, MCP, CODE_INTERPRETER, WEB_SEARCH)

TOOL_KINDS: dict[str, ToolKind] = {type_: kind for kind in _KINDS for type_ in kind.types}
TOOL_ITEMS: dict[str, ItemKind] = {item.type: item for kind in _KINDS for item in kind.items}
SERVED_TOOLS = frozenset(type_ for type_, kind in TOOL_KINDS.items() if kind.offer is None)
"""Types of the tools that the server executes."""


def arguments_of(item: Item) -> str:
    """The arguments of a call, as the model would write them."""
    arguments = TOOL_ITEMS[item["type"]].arguments
    assert arguments is not None, "only calls have arguments"
    return arguments(item)


def output_of(item: Item) -> str | list[Part]:
    """The output that the model sees for an output item, or for a call that holds its own output."""
    output = TOOL_ITEMS[item["type"]].output
    assert output is not None, "only outputs and executed calls have output"
    return output(item)


def is_finished(item: Item) -> bool:
    """Whether a server-side call was executed. It was not if it was cut off, or if its run ended first."""
    return item.get("status", "completed") in ("completed", "failed")
