"""Takeover of a background response by another worker, which continues it from the next event."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from mcp.server.mcpserver import MCPServer

from responses_mw.jobs import job_runner, queue_worker, retry
from responses_mw.state import Batch, Jobs
from tests.jobs.conftest import LEASE
from tests.jobs.test_background import create, create_streamed, ended, follow, get, streamed
from tests.support import oracle
from tests.support.continuing import PIECE, Continuing
from tests.support.mcp_servers import weather
from tests.support.replay import Replay
from tests.support.scripted import Answer, Asked, Signal, error, json_answer

if TYPE_CHECKING:
    from tests.jobs.conftest import Replica, Run, Server
    from tests.support.servers import Serve

SAID = "The answer is a longer text, with white space at the seam and ünïcode."
THOUGHT = "Let me think about it."


@pytest.fixture
def upstream() -> Continuing:
    return Continuing(SAID)


@pytest.fixture
def long_queue_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs wait in the queue for minutes, although running responses do not wait that long."""
    monkeypatch.setattr(job_runner, "TIMEOUT_FACTOR", 3000)


@pytest.fixture
def mount() -> str:
    return "proxy"


@pytest.fixture
def other(replica: Replica, upstream_url: str) -> Any:
    """Start a replica in front of the same upstream."""
    return lambda **settings: replica(upstream=upstream_url, jobs__lease=LEASE, **settings)


@pytest.fixture
def upstream_url(serve: Serve, upstream: Continuing) -> str:
    return serve(upstream)


async def begun(server: Server, upstream: Continuing, deltas: int, **body: Any) -> str:
    """Create a response whose answer stalls after `deltas` deltas, and wait until all of them are in the log."""
    upstream.cuts, upstream.broken = deque([deltas + len(upstream.calls)]), Signal()
    ours = await server.ours()
    follower = create_streamed(ours, **body)
    async with asyncio.timeout(60):
        while sum(event["type"].endswith(".delta") for event in follower.events) < deltas:
            assert not follower.task.done(), follower.raw
            await asyncio.sleep(0.02)
    await follower.leave()
    await ours.aclose()
    return str(follower.events[0]["response"]["id"])


def laws(events: list[dict[str, Any]], document: dict[str, Any]) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    replay = Replay()
    for number, event in enumerate(event for event in events if event["type"] != "response.queued"):
        replay.play({**event, "sequence_number": number})
    assert replay.document()["output"] == document["output"]
    ids = [item["id"] for item in document["output"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("deltas", [1, 7, -(-len(SAID) // PIECE)])
async def test_another_worker_continues_the_text_of_a_killed_worker(
    run: Run, other: Any, upstream: Continuing, deltas: int
) -> None:
    doomed = run()
    response_id = await begun(doomed, upstream, deltas)
    ours = other()
    follower = follow(ours, response_id)
    doomed.signal(signal.SIGKILL)
    document = await ended(ours, response_id)
    assert (document["status"], document["output_text"]) == ("completed", SAID)
    assert document["usage"]["output_tokens"] == len(SAID)
    await asyncio.wait_for(follower.task, 60)
    events = await streamed(ours, response_id)
    assert follower.events == events
    laws(events, document)
    assert [event["type"] for event in events].count("response.in_progress") == 1


async def test_a_text_of_a_killed_worker_that_has_the_maximum_length_is_not_continued(
    run: Run, other: Any, upstream: Continuing
) -> None:
    doomed = run()
    response_id = await begun(doomed, upstream, 10, max_output_tokens=10 * PIECE)
    ours = other()
    doomed.signal(signal.SIGKILL)
    document = await ended(ours, response_id)
    assert (document["status"], document["output_text"]) == ("incomplete", SAID[: 10 * PIECE])
    assert document["usage"]["output_tokens"] == 10 * PIECE
    assert len([asked for asked in upstream.requests if asked.json.get("stream")]) == 1
    laws(await streamed(ours, response_id), document)


async def test_the_log_of_a_response_that_no_worker_continues_is_read_once(
    run: Run, other: Any, upstream: Continuing, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, log = list[str](), Jobs.log

    async def counted(jobs: Jobs, response_id: str, number: int) -> list[Batch]:
        reads.append(response_id)
        return await log(jobs, response_id, number)

    monkeypatch.setattr(Jobs, "log", counted)
    doomed = run()
    response_id = await begun(doomed, upstream, 3)
    ours = other(upstream__overload_timeout=0)
    doomed.signal(signal.SIGKILL)
    document = await ended(ours, response_id)
    assert (document["status"], document["output_text"]) == ("failed", SAID[: 3 * PIECE])
    assert reads == [response_id]


async def test_reasoning_of_a_killed_worker_is_closed_as_incomplete_and_started_again(
    run: Run, other: Any, upstream: Continuing
) -> None:
    upstream.thought = THOUGHT
    doomed = run()
    response_id = await begun(doomed, upstream, 3)
    ours = other()
    doomed.signal(signal.SIGKILL)
    document = await ended(ours, response_id)
    assert [(item["type"], item["status"]) for item in document["output"]] == [
        ("reasoning", "incomplete"),
        ("reasoning", "completed"),
        ("message", "completed"),
    ]
    laws(await streamed(ours, response_id), document)


async def test_another_worker_keeps_tool_results_and_repeats_no_tool_call(
    run: Run, other: Any, upstream: Continuing, serve: Serve
) -> None:
    upstream.calls, upstream.said = (("get_weather", '{"city": "Paris"}'),), ""
    url = serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"
    servers = {"w": {"url": url}}
    doomed = run(tools__mcp_servers=orjson.dumps(servers).decode())
    tools = [{"type": "mcp", "server_label": "w", "require_approval": "never"}]
    upstream.cuts, upstream.broken = deque([-1, 0]), Signal()
    client = await doomed.ours()
    follower = create_streamed(client, tools=tools, max_tool_calls=1)
    await follower.until(b"Sunny in Paris")
    await follower.leave()
    await client.aclose()
    response_id = str(follower.events[0]["response"]["id"])
    upstream.said = "It is sunny."
    ours = other(tools__mcp_servers=servers)
    doomed.signal(signal.SIGKILL)
    document = await ended(ours, response_id)
    assert (document["status"], document["output_text"]) == ("completed", "It is sunny.")
    assert [item["type"] for item in document["output"]].count("mcp_call") == 1
    laws(await streamed(ours, response_id), document)


@pytest.mark.parametrize("needs_approval", [True, False])
async def test_a_tool_call_during_which_a_worker_is_killed_is_not_repeated_and_says_so(
    run: Run, other: Any, upstream: Continuing, serve: Serve, *, needs_approval: bool
) -> None:
    payments: list[int] = []
    bank: MCPServer[None] = MCPServer("bank", log_level="CRITICAL")

    @bank.tool()
    async def pay(amount: int) -> str:
        payments.append(amount)
        await asyncio.Event().wait()
        return "paid"

    servers = {"bank": {"url": serve(bank.streamable_http_app(stateless_http=True)) + "/mcp"}}
    doomed = run(tools__mcp_servers=orjson.dumps(servers).decode())
    approval = "always" if needs_approval else "never"
    tools = [{"type": "mcp", "server_label": "bank", "require_approval": approval}]
    upstream.calls, upstream.said = (("pay", '{"amount": 7}'),), ""
    client = await doomed.ours()
    body: dict[str, Any] = {"tools": tools}
    if needs_approval:
        asked = (await oracle.stream(client, tools=tools)).response
        request = next(item for item in asked["output"] if item["type"] == "mcp_approval_request")
        granted = {"approval_request_id": request["id"], "approve": True}
        body |= {"previous_response_id": asked["id"], "input": [{"type": "mcp_approval_response", **granted}]}
    response_id = (await create(client, **body))["id"]
    async with asyncio.timeout(60):
        while not payments:
            await asyncio.sleep(0.02)
    await client.aclose()
    ours = other(tools__mcp_servers=servers)
    doomed.signal(signal.SIGKILL)
    document = await ended(ours, response_id)
    made = next(item for item in document["output"] if item["type"] == "mcp_call")
    assert (document["status"], made["status"], payments) == ("failed", "failed", [7])
    assert made["error"]["content"][0]["text"].startswith("It is not known whether the call was made")
    laws(await streamed(ours, response_id), document)


async def test_a_response_whose_worker_is_killed_in_a_function_call_for_the_client_fails(
    run: Run, other: Any, upstream: Continuing
) -> None:
    upstream.calls, upstream.said = (("weather", '{"city": "Paris"}'),), ""
    doomed = run()
    function = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    response_id = await begun(doomed, upstream, 2, tools=[function])
    ours = other()
    doomed.signal(signal.SIGKILL)
    document = await ended(ours, response_id)
    assert document["status"] == "failed"
    assert "lost" in document["error"]["message"]


async def test_a_stopping_worker_hands_its_running_jobs_to_another(run: Run, other: Any, upstream: Continuing) -> None:
    leaving = run(server__drain_timeout=0.5, jobs__lease=60)
    response_id = await begun(leaving, upstream, 6)
    ours = other()
    leaving.signal(signal.SIGTERM)
    document = await ended(ours, response_id)  # long before the lease is over
    assert (document["status"], document["output_text"]) == ("completed", SAID)
    laws(await streamed(ours, response_id), document)
    assert leaving.wait() == 0


@pytest.mark.usefixtures("long_queue_timeout")
async def test_a_job_with_output_waits_in_the_queue_while_the_upstream_is_unavailable(
    run: Run, other: Any, upstream: Continuing
) -> None:
    upstream.cuts = deque([6])
    ours = other(upstream__overload_timeout=0.2)
    upstream.refusals = [error("starting", 503)] * 4
    follower = create_streamed(ours)
    await asyncio.wait_for(follower.task, 60)
    response_id = str(follower.events[0]["response"]["id"])
    document = await get(ours, response_id)
    assert (document["status"], document["output_text"]) == ("completed", SAID)
    laws(follower.events, document)


class Crashing(Continuing):
    """Crashes within each answer, and restarts slowly: it refuses chat requests until its models are listed."""

    is_down = False

    def page(self, asked: Asked) -> Answer:
        self.is_down = self.is_down and asked.path != "/v1/models"
        return super().page(asked)

    def unscripted(self, asked: Asked) -> Answer:
        if self.is_down:
            return json_answer(error("starting", 503), 503)
        self.is_down = asked.json.get("stream", False)
        return super().unscripted(asked)


@pytest.mark.usefixtures("long_queue_timeout")
@pytest.mark.parametrize("upstream", [Crashing(SAID), Crashing(SAID, THOUGHT)], ids=["text", "reasoning"])
async def test_a_response_that_crashes_the_upstream_each_time_fails(
    other: Any, upstream: Crashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(queue_worker, "POLL", 0.05)
    upstream.cuts = deque([1] * 20)
    ours = other(upstream__overload_timeout=0.1)
    follower = create_streamed(ours)
    await asyncio.wait_for(follower.task, 60)
    document = await get(ours, str(follower.events[0]["response"]["id"]))
    assert document["status"] == "failed"
    assert len(upstream.cuts) == 16
    laws(follower.events, document)


async def test_a_response_is_continued_at_most_three_times_by_all_workers_together(
    other: Any, upstream: Continuing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(queue_worker, "POLL", 0.05)
    upstream.thought, upstream.cuts = THOUGHT, deque([1] * 20)
    ours = other()
    follower = create_streamed(ours)
    await asyncio.wait_for(follower.task, 60)
    document = await get(ours, str(follower.events[0]["response"]["id"]))
    assert document["status"] == "failed"
    assert "closed the connection" in document["error"]["message"]
    assert len(upstream.requests) == 4
    laws(follower.events, document)


@pytest.mark.usefixtures("long_queue_timeout")
async def test_events_written_by_other_workers_count_toward_the_maximum_size_of_a_log(other: Any, upstream: Continuing) -> None:
    upstream.said = "".join(f"{number} " for number in range(320))
    upstream.cuts = deque([200])
    ours = other(
        upstream__overload_timeout=0.2, limits__max_request_bytes=10_000
    )  # the log of each half has about 54,000 bytes
    upstream.refusals = [error("starting", 503)] * 4
    follower = create_streamed(ours)
    await asyncio.wait_for(follower.task, 60)
    document = await get(ours, str(follower.events[0]["response"]["id"]))
    assert (document["status"], document["error"]["message"]) == ("failed", "The answer is too long to be stored.")
