"""The memory of data being received or waiting to be read is limited for all clients together."""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc
from base64 import b64encode
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from responses_mw.asgi.requests import UNCOUNTED, Inbound
from responses_mw.errors import Unavailable
from responses_mw.server.client_connections import Unread
from responses_mw.server.protocols import MAX_FRAMES, MAX_QUEUED, http_protocol, websocket_protocol
from tests.support.garbage import nothing_left
from tests.support.metrics import sample_value
from tests.support.scripted import finish, text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

BODY = {"model": "tiny", "input": "hi"}
PIECE = UNCOUNTED // 2


@pytest.fixture
def inbound() -> Inbound:
    """The memory limit of WebSocket messages."""
    return Inbound(4 * UNCOUNTED)


@pytest.fixture
def ours(start: Start, inbound: Inbound) -> Ours:
    uvicorn = {"ws": websocket_protocol(inbound), "ws_per_message_deflate": False}
    return start(limits__max_request_bytes=4 * UNCOUNTED, limits__memory_bytes=1, uvicorn=uvicorn)


def large() -> list[str]:
    """A body in pieces, larger than half of the memory limit."""
    text = json.dumps({**BODY, "input": "x" * (7 * PIECE)})
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


async def slowly(pieces: list[str], sent: asyncio.Event, go_on: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield all pieces but the last, set `sent`, and yield the last when `go_on` is set."""
    for piece in pieces[:-1]:
        yield piece.encode()
    sent.set()
    await go_on.wait()
    yield pieces[-1].encode()


def refused_for_memory() -> float:
    return sample_value("responses_mw_limits_refused_total", {"limit": "memory"}) or 0


async def test_at_the_memory_limit_large_bodies_are_refused_and_small_ones_are_not(
    ours: Ours, upstream: ScriptedUpstream
) -> None:
    sent, go_on, before = asyncio.Event(), asyncio.Event(), refused_for_memory()
    first = asyncio.create_task(ours.http.post("/v1/responses", content=slowly(large(), sent, go_on)))
    await sent.wait()
    async with asyncio.timeout(60):
        while (refused := await ours.http.post("/v1/responses/input_tokens", content="".join(large()))).status_code != 503:
            await asyncio.sleep(0.02)  # the first body is still being received
    assert refused_for_memory() > before
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "service_unavailable"
    upstream.whole({})
    small = await ours.http.post("/v1/responses", json={**BODY, "temperature": "hot"})
    assert small.status_code == 400
    go_on.set()
    await first
    assert (await ours.http.post("/v1/responses", content="".join(large()))).status_code != 503


async def test_unfinished_websocket_messages_share_one_memory_limit(ours: Ours, inbound: Inbound) -> None:
    sent, go_on = asyncio.Event(), asyncio.Event()
    async with opened(ours) as first, opened(ours) as second, opened(ours) as third:
        sending = asyncio.create_task(first.send(texts(large(), sent, go_on)))
        await sent.wait()
        async with asyncio.timeout(60):
            while inbound.size < 5 * PIECE:
                await asyncio.sleep(0.01)
        refused = asyncio.create_task(second.send(texts(large(), asyncio.Event(), asyncio.Event())))
        with pytest.raises(ConnectionClosed) as caught:
            await second.recv()
        refused.cancel()
        await asyncio.gather(refused, return_exceptions=True)
        assert caught.value.rcvd is None or caught.value.rcvd.code == 1013  # a reset may overtake it
        assert await answered(third)
        go_on.set()
        await sending
        assert json.loads(await first.recv())["type"] == "error"
        for _ in range(5):  # received messages are no longer counted
            await first.send("".join(large()))
            assert json.loads(await first.recv())["type"] == "error"


async def test_a_slowly_sent_body_does_not_block_other_requests(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("responses_mw.asgi.requests.MESSAGE_TIMEOUT", 0.5)
    reader, writer = await asyncio.open_connection(ours.http.base_url.host, ours.http.base_url.port)
    text = "".join(large())
    head = f"POST /v1/responses HTTP/1.1\r\nHost: h\r\nContent-Length: {len(text) + 1}\r\n\r\n"
    writer.write(head.encode() + text.encode())
    async with asyncio.timeout(30):  # less than a body may pause
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 ")
    writer.close()
    assert (await ours.http.post("/v1/responses", content="".join(large()))).status_code != 503


async def test_a_slowly_sent_large_message_does_not_block_other_connections(
    ours: Ours, inbound: Inbound, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.server.protocols.MESSAGE_TIMEOUT", 0.5)
    async with opened(ours) as first, opened(ours) as second:
        sending = asyncio.create_task(first.send(texts(large(), asyncio.Event(), asyncio.Event())))
        with pytest.raises(ConnectionClosed):
            await first.recv()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert inbound.size == 0
        assert await answered(second)  # an unfinished small message may wait


async def test_the_number_of_fragments_per_message_is_limited(ours: Ours) -> None:
    async with opened(ours) as connection:
        await connection.send("x" for _ in range(MAX_FRAMES - 1))
        assert json.loads(await connection.recv())["type"] == "error"  # the text is not JSON
        begin, more = (Frame(opcode, b"x", fin=False).serialize(mask=True) for opcode in (Opcode.TEXT, Opcode.CONT))
        connection.transport.write(begin + more * MAX_FRAMES)
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(connection.recv(), 60)


@pytest.mark.parametrize("opcode", [Opcode.PING, Opcode.PONG])
async def test_the_number_of_pings_handled_at_once_is_limited(ours: Ours, opcode: Opcode) -> None:
    async with opened(ours) as connection:
        frame = Frame(opcode, b"").serialize(mask=True)
        connection.transport.write(frame * (MAX_FRAMES - 1))
        assert await answered(connection)
        connection.transport.write(frame * 2 * MAX_FRAMES)
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(connection.recv(), 60)


async def test_the_number_of_queued_messages_is_limited(ours: Ours) -> None:
    async with opened(ours) as connection:
        frame, answers = Frame(Opcode.TEXT, b"x").serialize(mask=True), 0
        connection.transport.write(frame * (2 * MAX_QUEUED))
        with suppress(ConnectionClosed):
            for answers in range(2 * MAX_QUEUED):  # noqa: B007 (the number before the end)
                await connection.recv()
        assert answers < MAX_QUEUED


async def test_a_message_is_freed_once_it_is_answered_or_its_connection_is_lost(ours: Ours) -> None:
    size = 3 * UNCOUNTED
    tracemalloc.start()
    try:
        async with opened(ours) as connection:
            async with nothing_left(partial(large_objects, size)):
                await connection.send("x" * size)
                assert json.loads(await connection.recv())["type"] == "error"  # the text is not JSON
            async with nothing_left(partial(large_objects, size)):
                connection.transport.write(Frame(Opcode.TEXT, b"x" * size, fin=False).serialize(mask=True))
                connection.transport.close()
                await connection.wait_closed()
    finally:
        tracemalloc.stop()


async def test_the_memory_of_unread_large_responses_is_limited(start: Start) -> None:
    body = refused_body()
    ours = start(uvicorn={"http": http_protocol(Unread(len(body)))})
    (first, one), (second, another) = [await asked(ours, body) for _ in range(2)]
    complete = len(await second.read())
    received = b""
    with suppress(ConnectionError):
        received = await first.read()
    assert len(received) < complete
    for writer in (one, another):
        writer.close()


class Waiting(asyncio.Transport):
    """A transport with `size` bytes that its client has not read."""

    def __init__(self, size: int) -> None:
        super().__init__({"peername": ("192.0.2.1", 1234)})
        self.size = size
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.is_aborted = True


def test_data_that_a_slow_client_has_read_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    unread, first, second, third = (
        Unread(25_000_000),
        Waiting(20_000_000),
        Waiting(20_000_000),
        Waiting(20_000_000),
    )
    before = refused_for_memory()
    unread.add(first)
    first.size = 2_000_000
    unread.add(second)
    assert not first.is_aborted
    unread.add(third)
    assert (first.is_aborted, second.is_aborted, third.is_aborted) == (True, True, False)
    assert "closing the connection of ('192.0.2.1', 1234), which has not read 2000000 bytes" in caplog.text
    assert len(caplog.messages) == 1  # a warning for each connection would flood the log
    assert refused_for_memory() == before + 2


def test_slow_streams_are_not_closed_to_make_room_for_large_responses() -> None:
    unread, streams, large = Unread(25_000_000), [Waiting(65_536 + 256_000) for _ in range(10)], Waiting(20_000_000)
    for transport in (*streams, large, Waiting(20_000_000)):
        unread.add(transport)
    assert large.is_aborted
    assert not any(stream.is_aborted for stream in streams)


async def test_the_memory_of_unread_large_websocket_messages_is_limited(start: Start) -> None:
    size = 14_000_000
    options = {"ws_per_message_deflate": False, "ws_max_size": 2 * size}
    ours = start(uvicorn={"ws": websocket_protocol(Inbound(4 * size), Unread(size // 4)), **options})
    frame = json.dumps({"type": "response.steer", "input": "x" * size})  # the answer has the input
    async with opened(ours) as first, opened(ours) as second:
        first.transport.pause_reading()
        await first.send(frame)
        for _ in range(2):  # at the latest, the second answer comes after that of the first connection
            await second.send(frame)
            assert len(await second.recv()) > size
        first.transport.resume_reading()
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(first.recv(), 60)


async def test_a_pipelined_request_waits_until_the_earlier_response_is_read(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start()
    reader, writer = await asked(ours, refused_body(), keep=True)
    for _ in range(2):
        upstream.stream(text("Hi"), finish())
    body = json.dumps(BODY).encode()
    writer.write(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert (await ours.http.post("/v1/responses", json=BODY)).status_code == 200
    assert len(upstream.requests) == 1
    await read_response(reader)
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    assert len(upstream.requests) == 2
    writer.close()


async def test_a_connection_is_not_upgraded_before_its_responses_are_read(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(uvicorn={"ws": websocket_protocol(Inbound(4 * UNCOUNTED))})
    reader, writer = await asked(ours, refused_body(), keep=True)
    fields = b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\n"
    writer.write(b"GET /v1/responses HTTP/1.1\r\nHost: x\r\n" + fields % b64encode(bytes(16)) + b"\r\n")
    upstream.stream(text("Hi"), finish())
    assert (await ours.http.post("/v1/responses", json=BODY)).status_code == 200
    await read_response(reader)
    assert await reader.readline() == b"HTTP/1.1 400 Bad Request\r\n"
    writer.close()


async def test_a_message_waits_until_the_earlier_answer_is_read(start: Start, upstream: ScriptedUpstream) -> None:
    size = 14_000_000
    options = {"ws_per_message_deflate": False, "ws_max_size": 2 * size}
    ours = start(uvicorn={"ws": websocket_protocol(Inbound(4 * size), Unread(4 * size)), **options})
    async with opened(ours) as first, opened(ours) as second:
        first.transport.pause_reading()
        await first.send(json.dumps({"type": "response.steer", "input": "x" * size}))  # the answer has the input
        for _ in range(2):
            upstream.stream(text("Hi"), finish())
        create = json.dumps({"type": "response.create", **BODY})
        await first.send(create)
        await second.send(json.dumps({"type": "response.steer", "input": "x" * size}))
        await second.recv()  # at the latest, it comes after the answer to the first connection
        await second.send(create)
        while json.loads(await second.recv())["type"] != "response.completed":
            pass
        assert len(upstream.requests) == 1
        first.transport.resume_reading()
        while json.loads(await first.recv())["type"] != "response.completed":
            pass
        assert len(upstream.requests) == 2


def refused_body() -> bytes:
    """The body of a request whose error is too large for the buffers of a connection."""
    return json.dumps({**BODY, "reasoning": {"x" * 8_000_000: 1}}).encode()


async def read_response(reader: asyncio.StreamReader) -> None:
    """Read the rest of a response whose status line has been read."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))


async def asked(ours: Ours, body: bytes, *, keep: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request. Its response has begun, but little of it is read. With `keep`, the connection is kept alive."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    connection.setblocking(False)
    parts = urlsplit(ours.url)
    await asyncio.get_running_loop().sock_connect(connection, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=connection)
    connection_field = "keep-alive" if keep else "close"
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: {connection_field}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    assert await reader.readline() == b"HTTP/1.1 400 Bad Request\r\n"
    return reader, writer


def large_objects(size: int) -> int:
    return sum(trace.size >= size for trace in tracemalloc.take_snapshot().traces)


async def answered(connection: Any) -> bool:
    await connection.send("{}")
    return bool(json.loads(await connection.recv())["type"] == "error")


async def texts(pieces: list[str], sent: asyncio.Event, go_on: asyncio.Event) -> AsyncIterator[str]:
    async for piece in slowly(pieces, sent, go_on):
        yield piece.decode()


def opened(ours: Ours) -> Any:
    url = ours.url.replace("http", "ws", 1) + "/v1/responses"
    return connect(url, additional_headers={"authorization": "Bearer key"}, proxy=None, max_size=None)


def test_the_counted_memory_returns_to_zero() -> None:
    inbound = Inbound(2 * UNCOUNTED)
    for _ in range(3):
        first = inbound.resize(0, 3 * UNCOUNTED)
        with pytest.raises(Unavailable):
            inbound.resize(UNCOUNTED, 2 * UNCOUNTED)
        small = inbound.resize(0, UNCOUNTED)
        for size in (first, UNCOUNTED, small):
            inbound.resize(size, 0)
        assert inbound.size == 0
