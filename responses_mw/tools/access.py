"""One MCP server in one run. Every call of a server's tool is made here, and its permission checked: a call of the model's, one
that the user approved, and a web search alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..protocol.types import Item, Tool
from .listings import Listings
from .mcp import MCPServers
from .result import Result

if TYPE_CHECKING:
    from .connection import MCPConnection


class Access:
    """What ``tool``, a checked entry of ``tools``, may do with its server; ``listings`` are those of the run's history."""

    def __init__(self, tool: Tool, servers: MCPServers, listings: Listings, connection: MCPConnection) -> None:
        self.label: str = tool["server_label"]
        self.listing: Item | None = None
        """The list of the server's tools that is new to the client, where the server had to be asked."""
        self._tool = tool
        self._servers = servers
        self._listings = listings
        self._connection = connection
        self._listed: Mapping[str, dict[str, Any]] | None = None

    async def open(self) -> list[dict[str, Any]]:
        """The tools that may be called: from a list that can be believed, else from the server. Raises ``APIError``."""
        tools = self._listings.believed(self.label, self._connection.url)
        if tools is None:
            tools = [tool for tool in await self._connection.list_tools() if self._is_allowed(tool)]
            self.listing = self._listings.made(self.label, self._connection.url, tools)
        self._listed = {tool["name"]: tool for tool in tools if self._is_allowed(tool)}
        return list(self._listed.values())

    def is_callable(self, name: str) -> bool:
        """Whether the server lists the tool, and both the request and the operator allow it. After ``open``."""
        return self._listed is not None and name in self._listed

    def needs_approval(self, name: str) -> bool:
        """Whether a call of the tool waits for an ``mcp_approval_response``. After ``open``."""
        annotations = (self._listed or {}).get(name, {}).get("annotations")
        return self._servers.needs_approval(self._tool, name, annotations)

    async def call(self, name: str, arguments: dict[str, Any], *, approved: bool) -> Result:
        """Carries out the call, ``approved`` by the user or by the operator. One that is not permitted is a failed result.
        Raises ``APIError`` where the server has to be asked first for what it lists, and does not say."""
        from .content import failure

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
