"""MCP servers as found in the wild: with and without sessions or bearer tokens, slow, failing, and breaking off."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(24)).decode()
TOKEN = "token-of-the-caller"
READ_ONLY = ToolAnnotations(read_only_hint=True)


def weather() -> MCPServer[None]:
    """Create a server with a tool for each possible outcome of a call."""
    server = MCPServer("weather", log_level="CRITICAL")

    @server.tool(description="The weather of a city.", annotations=READ_ONLY)
    def get_weather(city: str) -> str:
        return f"Sunny in {city}."

    @server.tool(structured_output=False)
    async def sleep(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    @server.tool(structured_output=False)
    def fail(why: str) -> str:
        raise ToolError(why)

    @server.tool(structured_output=False)
    def long(size: int) -> str:
        return "é" * size

    @server.tool(structured_output=False)
    def headers(context: Context[Any, Any]) -> str:
        """The headers that the call came with."""
        assert context.headers is not None
        return json.dumps(dict(context.headers))

    _add_contents(server)
    return server


def _add_contents(server: MCPServer[None]) -> None:
    @server.tool(structured_output=False)
    def picture() -> CallToolResult:
        text = TextContent(type="text", text="A pixel:")
        return CallToolResult(content=[text, ImageContent(type="image", data=PIXEL, mime_type="image/png")])

    @server.tool(structured_output=False)
    def assorted() -> CallToolResult:
        note = TextResourceContents(uri="file:///note.txt", text="a note", mime_type="text/plain")
        archive = BlobResourceContents(uri="file:///a.zip", blob="AAAA", mime_type="application/zip")
        return CallToolResult(
            content=[
                EmbeddedResource(type="resource", resource=note),
                EmbeddedResource(type="resource", resource=archive),
                ResourceLink(type="resource_link", uri="file:///b.txt", name="b", description="another"),
                AudioContent(type="audio", data="AAAA", mime_type="audio/wav"),
                ImageContent(type="image", data="not base64!", mime_type="image/png"),
            ]
        )

    @server.tool(structured_output=False)
    def pieces(count: int, pictures: bool) -> CallToolResult:
        piece = (
            ImageContent(type="image", data=PIXEL, mime_type="image/png") if pictures else TextContent(type="text", text="x")
        )
        return CallToolResult(content=[piece] * count)

    @server.tool(structured_output=False)
    def structured() -> CallToolResult:
        return CallToolResult(content=[], structured_content={"degrees": 21})


class Bearer:
    """Refuses requests that do not carry the token, with `status`."""

    def __init__(self, app: ASGIApp, status: int = 401) -> None:
        self._app = app
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (b"authorization", f"Bearer {TOKEN}".encode()) in scope["headers"]:
            await self._app(scope, receive, send)
        else:
            await answer(send, self._status, b'{"error": "invalid_token"}')


class Older:
    """A server from before 2026, which has sessions and no `server/discover`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive) if scope["type"] == "http" and scope["method"] == "POST" else None
        if body is not None and b"server/discover" in body:
            await answer(send, 400, b'{"jsonrpc": "2.0", "id": null, "error": {"code": -32601, "message": "no such method"}}')
            return
        await self._app(scope, receive if body is None else replay(body, receive), send)


@dataclass
class Watched:
    """Records the requests of an application, and those that the client left before their end."""

    app: ASGIApp
    methods: list[str] = field(default_factory=list)
    rpc: list[str] = field(default_factory=list)
    """The JSON-RPC methods that were called."""
    left: list[str] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.methods.append(scope["method"])
        body = await body_of(receive)
        rpc = str(json.loads(body).get("method")) if body else scope["method"]
        self.rpc.append(rpc)
        ended = False

        async def sent(message: Message) -> None:
            nonlocal ended
            ended = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        async def watch() -> None:
            await receive()
            if not ended:
                self.left.append(rpc)

        watching = asyncio.create_task(watch())
        try:
            await self.app(scope, replay(body, receive), sent)
        finally:
            watching.cancel()


class Wedging:
    """Stops answering once `wedged` is true."""

    def __init__(self, app: ASGIApp) -> None:
        self.wedged = False
        self.waiting = 0
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.wedged:
            await self._app(scope, receive, send)
            return
        self.waiting += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        self.waiting -= 1


class Breaking:
    """Begins the answer to each `tools/call`, with `content_type`, and then breaks the connection."""

    def __init__(self, app: ASGIApp, content_type: bytes) -> None:
        self._app = app
        self._content_type = content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive) if scope["type"] == "http" and scope["method"] == "POST" else None
        if body is None or b"tools/call" not in body:
            await self._app(scope, receive if body is None else replay(body, receive), send)
            return
        headers = [(b"content-type", self._content_type), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"jsonrpc": ', "more_body": True})
        raise ConnectionResetError


def answering(status: int, body: bytes = b"", headers: list[tuple[bytes, bytes]] | None = None) -> ASGIApp:
    """Create an application that gives every request the same answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await answer(send, status, body, headers)
        else:
            await _lifespan(receive, send)

    return app


async def _lifespan(receive: Receive, send: Send) -> None:
    for step in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{step}.complete"})


async def answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    given = headers if headers is not None else [(b"content-type", b"application/json")]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*given, length]})
    await send({"type": "http.response.body", "body": body})


async def body_of(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body again, and then the following messages."""
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again
