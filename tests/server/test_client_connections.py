"""Connections of clients: the time for a head, and the number that an address may have or that may wait for a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.asgi.requests import Inbound
from responses_mw.errors import RateLimited
from responses_mw.server.client_connections import Connections
from responses_mw.server.protocols import http_protocol, websocket_protocol
from tests.support.scripted import Signal, completion, finish, text
from tests.support.websocket import opened

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

NOT_ALLOWED = b"PUT /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
BODY = {"model": "tiny", "input": "Hi"}

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[Stream]]


@pytest.fixture(params=["proxy"])
def mount(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def limited(*, max_waiting: int = 1000, **limits: Any) -> dict[str, Any]:
    """Return options of a server with limits on its connections."""
    connections = Connections(max_waiting, **limits)
    websocket = websocket_protocol(Inbound(1024**2), connections=connections)
    return {"uvicorn": {"http": http_protocol(connections=connections), "ws": websocket}}


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens a connection and sends data. The connections are closed when the test ends."""
    writers = []

    async def connect(ours: Ours, sent: bytes = b"") -> Stream:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(ours.url.rpartition(":")[2]))
        writers.append(writer)
        writer.write(sent)
        return reader, writer

    yield connect
    for writer in writers:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, Any]]:
    """Read a response with a Content-Length, and return its status line and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = [int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return head.partition(b"\r\n")[0], json.loads(await reader.readexactly(length))


async def is_closed(reader: asyncio.StreamReader) -> bool:
    with suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 60) == b""
    return True


async def test_half_a_head_gets_a_408_and_a_connection_without_one_is_closed(start: Start, connect: Connect) -> None:
    ours = start(**limited(head_timeout=0.1))
    silent, _one = await connect(ours)
    half, _two = await connect(ours, b"GET /v1/responses HTTP/1.1\r\nHo")
    status, body = await answer(half)
    assert status == b"HTTP/1.1 408 Request Timeout"
    assert body["error"]["message"] == "The head of the request arrives too slowly."
    assert await is_closed(half)
    assert await is_closed(silent)


async def test_a_head_that_trickles_in_after_a_response_has_no_more_time(start: Start, connect: Connect) -> None:
    ours = start(**limited(head_timeout=0.1))
    reader, writer = await connect(ours, NOT_ALLOWED % 0)
    assert (await answer(reader))[0] == b"HTTP/1.1 405 Method Not Allowed"

    async def trickle() -> None:
        with suppress(ConnectionError):
            for byte in NOT_ALLOWED * 1000:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    assert (await answer(reader))[0] == b"HTTP/1.1 408 Request Timeout"
    trickling.cancel()


async def test_a_body_that_trickles_in_after_its_response_is_cut(start: Start, connect: Connect) -> None:
    ours = start(**limited(head_timeout=0.1))
    reader, writer = await connect(ours, NOT_ALLOWED % 1000)
    assert (await answer(reader))[0] == b"HTTP/1.1 405 Method Not Allowed"
    writer.write(b"x")
    assert await is_closed(reader)


async def test_a_request_in_progress_has_no_deadline(start: Start, upstream: ScriptedUpstream, connect: Connect) -> None:
    ours = start(**limited(head_timeout=0.05))
    done = Signal()
    upstream.stream(text("Hi"), done, finish())
    body = json.dumps({**BODY, "stream": True}).encode()
    reader, writer = await connect(ours, b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
    await asyncio.sleep(0.2)
    writer.write(body)
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    await asyncio.sleep(0.2)
    done.set()
    received = b""
    while b"response.completed" not in received:
        received += await reader.readuntil(b"\n")


async def test_the_connections_that_have_waited_longest_are_closed_first(
    start: Start, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    ours = start(**limited(max_waiting=2))
    first, _ = await connect(ours, b"GET ")
    second, writer = await connect(ours, NOT_ALLOWED % 0)
    assert (await answer(second))[0] == b"HTTP/1.1 405 Method Not Allowed"
    third, _ = await connect(ours, b"GET ")
    assert await is_closed(first)
    writer.write(NOT_ALLOWED % 0)  # a request makes its connection the last one to be closed
    assert (await answer(second))[0] == b"HTTP/1.1 405 Method Not Allowed"
    await connect(ours, b"GET ")
    assert await is_closed(third)
    writer.write(NOT_ALLOWED % 0)
    assert (await answer(second))[0] == b"HTTP/1.1 405 Method Not Allowed"
    assert "more than 2 wait for a request" in caplog.text


async def test_requests_in_progress_do_not_wait(start: Start, upstream: ScriptedUpstream, connect: Connect) -> None:
    ours = start(**limited(max_waiting=1))
    done = Signal()
    for _ in range(3):
        upstream.whole(completion({"content": "Hi"}), before=done)
    running = []
    for number in range(3):  # one after another, because a connection waits until its request arrives
        running.append(asyncio.create_task(ours.http.post("/v1/responses", json=BODY)))
        await upstream.received(number + 1)
    await connect(ours, b"GET ")
    done.set()
    assert [one.status_code for one in await asyncio.gather(*running)] == [200, 200, 200]


async def test_an_address_with_too_many_connections_gets_a_429(start: Start, connect: Connect) -> None:
    ours = start(**limited(per_address=2))
    async with opened(ours):  # a WebSocket counts too
        reader, writer = await connect(ours, NOT_ALLOWED % 0)
        assert (await answer(reader))[0] == b"HTTP/1.1 405 Method Not Allowed"
        refused, _ = await connect(ours, NOT_ALLOWED % 0)
        status, body = await answer(refused)
        assert (status, body["error"]["code"]) == (b"HTTP/1.1 429 Too Many Requests", "rate_limit_exceeded")
        assert await is_closed(refused)
        writer.close()
        await writer.wait_closed()
        while True:  # the server notices the end of the connection a moment later
            reader, _ = await connect(ours, NOT_ALLOWED % 0)
            if (await answer(reader))[0] == b"HTTP/1.1 405 Method Not Allowed":
                break


class Peer(asyncio.Transport):
    def __init__(self, *address: Any) -> None:
        super().__init__({"peername": address or ""})


@pytest.mark.parametrize(
    ("one", "another"),
    [
        (Peer("192.0.2.1", 1), Peer("192.0.2.1", 2)),
        (Peer("192.0.2.1", 1), Peer("::ffff:192.0.2.1", 1, 0, 0)),
        (Peer("2001:db8::1", 1, 0, 0), Peer("2001:db8::2:0:0:1", 1, 0, 0)),
        (Peer("fe80::1%eth0", 1, 0, 2), Peer("fe80::2", 1, 0, 2)),
    ],
)
def test_an_address_is_an_ipv4_address_or_an_ipv6_network(one: Peer, another: Peer) -> None:
    connections = Connections(per_address=1)
    assert connections.open(one) is None
    assert isinstance(connections.open(another), RateLimited)
    assert connections.open(Peer("192.0.2.2", 1)) is None
    connections.close(one)
    assert connections.open(another) is None


def test_clients_of_a_unix_socket_are_not_limited() -> None:
    connections = Connections(per_address=1)
    assert connections.open(Peer()) is None
    assert connections.open(Peer()) is None
