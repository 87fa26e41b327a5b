"""The span of a call of a hosted tool (OpenTelemetry, "Execute tool span")."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Self

from opentelemetry.context import attach, detach
from opentelemetry.trace import SpanKind, set_span_in_context

from .context import current_request
from .tracing import TRACER, captures_content, mark_failed


class ToolCallSpan:
    """A context manager that traces a call of the tool `name` with `arguments` (JSON). Spans of the MCP SDK become children."""

    def __init__(self, name: str, arguments: str) -> None:
        self._name = name
        self._arguments = arguments

    def __enter__(self) -> Self:
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": self._name,
            "gen_ai.tool.type": "extension",  # the conventions' term for a tool that the server calls itself
        }
        request = current_request()
        if request is not None and request.response_id:
            attributes["responses_mw.response.id"] = request.response_id
        self._span = TRACER.start_span(f"execute_tool {self._name}", kind=SpanKind.INTERNAL, attributes=attributes)
        self._token = attach(set_span_in_context(self._span))
        return self

    def result(self, content: Any, *, failed: bool) -> None:
        """Record what the call returned. A tool's failure is a result too."""
        if failed:
            mark_failed(self._span, "tool_error")
        request = current_request()
        if self._span.is_recording() and captures_content(stores=request is not None and request.stores):
            self._span.set_attribute("gen_ai.tool.call.arguments", self._arguments)
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            self._span.set_attribute("gen_ai.tool.call.result", text)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        detach(self._token)
        if kind is not None:
            mark_failed(self._span, kind.__name__)
        self._span.end()
