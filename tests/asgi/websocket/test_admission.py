"""Admission on a connection: the owner's limits are checked before each response."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio

from responses_mw.asgi.websocket import WebSocketConnection
from responses_mw.asgi.websocket_memory import ConnectionHistory, Memory, Share
from responses_mw.engine.drain import Drain
from responses_mw.engine.run import RunMode
from responses_mw.errors import APIError, RateLimited
from responses_mw.protocol.request.create import parse
from responses_mw.upstream import Caller
from tests.support.configured import make_settings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Message, Scope

    from responses_mw.protocol.request.create import CreateResponse
    from responses_mw.protocol.types import Event


SHARE = Share(Memory(owner_bytes=1000, total_bytes=1000))


class Failing:
    """A runner that records its requests and fails."""

    def __init__(self) -> None:
        self.asked: list[CreateResponse] = []
        self.drain = Drain()

    async def run(
        self, request: CreateResponse, _caller: Caller, _mode: RunMode, **_options: Any
    ) -> AsyncGenerator[list[Event], None]:
        self.asked.append(request)
        if self.asked:
            raise APIError("no")
        yield []


class Watched(ConnectionHistory):
    """A history that records evictions."""

    def __init__(self) -> None:
        super().__init__(None, SHARE, required=False)
        self.evicted: list[str] = []

    def evict(self, response_id: str) -> None:
        self.evicted.append(response_id)


async def test_a_rate_limited_response_is_an_error_and_does_not_evict_the_previous_response() -> None:
    runner, held, sent, is_full = Failing(), Watched(), list[str](), [True, False]
    frame = '{"type": "response.create", "input": "Hi", "previous_response_id": "resp_1"}'
    told = anyio.Event()
    frames = iter([frame, frame])

    async def accept(_caller: Caller) -> None:
        pass

    async def count(_scope: Scope, _caller: Caller) -> None:
        if is_full.pop(0):
            raise RateLimited("Too much.", retry_after=3)

    async def receive() -> Message:
        for text in frames:
            return {"type": "websocket.receive", "text": text}
        await told.wait()
        return {"type": "websocket.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message["text"])
        if len(sent) == 2:
            told.set()

    context = SimpleNamespace(
        runner=runner,
        upstreams=SimpleNamespace(verify=accept),
        limits=SimpleNamespace(request=count),
        reader=SimpleNamespace(parse=lambda body, *_: parse(body)),
        settings=make_settings(),
    )
    scope = {"type": "websocket", "headers": []}
    await WebSocketConnection(context, held, SHARE, Caller(), scope, receive, send).run()  # type: ignore[arg-type]
    assert '"status":429' in sent[0]
    assert '"retry-after":"3"' in sent[0]
    assert '"status":500' in sent[1]
    assert len(runner.asked) == 1
    assert held.evicted == ["resp_1"]  # by the response that failed, not by the refused one


async def test_a_frame_that_arrives_as_the_connection_is_closed_gets_no_reply() -> None:
    runner, closed, sent = Failing(), anyio.Event(), list[str]()

    async def receive() -> Message:
        await closed.wait()  # the frame has arrived before the connection is cancelled
        return {"type": "websocket.receive", "text": '{"type": "response.create", "input": "Hi"}'}

    async def send(message: Message) -> None:
        assert "websocket.close" not in sent, "as uvicorn requires"
        sent.append(message["type"])
        if sent[-1] == "websocket.close":
            closed.set()

    context, scope = SimpleNamespace(runner=runner, settings=make_settings()), {"type": "websocket", "headers": []}
    runner.drain.begun.set()
    await WebSocketConnection(context, Watched(), SHARE, Caller(), scope, receive, send).run()  # type: ignore[arg-type]
    assert sent == ["websocket.send", "websocket.close"]
