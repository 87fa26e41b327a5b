"""The tools of one run that are carried out here, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import anyio
import httpx

from .. import telemetry
from ..auth import Gate
from ..crypto import Sealer
from ..errors import APIError, BadRequest
from ..protocol.tool_kinds.form import CallForm, Offered
from ..protocol.types import Chunk, Item, Tool
from ..settings import Settings
from .entries import CHECKS, ECHOES, ENTRIES, Entry, MCPEntry, Served, ToolContext
from .listings import Listings
from .mcp import MCPServers
from .result import Result

_MOST_APPROVED = 128
"""Calls that one request may approve: all of them are made at the same time."""
_MOST_SERVERS = 64


class Tools:
    """What all runs have in common: the settings, and the client for what the operator has set up."""

    def __init__(self, settings: Settings, http: httpx.AsyncClient, sealer: Sealer) -> None:
        self._settings = settings
        self._http = http
        self._sealer = sealer
        self._servers = MCPServers(settings)

    def check(self, tools: Sequence[Tool]) -> list[Tool]:
        """The entries of a request's ``tools``, those that are served here checked. Raises ``BadRequest``."""
        checked = [
            CHECKS[tool["type"]](tool, f"tools[{index}]", self._settings) if tool["type"] in CHECKS else tool
            for index, tool in enumerate(tools)
        ]
        _check_servers([tool["server_label"] for tool in checked if tool["type"] == "mcp"])
        return checked

    def echo(self, tools: Iterable[Tool]) -> list[Tool]:
        """The entries as a response may show them, and a store may keep them: without secrets."""
        return [ECHOES[tool["type"]](tool) if tool["type"] in ECHOES else tool for tool in tools]

    def toolbox(
        self,
        tools: Iterable[Tool],
        items: Sequence[Item],
        own: Sequence[Item],
        headers: Mapping[str, str],
        owner: str,
        gate: Gate,
    ) -> Toolbox | None:
        """The toolbox of a run of ``owner``; None if none of its checked ``tools`` is served here.

        ``items`` are all that the model is to see, of which ``own`` are the request's. Of the caller's ``headers``, those of
        a trace go along. Raises ``BadRequest`` for an approval of something that was not asked for.
        """
        trace = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        listings = Listings(self._sealer, owner, items, self._settings.mcp_max_tools)
        ground = ToolContext(self._settings, self._http, self._servers, listings, owner, items, trace)
        entries = [ENTRIES[tool["type"]](tool, ground) for tool in tools if tool["type"] in ENTRIES]
        return Toolbox(entries, _approved(items, own), gate) if entries else None


class Toolbox:
    """Opened once, before the first turn, and closed in any case."""

    def __init__(self, entries: Sequence[Entry], approved: Mapping[str, Item], gate: Gate) -> None:
        """``approved``: the approval requests whose calls are to be carried out first, by the path of what approves each. The
        ``gate`` stands before all that leaves this process for a tool."""
        self._entries = entries
        self._requests = approved
        self._gate = gate
        self._served: list[Served] = []
        self._approved: list[Served] = []
        self._serving: dict[int, Served] = {}
        self.approved: Chunk | None = None
        """The approved calls, as the model would make them. Their functions are never offered to it: an approval is for one
        call, with the arguments that were shown."""

    async def open(self) -> None:
        """Finds out what the entries offer, all at a time. Raises ``APIError`` where one cannot be used, and for a caller
        who is not accepted."""
        await self._gate()
        brought: list[list[Served]] = [[] for _ in self._entries]

        async def open_entry(index: int, entry: Entry) -> None:
            brought[index] = await entry.open()

        try:
            async with anyio.create_task_group() as group:
                for index, entry in enumerate(self._entries):
                    group.start_soon(open_entry, index, entry)
        except ExceptionGroup as faults:
            raise _first(faults) from None
        self._served = [served for entry in brought for served in entry]
        self._add_approved()
        self._serving = {id(served.offered.form): served for served in (*self._served, *self._approved)}

    @property
    def offered(self) -> list[Offered]:
        """The functions, under the names that they have at home."""
        return [served.offered for served in self._served]

    @property
    def approved_functions(self) -> list[Offered]:
        """What the calls of ``approved`` call."""
        return [served.offered for served in self._approved]

    @property
    def listings(self) -> list[Item]:
        """The tools of each MCP server that had to be asked for them, and told others than the client has."""
        return [entry.listing for entry in self._entries if isinstance(entry, MCPEntry) and entry.listing is not None]

    @property
    def sources(self) -> list[Mapping[str, Any]]:
        return [source for entry in self._entries for source in entry.sources]

    async def call(self, form: CallForm, arguments: str) -> Result:
        """Carries out one call of the function that was offered with that ``form``."""
        await self._gate()
        served = self._serving[id(form)]
        with telemetry.ToolCallSpan(form.members.get("name", served.offered.name), arguments) as call:
            result = await served.call(arguments)
            call.result(result.content, failed=result.failed)
        return result

    async def aclose(self) -> None:
        async with anyio.create_task_group() as group:
            for entry in self._entries:
                group.start_soon(entry.aclose)

    def _add_approved(self) -> None:
        """Raises ``BadRequest`` for a call that may not be made, whoever approves it."""
        calls: list[dict[str, Any]] = []
        servers = {entry.label: entry for entry in self._entries if isinstance(entry, MCPEntry)}
        for where, request in self._requests.items():
            if request["server_label"] not in servers:
                message = f"The MCP server '{request['server_label']}' of the approved call is not in 'tools'."
                raise BadRequest(message, param="tools", code="invalid_value")
            function = {"name": f"approved_{len(calls)}", "arguments": request["arguments"]}
            served = servers[request["server_label"]].approved(request, function["name"])
            if served is None:
                message = (
                    f"The approved call cannot be made: the MCP server '{request['server_label']}' does not list a tool "
                    f"'{request['name'][:64]}', or it is not allowed."
                )
                raise BadRequest(message, param=where, code="invalid_value")
            self._approved.append(served)
            calls.append({"index": len(calls), "id": request["id"], "function": function})
        if calls:
            self.approved = {"choices": [{"index": 0, "delta": {"tool_calls": calls}}]}


def _approved(items: Sequence[Item], own: Sequence[Item]) -> dict[str, Item]:
    """The approval requests that the request's own input approves, and that were not carried out yet, by the path of the
    approval. The client may have made up the request as well: it approves what it likes, within what is allowed."""
    requests = {item["id"]: item for item in items if item["type"] == "mcp_approval_request"}
    over = {item.get("approval_request_id") for item in items if item["type"] == "mcp_call"}
    approved: dict[str, Item] = {}
    for index, item in enumerate(own):
        if item["type"] != "mcp_approval_response":
            continue
        asked, where = item["approval_request_id"], f"input[{index}].approval_request_id"
        if asked not in requests:
            raise BadRequest(f"No approval request found with id '{asked}'.", param=where, code="invalid_value")
        if not item["approve"] or asked in over:
            continue
        if len(approved) == _MOST_APPROVED:
            raise BadRequest(f"More than {_MOST_APPROVED} calls are approved at a time.", param=where, code="invalid_value")
        over.add(asked)
        approved[where] = requests[asked]
    return approved


def _check_servers(labels: Sequence[str]) -> None:
    """Each server of a request is asked for its tools: there are only so many, each once."""
    if len(labels) > _MOST_SERVERS:
        message = f"Invalid 'tools': more than {_MOST_SERVERS} MCP servers."
        raise BadRequest(message, param="tools", code="array_above_max_length")
    if len(set(labels)) < len(labels):
        message = "Invalid 'tools': two MCP servers have the same 'server_label'."
        raise BadRequest(message, param="tools", code="invalid_value")


def _first(faults: ExceptionGroup[Exception]) -> Exception:
    """One fault of several: the caller's own first."""
    inner = [_first(fault) if isinstance(fault, ExceptionGroup) else fault for fault in faults.exceptions]
    return min(inner, key=lambda fault: fault.status if isinstance(fault, APIError) else 600)
