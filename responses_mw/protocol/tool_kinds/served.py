"""Tools that the server executes: ``mcp``, ``code_interpreter`` and ``web_search``.

Their definitions are checked in ``responses_mw.tools``, as the allowed values depend on the settings.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..request import checks
from ..response.citations import listing
from ..types import Item, Tool
from .form import USUAL_STATUSES, ItemKind, ToolKind, arguments_as_written, as_text


def _accept(tool: Tool, _path: str) -> Tool:
    return tool


# -- mcp ---------------------------------------------------------------------------------------------------------------


def _check_mcp_list(value: Item, path: str) -> Item:
    checks.required(value, "server_label", path, checks.string)
    tools = checks.required(value, "tools", path, checks.array)
    return {**value, "tools": [_check_mcp_tool(tool, f"{path}.tools[{index}]") for index, tool in enumerate(tools)]}


def _check_mcp_tool(value: Any, path: str) -> dict[str, Any]:
    tool = checks.mapping(value, path)
    checks.required(tool, "name", path, checks.string)
    checks.required(tool, "input_schema", path, checks.json_object)
    checks.optional(tool, path, description=checks.string, annotations=checks.json_object)
    return tool


def _check_mcp_request(value: Item, path: str) -> Item:
    """Check an ``mcp_approval_request``, or the members that an ``mcp_call`` shares with it."""
    for name in ("id", "server_label", "name", "arguments"):
        checks.required(value, name, path, checks.string)
    return value


def _check_mcp_call(value: Item, path: str) -> Item:
    _check_mcp_request(value, path)
    checks.optional(value, path, output=checks.string, approval_request_id=checks.string)
    if not isinstance(value.get("error", ""), str | dict):
        checks.wrong_type(f"{path}.error", "an object", value["error"])
    return value


def _check_mcp_approval(value: Item, path: str) -> Item:
    checks.required(value, "approval_request_id", path, checks.string)
    checks.required(value, "approve", path, checks.boolean)
    checks.optional(value, path, reason=checks.string)
    return value


def _mcp_output(item: Item) -> str:
    output, error = item.get("output"), item.get("error")
    if output is not None or error is None:
        return output or ""
    return _mcp_error(error)


def _mcp_error(error: Any) -> str:
    """The text of an error: a string, an object with a message, or the content of the tool's own answer."""
    if not isinstance(error, dict):
        return as_text(error)
    content = error.get("message") or error.get("content") or ""
    blocks = content if isinstance(content, list) else [content]
    return "\n".join(as_text(block.get("text", block) if isinstance(block, dict) else block) for block in blocks)


MCP = ToolKind(
    types=("mcp",),
    items=(
        ItemKind("mcp_list_tools", "mcpl", _check_mcp_list),
        ItemKind(
            type="mcp_approval_request",
            prefix="mcpr",
            check=_check_mcp_request,
            role="approval_request",
            arguments=arguments_as_written,
        ),
        ItemKind("mcp_approval_response", "mcpa", _check_mcp_approval),
        ItemKind(
            type="mcp_call",
            prefix="mcp",
            check=_check_mcp_call,
            role="served_call",
            arguments=arguments_as_written,
            output=_mcp_output,
            statuses=USUAL_STATUSES | {"calling", "failed"},
        ),
    ),
    check=_accept,
    chosen_by=("server_label",),
    narrowed_by=frozenset({"name"}),
)

# -- code_interpreter --------------------------------------------------------------------------------------------------


def _check_code(value: Item, path: str) -> Item:
    checks.required(value, "id", path, checks.string)
    checks.optional(value, path, code=checks.string, container_id=checks.string)
    for index, one in enumerate(checks.array(value.get("outputs", []), f"{path}.outputs")):
        where = f"{path}.outputs[{index}]"
        output = checks.mapping(one, where)
        kind = checks.required(output, "type", where, partial(checks.one_of, supported={"logs", "image"}))
        checks.required(output, {"logs": "logs", "image": "url"}[kind], where, checks.string)
    return value


def _code_output(item: Item) -> str:
    outputs = [one for one in item.get("outputs") or () if isinstance(one, dict)]
    return "\n".join(str(one.get("logs") or f"({one.get('type')})") for one in outputs) or "(no output)"


CODE_INTERPRETER = ToolKind(
    types=("code_interpreter",),
    items=(
        ItemKind(
            type="code_interpreter_call",
            prefix="ci",
            check=_check_code,
            role="served_call",
            arguments=lambda item: as_text({"code": item.get("code") or ""}),
            output=_code_output,
            function="python",
            statuses=USUAL_STATUSES | {"interpreting", "failed"},
        ),
    ),
    check=_accept,
)

# -- web_search --------------------------------------------------------------------------------------------------------


def _check_search(value: Item, path: str) -> Item:
    checks.required(value, "id", path, checks.string)
    action = checks.mapping(value.get("action", {}), f"{path}.action")
    checks.optional(action, f"{path}.action", queries=checks.strings, sources=checks.array)
    checks.optional(action, f"{path}.action", type=checks.string, query=checks.string)
    checks.optional(value, path, results=checks.array)
    return {**value, "action": action}


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
            check=_check_search,
            role="served_call",
            arguments=_search_arguments,
            output=_search_output,
            function="web_search",
            statuses=USUAL_STATUSES | {"searching", "failed"},
        ),
    ),
    check=_accept,
)
