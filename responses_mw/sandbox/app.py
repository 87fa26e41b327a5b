"""Serve the sandbox as an MCP server at `/mcp` with one tool, `python`."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent
from pydantic import Field
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..auth import CONTAINER_OWNER_HEADER
from . import MIN_MEMORY, SandboxSettings
from .containers import Containers, PythonResult, SandboxError, strongest_isolation
from .jail.isolation import Isolation, hide

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

HEALTH = "/health"

_INSTRUCTIONS = (
    "Run Python code. Returns the printed output and the value of the last expression. Variables, imports and files are kept "
    "for later calls in the same container. There is no network access, and packages cannot be installed."
)


def create_app(settings: SandboxSettings, isolation: Isolation) -> ASGIApp:
    """Create the ASGI application, which runs containers with `isolation`. If a token is set, callers must send it."""
    containers = Containers(settings, isolation)

    @asynccontextmanager
    async def lifespan(_: MCPServer[None]) -> AsyncIterator[None]:
        async with containers:
            yield

    server = MCPServer("responses-mw sandbox", instructions=_INSTRUCTIONS, lifespan=lifespan, log_level="WARNING")
    _add_tool(server, containers)
    server.custom_route(HEALTH, methods=["GET"])(_health)
    app = server.streamable_http_app(stateless_http=True, host=settings.host)
    return app if settings.token is None else _BearerToken(app, settings.token.get_secret_value())


def _add_tool(server: MCPServer[None], containers: Containers) -> None:
    @server.tool(description=_INSTRUCTIONS, structured_output=True)
    async def python(
        context: Context[Any, Any],
        code: Annotated[str, Field(description="Python code to run")],
        container_id: Annotated[str, Field(description="ID of the container; 'auto' creates a new container")] = "auto",
        memory_bytes: Annotated[int | None, Field(ge=MIN_MEMORY, description="lower memory limit for a new container")] = None,
    ) -> Annotated[CallToolResult, PythonResult]:
        owner = (context.headers or {}).get(CONTAINER_OWNER_HEADER, "")  # a header, because the model chooses the arguments
        try:
            outcome = await containers.run(code, None if container_id == "auto" else container_id, memory_bytes, owner)
        except SandboxError as error:
            raise ToolError(str(error)) from error
        content = [TextContent(type="text", text=_text(outcome))]
        return CallToolResult(content=content, structured_content=outcome.model_dump(), is_error=outcome.ended is not None)


async def _health(_: Request) -> Response:
    return PlainTextResponse("ok")


def serve(settings: SandboxSettings) -> None:
    """Run the sandbox until a signal stops it. If the available isolation is too weak, exit with an error message."""
    import uvicorn

    try:
        isolation = asyncio.run(strongest_isolation(settings))
    except SandboxError as error:
        sys.exit(f"responses-mw sandbox: {error}")
    hide()  # containers may run as the same user and must not inspect this process
    print(f"responses-mw sandbox: http://{settings.host}:{settings.port}/mcp, isolation: {isolation.name}", flush=True)  # noqa: T201
    uvicorn.run(create_app(settings, isolation), host=settings.host, port=settings.port, log_level="warning", lifespan="on")


def _text(outcome: PythonResult) -> str:
    parts = [part.rstrip("\n") for part in (outcome.stdout, outcome.stderr, outcome.result, outcome.error) if part]
    if outcome.files:
        parts.append("Files: " + ", ".join(f"{file.name} ({file.size} bytes)" for file in outcome.files))
    if outcome.ended is not None:
        parts.append(f"The container {outcome.container_id} is lost, with its variables and files: {outcome.ended}.")
    return "\n".join(parts) or "(no output)"


class _BearerToken:
    """Refuses requests without the bearer token, except for the health check."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != HEALTH:
            given = Headers(scope=scope).get("authorization", "").encode()
            if not secrets.compare_digest(given, self._expected):
                refusal = JSONResponse({"error": "unauthorized"}, 401, headers={"www-authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)
