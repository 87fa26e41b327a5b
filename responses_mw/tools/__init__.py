"""The tools that the server runs: the interface that each kind of tool implements, and what a call returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx

from ..crypto import Sealer
from ..protocol.tool_kinds.form import OfferedFunction
from ..protocol.types import Item, Part, Tool
from ..settings import SearchSettings, ToolSettings


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one call. A tool's failure is a result too: the model sees it, and the run continues."""

    content: str | list[Part]
    """What the model reads: a text, or parts of type `input_text` and `input_image`."""
    members: dict[str, Any] = field(default_factory=dict)
    """Members of the call's item: `output`, `error`, `outputs`, `action` and the like."""
    failed: bool = False

    @property
    def size(self) -> int:
        """The number of characters that the model reads."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(part.get("text") or part.get("image_url") or "") for part in self.content)


@dataclass(frozen=True, slots=True)
class ServedFunction(OfferedFunction):
    """A function that the server executes. `call` takes the model's arguments and never raises."""

    call: Callable[[str], Awaitable[ToolResult]]
    kind: str
    """The kind of tool, for metrics."""
    server: str = ""
    """The label of its MCP server, for metrics; `_OTHER` if the operator did not configure the server."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The context of a tool in one run of `owner`. `http` is the client for the operator's own services.

    `earlier` holds the items of the history and of the input. Clients can forge them, so they must never grant permissions.
    """

    settings: ToolSettings
    search: SearchSettings
    http: httpx.AsyncClient
    sealer: Sealer
    owner: str
    earlier: Sequence[Item] = ()
    trace_headers: Mapping[str, str] = field(default_factory=dict)


class ServerTool:
    """One entry of `tools` in one run. It is opened once and always closed. Nothing is sent before that."""

    types: ClassVar[frozenset[str]]
    """The values of `type` that select this kind of tool."""
    sources: Sequence[Mapping[str, Any]] = ()
    """The sources that the answer may cite."""

    def __init__(self, tool: Tool, context: ToolContext) -> None:
        """`tool` has passed `check`."""
        raise NotImplementedError

    @staticmethod
    def check(tool: Tool, path: str, settings: ToolSettings) -> Tool:
        """Check an entry of `tools` at `path` (`tools[0]`) and return it without nulls. Raises `BadRequest`."""
        raise NotImplementedError

    @staticmethod
    def echo(tool: Tool) -> Tool:
        """Remove secrets from an entry before it is shown or stored."""
        return tool

    async def open(self) -> list[ServedFunction]:
        """Return the functions of this entry. Raises `APIError` if it cannot be used."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """End all calls."""


def cut(text: str, max_bytes: int) -> str:
    """Cut `text` at `max_bytes`, adding a note if it was longer."""
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return f"{encoded[:max_bytes].decode(errors='ignore')}\n... ({len(encoded)} bytes in all)"


def failure(message: str, *, kind: str = "http_error", code: int = 502) -> ToolResult:
    """Return the result of a failed MCP call; `kind` and `code` are the type and code in `mcp_call.error`."""
    error: dict[str, Any] = {"type": kind, "code": code, "message": message}
    return ToolResult(f"The tool failed: {message}", {"error": error}, failed=True)
