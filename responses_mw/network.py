"""The network transport: aiohttp's client beneath httpx's interface, at half the cost of httpx's own.

The package httpx-aiohttp does the same, but is too free for a proxy: it normalises the target, joins duplicate headers, adds
headers of its own, keeps one caller's cookies for the next, calls a refused connection a time-out, and lets aiohttp's own
exceptions through.
"""

from __future__ import annotations

import aiohttp
import httpx
from multidict import CIMultiDict
from yarl import URL

__all__ = ["NetworkTransport"]

# Headers that aiohttp would add where the request has none.
_NOT_ADDED = ("accept", "accept-encoding", "content-type", "user-agent")
# Idle connections go before common servers close them (5 s), so that no request is sent into a closing one.
_KEPT_IDLE = 4.0


class NetworkTransport(httpx.AsyncBaseTransport):
    """Sends requests over pooled connections. Bodies are streamed both ways, answers stay compressed as they came.

    Request extensions: ``timeout`` as httpx's, ``target`` the bytes to send as the request's target.
    Raises ``httpx.ConnectError``, ``ConnectTimeout``, ``ReadError``, ``ReadTimeout``, ``RemoteProtocolError``.
    """

    def __init__(self, connections: int) -> None:
        """``connections``: how many are open at once, at the most."""
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        session = self._session or self._open()
        timeout = request.extensions.get("timeout", {})
        try:
            answer = await session.request(
                request.method,
                _url(request),
                headers=_headers(request),
                data=_body(request),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    connect=timeout.get("pool"), sock_connect=timeout.get("connect"), sock_read=timeout.get("read")
                ),
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _translated(error) from error
        return httpx.Response(answer.status, headers=answer.raw_headers, stream=_Body(answer))

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=_KEPT_IDLE)
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), skip_auto_headers=_NOT_ADDED, auto_decompress=False
        )
        return self._session


class _Body(httpx.AsyncByteStream):
    """The body of an answer: what has arrived is one read. An iterator, and not a generator: it is run once for each token."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self._content = answer.content

    def __aiter__(self) -> _Body:
        return self

    async def __anext__(self) -> bytes:
        try:
            data = await self._content.readany()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _translated(error) from error
        if not data:
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        """An answer that was not read to its end closes its connection."""
        self._answer.release()
        await self._answer.wait_for_close()


def _url(request: httpx.Request) -> URL:
    target = request.extensions.get("target", request.url.raw_path)
    return URL(f"{request.url.scheme}://{request.url.netloc.decode()}{target.decode()}", encoded=True)


def _headers(request: httpx.Request) -> CIMultiDict[str]:
    """All but ``Transfer-Encoding``, which is aiohttp's to set."""
    encoding = request.headers.encoding
    pairs = ((name.decode("ascii"), value.decode(encoding)) for name, value in request.headers.raw)
    return CIMultiDict((name, value) for name, value in pairs if name.lower() != "transfer-encoding")


def _body(request: httpx.Request) -> bytes | httpx.AsyncByteStream | None:
    if isinstance(request.stream, httpx.ByteStream):
        return b"".join(request.stream) or None
    assert isinstance(request.stream, httpx.AsyncByteStream)
    return request.stream


def _translated(error: Exception) -> httpx.TransportError:
    message = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return httpx.ConnectTimeout(message)
    if isinstance(error, TimeoutError):
        return httpx.ReadTimeout(message)
    if isinstance(error, aiohttp.ClientConnectorError):
        return httpx.ConnectError(message)
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | aiohttp.ClientResponseError):
        return httpx.RemoteProtocolError(message)
    return httpx.ReadError(message)
