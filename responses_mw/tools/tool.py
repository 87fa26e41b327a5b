"""The interface of server-side tools: what a kind of tool provides, and what a call returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from ..protocol.tool_kinds.form import OfferedFunction
from ..protocol.types import Item, Part, Tool
from ..settings import SearchSettings, ToolSettings

if TYPE_CHECKING:
    from .mcp import MCPServers
    from .mcp_tools import SignedListings


MAX_MCP_TOOLS = 512
"""Maximum number of tools of an MCP server. The model reads the definitions of all of them in every turn."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one call. A tool's failure is a result too: the model sees it, and the run continues."""

    content: str | list[Part]
    """What the model reads: a text, or parts of type ``input_text`` and ``input_image``."""
    members: dict[str, Any] = field(default_factory=dict)
    """Members of the call's item: ``output``, ``error``, ``outputs``, ``action`` and the like."""
    failed: bool = False

    @property
    def size(self) -> int:
        """The number of characters that the model reads."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(part.get("text") or part.get("image_url") or "") for part in self.content)


@dataclass(frozen=True, slots=True)
class ServedFunction:
    """A function that the server executes. ``call`` takes the model's arguments and never raises."""

    offered: OfferedFunction
    call: Callable[[str], Awaitable[ToolResult]]
    kind: str
    """The kind of tool, for metrics."""
    server: str = ""
    """The label of its MCP server, for metrics; ``_OTHER`` if the operator did not configure the server."""


@dataclass(frozen=True, slots=True)
class ToolConfig:
    """The operator's settings for all tools."""

    tools: ToolSettings
    search: SearchSettings


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The context of a tool in one run of ``owner``.

    ``earlier`` holds the items of the history and of the input. Clients can forge them, so they must never grant permissions.
    """

    config: ToolConfig
    http: httpx.AsyncClient
    servers: MCPServers
    listings: SignedListings
    owner: str
    earlier: Sequence[Item]
    trace_headers: Mapping[str, str]


class ToolEntry:
    """One entry of ``tools`` in one run. It is opened once and always closed."""

    @property
    def sources(self) -> Sequence[Mapping[str, Any]]:
        """The sources that the answer may cite."""
        return ()

    async def open(self) -> list[ServedFunction]:
        """Return the functions of this entry. Raises ``APIError`` if it cannot be used."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """End all calls."""


@dataclass(frozen=True, slots=True)
class ServerToolKind:
    """A kind of tool that the server runs. ``types`` are the values of ``type`` that select it in a request's ``tools``."""

    types: frozenset[str]
    check: Callable[[Tool, str, ToolConfig], Tool]
    """Checks an entry of ``tools`` at a path (``tools[0]``) and returns it without nulls. Raises ``BadRequest``."""
    entry: Callable[[Tool, ToolContext], ToolEntry]
    """Creates the entry of a checked tool."""
    echo: Callable[[Tool], Tool] = lambda tool: tool
    """Removes secrets from an entry before it is shown or stored."""


def cut(text: str, max_bytes: int) -> str:
    """Cut ``text`` at ``max_bytes``, adding a note if it was longer."""
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return f"{encoded[:max_bytes].decode(errors='ignore')}\n... ({len(encoded)} bytes in all)"


def failure(message: str, *, kind: str = "http_error", code: int = 502) -> ToolResult:
    """Return the result of a failed MCP call; ``kind`` and ``code`` are the type and code in ``mcp_call.error``."""
    error: dict[str, Any] = {"type": kind, "code": code, "message": message}
    return ToolResult(f"The tool failed: {message}", {"error": error}, failed=True)
