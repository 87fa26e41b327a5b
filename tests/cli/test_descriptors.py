"""A server without free file descriptors reports this to clients and in its log, and recovers."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx

from tests.support.scripted import Signal, finish, text
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from tests.cli.conftest import Launch
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

FILES = 64
BODY = {"model": "tiny", "input": "Hi", "stream": True, "store": False}
HEAD = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def test_a_server_without_free_descriptors_logs_it_and_recovers(
    launch: Launch, serve: Serve, upstream: ScriptedUpstream, redis_url: str
) -> None:
    server = launch("serve", f"--upstream={serve(upstream)}", "--port=0", f"--redis={redis_url}", files=FILES)
    port = int(server.wait_for(r"listens on http://127\.0\.0\.1:(\d+)/v1\n")[1])
    body, never = json.dumps(BODY).encode(), Signal()
    refused = []
    with ExitStack() as stack:
        for _ in range(FILES):
            upstream.stream(text("Hi"), never, finish())
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
            client.sendall(HEAD % len(body) + body)
            answer = client.recv(10_000)
            if not answer.startswith(b"HTTP/1.1 200"):
                refused.append(answer)
            if len(refused) == 2:
                break
        for answer in refused:
            assert answer.startswith(b"HTTP/1.1 503")
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == "service_unavailable"
            assert error["message"] == "This server has no file descriptors left for more connections."
        server.wait_for(f"may open only {FILES} files and connections")
    never.set()
    while True:
        upstream.stream(text("Hi"), finish())
        with httpx.Client(trust_env=False, timeout=PATIENCE) as http:
            if http.post(f"http://127.0.0.1:{port}/v1/responses", json=BODY).status_code == 200:
                break
    assert server.output.count("and connections;") == 1
    assert "Too many open files" not in server.output
