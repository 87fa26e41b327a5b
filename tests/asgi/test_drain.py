"""A server process that is told to stop while requests are in progress."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.processes import free_port
from tests.support.configured import flag
from tests.support.oracle import check
from tests.support.scripted import Signal, finish, text
from tests.support.servers import Ours, wait_until_serving
from tests.support.websocket import opened

if TYPE_CHECKING:
    from tests.support.scripted import Answer, ScriptedUpstream
    from tests.support.servers import Serve, Start

BODY = {"model": "tiny", "input": "Hi"}
FAILED = {"code": "server_error", "message": "The server is shutting down."}


class Process(Ours):
    """`responses-mw serve`, with its log in a file."""

    def __init__(self, log: Path, **settings: Any) -> None:
        port, self.admin = free_port(), f"http://127.0.0.1:{free_port()}"
        super().__init__(f"http://127.0.0.1:{port}")
        settings |= {"port": port, "server__admin_port": self.admin.rpartition(":")[2]}
        flags = [f"{flag(name)}={value}" for name, value in settings.items()]
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "responses_mw", "serve", *flags], stdout=subprocess.DEVNULL, stderr=stream
            )

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def has_stopped(self) -> None:
        """Wait for the process to end as it should."""
        assert await asyncio.to_thread(self.process.wait, 60) == 0
        assert "Traceback" not in self.log.read_text()


Launch = Callable[..., Process]


@pytest.fixture
def launch(serve: Serve, upstream: ScriptedUpstream, redis_url: str, tmp_path: Path) -> Iterator[Launch]:
    with ExitStack() as stack:

        def launch(drain_timeout: float) -> Process:
            process = Process(
                tmp_path / "log",
                upstream__url=serve(upstream),
                redis__url=redis_url,
                redis__timeout=20,
                server__drain_timeout=drain_timeout,
            )
            stack.callback(process.process.wait)
            stack.callback(process.process.kill)
            wait_until_serving(process.url, process.process)
            return process

        yield launch


@pytest.fixture
def unfinished(upstream: ScriptedUpstream) -> Iterator[Answer]:
    """An answer that never ends."""
    forever = Signal()
    yield upstream.stream(text("Hel"), forever)
    forever.set()


async def test_a_stream_longer_than_the_drain_ends_as_failed_and_is_stored(
    launch: Launch, unfinished: Answer, start: Start
) -> None:
    server, other = launch(0.2), start()
    async with aclosing(server), server.http.stream("POST", "/v1/responses", json={**BODY, "stream": True}) as response:
        raw = b""
        async for data in response.aiter_bytes():
            raw += data
            if b'"Hel"' in raw and not unfinished.left.is_set():
                server.stop()
    events = check(raw)
    assert events.terminal == "response.failed"
    assert events.response["error"] == FAILED
    assert raw.endswith(b"data: [DONE]\n\n")
    stored = (await other.http.get(f"/v1/responses/{events.response['id']}")).json()
    assert stored == events.response
    await server.has_stopped()


async def test_a_json_request_longer_than_the_drain_gets_a_503(launch: Launch, upstream: ScriptedUpstream) -> None:
    server, forever = launch(0.2), Signal()
    answers = [upstream.whole({}, before=forever) for _ in range(2)]
    async with aclosing(server), asyncio.TaskGroup() as group:
        ours = group.create_task(server.http.post("/v1/responses", json=BODY))
        proxied = group.create_task(server.http.post("/v1/chat/completions", json={"model": "tiny", "messages": []}))
        for answer in answers:
            await answer.asked.wait()
        server.stop()
    forever.set()
    for refused in (ours.result(), proxied.result()):
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"] | FAILED | {"code": "service_unavailable"} == refused.json()["error"]
    await server.has_stopped()


async def test_a_response_on_a_websocket_longer_than_the_drain_fails_and_the_connection_is_closed(
    launch: Launch, unfinished: Answer
) -> None:
    server = launch(0.2)
    async with aclosing(server), opened(server) as socket, opened(server) as idle:
        await socket.create()
        await unfinished.asked.wait()
        server.stop()
        assert (await idle.receive())["status"] == 503
        await idle.connection.wait_closed()
        assert idle.connection.close_code == 1012
        last = (await socket.events())[-1]
        assert (last["type"], last["response"]["error"]) == ("response.failed", FAILED)
        await socket.connection.wait_closed()
        assert socket.connection.close_code == 1012
    await server.has_stopped()


async def test_a_stream_shorter_than_the_drain_is_completed_while_the_server_is_not_ready(
    launch: Launch, upstream: ScriptedUpstream
) -> None:
    server, go = launch(60), Signal()
    answer = upstream.stream(text("Hel"), go, text("lo"), finish())
    async with aclosing(server), httpx.AsyncClient(trust_env=False) as client:
        streaming = asyncio.create_task(server.http.post("/v1/responses", json={**BODY, "stream": True}))
        await answer.asked.wait()
        server.stop()
        while (ready := await client.get(f"{server.admin}/readyz")).status_code == 200:
            await asyncio.sleep(0.05)
        assert ready.json()["checks"]["server"] == "It is shutting down."
        go.set()
        assert check((await streaming).content).deltas == ["Hel", "lo"]
    await server.has_stopped()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_the_drain_quietly(launch: Launch, unfinished: Answer, number: int) -> None:
    server = launch(600)
    async with aclosing(server):
        streaming = asyncio.create_task(server.http.post("/v1/responses", json={**BODY, "stream": True}))
        await unfinished.asked.wait()
        server.stop(number)
        await asyncio.sleep(0.3)  # two signals at a time are one
        server.stop(number)
        assert check((await streaming).content).terminal == "response.failed"
    await server.has_stopped()
