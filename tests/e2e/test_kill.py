"""Workers of background responses are killed with signal 9. Their responses are resumed, cancelled and deleted on another replica.

Real processes: a Valkey, replica A, which runs the jobs, and replica B, which is asked for all else and runs none. The upstream
is the benchmarks' scripted one, or the one of `--upstream URL`; a vLLM's gauges tell when it is free again.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import orjson
import pytest

from benchmarks.background import replica_flags, valkey
from benchmarks.processes import running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GAUGES = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
LEASE = 3
LONGEST = 60.0
CANCELS = 10
TOKENS = 1900
PACE = 200
SLOW_TO_BEGIN = 5


class Follower:
    """Reads a response's stream to its end, from the event after that number on."""

    def __init__(self, http: httpx.AsyncClient, path: str, after: int = -1) -> None:
        self.events: list[dict[str, Any]] = []
        self._begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(http, path, after))

    async def _read(self, http: httpx.AsyncClient, path: str, after: int) -> float:
        params = {"stream": "true"} | ({"starting_after": str(after)} if after >= 0 else {})
        async with http.stream("GET", path, params=params) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self.events.append(orjson.loads(line[6:]))
                    if ".delta" in self.events[-1]["type"]:
                        self._begun.set()
        return time.monotonic()

    async def output(self) -> None:
        await asyncio.wait_for(self._begun.wait(), LONGEST)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def end(self) -> tuple[float, dict[str, Any]]:
        """When the stream ended, and its last event. The events must have no gap."""
        ended = await asyncio.wait_for(self.task, LONGEST)
        first = self.events[0]["sequence_number"]
        assert [event["sequence_number"] for event in self.events] == list(range(first, first + len(self.events)))
        return ended, self.events[-1]


class Deployment:
    """Replicas in front of an upstream, and a client of replica B."""

    def __init__(self, stack: ExitStack, upstream: str, model: str | None) -> None:
        _, redis = stack.enter_context(valkey())
        self.upstream, self._stack = upstream, stack
        self._flags = (*replica_flags(upstream, redis), f"--jobs.lease={LEASE}")
        self.b = stack.enter_context(running("responses_mw", "serve", *self._flags, "--jobs.concurrency=0"))
        self.model = model or httpx.get(f"{self.b.url}/v1/models", trust_env=False).json()["data"][0]["id"]

    def start_a(self) -> int:
        self.a = self._stack.enter_context(running("responses_mw", "serve", *self._flags, "--jobs.concurrency=4"))
        return self.a.pid

    async def create(self, http: httpx.AsyncClient) -> str:
        """The path of a response that takes long."""
        body = {"model": self.model, "input": "count", "max_output_tokens": TOKENS, "ignore_eos": True, "background": True}
        answer = await http.post("/v1/responses", json=body)
        answer.raise_for_status()
        return f"/v1/responses/{answer.json()['id']}"

    async def until_idle(self, http: httpx.AsyncClient, *, idle: bool = True) -> None:
        """Wait until nothing runs or waits in the upstream (not `idle`: until something does), if it has gauges."""
        async with asyncio.timeout(LONGEST):
            while values := GAUGES.findall((await http.get(f"{self.upstream}/metrics")).text):
                if idle != any(map(float, values)):
                    return
                await asyncio.sleep(0.02)

    async def running_job(self, http: httpx.AsyncClient) -> tuple[str, Follower]:
        """A response that has output, and its follower."""
        path = await self.create(http)
        follower = Follower(http, path)
        await follower.output()
        await self.until_idle(http, idle=False)
        return path, follower


@pytest.fixture(scope="module")
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    with ExitStack() as stack:
        upstream = request.config.getoption("--upstream")
        if upstream is None:
            upstream = stack.enter_context(running("benchmarks.upstream", f"--tokens-per-second={PACE}")).url
        yield Deployment(stack, upstream, request.config.getoption("--model"))


@pytest.fixture
async def http(deployment: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=deployment.b.url, timeout=LONGEST, trust_env=False) as http:
        yield http


async def test_the_response_of_a_killed_worker_is_continued_if_the_server_can_continue_answers(
    request: pytest.FixtureRequest, deployment: Deployment, http: httpx.AsyncClient
) -> None:
    worker = deployment.start_a()
    path, follower = await deployment.running_job(http)
    os.kill(worker, signal.SIGKILL)
    await deployment.until_idle(http)
    deployment.start_a()
    _, last = await follower.end()
    document = (await http.get(path)).json()
    assert document == last["response"]
    if request.config.getoption("--upstream"):
        assert last["type"] in ("response.completed", "response.incomplete")
    else:
        assert last["type"] == "response.failed"
        assert document["error"]["code"] == "server_error"


async def test_a_response_without_output_of_a_killed_worker_is_run_again(
    request: pytest.FixtureRequest, deployment: Deployment, http: httpx.AsyncClient
) -> None:
    if request.config.getoption("--upstream"):
        await killed_before_output(deployment, http, occupied=True)
        return
    with ExitStack() as stack:
        slow = running("benchmarks.upstream", f"--tokens-per-second={10 * PACE}", f"--first-byte-delay={SLOW_TO_BEGIN}")
        own = Deployment(stack, stack.enter_context(slow).url, None)
        async with httpx.AsyncClient(base_url=own.b.url, timeout=LONGEST, trust_env=False) as own_http:
            await killed_before_output(own, own_http, occupied=False)


async def killed_before_output(deployment: Deployment, http: httpx.AsyncClient, *, occupied: bool) -> None:
    worker = deployment.start_a()
    busy = [asyncio.create_task(occupy(deployment, http)) for _ in range(8 if occupied else 0)]
    await asyncio.sleep(0.3)  # the upstream has no room for the request now
    path = await deployment.create(http)
    follower = Follower(http, path)
    async with asyncio.timeout(LONGEST):
        while not any(event["type"] == "response.in_progress" for event in follower.events):
            await asyncio.sleep(0.01)
    os.kill(worker, signal.SIGKILL)
    assert [event["type"] for event in follower.events] == ["response.created", "response.queued", "response.in_progress"]
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    deployment.start_a()
    _, last = await follower.end()
    assert last["type"] in ("response.completed", "response.incomplete")
    assert last["response"]["error"] is None


async def occupy(deployment: Deployment, http: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "count"}]
    body = {"model": deployment.model, "messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    async with http.stream("POST", f"{deployment.upstream}/v1/chat/completions", json=body) as answer:
        async for _ in answer.aiter_raw():
            pass


@pytest.fixture
def with_worker(deployment: Deployment) -> None:
    """Replica A runs."""
    deployment.start_a()


@pytest.mark.usefixtures("with_worker")
async def test_a_response_can_be_cancelled_on_another_replica(deployment: Deployment, http: httpx.AsyncClient) -> None:
    for _ in range(CANCELS):
        path, follower = await deployment.running_job(http)
        document = (await http.post(f"{path}/cancel")).json()
        await deployment.until_idle(http)
        _, last = await follower.end()
        assert document["status"] == "cancelled"
        assert last["response"] == document


@pytest.mark.usefixtures("with_worker")
async def test_an_interrupted_stream_can_be_resumed_on_another_replica(deployment: Deployment, http: httpx.AsyncClient) -> None:
    path = await deployment.create(http)
    first = Follower(http, f"{deployment.a.url}{path}")
    await first.output()
    await first.leave()
    rest = Follower(http, path, first.events[-1]["sequence_number"])
    _, last = await rest.end()
    whole = Follower(http, f"{deployment.a.url}{path}")
    await whole.end()
    assert first.events
    assert first.events + rest.events == whole.events
    assert last["response"] == (await http.get(path)).json()


@pytest.mark.usefixtures("with_worker")
async def test_a_running_response_can_be_deleted_on_another_replica(deployment: Deployment, http: httpx.AsyncClient) -> None:
    path, follower = await deployment.running_job(http)
    answer = (await http.delete(path)).json()
    await deployment.until_idle(http)
    _, last = await follower.end()
    assert answer["deleted"]
    assert last["response"]["status"] == "cancelled"
    assert (await http.get(path)).status_code == 404
