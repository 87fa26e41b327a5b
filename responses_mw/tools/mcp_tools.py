"""The tool kind ``mcp``: the tools of an MCP server in one run, their permissions, and the tool lists in the history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from ..crypto import Sealer
from ..protocol.tool_kinds.form import CallForm, OfferedFunction, parse_arguments
from ..protocol.types import Item, Tool
from .mcp import MCPServers, check_mcp_tool, echo
from .tool import MAX_MCP_TOOLS, ServedFunction, ServerToolKind, ToolContext, ToolEntry, ToolResult, failure

if TYPE_CHECKING:
    from .connection import MCPConnection


class MCPEntry(ToolEntry):
    """An MCP server as an entry of ``tools``."""

    def __init__(self, tool: Tool, context: ToolContext) -> None:
        self.label = str(tool["server_label"])
        self._access = MCPAccess.of(tool, context)
        self._server = context.servers.configured_label(tool) or "_OTHER"

    @property
    def listing(self) -> Item | None:
        """The ``mcp_list_tools`` item to send to the client, if it is new."""
        return self._access.listing

    async def open(self) -> list[ServedFunction]:
        return [self._served(tool) for tool in await self._access.open()]

    def approved(self, request: Item, name: str) -> ServedFunction | None:
        """Return the call of an ``mcp_approval_request`` as a function called ``name``, or None if it is not permitted.

        Call after ``open``.
        """
        if not self._access.is_callable(request["name"]):
            return None
        form = self._form(request["name"], approval_request_id=request["id"])
        call = partial(self._call, request["name"], approved=True)
        return ServedFunction(OfferedFunction({"type": "function", "name": name}, form), call, "mcp", self._server)

    async def aclose(self) -> None:
        await self._access.aclose()

    def _served(self, tool: dict[str, Any]) -> ServedFunction:
        name = tool["name"]
        function = {"type": "function", "name": name, "parameters": tool["input_schema"]}
        if tool.get("description"):
            function["description"] = tool["description"]
        form = self._approval_form(name) if self._access.needs_approval(name) else self._form(name)
        call = partial(self._call, name, approved=False)
        return ServedFunction(OfferedFunction(function, form), call, "mcp", self._server)

    def _form(self, name: str, **members: Any) -> CallForm:
        return CallForm(
            item="mcp_call",
            prefix="mcp",
            members={"approval_request_id": None, "name": name, "server_label": self.label, "output": None, "error": None}
            | members,
            text="arguments",
            events="mcp_call_arguments",
            done=("arguments",),
            begins=("mcp_call.in_progress",),
            ends=("mcp_call.completed", "mcp_call.failed"),
            served=True,
        )

    def _approval_form(self, name: str) -> CallForm:
        members = {"name": name, "server_label": self.label}
        return CallForm(
            item="mcp_approval_request", prefix="mcpr", members=members, made=lambda text: {"arguments": text or "{}"}
        )

    async def _call(self, name: str, arguments: str, *, approved: bool) -> ToolResult:
        parsed = parse_arguments(arguments or "{}")
        if parsed is None:
            return _not_json(arguments)
        return await self._access.call(name, parsed, approved=approved)


def _not_json(arguments: str) -> ToolResult:
    text = "The arguments are not a JSON object."
    error = {"type": "mcp_protocol_error", "code": -32602, "message": text}
    return ToolResult(f"{text} They were: {arguments[:200]}", {"error": error}, failed=True)


class MCPAccess:
    """One MCP server in one run.

    It makes every call of the server's tools and checks its permission: the model's calls, calls that the user approved, and
    web searches.
    """

    def __init__(self, tool: Tool, servers: MCPServers, listings: SignedListings, connection: MCPConnection) -> None:
        self.label: str = tool["server_label"]
        self.listing: Item | None = None
        """The server's tools as an item, if the server was asked and the list is new to the client."""
        self._tool = tool
        self._servers = servers
        self._listings = listings
        self._connection = connection
        self._listed: Mapping[str, dict[str, Any]] | None = None

    @classmethod
    def of(cls, tool: Tool, context: ToolContext) -> MCPAccess:
        """Return the access to the server that a checked ``tool`` names."""
        connection = context.servers.open(tool, trace_headers=context.trace_headers, owner=context.owner)
        return cls(tool, context.servers, context.listings, connection)

    async def open(self) -> list[dict[str, Any]]:
        """Return the tools that may be called, from a signed list or else from the server. Raises ``APIError``."""
        tools = self._listings.trusted(self.label, self._connection.url)
        if tools is None:
            tools = [tool for tool in await self._connection.list_tools() if self._is_allowed(tool)]
            self.listing = self._listings.sign(self.label, self._connection.url, tools)
        self._listed = {tool["name"]: tool for tool in tools if self._is_allowed(tool)}
        return list(self._listed.values())

    def is_callable(self, name: str) -> bool:
        """Return whether the server lists the tool, and both the request and the operator allow it. Call after ``open``."""
        return self._listed is not None and name in self._listed

    def needs_approval(self, name: str) -> bool:
        """Return whether a call of the tool requires an ``mcp_approval_response``. Call after ``open``."""
        annotations = (self._listed or {}).get(name, {}).get("annotations")
        return self._servers.needs_approval(self._tool, name, annotations)

    async def call(self, name: str, arguments: dict[str, Any], *, approved: bool) -> ToolResult:
        """Call a tool. A forbidden call returns a failed result.

        ``approved``: the user or the operator approved the call. Raises ``APIError`` if the server has to list its tools first
        and that fails.
        """
        if self._listed is None and self._servers.has_limits(self._tool):
            await self.open()
        if self._listed is not None and name not in self._listed:
            return failure(f"MCP server '{self.label}': the tool '{name[:64]}' may not be called.", code=403)
        if not approved and self.needs_approval(name):
            return failure(f"MCP server '{self.label}': the tool '{name[:64]}' needs an approval.", code=403)
        return await self._connection.call(name, arguments)

    async def aclose(self) -> None:
        await self._connection.aclose()

    def _is_allowed(self, tool: dict[str, Any]) -> bool:
        return self._servers.is_allowed(self._tool, tool["name"], tool.get("annotations"))


_PURPOSE = "mcp_list_tools"
_SIGNED_MEMBERS = ("name", "input_schema", "description", "annotations")


class SignedListings:
    """The ``mcp_list_tools`` items among the ``items`` of one run of ``owner``. The last one of each label is used.

    1. Such an item decides which tools are read-only, and so which may be called and which need an approval. Clients can forge
       items, and items from the input are stored like any others. So a list is trusted only because of its ``signature``,
       never because of its position.
    2. A signature is valid for one owner and one server (its URL), not for another server with the same label.
    3. A list without a valid signature is ignored, not refused: the server is asked for its tools.
    """

    def __init__(self, sealer: Sealer, owner: str, items: Iterable[Item]) -> None:
        """A list of more than ``MAX_MCP_TOOLS`` tools is never trusted, because none is ever signed."""
        self._sealer = sealer
        self._owner = owner
        self._latest = {item["server_label"]: item for item in items if item["type"] == "mcp_list_tools"}

    def trusted(self, label: str, url: str) -> list[dict[str, Any]] | None:
        """Return the tools that the server at ``url`` listed for this owner, or None if there is no validly signed list."""
        item = self._latest.get(label)
        if item is None or len(item["tools"]) > MAX_MCP_TOOLS:
            return None
        signature, tools = item.get("signature"), _plain_tools(item["tools"])
        if not isinstance(signature, str):
            return None
        is_ours = self._sealer.is_signed(signature, _signed_bytes(url, tools), purpose=_PURPOSE, owner=self._owner)
        return tools if is_ours else None

    def sign(self, label: str, url: str, tools: Sequence[dict[str, Any]]) -> Item | None:
        """Return a signed item for the ``tools`` of the server at ``url``, or None if the history contains the same list."""
        item = self._latest.get(label)
        signed = _signed_bytes(url, tools)
        if item is not None and len(item["tools"]) == len(tools) and _signed_bytes(url, item["tools"]) == signed:
            return None
        signature = self._sealer.sign(signed, purpose=_PURPOSE, owner=self._owner)
        return {"server_label": label, "tools": list(tools), "signature": signature}


def _plain_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reduce tools to their signed members. Clients add members, and nulls for missing ones."""
    return [{name: tool[name] for name in _SIGNED_MEMBERS if tool.get(name) is not None} for tool in tools]


def _signed_bytes(url: str, tools: Sequence[dict[str, Any]]) -> bytes:
    return orjson.dumps([url, _plain_tools(tools)], option=orjson.OPT_SORT_KEYS)


KIND = ServerToolKind(frozenset({"mcp"}), lambda tool, path, config: check_mcp_tool(tool, path, config.tools), MCPEntry, echo)
