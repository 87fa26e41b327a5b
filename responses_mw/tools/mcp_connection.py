"""Call the tools of an MCP server in a run, and convert the results."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import anyio
import mcp_types
import orjson
from mcp import MCPError
from pydantic import TypeAdapter, ValidationError

from ..errors import BadRequest, Unauthorized, UpstreamError
from ..protocol.types import Part
from ..redaction import redacted_values
from ..telemetry.context import level_of
from . import MAX_MCP_TOOLS, MAX_OUTPUT_BYTES, ToolResult, cut, failure
from .guarded_transport import HTTP_FAULT, UNREACHABLE
from .mcp_session import MCPFailure, MCPSession, MCPTarget, open_session

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CODE = "external_connector_error"
_PROTOCOL_ERROR = "mcp_protocol_error"
_MAX_PAGES = 100
_MAX_MESSAGE = 2000
_TIMED_OUT = 504
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError)
# Errors that the SDK raises for malformed messages, and that orjson raises for integers of more than 64 bits.
_MALFORMED_ERRORS = (ValidationError, RuntimeError, orjson.JSONEncodeError)
_BROKEN = "it closed the connection before its answer was complete"
_MALFORMED = "its answer is malformed, is too large, or has too many JSON values"
_CALLED: TypeAdapter[mcp_types.CallToolResult | mcp_types.InputRequiredResult] = TypeAdapter(
    mcp_types.CallToolResult | mcp_types.InputRequiredResult
)


class MCPConnection:
    """A connection to the MCP server `target`. The session is opened on first use, and reopened if it is lost.

    The caller must call `aclose`. The methods may be called concurrently, and from any task.
    """

    def __init__(self, target: MCPTarget) -> None:
        self.target = target
        self._session: MCPSession | None = None
        self._lost: list[MCPSession] = []
        self._opening = asyncio.Lock()
        self._closed = False

    async def aclose(self) -> None:
        """Close all sessions. Pending requests fail. This takes at most two seconds."""
        self._closed = True
        sessions = [*self._lost, *([self._session] if self._session else [])]
        self._lost, self._session = [], None
        await asyncio.gather(*(session.aclose() for session in sessions))

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools for an `mcp_list_tools` item.

        Raises `BadRequest` if the server's address is not public, or `Unauthorized` if the server refuses the caller's
        credentials. Raises `UpstreamError` (424) after any other failure.
        """
        try:
            return redacted_values(await self._request(self._list_tools))
        except MCPFailure as error:
            if error.address_refused:
                raise BadRequest(error.message, param="tools", code="invalid_value") from None
            if error.code in (401, 403) and self.target.credentials_of_caller:
                raise Unauthorized(error.message, param="tools", code=_CODE) from None
            cause = self.target.cause(error.code)
            raise UpstreamError(error.message, status=424, type=_CODE, param="tools", code=_CODE, cause=cause) from None

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool and return its result. If the call fails, the result has the `error` of an `mcp_call` item."""
        try:
            return _to_result(await self.invoke(name, arguments))
        except MCPFailure as error:
            return failure(error.message, kind=error.kind, code=error.code)
        except orjson.JSONEncodeError:
            return failure(self.target.failure(_MALFORMED).message, kind=_PROTOCOL_ERROR, code=mcp_types.PARSE_ERROR)

    async def invoke(self, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool and return the SDK's result, which may be an error of the tool. Raises `MCPFailure` on other errors."""
        request = mcp_types.CallToolRequest(params=mcp_types.CallToolRequestParams(name=name, arguments=arguments))
        return await self._request(lambda session: self._call_once(session, request))

    async def _request(self, work: Callable[[MCPSession], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work` in the session. Log a failure of the server. Raises the same errors as `_result`."""
        try:
            return await self._result(work)
        except MCPFailure as error:
            if error.kind != _PROTOCOL_ERROR and not error.address_refused:  # the message may quote the server
                level = level_of(self.target.cause(error.code))
                logger.log(level, "a request to the MCP server '%s' failed (HTTP %d)", self.target.label, error.code)
            raise

    async def _result(self, work: Callable[[MCPSession], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work` in the session. Raises `MCPFailure` if the session or the request fails."""
        session: MCPSession | None = None
        try:
            async with asyncio.timeout(self.target.timeout):
                session = await self._open_session()
                return await session.request(work(session))
        except MCPError as error:
            if session is not None and (error.code == mcp_types.CONNECTION_CLOSED or session.is_forgotten):
                self._drop(session)
            raise self._failure(error) from None
        except _MALFORMED_ERRORS:
            raise self.target.failure(_MALFORMED, mcp_types.PARSE_ERROR, _PROTOCOL_ERROR) from None
        except _GONE:
            raise self.target.failure(_BROKEN) from None
        except TimeoutError:
            self._drop(session)
            raise self.target.failure(f"it did not answer within {self.target.timeout:g} s", _TIMED_OUT) from None

    async def _open_session(self) -> MCPSession:
        async with self._opening:
            if not self._closed and (self._session is None or self._session.is_over):
                self._session = await open_session(self.target)
            session = self._session
        if self._closed or session is None:
            await self.aclose()
            raise self.target.failure("the connection is closed")
        return session

    async def _call_once(self, session: MCPSession, request: mcp_types.CallToolRequest) -> mcp_types.CallToolResult:
        # The SDK's `call_tool` validates results against the server's schema, whose regular expressions may never end.
        try:
            result = await session.client.send_request(request, _CALLED)
        except MCPError as error:
            if error.code != mcp_types.HEADER_MISMATCH:
                raise
            await self._list_tools(session)  # from the list, the SDK learns which arguments the server also expects as headers
            result = await session.client.send_request(request, _CALLED)
        if isinstance(result, mcp_types.InputRequiredResult):
            reason = "the tool asks for input, which is not supported"
            raise self.target.failure(reason, mcp_types.INVALID_REQUEST, _PROTOCOL_ERROR)
        return result

    async def _list_tools(self, session: MCPSession) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        bytes_left = MAX_OUTPUT_BYTES
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await session.client.list_tools(params=mcp_types.PaginatedRequestParams(cursor=cursor))
            listed = [_as_listed(tool) for tool in page.tools]
            tools += listed
            bytes_left -= sum(len(orjson.dumps(tool)) for tool in listed)
            if bytes_left < 0 or len(tools) > MAX_MCP_TOOLS:
                raise self.target.failure(f"it lists more than {MAX_MCP_TOOLS} tools, or their definitions are too large")
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise self.target.failure(f"its list of tools has more than {_MAX_PAGES} pages")

    def _drop(self, session: MCPSession | None) -> None:
        """Use a new session for further calls, because `session` may be broken. Its pending calls may still succeed."""
        if session is not None and session is self._session:
            self._session = None
            self._lost.append(session)

    def _failure(self, error: MCPError) -> MCPFailure:
        if error.code == mcp_types.CONNECTION_CLOSED:
            return self.target.failure(_BROKEN)
        reason = _MALFORMED if error.code == mcp_types.PARSE_ERROR else cut(self.target.reason(error), _MAX_MESSAGE).rstrip(".")
        if error.code == HTTP_FAULT:
            return self.target.failure(reason, error.data if isinstance(error.data, int) else UNREACHABLE)
        return self.target.failure(reason, error.code, _PROTOCOL_ERROR)


def _as_listed(tool: mcp_types.Tool) -> dict[str, Any]:
    annotations = tool.annotations and tool.annotations.model_dump(by_alias=True, exclude_none=True)
    listed = {"name": tool.name, "input_schema": tool.input_schema, "description": tool.description, "annotations": annotations}
    return {name: value for name, value in listed.items() if value is not None}


# -- results -----------------------------------------------------------------------------------------------------------------

_IMAGE_TYPE = re.compile(r"image/[a-z0-9.+-]{1,64}")


def _to_result(returned: mcp_types.CallToolResult) -> ToolResult:
    """Convert the result of a tool, limited to `MAX_OUTPUT_BYTES`. In the member `output`, notes replace images."""
    parts = [_part(block) for block in returned.content]
    has_text = any(isinstance(block, mcp_types.TextContent) for block in returned.content)
    if returned.structured_content is not None and not has_text:
        parts.append(_text(orjson.dumps(returned.structured_content).decode()))
    parts = list(_bounded(parts))
    text = "\n".join(part["text"] if part["type"] == "input_text" else _described(part) for part in parts)
    if returned.is_error:
        error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}
        return ToolResult(f"The tool failed: {text}" if text else "The tool failed.", {"error": error}, failed=True)
    pictured = any(part["type"] == "input_image" for part in parts)
    return ToolResult(parts if pictured else text, {"output": text})


def _part(block: mcp_types.ContentBlock) -> Part:
    match block:
        case mcp_types.TextContent(text=text):
            return _text(text)
        case mcp_types.ImageContent(data=data, mime_type=kind):
            return _image(data, kind) or _text(f"[an image of type {kind[:64]} that cannot be shown]")
        case mcp_types.AudioContent(data=data, mime_type=kind):
            return _text(f"[audio of type {kind[:64]}, {_decoded_size(data)} bytes: it cannot be played to you]")
        case mcp_types.ResourceLink(uri=uri, name=name, description=description):
            return _text(f"[resource {name}: {uri}]" + (f" {description}" if description else ""))
    resource = block.resource
    if isinstance(resource, mcp_types.TextResourceContents):
        return _text(f"[resource {resource.uri}]\n{resource.text}")
    kind = resource.mime_type or "unknown"
    note = f"[resource {resource.uri} of type {kind[:64]}, {_decoded_size(resource.blob)} bytes: it is not text]"
    return _image(resource.blob, kind) or _text(note)


def _text(text: str) -> Part:
    return {"type": "input_text", "text": text}


def _image(data: str, kind: str) -> Part | None:
    kind = kind.lower()
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None
    return {"type": "input_image", "image_url": f"data:{kind};base64,{data}"} if _IMAGE_TYPE.fullmatch(kind) else None


def _decoded_size(data: str) -> int:
    return len(data) * 3 // 4 - data[-2:].count("=")


def _bounded(parts: list[Part]) -> Iterator[Part]:
    """Yield the parts that fit into `MAX_OUTPUT_BYTES`. If some do not fit, also yield a note with their number."""
    left = MAX_OUTPUT_BYTES
    for index, part in enumerate(parts):
        if left <= 0:
            yield _text(f"... ({len(parts) - index} further parts omitted)")
            return
        fitted = _fitted(part, left)
        yield fitted
        left -= len((fitted.get("text") or fitted.get("image_url", "")).encode()) + 1  # the parts are joined with line breaks


def _fitted(part: Part, max_bytes: int) -> Part:
    """Return `part` with at most `max_bytes`. A longer text is truncated, and a larger image is replaced with a note."""
    if part["type"] == "input_text":
        return _text(cut(part["text"], max_bytes))
    return part if len(part["image_url"]) <= max_bytes else _text(f"{_described(part)} omitted: it is too large")


def _described(part: Part) -> str:
    head, _, data = part["image_url"].partition(";base64,")
    return f"[{head.removeprefix('data:')}, {_decoded_size(data)} bytes]"
