"""Clients that reconnect after their server was killed during a response."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from websockets.exceptions import ConnectionClosed

from benchmarks.processes import free_port
from tests.support.scripted import HELLO, Signal, text
from tests.support.servers import Ours, wait_until_serving
from tests.support.websocket import opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.forkserver import Forked, ForkServer
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

    StartProcess = Callable[[], Forked]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start_process(
    fork_server: ForkServer, serve: Serve, upstream: ScriptedUpstream, redis_url: str, port: int
) -> Iterator[StartProcess]:
    """Start `responses-mw serve`, always on the same port."""
    url = serve(upstream)
    processes: list[Forked] = []

    def start() -> Forked:
        process = fork_server.start("serve", "--upstream", url, "--redis", redis_url, "--port", str(port))
        processes.append(process)
        wait_until_serving(f"http://127.0.0.1:{port}", process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


async def test_a_stored_response_can_be_continued_after_its_server_was_killed(
    start_process: StartProcess, upstream: ScriptedUpstream, port: int
) -> None:
    """As Codex does: it continues stored responses, and sends the whole history of unstored ones again."""
    upstream.stream(*HELLO)
    upstream.stream(*HELLO)
    broken = upstream.stream(text("Hel"), Signal())
    upstream.stream(*HELLO)
    process, ours = start_process(), Ours(f"http://127.0.0.1:{port}")
    async with opened(ours) as socket:
        stored = await socket.response("One")
        unstored = await socket.response("Two", store=False)
        await socket.create("Three", previous_response_id=stored["id"])
        while (await socket.receive())["type"] != "response.output_text.delta":
            pass
        process.kill()
        process.wait()  # until then, the dying process accepts connections
        with pytest.raises(ConnectionClosed):
            await socket.receive()
    await broken.left.wait()
    start_process()
    async with opened(ours) as socket:
        refused = await socket.error("Three", previous_response_id=unstored["id"])
        assert refused["error"]["code"] == "previous_response_not_found"
        assert (await socket.response("Three", previous_response_id=stored["id"]))["output_text"] == "Hello"


async def test_the_official_client_reconnects_after_its_server_was_killed(
    start_process: StartProcess, upstream: ScriptedUpstream, port: int
) -> None:
    """It opens another connection, on which the test repeats the request."""
    upstream.stream(text("Hel"), Signal())
    upstream.stream(*HELLO)
    process, ours = start_process(), Ours(f"http://127.0.0.1:{port}")
    reconnecting = asyncio.Event()

    def on_reconnecting(_event: object) -> None:
        if not reconnecting.is_set():
            start_process()
            reconnecting.set()

    async with ours.client.responses.connect(on_reconnecting=on_reconnecting, initial_delay=0.1) as connection:

        async def answer() -> str:
            async for event in connection:
                if event.type == "response.completed":
                    return event.response.output_text
            return ""

        await connection.response.create(input="Hi", model="tiny")
        while (await connection.recv()).type != "response.output_text.delta":
            pass
        process.kill()
        process.wait()  # until then, the dying process accepts connections
        waiting = asyncio.create_task(answer())
        await reconnecting.wait()
        await connection.response.create(input="Hi", model="tiny")
        assert await waiting == "Hello"
    await ours.aclose()
