"""An overloaded or restarting upstream: an error status before the stream starts, a wait within it afterwards."""

from __future__ import annotations

import asyncio
import json
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.processes import free_port
from responses_mw.engine import turns
from responses_mw.telemetry.instruments import exposition
from responses_mw.upstream import errors, sending
from tests.support.mcp_servers import weather
from tests.support.oracle import KEEP_ALIVE, check, stream, whole
from tests.support.scripted import HELLO, BrokenOff, Signal, call, completion, delta, error, finish, text, usage

if TYPE_CHECKING:
    from tests.support.scripted import Chunk, ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

BODY = {"input": "Hi", "model": "tiny"}
STREAM = {**BODY, "stream": True}
OVERLOADED = pytest.mark.parametrize("status", [429, 502, 503])


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "FIRST_PAUSE", 0.01)


@pytest.fixture
def late(start: Start) -> Ours:
    """A server that sends the status of a stream before the upstream has answered."""
    return start(upstream__status_grace=0, tools__allow_private_urls=True)


@OVERLOADED
@pytest.mark.both_mounts
async def test_a_stream_waits_for_an_overloaded_upstream(late: Ours, upstream: ScriptedUpstream, status: int) -> None:
    for _ in range(3):
        upstream.whole(error("busy", status), status)
    upstream.stream(*HELLO)
    streamed = await stream(late)
    assert (streamed.terminal, streamed.deltas) == ("response.completed", ["Hel", "lo"])
    assert len(upstream.requests) == 4


async def test_waits_for_an_overloaded_upstream_are_counted(late: Ours, upstream: ScriptedUpstream) -> None:
    before = waits()
    upstream.whole(error("busy", 429), 429)
    upstream.whole(error("busy", 503), 503)
    upstream.stream(*HELLO)
    assert (await stream(late)).terminal == "response.completed"
    assert [after - earlier for after, earlier in zip(waits(), before, strict=True)] == [1, 1, 0]


def waits() -> list[float]:
    """Return the number of waits that this process has counted for statuses 429, 503 and 502."""
    text = exposition("")[0].decode()
    found = {
        match[1]: float(match[2]) for match in re.finditer(r'responses_mw_upstream_waits_total{status="(\d+)"} (.+)', text)
    }
    return [found.get(status, 0.0) for status in ("429", "503", "502")]


async def test_an_overload_after_the_status_grace_is_invisible_to_the_official_client(
    ours: Ours, upstream: ScriptedUpstream
) -> None:
    late = Signal()
    upstream.whole(error("busy", 429), 429, before=late)
    upstream.stream(*HELLO)
    async with ours.client.responses.stream(model="tiny", input="Hi") as events:
        async for event in events:
            if event.type == "response.created":
                late.set()
        assert (await events.get_final_response()).output_text == "Hello"
    assert len(upstream.requests) == 2


@pytest.mark.usefixtures("impatient")
async def test_a_stream_waits_for_the_retry_after_time_and_sends_keep_alives(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__status_grace=0)
    upstream.whole(error("busy", 429), 429, headers={"retry-after": "1"})
    upstream.stream(*HELLO)
    began = time.monotonic()
    streamed = await stream(ours)
    assert streamed.terminal == "response.completed"
    assert time.monotonic() - began >= 1
    assert KEEP_ALIVE.encode() in streamed.raw


async def test_a_stream_waits_for_an_upstream_that_is_down(start_at: Start, serve: Serve, upstream: ScriptedUpstream) -> None:
    port = free_port()
    ours = start_at("proxy", upstream=f"http://127.0.0.1:{port}", upstream__dialect="vllm", upstream__status_grace=0)
    request = asyncio.create_task(stream(ours))
    await asyncio.sleep(0.2)
    upstream.stream(*HELLO)
    serve(upstream, port=port)
    assert (await request).terminal == "response.completed"


@pytest.mark.parametrize(
    ("settings", "headers"),
    [({"upstream__overload_timeout": 0}, {}), ({}, {"retry-after": "31"}), ({"upstream__overload_timeout": 0.2}, {})],
    ids=["no timeout", "retry-after too long", "timeout over"],
)
async def test_a_stream_fails_if_it_would_have_to_wait_longer_than_the_overload_timeout(
    start: Start, upstream: ScriptedUpstream, settings: dict[str, Any], headers: dict[str, str]
) -> None:
    ours = start(upstream__status_grace=0, **settings)
    for _ in range(50):
        upstream.whole(error("slow down", 429), 429, headers=headers)
    streamed = await stream(ours)
    assert streamed.terminal == "response.failed"
    assert streamed.response["error"] == {"code": "rate_limit_exceeded", "message": "slow down"}
    assert (len(upstream.requests) == 1) == (settings.get("upstream__overload_timeout") != 0.2)


@pytest.mark.parametrize("losses", [1, 2])
async def test_a_stream_is_retried_once_if_a_gateway_loses_its_server(
    late: Ours, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    for module in (errors, sending):
        monkeypatch.setattr(module, "CRASH_AFTER", 0.1)
    held = [Signal() for _ in range(losses)]
    answers = [upstream.whole(b"<html>502 Bad Gateway</html>", 502, before=signal) for signal in held]
    upstream.stream(*HELLO)
    request = asyncio.create_task(stream(late))
    for answer, signal in zip(answers, held, strict=True):
        await answer.asked.wait()
        await asyncio.sleep(0.2)
        signal.set()
    assert (await request).terminal == ("response.completed" if losses == 1 else "response.failed")
    assert len(upstream.requests) == 2


@pytest.mark.parametrize("crashes", [1, 2])
async def test_a_stream_without_output_survives_one_server_that_dies(
    start_at: Start, serve: Serve, upstream: ScriptedUpstream, crashes: int
) -> None:
    asked = 0

    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n")
        asked += 1
        await asyncio.sleep(0.1)
        if asked == crashes:
            server.close()
        writer.close()

    port = free_port()
    server = await asyncio.start_server(dying, "127.0.0.1", port)
    ours = start_at("proxy", upstream=f"http://127.0.0.1:{port}", upstream__dialect="vllm", upstream__status_grace=0)
    request = asyncio.create_task(stream(ours))
    await server.wait_closed()
    upstream.stream(*HELLO)
    serve(upstream, port=port)
    assert (await request).terminal == ("response.completed" if crashes == 1 else "response.failed")
    assert asked == crashes


@pytest.mark.parametrize("head", [(), (delta(role="assistant", content=""),)], ids=["after the headers", "after a chunk"])
@pytest.mark.parametrize("breaks", [1, 2])
async def test_a_stream_that_breaks_off_within_the_status_grace_is_requested_once_more(
    start: Start, upstream: ScriptedUpstream, head: tuple[Chunk, ...], breaks: int
) -> None:
    ours = start(upstream__status_grace=30)
    for _ in range(breaks):
        upstream.stream(*head, BrokenOff(), done=False)
    upstream.stream(*HELLO)
    response = await ours.http.post("/v1/responses", json=STREAM)
    if breaks == 2 and not head:
        assert response.status_code == 502
    else:
        assert check(response.content).terminal == ("response.completed" if breaks == 1 else "response.failed")
    assert len(upstream.requests) == 2


async def test_a_request_without_stream_that_breaks_off_gets_a_502(late: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(BrokenOff(), done=False)
    assert (await late.http.post("/v1/responses", json=BODY)).status_code == 502
    assert len(upstream.requests) == 1


async def test_a_stream_does_not_wait_for_an_exhausted_quota(late: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(error("no money", 429, code="insufficient_quota"), 429)
    assert (await stream(late)).terminal == "response.failed"
    assert len(upstream.requests) == 1


async def test_the_upstream_is_not_asked_again_after_the_client_leaves(late: Ours, upstream: ScriptedUpstream) -> None:
    answer = upstream.whole(error("busy", 503), 503, headers={"retry-after": "1"})

    async def read() -> None:
        async with late.http.stream("POST", "/v1/responses", json=STREAM) as response:
            async for _ in response.aiter_raw():
                pass

    request = asyncio.create_task(read())
    await answer.played.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await asyncio.sleep(1.5)
    assert len(upstream.requests) == 1


# -- the status of an overload -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
async def test_an_overload_late_in_the_status_grace_is_returned_as_the_status(
    start: Start, upstream: ScriptedUpstream, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0
    monkeypatch.setattr(sending, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed))
    ours, held = start(upstream__status_grace=120), Signal()
    busy = upstream.whole(error("busy", status), status, before=held, headers={"retry-after": "7"})
    upstream.whole(error("busy", status), status, before=Signal())
    request = asyncio.create_task(ours.http.post("/v1/responses", json=STREAM))
    await busy.asked.wait()
    passed = 61.0  # more than half of the status grace, after which no attempt begins
    held.set()
    response = await request
    assert (response.status_code, response.headers["retry-after"]) == (status, "7")
    assert len(upstream.requests) == 1


@OVERLOADED
async def test_a_request_without_stream_always_gets_the_status_of_an_overload(
    late: Ours, upstream: ScriptedUpstream, status: int
) -> None:
    upstream.whole(error("busy", status), status, headers={"retry-after": "7"})
    response = await late.http.post("/v1/responses", json=BODY)
    assert (response.status_code, response.headers["retry-after"]) == (status, "7")
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("kind", ["reasoning", "compaction"])
async def test_an_item_that_cannot_be_decrypted_is_a_400_even_if_the_upstream_is_down(start: Start, kind: str) -> None:
    ours = start(upstream=f"http://127.0.0.1:{free_port()}")
    body = {**BODY, "input": [{"type": kind, "encrypted_content": "made elsewhere"}]}
    answered = await ours.http.post("/v1/responses", json=body)
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, "input[0].encrypted_content")


# -- later turns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True], ids=["json", "stream"])
async def test_an_overload_after_a_tool_call_is_waited_out(
    late: Ours, upstream: ScriptedUpstream, serve: Serve, streamed: bool
) -> None:
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    tools = [{"type": "mcp", "server_label": "w", "server_url": url, "require_approval": "never"}]
    arguments = json.dumps({"city": "Paris"})
    if streamed:
        upstream.stream(call(arguments, name="get_weather", call_id="c"), finish("tool_calls"))
    else:
        function = {"name": "get_weather", "arguments": arguments}
        upstream.whole(completion({"tool_calls": [{"id": "c", "type": "function", "function": function}]}, "tool_calls"))
    upstream.whole(error("busy", 503), 503)
    upstream.stream(*HELLO) if streamed else upstream.whole(completion({"content": "Hello"}))
    response = (await stream(late, tools=tools)).response if streamed else await whole(late, tools=tools)
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == ["mcp_list_tools", "mcp_call", "message"]
    assert len(upstream.requests) == 3


async def test_an_overload_during_a_compaction_is_waited_out(late: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(text("x"), finish(), usage(prompt=2000))  # counts the tokens
    upstream.whole(error("busy", 503), 503)
    upstream.stream(text("x"), finish(), usage(prompt=2000))
    upstream.stream(text("They spoke of ducks."), finish(), usage())
    upstream.stream(*HELLO)
    talk = [{"role": role, "content": "Tell me of ducks."} for role in ("user", "assistant", "user")]
    management = [{"type": "compaction", "compact_threshold": 10}]
    streamed = await stream(late, input=talk, context_management=management, store=False)
    assert [item["type"] for item in streamed.response["output"]] == ["compaction", "message"]
    assert len(upstream.requests) == 5
