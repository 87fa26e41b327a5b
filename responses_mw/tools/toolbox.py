"""Check the server-side tools of a request, and run their calls in a toolbox.

To add a kind of tool, write a subclass of `ServerTool`, and add its `ToolKind` and the class to `KINDS`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import anyio
import httpx

from ..auth import Gate
from ..crypto import Sealer
from ..errors import APIError, BadRequest, NotFound, NotSupported
from ..protocol import checks, origin
from ..protocol.citations import Sources
from ..protocol.tool_kinds.form import OfferedFunction, ToolKind
from ..protocol.tool_kinds.registry import CODE_INTERPRETER, FILE_SEARCH, MCP, WEB_SEARCH
from ..protocol.types import Chunk, Item, Tool
from ..redaction import redacted_values
from ..settings.groups import SearchSettings, ToolSettings
from ..tasks import background_task, by_size, concurrently
from ..telemetry.tracing import tool_call_span
from . import ServedFunction, ServerTool, ToolContext, ToolResult
from .code_interpreter import CodeInterpreter, file_ids_of
from .file_search import FileSearch
from .mcp import MCPServer
from .stores import FileReader, StoreSearch
from .unserved import UnservedTools
from .web_search import WebSearch

logger = logging.getLogger(__name__)

KINDS: tuple[tuple[ToolKind, type[ServerTool]], ...] = (
    (MCP, MCPServer),
    (CODE_INTERPRETER, CodeInterpreter),
    (WEB_SEARCH, WebSearch),
    (FILE_SEARCH, FileSearch),
)

_CLASSES = {type_: tool for kind, tool in KINDS for type_ in kind.types}
_SEARCHES = frozenset({*WEB_SEARCH.types, *FILE_SEARCH.types})
_MAX_APPROVED = 128  # approved calls of one request run concurrently
_MAX_SERVERS = 64
_MAX_NAMED = 64  # objects in tools for an upstream, which are looked up
MAX_CLOSING = 256
"""Maximum number of toolboxes that are closed in the background. Further runs end only when their toolboxes are closed."""


@dataclass(eq=False)
class Tools:
    """The server-side tools that are available to all runs. `http` is the client for services of the operator."""

    settings: ToolSettings
    search: SearchSettings
    http: httpx.AsyncClient
    sealer: Sealer
    stores: StoreSearch | None = None
    files: FileReader | None = None
    unserved: UnservedTools = field(init=False)
    _closing: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.unserved = UnservedTools(self.settings, self.search, has_stores=self.stores is not None)

    def _class(self, tool: Tool) -> type[ServerTool] | None:
        """Return the class that serves `tool`, or None if the client executes it or it is omitted."""
        return _CLASSES.get(tool["type"]) if self.unserved.serves(tool) else None

    def check(self, tools: Sequence[Tool], choice: Any = "auto") -> list[Tool]:
        """Check the server-side tools in `tools`, and the request's `tool_choice`.

        Return the checked tools and, unchanged, all other tools. Pass them to `toolbox`. Raises `BadRequest` if a tool or the
        choice is invalid or not supported.
        """
        self.unserved.check(tools, choice)
        checked = [self._checked(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
        _check_servers(checked)
        return checked

    def _checked(self, tool: Tool, path: str) -> Tool:
        kind = self._class(tool)
        if kind is None:
            return tool
        checked = kind.check(tool, path, self.settings)
        if kind is FileSearch and self.stores is not None:
            self.stores.check(checked, path)
        if kind is CodeInterpreter and self.files is None and file_ids_of(checked):
            checks.unsupported(f"{path}.container.file_ids", "this server has no files.")
        return checked

    def echo(self, tools: Iterable[Tool]) -> list[Tool]:
        """Return `tools` without secrets, for clients and for storage."""
        return [_CLASSES[tool["type"]].echo(tool) if tool["type"] in _CLASSES else tool for tool in tools]

    def cites(self, tools: Iterable[Tool], sources: Sources) -> bool:
        """Return whether the model may cite `sources`, the results of the history, or results of searches with `tools`."""
        return bool(sources) or any(tool["type"] in _SEARCHES and self.unserved.serves(tool) for tool in tools)

    def toolbox(
        self,
        tools: Iterable[Tool],
        items: Sequence[Item],
        own: Sequence[Item],
        headers: Mapping[str, str],
        owner: str,
        gate: Gate,
        sources: Sources,
        caller: Any = None,
    ) -> Toolbox | None:
        """Return the toolbox for a run of `owner`, or None if there is nothing to execute.

        `tools` must have passed `check`. `items` are the history, the input and any output so far. `own` is the input. The
        trace headers in `headers` are sent to tool servers. `gate` is awaited before anything is sent to a tool server.
        Searches add their results to `sources`, and may send requests to the upstream for `caller`.

        Raises `BadRequest` if an approval refers to an unknown approval request, or if the request approves too many calls.
        """
        trace = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        services = self.settings, self.search, self.http, self.sealer
        context = ToolContext(*services, owner, sources, self.stores, self.files, caller, items, trace)
        entries = {
            f"tools[{index}]": kind(tool, context)
            for index, tool in enumerate(tools)
            if (kind := self._class(tool)) is not None
        }
        approved = _approved(items, own)
        return Toolbox(entries, approved, gate) if entries or approved else None

    async def refuse_own_objects(self, tools: Sequence[Tool], owner: str, gate: Gate) -> None:
        """Raise `NotSupported` if one of the `tools` names an object of `owner` here, and another server executes the tool."""

    async def close(self, toolbox: Toolbox) -> None:
        """Close `toolbox`, in the background if possible, because an MCP server may be slow to end its session."""
        task = background_task(toolbox.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        if len(self._closing) > MAX_CLOSING:
            with anyio.CancelScope(shield=True):  # otherwise, runs that are cancelled would exceed the maximum
                await asyncio.wait({task})

    async def aclose(self) -> None:
        """Wait for the toolboxes that are being closed, for about two seconds at most."""
        if self._closing:
            await asyncio.wait(self._closing)


class ForwardedTools(Tools):
    """Replaces `Tools` if the upstream has a Responses API, because such an upstream checks and runs tools itself."""

    def __post_init__(self) -> None:
        self.unserved = UnservedTools(self.settings, self.search, forwards=True)

    def check(self, tools: Sequence[Tool], choice: Any = "auto") -> list[Tool]:
        self.unserved.check(tools, choice)
        return [tool for tool in tools if self.unserved.serves(tool)]

    async def refuse_own_objects(self, tools: Sequence[Tool], owner: str, gate: Gate) -> None:
        named = [*islice(_named_objects(tools), _MAX_NAMED)]
        if not named or (self.stores is None and self.files is None):
            return
        await gate()
        for path, object_id in named:
            if await self._has(object_id, owner):
                message = (
                    f"'{path}' is an object of this server, but the model's upstream executes the tool itself, and has other "
                    "vector stores and files. Use the model of another upstream."
                )
                raise NotSupported(message, param=path)

    async def _has(self, object_id: str, owner: str) -> bool:
        if object_id.startswith("vs_"):
            return self.stores is not None and await self.stores.has_store(object_id, owner)
        try:
            return self.files is not None and await self.files.find(object_id, owner) is not None
        except NotFound:
            return False

    def cites(self, *_: object) -> bool:
        return False

    def toolbox(self, *_: object) -> None:
        return None


class Toolbox:
    """The server-side tools of one run. The caller must call `open` once, before the first turn, and always `Tools.close`."""

    def __init__(self, entries: Mapping[str, ServerTool], approved: Mapping[str, Item], gate: Gate) -> None:
        """`entries` maps paths in the request to tools, and `approved` maps paths of approvals to their approval requests."""
        self._paths = entries
        self._entries = [*entries.values()]
        self._requests = approved
        self._gate = gate
        self.offered: list[OfferedFunction] = []
        """The functions to offer to the model, under their original names."""
        self.approved: Chunk | None = None
        """A chat chunk that contains the approved calls, as if the model had just made them. None if no call was approved."""
        self.approved_functions: list[OfferedFunction] = []
        """Functions used by the approved calls. The model may not call these functions, because each call needs an approval."""

    async def check_access(self) -> None:
        """Check that the owner has the objects that the tools name. Raises `APIError` if not, and the errors of the gate."""
        naming = {path: entry for path, entry in self._paths.items() if entry.names_objects}
        if naming:
            await self._gate()
        for path, entry in naming.items():
            await entry.check_access(path)

    async def restore(self, items: Sequence[Item]) -> None:
        """Add missing results to `items`, the output of another worker. Raises the errors of the gate."""
        await self._gate()
        for entry in self._entries:
            await entry.restore(items)

    async def open(self) -> None:
        """Open all entries concurrently, and set `offered`, `approved` and `approved_functions`.

        Raises the errors of the gate and of `ServerTool.open`. Raises `BadRequest` if an approved call is not permitted.
        """
        await self._gate()
        # Preferably raise an error that the client caused.
        opened = await concurrently((entry.open() for entry in self._entries), _status)
        served = [function for functions in opened for function in functions]
        approved = self._approve()
        self.offered, self.approved_functions = [*served], [*approved]

    @property
    def approvals(self) -> list[str]:
        """The ids of the approval requests whose calls the request approves."""
        return [request["id"] for request in self._requests.values()]

    @property
    def listings(self) -> list[Item]:
        """The `mcp_list_tools` items to add to the output."""
        return [entry.listing for entry in self._entries if isinstance(entry, MCPServer) and entry.listing is not None]

    async def call(self, served: OfferedFunction, arguments: str, call_id: str) -> ToolResult:
        """Call a function of `offered` or `approved_functions`, perhaps under another name. Raises the errors of the gate.

        `call_id` is the id of the model's call, which is recorded in the span.
        """
        await self._gate()
        assert isinstance(served, ServedFunction)
        name = served.form.members.get("name", served.name)
        label = served.form.members.get("server_label", "")
        with tool_call_span(name, arguments, call_id=call_id, label=label, kind=served.kind, server=served.server) as record:
            result = await served.call(arguments)
            result = await by_size(result.size, _redacted, result)
            record(result.content, result.failed)
        return result

    async def aclose(self) -> None:
        await asyncio.gather(*(entry.aclose() for entry in self._entries))

    def _approve(self) -> list[ServedFunction]:
        """Set `approved` and return the functions of the approved calls."""
        calls: list[dict[str, Any]] = []
        approved: list[ServedFunction] = []
        servers = {entry.label: entry for entry in self._entries if isinstance(entry, MCPServer)}
        for index, (path, request) in enumerate(self._requests.items()):
            name = f"approved_{index}"
            approved.append(_approved_function(servers, request, path, name))
            calls.append({**origin.chat_call(request, name, request["arguments"]), "index": index})
        if calls:
            self.approved = {"choices": [{"index": 0, "delta": {"tool_calls": calls}}]}
        return approved


def _status(error: Exception) -> int:
    return error.status if isinstance(error, APIError) else 600


def _named_objects(tools: Sequence[Tool]) -> Iterator[tuple[str, str]]:
    """Yield the path and the id of each vector store and file that tools name. The tools may be invalid."""
    for index, tool in enumerate(tools):
        container = tool.get("container")
        lists = {
            "vector_store_ids": tool.get("vector_store_ids"),
            "container.file_ids": container.get("file_ids") if isinstance(container, dict) else None,
        }
        for name, ids in lists.items():
            for place, one in enumerate(ids if isinstance(ids, list) else ()):
                if isinstance(one, str):
                    yield f"tools[{index}].{name}[{place}]", one


def _redacted(result: ToolResult) -> ToolResult:
    """Return `result` without secrets, which a tool server may have received from this server and repeated."""
    return replace(result, content=redacted_values(result.content), members=redacted_values(result.members))


def _check_servers(tools: Sequence[Tool]) -> None:
    labels = [tool["server_label"] for tool in tools if tool["type"] == "mcp"]
    if len(labels) > _MAX_SERVERS:  # every server is asked for its tools
        message = f"Invalid 'tools': more than {_MAX_SERVERS} MCP servers."
        raise BadRequest(message, param="tools", code="array_above_max_length")
    if len(set(labels)) < len(labels):
        message = "Invalid 'tools': two MCP servers have the same 'server_label'."
        raise BadRequest(message, param="tools", code="invalid_value")


def _approved_function(servers: Mapping[str, MCPServer], request: Item, path: str, name: str) -> ServedFunction:
    """Return a function called `name` for the approval request `request`.

    Raises `BadRequest` if the server is not in `servers`, or if the tool may not be called. The error names `path`, the path
    of the approval.
    """
    label = request["server_label"]
    if label not in servers:
        message = f"The MCP server '{label}' of the approved call is not in 'tools'."
        raise BadRequest(message, param="tools", code="invalid_value")
    served = servers[label].approved(request, name)
    if served is None:
        why = f"the MCP server '{label}' does not list a tool '{request['name'][:64]}', or the tool is not allowed."
        raise BadRequest(f"The approved call cannot be made: {why}", param=path, code="invalid_value")
    return served


def _approved(items: Sequence[Item], own: Sequence[Item]) -> dict[str, Item]:
    """Map the path of each approval in `own`, the request's input, to its approval request in `items`.

    Calls that have already been made are omitted. A forged approval request is harmless, because `Toolbox.open` checks whether
    the call is permitted.
    """
    answers = [(index, item) for index, item in enumerate(own) if item["type"] == "mcp_approval_response"]
    if not answers:
        return {}
    requests = {item["id"]: item for item in items if item["type"] == "mcp_approval_request"}
    called = {item.get("approval_request_id") for item in items if item["type"] == "mcp_call"}
    approved: dict[str, Item] = {}
    for index, item in answers:
        asked, where = item["approval_request_id"], f"input[{index}].approval_request_id"
        if asked not in requests:
            raise BadRequest(f"No approval request found with id '{asked}'.", param=where, code="invalid_value")
        if not item["approve"] or asked in called:
            continue
        if len(approved) == _MAX_APPROVED:
            raise BadRequest(f"A request can approve at most {_MAX_APPROVED} calls.", param=where, code="invalid_value")
        called.add(asked)
        approved[where] = requests[asked]
    return approved
