"""The tool ``code_interpreter``: Python that the model wrote, run by the sandbox service (``docs/sandbox.md``)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..auth import ANONYMOUS, CONTAINER_OWNER_HEADER, container_owner
from ..protocol.request import checks
from ..protocol.types import Tool
from ..settings import Settings
from .mcp import check_installed
from .result import Result

if TYPE_CHECKING:
    from mcp_types import CallToolResult

AUTO = "auto"

_NAMES = ("python", "code_interpreter")
_PATIENCE = 5.0
"""The sandbox limits a call itself, and tells so: it has this much longer than ``tool_timeout``, in seconds."""
_LONGEST_ID = 128
_GIB = 1024**3
_MEMORY_LIMITS = {"1g": _GIB, "4g": 4 * _GIB, "16g": 16 * _GIB, "64g": 64 * _GIB}
_NO_OUTPUT = "(no output)"
_DESCRIPTION = (
    "Runs Python code and returns what it printed and the value of its last expression. Variables, imports and files (in "
    "/mnt/data) stay for later calls. There is no network."
)
_LOST = "(The container of earlier calls is gone, with its variables and files. This ran in a new one.)\n"


def check_code_interpreter(tool: Tool, path: str, settings: Settings) -> Tool:
    """A ``code_interpreter`` entry of ``tools`` without its nulls, checked; ``path`` is where it stands (``tools[0]``)."""
    if settings.sandbox_url is None:
        checks.unsupported(f"{path}.type", "no sandbox is configured (setting sandbox_url).")
    check_installed(path)
    if tool.get("allowed_callers"):
        checks.unsupported(f"{path}.allowed_callers", "it is not served yet.")
    container = checks.required(tool, "container", path, lambda value, _: value)
    return {**tool, "container": _container(container, f"{path}.container")}


def _container(value: Any, path: str) -> str | dict[str, Any]:
    if isinstance(value, str):
        return checks.string(value, path, max_length=_LONGEST_ID)
    container = checks.mapping(value, path)
    checks.one_of(checks.required(container, "type", path, checks.string), f"{path}.type", {AUTO})
    if container.get("file_ids"):
        checks.unsupported(f"{path}.file_ids", "there are no uploaded files here: the code can write its own.")
    if "memory_limit" in container:
        checks.one_of(container["memory_limit"], f"{path}.memory_limit", _MEMORY_LIMITS)
    if container.get("network_policy", {"type": "disabled"}) != {"type": "disabled"}:
        checks.unsupported(f"{path}.network_policy", "the sandbox has no network.")
    return container


def named_container(tool: Tool) -> str | None:
    """The id of the container that a checked tool names, None where it leaves the choice to us."""
    container = tool["container"]
    return container if isinstance(container, str) and container != AUTO else None


def memory_limit(tool: Tool) -> int | None:
    """The bytes of memory that a checked tool wants a new container to have at most; None where it says nothing."""
    container = tool["container"]
    wanted = container.get("memory_limit") if isinstance(container, dict) else None
    return None if wanted is None else _MEMORY_LIMITS[wanted]


class CodeInterpreter:
    """Runs code for one run, in one container; ``container_id`` is that of an earlier call in the chain, or one that the
    request names, and for the sandbox it is there only if it is ``owner``'s; ``memory_bytes`` is the most that a new one may
    have, if the sandbox would give it more. An async context manager; nothing is sent before the first call. Calls at the same
    time take turns.
    """

    def __init__(
        self,
        settings: Settings,
        container_id: str | None = None,
        *,
        memory_bytes: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
        owner: str = ANONYMOUS,
    ) -> None:
        from .connection import MCPConnection
        from .session import Bounds, Target

        assert settings.sandbox_url is not None
        headers = {**(trace_headers or {}), CONTAINER_OWNER_HEADER: container_owner(owner)}
        if settings.sandbox_token is not None:
            headers["authorization"] = f"Bearer {settings.sandbox_token.get_secret_value()}"
        target = Target("code_interpreter", settings.sandbox_url, headers, allow_private=True, credentials_of_caller=False)
        self._most_bytes = settings.max_tool_output_bytes
        bounds = Bounds(settings.tool_timeout + _PATIENCE, settings.connect_timeout, self._most_bytes, settings.mcp_max_tools)
        self._connection = MCPConnection(target, bounds)
        self._limits = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
        self._turn = asyncio.Lock()
        self.container_id = container_id
        """The container that the next call goes to; None for a new one."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends what is under way. The container stays, for the next response of the chain."""
        await self._connection.aclose()

    @staticmethod
    def definition(taken: Collection[str] = ()) -> Tool:
        """The function that the model is offered, under a name that is not ``taken`` by another."""
        name = next((name for name in _NAMES if name not in taken), _NAMES[-1])
        code = {"type": "string", "description": "Python source"}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"], "additionalProperties": False}
        return {"type": "function", "name": name, "description": _DESCRIPTION, "parameters": parameters}

    async def call(self, code: str) -> Result:
        """What the code printed and gave, or its traceback. ``members`` are ``container_id`` (absent if none was reached) and
        ``outputs``. It is ``failed`` where the sandbox is away, or ended the container; an error of the code's own is no fault.
        """
        from .connection import CallFailed

        async with self._turn:
            try:
                return await self._run(code)
            except CallFailed as error:
                reason = str(error.result.content)
                return Result(reason, {**self._shown(), "outputs": _logs(reason)}, failed=True)

    async def _run(self, code: str) -> Result:
        remark = ""
        returned = await self._invoke(code)
        if returned.structured_content is None and _is_lost(returned, self.container_id):
            self.container_id, remark = None, _LOST
            returned = await self._invoke(code)
        return self._result(returned, remark)

    async def _invoke(self, code: str) -> CallToolResult:
        arguments = {"code": code, "container_id": self.container_id or AUTO, **self._limits}
        return await self._connection.invoke("python", arguments)

    def _result(self, returned: CallToolResult, remark: str) -> Result:
        from .content import cut

        outcome = returned.structured_content or {}
        text = cut(_text(returned), self._most_bytes)
        self.container_id = outcome.get("container_id", self.container_id)
        members = {**self._shown(), "outputs": [] if text == _NO_OUTPUT else _logs(text)}
        if outcome.get("ended") is not None:
            self.container_id = None
        return Result(remark + text, members, failed=returned.is_error)

    def _shown(self) -> dict[str, Any]:
        return {} if self.container_id is None else {"container_id": self.container_id}


def _is_lost(returned: CallToolResult, container_id: str | None) -> bool:
    return returned.is_error and container_id is not None and f"Container with id '{container_id}' not found" in _text(returned)


def _text(returned: CallToolResult) -> str:
    return "\n".join(block.text for block in returned.content if block.type == "text")


def _logs(text: str) -> list[dict[str, str]]:
    return [{"type": "logs", "logs": text}]
