"""The tool kind `mcp`: checks its parameters, connects to the MCP servers of a run, and permits or refuses calls.

1. A request selects a server by `server_url`, or one of the operator's servers by `server_label` or `connector_id`.
2. The operator's headers and rules apply only to the operator's servers. They never apply to a `server_url` from a request,
   even if its label is that of an operator's server.
3. The secrets in a request, such as `authorization`, are never returned. They are stored only for a background response:
   encrypted, and until it ends. A request that continues a response must send them again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from ..auth import CONTAINER_OWNER_HEADER, container_owner
from ..errors import BadRequest
from ..protocol import checks
from ..protocol.tool_kinds.form import CallForm, check_callers, parse_arguments
from ..protocol.types import Item, Tool
from ..settings.groups import EVERY_TOOL, ToolServer, ToolSettings
from ..settings.values import PER_REQUEST_HEADERS
from . import MAX_MCP_TOOLS, ServedFunction, ServerTool, ToolContext, ToolResult, failure

if TYPE_CHECKING:
    from .mcp_session import MCPTarget

LABEL = "^[a-zA-Z][a-zA-Z0-9_-]*$"
SANDBOX_LABEL = "code_interpreter"
"""The label of the sandbox, unless an MCP server with this label is configured."""

_MAX_LABEL, _MAX_URL, _MAX_TEXT = 64, 2048, 16_384
_MAX_NAMES = 1000
_MAX_HEADERS, _MAX_HEADER_BYTES = 64, 16_384
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, section 5.6.2
_VISIBLE = re.compile(r"[\t\x20-\x7e]*")
# Headers that are set by the connection, the transport or the protocol, and hop-by-hop headers.
_RESERVED_HEADERS = PER_REQUEST_HEADERS | {
    CONTAINER_OWNER_HEADER,
    "accept",
    "keep-alive",
    "last-event-id",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
}
_NOT_SERVED = {
    "tunnel_id": "tunnels are not supported: use server_url.",
    "defer_loading": "it is not supported yet.",
}
_SECRET = ("headers", "authorization")
_RULES = {"allowed_tools", "require_approval"}
_REDACTED = "<redacted>"
_PURPOSE = "mcp_list_tools"
_SIGNED_MEMBERS = ("name", "input_schema", "description", "annotations")


def check_installed(path: str) -> None:
    """Check that the package `mcp` is installed. Otherwise, raise `BadRequest` for the tool at `path`."""
    if find_spec("mcp") is None:
        checks.unsupported(f"{path}.type", "the extra responses-mw[mcp] is not installed.")


# -- checks --------------------------------------------------------------------------------------------------------------------


def _check_server(tool: Tool, path: str, settings: ToolSettings) -> None:
    if "server_url" in tool and "connector_id" in tool:
        message = f"Only one of '{path}.server_url' and '{path}.connector_id' can be given."
        raise BadRequest(message, param=f"{path}.connector_id", code="invalid_value")
    if "connector_id" in tool and tool["connector_id"] not in settings.mcp_servers:
        why = f"no connector '{tool['connector_id'][:64]}' is configured (tools.mcp_servers)."
        checks.unsupported(f"{path}.connector_id", why)
    if "server_url" not in tool and _configured(tool, settings) is None:
        where, label = f"{path}.server_url", tool["server_label"]
        message = f"Missing required parameter: '{where}': no MCP server is configured as '{label}' (tools.mcp_servers)."
        raise BadRequest(message, param=where, code="missing_required_parameter")


def _server_url(value: Any, path: str, settings: ToolSettings) -> str:
    from .guarded_transport import fault_of

    url = checks.string(value, path, max_length=_MAX_URL)
    if fault := fault_of(url, allow_private=settings.allow_private_urls):
        checks.invalid(path, f"{fault}.")
    return url


def _headers(value: Any, path: str) -> dict[str, str]:
    headers = checks.mapping(value, path)
    if len(headers) > _MAX_HEADERS:
        checks.invalid(path, f"more than {_MAX_HEADERS} headers.")
    for name, content in headers.items():
        where = f"{path}.{name[:64]}"
        if not _TOKEN.fullmatch(name) or name.lower() in _RESERVED_HEADERS or name.lower().startswith("mcp-"):
            checks.invalid(where, "this header cannot be set.")
        _header_value(content, where)
    if sum(len(name) + len(content) for name, content in headers.items()) > _MAX_HEADER_BYTES:
        checks.invalid(path, f"more than {_MAX_HEADER_BYTES} bytes.")
    return headers


def _header_value(value: Any, path: str) -> str:
    text = checks.string(value, path, max_length=_MAX_TEXT)
    if not _VISIBLE.fullmatch(text):  # the message must not contain the value, which may be a secret
        checks.invalid(path, "it contains characters that are not allowed in a header.")
    return text


_names = checks.each(checks.string, max_length=_MAX_NAMES)
_filter = checks.closed_object(tool_names=_names, read_only=checks.boolean)
_approvals = checks.closed_object(always=_filter, never=_filter)
_modes = checks.among("always", "never")

_REQUIRED: dict[str, checks.Check] = {"server_label": partial(checks.string, max_length=_MAX_LABEL, pattern=LABEL)}
_CHECKS: dict[str, checks.Check] = {
    "allowed_callers": check_callers,
    "connector_id": checks.string,
    "allowed_tools": lambda value, path: (_names if isinstance(value, list) else _filter)(value, path),
    "require_approval": lambda value, path: (_modes if isinstance(value, str) else _approvals)(value, path),
    "headers": _headers,
    "authorization": _header_value,
    "server_description": partial(checks.string, max_length=_MAX_TEXT),
}


# -- servers -------------------------------------------------------------------------------------------------------------------


class MCPServer(ServerTool):
    """An MCP server in one run. All calls of its tools are authorized here, including approved calls and web searches.

    The permission of a call may depend on the server's list of tools, which marks read-only tools. Clients can forge
    `mcp_list_tools` items. A list in the history is therefore trusted only if it has a valid `signature`, which is bound to
    the owner, the server's URL and the `allowed_tools`. Without a trusted list, the tools are requested from the server.
    """

    def __init__(self, tool: Tool, context: ToolContext) -> None:
        from .mcp_connection import MCPConnection

        self.label: str = tool["server_label"]
        self.listing: Item | None = None
        """The `mcp_list_tools` item to add to the output, or None if the history already contains the same list."""
        self._tool, self._context = tool, context
        self._server = _configured(tool, context.settings)
        rules = self._server.model_dump(include=_RULES, exclude_none=True) if self._server else {}
        self._limits = (tool.get("allowed_tools"), rules.get("allowed_tools"))
        self._approval_rule = tool.get("require_approval", rules.get("require_approval"))
        self._connection = MCPConnection(target_of(tool, self._server, context))
        self._listed: Mapping[str, dict[str, Any]] | None = None
        lists = (item for item in reversed(context.earlier) if item["type"] == "mcp_list_tools")
        self._last_list = next((item for item in lists if item["server_label"] == self.label), None)

    @staticmethod
    def check(tool: Tool, path: str, settings: ToolSettings) -> Tool:
        check_installed(path)
        for name, why in _NOT_SERVED.items():
            if tool.get(name):
                checks.unsupported(f"{path}.{name}", why)
        server_url = partial(_server_url, settings=settings)
        checked = checks.open_object(_REQUIRED, server_url=server_url, **_CHECKS)(tool, path)
        _check_server(checked, path, settings)
        if "authorization" in checked and "authorization" in map(str.lower, checked.get("headers", ())):
            message = f"'{path}.authorization' and an Authorization header in '{path}.headers' cannot be used together."
            raise BadRequest(message, param=f"{path}.authorization", code="invalid_value")
        return checked

    @staticmethod
    def echo(tool: Tool) -> Tool:
        shown = {name: value for name, value in tool.items() if name not in _SECRET}
        if "server_url" in shown:
            shown["server_url"] = _redacted(shown["server_url"])
        return shown

    async def aclose(self) -> None:
        await self._connection.aclose()

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools that may be called. They come from a signed list in the history or, without one, from the server.

        Set `listing` if the output needs a new list or a new signature. Raises the same errors as `MCPConnection.list_tools`.
        """
        tools = self._signed_tools()
        if tools is None:
            tools = [tool for tool in await self._connection.list_tools() if self.is_allowed(tool)]
            last = self._last_list  # without a signature, it comes from a client that would drop the next one too
            if last is None or last.get("signature") or _plain_tools(last["tools"]) != _plain_tools(tools):
                signed = self._signed_bytes(tools)
                signature = self._context.sealer.sign(signed, purpose=_PURPOSE, owner=self._context.owner)
                self.listing = {"server_label": self.label, "tools": tools, "signature": signature}
        self._listed = {tool["name"]: tool for tool in tools if self.is_allowed(tool)}
        return list(self._listed.values())

    async def call(self, name: str, arguments: dict[str, Any], *, approved: bool) -> ToolResult:
        """Call a tool and return its result. If the call is not permitted, return a failed result without calling the tool.

        `approved` is whether the user or the operator has approved the call. If `allowed_tools` restricts the tools and they
        have not been listed yet, list them first. Raises the same errors as `list_tools`.
        """
        if self._listed is None and any(limit is not None for limit in self._limits):
            await self.list_tools()
        if self._listed is not None and name not in self._listed:
            return failure(f"MCP server '{self.label}': the tool '{name[:64]}' may not be called.", code=403)
        if not approved and self.needs_approval((self._listed or {}).get(name, {"name": name})):
            return failure(f"MCP server '{self.label}': the tool '{name[:64]}' needs an approval.", code=403)
        return await self._connection.call(name, arguments)

    def is_allowed(self, listed: Mapping[str, Any]) -> bool:
        """Return whether both request and operator allow calls to a tool. `listed` is its entry in the server's list."""
        return all(limit is None or _matches(limit, listed) for limit in self._limits)

    def needs_approval(self, listed: Mapping[str, Any]) -> bool:
        """Return whether calls to a tool require an `mcp_approval_response`. `listed` is the tool's entry in the server's list.

        The request's rule takes precedence over the operator's rule. Without a rule, all calls require approval. A rule may
        have the filters `never` and `always`. A tool then needs no approval if it matches `never` but not `always`.
        """
        rule = self._approval_rule
        if rule is None or isinstance(rule, str):
            return rule != "never"
        is_exempt = "never" in rule and _matches(rule["never"], listed)
        return not is_exempt or ("always" in rule and _matches(rule["always"], listed))

    # -- functions

    async def open(self) -> list[ServedFunction]:
        return [self._served(tool) for tool in await self.list_tools()]

    def _served(self, tool: dict[str, Any]) -> ServedFunction:
        name = tool["name"]
        function = {"type": "function", "name": name, "parameters": tool["input_schema"]}
        if tool.get("description"):
            function["description"] = tool["description"]
        form = self._form(name)
        if self.needs_approval(tool):
            members = {"name": name, "server_label": self.label}
            form = CallForm("mcp_approval_request", members, made=lambda text: {"arguments": text or "{}"})
        return self._function(function, form, name, approved=False)

    def approved(self, request: Item, name: str) -> ServedFunction | None:
        """Return a function called `name` that calls the tool in `request`, an approved `mcp_approval_request` item.

        Return None if the tool may not be called, or if `open` has not been called.
        """
        if self._listed is None or request["name"] not in self._listed:
            return None
        form = self._form(request["name"], approval_request_id=request["id"])
        return self._function({"type": "function", "name": name}, form, request["name"], approved=True)

    def _function(self, function: Tool, form: CallForm, name: str, *, approved: bool) -> ServedFunction:
        metric = "_OTHER" if self._server is None else str(self._tool.get("connector_id") or self.label)
        call = partial(self._call_with, name, approved=approved)
        return ServedFunction(function, form, call, "mcp", metric)

    async def _call_with(self, name: str, arguments: str, *, approved: bool) -> ToolResult:
        parsed = parse_arguments(arguments or "{}")
        if parsed is not None:
            return await self.call(name, parsed, approved=approved)
        text = "The arguments are not a JSON object."
        error = {"type": "mcp_protocol_error", "code": -32602, "message": text}
        return ToolResult(f"{text} They were: {arguments[:200]}", {"error": error}, failed=True)

    def _form(self, name: str, approval_request_id: str | None = None) -> CallForm:
        members = {"approval_request_id": approval_request_id, "name": name, "server_label": self.label}
        return CallForm(
            item="mcp_call",
            members={**members, "output": None, "error": None},
            begins=("mcp_call.in_progress",),
            ends=("mcp_call.completed", "mcp_call.failed"),
            served=True,
        )

    # -- signed lists of tools

    def _signed_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools of the last list in the history, or None if there is no list with a valid signature."""
        if self._last_list is None or len(self._last_list["tools"]) > MAX_MCP_TOOLS:  # longer lists are never signed
            return None
        signature, tools = self._last_list.get("signature"), _plain_tools(self._last_list["tools"])
        if not isinstance(signature, str):
            return None
        signed, sealer = self._signed_bytes(tools), self._context.sealer
        return tools if sealer.is_signed(signature, signed, purpose=_PURPOSE, owner=self._context.owner) else None

    def _signed_bytes(self, tools: list[dict[str, Any]]) -> bytes:
        signed = [self._connection.target.url, self._limits, _plain_tools(tools)]
        return orjson.dumps(signed, option=orjson.OPT_SORT_KEYS)


def _redacted(url: Any) -> str:
    """Return `url` without what may be secret: its credentials, path, query and fragment."""
    try:
        whole = httpx.URL(url)
    except (TypeError, httpx.InvalidURL):  # if the upstream checks the tools
        return _REDACTED
    bare = whole.copy_with(userinfo=b"", raw_path=b"/", fragment=None)
    return str(bare) + ("" if whole.raw_path == b"/" else _REDACTED)


def _plain_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `tools` without nulls and unsigned members. Clients may have added both."""
    return [{name: tool[name] for name in _SIGNED_MEMBERS if tool.get(name) is not None} for tool in tools]


def _configured(tool: Tool, settings: ToolSettings) -> ToolServer | None:
    """Return the operator's server that `tool` selects, or None if `tool` has a `server_url` or selects an unknown server."""
    if "server_url" in tool:
        return None
    if "connector_id" in tool:
        return settings.mcp_servers.get(tool["connector_id"])
    label = tool["server_label"]
    if label == SANDBOX_LABEL and label not in settings.mcp_servers and settings.sandbox_url is not None:
        return sandbox_server(settings)
    return settings.mcp_servers.get(label)


def sandbox_server(settings: ToolSettings) -> ToolServer:
    """Return the sandbox as an MCP server. `tools.sandbox_url` must be set."""
    assert settings.sandbox_url is not None
    return ToolServer(url=settings.sandbox_url, authorization=settings.sandbox_token, require_approval="never")


def target_of(tool: Tool, server: ToolServer | None, context: ToolContext) -> MCPTarget:
    """Return the parameters for connecting to `server`, or to the `server_url` of `tool` if `server` is None."""
    from .mcp_session import MCPTarget

    settings = context.settings
    headers = {**context.trace_headers, **_headers_of(tool, server)}
    if server is not None and server.url.rstrip("/") == settings.sandbox_url:
        headers[CONTAINER_OWNER_HEADER] = container_owner(context.owner)
    return MCPTarget(
        label=tool["server_label"],
        url=tool["server_url"] if server is None else server.url,
        headers=headers,
        allow_private=server is not None or settings.allow_private_urls,
        credentials_of_caller=server is None or any(name in tool for name in _SECRET),
        is_configured=server is not None,
        timeout=settings.timeout,
    )


def _headers_of(tool: Tool, server: ToolServer | None) -> dict[str, str]:
    """Return the headers of the request and of the operator, with names in lower case."""
    headers = {name.lower(): str(value) for name, value in tool.get("headers", {}).items()}
    if "authorization" in tool:
        headers["authorization"] = _bearer(tool["authorization"])
    if server is None:
        return headers
    own = {name.lower(): value.get_secret_value() for name, value in server.headers.items()}
    if server.authorization is not None:
        own["authorization"] = _bearer(server.authorization.get_secret_value())
    # The server may trust the operator's headers. Of these headers, a request can replace only `authorization`.
    return {**own, **{name: value for name, value in headers.items() if name == "authorization" or name not in own}}


def _bearer(token: str) -> str:
    return token if token.lower().startswith("bearer ") else f"Bearer {token}"


def _matches(rule: list[str] | dict[str, Any], listed: Mapping[str, Any]) -> bool:
    """Return whether a tool matches `rule`, which is a list of names or a filter. All members of a filter must match."""
    if isinstance(rule, list):
        return listed["name"] in rule or EVERY_TOOL in rule
    read_only = bool((listed.get("annotations") or {}).get("readOnlyHint", False))
    return _matches(rule.get("tool_names", [EVERY_TOOL]), listed) and rule.get("read_only", read_only) == read_only
