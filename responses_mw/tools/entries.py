"""What the entries of ``tools`` that are served here bring into a run. To serve another kind, add a class, and a line to
``ENTRIES``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from ..errors import NotSupported
from ..protocol.tool_kinds.form import CallForm, Offered, parse_arguments
from ..protocol.types import Item, Tool
from ..settings import Settings
from . import web_search
from .access import Access
from .code_interpreter import CodeInterpreter, check_code_interpreter, memory_limit, named_container
from .listings import Listings
from .mcp import MCPServers, check_mcp_tool
from .mcp import echo as mcp_echo
from .result import Result
from .search import open_provider
from .web_search import WebSearch, check_web_search


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What an entry stands on: whose run it is, the ``earlier`` items of the chain and of the input, and what goes along with
    its requests. The items are what clients sent back: an entry believes nothing of them that gives a right."""

    settings: Settings
    http: httpx.AsyncClient
    servers: MCPServers
    listings: Listings
    owner: str
    earlier: Sequence[Item]
    trace_headers: Mapping[str, str]

    def access(self, tool: Tool) -> Access:
        """The MCP server that a checked ``tool`` names."""
        connection = self.servers.open(tool, trace_headers=self.trace_headers, owner=self.owner)
        return Access(tool, self.servers, self.listings, connection)


@dataclass(frozen=True, slots=True)
class Served:
    """A function that is carried out here: ``call`` takes the model's arguments, and never raises."""

    offered: Offered
    call: Callable[[str], Awaitable[Result]]


class Entry:
    """One entry of ``tools`` in one run. It is opened once, and closed in any case."""

    @property
    def sources(self) -> Sequence[Mapping[str, Any]]:
        """What the answer may cite."""
        return ()

    async def open(self) -> list[Served]:
        """The functions that it brings. Raises ``APIError`` where it cannot be used."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Ends what is under way."""


class MCPEntry(Entry):
    """An MCP server."""

    def __init__(self, tool: Tool, ground: ToolContext) -> None:
        self.label = str(tool["server_label"])
        self._access = ground.access(tool)

    @property
    def listing(self) -> Item | None:
        """The tools of the server, where the client has to be told them."""
        return self._access.listing

    async def open(self) -> list[Served]:
        return [self._served(tool) for tool in await self._access.open()]

    def approved(self, request: Item, name: str) -> Served | None:
        """The call that an ``mcp_approval_request`` asked for, as a function of this ``name``; None where it may not be made.
        After ``open``."""
        if not self._access.is_callable(request["name"]):
            return None
        form = self._form(request["name"], approval_request_id=request["id"])
        return Served(Offered({"type": "function", "name": name}, form), partial(self._call, request["name"], approved=True))

    async def aclose(self) -> None:
        await self._access.aclose()

    def _served(self, tool: dict[str, Any]) -> Served:
        name = tool["name"]
        function = {"type": "function", "name": name, "parameters": tool["input_schema"]}
        if tool.get("description"):
            function["description"] = tool["description"]
        form = self._approval_form(name) if self._access.needs_approval(name) else self._form(name)
        return Served(Offered(function, form), partial(self._call, name, approved=False))

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

    async def _call(self, name: str, arguments: str, *, approved: bool) -> Result:
        given = parse_arguments(arguments or "{}")
        if given is None:
            return _not_json(arguments)
        return await self._access.call(name, given, approved=approved)


class WebSearchEntry(Entry):
    """Web search. Without access to the live web there is nothing to search in: then the model is not offered it."""

    def __init__(self, tool: Tool, ground: ToolContext) -> None:
        self._offers = tool.get("external_web_access", True)
        self._access: Access | None = None
        if not self._offers:
            return
        provider = open_provider(ground.settings, ground.http, partial(self._call_mcp, ground))
        assert provider is not None, "the tool has been checked"
        self._search = WebSearch(tool, provider, ground.settings, ground.earlier)

    @property
    def sources(self) -> Sequence[Mapping[str, Any]]:
        return self._search.sources if self._offers else ()

    async def open(self) -> list[Served]:
        if not self._offers:
            return []
        form = CallForm(
            item="web_search_call",
            prefix="ws",
            made=lambda arguments: {"action": self._search.action(arguments)},
            begins=("web_search_call.in_progress",),
            runs=("web_search_call.searching",),
            ends=("web_search_call.completed",),
            served=True,
        )
        return [Served(Offered(self._search.definition(), form), self._search.call)]

    async def aclose(self) -> None:
        if self._access is not None:
            await self._access.aclose()

    async def _call_mcp(self, ground: ToolContext, arguments: dict[str, Any]) -> Result:
        """For the provider ``mcp``: ``web_search_tool`` is a tool of one of the operator's servers, who has approved it so."""
        label, _, name = (ground.settings.web_search_tool or "").partition("/")
        if self._access is None:
            self._access = ground.access({"type": "mcp", "server_label": label})
        return await self._access.call(name, arguments, approved=True)


class CodeInterpreterEntry(Entry):
    """The sandbox, with the container of the last call in the chain."""

    def __init__(self, tool: Tool, ground: ToolContext) -> None:
        calls = (item for item in reversed(ground.earlier) if item["type"] == "code_interpreter_call")
        last = next((item.get("container_id") for item in calls), None)
        self._python = CodeInterpreter(
            ground.settings,
            named_container(tool) or last or None,
            memory_bytes=memory_limit(tool),
            trace_headers=ground.trace_headers,
            owner=ground.owner,
        )

    async def open(self) -> list[Served]:
        form = CallForm(
            item="code_interpreter_call",
            prefix="ci",
            members={"container_id": self._python.container_id or "", "outputs": None},
            text="code",
            argument="code",
            events="code_interpreter_call_code",
            done=("code",),
            begins=("code_interpreter_call.in_progress",),
            runs=("code_interpreter_call.interpreting",),
            ends=("code_interpreter_call.completed",),
            served=True,
        )
        return [Served(Offered(self._python.definition(), form), self._call)]

    async def aclose(self) -> None:
        await self._python.aclose()

    async def _call(self, arguments: str) -> Result:
        given = parse_arguments(arguments)
        code = given.get("code") if given else None
        return await self._python.call(code if isinstance(code, str) else arguments)


def _not_json(arguments: str) -> Result:
    text = "The arguments are not a JSON object."
    error = {"type": "mcp_protocol_error", "code": -32602, "message": text}
    return Result(f"{text} They were: {arguments[:200]}", {"error": error}, failed=True)


def _check_mcp(tool: Tool, path: str, settings: Settings) -> Tool:
    try:
        import mcp  # noqa: F401
    except ModuleNotFoundError:
        raise NotSupported("MCP needs the extra responses-mw[mcp], which is not installed here.", param=path) from None
    return check_mcp_tool(tool, path, settings)


ENTRIES: dict[str, Callable[[Tool, ToolContext], Entry]] = {
    "mcp": MCPEntry,
    "code_interpreter": CodeInterpreterEntry,
    **dict.fromkeys(web_search.TYPES, WebSearchEntry),
}
CHECKS: dict[str, Callable[[Tool, str, Settings], Tool]] = {
    "mcp": _check_mcp,
    "code_interpreter": check_code_interpreter,
    **dict.fromkeys(web_search.TYPES, check_web_search),
}
ECHOES: dict[str, Callable[[Tool], Tool]] = {"mcp": mcp_echo}
