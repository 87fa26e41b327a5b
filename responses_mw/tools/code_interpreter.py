"""The tool kind `code_interpreter`, which runs the model's Python code in the sandbox service (`docs/sandbox.md`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..protocol.request import checks
from ..protocol.tool_kinds.form import CallForm, as_function, parse_arguments
from ..protocol.types import Tool
from ..settings.groups import ToolSettings
from . import MAX_OUTPUT_BYTES, ServedFunction, ServerTool, ToolContext, ToolResult, cut
from .mcp import SANDBOX_LABEL, check_installed, sandbox_server, target_of

if TYPE_CHECKING:
    from mcp_types import CallToolResult

_AUTO = "auto"
_SANDBOX_MARGIN = 5.0  # seconds added to tools.timeout, so that the sandbox can report its own timeout first
_MAX_ID = 128
_GIB = 1024**3
_MEMORY_LIMITS = {"1g": _GIB, "4g": 4 * _GIB, "16g": 16 * _GIB, "64g": 64 * _GIB}
_NO_OUTPUT = "(no output)"
_FUNCTION = as_function(
    "python",
    "Runs Python code and returns what it printed and the value of its last expression. Variables, imports and files (in "
    "/mnt/data) are kept for later calls. There is no network.",
    {"code": {"type": "string", "description": "Python source"}},
    "code",
)
_LOST = "(The container of earlier calls is lost, with its variables and files. This code ran in a new one.)\n"


def _container(value: Any, path: str) -> str | dict[str, Any]:
    if isinstance(value, str):
        return checks.string(value, path, max_length=_MAX_ID)
    container = checks.mapping(value, path)
    checks.one_of(checks.required(container, "type", path, checks.string), f"{path}.type", {_AUTO})
    if container.get("file_ids"):
        checks.unsupported(f"{path}.file_ids", "files cannot be uploaded, but the code can create files.")
    if "memory_limit" in container:
        checks.one_of(container["memory_limit"], f"{path}.memory_limit", _MEMORY_LIMITS)
    if container.get("network_policy", {"type": "disabled"}) != {"type": "disabled"}:
        checks.unsupported(f"{path}.network_policy", "the sandbox has no network.")
    return container


class CodeInterpreter(ServerTool):
    """The code interpreter in one run. Calls run one after another in the same container. If it is lost, a new one is made.

    With `auto`, the first call uses the container of the last call in the history or, without one, a new container. The sandbox
    refuses containers of other owners. Nothing is sent to the sandbox before the first call.
    """

    def __init__(self, tool: Tool, context: ToolContext) -> None:
        from .mcp_connection import MCPConnection

        container = {"type": tool["container"]} if isinstance(tool["container"], str) else tool["container"]
        calls = (item for item in reversed(context.earlier) if item["type"] == "code_interpreter_call")
        last = next((item.get("container_id") for item in calls), None)
        self.container_id: str | None = (last or None) if container["type"] == _AUTO else container["type"]
        """The container of the next call, or None if the next call needs a new container."""
        self._memory = {"memory_bytes": _MEMORY_LIMITS[container["memory_limit"]]} if "memory_limit" in container else {}
        target = target_of({"server_label": SANDBOX_LABEL}, sandbox_server(context.settings), context)
        self._connection = MCPConnection(replace(target, timeout=target.timeout + _SANDBOX_MARGIN))
        self._turn = asyncio.Lock()

    @staticmethod
    def check(tool: Tool, path: str, settings: ToolSettings) -> Tool:
        if settings.sandbox_url is None:
            checks.unsupported(f"{path}.type", "no sandbox is configured (setting tools.sandbox_url).")
        check_installed(path)
        if tool.get("allowed_callers"):
            checks.unsupported(f"{path}.allowed_callers", "it is not supported yet.")
        return {**tool, "container": checks.required(tool, "container", path, _container)}

    async def aclose(self) -> None:
        """Close the connection to the sandbox. Pending calls fail. An idle container is kept for later responses."""
        await self._connection.aclose()

    async def open(self) -> list[ServedFunction]:
        form = CallForm(
            item="code_interpreter_call",
            members={"container_id": self.container_id or "", "outputs": None},
            argument="code",
            begins=("code_interpreter_call.in_progress",),
            runs=("code_interpreter_call.interpreting",),
            ends=("code_interpreter_call.completed",),
            served=True,
        )
        return [ServedFunction(_FUNCTION, form, self.call, "code_interpreter")]

    async def call(self, arguments: str) -> ToolResult:
        """Run the `code` in `arguments`. Arguments without `code` are themselves run as code.

        If the container of earlier calls no longer exists, the code runs in a new one, and a note is added for the model. The
        result is `failed` if the sandbox cannot run the code, or if the container ends. An exception in the code is no failure.
        """
        from .mcp_session import MCPFailure

        code = (parse_arguments(arguments) or {}).get("code")
        async with self._turn:
            try:
                return await self._run(code if isinstance(code, str) else arguments)
            except MCPFailure as error:
                text = f"The tool failed: {error.message}"
                return ToolResult(text, self._members(text), failed=True)

    async def _run(self, code: str) -> ToolResult:
        note, returned = "", await self._invoke(code)
        if self._is_lost(returned):
            self.container_id, note = None, _LOST
            returned = await self._invoke(code)
        outcome = returned.structured_content or {}
        self.container_id = outcome.get("container_id", self.container_id)
        text = cut(_text(returned), MAX_OUTPUT_BYTES)
        result = ToolResult(note + text, self._members(text), failed=returned.is_error)
        if outcome.get("ended") is not None:
            self.container_id = None
        return result

    def _is_lost(self, returned: CallToolResult) -> bool:
        """Return whether `returned` reports that the container does not exist."""
        if not returned.is_error or returned.structured_content is not None:  # the text is output of the code
            return False
        return f"Container with id '{self.container_id}' not found" in _text(returned)

    async def _invoke(self, code: str) -> CallToolResult:
        arguments = {"code": code, "container_id": self.container_id or _AUTO, **self._memory}
        return await self._connection.invoke("python", arguments)

    def _members(self, text: str) -> dict[str, Any]:
        container = {} if self.container_id is None else {"container_id": self.container_id}
        return {**container, "outputs": [] if text == _NO_OUTPUT else [{"type": "logs", "logs": text}]}


def _text(returned: CallToolResult) -> str:
    return "\n".join(block.text for block in returned.content if block.type == "text")
