"""Adapts the guarded httpx transport to the MCP SDK, which uses httpx2 (httpx's interface under other names).

1. A failed HTTP request would end the SDK's session and with it all other calls. So the bridge turns failures into answers:
   a POST gets a JSON-RPC error, and a body whose connection is lost just ends.
2. Answers are limited in size and must be uncompressed: a few compressed bytes can expand to any size.
3. Cookies are ignored. The SDK follows redirects only within the origin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import httpx2
import orjson

from ..network import failure_reason
from .guard import AddressRefused

HTTP_FAULT = -32050
"""The code of the JSON-RPC errors that the bridge creates. Their ``data`` is the HTTP status."""
SESSION_HEADER = "mcp-session-id"
UNREACHABLE = 502

_REFUSED_CREDENTIALS = frozenset({401, 403})


class MCPBridge(httpx2.AsyncBaseTransport):
    """Forward requests to ``transport`` and record their outcome. ``max_bytes`` limits answers other than event streams."""

    def __init__(self, transport: httpx.AsyncBaseTransport, max_bytes: int) -> None:
        self.status: int | None = None
        """The status of the last answer to a POST; 502 if there was none."""
        self.address_refused = False
        self.session_id: str | None = None
        """The server's id of the session, if it has one."""
        self._transport = transport
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        outgoing = httpx.Request(
            request.method,
            str(request.url),
            headers=request.headers.raw,
            content=await request.aread(),
            extensions={"timeout": request.extensions["timeout"]},
        )
        try:
            response = await self._transport.handle_async_request(outgoing)
        except httpx.TransportError as error:
            self.address_refused = isinstance(error, AddressRefused)
            self._note(request, UNREACHABLE)
            return _fault(UNREACHABLE, _reason(error))
        self._note(request, response.status_code, response.headers.get(SESSION_HEADER))
        streamed = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        body = _BridgedBody(response, None if streamed and response.is_success else self._max_bytes)
        answer = httpx2.Response(response.status_code, headers=response.headers.raw, stream=body)
        if fault := await _fault_in(answer, request.method):
            await answer.aclose()
            return fault
        return answer

    def _note(self, request: httpx2.Request, status: int, session_id: str | None = None) -> None:
        if request.method == "POST":
            self.status = status
            self.session_id = session_id or self.session_id

    async def aclose(self) -> None:
        await self._transport.aclose()


async def _fault_in(answer: httpx2.Response, method: str) -> httpx2.Response | None:
    """Return an error to pass to the SDK in place of ``answer``, or None if the SDK can read ``answer``."""
    status = answer.status_code
    if answer.headers.get("content-encoding", "identity") != "identity":
        return _fault(UNREACHABLE, "it sent a compressed answer, which was not requested")
    if method != "POST" or status < 400:
        return None
    if status in _REFUSED_CREDENTIALS:
        return _fault(status, "it refused the credentials")
    try:
        message = orjson.loads(await answer.aread())
    except orjson.JSONDecodeError:
        message = None
    if isinstance(message, dict) and "jsonrpc" in message:
        return None
    return _fault(status, f"it answered with HTTP status {status}")


def _fault(status: int, message: str) -> httpx2.Response:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": HTTP_FAULT, "message": message, "data": status}}
    return httpx2.Response(status, headers={"content-type": "application/json"}, content=orjson.dumps(body))


def _reason(error: httpx.TransportError) -> str:
    """Describe the error without the URL, which may contain credentials."""
    if isinstance(error, AddressRefused):
        return "its URL does not lead to a public address"
    if isinstance(error, httpx.TimeoutException):
        return "it did not answer in time"
    if not isinstance(error, httpx.ConnectError):
        return "the connection was lost"
    why = failure_reason(error)
    return f"it cannot be reached: {why}" if why else "it cannot be reached"


class _BridgedBody(httpx2.AsyncByteStream):
    """A body that ends early if the connection is lost or the body is too large.

    The SDK then sees invalid JSON, or an event stream without an answer.
    """

    def __init__(self, response: httpx.Response, max_bytes: int | None) -> None:
        self._response = response
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._response.stream, httpx.AsyncByteStream)
        size = 0
        try:
            async for data in self._response.stream:
                size += len(data)
                if self._max_bytes is not None and size > self._max_bytes:
                    return
                yield data
        except httpx.TransportError:
            return

    async def aclose(self) -> None:
        await self._response.aclose()
