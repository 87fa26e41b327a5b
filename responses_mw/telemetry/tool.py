"""The span of a call of a tool that is carried out here (OpenTelemetry, "Execute tool span")."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Self

from opentelemetry.context import attach, detach
from opentelemetry.trace import SpanKind, set_span_in_context

from .exchange import current
from .tracing import TRACER, captures, mark_failed


class ToolCall:
    """A context manager: the call of the tool ``name`` with ``arguments``, as JSON. Below it stand the spans of MCP's SDK."""

    __slots__ = ("_arguments", "_name", "_span", "_token", "_type")

    def __init__(self, name: str, arguments: str, *, type: str = "extension") -> None:  # noqa: A002 (the attribute's name)
        """``type`` by the conventions: what is called by the server itself is an ``extension``."""
        self._name = name
        self._arguments = arguments
        self._type = type

    def __enter__(self) -> Self:
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": self._name,
            "gen_ai.tool.type": self._type,
        }
        exchange = current()
        if exchange is not None and exchange.response_id:
            attributes["responses_mw.response.id"] = exchange.response_id
        self._span = TRACER.start_span(f"execute_tool {self._name}", kind=SpanKind.INTERNAL, attributes=attributes)
        self._token = attach(set_span_in_context(self._span))
        return self

    def result(self, content: Any, *, failed: bool) -> None:
        """What the call came to. A fault of the tool is a result too."""
        if failed:
            mark_failed(self._span, "tool_error")
        exchange = current()
        if self._span.is_recording() and captures(stores=exchange is not None and exchange.stores):
            self._span.set_attribute("gen_ai.tool.call.arguments", self._arguments)
            shown = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            self._span.set_attribute("gen_ai.tool.call.result", shown)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        detach(self._token)
        if kind is not None:
            mark_failed(self._span, kind.__name__)
        self._span.end()
