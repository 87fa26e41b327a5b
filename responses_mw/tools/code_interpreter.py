"""The tool kind ``code_interpreter``: the sandbox service runs the model's Python code (``docs/sandbox.md``)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..auth import ANONYMOUS, CONTAINER_OWNER_HEADER, container_owner
from ..protocol.request import checks
from ..protocol.tool_kinds.form import CallForm, OfferedFunction, parse_arguments
from ..protocol.types import Tool
from ..settings import ToolSettings
from .mcp import check_installed
from .tool import ServedFunction, ServerToolKind, ToolContext, ToolEntry, ToolResult, cut

if TYPE_CHECKING:
    from mcp_types import CallToolResult

AUTO = "auto"

_SANDBOX_MARGIN = 5.0
"""Seconds added to ``tools.timeout``, so that the sandbox can report its own timeout first."""
_MAX_ID = 128
_GIB = 1024**3
_MEMORY_LIMITS = {"1g": _GIB, "4g": 4 * _GIB, "16g": 16 * _GIB, "64g": 64 * _GIB}
_NO_OUTPUT = "(no output)"
_FUNCTION: Tool = {
    "type": "function",
    "name": "python",
    "description": "Runs Python code and returns what it printed and the value of its last expression. Variables, imports and "
    "files (in /mnt/data) are kept for later calls. There is no network.",
    "parameters": {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python source"}},
        "required": ["code"],
        "additionalProperties": False,
    },
}
_LOST = "(The container of earlier calls is lost, with its variables and files. This code ran in a new one.)\n"


def check_code_interpreter(tool: Tool, path: str, settings: ToolSettings) -> Tool:
    """Check a ``code_interpreter`` entry of ``tools`` at ``path``. Raises ``BadRequest``."""
    if settings.sandbox_url is None:
        checks.unsupported(f"{path}.type", "no sandbox is configured (setting tools.sandbox_url).")
    check_installed(path)
    if tool.get("allowed_callers"):
        checks.unsupported(f"{path}.allowed_callers", "it is not supported yet.")
    container = checks.required(tool, "container", path, lambda value, _: value)
    return {**tool, "container": _container(container, f"{path}.container")}


def _container(value: Any, path: str) -> str | dict[str, Any]:
    if isinstance(value, str):
        return checks.string(value, path, max_length=_MAX_ID)
    container = checks.mapping(value, path)
    checks.one_of(checks.required(container, "type", path, checks.string), f"{path}.type", {AUTO})
    if container.get("file_ids"):
        checks.unsupported(f"{path}.file_ids", "files cannot be uploaded: the code can write its own.")
    if "memory_limit" in container:
        checks.one_of(container["memory_limit"], f"{path}.memory_limit", _MEMORY_LIMITS)
    if container.get("network_policy", {"type": "disabled"}) != {"type": "disabled"}:
        checks.unsupported(f"{path}.network_policy", "the sandbox has no network.")
    return container


def named_container(tool: Tool) -> str | None:
    """Return the container id that a checked tool names, or None for an automatic choice."""
    container = tool["container"]
    return container if isinstance(container, str) and container != AUTO else None


def memory_limit(tool: Tool) -> int | None:
    """Return the maximum memory of a new container in bytes, or None if the checked tool does not set it."""
    container = tool["container"]
    wanted = container.get("memory_limit") if isinstance(container, dict) else None
    return None if wanted is None else _MEMORY_LIMITS[wanted]


class CodeInterpreter(ToolEntry):
    """The code interpreter as an entry of ``tools``. All calls of a run use one container, one at a time.

    ``container_id`` comes from an earlier call in the history or from the request. The sandbox finds it only if it belongs to
    ``owner``. ``memory_bytes`` lowers the maximum memory of a new container. Nothing is sent before the first call.
    """

    def __init__(
        self,
        settings: ToolSettings,
        container_id: str | None = None,
        *,
        memory_bytes: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
        owner: str = ANONYMOUS,
    ) -> None:
        from .connection import MCPConnection
        from .session import MCPLimits, MCPTarget

        assert settings.sandbox_url is not None
        headers = {**(trace_headers or {}), CONTAINER_OWNER_HEADER: container_owner(owner)}
        if settings.sandbox_token is not None:
            headers["authorization"] = f"Bearer {settings.sandbox_token.get_secret_value()}"
        target = MCPTarget("code_interpreter", settings.sandbox_url, headers, allow_private=True, credentials_of_caller=False)
        limits = MCPLimits(timeout=settings.timeout + _SANDBOX_MARGIN)
        self._max_bytes = limits.output_bytes
        self._connection = MCPConnection(target, limits)
        self._memory = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
        self._turn = asyncio.Lock()
        self.container_id = container_id
        """The container of the next call; None for a new one."""

    async def aclose(self) -> None:
        """End all calls. The container is kept for later responses."""
        await self._connection.aclose()

    async def open(self) -> list[ServedFunction]:
        form = CallForm(
            item="code_interpreter_call",
            prefix="ci",
            members={"container_id": self.container_id or "", "outputs": None},
            text="code",
            argument="code",
            events="code_interpreter_call_code",
            done=("code",),
            begins=("code_interpreter_call.in_progress",),
            runs=("code_interpreter_call.interpreting",),
            ends=("code_interpreter_call.completed",),
            served=True,
        )
        return [ServedFunction(OfferedFunction(_FUNCTION, form), self._call_with, "code_interpreter")]

    async def _call_with(self, arguments: str) -> ToolResult:
        parsed = parse_arguments(arguments)
        code = parsed.get("code") if parsed else None
        return await self.call(code if isinstance(code, str) else arguments)

    async def call(self, code: str) -> ToolResult:
        """Run ``code`` and return what it printed and its value, or its traceback.

        The result's members are ``container_id`` (absent if no container was reached) and ``outputs``. The result is
        ``failed`` if the sandbox is unavailable or ended the container, not if the code raised.
        """
        from .connection import CallFailed

        async with self._turn:
            try:
                return await self._run(code)
            except CallFailed as error:
                reason = str(error.result.content)
                return ToolResult(reason, {**self._shown(), "outputs": _logs(reason)}, failed=True)

    async def _run(self, code: str) -> ToolResult:
        remark = ""
        returned = await self._invoke(code)
        if returned.structured_content is None and _is_lost(returned, self.container_id):
            self.container_id, remark = None, _LOST
            returned = await self._invoke(code)
        return self._result(returned, remark)

    async def _invoke(self, code: str) -> CallToolResult:
        arguments = {"code": code, "container_id": self.container_id or AUTO, **self._memory}
        return await self._connection.invoke("python", arguments)

    def _result(self, returned: CallToolResult, remark: str) -> ToolResult:
        outcome = returned.structured_content or {}
        text = cut(_text(returned), self._max_bytes)
        self.container_id = outcome.get("container_id", self.container_id)
        members = {**self._shown(), "outputs": [] if text == _NO_OUTPUT else _logs(text)}
        if outcome.get("ended") is not None:
            self.container_id = None
        return ToolResult(remark + text, members, failed=returned.is_error)

    def _shown(self) -> dict[str, Any]:
        return {} if self.container_id is None else {"container_id": self.container_id}


def _is_lost(returned: CallToolResult, container_id: str | None) -> bool:
    return returned.is_error and container_id is not None and f"Container with id '{container_id}' not found" in _text(returned)


def _text(returned: CallToolResult) -> str:
    return "\n".join(block.text for block in returned.content if block.type == "text")


def _logs(text: str) -> list[dict[str, str]]:
    return [{"type": "logs", "logs": text}]


def _entry(tool: Tool, context: ToolContext) -> CodeInterpreter:
    """Create the entry of a checked tool. By default, it continues in the container of the last call in the history."""
    calls = (item for item in reversed(context.earlier) if item["type"] == "code_interpreter_call")
    last = next((item.get("container_id") for item in calls), None)
    return CodeInterpreter(
        context.config.tools,
        named_container(tool) or last or None,
        memory_bytes=memory_limit(tool),
        trace_headers=context.trace_headers,
        owner=context.owner,
    )


KIND = ServerToolKind(
    frozenset({"code_interpreter"}),
    lambda tool, path, config: check_code_interpreter(tool, path, config.tools),
    _entry,
)
