"""A server process that is stopped while requests are in progress."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from benchmarks.processes import free_port
from responses_mw.asgi.middleware import Dispatcher
from responses_mw.state.usage import Usage
from tests.engine.test_cancellation import Client
from tests.support.oracle import check
from tests.support.scripted import HELLO, Signal, completion, finish, text
from tests.support.servers import PATIENCE, Ours, wait_until_serving
from tests.support.websocket import opened

if TYPE_CHECKING:
    from tests.support.forkserver import ForkServer, Process
    from tests.support.scripted import Answer, ScriptedUpstream
    from tests.support.servers import Apps, Serve, Start

BODY = {"model": "tiny", "input": "Hi"}
FAILED = {"code": "server_error", "message": "The server is shutting down."}


class ServerProcess(Ours):
    """A server process, with its log in a file."""

    def __init__(self, fork_server: ForkServer, log: Path, *command: str, **variables: str) -> None:
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}")
        self.log = log
        self.process: Process
        if command:
            with log.open("wb") as stream:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", *command, f"--port={port}"],
                    env={**os.environ, **variables},
                    stdout=subprocess.DEVNULL,
                    stderr=stream,
                )
        else:
            self.process = fork_server.start("serve", f"--port={port}", stderr=log, env=variables)

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def is_stopping(self) -> None:
        """Wait until the server accepts no more connections."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(self.url).port)
                except OSError:
                    return
                writer.close()
                await asyncio.sleep(0.05)

    async def has_stopped(self, status: int = 0) -> None:
        """Wait for the process to exit with `status` and without a traceback."""
        assert await asyncio.to_thread(self.process.wait, PATIENCE) == status
        assert "Traceback" not in self.log.read_text()


Launch = Callable[..., ServerProcess]


@pytest.fixture
def launch(
    fork_server: ForkServer, serve: Serve, upstream: ScriptedUpstream, redis_url: str, tmp_path: Path
) -> Iterator[Launch]:
    """Start a server, by default `responses-mw serve`."""
    with ExitStack() as stack:

        def launch(*command: str, drain_timeout: float = 0.2, admin_port: int = 0) -> ServerProcess:
            settings = {
                "UPSTREAM_URL": serve(upstream),
                "REDIS_URL": redis_url,
                "REDIS_TIMEOUT": "20",
                "SERVER_DRAIN_TIMEOUT": str(drain_timeout),
                "SERVER_ADMIN_PORT": str(admin_port),
            }
            variables = {f"RESPONSES_MW_{name}": value for name, value in settings.items()}
            process = ServerProcess(fork_server, tmp_path / "log", *command, **variables)
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


UVICORN = ("uvicorn", "--factory", "responses_mw:create_app", "--timeout-graceful-shutdown=1", "--log-level=error")


@pytest.mark.parametrize("command", [(), UVICORN], ids=["serve", "uvicorn"])
async def test_a_stream_longer_than_the_drain_ends_as_failed_and_is_stored(
    launch: Launch, unfinished: Answer, start: Start, command: Sequence[str]
) -> None:
    server, other = launch(*command), start()
    async with aclosing(server), server.http.stream("POST", "/v1/responses", json={**BODY, "stream": True}) as response:
        raw, is_stopped = b"", False
        async for data in response.aiter_bytes():
            raw += data
            if b'"Hel"' in raw and not is_stopped:
                is_stopped = True  # a third signal would end the process
                server.stop()
    events = check(raw)
    assert events.terminal == "response.failed"
    assert events.response["error"] == FAILED
    assert raw.endswith(b"data: [DONE]\n\n")
    stored = (await other.http.get(f"/v1/responses/{events.response['id']}")).json()
    assert stored == events.response
    await server.has_stopped(0 if not command else -signal.SIGTERM)


async def test_a_json_request_longer_than_the_drain_gets_a_503(launch: Launch, upstream: ScriptedUpstream) -> None:
    server, forever = launch(), Signal()
    answer = upstream.whole({}, before=forever)
    async with aclosing(server):
        request = asyncio.create_task(server.http.post("/v1/responses", json=BODY))
        await answer.asked.wait()
        server.stop()
        refused = await request
    forever.set()
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"] | FAILED | {"code": "service_unavailable"} == refused.json()["error"]
    await server.has_stopped()


async def test_a_proxied_request_that_the_server_cancels_gets_a_503(apps: Apps, upstream: ScriptedUpstream) -> None:
    answer = upstream.whole({}, before=Signal())
    client = Client("/v1/chat/completions")
    client.may_read.set()
    async with apps.open() as app:
        request = asyncio.create_task(client.call(app))
        await answer.asked.wait()
        request.cancel()
        await request
    assert client.sent[0]["status"] == 503
    assert FAILED["message"].encode() in client.bodies[0]


async def test_a_proxied_stream_longer_than_the_drain_is_cut_off_without_a_logged_error(
    launch: Launch, unfinished: Answer
) -> None:
    server = launch()
    async with aclosing(server):
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with server.http.stream("POST", "/v1/chat/completions", json=chat) as response:
            pieces = response.aiter_bytes()
            assert b'"Hel"' in await anext(pieces)
            server.stop()
            with pytest.raises(httpx.TransportError):
                await anext(pieces)
    await server.has_stopped()
    assert "ERROR" not in server.log.read_text()


async def test_a_request_cancelled_after_its_response_ends_without_an_exception(
    apps: Apps, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = asyncio.Event()

    async def hang(*_: object) -> None:  # like a Redis that does not answer
        leaving.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Usage, "leave", hang)
    upstream.stream(*HELLO)
    client = Client()
    client.may_read.set()
    async with apps.open(limits__streams=5) as app:
        request = asyncio.create_task(client.call(app))
        await leaving.wait()
        assert isinstance(app, Dispatcher)
        await app.fail_runs()
        request.cancel()
        await request
    assert client.bodies[-1].endswith(b"data: [DONE]\n\n")


async def test_a_response_on_a_websocket_longer_than_the_drain_fails_and_the_connection_is_closed(
    launch: Launch, unfinished: Answer
) -> None:
    server = launch()
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


async def test_a_websocket_opened_during_the_drain_is_closed_too(launch: Launch, upstream: ScriptedUpstream) -> None:
    server, go = launch(drain_timeout=60), Signal()
    upstream.pages["/v1/models"] = {}  # the credential is checked with a chat request
    checked = upstream.whole(completion({"content": "x"}), before=go)

    async def opened_late() -> int | None:
        async with opened(server) as socket:
            assert (await socket.receive())["status"] == 503
            await socket.connection.wait_closed()
            return socket.connection.close_code

    async with aclosing(server):
        opening = asyncio.create_task(opened_late())
        await checked.asked.wait()
        server.stop()
        await server.is_stopping()
        go.set()
        assert await opening == 1012
    await server.has_stopped()


async def test_a_stream_shorter_than_the_drain_is_completed_while_the_server_is_not_ready(
    launch: Launch, upstream: ScriptedUpstream
) -> None:
    admin, go = free_port(), Signal()
    server = launch(drain_timeout=60, admin_port=admin)
    answer = upstream.stream(text("Hel"), go, text("lo"), finish())
    async with aclosing(server), httpx.AsyncClient(verify=False, trust_env=False) as client:
        streaming = asyncio.create_task(server.http.post("/v1/responses", json={**BODY, "stream": True}))
        await answer.asked.wait()
        server.stop()
        while (ready := await client.get(f"http://127.0.0.1:{admin}/readyz")).status_code == 200:
            await asyncio.sleep(0.05)
        assert ready.json()["checks"]["server"] == "It is shutting down."
        go.set()
        assert check((await streaming).content).deltas == ["Hel", "lo"]
    await server.has_stopped()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_the_drain_and_fails_running_responses(
    launch: Launch, unfinished: Answer, number: int
) -> None:
    server = launch(drain_timeout=600)
    async with aclosing(server):
        streaming = asyncio.create_task(server.http.post("/v1/responses", json={**BODY, "stream": True}))
        await unfinished.asked.wait()
        server.stop(number)
        await server.is_stopping()  # two signals at once would count as one
        server.stop(number)
        assert check((await streaming).content).terminal == "response.failed"
    await server.has_stopped()
