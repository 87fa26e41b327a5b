"""The guarded transport as the MCP SDK takes one: it speaks httpx2, which has httpx's interface under names of its own.

1. The SDK lets one exchange that breaks end its session, and with it every other call. So a fault is told to it as an answer:
   to the POST that carries a request, a JSON-RPC error; to a body under way, an end.
2. Answers are bounded in size, and taken uncompressed only: a few bytes can expand to any number.
3. Cookies do not matter here, redirects are followed by the SDK, and only within the origin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import httpx2
import orjson

from .guard import AddressRefused

HTTP_FAULT = -32050
"""The code of JSON-RPC errors that are made here; their ``data`` is the HTTP status."""
SESSION_HEADER = "mcp-session-id"
UNREACHABLE = 502

_REFUSED_CREDENTIALS = frozenset({401, 403})


class Bridge(httpx2.AsyncBaseTransport):
    """Passes requests on to ``transport`` and remembers what came of them. An answer that is no event stream has at most
    ``most_bytes``."""

    def __init__(self, transport: httpx.AsyncBaseTransport, most_bytes: int) -> None:
        self.status: int | None = None
        """Of the last answer to a POST; 502 where there was none."""
        self.address_refused = False
        self.session_id: str | None = None
        """What the server calls the session, if it keeps one."""
        self._transport = transport
        self._most_bytes = most_bytes

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
            return _fault(UNREACHABLE, _told(error))
        self._note(request, response.status_code, response.headers.get(SESSION_HEADER))
        streamed = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        body = _Body(response, None if streamed and response.is_success else self._most_bytes)
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
    """What is told in place of an answer that holds no message."""
    status = answer.status_code
    if answer.headers.get("content-encoding", "identity") != "identity":
        return _fault(UNREACHABLE, "it compressed its answer without being asked to")
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


def _told(error: httpx.TransportError) -> str:
    """What may be said of it: never the URL, which may hold credentials."""
    if isinstance(error, AddressRefused):
        return "its URL does not lead to a public address"
    if isinstance(error, httpx.TimeoutException):
        return "it did not answer in time"
    return "it cannot be reached" if isinstance(error, httpx.ConnectError) else "the connection broke"


class _Body(httpx2.AsyncByteStream):
    """Ends where it breaks, or gets too long: what was cut is no JSON, and an event stream without its answer is a fault."""

    def __init__(self, response: httpx.Response, most_bytes: int | None) -> None:
        self._response = response
        self._most_bytes = most_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._response.stream, httpx.AsyncByteStream)
        size = 0
        try:
            async for data in self._response.stream:
                size += len(data)
                if self._most_bytes is not None and size > self._most_bytes:
                    return
                yield data
        except httpx.TransportError:
            return

    async def aclose(self) -> None:
        await self._response.aclose()
