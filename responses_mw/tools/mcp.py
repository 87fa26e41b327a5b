"""Entries of type ``mcp`` in ``tools``: validation, servers, headers, and permissions of tools.

1. A request names a server by ``server_url``, or one of the operator's servers by ``server_label`` or ``connector_id``.
2. The operator's headers and rules apply only to the operator's servers, never to a request's ``server_url``, even if it has
   the same label.
3. Secrets are never echoed. A chained request must send them again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx

from ..auth import ANONYMOUS, CONTAINER_OWNER_HEADER, container_owner
from ..errors import BadRequest
from ..protocol.request import checks
from ..protocol.types import Tool
from ..settings import EVERY_TOOL, PER_REQUEST_HEADERS, ToolServer, ToolSettings
from .guard import Resolve, fault_of, resolve

if TYPE_CHECKING:
    from .connection import MCPConnection

LABEL = "^[a-zA-Z][a-zA-Z0-9_-]*$"
SANDBOX_LABEL = "code_interpreter"
"""The sandbox's label, unless a server is configured under it."""

_MAX_LABEL, _MAX_URL, _MAX_TEXT = 64, 2048, 16_384
_MAX_NAMES = 1000
_MAX_HEADERS, _MAX_HEADER_BYTES = 64, 16_384
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110, section 5.6.2
_VISIBLE = re.compile(r"[\t\x20-\x7e]*")
# Headers that the connection, its transport or the protocol sets, and hop-by-hop headers.
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
    "allowed_callers": "it is not supported yet.",
}
_NAMED = ("server_url", "connector_id")
_SECRET = ("headers", "authorization")


def check_installed(path: str) -> None:
    """Raise ``BadRequest`` for the tool at ``path`` if the package ``mcp`` is missing."""
    if find_spec("mcp") is None:
        checks.unsupported(f"{path}.type", "the extra responses-mw[mcp] is not installed.")


# -- checks --------------------------------------------------------------------------------------------------------------------


def check_mcp_tool(tool: Tool, path: str, settings: ToolSettings) -> Tool:
    """Check an ``mcp`` entry of ``tools`` at ``path``. Raises ``BadRequest``."""
    check_installed(path)
    for name, why in _NOT_SERVED.items():
        if tool.get(name):
            checks.unsupported(f"{path}.{name}", why)
    checked = checks.open_object(_REQUIRED, server_url=partial(_server_url, settings), **_CHECKS)(tool, path)
    _check_server(checked, checked["server_label"], path, settings)
    if "authorization" in checked and "authorization" in map(str.lower, checked.get("headers", ())):
        message = f"'{path}.authorization' and an Authorization header in '{path}.headers' cannot be used together."
        raise BadRequest(message, param=f"{path}.authorization", code="invalid_value")
    return checked


def _check_server(tool: Tool, label: str, path: str, settings: ToolSettings) -> None:
    named = [name for name in _NAMED if name in tool]
    if len(named) == 2:
        message = f"Only one of '{path}.server_url' and '{path}.connector_id' can be given."
        raise BadRequest(message, param=f"{path}.connector_id", code="invalid_value")
    if "connector_id" in tool and tool["connector_id"] not in settings.mcp_servers:
        why = f"no connector '{tool['connector_id'][:64]}' is configured (tools.mcp_servers)."
        checks.unsupported(f"{path}.connector_id", why)
    if not named and _configured(tool, settings) is None:
        message = (
            f"Missing required parameter: '{path}.server_url': no MCP server is configured as '{label}' (tools.mcp_servers)."
        )
        raise BadRequest(message, param=f"{path}.server_url", code="missing_required_parameter")


def _server_url(settings: ToolSettings, value: Any, path: str) -> str:
    url = checks.string(value, path, max_length=_MAX_URL)
    fault = fault_of(url, allow_private=settings.allow_private_urls)
    if fault is not None:
        raise BadRequest(f"Invalid '{path}': {fault}.", param=path, code="invalid_value")
    return url


def _headers(value: Any, path: str) -> dict[str, str]:
    headers = checks.mapping(value, path)
    if len(headers) > _MAX_HEADERS:
        raise BadRequest(f"Invalid '{path}': more than {_MAX_HEADERS} headers.", param=path, code="invalid_value")
    for name, content in headers.items():
        where = f"{path}.{name[:64]}"
        if not _TOKEN.fullmatch(name) or name.lower() in _RESERVED_HEADERS or name.lower().startswith("mcp-"):
            raise BadRequest(f"Invalid '{where}': this header cannot be set.", param=where, code="invalid_value")
        _header_value(content, where)
    if sum(len(name) + len(content) for name, content in headers.items()) > _MAX_HEADER_BYTES:
        raise BadRequest(f"Invalid '{path}': more than {_MAX_HEADER_BYTES} bytes.", param=path, code="invalid_value")
    return headers


def _header_value(value: Any, path: str) -> str:
    """Check the value of a header. The message does not contain it: it may be a secret."""
    if not _VISIBLE.fullmatch(checks.string(value, path, max_length=_MAX_TEXT)):
        raise BadRequest(
            f"Invalid '{path}': it contains characters that are not allowed in a header.", param=path, code="invalid_value"
        )
    return str(value)


def _allowed(value: Any, path: str) -> Any:
    return _names(value, path) if isinstance(value, list) else _filter(value, path)


_names = checks.each(checks.string, max_length=_MAX_NAMES)
_filter = checks.closed_object(tool_names=_names, read_only=checks.boolean)
_approvals = checks.closed_object(always=_filter, never=_filter)


def _approval(value: Any, path: str) -> Any:
    if isinstance(value, str):
        return checks.one_of(value, path, {"always", "never"})
    return _approvals(value, path)


_REQUIRED: dict[str, checks.Check] = {"server_label": partial(checks.string, max_length=_MAX_LABEL, pattern=LABEL)}
_CHECKS: dict[str, checks.Check] = {
    "connector_id": checks.string,
    "allowed_tools": _allowed,
    "require_approval": _approval,
    "headers": _headers,
    "authorization": _header_value,
    "server_description": partial(checks.string, max_length=_MAX_TEXT),
}


# -- echo ---------------------------------------------------------------------------------------------------------------------


def echo(tool: Tool) -> Tool:
    """Return the tool without ``headers`` and ``authorization``, and with only the origin of ``server_url``.

    Paths and queries may contain keys.
    """
    shown = {name: value for name, value in tool.items() if name not in _SECRET}
    if "server_url" in shown:
        url = httpx.URL(shown["server_url"])
        bare = url.copy_with(raw_path=b"/", fragment=None)
        shown["server_url"] = str(bare) + ("" if url.raw_path == b"/" else "<redacted>")
    return shown


# -- servers -------------------------------------------------------------------------------------------------------------------


class MCPServers:
    """The MCP servers that requests may use. ``resolve`` resolves the hosts of URLs.

    Tools passed to the methods must have passed ``check_mcp_tool``.
    """

    def __init__(self, settings: ToolSettings, *, resolve: Resolve = resolve) -> None:
        self._settings = settings
        self._resolve = resolve

    def open(self, tool: Tool, *, trace_headers: Mapping[str, str] | None = None, owner: str = ANONYMOUS) -> MCPConnection:
        """Return a connection for one run of ``owner``, which must close it. Each request carries the ``trace_headers``."""
        from .connection import MCPConnection
        from .session import MCPLimits, MCPTarget

        server = _configured(tool, self._settings)
        headers = {**(trace_headers or {}), **_headers_of(tool, server)}
        if server is not None and server.url.rstrip("/") == self._settings.sandbox_url:
            headers[CONTAINER_OWNER_HEADER] = container_owner(owner)
        target = MCPTarget(
            label=tool["server_label"],
            url=tool["server_url"] if server is None else server.url,
            headers=headers,
            allow_private=server is not None or self._settings.allow_private_urls,
            credentials_of_caller=server is None or any(name in tool for name in _SECRET),
        )
        limits = MCPLimits(timeout=self._settings.timeout)
        return MCPConnection(target, limits, resolve=self._resolve)

    def configured_label(self, tool: Tool) -> str:
        """Return the operator's name for the server, or an empty string for a ``server_url`` from the request."""
        if _configured(tool, self._settings) is None:
            return ""
        return str(tool.get("connector_id") or tool["server_label"])

    def is_allowed(self, tool: Tool, name: str, annotations: Mapping[str, Any] | None) -> bool:
        """Return whether both the request and the operator allow the server's tool ``name``."""
        server = _configured(tool, self._settings)
        limits = [tool.get("allowed_tools"), _plain(server.allowed_tools) if server else None]
        return all(limit is None or _matches(limit, name, annotations) for limit in limits)

    def has_limits(self, tool: Tool) -> bool:
        """Return whether the request or the operator allows only some of the server's tools."""
        server = _configured(tool, self._settings)
        return "allowed_tools" in tool or (server is not None and server.allowed_tools is not None)

    def needs_approval(self, tool: Tool, name: str, annotations: Mapping[str, Any] | None) -> bool:
        """Return whether a call of the server's tool ``name`` requires an ``mcp_approval_response``.

        The request's rule takes precedence over the operator's. Without a rule, every call requires
        one. So does a call of a tool that matches both filters.
        """
        server = _configured(tool, self._settings)
        rule = tool.get("require_approval", _plain(server.require_approval) if server else None)
        if rule is None or isinstance(rule, str):
            return rule != "never"
        if "always" in rule and _matches(rule["always"], name, annotations):
            return True
        return not ("never" in rule and _matches(rule["never"], name, annotations))


def _configured(tool: Tool, settings: ToolSettings) -> ToolServer | None:
    """Return the operator's server that the tool names, if any."""
    if "server_url" in tool:
        return None
    if "connector_id" in tool:
        return settings.mcp_servers.get(tool["connector_id"])
    label = tool["server_label"]
    if label == SANDBOX_LABEL and label not in settings.mcp_servers and settings.sandbox_url is not None:
        return ToolServer(url=settings.sandbox_url, authorization=settings.sandbox_token, require_approval="never")
    return settings.mcp_servers.get(label)


def _headers_of(tool: Tool, server: ToolServer | None) -> dict[str, str]:
    """Return the headers to send.

    Of the operator's headers, a request may replace only ``authorization``, because the server may trust the others.
    """
    headers = {name.lower(): str(value) for name, value in tool.get("headers", {}).items()}
    if "authorization" in tool:
        headers["authorization"] = _bearer(tool["authorization"])
    if server is None:
        return headers
    own = {name.lower(): value.get_secret_value() for name, value in server.headers.items()}
    if server.authorization is not None:
        own["authorization"] = _bearer(server.authorization.get_secret_value())
    return {**own, **{name: value for name, value in headers.items() if name == "authorization" or name not in own}}


def _bearer(token: str) -> str:
    return token if token.lower().startswith("bearer ") else f"Bearer {token}"


def _plain(rule: Any) -> Any:
    return rule.model_dump(exclude_none=True) if hasattr(rule, "model_dump") else rule


def _matches(rule: list[str] | dict[str, Any], name: str, annotations: Mapping[str, Any] | None) -> bool:
    """Return whether a tool is in a list of names (``*`` means any), or matches all members of a filter."""
    if isinstance(rule, list):
        return name in rule or EVERY_TOOL in rule
    read_only = bool((annotations or {}).get("readOnlyHint", False))
    return _matches(rule.get("tool_names", [EVERY_TOOL]), name, None) and rule.get("read_only", read_only) == read_only
