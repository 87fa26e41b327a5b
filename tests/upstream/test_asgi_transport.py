from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from responses_mw.upstream.transports.asgi import ASGITransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

OK = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


@asynccontextmanager
async def client_of(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of `app`. Assert that closing it leaves no tasks."""
    before = asyncio.all_tasks()
    async with httpx.AsyncClient(transport=ASGITransport(app), base_url="http://app") as client:
        yield client
    assert asyncio.all_tasks() <= before


def chunk(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def forever(scope: Scope, receive: Receive, send: Send) -> None:
    await send(OK)
    await send(chunk(b"one"))
    await anyio.sleep_forever()


async def test_each_chunk_is_received_before_the_application_sends_the_next() -> None:
    seen = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(OK)
        for body in (b"one", b"two", b"three"):
            await send(chunk(body))
            await seen.wait()
            seen.clear()
        await send(chunk(b"", more=False))

    received = []
    async with client_of(app) as client, client.stream("GET", "/") as response:
        async for body in response.aiter_raw():
            received.append(body)
            seen.set()
    assert received == [b"one", b"two", b"three"]


async def test_the_head_is_received_before_the_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": [(b"x-a", b"1"), (b"x-a", b"2")]})
        await anyio.sleep_forever()

    async with client_of(app) as client, client.stream("GET", "/") as response:
        assert response.status_code == 418
        assert response.headers.get_list("x-a") == ["1", "2"]


async def test_send_blocks_until_the_chunk_has_been_read() -> None:
    sent = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(OK)
        for number in range(5):
            await send(chunk(b"%d" % number))
            sent.append(number)
        await send(chunk(b"", more=False))

    async with client_of(app) as client, client.stream("GET", "/") as response:
        await anyio.wait_all_tasks_blocked()
        assert sent == [0]
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"0"
        await anyio.wait_all_tasks_blocked()
        assert sent == [0, 1]
        assert [body async for body in chunks] == [b"1", b"2", b"3", b"4"]


async def test_receive_returns_the_body_once_and_then_blocks_until_the_client_disconnects() -> None:
    messages = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        messages.append(await receive())
        await send(OK)
        messages.append(await receive())

    async with client_of(app) as client, client.stream("POST", "/", content=b"hello"):
        await anyio.wait_all_tasks_blocked()
        assert messages == [{"type": "http.request", "body": b"hello", "more_body": False}]
    assert messages[1:] == [{"type": "http.disconnect"}]


async def test_receive_returns_a_disconnect_after_the_answer_is_complete() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await PlainTextResponse("done")(scope, receive, send)
        assert (await receive())["type"] == "http.disconnect"

    async with client_of(app) as client:
        assert (await client.get("/")).text == "done"


async def test_closing_a_response_cancels_the_application_and_waits_for_its_end() -> None:
    ended = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await forever(scope, receive, send)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    async with client_of(app) as client:
        async with client.stream("GET", "/") as response:
            assert await anext(response.aiter_raw()) == b"one"
        assert ended == [True]


@pytest.mark.parametrize("heeds", [True, False])
async def test_a_disconnect_before_the_answer_cancels_only_an_application_that_ignores_it(
    heeds: bool,
) -> None:
    """The handlers of vLLM run their work in a task, and wait for it or for a disconnect."""
    began, ended = asyncio.Event(), asyncio.Event()
    cancelled = []

    async def work() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async def left(receive: Receive) -> None:
        while not heeds or (await receive())["type"] != "http.disconnect":
            await asyncio.sleep(0.01)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.create_task(work()), asyncio.create_task(left(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            cancelled.append(True)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async with client_of(app) as client:
        asking = asyncio.create_task(client.post("/", json={}))
        await began.wait()
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        assert ended.is_set()
    assert cancelled == ([] if heeds else [True])


@pytest.mark.parametrize("chunks", [0, 1, 2])
async def test_a_disconnect_cancels_a_generator_while_it_makes_the_next_chunk(chunks: int) -> None:
    """Only there can vLLM abort the request. Starlette closes no generators, and the engine has no request before the first chunk."""
    begun, ended = asyncio.Event(), []

    async def generate() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.02)  # the engine accepts the request
        begun.set()
        try:
            for _ in range(chunks):
                yield b"one"
            await anyio.sleep_forever()
        except BaseException as error:
            ended.append(type(error))
            raise

    body = generate()  # a reference, so that garbage collection does not close it

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(OK)
        async for data in body:
            await send(chunk(data))

    async with client_of(app) as client:
        async with client.stream("GET", "/"):
            if chunks:
                await begun.wait()
                await anyio.wait_all_tasks_blocked()
        assert begun.is_set() == bool(ended)
        assert ended == [asyncio.CancelledError]


async def test_a_disconnect_during_a_send_cancels_the_generator_while_it_makes_the_next_chunk() -> None:
    """Starlette streams in a separate task if `send` of the server does not raise after a disconnect."""
    go_on, ended = asyncio.Event(), []

    async def generate() -> AsyncIterator[bytes]:
        yield b"one"
        await go_on.wait()
        try:
            yield b"two"
            await anyio.sleep_forever()
        except BaseException as error:
            ended.append(type(error))
            raise

    body = generate()  # a reference, so that garbage collection does not close it

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def stream() -> None:
            async for data in body:
                await send(chunk(data))

        await send(OK)
        async with anyio.create_task_group() as group:
            group.start_soon(stream)
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

    async with client_of(app) as client, client.stream("GET", "/") as response:
        assert await anext(response.aiter_raw()) == b"one"
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    assert ended == [asyncio.CancelledError]


async def test_closing_an_unread_response_leaves_no_tasks() -> None:
    async with client_of(forever) as client, client.stream("GET", "/"):
        pass


async def test_closing_the_client_cancels_the_application_of_an_unclosed_response() -> None:
    async with client_of(forever) as client:
        await client.send(client.build_request("GET", "/"), stream=True)


@pytest.mark.parametrize("read_first", [True, False])
async def test_cancelling_a_waiting_reader_cancels_the_application(read_first: bool) -> None:
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if read_first:
                await forever(scope, receive, send)
            await anyio.sleep_forever()
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    async def read(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/") as response:
            async for _ in response.aiter_raw():
                pass

    async with client_of(app) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(read, client)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert ended.is_set()


async def test_closing_a_response_twice_cancels_the_application_once() -> None:
    clean, cleaned = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(OK)
        try:
            await anyio.sleep_forever()
        finally:
            await clean.wait()
            cleaned.set()

    async with client_of(app) as client:
        response = await client.send(client.build_request("GET", "/"), stream=True)
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(stream.aclose())
                await anyio.wait_all_tasks_blocked()
            clean.set()
        await stream.aclose()
        assert cleaned.is_set()


async def test_send_raises_in_an_application_that_ignores_its_cancellation() -> None:
    refused = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(OK)
        try:
            while True:
                with suppress(asyncio.CancelledError):
                    await send(chunk(b"one"))
        except OSError as error:
            refused.append(str(error))

    async with client_of(app) as client:
        async with client.stream("GET", "/"):
            await anyio.wait_all_tasks_blocked()
        assert refused == ["The reader has disconnected"]


async def test_reading_a_closed_response_is_an_error() -> None:
    async with client_of(forever) as client:
        response = await client.send(client.build_request("GET", "/"), stream=True)
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        chunks = stream.__aiter__()
        assert await anext(chunks) == b"one"
        await response.aclose()
        with pytest.raises(httpx.StreamClosed):
            await anext(chunks)


async def test_an_exception_before_the_answer_is_a_read_error_with_its_cause() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("no such thing")

    async with client_of(app) as client:
        with pytest.raises(httpx.ReadError, match="no such thing") as caught:
            await client.get("/")
    assert isinstance(caught.value.__cause__, ValueError)


async def test_returning_without_an_answer_is_a_protocol_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    async with client_of(app) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/")


@pytest.mark.parametrize("ending", [ValueError("broken"), asyncio.CancelledError(), None])
async def test_an_incomplete_answer_is_an_error_after_the_sent_chunks(ending: BaseException | None) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(OK)
        await send(chunk(b"one"))
        if ending is not None:
            raise ending

    async with client_of(app) as client, client.stream("GET", "/") as response:
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"one"
        with pytest.raises(httpx.ReadError if ending else httpx.RemoteProtocolError):
            await anext(chunks)


async def test_background_work_neither_delays_the_reader_nor_is_cancelled() -> None:
    release, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await release.wait()
        await asyncio.sleep(0.01)
        done.set()

    async with client_of(PlainTextResponse("hello", background=BackgroundTask(work))) as client:
        assert (await client.get("/")).text == "hello"
        assert not done.is_set()
        release.set()
    assert done.is_set()


async def test_a_failure_after_a_complete_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("hello")(scope, receive, send)
        raise ValueError("too late")

    with caplog.at_level(logging.ERROR, logger="responses_mw.upstream.transports.asgi"):
        async with client_of(app) as client:
            assert (await client.get("/")).text == "hello"
    assert "too late" in caplog.text


@pytest.mark.parametrize(
    "messages",
    [
        [chunk(b"body before its head")],
        [OK, OK],
        [OK, chunk(b"", more=False), chunk(b"after the end")],
    ],
)
async def test_messages_out_of_order_are_refused(messages: list[dict[str, Any]]) -> None:
    refused = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            for message in messages:
                await send(message)
        except RuntimeError as error:
            refused.append(str(error))

    async with client_of(app) as client:
        with suppress(httpx.RemoteProtocolError):
            await client.get("/")
        await anyio.wait_all_tasks_blocked()
    assert refused == [f"Unexpected ASGI message {messages[-1]['type']!r}"]


async def scope_seen(request: httpx.Request) -> dict[str, Any]:
    """Return the scope that an application receives for `request`."""
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope)
        await PlainTextResponse("")(scope, receive, send)

    async with client_of(app) as client:
        await client.send(request)
    return seen


async def test_the_scope_has_the_target_and_the_headers_of_the_request() -> None:
    request = httpx.Request(
        "POST",
        "http://app/v1/a%2Fb%20c?x=%41&y",
        content=b"{}",
        headers=[("Authorization", "Bearer t"), ("Accept-Encoding", "gzip"), ("X-A", "1"), ("X-A", "2")],
    )
    scope = await scope_seen(request)
    assert (scope["type"], scope["method"], scope["path"]) == ("http", "POST", "/v1/a/b c")
    assert (scope["raw_path"], scope["query_string"]) == (b"/v1/a%2Fb%20c", b"x=%41&y")
    assert scope["headers"] == [
        (b"host", b"app"),
        (b"authorization", b"Bearer t"),
        (b"x-a", b"1"),
        (b"x-a", b"2"),
        (b"content-length", b"2"),
    ]


async def test_a_streamed_body_gets_a_content_length() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"hello "
        yield b"world"

    headers = dict((await scope_seen(httpx.Request("POST", "http://app/", content=body())))["headers"])
    assert headers[b"content-length"] == b"11"
    assert b"transfer-encoding" not in headers


async def test_without_an_outer_scope_the_client_is_localhost() -> None:
    scope = await scope_seen(httpx.Request("GET", "http://app:81/"))
    assert scope["asgi"]["version"] == "3.0"
    assert (scope["scheme"], scope["server"], scope["root_path"]) == ("http", ("app", 81), "")
    assert scope["client"] == ("127.0.0.1", 0)


async def test_the_outer_scope_is_inherited_without_server_extensions() -> None:
    outer = {
        "type": "websocket",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "app": object(),
        "state": {"engine": object()},
        "user": "somebody",
        "root_path": "/api",
        "client": ("10.0.0.1", 4242),
        "server": ("10.0.0.2", 80),
        "scheme": "https",
        "path": "/v1/responses",
        "headers": [(b"cookie", b"a=b")],
        "subprotocols": ["x"],
        "extensions": {"http.response.pathsend": {}},
    }
    scope = await scope_seen(httpx.Request("GET", "http://app/v1/models", extensions={"asgi_scope": outer}))
    for key in ("asgi", "app", "state", "user", "root_path", "client", "server", "scheme"):
        assert scope[key] == outer[key]
    assert scope["state"] is not outer["state"]
    assert (scope["type"], scope["path"], scope["headers"]) == ("http", "/v1/models", [(b"host", b"app")])
    assert not {"subprotocols", "extensions"} & scope.keys()
    assert "extensions" in outer


async def test_a_starlette_application_parses_requests_and_streams_responses() -> None:
    async def echo(request: Request) -> JSONResponse:
        return JSONResponse({"got": await request.json()})

    async def events(request: Request) -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            for number in range(3):
                yield f"data: {number}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/echo", echo, methods=["POST"]), Route("/events", events)])
    async with client_of(app) as client:
        assert (await client.post("/echo", json={"a": 1})).json() == {"got": {"a": 1}}
        assert (await client.get("/events")).text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert (await client.get("/nowhere")).status_code == 404
