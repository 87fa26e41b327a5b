"""Server-side tools: the interface that each kind of tool implements, and the result of a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..crypto import Sealer
from ..protocol.citations import Sources
from ..protocol.tool_kinds.form import OfferedFunction
from ..protocol.types import Item, Part, Tool
from ..redaction import redacted
from ..settings.groups import SearchSettings, ToolSettings
from .stores import FileReader, StoreSearch

MAX_OUTPUT_BYTES = 1024 * 1024
"""Maximum size in bytes of a tool's output, and of the definitions of an MCP server's tools."""
MAX_MCP_TOOLS = 512
"""Maximum number of tools of an MCP server. The definitions of all tools are sent to the model in every turn."""
_LONGEST_SECRET = 16 * 1024


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one tool call. A failure is passed to the model, and the run continues."""

    content: str | list[Part]
    """The content for the model: a text, or parts of type `input_text` and `input_image`."""
    members: dict[str, Any] = field(default_factory=dict)
    """Members to add to the call's item, such as `output`, `error`, `outputs` or `action`."""
    failed: bool = False

    @property
    def size(self) -> int:
        """The number of characters of the content, including image URLs."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(part.get("text") or part.get("image_url") or "") for part in self.content)


@dataclass(frozen=True, slots=True)
class ServedFunction(OfferedFunction):
    """A function that the server executes."""

    call: Callable[[str], Awaitable[ToolResult]]
    """Executes the function with the model's arguments. If the tool fails, the result has `failed` set."""
    kind: str
    """The kind of tool, as a metric label."""
    server: str = ""
    """The metric label of the MCP server: `_OTHER` if the operator did not configure it, "" if the tool is not an MCP tool."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What the tools of one run can use. `owner` is the owner of the run.

    Use `http` only for services that the operator has configured. `earlier` contains the items of the history, the input and,
    if another worker began the run, its output. Clients can forge items, so permissions must never be derived from them.
    """

    settings: ToolSettings
    search: SearchSettings
    http: httpx.AsyncClient
    sealer: Sealer
    owner: str
    sources: Sources
    """The numbered results of the searches in `earlier`. Searches add their results."""
    stores: StoreSearch | None = None
    """Searches vector stores. None if this server has none."""
    files: FileReader | None = None
    """Reads uploaded files. None if this server has none."""
    caller: Any = None
    """The caller of the run, for requests to the upstream."""
    earlier: Sequence[Item] = ()
    trace_headers: Mapping[str, str] = field(default_factory=dict)


class ServerTool:
    """Base class of the tools that the server executes. An instance serves one entry of a request's `tools` in one run.

    Call `open` once, and always call `aclose`. Nothing is sent to a tool server before `open`.
    """

    names_objects: bool = False
    """Whether the entry names files or vector stores of the owner."""

    def __init__(self, tool: Tool, context: ToolContext) -> None:
        """`tool` must have been returned by `check`."""
        raise NotImplementedError

    @staticmethod
    def check(tool: Tool, path: str, settings: ToolSettings) -> Tool:
        """Check the entry at `path`, and return it for `__init__`. Raises `BadRequest` if it is invalid or not supported."""
        raise NotImplementedError

    @staticmethod
    def echo(tool: Tool) -> Tool:
        """Return the entry without secrets, for clients and for storage."""
        return tool

    async def check_access(self, path: str) -> None:
        """Check that the owner has the objects that the entry at `path` names. Raises `APIError` if not."""

    async def open(self) -> list[ServedFunction]:
        """Prepare the entry for calls and return its functions. Raises `APIError` if the entry cannot be used."""
        raise NotImplementedError

    async def restore(self, items: Sequence[Item]) -> None:
        """Find missing results of calls in `items`, the output of another worker, and add them to the items if possible."""

    async def aclose(self) -> None:
        """Release the entry's resources. Pending calls may fail."""


def cut(text: str, max_bytes: int) -> str:
    """Return `text`. If it is longer than `max_bytes` in UTF-8, truncate it, and append a note with the total size.

    The truncated text contains no secret, because the beginning of a secret would not be recognized later.
    """
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    shown = redacted(encoded[: max_bytes + _LONGEST_SECRET].decode(errors="ignore")).encode()
    if len(encoded) > max_bytes + _LONGEST_SECRET:  # the last secret may be incomplete here, too
        shown = shown[:-_LONGEST_SECRET]
    return f"{shown[:max_bytes].decode(errors='ignore')}\n... ({len(encoded)} bytes in all)"


def failure(message: str, *, kind: str = "http_error", code: int = 502) -> ToolResult:
    """Return the result of a failed MCP call. `kind` and `code` are the error's `type` and `code` in the `mcp_call` item."""
    error: dict[str, Any] = {"type": kind, "code": code, "message": message}
    return ToolResult(f"The tool failed: {message}", {"error": error}, failed=True)
