"""An MCP server with one tool, for mcp_approval.py: http://127.0.0.1:8001/mcp."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("weather")


@server.tool()
def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"It is sunny in {city}."


if __name__ == "__main__":
    server.run("streamable-http", port=8001)
