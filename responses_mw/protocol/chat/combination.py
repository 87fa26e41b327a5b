"""Combine tools with the format of the answer (`text.format`) in one chat request.

With OpenAI, a call bypasses the format. Other servers constrain the whole answer, so that the model cannot call a tool, or
reject the combination. `Dialect.format_with_tools` describes the server. A turn with tools then has one of these forms.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from ..dialects import Dialect
from ..types import ChatRequest


class Combination(Enum):
    """What a turn requests, if the response has both tools and a format."""

    TOGETHER = auto()
    """Tools and format. Calls bypass the format."""
    STRICT = auto()
    """Tools and format. Calls bypass the format because functions are strict."""
    DRAFT = auto()
    """Only the tools. If the model makes no call, its text is a draft, which the client does not see."""
    ANSWER = auto()
    """The format, after a draft. Calls are not possible."""


def combine(body: ChatRequest, combination: Combination, dialect: Dialect) -> None:
    """Adapt `body`, which may have tools and a format, to `combination`.

    A format has no effect on a forced call, and servers reject it or prevent the call. It is then omitted as well.
    """
    if combination is Combination.TOGETHER or not {"tools", "response_format"} <= body.keys():
        return
    if combination is Combination.ANSWER:
        _prevent_calls(body, dialect)
        return
    if combination is Combination.STRICT:
        _mark_strict(body["tools"])
    is_strict = any(tool["function"].get("strict") for tool in body["tools"])
    if combination is not Combination.STRICT or not is_strict or "tool_choice" in body:
        del body["response_format"]


def _prevent_calls(body: ChatRequest, dialect: Dialect) -> None:
    if dialect.tools_with_answer:
        body["tool_choice"] = "none"
    else:
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            body.pop(name, None)


def _mark_strict(tools: list[dict[str, Any]]) -> None:
    """Make the functions strict whose definitions do not say whether they are. This is OpenAI's default."""
    for tool in tools:
        if tool["function"].get("strict") is None:
            tool["function"]["strict"] = True


_UNCOMPOSED = frozenset(
    {"multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "patternProperties", "allOf"}
)
_FORMATS = frozenset(
    {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"}
    | {"uri-template", "json-pointer", "relative-json-pointer"}
)


def is_composed(wanted: dict[str, Any]) -> bool:
    """Return whether vLLM's strict functions bypass the format `wanted`.

    The format must be within the part of JSON Schema that xgrammar supports. For any other, vLLM prevents calls and reports
    nothing. A property that has the name of an unsupported keyword counts as that keyword.
    """
    nodes: list[Any] = [wanted.get("schema")]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            if _is_unsupported(node):
                return False
            nodes += node.values()
    return True


def _is_unsupported(node: dict[str, Any]) -> bool:
    wanted = node.get("format")
    has_pattern = "pattern" in node or "format" in node
    has_length = "minLength" in node or "maxLength" in node
    is_unknown = isinstance(wanted, str) and wanted not in _FORMATS
    return is_unknown or (has_pattern and has_length) or not _UNCOMPOSED.isdisjoint(node)
