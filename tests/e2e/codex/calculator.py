"""An MCP server for Codex's own client, over stdio: one tool, `add`."""

from __future__ import annotations

from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return f"the sum is {a + b}"


if __name__ == "__main__":
    server.run()
