"""Check the server-side tools of a request, and run their calls in a toolbox.

To add a kind of tool, write a subclass of `ServerTool`, and add its `ToolKind` and the class to `KINDS`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from ..auth import Gate
from ..crypto import Sealer
from ..errors import APIError, BadRequest
from ..protocol.tool_kinds.form import CallForm, OfferedFunction, ToolKind
from ..protocol.tool_kinds.registry import CODE_INTERPRETER, MCP, WEB_SEARCH
from ..protocol.types import Chunk, Item, Tool
from ..settings.groups import SearchSettings, ToolSettings
from ..telemetry.tracing import tool_call_span
from ..threads import background_task
from . import ServedFunction, ServerTool, ToolContext, ToolResult, web_search
from .code_interpreter import CodeInterpreter
from .mcp import MCPServer
from .web_search import WebSearch

logger = logging.getLogger(__name__)

KINDS: tuple[tuple[ToolKind, type[ServerTool]], ...] = (
    (MCP, MCPServer),
    (CODE_INTERPRETER, CodeInterpreter),
    (WEB_SEARCH, WebSearch),
)

_CLASSES = {type_: tool for kind, tool in KINDS for type_ in kind.types}
_MAX_APPROVED = 128  # approved calls of one request run concurrently
_MAX_SERVERS = 64
MAX_CLOSING = 256
"""Maximum number of toolboxes that are closed in the background. Further runs end only when their toolboxes are closed."""


@dataclass(eq=False)
class Tools:
    """The server-side tools that are available to all runs. `http` is the client for services of the operator."""

    settings: ToolSettings
    search: SearchSettings
    http: httpx.AsyncClient
    sealer: Sealer
    _has_logged_search: bool = field(default=False, init=False)
    _closing: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def check(self, tools: Sequence[Tool], choice: Any = "auto") -> list[Tool]:
        """Check the server-side tools in `tools`, and the request's `tool_choice`.

        Return the checked tools and, unchanged, all other tools. Pass them to `toolbox`. Raises `BadRequest` if a tool or the
        choice is invalid or not supported.
        """
        checked = [
            _CLASSES[tool["type"]].check(tool, f"tools[{index}]", self.settings) if tool["type"] in _CLASSES else tool
            for index, tool in enumerate(tools)
        ]
        _check_servers(checked)
        web_search.check_choice(choice, checked, self.search)
        if not self._has_logged_search and self.not_offered(checked):
            self._has_logged_search = True
            logger.warning("a request offers web_search, but search.provider is not set: the tool is not offered to the model")
        return checked

    def not_offered(self, tools: Sequence[Tool]) -> list[str]:
        """Return the types of `tools` that are not offered to the model for lack of a search provider."""
        return [tool["type"] for tool in tools if self.search.provider == "none" and tool["type"] in WEB_SEARCH.types]

    def echo(self, tools: Iterable[Tool]) -> list[Tool]:
        """Return `tools` without secrets, for clients and for storage."""
        return [_CLASSES[tool["type"]].echo(tool) if tool["type"] in _CLASSES else tool for tool in tools]

    def toolbox(
        self,
        tools: Iterable[Tool],
        items: Sequence[Item],
        own: Sequence[Item],
        headers: Mapping[str, str],
        owner: str,
        gate: Gate,
    ) -> Toolbox | None:
        """Return the toolbox for a run of `owner`, or None if there is nothing to execute.

        `tools` must have passed `check`. `items` are the history, the input and any output so far. `own` is the input. The
        trace headers in `headers` are sent to tool servers. `gate` is awaited before anything is sent to a tool server.

        Raises `BadRequest` if an approval refers to an unknown approval request, or if the request approves too many calls.
        """
        trace = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        context = ToolContext(self.settings, self.search, self.http, self.sealer, owner, items, trace)
        entries = [_CLASSES[tool["type"]](tool, context) for tool in tools if tool["type"] in _CLASSES]
        approved = _approved(items, own)
        return Toolbox(entries, approved, gate) if entries or approved else None

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

    def check(self, tools: Sequence[Tool], choice: Any = "auto") -> list[Tool]:
        return list(tools)

    def not_offered(self, tools: Sequence[Tool]) -> list[str]:
        return []

    def toolbox(self, *_: object) -> None:
        return None


class Toolbox:
    """The server-side tools of one run. The caller must call `open` once, before the first turn, and always `Tools.close`."""

    def __init__(self, entries: Sequence[ServerTool], approved: Mapping[str, Item], gate: Gate) -> None:
        """`approved` maps the path of each approval in the request to its approval request."""
        self._entries = entries
        self._requests = approved
        self._gate = gate
        self._serving: dict[int, ServedFunction] = {}
        self.offered: list[OfferedFunction] = []
        """The functions to offer to the model, under their original names."""
        self.approved: Chunk | None = None
        """A chat chunk that contains the approved calls, as if the model had just made them. None if no call was approved."""
        self.approved_functions: list[OfferedFunction] = []
        """Functions used by the approved calls. The model may not call these functions, because each call needs an approval."""

    async def open(self) -> None:
        """Open all entries concurrently, and set `offered`, `approved` and `approved_functions`.

        Raises the errors of the gate and of `ServerTool.open`. Raises `BadRequest` if an approved call is not permitted.
        """
        await self._gate()
        try:
            async with asyncio.TaskGroup() as group:
                opening = [group.create_task(entry.open()) for entry in self._entries]
        except ExceptionGroup as faults:  # raise only one error, preferably one that the client caused
            raise min(faults.exceptions, key=lambda fault: fault.status if isinstance(fault, APIError) else 600) from None
        served = [function for task in opening for function in task.result()]
        approved = self._approve()
        self.offered, self.approved_functions = [*served], [*approved]
        self._serving = {id(function.form): function for function in (*served, *approved)}

    @property
    def listings(self) -> list[Item]:
        """The `mcp_list_tools` items to add to the output."""
        return [entry.listing for entry in self._entries if isinstance(entry, MCPServer) and entry.listing is not None]

    @property
    def sources(self) -> list[Mapping[str, Any]]:
        return [source for entry in self._entries for source in entry.sources]

    async def call(self, form: CallForm, arguments: str, call_id: str) -> ToolResult:
        """Call the function of `offered` or `approved_functions` that has this `form` object. Raises the errors of the gate.

        `call_id` is the id of the model's call, which is recorded in the span.
        """
        await self._gate()
        served = self._serving[id(form)]
        name = form.members.get("name", served.name)
        label = form.members.get("server_label", "")
        with tool_call_span(name, arguments, call_id=call_id, label=label, kind=served.kind, server=served.server) as record:
            result = await served.call(arguments)
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
            function = {"name": name, "arguments": request["arguments"]}
            calls.append({"index": index, "id": request["id"], "function": function})
        if calls:
            self.approved = {"choices": [{"index": 0, "delta": {"tool_calls": calls}}]}
        return approved


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
