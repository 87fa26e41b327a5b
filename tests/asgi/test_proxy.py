from __future__ import annotations

import asyncio
import gzip
import hashlib
import socket
import struct
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from responses_mw import create_app
from responses_mw.upstream.transports import http11
from responses_mw.upstream.transports.http11 import NetworkTransport
from tests.support.configured import make_settings
from tests.support.scripted import HELLO
from tests.support.servers import lifespan, proxy_to

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

    Connection = Callable[[StreamReader, StreamWriter], Awaitable[None]]

MIB = 2**20
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def httpx_transport() -> httpx.AsyncBaseTransport:
    return httpx.AsyncHTTPTransport(verify=False)


def network_transport() -> httpx.AsyncBaseTransport:
    return NetworkTransport()


@pytest.fixture(params=[httpx_transport, network_transport], ids=["httpx", "network"])
def transport(request: pytest.FixtureRequest) -> httpx.AsyncBaseTransport:
    made: httpx.AsyncBaseTransport = request.param()
    return made


def listening(receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return sock


@asynccontextmanager
async def served(app: ASGIApp, http: Any = "auto", receive_buffer: int | None = None) -> AsyncIterator[str]:
    """Serve `app` with uvicorn on a free port; yield its URL."""
    sock = listening(receive_buffer)
    config = uvicorn.Config(app, http=http, lifespan="on", log_config=None, timeout_graceful_shutdown=1)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[sock])
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await server.shutdown(sockets=[sock])


class Bounded(httpx.AsyncBaseTransport):
    """A transport whose connections and reads take at most `patience` seconds, if it bounds them."""

    def __init__(self, transport: httpx.AsyncBaseTransport, patience: float) -> None:
        self._transport = transport
        self._timeout = httpx.Timeout(patience).as_dict()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions["timeout"] = self._timeout
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        await self._transport.aclose()


@asynccontextmanager
async def proxied(
    transport: httpx.AsyncBaseTransport, upstream: str, patience: float = 10, **server: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a proxy in front of `upstream`; the proxy waits `patience` seconds for the upstream."""
    async with (
        transport,
        served(proxy_to(Bounded(transport, patience), upstream), **server) as url,
        httpx.AsyncClient(base_url=url, timeout=30, verify=False) as client,
    ):
        yield client


@asynccontextmanager
async def raw_upstream(connection: Connection, receive_buffer: int | None = None) -> AsyncIterator[str]:
    """A server of raw connections; each is closed when `connection` returns."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await connection(reader, writer)
        finally:
            writer.close()

    sock = listening(receive_buffer)
    server = await asyncio.start_server(serve, sock=sock)
    async with server:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


def answering(answer: bytes, heads: list[bytes] | None = None) -> Connection:
    """A connection that records the head of a request and sends one answer."""

    async def connection(reader: StreamReader, writer: StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if heads is not None:
            heads.append(head)
        writer.write(answer)
        await writer.drain()

    return connection


async def raw_exchange(client: httpx.AsyncClient, request: bytes) -> bytes:
    """Send bytes to the proxy and read until it closes the connection."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    try:
        writer.write(request)
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def header_lines(head: bytes) -> list[bytes]:
    """The header lines of a message, names in lower case."""
    lines = head.split(b"\r\n\r\n")[0].split(b"\r\n")[1:]
    return [name.lower() + b":" + value for name, _, value in (line.partition(b":") for line in lines)]


async def test_each_event_is_proxied_before_the_upstream_sends_the_next(transport: httpx.AsyncBaseTransport) -> None:
    events = [b"data: one\n\n", b": ping\n\n", "data: zwölf\n\n".encode(), b"data: [DONE]\n\n"]
    arrived = asyncio.Event()

    async def app(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in events:
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await arrived.wait()
            arrived.clear()
        writer.write(b"0\r\n\r\n")

    received = []
    async with (
        raw_upstream(app) as upstream,
        proxied(transport, upstream) as client,
        client.stream("GET", "/v1/chat/completions") as response,
    ):
        async for chunk in response.aiter_raw():
            received.append(chunk)
            arrived.set()
    assert received == events
    assert response.headers["content-type"] == "text/event-stream"


async def settled(read: Callable[[], int]) -> int:
    """Wait until a counter has started and then not changed for 0.3 s; return its value."""
    before = 0
    while not before or before != read():
        before = read()
        await asyncio.sleep(0.3)
    return before


@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "chunked"])
async def test_a_slow_upstream_pauses_an_upload_that_arrives_complete(
    transport: httpx.AsyncBaseTransport, declared: bool
) -> None:
    sent, go = 0, asyncio.Event()
    received = hashlib.sha256()
    expected = hashlib.sha256()

    async def upload() -> AsyncIterator[bytes]:
        nonlocal sent
        for number in range(64):
            block = bytes([number]) * MIB
            expected.update(block)
            sent += MIB
            yield block

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        await go.wait()
        more = True
        while more:
            message = await receive()
            received.update(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"stored"})

    headers = {"content-length": str(64 * MIB)} if declared else {}
    async with (
        served(accepting_lifespan(app), receive_buffer=65536) as upstream,
        proxied(transport, upstream, patience=60, receive_buffer=65536) as client,
        asyncio.TaskGroup() as group,
    ):
        answer = group.create_task(client.post("/files", content=upload(), headers=headers, timeout=60))
        held_at = await settled(lambda: sent)
        assert 0 < held_at <= 16 * MIB
        go.set()
        response = await answer
    assert (response.status_code, response.text) == (201, "stored")
    assert received.digest() == expected.digest()


def accepting_lifespan(app: ASGIApp) -> ASGIApp:
    """`app`, with a lifespan that does nothing."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    return wrapped


async def test_a_slow_client_pauses_a_download_that_arrives_complete(transport: httpx.AsyncBaseTransport) -> None:
    sent = 0

    async def app(reader: StreamReader, writer: StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 * MIB))
        for number in range(64):
            writer.write(bytes([number]) * MIB)
            await writer.drain()
            sent += MIB

    digest = hashlib.sha256()
    async with (
        raw_upstream(app) as upstream,
        proxied(transport, upstream, patience=60) as client,
        client.stream("GET", "/blob") as response,
    ):
        assert await settled(lambda: sent) <= 32 * MIB
        async for chunk in response.aiter_raw():
            digest.update(chunk)
    assert digest.digest() == hashlib.sha256(b"".join(bytes([number]) * MIB for number in range(64))).digest()


async def test_a_compressed_body_is_proxied_unchanged(transport: httpx.AsyncBaseTransport) -> None:
    body = gzip.compress(b"hello " * 100)
    answer = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    async with (
        raw_upstream(answering(answer)) as upstream,
        proxied(transport, upstream) as client,
        client.stream("GET", "/") as response,
    ):
        assert b"".join([chunk async for chunk in response.aiter_raw()]) == body
    assert response.headers["content-encoding"] == "gzip"
    assert response.headers["content-length"] == str(len(body))


async def test_the_upstream_gets_the_clients_headers_without_hop_by_hop_headers(
    transport: httpx.AsyncBaseTransport,
) -> None:
    heads: list[bytes] = []
    async with (
        raw_upstream(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", heads)) as upstream,
        proxied(transport, upstream) as client,
    ):
        await raw_exchange(
            client,
            b"GET / HTTP/1.1\r\nHost: public.example\r\nConnection: close, X-Private\r\nX-Private: 1\r\n"
            b"Keep-Alive: 5\r\nTE: trailers\r\nTrailer: X-Sum\r\nUpgrade: h2c\r\nProxy-Authorization: Basic eA==\r\n"
            b"Proxy-Connection: close\r\nExpect: 100-continue\r\n"
            b"X-B: 1\r\nAuthorization: Bearer t\r\nAccept-Encoding: br\r\nCookie: a=b; c=\r\nX-A: 2\r\n\r\n",
        )
    port = int(client.base_url.port or 0)
    assert header_lines(heads[0]) == [
        b"host: " + upstream.removeprefix("http://").encode(),
        b"x-b: 1",
        b"authorization: Bearer t",
        b"accept-encoding: br",
        b"cookie: a=b; c=",
        b"x-a: 2",
        b"x-forwarded-for: 127.0.0.1",
        b"x-forwarded-proto: http",
        b"x-forwarded-host: public.example",
        b"x-forwarded-port: %d" % port,
    ]


async def test_the_client_gets_the_upstreams_headers_without_hop_by_hop_headers(
    transport: httpx.AsyncBaseTransport,
) -> None:
    answer = (
        b"HTTP/1.1 401 Nope\r\nSet-Cookie: a=1\r\nX-B: 1\r\nSet-Cookie: b=2\r\nConnection: close, x-private\r\n"
        b"X-Private: 1\r\nKeep-Alive: 5\r\nProxy-Authenticate: Basic\r\nTrailer: x\r\nUpgrade: h2c\r\n"
        b"WWW-Authenticate: Bearer\r\nX-B: 2\r\nContent-Length: 2\r\n\r\nno"
    )
    async with raw_upstream(answering(answer)) as upstream, proxied(transport, upstream) as client:
        received = await raw_exchange(client, b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    own = (b"date:", b"server:", b"connection:")  # uvicorn's
    assert received.startswith(b"HTTP/1.1 401 ")
    assert received.endswith(b"\r\n\r\nno")
    assert [line for line in header_lines(received) if not line.startswith(own)] == [
        b"set-cookie: a=1",
        b"x-b: 1",
        b"set-cookie: b=2",
        b"www-authenticate: Bearer",
        b"x-b: 2",
        b"content-length: 2",
    ]


async def test_duplicate_request_headers_and_non_ascii_bytes_are_preserved(transport: httpx.AsyncBaseTransport) -> None:
    heads: list[bytes] = []
    async with (
        raw_upstream(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", heads)) as upstream,
        proxied(transport, upstream) as client,
    ):
        await raw_exchange(client, b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nX-A: 1\r\nX-B: \xe9\r\nX-A: 2\r\n\r\n")
    assert header_lines(heads[0])[1:4] == [b"x-a: 1", b"x-b: \xe9", b"x-a: 2"]


async def test_forwarded_headers_of_an_outer_proxy_are_extended_or_preserved(
    transport: httpx.AsyncBaseTransport,
) -> None:
    heads: list[bytes] = []
    before = {
        "x-forwarded-for": "192.0.2.1, 192.0.2.2",
        "x-forwarded-proto": "https",
        "x-forwarded-host": "public.example",
        "x-forwarded-port": "443",
    }
    async with (
        raw_upstream(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", heads)) as upstream,
        proxied(transport, upstream, http="h11") as client,
    ):
        await client.get("/", headers=before)
    lines = header_lines(heads[0])
    forwarded = dict(line.split(b": ", 1) for line in lines if line.startswith(b"x-forwarded"))
    assert forwarded.pop(b"x-forwarded-for").startswith(b"192.0.2.1, 192.0.2.2, ")
    assert forwarded == {
        b"x-forwarded-proto": b"https",
        b"x-forwarded-host": b"public.example",
        b"x-forwarded-port": b"443",
    }
    assert sum(line.startswith(b"x-forwarded") for line in lines) == 4


@pytest.mark.parametrize(
    ("base", "target", "expected"),
    [
        ("", "/v1/a%2Fb%20c?x=1%262&y=a+b&z", "/v1/a%2Fb%20c?x=1%262&y=a+b&z"),
        ("", "//double//slash/?q=/?", "//double//slash/?q=/?"),
        ("/base/", "/v1/models", "/base/v1/models"),
        ("/base", "/", "/base/"),
        ("", "/", "/"),
    ],
)
async def test_path_and_query_are_appended_to_the_upstreams_base_url(
    transport: httpx.AsyncBaseTransport, base: str, target: str, expected: str
) -> None:
    assert await target_seen(transport, base, target) == expected


@pytest.mark.parametrize("target", ["/a%2fb%7e%41/../c/./{x}|?q=%7e&r=%zz&s='\"", "/%e2%82%ac"])
async def test_a_target_is_not_normalised(transport: httpx.AsyncBaseTransport, target: str) -> None:
    assert await target_seen(transport, "", target) == target


async def target_seen(transport: httpx.AsyncBaseTransport, base: str, target: str) -> str:
    """Return the target that the upstream gets for a request to `target`."""
    heads: list[bytes] = []
    async with (
        raw_upstream(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", heads)) as upstream,
        proxied(transport, upstream + base) as client,
    ):
        await raw_exchange(client, f"GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
    return heads[0].split(b" ")[1].decode()


async def call(app: ASGIApp, scope: dict[str, Any], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Call `app` with `scope` and `messages`, and nothing after them; return the messages that it sends."""
    inbox, sent = list(messages), []

    async def receive() -> Any:
        if not inbox:
            await anyio.sleep_forever()
        return inbox.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


HTTP_SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "GET",
    "scheme": "http",
    "path": "/",
    "query_string": b"",
    "headers": [],
}


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({"path": "/api/v1", "raw_path": b"/api/v1", "root_path": "/api"}, b"/v1"),
        ({"path": "/v1", "raw_path": b"/v1", "root_path": "/api"}, b"/v1"),
        ({"path": "/apis", "raw_path": b"/apis", "root_path": "/api"}, b"/apis"),
        ({"path": "/api", "raw_path": b"/api", "root_path": "/api/"}, b"/"),
        ({"path": "/a b/ü"}, b"/a%20b/%C3%BC"),
    ],
)
async def test_the_hosts_root_path_does_not_reach_the_upstream(scope: dict[str, Any], expected: bytes) -> None:
    heads: list[bytes] = []
    async with (
        raw_upstream(answering(b"HTTP/1.1 204 No\r\n\r\n", heads)) as upstream,
        httpx_transport() as transport,
    ):
        sent = await call(proxy_to(transport, upstream), HTTP_SCOPE | scope, {"type": "http.request", "body": b""})
    assert heads[0].split(b" ")[1] == expected
    assert sent[0]["status"] == 204


@pytest.mark.parametrize("before", [[], [{"type": "http.request", "body": b"x", "more_body": True}]])
async def test_a_single_http_disconnect_message_ends_the_exchange(
    transport: httpx.AsyncBaseTransport, before: list[dict[str, Any]]
) -> None:
    async with raw_upstream(silent) as upstream, transport:
        async with asyncio.timeout(60):
            sent = await call(
                proxy_to(transport, upstream), HTTP_SCOPE | {"method": "POST"}, *before, {"type": "http.disconnect"}
            )
    assert sent == []


async def test_a_receive_that_fails_ends_the_exchange(transport: httpx.AsyncBaseTransport) -> None:
    messages = [{"type": "http.request", "body": b""}]

    async def receive() -> dict[str, Any]:
        if not messages:
            raise OSError("the client is gone")
        return messages.pop()

    async def send(message: Any) -> None:
        raise AssertionError(message)

    async with raw_upstream(silent) as upstream, transport, asyncio.timeout(60):
        await proxy_to(transport, upstream)(HTTP_SCOPE, receive, send)


async def test_a_target_that_is_not_a_path_is_a_400() -> None:
    async with httpx_transport() as transport:
        proxy = proxy_to(transport, "http://127.0.0.1:9")
        start, body = await call(proxy, HTTP_SCOPE | {"raw_path": b"*"}, {"type": "http.request", "body": b""})
    assert start["status"] == 400
    assert b"invalid_request_error" in body["body"]


@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize(
    ("method", "answer", "status", "length"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", 200, "5"),
        ("OPTIONS", b"HTTP/1.1 200 OK\r\nallow: GET\r\ncontent-length: 0\r\n\r\n", 200, "0"),
        ("DELETE", b"HTTP/1.1 204 No Content\r\n\r\n", 204, None),
        ("GET", b"HTTP/1.1 304 Not Modified\r\netag: x\r\ncontent-length: 5\r\n\r\n", 304, None),
        ("GET", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, "0"),
        ("PURGE", b"HTTP/1.1 302 Found\r\nlocation: /there\r\ncontent-length: 0\r\n\r\n", 302, "0"),
    ],
)
async def test_responses_without_a_body_are_proxied(
    transport: httpx.AsyncBaseTransport, http: str, method: str, answer: bytes, status: int, length: str | None
) -> None:
    async with raw_upstream(answering(answer)) as upstream, proxied(transport, upstream, http=http) as client:
        response = await client.request(method, "/")
        assert (response.status_code, response.content) == (status, b"")
        assert response.headers.get("content-length") == length
        assert (await client.request(method, "/")).status_code == status


async def test_a_body_delimited_by_the_end_of_the_connection_is_proxied(transport: httpx.AsyncBaseTransport) -> None:
    async with raw_upstream(answering(b"HTTP/1.0 200 OK\r\n\r\nhello")) as upstream, proxied(transport, upstream) as client:
        assert (await client.get("/")).text == "hello"


@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_a_client_that_expects_100_continue_gets_it(transport: httpx.AsyncBaseTransport, http: str) -> None:
    async def app(reader: StreamReader, writer: StreamWriter) -> None:
        assert b"expect" not in (await reader.readuntil(b"\r\n\r\n")).lower()
        body = await reader.readexactly(5)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n" + body)
        await writer.drain()

    async with raw_upstream(app) as upstream, proxied(transport, upstream, http=http) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\nConnection: close\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"hello")
        assert (await reader.read()).endswith(b"\r\n\r\nhello")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("answer", [CHUNKED + b"3\r\nabc\r\n", None], ids=["during the response", "before the response"])
async def test_a_client_that_disconnects_closes_the_upstream_connection(
    transport: httpx.AsyncBaseTransport, answer: bytes | None
) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def app(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is not None:
            writer.write(answer)
        asked.set()
        assert await reader.read() == b""
        closed.set()

    async def ask(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/") as response:
            async for chunk in response.aiter_raw():
                assert chunk == b"abc"

    async with raw_upstream(app) as upstream, proxied(transport, upstream) as client:
        asking = asyncio.create_task(ask(client))
        await asked.wait()
        asking.cancel()
        async with asyncio.timeout(60):
            await closed.wait()


@pytest.mark.parametrize("framing", [b"Content-Length: 100\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"])
async def test_an_aborted_upload_never_arrives_as_a_complete_request(
    transport: httpx.AsyncBaseTransport, framing: bytes
) -> None:
    begun: asyncio.Event = asyncio.Event()
    rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def app(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"hello")
        begun.set()
        rest.set_result(await reader.read())

    async with raw_upstream(app) as upstream, proxied(transport, upstream) as client:
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: h\r\n" + framing)
        await begun.wait()
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(60):
            assert await rest in {b"", b"\r\n"}


async def test_a_response_before_the_end_of_the_upload_is_proxied() -> None:
    async def app(reader: StreamReader, writer: StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig")
        await writer.drain()
        await reader.read()

    async with raw_upstream(app) as upstream, proxied(network_transport(), upstream) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nhello")
        async with asyncio.timeout(60):
            answer = await reader.readuntil(b"big")
        assert answer.startswith(b"HTTP/1.1 413 ")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("reset", [False, True], ids=["end of file", "reset"])
@pytest.mark.parametrize("answer", [CHUNKED + b"3\r\nabc\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"])
async def test_an_upstream_that_breaks_off_is_an_error_for_the_client(
    transport: httpx.AsyncBaseTransport, http: str, reset: bool, answer: bytes
) -> None:
    read = asyncio.Event()

    async def app(reader: StreamReader, writer: StreamWriter) -> None:
        await answering(answer)(reader, writer)
        await read.wait()
        if reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    async with (
        raw_upstream(app) as upstream,
        proxied(transport, upstream, http=http) as client,
        client.stream("GET", "/") as response,
    ):
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"abc"
        read.set()
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(chunks)


async def test_a_stalled_response_is_aborted_if_the_transport_has_a_read_timeout() -> None:
    """httpx's own transport limits the time between two reads."""

    async def app(reader: StreamReader, writer: StreamWriter) -> None:
        await answering(CHUNKED + b"3\r\nabc\r\n")(reader, writer)
        await reader.read()

    async with raw_upstream(app) as upstream, proxied(httpx_transport(), upstream, patience=0.1) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/")


async def dropping(reader: StreamReader, writer: StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")


async def silent(reader: StreamReader, writer: StreamWriter) -> None:
    await reader.read()


@pytest.mark.parametrize(
    ("made", "connection", "status", "code"),
    [
        (httpx_transport, dropping, 502, "upstream_unreachable"),
        (network_transport, dropping, 502, "upstream_unreachable"),
        (httpx_transport, silent, 504, "upstream_timeout"),  # NetworkTransport leaves read timeouts to its callers
    ],
)
async def test_an_upstream_that_does_not_answer_is_a_502_or_504_with_an_openai_error(
    made: Callable[[], httpx.AsyncBaseTransport], connection: Connection, status: int, code: str
) -> None:
    async with raw_upstream(connection) as upstream, proxied(made(), upstream, patience=0.2) as client:
        response = await client.get("/v1/models")
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, code)


async def test_an_unreachable_upstream_is_a_502(transport: httpx.AsyncBaseTransport) -> None:
    with listening() as sock:
        away = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with proxied(transport, away) as client:
        response = await client.post("/v1/embeddings", json={})
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "upstream_unreachable"
    assert away.removeprefix("http://") not in response.text


async def test_a_cookie_set_by_the_upstream_is_not_sent_with_the_next_request(transport: httpx.AsyncBaseTransport) -> None:
    heads: list[bytes] = []
    answer = b"HTTP/1.1 200 OK\r\nset-cookie: sid=secret\r\ncontent-length: 0\r\n\r\n"
    async with (
        raw_upstream(answering(answer, heads)) as upstream,
        proxied(transport, upstream.replace("127.0.0.1", "localhost")) as client,
    ):
        assert (await client.get("/")).headers["set-cookie"] == "sid=secret"
        client.cookies.clear()
        await client.get("/")
    assert b"secret" not in heads[1]


async def test_requests_reuse_a_connection(transport: httpx.AsyncBaseTransport) -> None:
    connections = 0

    async def app(reader: StreamReader, writer: StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            writer.write(CHUNKED + b"2\r\nok\r\n0\r\n\r\n")

    async with raw_upstream(app) as upstream, proxied(transport, upstream) as client:
        for _ in range(5):
            assert (await client.get("/")).text == "ok"
    assert connections == 1


@pytest.mark.parametrize("body", [b"", b"hello"], ids=["no body", "a body"])
async def test_a_request_on_a_connection_closed_by_the_upstream_is_retried(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http11, "_STALE_WINDOW", 60)
    connections = 0

    async def app(reader: StreamReader, writer: StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(body))
        writer.write(CHUNKED + b"2\r\nok\r\n0\r\n\r\n")
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")  # the connection closes when the next request arrives

    async with raw_upstream(app) as upstream, proxied(NetworkTransport(), upstream) as client:
        for _ in range(3):
            assert (await client.post("/", content=body)).text == "ok"
    assert connections == 3


WEBSOCKET_SCOPE: dict[str, Any] = {"type": "websocket", "path": "/", "headers": []}


async def test_a_websocket_is_refused_with_a_426_if_the_server_can_send_it() -> None:
    async with httpx_transport() as transport:
        scope = WEBSOCKET_SCOPE | {"extensions": {"websocket.http.response": {}}}
        proxy = proxy_to(transport, "http://127.0.0.1:9")
        start, body = await call(proxy, scope, {"type": "websocket.connect"})
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 426)
    assert (b"upgrade", b"HTTP/1.1") in start["headers"]
    assert body["type"] == "websocket.http.response.body"
    assert b"websocket_not_supported" in body["body"]


async def test_a_websocket_is_closed_if_the_server_cannot_send_a_status() -> None:
    async with httpx_transport() as transport:
        proxy = proxy_to(transport, "http://127.0.0.1:9")
        sent = await call(proxy, WEBSOCKET_SCOPE, {"type": "websocket.connect"})
    assert sent == [{"type": "websocket.close", "code": 1013}]


async def test_the_proxy_completes_the_lifespan() -> None:
    async with httpx_transport() as transport:
        proxy = proxy_to(transport, "http://127.0.0.1:9")
        sent = await call(proxy, {"type": "lifespan"}, {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    assert sent == [{"type": "lifespan.startup.complete"}, {"type": "lifespan.shutdown.complete"}]


async def test_the_upstream_url_may_have_a_path(serve: Serve, upstream: ScriptedUpstream, redis_url: str) -> None:
    below = serve(Starlette(routes=[Mount("/llm/openai", upstream)]))
    upstream.stream(*HELLO)
    app = create_app(make_settings(upstream__url=f"{below}/llm/openai/v1", redis__url=redis_url))
    transport = httpx.ASGITransport(app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        assert (await http.post("/v1/responses", json={"model": "tiny", "input": "hi"})).status_code == 200
        assert (await http.get("/v1/models")).json()["data"] == upstream.models
