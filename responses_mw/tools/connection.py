"""One MCP server as a run uses it: opened when it is first needed, kept while the run lasts, opened anew where it was lost."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import anyio
import orjson
from mcp import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    HEADER_MISMATCH,
    PARSE_ERROR,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    PaginatedRequestParams,
    Tool,
)
from pydantic import ValidationError

from ..errors import APIError, BadRequest, Unauthorized, UpstreamError
from .bridge import HTTP_FAULT, UNREACHABLE
from .content import cut, failure, to_result
from .guard import Resolve, resolve
from .result import Result
from .session import Bounds, MCPSession, OpeningFailed, Target, open_session

CODE = "external_connector_error"

_MOST_PAGES = 100
_MOST_MESSAGE = 2000
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError)
_MALFORMED_ERRORS = (ValidationError, RuntimeError, orjson.JSONEncodeError)
"""The SDK's; and of what came, integers of more than 64 bits cannot be written again."""
_BROKEN = "it broke off its answer"
_MALFORMED = "its answer is malformed, or too large"


class CallFailed(Exception):
    """A call of a tool that came to nothing; ``result`` tells the model so."""

    def __init__(self, result: Result) -> None:
        super().__init__()
        self.result = result


class MCPConnection:
    """Connects to ``target``, within ``bounds``. An async context manager: leaving it, or ``aclose``, ends what is under way.

    Its methods may be called from several tasks at a time. It can be closed by another task than the one that used it.
    """

    def __init__(self, target: Target, bounds: Bounds, *, resolve: Resolve = resolve) -> None:
        self._target = target
        self._bounds = bounds
        self._resolve = resolve
        self._session: MCPSession | None = None
        self._lost: list[MCPSession] = []
        self._opening = asyncio.Lock()
        self._closed = False

    @property
    def label(self) -> str:
        return self._target.label

    @property
    def url(self) -> str:
        return self._target.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the requests under way at once; calls that wait for them fail. Takes a second at the most."""
        self._closed = True
        sessions = [*self._lost, *([self._session] if self._session else [])]
        self._lost, self._session = [], None
        await asyncio.gather(*(session.aclose() for session in sessions))

    async def list_tools(self) -> list[dict[str, Any]]:
        """The server's tools as an ``mcp_list_tools`` item has them: ``name``, ``input_schema``, and, where the server tells
        them, ``description`` and ``annotations``.

        Raises ``Unauthorized`` (the server refuses the caller's credentials), ``BadRequest`` (its URL leads to what is not
        public), ``UpstreamError`` with status 424 (unreachable, broken, too much). The messages name the label.
        """
        session: MCPSession | None = None
        try:
            async with asyncio.timeout(self._bounds.timeout):
                session = await self._opened()
                return await session.request(self._listed(session))
        except OpeningFailed as error:
            raise self._error(str(error), error.status, address_refused=error.address_refused) from None
        except MCPError as error:
            self._drop(session)
            raise self._error(self._reason(error), error.data if error.code == HTTP_FAULT else None) from None
        except _MALFORMED_ERRORS:
            raise self._error(_MALFORMED) from None
        except _GONE:
            raise self._error(_BROKEN) from None
        except TimeoutError:
            raise self._error("it did not answer in time") from None

    async def call(self, name: str, arguments: dict[str, Any]) -> Result:
        """What the tool returns; whatever goes wrong is a failed result, whose ``error`` is as in an ``mcp_call`` item."""
        try:
            return to_result(await self.invoke(name, arguments), self._bounds.output_bytes)
        except CallFailed as error:
            return error.result
        except orjson.JSONEncodeError:
            return self._protocol_failure(_MALFORMED, PARSE_ERROR)

    async def invoke(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """What the tool returns, as it came; that it failed may be in it. Raises CallFailed."""
        session: MCPSession | None = None
        try:
            async with asyncio.timeout(self._bounds.timeout):
                session = await self._opened()
                return await session.request(self._called(session, CallToolRequestParams(name=name, arguments=arguments)))
        except OpeningFailed as error:
            raise CallFailed(failure(self._told(str(error)), code=error.status)) from None
        except MCPError as error:
            if session is not None and (error.code == CONNECTION_CLOSED or session.is_forgotten):
                self._drop(session)
            raise CallFailed(self._failure(error)) from None
        except _MALFORMED_ERRORS:
            raise CallFailed(self._protocol_failure(_MALFORMED, PARSE_ERROR)) from None
        except _GONE:
            raise CallFailed(failure(self._told(_BROKEN))) from None
        except TimeoutError:
            self._drop(session)
            message = f"the call took longer than {self._bounds.timeout:g} s and was ended"
            raise CallFailed(failure(message, code=504)) from None

    async def _opened(self) -> MCPSession:
        async with self._opening:
            if self._session is None or self._session.is_over:
                self._check_open()
                self._session = await open_session(self._target, self._bounds, self._resolve)
            session = self._session
        if self._closed:
            await self.aclose()
        self._check_open()
        return session

    def _check_open(self) -> None:
        if self._closed:
            raise OpeningFailed("the connection is closed")

    async def _called(self, session: MCPSession, params: CallToolRequestParams) -> CallToolResult:
        """Not by the SDK's own method: that checks results by the server's schema, whose patterns can take for ever."""
        request = CallToolRequest(params=params)
        try:
            return await session.client.send_request(request, CallToolResult)
        except MCPError as error:
            if error.code != HEADER_MISMATCH:
                raise
        await self._listed(session)  # arguments that the server wants as headers too are known from its list
        return await session.client.send_request(request, CallToolResult)

    async def _listed(self, session: MCPSession) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        left = self._bounds.output_bytes
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page = await session.client.list_tools(params=PaginatedRequestParams(cursor=cursor))
            tools += map(_as_listed, page.tools)
            left -= sum(len(orjson.dumps(_as_listed(tool))) for tool in page.tools)
            if left < 0 or len(tools) > self._bounds.tools:
                raise self._error(f"it lists more than {self._bounds.tools} tools, or too long ones")
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise self._error("its list of tools does not end")

    def _drop(self, session: MCPSession | None) -> None:
        """A session that may be of no use any more serves no more calls; those under way may yet be answered."""
        if session is not None and session is self._session:
            self._session = None
            self._lost.append(session)

    def _failure(self, error: MCPError) -> Result:
        if error.code == HTTP_FAULT:
            status = error.data if isinstance(error.data, int) else UNREACHABLE
            return failure(self._told(self._reason(error)), code=status)
        if error.code == CONNECTION_CLOSED:
            return failure(self._told(_BROKEN))
        return self._protocol_failure(self._reason(error), error.code)

    def _protocol_failure(self, reason: str, code: int) -> Result:
        return failure(self._told(reason), kind="mcp_protocol_error", code=code)

    def _reason(self, error: MCPError) -> str:
        if error.code == PARSE_ERROR:
            return _MALFORMED
        return cut(self._target.reason(error), _MOST_MESSAGE).rstrip(".")

    def _told(self, reason: str) -> str:
        return f"MCP server '{self.label}': {reason}."

    def _error(self, reason: str, status: int | None = None, *, address_refused: bool = False) -> APIError:
        message = self._told(reason)
        if address_refused:
            return BadRequest(message, param="tools", code="invalid_value")
        if status in (401, 403) and self._target.credentials_of_caller:
            return Unauthorized(message, param="tools", code=CODE)
        return UpstreamError(message, status=424, type=CODE, param="tools", code=CODE)


def _as_listed(tool: Tool) -> dict[str, Any]:
    listed: dict[str, Any] = {"name": tool.name, "input_schema": tool.input_schema}
    if tool.description is not None:
        listed["description"] = tool.description
    if tool.annotations is not None:
        listed["annotations"] = tool.annotations.model_dump(by_alias=True, exclude_none=True)
    return listed
