"""A client that leaves while the server has unsent data for it is noticed at once, so that the upstream is cancelled."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import struct
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import pytest
from websockets.frames import Frame, Opcode

from responses_mw.asgi.requests import Inbound
from responses_mw.server.client_connections import EOF_INTERVAL
from responses_mw.server.protocols import websocket_protocol
from tests.support.certificates import create_certificate
from tests.support.scripted import Answer, Signal, frame, text
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

    Leave = Callable[[socket.socket], None]

UNREAD = 24 * 1024**2
"""More bytes than the kernel buffers for a connection."""
BODY = {"model": "tiny", "input": "hi"}


def endless() -> list[Any]:
    """An answer that does not end, and fills all buffers."""
    return [frame(text("x" * 65_536)) for _ in range(UNREAD // 65_536)] + [Signal()]


def stream(path: str) -> bytes:
    body = json.dumps({**BODY, "stream": True}).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


def websocket() -> bytes:
    fields = b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\n"
    return b"GET /v1/responses HTTP/1.1\r\nHost: x\r\n" + fields % b64encode(bytes(16)) + b"\r\n"


def create() -> bytes:
    data = json.dumps({"type": "response.create", **BODY}).encode()
    return Frame(Opcode.TEXT, data).serialize(mask=True)


def connect(ours: Ours, is_tls: bool) -> socket.socket:
    """Connect with a small receive buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE)
    host, _, port = ours.url.rpartition("/")[2].partition(":")
    connection.connect((host, int(port)))
    if not is_tls:
        return connection
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connection)


def start_server(start: Start, folder: Path, is_tls: bool = False) -> Ours:
    create_certificate(folder)
    tls = {"ssl_certfile": folder / "cert.pem", "ssl_keyfile": folder / "key.pem"} if is_tls else {}
    return start(uvicorn={"ws": websocket_protocol(Inbound(UNREAD)), "ws_per_message_deflate": False, **tls})


async def upgrade(connection: socket.socket) -> None:
    connection.sendall(websocket())
    assert b" 101 " in await asyncio.to_thread(connection.recv, 1024)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def close(connection: socket.socket) -> None:
    connection.close()  # unread data makes it a reset


def end(connection: socket.socket) -> None:
    """Send a FIN, as a proxy may while it still holds data that its own client has not read."""
    socket.socket.shutdown(connection, socket.SHUT_WR)


async def fill(answer: Answer) -> None:
    """Wait until the upstream's server cannot send more."""
    before = -1
    while answer.sent != before or not before:
        before = answer.sent
        await asyncio.sleep(0.3)
    assert before < len(answer.pieces) - 1


KINDS = ["stream", "passed on", "pipelined", "websocket", "websocket with waiting messages"]


@pytest.mark.parametrize("leave", [reset, close, end])
@pytest.mark.parametrize(
    ("kind", "is_tls"), [*((kind, False) for kind in KINDS), ("stream", True), ("passed on", True), ("websocket", True)]
)
async def test_a_client_that_leaves_unread_data_is_noticed(
    start: Start, upstream: ScriptedUpstream, tmp_path: Path, kind: str, is_tls: bool, leave: Leave
) -> None:
    ours = start_server(start, tmp_path, is_tls)
    answer = upstream.stream(*endless())
    connection = await asyncio.to_thread(connect, ours, is_tls)
    if kind.startswith("websocket"):
        await upgrade(connection)
        connection.sendall(create())
        if kind != "websocket":
            await answer.asked.wait()
            connection.sendall(create() + create())  # the server pauses reading
    else:
        connection.sendall(stream("/v1/chat/completions" if kind == "passed on" else "/v1/responses"))
        if kind == "pipelined":
            connection.sendall(stream("/v1/responses"))  # the server pauses reading
    await fill(answer)
    leave(connection)
    await answer.left.wait()
    assert answer.sent < len(answer.pieces) - 1  # the rest was not read
    connection.close()


async def test_a_response_whose_websocket_client_leaves_is_cancelled_and_does_not_fail(
    start: Start, upstream: ScriptedUpstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "responses_mw")
    ours = start_server(start, tmp_path)
    answer = upstream.stream(*endless())
    connection = await asyncio.to_thread(connect, ours, False)
    await upgrade(connection)
    connection.sendall(create())
    await fill(answer)
    reset(connection)
    async with asyncio.timeout(PATIENCE):
        while not (lines := [one.message for one in caplog.records if "websocket response.create" in one.message]):
            await asyncio.sleep(0.02)
    assert "outcome=cancelled" in lines[0]
    assert not [one for one in caplog.records if one.name == "responses_mw.runs"]


async def test_a_client_that_sends_an_eof_can_read_a_complete_response(start: Start) -> None:
    size = UNREAD // 2
    connection = await asyncio.to_thread(connect, start(limits__max_request_bytes=UNREAD), False)
    body = json.dumps({**BODY, "reasoning": {"x" * size: 1}}).encode()  # the error quotes it
    head = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    await asyncio.to_thread(connection.sendall, head + body)
    received = len(await asyncio.to_thread(connection.recv, 1024))
    end(connection)
    await asyncio.sleep(3 * EOF_INTERVAL)  # longer than the server takes to notice that a client has left
    while data := await asyncio.to_thread(connection.recv, 1_000_000):
        received += len(data)
    assert received > size
    connection.close()
