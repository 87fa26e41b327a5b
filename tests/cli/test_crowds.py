"""Clients that send nothing, half a head, or do not read do not keep others from being served."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx

from tests.support.scripted import completion, finish, text
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.conftest import Launch
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

FILES = 512
IDLE, HALF_HEADS, SLOW_READERS = 300, 300, 50
HEAD = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"


def request(**members: object) -> bytes:
    body = json.dumps({"model": "tiny", "input": "Hi", "store": False, **members}).encode()
    return HEAD % len(body) + b"\r\n" + body


def connections(stack: ExitStack, address: tuple[str, int], number: int, sent: bytes) -> Iterator[socket.socket]:
    for _ in range(number):
        connection = stack.enter_context(socket.create_connection(address, PATIENCE))
        connection.sendall(sent)
        yield connection


def test_others_are_served_beside_half_heads_idle_connections_and_slow_readers(
    launch: Launch, serve: Serve, upstream: ScriptedUpstream, redis_url: str
) -> None:
    """The server may open fewer files than there are connections."""
    server = launch("serve", f"--upstream={serve(upstream)}", "--port=0", f"--redis={redis_url}", files=FILES)
    port = int(server.wait_for(r"listens on http://127\.0\.0\.1:(\d+)/v1\n")[1])
    address = "127.0.0.1", port
    with ExitStack() as stack, httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE) as other:
        for _ in range(SLOW_READERS):
            upstream.stream(text("x" * 100_000), finish())
        slow = list(connections(stack, address, SLOW_READERS, request(stream=True)))
        for reader in slow:
            assert reader.recv(12) == b"HTTP/1.1 200"
        list(connections(stack, address, HALF_HEADS, HEAD[:40]))
        for idle in connections(stack, address, IDLE, b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            assert idle.recv(12) == b"HTTP/1.1 405"
        for _ in range(5):
            upstream.whole(completion({"content": "Hi"}))
            assert other.post("/v1/responses", json={"model": "tiny", "input": "Hi"}).status_code == 200
        for reader in slow:
            with reader.makefile("rb") as lines:
                assert any(line.startswith(b"event: response.completed") for line in lines)
    assert "Too many open files" not in server.output
