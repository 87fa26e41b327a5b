"""Frames and events of a connection, and refused frames and upgrades."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits
from uvicorn.protocols.utils import ClientDisconnected
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from responses_mw.asgi.http_responses import ErrorResponse
from responses_mw.asgi.requests import Inbound
from responses_mw.errors import Unauthorized
from responses_mw.server.protocols import websocket_protocol
from tests.support import oracle
from tests.support.garbage import nothing_left
from tests.support.scripted import HELLO, Signal, error, frame, text
from tests.support.websocket import UVICORN, opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Message, Receive, Scope, Send

    from tests.support.oracle import Event
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start


def as_sse(events: list[Event]) -> bytes:
    """The same events as an SSE stream."""
    frames = (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    return "".join(frames).encode()


@pytest.mark.both_mounts
async def test_a_response_has_the_same_events_as_an_sse_stream(ws: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    upstream.stream(*HELLO)
    async with opened(ws) as socket:
        await socket.create()
        events = await socket.events()
    streamed = oracle.check(as_sse(events), done=False)
    assert streamed.response["output_text"] == "Hello"
    assert streamed.types == (await oracle.stream(ws)).types
    assert not any("stream_id" in event for event in events)
    assert upstream.requests[0].json == upstream.requests[1].json  # members that concern only the connection are not forwarded
    assert upstream.requests[0].headers["authorization"] == "Bearer key"


async def test_a_prompt_that_is_too_long_fails_with_context_length_exceeded(start: Start, upstream: ScriptedUpstream) -> None:
    upstream.whole(error("The engine prompt length 9 exceeds the max_model_len 5. Please reduce prompt."), 400)
    async with opened(start(uvicorn=UVICORN, upstream__status_grace=0)) as socket:
        await socket.create()
        failed = (await socket.events())[-1]
    assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "context_length_exceeded")


@pytest.mark.both_mounts
async def test_the_official_client_connects(ws: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    texts = []
    async with ws.client.responses.connect() as connection:
        await connection.response.create(input="Hi", model="tiny")
        async for event in connection:
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
            if event.type == "response.completed":
                assert event.response.output_text == "Hello"
                break
    assert texts == ["Hel", "lo"]


@pytest.mark.filterwarnings("ignore:connect\\(\\) must be used as a context manager:DeprecationWarning")  # the client's own
async def test_the_official_synchronous_client_connects(ws: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)

    def ask() -> str:
        with ws.sync_client.responses.connect() as connection:
            connection.response.create(input="Hi", model="tiny")
            return next(event.response.output_text for event in connection if event.type == "response.completed")

    assert await asyncio.to_thread(ask) == "Hello"


async def test_the_official_session_runs_responses_in_lanes(ws: Ours, upstream: ScriptedUpstream) -> None:
    limits = ResponsesWebSocketLimits(
        max_lanes=4, max_events_per_lane=100, max_events=400, max_bytes_per_lane=10**6, max_bytes=10**7
    )
    upstream.stream(*HELLO)
    upstream.stream(*HELLO)
    async with (
        ws.client.responses.connect() as connection,
        AsyncResponsesWebSocketSession(connection, limits=limits) as session,
    ):
        for name in ("one", "two"):
            lane = session.lane(name)
            await lane.send({"type": "response.create", "input": "Hi", "model": "tiny"})
            response = await lane.get_final_response()
            assert response.output_text == "Hello"


async def test_every_event_has_its_stream_id_and_lanes_run_concurrently(ws: Ours, upstream: ScriptedUpstream) -> None:
    held = Signal()
    upstream.stream(text("slow"), held, *HELLO)
    upstream.stream(*HELLO)
    async with opened(ws) as socket:
        await socket.create(stream_id="slow")
        first = [await socket.receive() for _ in range(5)]
        await socket.create(stream_id="quick")
        second = await socket.events()
        held.set()
        rest = await socket.events()
    assert {event["stream_id"] for event in first + rest} == {"slow"}
    assert {event["stream_id"] for event in second} == {"quick"}
    assert oracle.check(as_sse(second), done=False).response["output_text"] == "Hello"
    assert oracle.check(as_sse(first + rest), done=False).response["output_text"] == "slowHello"


async def test_a_lane_runs_one_response_at_a_time_in_order(ws: Ours, upstream: ScriptedUpstream) -> None:
    held = Signal()
    first = upstream.stream(text("1"), held, *HELLO)
    second = upstream.stream(text("2"), *HELLO)
    async with opened(ws) as socket:
        await socket.create()
        await socket.create()
        await first.asked.wait()
        assert not second.asked.is_set()
        held.set()
        texts = [(await socket.events())[-1]["response"]["output_text"] for _ in range(2)]
    assert texts == ["1Hello", "2Hello"]


async def test_an_upstream_error_is_an_error_event_with_its_status(start_ws: Start, upstream: ScriptedUpstream) -> None:
    ws = start_ws(upstream__status_grace=60)
    upstream.whole(error("no such thing", 400), 400)
    upstream.whole(error("slow down", 429), 429, headers={"retry-after": "7"})
    async with opened(ws) as socket:
        refused = await socket.error()
        limited = await socket.error(stream_id="lane")
    assert refused["status"] == 400
    code = "invalid_request_error"  # the upstream gave none, and the specification wants one
    assert refused["error"] == {"type": "invalid_request_error", "code": code, "message": "no such thing", "param": None}
    assert (limited["status"], limited["stream_id"], limited["error"]["code"]) == (429, "lane", "rate_limit_exceeded")
    assert limited["error"]["headers"] == {"retry-after": "7"}


async def test_a_failure_after_the_start_is_response_failed_without_an_error_event(
    ws: Ours, upstream: ScriptedUpstream
) -> None:
    upstream.stream(text("Hel"), frame(error("broken", 500)), done=False)
    upstream.stream(*HELLO)
    async with opened(ws) as socket:
        await socket.create()
        events = await socket.events()
        assert events[-1]["type"] == "response.failed"
        assert (await socket.response())["output_text"] == "Hello"  # no event came in between


@pytest.mark.parametrize(
    ("sent", "param", "code"),
    [
        ({"type": "response.create", "model": "tiny"}, "input", "missing_required_parameter"),
        ({"type": "response.create", "input": 1}, "input", "invalid_type"),
        ({"type": "response.create", "input": "Hi", "background": True}, "background", "unsupported_parameter"),
        ({"type": "response.create", "input": "Hi", "generate": "no"}, "generate", "invalid_type"),
        (
            {"type": "response.create", "input": [{"type": "compaction_trigger"}], "generate": False, "model": "tiny"},
            "generate",
            "mutually_exclusive_parameters",
        ),
        ({"type": "response.create", "input": "Hi", "stream_id": "a b"}, "stream_id", "invalid_value"),
        ({"type": "response.create", "input": "Hi", "stream_id": 7}, "stream_id", "invalid_type"),
        ({"type": "response.stop"}, "type", "invalid_value"),
        ({"input": "Hi"}, "type", "missing_required_parameter"),
        ([1], None, "invalid_type"),
    ],
)
async def test_an_invalid_frame_is_a_400_and_the_connection_stays_usable(
    ws_proxy: Ours, upstream: ScriptedUpstream, sent: Any, param: str | None, code: str
) -> None:
    upstream.stream(*HELLO)
    async with opened(ws_proxy) as socket:
        await socket.connection.send(json.dumps(sent))
        refused = await socket.receive()
        assert (refused["type"], refused["status"]) == ("error", 400)
        assert (refused["error"]["param"], refused["error"]["code"]) == (param, code)
        assert refused["error"]["type"] == "invalid_request_error"
        assert await socket.response()
    assert len(upstream.requests) == 1


async def test_a_frame_that_is_not_json_is_a_400(ws_proxy: Ours) -> None:
    async with opened(ws_proxy) as socket:
        await socket.connection.send("{")
        assert (await socket.receive())["error"]["code"] == "invalid_json"


async def test_a_frame_may_be_binary(ws_proxy: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    async with opened(ws_proxy) as socket:
        await socket.connection.send(json.dumps({"type": "response.create", "input": "Hi", "model": "tiny"}).encode())
        assert (await socket.events())[-1]["type"] == "response.completed"


async def test_a_frame_that_is_too_large_is_a_413(start_ws: Start, upstream: ScriptedUpstream) -> None:
    async with opened(start_ws(limits__max_request_bytes=1000)) as socket:
        refused = await socket.error("x" * 1000)
    assert (refused["status"], refused["error"]["code"]) == (413, "request_too_large")
    assert not upstream.requests


@pytest.mark.parametrize("kind", ["response.create", "response.steer"])
async def test_a_frame_that_is_nested_too_deep_is_a_413_and_the_connection_stays_usable(
    ws_proxy: Ours, upstream: ScriptedUpstream, kind: str
) -> None:
    deep = f'{{"type": "{kind}", "model": "tiny", "input": {"[" * 300}{"]" * 300}}}'
    upstream.stream(*HELLO)
    async with opened(ws_proxy) as socket:
        await socket.connection.send(deep)
        refused = await socket.receive()
        assert (refused["status"], refused["error"]["code"]) == (413, "request_too_deep")
        assert await socket.response()


async def test_steering_fails_with_an_event_that_repeats_the_input(ws_proxy: Ours, upstream: ScriptedUpstream) -> None:
    held = Signal()
    upstream.stream(text("Hel"), held, *HELLO)
    async with ws_proxy.client.responses.connect() as connection:
        await connection.response.create(input="Hi", model="tiny")
        created = await connection.recv()
        assert created.type == "response.created"
        await connection.send({"type": "response.steer", "input": "Rather this", "previous_response_id": created.response.id})
        async for event in connection:
            if event.type == "response.steer.failed":
                assert event.error.code == "steering_not_supported"
                assert (event.steer.input, event.steer.previous_response_id) == ("Rather this", created.response.id)
                held.set()
            if event.type == "response.completed":
                break


async def test_an_upgrade_with_a_refused_credential_is_a_401(start_at: Callable[..., Ours], serve: Serve) -> None:
    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    ours = start_at("proxy", uvicorn=UVICORN, upstream=serve(refusing, lifespan="off"))
    with pytest.raises(InvalidStatus) as caught:
        async with opened(ours, key="wrong"):
            pass
    assert caught.value.response.status_code == 401


@pytest.mark.both_mounts
async def test_an_upgrade_at_another_responses_path_is_a_404(ws: Ours) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with opened(ws, "/v1/responses/resp_1"):
            pass
    assert caught.value.response.status_code == 404


@pytest.mark.both_mounts
async def test_an_upgrade_is_a_426_if_max_websockets_is_zero(start_ws: Start) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with opened(start_ws(server__max_websockets=0)):
            pass
    assert caught.value.response.status_code == 426


@pytest.mark.parametrize(
    ("settings", "path", "route", "status"),
    [
        ({"server__max_websockets": 0}, "/v1/responses", "/v1/responses", 426),
        ({"auth__api_keys": ["team:sha256:" + "0" * 64]}, "/v1/responses", "/v1/responses", 401),
        ({}, "/v1/responses/resp_1", "/v1/responses/{response_id}", 404),
    ],
)
async def test_a_refused_upgrade_has_a_request_id_and_an_access_line(
    start_at: Callable[..., Ours],
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    path: str,
    route: str,
    status: int,
) -> None:
    uvicorn = {**UVICORN, "ws": websocket_protocol(Inbound(2**20))}
    ours = start_at("proxy", uvicorn=uvicorn, **settings)
    caplog.clear()
    caplog.set_level("INFO", "responses_mw.access")
    with pytest.raises(InvalidStatus) as caught:
        async with opened(ours, path):
            pass
    refusal = caught.value.response
    assert refusal.status_code == status
    async with asyncio.timeout(20):
        while not (lines := [record for record in caplog.records if record.name == "responses_mw.access"]):
            await asyncio.sleep(0.01)
    line = lines[0].getMessage()
    assert line.startswith(f"GET {route} {status} ")
    assert f"request={refusal.headers['x-request-id']}" in line
    assert "outcome=refused" in line
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_client_that_disconnects_before_its_refusal_is_logged_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(_: Message) -> None:
        raise ClientDisconnected

    caplog.set_level("INFO", "responses_mw")
    scope = {"type": "websocket", "path": "/v1/responses", "headers": [], "extensions": {"websocket.http.response": {}}}
    await ErrorResponse(Unauthorized("Who are you?"))(scope, receive, send)
    [line] = caplog.messages
    assert line.startswith("GET - 401 ")
    assert "outcome=refused" in line
    assert "left=true" in line


async def test_an_incomplete_refusal_is_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.http.response.start", "status": 403, "headers": []})

    url = serve(app, lifespan="off", ws=websocket_protocol(Inbound(2**20)))
    with pytest.raises(InvalidMessage):
        async with connect(url.replace("http", "ws"), proxy=None):
            pass
    assert "returned without completing handshake" in caplog.text


@pytest.mark.parametrize(("origin", "is_welcome"), [("https://mine.example", True), ("https://other.example", False)])
async def test_a_page_of_another_origin_may_not_connect(start_ws: Start, origin: str, is_welcome: bool) -> None:
    ours = start_ws(server__cors_origins=["https://mine.example"])
    if is_welcome:
        async with opened(ours, origin=origin):
            return
    with pytest.raises(InvalidStatus) as caught:
        async with opened(ours, origin=origin):
            pass
    assert caught.value.response.status_code == 403


async def test_a_page_of_the_server_itself_may_connect(ws_proxy: Ours) -> None:
    async with opened(ws_proxy, origin=ws_proxy.url) as socket:
        await socket.send(type="response.stop")
        assert (await socket.receive())["type"] == "error"


async def test_an_owner_may_open_a_fifth_of_the_maximum_number_of_connections(start_ws: Start) -> None:
    ours = start_ws(server__max_websockets=9)
    async with opened(ours):
        with pytest.raises(InvalidStatus) as caught:
            async with opened(ours):
                pass
        assert caught.value.response.status_code == 429
        async with opened(ours, key="another's"):
            pass
    async with opened(ours) as socket:  # the first has ended
        await socket.send(type="response.stop")
        await socket.receive()


async def test_the_number_of_lanes_per_connection_is_limited(
    start_ws: Start, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.asgi.websocket.MAX_LANES", 1)
    held = Signal()
    upstream.stream(text("a"), held, *HELLO)
    async with opened(start_ws()) as socket:
        await socket.create(stream_id="a")
        await socket.receive()
        await socket.create(stream_id="b")
        while (event := await socket.receive())["type"] != "error":
            assert event["stream_id"] == "a"
        assert (event["status"], event["stream_id"]) == (429, "b")
        held.set()
        assert (await socket.events())[-1]["type"] == "response.completed"


async def test_an_expired_connection_is_closed_after_its_last_response(
    start_ws: Start, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.asgi.websocket.MAX_LIFETIME", 0.5)
    held = Signal()
    upstream.stream(text("Hel"), held, *HELLO)
    async with opened(start_ws()) as socket:
        await socket.create()
        events = [await socket.receive()]
        while events[-1]["type"] != "error":  # the time is over when a new response is refused
            await socket.create(stream_id="late", model="tiny", input=[], previous_response_id="resp_unknown")
            while events[-1].get("stream_id") != "late":
                events.append(await socket.receive())
            if events[-1]["error"]["code"] != "websocket_connection_limit_reached":
                events.append({"type": "not yet"})
        held.set()
        rest = await socket.events()
        assert rest[-1]["type"] == "response.completed"
        last = await socket.receive()
        assert (last["status"], last["error"]["code"]) == (400, "websocket_connection_limit_reached")
        with pytest.raises(ConnectionClosed):
            await socket.receive()


@pytest.mark.both_mounts
async def test_closing_a_connection_cancels_its_running_responses(ws: Ours, upstream: ScriptedUpstream) -> None:
    answers = [upstream.stream(text("a"), Signal()) for _ in range(2)]
    async with opened(ws) as socket:
        for name in ("a", "b"):
            await socket.create(stream_id=name)
        for answer in answers:
            await answer.asked.wait()
    for answer in answers:
        await answer.left.wait()


async def test_refusals_and_disconnections_leave_nothing_to_the_garbage_collector(
    patient_ws: Ours, upstream: ScriptedUpstream
) -> None:
    async with nothing_left():
        upstream.whole(error("no"), 400)
        async with opened(patient_ws) as socket:
            await socket.create()
            assert (await socket.receive())["type"] == "error"
            answer = upstream.stream(text("a"), Signal())
            for _ in range(2):  # the second one waits
                await socket.create()
            await answer.asked.wait()


async def test_a_client_that_does_not_read_delays_only_its_own_responses(ws: Ours, upstream: ScriptedUpstream) -> None:
    many = 400
    slow = upstream.stream(*[text("x" * 100_000)] * many)
    upstream.stream(*HELLO)
    async with opened(ws, max_queue=1, close_timeout=0.1) as lazy, opened(ws) as other:
        await lazy.create()
        await slow.asked.wait()
        assert (await other.response())["output_text"] == "Hello"
        assert slow.sent < many
        assert not slow.played.is_set()


async def test_a_wrong_key_raises_an_error_in_the_official_client(patient_ws: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(error("who are you", 401), 401)
    async with patient_ws.client.responses.connect() as connection:
        await connection.response.create(input="Hi", model="tiny")
        event = await connection.recv()
        assert event.type == "error"
        await connection.response.create(input="Hi", model="tiny")
        with pytest.raises(openai.OpenAIError):
            await connection.dispatch_events()


async def test_an_upgrade_without_the_tenant_header_is_a_400(start_ws: Start) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with opened(start_ws(auth__tenant_header="x-tenant")):
            pass
    assert caught.value.response.status_code == 400
    assert b"x-tenant" in (caught.value.response.body or b"")
