"""The network transport with real sockets, on the event loop of asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import errno
import gc
import gzip
import resource
import socket
import ssl
import struct
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from benchmarks.processes import free_port
from responses_mw import descriptors
from responses_mw.network import failure_reason
from responses_mw.upstream.errors import from_transport
from responses_mw.upstream.transports import connections as pool_module
from responses_mw.upstream.transports import http11
from responses_mw.upstream.transports.base import UpstreamTransport
from responses_mw.upstream.transports.connections import ConnectionPool, origin_of
from responses_mw.upstream.transports.fallback import HTTPXTransport
from responses_mw.upstream.transports.http11 import NetworkTransport
from tests.support.certificates import create_certificate
from tests.support.garbage import count_of, nothing_left
from tests.support.ipv6 import needs_ipv6

if TYPE_CHECKING:
    from asyncio import StreamReader as Reader
    from asyncio import StreamWriter as Writer
    from pathlib import Path

    from starlette.types import Receive, Scope, Send

    from tests.support.servers import Serve

    Conversation = Callable[[Reader, Writer], Awaitable[None]]

MIB = 2**20
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PART = CHUNKED + b"3\r\nabc\r\n"


@pytest.fixture(scope="module", params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def transport(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NetworkTransport]:
    monkeypatch.setattr(pool_module, "_KEEPALIVE_EXPIRY", 60)  # generous, for busy machines
    async with NetworkTransport() as transport:
        yield transport
    assert not [task for task in asyncio.all_tasks() if "responses_mw/upstream" in repr(task)]


@asynccontextmanager
async def listening(conversation: Conversation, **options: Any) -> AsyncIterator[str]:
    """A raw TCP or TLS server that closes a connection when its conversation ends."""

    async def connected(reader: Reader, writer: Writer) -> None:
        conversations.add(asyncio.current_task())
        try:
            await conversation(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client disconnected
        finally:
            writer.close()

    conversations: set[Any] = set()
    options.setdefault("sock", None if "host" in options else socket.create_server(("127.0.0.1", 0)))
    server = await asyncio.start_server(connected, **options)
    scheme = "https" if options.get("ssl") else "http"
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    finally:
        server.close()
        for task in conversations:
            task.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)


def answering(*answers: bytes) -> Conversation:
    """Return a conversation that sends these answers, one for each request, and closes the connection."""

    async def conversation(reader: Reader, writer: Writer) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()

    return conversation


async def forever(reader: Reader, writer: Writer, answer: bytes = OK) -> None:
    """Send the same answer to each request until the client disconnects."""
    while True:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)


async def silence(reader: Reader, writer: Writer) -> None:
    await reader.read()


class Counted:
    """Count all connections and the open connections of a conversation."""

    def __init__(self, conversation: Conversation = forever) -> None:
        self._conversation = conversation
        self.total = 0
        self.open = 0

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        self.total += 1
        self.open += 1
        try:
            await self._conversation(reader, writer)
        finally:
            self.open -= 1


def reset(writer: Writer) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def ask(
    transport: UpstreamTransport, url: str, method: str = "GET", timeouts: dict[str, float] | None = None, **request: Any
) -> httpx.Response:
    """Send a request and return the response, without reading its body."""
    request.setdefault("extensions", {})["timeout"] = timeouts or {}
    async with asyncio.timeout(60):
        return await transport.handle_async_request(httpx.Request(method, url, **request))


async def reads(response: httpx.Response) -> list[bytes]:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async with asyncio.timeout(60):
        return [data async for data in response.stream]


def stream_of(response: httpx.Response) -> AsyncIterator[bytes]:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return aiter(response.stream)


async def fetch(transport: UpstreamTransport, url: str, method: str = "GET", **request: Any) -> bytes:
    response = await ask(transport, url, method, **request)
    body = b"".join(await reads(response))
    await response.aclose()
    return body


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def settled(read: Callable[[], int]) -> int:
    """Return a counter once it has not changed for 0.2 s."""
    before = -1
    while before != read():
        before = read()
        await asyncio.sleep(0.2)
    return before


# -- requests ------------------------------------------------------------------------------------------------------------


async def test_target_and_headers_are_sent_unchanged_with_the_body_in_one_write(transport: NetworkTransport) -> None:
    received: list[bytes] = []

    async def conversation(reader: Reader, writer: Writer) -> None:
        received.append(await reader.read(65536))
        writer.write(OK)

    async with listening(conversation) as url:
        headers = [(b"Host", b"h"), (b"X-B", b"1"), (b"x-A", b"\xe9"), (b"X-B", b"2"), (b"Content-Length", b"5")]
        target = b"//a/../%7e?{x}|'"
        await fetch(transport, url, "POST", headers=headers, content=b"hello", extensions={"target": target})
    assert received == [
        b"POST //a/../%7e?{x}|' HTTP/1.1\r\nHost: h\r\nX-B: 1\r\nx-A: \xe9\r\nX-B: 2\r\nContent-Length: 5\r\n\r\nhello"
    ]


async def test_the_target_defaults_to_path_and_query_of_the_url(transport: NetworkTransport) -> None:
    heads: list[bytes] = []

    async def conversation(reader: Reader, writer: Writer) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(OK)

    async with listening(conversation) as url:
        await fetch(transport, url + "/v1/models?a=b#fragment")
    assert heads[0] == b"GET /v1/models?a=b HTTP/1.1\r\nHost: %b\r\n\r\n" % url.removeprefix("http://").encode()


@pytest.mark.parametrize("value", ["a\r\nx-b: 2", "a\nx-b: 2", "a\rx-b: 2", "a\r\n\r\nGET / HTTP/1.1"])
async def test_header_values_and_targets_with_line_breaks_are_refused(transport: NetworkTransport, value: str) -> None:
    served = Counted()
    async with listening(served) as url:
        with pytest.raises(httpx.LocalProtocolError):
            await ask(transport, url, headers={"x-a": value})
        with pytest.raises(httpx.LocalProtocolError):
            await ask(transport, url, extensions={"target": b"/" + value.encode()})
    assert served.total == 0


class Body(httpx.AsyncByteStream):
    """A request body that yields its parts. Exceptions among them are raised, and events awaited."""

    def __init__(self, *parts: bytes | Exception | asyncio.Event) -> None:
        self._parts = parts
        self.given = 0
        self.left = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            for part in self._parts:
                if isinstance(part, Exception):
                    raise part
                if isinstance(part, asyncio.Event):
                    await part.wait()
                    continue
                self.given += len(part)
                yield part
        finally:
            self.left = True


@pytest.mark.parametrize(
    ("headers", "sent"),
    [
        ({"content-length": "5"}, b"content-length: 5\r\n\r\nhello"),
        ({"transfer-encoding": "chunked"}, b"transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"),
        ({}, b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"),
    ],
)
async def test_a_streamed_body_is_framed_by_its_headers_or_else_chunked(
    transport: NetworkTransport, headers: dict[str, str], sent: bytes
) -> None:
    received: list[bytes] = []

    async def conversation(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\nHost: h\r\n")
        received.append(await reader.readexactly(len(sent)))
        writer.write(OK)
        assert await reader.read() == b""

    async with listening(conversation) as url:
        stream = Body(b"hel", b"", b"lo")
        assert await fetch(transport, url, "POST", headers={"Host": "h", **headers}, stream=stream) == b"ok"
        assert received == [sent]
        await transport.aclose()


@pytest.mark.parametrize(("body", "sent"), [(b"hello", b"5\r\nhello\r\n0\r\n\r\n"), (b"", b"0\r\n\r\n")])
async def test_a_body_of_bytes_may_be_chunked(transport: NetworkTransport, body: bytes, sent: bytes) -> None:
    received: list[bytes] = []

    async def conversation(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        received.append(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(OK)
        received.append(await reader.readuntil(b"\r\n"))
        writer.write(OK)

    async with listening(conversation) as url:
        await fetch(transport, url, "POST", headers={"transfer-encoding": "chunked"}, stream=httpx.ByteStream(body))
        await fetch(transport, url, "GET")
    assert received == [sent, b"GET / HTTP/1.1\r\n"]


async def test_a_body_of_bytes_without_framing_headers_gets_a_content_length(transport: NetworkTransport) -> None:
    received: list[bytes] = []

    async def conversation(reader: Reader, writer: Writer) -> None:
        received.append(await reader.readuntil(b"hello"))
        writer.write(OK)

    async with listening(conversation) as url:
        await fetch(transport, url, "POST", headers={"host": "h"}, stream=httpx.ByteStream(b"hello"))
    assert received == [b"POST / HTTP/1.1\r\nhost: h\r\nContent-Length: 5\r\n\r\nhello"]


MISFRAMED: list[list[tuple[bytes, bytes]]] = [
    [(b"Content-Length", b"4")],
    [(b"Content-Length", b"6")],
    [(b"Content-Length", b"5"), (b"content-length", b"5")],
    [(b"Content-Length", b"5"), (b"Content-Length", b"6")],
    [(b"Content-Length", b"5, 5")],
    [(b"Content-Length", b"+5")],
    [(b"Content-Length", b"-5")],
    [(b"Content-Length", b"0x5")],
    [(b"Content-Length", b"")],
    [(b"Content-Length", b"5 ")],
    [(b"Content-Length", "\u0665".encode())],
    [(b"Content-Length", b"5" * 19)],
    [(b"Content-Length", b"5"), (b"Transfer-Encoding", b"chunked")],
    [(b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"chunked")],
    [(b"Transfer-Encoding", b"gzip, chunked")],
    [(b"Transfer-Encoding", b"xchunked")],
    [(b"Transfer-Encoding", b"identity")],
    [(b"Transfer-Encoding", b"chunked ")],
    [(b"Content-Length ", b"5")],
    [(b"Content-Length: 5\r\nx", b"5")],
    [(b"", b"5")],
]


@pytest.mark.parametrize("headers", MISFRAMED, ids=lambda headers: repr(headers)[:60])
async def test_a_head_that_does_not_fit_its_body_is_not_sent(
    transport: NetworkTransport, headers: list[tuple[bytes, bytes]]
) -> None:
    served = Counted()
    async with listening(served) as url:
        with pytest.raises(httpx.LocalProtocolError):
            await ask(transport, url, "POST", headers=headers, stream=httpx.ByteStream(b"hello"))
    assert served.total == 0


@pytest.mark.parametrize("method", ["CONNECT", "GET /x HTTP/1.1\r\nx: ", "G T", ""])
async def test_connect_and_invalid_methods_are_not_sent(transport: NetworkTransport, method: str) -> None:
    served = Counted()
    async with listening(served) as url:
        with pytest.raises(httpx.LocalProtocolError):
            await ask(transport, url, method)
    assert served.total == 0


async def test_a_streamed_body_never_sends_more_than_its_content_length(transport: NetworkTransport) -> None:
    received: list[bytes] = []

    async def conversation(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            while data := await reader.read(100):
                received.append(data)
        except ConnectionError:
            received.append(b"reset")

    async with listening(conversation) as url:
        body = Body(b"hel", b"lo", b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(httpx.LocalProtocolError, match="longer"):
            await ask(transport, url, "POST", headers={"content-length": "5"}, stream=body)
        await transport.aclose()
    assert b"GET" not in b"".join(received)


@pytest.mark.parametrize("early", [False, True], ids=["late answer", "early answer"])
async def test_a_connection_whose_request_lacks_announced_bytes_is_not_used_again(
    transport: NetworkTransport, early: bool
) -> None:
    answered = asyncio.Event()

    async def conversation(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if early:
            writer.write(b"HTTP/1.1 401 No\r\ncontent-length: 2\r\n\r\nno")
        rest = await reader.readexactly(9)
        raise AssertionError(rest)

    served = Counted(conversation)
    body = Body(b"hello", answered) if early else Body(b"hello")
    async with listening(served) as url:
        asking = ask(transport, url, "POST", headers={"content-length": "9"}, stream=body)
        if early:
            assert b"".join(await reads(await asking)) == b"no"
            answered.set()
        else:
            with pytest.raises(httpx.LocalProtocolError, match="shorter"):
                await asking
        await until(lambda: served.total == 1 and served.open == 0)


async def test_a_streamed_body_waits_for_a_server_that_does_not_read(transport: NetworkTransport) -> None:
    go = asyncio.Event()

    async def conversation(reader: Reader, writer: Writer) -> None:
        await go.wait()
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(64 * MIB) == bytes(MIB) * 64
        writer.write(OK)

    body = Body(*[bytes(MIB)] * 64)
    async with listening(conversation) as url, asyncio.TaskGroup() as group:
        headers = {"content-length": str(64 * MIB)}
        answer = group.create_task(fetch(transport, url, "PUT", headers=headers, stream=body))
        assert 0 < await settled(lambda: body.given) <= 16 * MIB
        go.set()
        assert await answer == b"ok"


async def test_an_early_answer_is_read_while_the_body_is_being_sent(transport: NetworkTransport) -> None:
    rest = asyncio.Event()
    served = Counted(answering(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig"))
    body = Body(b"hello", rest)
    async with listening(served) as url:
        response = await ask(transport, url, "POST", headers={"content-length": "10"}, stream=body)
        assert response.status_code == 413
        assert await reads(response) == [b"big"]
        await response.aclose()
        assert body.left
        await until(lambda: served.open == 0)  # after half a request, the connection cannot be reused


async def test_request_and_response_bodies_can_be_streamed_at_the_same_time(transport: NetworkTransport) -> None:
    async def echo(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        while (line := await reader.readline()) != b"0\r\n":
            writer.write(line + await reader.readline())
        await reader.readline()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        await forever(reader, writer)

    go = asyncio.Event()
    served = Counted(echo)
    async with listening(served) as url:
        response = await ask(transport, url, "POST", stream=Body(b"one", go, b"two"))
        stream = stream_of(response)
        assert await anext(stream) == b"one"
        go.set()
        assert b"".join([data async for data in stream]) == b"two"
        assert await fetch(transport, url) == b"ok"
    assert served.total == 1


async def test_an_exception_of_a_streamed_body_is_raised_and_closes_the_connection(transport: NetworkTransport) -> None:
    served = Counted(silence)
    async with listening(served) as url:
        with pytest.raises(ValueError, match="no more"):
            await ask(transport, url, "POST", headers={"content-length": "9"}, stream=Body(b"hello", ValueError("no more")))
        await until(lambda: served.open == 0)


async def test_cancelling_a_request_closes_its_body_and_its_connection(transport: NetworkTransport) -> None:
    served = Counted(silence)
    body = Body(b"hello", asyncio.Event())
    async with listening(served) as url:
        request = asyncio.create_task(ask(transport, url, "POST", headers={"content-length": "9"}, stream=body))
        await until(lambda: served.open == 1 and body.given == 5)
        request.cancel()
        await asyncio.wait({request})
        assert body.left
        await until(lambda: served.open == 0)


async def test_a_connection_reset_while_sending_is_a_write_error(transport: NetworkTransport) -> None:
    async def conversation(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"hello")
        reset(writer)

    async with listening(conversation) as url:
        with pytest.raises(httpx.WriteError):
            await ask(transport, url, "POST", headers={"content-length": "9"}, stream=Body(b"hello", asyncio.Event()))


# -- responses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "answer", "status", "body"),
    [
        ("GET", OK, 200, b"ok"),
        ("GET", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, b""),
        ("GET", CHUNKED + b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\n\r\n", 200, b"abcdefg"),
        ("GET", CHUNKED + b"2\r\nok\r\n0\r\nx-sum: 1\r\n\r\n", 200, b"ok"),
        ("GET", b"HTTP/1.1 200 OK\r\n\r\nuntil close", 200, b"until close"),
        ("GET", b"HTTP/1.1 200 OK\r\n\r\n", 200, b""),
        ("GET", b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nuntil close", 200, b"until close"),
        ("GET", b"HTTP/1.0 200 OK\r\n\r\nuntil close", 200, b"until close"),
        ("GET", b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok"),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        ("GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", 304, b""),
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", 200, b""),
        ("HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", 200, b""),
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong", 200, b""),
        ("GET", b"HTTP/1.1 500\r\ncontent-length: 0\r\n\r\n", 500, b""),
    ],
)
@pytest.mark.parametrize("whole", [True, False], ids=["in one piece", "byte by byte"])
async def test_an_answer_is_read_to_its_end(
    transport: NetworkTransport, method: str, answer: bytes, status: int, body: bytes, whole: bool
) -> None:
    async def conversation(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in [answer] if whole else [answer[i : i + 1] for i in range(len(answer))]:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    async with listening(conversation) as url:
        response = await ask(transport, url, method)
        assert response.status_code == status
        assert "link" not in response.headers
        assert "x-sum" not in response.headers
        assert b"".join(await reads(response)) == body


async def test_headers_are_returned_raw_and_bodies_are_not_decompressed(transport: NetworkTransport) -> None:
    body = gzip.compress(b"hello")
    lines = b"Set-Cookie: a=1\r\nX-B: \xe9\r\nset-cookie: b=2\r\nContent-Encoding: gzip\r\nContent-Length: %d" % len(body)
    async with listening(answering(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n\r\n" + body)) as url:
        response = await ask(transport, url)
        assert [b"%b: %b" % header for header in response.headers.raw] == lines.split(b"\r\n")
        assert b"".join(await reads(response)) == body


async def test_all_chunks_of_one_socket_read_are_returned_together(transport: NetworkTransport) -> None:
    go = asyncio.Event()

    async def conversation(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(PART)
        for _ in range(2):
            await go.wait()
            go.clear()
            writer.write(b"1\r\nd\r\n1\r\ne\r\n1\r\nf\r\n")
        await go.wait()
        writer.write(b"0\r\n\r\n")

    async with listening(conversation) as url:
        stream = stream_of(await ask(transport, url))
        assert aiter(stream) is stream
        for expected in (b"abc", b"def", b"def"):
            assert await anext(stream) == expected
            go.set()
        assert [data async for data in stream] == []


@pytest.mark.parametrize("answer", [PART, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", b"HTTP/1.1 200 OK\r\n\r\nabc"])
@pytest.mark.parametrize("is_reset", [False, True], ids=["end", "reset"])
async def test_an_answer_cut_short_is_an_error_after_the_received_data(
    transport: NetworkTransport, answer: bytes, is_reset: bool
) -> None:
    read = asyncio.Event()

    async def conversation(reader: Reader, writer: Writer) -> None:
        await answering(answer)(reader, writer)
        await read.wait()
        if is_reset:
            reset(writer)

    async with listening(conversation) as url:
        stream = stream_of(await ask(transport, url))
        assert await anext(stream) == b"abc"
        read.set()
        if not is_reset and b"-" not in answer:
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            return
        for _ in range(2):
            with pytest.raises(httpx.ReadError if is_reset else httpx.RemoteProtocolError):
                await anext(stream)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 20", b"HTTP/1.1 200 OK\r\ncontent-le", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_head_cut_short_is_an_error(transport: NetworkTransport, answer: bytes) -> None:
    async with listening(answering(answer)) as url:
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(transport, url)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5, 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 099 Early\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 600 Late\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    ],
)
async def test_an_answer_that_is_not_http_is_an_error(transport: NetworkTransport, answer: bytes) -> None:
    served = Counted(lambda reader, writer: forever(reader, writer, answer))
    async with listening(served) as url:
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(transport, url)
        await until(lambda: served.open == 0)


LONG = b"a" * 70_000


@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\nx: " + LONG,
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx: " + LONG + b"\r\n\r\n",
        (b"HTTP/1.1 103 Early Hints\r\nlink: %b\r\n\r\n" % LONG[:1000]) * 70,
    ],
)
async def test_a_head_over_the_maximum_length_is_an_error(transport: NetworkTransport, begun: bytes) -> None:
    async with listening(lambda reader, writer: forever(reader, writer, begun)) as url, asyncio.timeout(30):
        with pytest.raises(httpx.RemoteProtocolError, match="too long"):
            await ask(transport, url)


@pytest.mark.parametrize("rest", [b"3;" + LONG, b"0\r\nx: " + LONG])
async def test_a_chunk_extension_or_trailer_over_the_maximum_length_is_an_error(
    transport: NetworkTransport, rest: bytes
) -> None:
    began = asyncio.Event()

    async def late(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(PART)
        await began.wait()
        writer.write(rest)
        await reader.read()

    async with listening(late) as url, asyncio.timeout(30):
        stream = stream_of(await ask(transport, url))
        assert await anext(stream) == b"abc"
        began.set()
        with pytest.raises(httpx.RemoteProtocolError, match="too long"):
            await anext(stream)


async def test_garbage_within_the_body_is_an_error_after_the_received_data(transport: NetworkTransport) -> None:
    async with listening(lambda reader, writer: forever(reader, writer, PART + b"zz\r\n")) as url:
        stream = stream_of(await ask(transport, url))
        assert await anext(stream) == b"abc"
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(stream)


# -- reading, flow control and disconnects -------------------------------------------------------------------------------


async def test_a_server_waits_for_a_reader_that_does_not_read(transport: NetworkTransport) -> None:
    sent = 0

    async def conversation(reader: Reader, writer: Writer) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 * MIB))
        for number in range(64):
            writer.write(bytes([number]) * MIB)
            await writer.drain()
            sent += MIB
        await forever(reader, writer)

    served = Counted(conversation)
    async with listening(served) as url:
        response = await ask(transport, url)
        assert await settled(lambda: sent) <= 32 * MIB
        assert b"".join(await reads(response)) == b"".join(bytes([number]) * MIB for number in range(64))
        assert await fetch(transport, url) == b"ok"
    assert served.total == 1


async def test_closing_a_response_before_its_end_closes_the_connection(transport: NetworkTransport) -> None:
    served = Counted(lambda reader, writer: forever(reader, writer, PART))
    async with listening(served) as url:
        response = await ask(transport, url)
        stream = stream_of(response)
        assert await anext(stream) == b"abc"
        assert served.open == 1
        await response.stream.aclose()  # type: ignore[union-attr]
        await response.stream.aclose()  # type: ignore[union-attr]
        await until(lambda: served.open == 0)
        with pytest.raises(httpx.StreamClosed):
            await anext(stream)


class Refused(Exception):
    pass


async def test_data_that_arrives_while_the_reader_waits_can_be_diverted(transport: NetworkTransport) -> None:
    seen: list[bytes] = []
    parts = {part: asyncio.Event() for part in (b"one", b"two", b"no!", b"bad", b"end")}

    async def conversation(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        for part, go in parts.items():
            await go.wait()
            writer.write(b"3\r\n%b\r\n" % part)
        await reader.read()

    def take(data: bytes) -> bool:
        seen.append(data)
        if data == b"bad":
            raise Refused
        return data != b"no!"

    async with listening(conversation) as url:
        response = await ask(transport, url)
        response.extensions["divert"](take)
        stream = stream_of(response)
        reading = asyncio.ensure_future(anext(stream))
        for part in (b"one", b"two"):
            parts[part].set()
            await until(lambda part=part: part in seen)  # type: ignore[misc]
        assert not reading.done()
        parts[b"no!"].set()
        assert await reading == b"no!"
        parts[b"bad"].set()
        with pytest.raises(Refused):
            await anext(stream)
    assert seen == [b"one", b"two", b"no!", b"bad"]


async def test_a_reader_whose_data_always_arrives_in_time_can_be_cancelled(transport: NetworkTransport) -> None:
    async def flood(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (256 * MIB))
        for _ in range(256):
            writer.write(bytes(MIB))
            await writer.drain()

    async def cancel_later(scope: anyio.CancelScope, begun: asyncio.Event) -> None:
        await begun.wait()
        scope.cancel()

    async with listening(flood) as url:
        received, begun = 0, asyncio.Event()
        with anyio.CancelScope() as scope:
            cancelling = asyncio.create_task(cancel_later(scope, begun))
            response = await transport.handle_async_request(httpx.Request("GET", url))
            async for data in stream_of(response):
                received += len(data)
                if received > 4 * MIB:
                    begun.set()
        await cancelling
        await response.aclose()
    assert scope.cancelled_caught
    assert received < 32 * MIB


async def test_a_cancelled_read_loses_no_data(transport: NetworkTransport) -> None:
    go = asyncio.Event()

    async def conversation(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        await go.wait()
        writer.write(b"3\r\nabc\r\n0\r\n\r\n")
        await forever(reader, writer)

    served = Counted(conversation)
    async with listening(served) as url:
        stream = stream_of(await ask(transport, url))
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await anext(stream)
        go.set()
        assert [data async for data in stream] == [b"abc"]
        assert await fetch(transport, url) == b"ok"
    assert served.total == 1


@pytest.mark.parametrize("is_diverted", [False, True])
async def test_a_completed_exchange_is_freed_without_garbage_collection(transport: NetworkTransport, is_diverted: bool) -> None:
    async with listening(forever) as url:
        gc.collect()
        gc.disable()
        try:
            response = await ask(transport, url, "POST", headers={"content-length": "5"}, stream=Body(b"hello"))
            exchange = weakref.ref(response.stream)
            assert await reads(response) == [b"ok"]
            if is_diverted:  # too late, and to a function with a reference to the response
                response.extensions["divert"](partial(reads, response))
            await response.aclose()
            del response
            await asyncio.sleep(0)
            assert exchange() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("is_sending", [False, True])
async def test_a_failed_exchange_is_freed_without_garbage_collection(transport: NetworkTransport, is_sending: bool) -> None:
    async def broken(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(PART)

    async with listening(broken) as url:
        gc.collect()
        gc.disable()
        try:
            body: dict[str, Any] = {"stream": Body(asyncio.Event())} if is_sending else {}
            response = await ask(transport, url, "POST", **body)
            exchange = weakref.ref(response.stream)
            with suppress(httpx.RemoteProtocolError, httpx.WriteError):
                await reads(response)
            await response.aclose()
            del response
            await asyncio.sleep(0)
            assert exchange() is None
        finally:
            gc.enable()


# -- reuse of connections ------------------------------------------------------------------------------------------------


async def test_the_most_recently_used_idle_connection_is_reused_first(transport: NetworkTransport) -> None:
    async def numbered(reader: Reader, writer: Writer) -> None:
        await forever(reader, writer, b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n%d" % served.total)

    served = Counted(numbered)
    async with listening(served) as url:
        first, second = await ask(transport, url), None
        # The response is complete, though not read, so that its connection can be reused.
        await until(lambda: bool(first.stream._complete))  # type: ignore[union-attr]
        second = await ask(transport, url)
        assert (await reads(first), await reads(second)) == ([b"1"], [b"1"])
        one, two = await asyncio.gather(ask(transport, url), ask(transport, url))
        assert await reads(one) + await reads(two) == [b"1", b"2"]
        assert await fetch(transport, url) == b"2"
    assert served.total == 2


@pytest.mark.parametrize(
    ("method", "headers", "answer", "connections"),
    [
        ("GET", {}, CHUNKED + b"2\r\nok\r\n0\r\n\r\n", 1),
        ("GET", {}, CHUNKED + b"2\r\nok\r\n0\r\nx-sum: 1\r\n\r\n", 1),
        ("GET", {}, b"HTTP/1.1 204 No Content\r\n\r\n", 1),
        ("GET", {}, b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", 1),
        ("GET", {}, b"HTTP/1.1 103 Early\r\n\r\n" + OK, 1),
        ("GET", {}, b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", 2),
        ("GET", {}, b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", 2),
        ("GET", {}, b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok", 1),
        ("GET", {"connection": "close"}, OK, 2),
        ("GET", {}, OK + OK, 2),
        ("GET", {}, OK + b"x", 2),
        ("GET", {}, b"HTTP/1.1 204 No Content\r\ncontent-length: 3\r\n\r\nabc", 2),
        ("HEAD", {}, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", 2),
    ],
)
async def test_a_connection_is_reused_only_if_both_sides_keep_it_alive_and_no_data_is_left(
    transport: NetworkTransport, method: str, headers: dict[str, str], answer: bytes, connections: int
) -> None:
    served = Counted(lambda reader, writer: forever(reader, writer, answer))
    async with listening(served) as url:
        for _ in range(2):
            assert await fetch(transport, url, method, headers=headers) == (b"ok" if b"ok" in answer else b"")
    assert served.total == connections


@pytest.mark.parametrize("late", [b"", b"HTTP/1.1 408 Request Timeout\r\n\r\n"], ids=["an end", "an answer"])
async def test_an_idle_connection_closed_by_the_server_is_not_reused(transport: NetworkTransport, late: bytes) -> None:
    end = asyncio.Event()

    async def conversation(reader: Reader, writer: Writer) -> None:
        await answering(OK)(reader, writer)
        await end.wait()
        writer.write(late)

    served = Counted(conversation)
    async with listening(served) as url:
        await fetch(transport, url)
        end.set()
        await until(lambda: served.open == 0)
        await asyncio.sleep(0.05)
        assert await fetch(transport, url) == b"ok"
    assert served.total == 2


async def test_an_idle_connection_is_closed_after_the_keepalive_expiry(
    transport: NetworkTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_KEEPALIVE_EXPIRY", 0.1)
    served = Counted()
    async with listening(served) as url:
        await fetch(transport, url)
        assert served.open == 1
        await until(lambda: served.open == 0)
        await fetch(transport, url)
    assert served.total == 2


class Closing:
    """Answer the first request of a connection. Close it without an answer after the second request."""

    def __init__(self, *, after: float = 0.0, is_reset: bool = False) -> None:
        self._after = after
        self._is_reset = is_reset
        self.requests = 0

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.requests += 1
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")
        self.requests += 1
        await asyncio.sleep(self._after)
        if self._is_reset:
            reset(writer)


ENDS = pytest.mark.parametrize("is_reset", [False, True], ids=["end", "reset"])


@ENDS
async def test_a_request_on_a_stale_connection_is_retried_on_a_new_one(
    transport: NetworkTransport, monkeypatch: pytest.MonkeyPatch, is_reset: bool
) -> None:
    monkeypatch.setattr(http11, "_STALE_WINDOW", 60)
    closing = Closing(is_reset=is_reset)
    served = Counted(closing)
    async with listening(served) as url:
        one, two = await asyncio.gather(ask(transport, url), ask(transport, url))  # two connections, idle after reading
        assert await reads(one) == await reads(two) == [b"ok"]
        assert await fetch(transport, url, "POST", content=b"hello") == b"ok"
    assert (served.total, closing.requests) == (3, 4)


@ENDS
async def test_a_request_that_a_used_connection_worked_on_before_it_died_is_not_sent_again(
    transport: NetworkTransport, is_reset: bool
) -> None:
    closing = Closing(after=0.2, is_reset=is_reset)
    async with listening(closing) as url:
        await fetch(transport, url)
        with pytest.raises(httpx.ReadError if is_reset else httpx.RemoteProtocolError):
            await ask(transport, url, "POST", content=b"hello")
        assert closing.requests == 2


async def test_a_streamed_request_on_a_stale_connection_is_not_retried(
    transport: NetworkTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"hello"

    monkeypatch.setattr(http11, "_STALE_WINDOW", 60)
    closing = Closing()
    async with listening(closing) as url:
        await fetch(transport, url)
        with pytest.raises(httpx.ReadError):
            await ask(transport, url, "POST", content=body())
        assert closing.requests == 2


@pytest.mark.parametrize("first", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_request_is_not_retried_after_the_first_byte_of_its_answer(transport: NetworkTransport, first: bytes) -> None:
    async with listening(answering(OK, first)) as url:
        await fetch(transport, url)
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(transport, url)


@pytest.mark.parametrize("is_reset", [False, True], ids=["end", "reset"])
async def test_a_request_on_a_new_connection_is_not_retried(transport: NetworkTransport, is_reset: bool) -> None:
    async def conversation(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if is_reset:
            reset(writer)

    async with listening(conversation) as url:
        with pytest.raises(httpx.ReadError if is_reset else httpx.RemoteProtocolError):
            await ask(transport, url)


# -- connection attempts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "no-such-host.invalid", "a" * 64, "a..b"])
async def test_an_unreachable_server_is_a_connect_error(transport: NetworkTransport, host: str) -> None:
    with pytest.raises(httpx.ConnectError):
        await ask(transport, f"http://{host}:{free_port()}")


async def test_a_refused_connection_leaves_nothing_to_the_garbage_collector(transport: NetworkTransport) -> None:
    async with nothing_left(partial(count_of, OSError, httpx.ConnectError)):
        with suppress(httpx.ConnectError):
            await ask(transport, f"http://localhost:{free_port()}")


async def test_reaching_the_limit_of_open_files_is_reported_as_such(
    transport: NetworkTransport, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "_next_report", 0.0)
    async with listening(forever) as url:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as last:
            resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 1, limits[1]))
            try:
                with pytest.raises(httpx.ConnectError) as caught:
                    await ask(transport, url)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert failure_reason(caught.value) == "this process may not open more files or connections"
        error = from_transport(caught.value)
        assert (error.status, error.cause, error.is_overload) == (503, "server", True)
        logged = [record for record in caplog.records if record.name == descriptors.logger.name]
        assert [record.levelname for record in logged] == ["ERROR"]
        assert await fetch(transport, url) == b"ok"


def test_an_unavailable_address_is_reported_as_lack_of_an_address_or_a_port() -> None:
    """This happens if IPv6 is off and the address of the upstream is `[::1]`."""
    reason = failure_reason(OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"))
    assert reason == "this machine has no address or no free port for a connection to it"


async def test_a_scheme_other_than_http_or_https_is_refused(transport: NetworkTransport) -> None:
    with pytest.raises(httpx.UnsupportedProtocol):
        await ask(transport, "ftp://127.0.0.1")


@asynccontextmanager
async def hanging(family: socket.AddressFamily, address: tuple[str, int]) -> AsyncIterator[int]:
    """A port that accepts no connections, because its backlog is full."""
    with socket.create_server(address, family=family, backlog=0) as listener:
        waiting = [socket.socket(family) for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        try:
            yield listener.getsockname()[1]
        finally:
            for sock in waiting:
                sock.close()


async def test_a_connection_attempt_that_takes_too_long_is_a_connect_timeout(transport: NetworkTransport) -> None:
    async with hanging(socket.AF_INET, ("127.0.0.1", 0)) as port:
        with pytest.raises(httpx.ConnectTimeout):
            await ask(transport, f"http://127.0.0.1:{port}", timeouts={"connect": 0.1})


@needs_ipv6
async def test_an_ipv6_host_is_reached(transport: NetworkTransport) -> None:
    async with listening(forever, host="::1", port=0) as url:
        assert url.startswith("http://[::1]:")
        assert await fetch(transport, url) == b"ok"


@needs_ipv6
async def test_a_hanging_address_does_not_delay_the_next(transport: NetworkTransport) -> None:
    loop = asyncio.get_running_loop()
    port = free_port()

    async def both(host: str, *arguments: Any, **options: Any) -> list[Any]:
        if host != "twofold.invalid":
            return await original(host, *arguments, **options)
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]

    async with hanging(socket.AF_INET6, ("::1", port)), listening(forever, host="127.0.0.1", port=port):
        original = loop.getaddrinfo
        loop.getaddrinfo = both  # type: ignore[assignment, method-assign]
        try:
            assert await fetch(transport, f"http://twofold.invalid:{port}", timeouts={"connect": 5}) == b"ok"
        finally:
            loop.getaddrinfo = original  # type: ignore[method-assign]


async def test_a_connection_to_an_ip_address_does_not_wait_for_hung_lookups(transport: NetworkTransport) -> None:
    loop, end = asyncio.get_running_loop(), threading.Event()
    hung = [loop.run_in_executor(None, end.wait, 60) for _ in range(64)]
    try:
        async with listening(forever) as url:
            assert await fetch(transport, url) == b"ok"
            assert not hung[0].done()
    finally:
        end.set()
        await asyncio.gather(*hung)


async def test_connections_set_tcp_nodelay(transport: NetworkTransport) -> None:
    async with listening(forever) as url:
        await fetch(transport, url)
        (connection,) = transport._pool._open
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


# -- TLS -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The TLS context of a server with a certificate for 127.0.0.1, and that of a client that trusts it."""
    path: Path = tmp_path_factory.mktemp("tls")
    create_certificate(path)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(path / "cert.pem", path / "key.pem")
    return server, ssl.create_default_context(cafile=path / "cert.pem")


TLS = tuple[ssl.SSLContext, ssl.SSLContext]


async def test_tls_connections_are_reused(tls: TLS) -> None:
    async def echo(reader: Reader, writer: Writer) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            body = await reader.readexactly(4 * MIB)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()

    served = Counted(echo)
    async with NetworkTransport(tls[1]) as transport, listening(served, ssl=tls[0]) as url:
        for number in range(3):
            body = bytes([number]) * 4 * MIB
            assert await fetch(transport, url, "POST", content=body) == body
            stream = Body(*[bytes([number]) * MIB] * 4)
            assert await fetch(transport, url, "POST", headers={"content-length": str(4 * MIB)}, stream=stream) == body
    assert served.total == 1


async def test_an_untrusted_certificate_is_a_connect_error(transport: NetworkTransport, tls: TLS) -> None:
    async with listening(forever, ssl=tls[0]) as url:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await ask(transport, url)


async def test_a_certificate_for_another_name_is_a_connect_error(tls: TLS) -> None:
    async with NetworkTransport(tls[1]) as transport, listening(forever, ssl=tls[0]) as url:
        with pytest.raises(httpx.ConnectError, match="localhost"):
            await ask(transport, url.replace("127.0.0.1", "localhost"))


async def test_the_message_of_a_connection_error_gives_the_reason_but_not_the_host(
    transport: NetworkTransport, tls: TLS
) -> None:
    async def hello(reader: Reader, writer: Writer) -> None:
        writer.write(b"220 welcome\r\n")

    async def vanish(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async with (
        NetworkTransport(tls[1]) as trusting,
        listening(forever, ssl=tls[0]) as secure,
        listening(hello) as plain,
        listening(vanish) as vanishing,
        listening(answering(b"220 welcome\r\n")) as greeting,
        listening(answering(b"HTTP/1.1 200 OK\r\nx: " + LONG)) as endless,
    ):
        for client, url, reason in (
            (transport, f"http://127.0.0.1:{free_port()}", "the connection was refused"),
            (transport, "http://nowhere.invalid", "its name is not known"),
            (transport, "http://" + "a" * 64, "its name is not valid"),
            (transport, secure, "its certificate is not trusted"),
            (trusting, secure.replace("127.0.0.1", "localhost"), "its certificate is for another name"),
            (transport, plain.replace("http:", "https:"), "it does not speak TLS"),
            (transport, greeting, "its answer is not valid HTTP"),
            (transport, endless, "its answer is not valid HTTP"),
            (transport, secure.replace("https:", "http:"), "it closed the connection without an answer"),
            (transport, vanishing, "it closed the connection without an answer"),
        ):
            with pytest.raises(httpx.TransportError) as failed:
                await ask(client, url)
            message = from_transport(failed.value).message
            assert message.startswith(f"The upstream cannot be reached: {reason}"), (url, message)
            assert "127.0.0.1" not in message
            assert "localhost" not in message


async def test_a_tls_handshake_that_takes_too_long_is_a_connect_timeout(transport: NetworkTransport) -> None:
    served = Counted(silence)
    async with listening(served) as url:
        with pytest.raises(httpx.ConnectTimeout):
            await ask(transport, url.replace("http:", "https:"), timeouts={"connect": 0.1})
        await until(lambda: served.open == 0)


@pytest.mark.parametrize("answer", [PART, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", b""])
@pytest.mark.parametrize("ending", ["close", "abort", "reset"])
async def test_an_answer_cut_short_over_tls_is_an_error(tls: TLS, answer: bytes, ending: str) -> None:
    async def conversation(reader: Reader, writer: Writer) -> None:
        await answering(answer)(reader, writer)
        await asyncio.sleep(0.02)
        if ending != "close":
            reset(writer) if ending == "reset" else writer.transport.abort()

    async with NetworkTransport(tls[1]) as transport, listening(conversation, ssl=tls[0]) as url:
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await fetch(transport, url)


async def test_a_body_over_tls_may_end_with_the_connection(tls: TLS) -> None:
    conversation = answering(b"HTTP/1.1 200 OK\r\n\r\nuntil close")
    async with NetworkTransport(tls[1]) as transport, listening(conversation, ssl=tls[0]) as url:
        assert await fetch(transport, url) == b"until close"


async def test_an_answer_over_tls_may_arrive_together_with_the_close_of_the_connection(tls: TLS) -> None:
    conversation = answering(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
    async with NetworkTransport(tls[1]) as transport, listening(conversation, ssl=tls[0]) as url:
        for _ in range(2):
            assert await fetch(transport, url) == b"ok"


async def test_a_request_on_a_stale_tls_connection_is_retried(tls: TLS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http11, "_STALE_WINDOW", 60)
    async with NetworkTransport(tls[1]) as transport, listening(Closing(), ssl=tls[0]) as url:
        await fetch(transport, url)
        assert await fetch(transport, url) == b"ok"


# -- server names --------------------------------------------------------------------------------------------------------


NAMES = ["a.example", "b.example"]
TRANSPORTS = pytest.mark.parametrize("kind", [NetworkTransport, HTTPXTransport])


@pytest.fixture(scope="module")
def named_tls(tmp_path_factory: pytest.TempPathFactory) -> TLS:
    """The TLS context of a server with a certificate for `NAMES`, and that of a client that trusts it."""
    path: Path = tmp_path_factory.mktemp("named-tls")
    create_certificate(path, *NAMES)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(path / "cert.pem", path / "key.pem")
    return server, ssl.create_default_context(cafile=path / "cert.pem")


@asynccontextmanager
async def naming(tls: ssl.SSLContext) -> AsyncIterator[tuple[str, list[str | None]]]:
    """The URL of a server, and the server names that clients sent for its connections."""
    sent: list[str | None] = []

    def note(_: object, name: str | None, __: object) -> None:
        sent.append(name)

    tls.sni_callback = note
    try:
        async with listening(forever, ssl=tls) as url:
            yield url, sent
    finally:
        tls.sni_callback = None


def server_name(name: str) -> dict[str, Any]:
    return {"sni_hostname": name}


@TRANSPORTS
async def test_a_server_name_is_sent_and_checked_instead_of_the_address(
    named_tls: TLS, kind: type[NetworkTransport | HTTPXTransport]
) -> None:
    server, client = named_tls
    async with kind(client) as transport, naming(server) as (url, sent):
        assert await fetch(transport, url, extensions=server_name(NAMES[0])) == b"ok"
        assert sent == NAMES[:1]
        for extensions in (server_name("c.example"), {}):
            with pytest.raises(httpx.ConnectError) as refused:
                await ask(transport, url, extensions=extensions)
            assert failure_reason(refused.value) == "its certificate is for another name"


@TRANSPORTS
async def test_two_server_names_at_one_address_never_share_a_connection(
    named_tls: TLS, kind: type[NetworkTransport | HTTPXTransport]
) -> None:
    server, client = named_tls
    async with kind(client) as transport, naming(server) as (url, sent):
        for name in NAMES * 3:
            await fetch(transport, url, extensions=server_name(name))
    assert sent == NAMES


@TRANSPORTS
async def test_a_server_name_does_not_matter_without_tls(kind: type[NetworkTransport | HTTPXTransport], tls: TLS) -> None:
    async with kind(tls[1]) as transport, listening(forever) as url:
        assert await fetch(transport, url, extensions=server_name("a.example")) == b"ok"


async def test_the_host_of_the_url_may_be_given_as_server_name(tls: TLS, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_KEEPALIVE_EXPIRY", 60)
    served = Counted()
    async with NetworkTransport(tls[1]) as transport, listening(served, ssl=tls[0]) as url:
        await fetch(transport, url)
        await fetch(transport, url, extensions=server_name("127.0.0.1"))
    assert served.total == 1


# -- retired addresses ---------------------------------------------------------------------------------------------------


async def test_retiring_an_address_closes_its_idle_connections_only(transport: NetworkTransport) -> None:
    removed, kept = Counted(), Counted()
    async with listening(removed) as url, listening(kept) as other:
        await asyncio.gather(*[fetch(transport, each) for each in [url, other] * 3])
        before = kept.open
        transport.retire(url + "/base")
        await until(lambda: removed.open == 0)
        assert kept.open == before
        total = kept.total
        for _ in range(before + 1):
            assert await fetch(transport, other) == b"ok"
        assert kept.total == total


async def test_a_connection_that_is_in_use_when_its_address_is_retired_is_closed_after_the_response(
    transport: NetworkTransport,
) -> None:
    rest = asyncio.Event()

    async def conversation(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(PART)
        await rest.wait()
        writer.write(b"0\r\n\r\n")
        await reader.read()

    served = Counted(conversation)
    async with listening(served) as url:
        stream = stream_of(await ask(transport, url))
        assert await anext(stream) == b"abc"
        transport.retire(url)
        rest.set()
        assert [data async for data in stream] == []
        await until(lambda: served.open == 0)
        # The address may come back.
        assert await fetch(transport, url) == b"abc"
        assert (served.total, served.open) == (2, 1)


async def test_a_connection_that_is_being_made_when_its_address_is_retired_is_used_once(
    tls: TLS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_KEEPALIVE_EXPIRY", 60)
    accepted, proceed = asyncio.Event(), asyncio.Event()

    async def slow(reader: Reader, writer: Writer) -> None:
        accepted.set()
        await proceed.wait()
        inner = await asyncio.open_connection(*address)
        await asyncio.gather(forward(reader, inner[1]), forward(inner[0], writer), return_exceptions=True)

    async def forward(reader: Reader, writer: Writer) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        finally:
            writer.close()

    served = Counted(slow)
    async with (
        NetworkTransport(tls[1]) as transport,
        listening(forever, ssl=tls[0]) as inner,
        listening(served) as plain,
    ):
        address = inner.removeprefix("https://").split(":")
        url = plain.replace("http:", "https:")
        request = asyncio.create_task(fetch(transport, url))
        await accepted.wait()
        transport.retire(url)
        proceed.set()
        assert await request == b"ok"
        assert [await fetch(transport, url) for _ in range(2)] == [b"ok"] * 2
        await until(lambda: served.open == 1)
        assert served.total == 2


async def test_retiring_an_address_for_one_server_name_keeps_the_connections_of_others(
    named_tls: TLS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_KEEPALIVE_EXPIRY", 60)
    server, client = named_tls
    async with NetworkTransport(client) as transport, naming(server) as (url, sent):
        for name in NAMES:
            await fetch(transport, url, extensions=server_name(name))
        transport.retire(url, NAMES[0])
        for name in NAMES:
            await fetch(transport, url, extensions=server_name(name))
    assert sent == [*NAMES, NAMES[0]]


async def test_retiring_an_address_without_connections_does_nothing(transport: NetworkTransport) -> None:
    transport.retire("http://127.0.0.1:1")
    transport.retire("https://[fd00::7]", "a.example")


# -- closing the transport -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [PART, b"HTTP/1.1 200 OK\r\n\r\nabc"], ids=["chunked", "until close"])
async def test_closing_the_transport_closes_idle_connections_and_aborts_the_others(answer: bytes) -> None:
    idle, busy = Counted(), Counted(lambda reader, writer: forever(reader, writer, answer))
    transport = NetworkTransport()
    async with listening(idle) as one, listening(busy) as two:
        await fetch(transport, one)
        stream = stream_of(await ask(transport, two))
        assert await anext(stream) == b"abc"
        reading = asyncio.ensure_future(anext(stream))
        upload = asyncio.create_task(ask(transport, two, "POST", stream=Body(b"x", asyncio.Event())))
        stream_of(await upload)
        waiting = asyncio.create_task(ask(transport, one))
        await waiting
        assert (idle.open, busy.open) == (1, 2)
        await transport.aclose()
        await until(lambda: idle.open == busy.open == 0)
        with pytest.raises(httpx.ReadError):
            await reading
        with pytest.raises(httpx.ConnectError):
            await ask(transport, one)


# -- uvicorn -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_requests_and_streams_work_with_uvicorn(transport: NetworkTransport, serve: Serve, http: str) -> None:
    clients = set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        clients.add(tuple(scope["client"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-method", scope["method"].encode())]})
        more = True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            await send({"type": "http.response.body", "body": message["body"], "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    url = serve(app, http=http, lifespan="off")
    async with httpx.AsyncClient(transport=transport) as client:
        for content in (b"", b"hello", bytes(MIB)):
            assert (await client.put(url, content=content)).content == content
        response = await client.put(url, content=aiter(Body(b"hel", b"lo")))
        assert (response.content, response.headers["x-method"]) == (b"hello", "PUT")
    assert len(clients) == 1


async def test_a_silent_connection_is_checked_by_the_kernel() -> None:
    pool = ConnectionPool()
    async with listening(forever) as url:
        connection = await pool.acquire(origin_of(httpx.URL(url)), None, None)
        bound = connection.transport.get_extra_info("socket")
        assert bound.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        await pool.aclose()
