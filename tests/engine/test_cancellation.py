"""Cancellation of the upstream call when a client leaves, and backpressure from slow clients."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from responses_mw import ResponsesMiddleware
from tests.support.oracle import check
from tests.support.scripted import HELLO, Signal, completion, error, finish, text

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Apps, Ours, Start

pytestmark = pytest.mark.both_mounts

BODY = {"input": "Hi", "model": "tiny"}
STREAM = {**BODY, "stream": True}


async def _leave(request: asyncio.Task[Any]) -> None:
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def _read_on(ours: Ours, seen: asyncio.Event, awaited: bytes) -> None:
    raw = b""
    async with ours.http.stream("POST", "/v1/responses", json=STREAM) as response:
        async for data in response.aiter_raw():
            raw += data
            if awaited in raw:
                seen.set()


async def test_a_client_that_leaves_its_stream_ends_the_upstream_call(ours: Ours, upstream: ScriptedUpstream) -> None:
    answer = upstream.stream(text("Hel"), Signal(), text("lo"))
    seen = asyncio.Event()
    request = asyncio.create_task(_read_on(ours, seen, b'"Hel"'))
    await seen.wait()
    assert not answer.left.is_set()
    await _leave(request)
    await answer.left.wait()


async def test_a_client_that_leaves_with_pipelined_requests_ends_the_upstream_call(
    start: Start, upstream: ScriptedUpstream
) -> None:
    ours, answer = start(), upstream.stream(Signal())
    parts, body = urlsplit(ours.url), json.dumps(BODY).encode()
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(2 * (b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)))
    await answer.asked.wait()
    assert not answer.left.is_set()
    writer.close()
    await answer.left.wait()


async def test_a_client_that_leaves_before_the_first_chunk_ends_the_upstream_call(
    ours: Ours, upstream: ScriptedUpstream
) -> None:
    answer = upstream.stream(Signal(), *HELLO)
    seen = asyncio.Event()
    request = asyncio.create_task(_read_on(ours, seen, b"response.created"))
    await seen.wait()
    await answer.asked.wait()
    await _leave(request)
    await answer.left.wait()


async def test_a_client_that_leaves_before_the_status_ends_the_upstream_call(ours: Ours, upstream: ScriptedUpstream) -> None:
    answer = upstream.stream(*HELLO, before=Signal())
    seen = asyncio.Event()
    request = asyncio.create_task(_read_on(ours, seen, b"response.created"))
    await seen.wait()
    await answer.asked.wait()
    await _leave(request)
    await answer.left.wait()


async def test_a_client_that_leaves_within_the_status_grace_ends_the_upstream_call(
    start: Start, upstream: ScriptedUpstream
) -> None:
    ours = start(upstream__status_grace=30)
    answer = upstream.stream(*HELLO, before=Signal())
    request = asyncio.create_task(ours.http.post("/v1/responses", json=STREAM))
    await answer.asked.wait()
    await _leave(request)
    await answer.left.wait()


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["json", "stream"])
async def test_retries_stop_when_the_client_leaves(start: Start, upstream: ScriptedUpstream, body: dict[str, Any]) -> None:
    ours = start(upstream__status_grace=30)
    busy = [upstream.whole(error("busy", 503), 503) for _ in range(20)]
    request = asyncio.create_task(ours.http.post("/v1/responses", json=body))
    await busy[3].asked.wait(60)
    await _leave(request)
    tried = len(upstream.requests)
    await asyncio.sleep(0.6)  # long enough for several more retries
    assert len(upstream.requests) <= tried + 1


@pytest.mark.parametrize("before", [True, False], ids=["before the status", "within the body"])
async def test_a_client_that_leaves_before_its_json_response_ends_the_upstream_call(
    ours: Ours, upstream: ScriptedUpstream, before: bool
) -> None:
    answer = upstream.whole(completion({"content": "Hello"}))
    if before:
        answer.before = Signal()
    else:
        answer.pieces = [b'{"choices": [', Signal()]
    request = asyncio.create_task(ours.http.post("/v1/responses", json=BODY))
    await answer.asked.wait()
    await asyncio.sleep(0.05)
    await _leave(request)
    await answer.left.wait()


async def test_closing_the_stream_of_the_official_client_ends_the_upstream_call(ours: Ours, upstream: ScriptedUpstream) -> None:
    answer = upstream.stream(text("Hel"), Signal())
    async with await ours.client.responses.create(model="tiny", input="Hi", stream=True) as events:
        async for event in events:
            if event.type == "response.output_text.delta":
                break
    await answer.left.wait()


async def test_a_client_that_leaves_does_not_affect_other_streams(ours: Ours, upstream: ScriptedUpstream) -> None:
    more = Signal()
    left = upstream.stream(text("Hel"), Signal())
    seen = asyncio.Event()
    request = asyncio.create_task(_read_on(ours, seen, b'"Hel"'))
    await seen.wait()
    upstream.stream(text("Hel"), more, text("lo"), finish())
    other = asyncio.create_task(ours.http.post("/v1/responses", json=STREAM))
    await _leave(request)
    await left.left.wait()
    more.set()
    assert check((await other).content).deltas == ["Hel", "lo"]


# -- a client at the ASGI level -----------------------------------------------------------------------------------------------


class Client:
    """Call an application as a server does. `send` waits for `may_read`; `sent` has the messages that were sent."""

    def __init__(self, path: str = "/v1/responses") -> None:
        self._path = path
        self.sent: list[Message] = []
        self.may_read = asyncio.Event()
        self.leaves = asyncio.Event()
        self.begun = asyncio.Event()
        self._sent_something = asyncio.Condition()
        self._body = [httpx.Request("POST", "http://x", json=STREAM).content]

    async def call(self, app: ASGIApp) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": self._path, "raw_path": self._path.encode(), "query_string": b"", "root_path": "", "headers": [],
            "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
        }  # fmt: skip
        await app(scope, self._receive, self._send)

    def withhold_body(self) -> None:
        self._body.clear()

    async def _receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.begun.set()
        await self.may_read.wait()
        async with self._sent_something:
            self.sent.append(message)
            self._sent_something.notify_all()

    async def until(self, word: bytes) -> None:
        """Wait until `word` has been sent."""
        async with asyncio.timeout(60), self._sent_something:
            await self._sent_something.wait_for(lambda: any(word in body for body in self.bodies))

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


async def test_each_read_from_the_upstream_becomes_one_send_of_complete_events(apps: Apps, upstream: ScriptedUpstream) -> None:
    first, second, third = Signal(), Signal(), Signal()
    upstream.stream(text("a"), first, text("b"), second, text("c"), third, finish())
    client = Client()
    client.may_read.set()
    async with apps.open() as app, anyio.create_task_group() as group:
        group.start_soon(client.call, app)
        for word, pause in ((b'"a"', first), (b'"b"', second), (b'"c"', third)):
            await client.until(word)
            pause.set()
    assert all(body.endswith(b"\n\n") for body in client.bodies[:-1])
    assert [body.count(b"event: ") for body in client.bodies[:4]] == [2, 3, 1, 1]
    assert check(b"".join(client.bodies)).deltas == ["a", "b", "c"]


async def test_a_response_whose_client_does_not_read_is_stored_as_failed_when_the_server_stops(
    apps: Apps, upstream: ScriptedUpstream, start: Start
) -> None:
    upstream.stream(text("Hel"), more := Signal(), text("lo"), Signal())
    client, other = Client(), start()
    client.may_read.set()
    async with apps.open() as app:
        assert isinstance(app, ResponsesMiddleware)
        request = asyncio.create_task(client.call(app))
        await client.until(b'"Hel"')
        client.may_read.clear()
        client.begun.clear()
        more.set()
        await client.begun.wait()
        failing = asyncio.create_task(app.fail_runs())
        await asyncio.sleep(0)
        request.cancel()  # as uvicorn does after its graceful shutdown timeout
        await request
        await failing
    [response_id] = re.findall(rb'"id":"(resp_\w+)"', client.bodies[0].splitlines()[1])
    stored = (await other.http.get(f"/v1/responses/{response_id.decode()}")).json()
    assert (stored["status"], stored["output_text"]) == ("failed", "Hello")


async def test_a_request_with_an_incomplete_body_gets_a_503_when_the_server_stops(apps: Apps) -> None:
    client = Client()
    client.may_read.set()
    client.withhold_body()
    async with apps.open() as app:
        assert isinstance(app, ResponsesMiddleware)
        request = asyncio.create_task(client.call(app))
        await asyncio.sleep(0.01)
        await app.fail_runs()
        request.cancel()  # as uvicorn does after its graceful shutdown timeout
        await request
    assert client.sent[0]["status"] == 503
    assert b"The server is shutting down." in client.bodies[0]


@pytest.mark.usefixtures("impatient")
async def test_a_slow_client_does_not_cause_an_upstream_timeout(apps: Apps, upstream: ScriptedUpstream) -> None:
    upstream.stream(*[text("x" * 1000) for _ in range(50)], finish())
    client = Client()
    async with apps.open(upstream__timeout=5) as app, anyio.create_task_group() as group:
        group.start_soon(client.call, app)
        await client.begun.wait()
        await asyncio.sleep(1.2)
        client.may_read.set()
    assert check(b"".join(client.bodies)).terminal == "response.completed"


async def test_a_slow_client_holds_the_upstream(apps: Apps, upstream: ScriptedUpstream) -> None:
    pieces = 60
    answer = upstream.stream(*[text("x" * 1_000_000) for _ in range(pieces)], finish())
    client = Client()
    async with apps.open() as app, anyio.create_task_group() as group:
        group.start_soon(client.call, app)
        await client.begun.wait()
        before = -1
        with anyio.fail_after(60):
            while answer.sent != before:
                before = answer.sent
                await asyncio.sleep(0.3)
        assert before < pieces
        client.leaves.set()
        await answer.left.wait()


async def test_a_client_that_leaves_during_a_send_ends_the_upstream_call(apps: Apps, upstream: ScriptedUpstream) -> None:
    answer = upstream.stream(text("Hel"), Signal())
    client = Client()
    async with apps.open() as app, anyio.create_task_group() as group:
        group.start_soon(client.call, app)
        await client.begun.wait()
        await answer.asked.wait()
        client.leaves.set()
        await answer.left.wait()


async def test_an_os_error_from_send_is_treated_as_a_disconnect(apps: Apps, upstream: ScriptedUpstream) -> None:
    answer = upstream.stream(text("Hel"), Signal())

    class Leaving(Client):
        async def _send(self, message: Message) -> None:
            await answer.asked.wait()
            raise OSError("gone")

    async with apps.open() as app:
        await Leaving().call(app)
        await answer.left.wait()


@pytest.mark.usefixtures("impatient")
async def test_no_keep_alive_is_sent_during_or_after_the_last_send(apps: Apps, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)

    class Slow(Client):
        async def _send(self, message: Message) -> None:
            self.sent.append(message)
            if not message.get("more_body", True):
                await asyncio.sleep(0.2)

    client = Slow()
    async with apps.open() as app:
        await client.call(app)
    assert check(b"".join(client.bodies)).terminal == "response.completed"


@pytest.mark.usefixtures("impatient")
async def test_no_second_keep_alive_is_sent_while_the_first_is_pending(apps: Apps, upstream: ScriptedUpstream) -> None:
    more = Signal()
    upstream.stream(text("Hel"), more, text("lo"), finish())

    class Stuck(Client):
        async def _send(self, message: Message) -> None:
            self.sent.append(message)
            if message.get("body", b"").startswith(b": keep-alive"):
                asyncio.get_running_loop().call_later(0.3, more.set)
                await asyncio.sleep(0.2)

    client = Stuck()
    async with apps.open() as app:
        begun = time.monotonic()
        await client.call(app)
        took = time.monotonic() - begun
    raw = b"".join(client.bodies)
    assert check(raw).deltas == ["Hel", "lo"]
    assert 1 <= raw.count(b": keep-alive") <= took / 0.2 + 1
