"""The tool kind `code_interpreter`, which runs the model's Python code in the sandbox service (`docs/guides/sandbox.md`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import APIError
from ..protocol import checks
from ..protocol.tool_kinds.form import CallForm, as_function, check_callers
from ..protocol.tool_kinds.free_text import text_in
from ..protocol.types import Tool
from ..settings.groups import ToolSettings
from . import MAX_OUTPUT_BYTES, ServedFunction, ServerTool, ToolContext, ToolResult, cut
from .container_files import MAX_FILES, ContainerFiles, NotWritten
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
    "Run Python code. Returns the printed output and the value of the last expression. Variables, imports and files in "
    "/mnt/data are kept for later calls. There is no network access.",
    {"code": {"type": "string", "description": "Python code to run."}},
    "code",
)
_LOST = "(The container of earlier calls was lost, with all variables and files. This code ran in a new container.)\n"


def _container(value: Any, path: str) -> str | dict[str, Any]:
    if isinstance(value, str):
        return checks.string(value, path, max_length=_MAX_ID)
    container = checks.mapping(value, path)
    checks.one_of(checks.required(container, "type", path, checks.string), f"{path}.type", {_AUTO})
    if "file_ids" in container:
        checks.each(partial(checks.string, pattern=r"[\w-]{1,128}"), max_length=MAX_FILES)(
            container["file_ids"], f"{path}.file_ids"
        )
    if "memory_limit" in container:
        checks.one_of(container["memory_limit"], f"{path}.memory_limit", _MEMORY_LIMITS)
    if container.get("network_policy", {"type": "disabled"}) != {"type": "disabled"}:
        checks.unsupported(f"{path}.network_policy", "the sandbox has no network.")
    return container


def file_ids_of(tool: Tool) -> list[str]:
    """Return the ids of the files for the container."""
    container = tool["container"]
    return list(container.get("file_ids", ())) if isinstance(container, dict) else []


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
        self._files: ContainerFiles | None = None
        if (file_ids := file_ids_of(tool)) and context.files is not None:
            self._files = ContainerFiles(file_ids, context.files, context.owner)
        self.names_objects = self._files is not None
        self._filled: str | None = None  # the container that has the files

    @staticmethod
    def check(tool: Tool, path: str, settings: ToolSettings) -> Tool:
        check_installed(path)
        if "allowed_callers" in tool:
            check_callers(tool["allowed_callers"], f"{path}.allowed_callers")
        return {**tool, "container": checks.required(tool, "container", path, _container)}

    async def aclose(self) -> None:
        """Close the connection to the sandbox. Pending calls fail. An idle container is kept for later responses."""
        await self._connection.aclose()

    async def check_access(self, path: str) -> None:
        """Raise `BadRequest` or `TooLarge` if the files do not exist, belong to another owner or are too large."""
        if self._files is not None:
            await self._files.check(f"{path}.container.file_ids")

    async def open(self) -> list[ServedFunction]:
        await self.check_access("tools")
        form = CallForm(
            item="code_interpreter_call",
            members={"container_id": self.container_id or "", "outputs": None},
            argument="code",
            begins=("code_interpreter_call.in_progress",),
            runs=("code_interpreter_call.interpreting",),
            ends=("code_interpreter_call.completed",),
            served=True,
        )
        return [ServedFunction(self._function(), form, self.call, "code_interpreter")]

    def _function(self) -> Tool:
        if self._files is None:
            return _FUNCTION
        names = ", ".join(map(repr, self._files.names.values()))
        return {**_FUNCTION, "description": f"{_FUNCTION['description']} Files in the working directory: {names}."}

    async def call(self, arguments: str) -> ToolResult:
        """Run the code that `text_in` finds in `arguments`.

        If the container of earlier calls no longer exists, the code runs in a new one, and a note is added for the model. The
        result is `failed` if the sandbox cannot run the code, or if the container ends. An exception in the code is no failure.
        """
        from .mcp_session import MCPFailure

        async with self._turn:
            try:
                return await self._run(text_in(arguments, "code"))
            except (MCPFailure, APIError, NotWritten) as error:
                text = f"The tool failed: {error if isinstance(error, NotWritten) else error.message}"
                return ToolResult(text, self._members(text), failed=True)

    async def _run(self, code: str) -> ToolResult:
        note, returned = "", await self._invoke_with_files(code)
        if self._is_lost(returned):
            self.container_id, note = None, _LOST
            returned = await self._invoke_with_files(code)
        outcome = returned.structured_content or {}
        self.container_id = outcome.get("container_id", self.container_id)
        text = cut(_text(returned), MAX_OUTPUT_BYTES)
        result = ToolResult(note + text, self._members(text), failed=returned.is_error)
        if outcome.get("ended") is not None:
            self.container_id = None
        return result

    async def _invoke_with_files(self, code: str) -> CallToolResult:
        """Write the files if the container may lack them, and run the code.

        If the sandbox cannot run the code that writes the files, return the sandbox's result. Raises `NotWritten` if the code
        itself fails.
        """
        if self._files is not None and (self.container_id is None or self.container_id != self._filled):
            try:
                await self._files.write(self._invoke_in_container)
            except NotWritten as error:
                if not error.result.is_error:
                    raise
                return error.result
            self._filled = self.container_id
        return await self._invoke(code)

    async def _invoke_in_container(self, code: str) -> CallToolResult:
        returned = await self._invoke(code)
        self.container_id = (returned.structured_content or {}).get("container_id", self.container_id)
        return returned

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
