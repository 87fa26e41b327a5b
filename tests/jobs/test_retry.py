"""Background responses whose upstream is unavailable, briefly or for longer."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import redis
from starlette.responses import Response

from benchmarks.processes import free_port
from responses_mw.errors import UpstreamBrokeOff, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from responses_mw.jobs import job_runner, queue_worker, retry, worker
from responses_mw.jobs.event_log import ClaimedJob
from responses_mw.jobs.queue_worker import StopReason
from responses_mw.upstream import endpoint
from tests.jobs.test_background import create, ended, get, streamed
from tests.jobs.test_replicas import record
from tests.support.scripted import HELLO, BrokenOff, Signal, call, error, finish, frame, text
from tests.support.search_servers import SEARXNG, SearchServer
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests.jobs.conftest import Replica
    from tests.support.scripted import Answer, Asked, ScriptedUpstream
    from tests.support.servers import Ours, Serve

FAST = 0.05
KEY = "a-key-of-32-characters-and-more."


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry almost at once, and send probes to an unavailable upstream at short intervals."""
    monkeypatch.setattr(retry, "FIRST_DELAY", FAST)
    for module in (worker, queue_worker):
        monkeypatch.setattr(module, "POLL", FAST)
    monkeypatch.setattr(endpoint, "FIRST_EJECTION", FAST)
    monkeypatch.setattr(endpoint, "MAX_EJECTION", FAST)


@pytest.fixture
def away(replica: Replica) -> tuple[Ours, str]:
    """A replica that accepts jobs, and the URL of an upstream that refuses connections. Only other replicas run jobs."""
    return replica(jobs__concurrency=0), f"http://127.0.0.1:{free_port()}"


class UnavailableUpstream:
    """An upstream whose every response has status 503. The first one is sent when `together` requests have arrived."""

    def __init__(self, lifespan: ASGIApp, headers: dict[str, str] | None = None, *, together: int = 1) -> None:
        self.asked = 0  # requests for chat completions
        self.probes = 0  # requests for the list of models
        self.go = Signal()
        self._lifespan, self._headers, self._together = lifespan, headers, together

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        self.asked += scope["path"] == "/v1/chat/completions"
        self.probes += scope["path"] == "/v1/models"
        if self.asked == self._together:
            self.go.set()
        await self.go.wait()
        await Response(status_code=503, headers=self._headers)(scope, receive, send)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry only after the end of the test."""
    monkeypatch.setattr(retry, "FIRST_DELAY", 1000.0)
    monkeypatch.setattr(retry, "MAX_DELAY", 1000.0)


async def retried(redis_url: str, response_id: str) -> None:
    """Wait until the job has been returned to the queue after an error. Its record counts this until it makes progress."""
    with redis.Redis.from_url(redis_url) as client:  # a GET may end the job that it reads
        async with asyncio.timeout(PATIENCE):
            while not client.hexists(record(response_id), "retries"):
                await asyncio.sleep(0.02)


# -- errors that are retried -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_job_is_retried_until_the_upstream_is_available_again(
    fast: None, replica: Replica, upstream: ScriptedUpstream, status: int
) -> None:
    ours = replica(upstream__status_grace=0)
    for _ in range(4):  # more often than a job may lose its worker
        upstream.whole(error("busy"), status)
    upstream.stream(*HELLO)
    document = await create(ours)
    done = await ended(ours, document["id"])
    assert (done["status"], done["output_text"], len(upstream.requests)) == ("completed", "Hello", 5)
    events = await streamed(ours, document["id"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events].count("response.in_progress") == 1


async def test_a_job_is_retried_if_its_connection_breaks_before_the_first_output(
    fast: None, replica: Replica, upstream: ScriptedUpstream
) -> None:
    ours = replica()
    upstream.stream(BrokenOff())
    upstream.stream(*HELLO)
    assert (await ended(ours, (await create(ours))["id"]))["status"] == "completed"


async def test_a_job_whose_connection_breaks_each_time_fails_after_three_attempts(
    fast: None, replica: Replica, upstream: ScriptedUpstream
) -> None:
    ours = replica()
    for _ in range(10):
        upstream.stream(BrokenOff())
    done = await ended(ours, (await create(ours))["id"])
    assert done["status"] == "failed"
    assert "closed the connection" in done["error"]["message"]
    assert len(upstream.requests) == 3


async def test_a_response_that_is_cancelled_before_its_retry_is_not_sent_again(
    fast: None, replica: Replica, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = replica(jobs__concurrency=1)
    probed, stopped, go = Signal(), Signal(), Signal()
    page, stop = upstream.page, ClaimedJob.stop

    def answers_late(asked: Asked) -> Answer:
        is_probe = bool(upstream.requests) and not probed.is_set()
        if is_probe:
            probed.set()
        return replace(page(asked), before=go if is_probe else None)

    def stop_and_tell(claimed: ClaimedJob, why: StopReason) -> None:
        stop(claimed, why)
        stopped.set()

    monkeypatch.setattr(upstream, "page", answers_late)
    monkeypatch.setattr(ClaimedJob, "stop", stop_and_tell)
    upstream.whole(error("busy"), 429)
    document = await create(ours)
    async with asyncio.timeout(60):
        await probed.wait()
        cancelled = await ours.http.post(f"/v1/responses/{document['id']}/cancel")
        await stopped.wait()
    go.set()
    assert cancelled.json()["status"] == "cancelled"
    upstream.stream(*HELLO)
    after = await ended(ours, (await create(ours))["id"])
    assert (after["output_text"], len(upstream.requests)) == ("Hello", 2)


async def test_a_connection_that_breaks_after_the_first_output_fails_the_response(
    replica: Replica, upstream: ScriptedUpstream
) -> None:
    ours = replica()
    upstream.stream(text("Hel"), BrokenOff())
    done = await ended(ours, (await create(ours))["id"])
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("failed", "Hel")
    assert len(upstream.requests) == 1


async def test_jobs_wait_for_an_upstream_that_refuses_connections(
    fast: None, away: tuple[Ours, str], replica: Replica, upstream: ScriptedUpstream, serve: Serve
) -> None:
    front, url = away
    jobs = [(await create(front))["id"] for _ in range(8)]
    replica(upstream=url, upstream__status_grace=0)
    await asyncio.sleep(0.5)
    assert {(await get(front, job))["status"] for job in jobs} <= {"queued", "in_progress"}
    for _ in jobs:
        upstream.stream(*HELLO)
    serve(upstream, port=int(url.rpartition(":")[2]))
    assert {(await ended(front, job))["status"] for job in jobs} == {"completed"}


async def test_jobs_wait_for_an_upstream_whose_proxy_accepts_and_then_resets_connections(
    fast: None, away: tuple[Ours, str], replica: Replica, upstream: ScriptedUpstream, serve: Serve
) -> None:
    front, url = away
    resets = 0

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal resets
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
        resets += 1

    port = int(url.rpartition(":")[2])
    job = (await create(front))["id"]
    async with await asyncio.start_server(reset, "127.0.0.1", port):
        replica(upstream=url, upstream__status_grace=0, upstream__dialect="vllm")
        async with asyncio.timeout(60):
            while resets < 8 and (await get(front, job))["status"] != "failed":
                await asyncio.sleep(0.02)
    assert (await get(front, job))["status"] in ("queued", "in_progress")
    upstream.stream(*HELLO)
    serve(upstream, port=port)
    assert (await ended(front, job))["status"] == "completed"


async def test_a_job_fails_with_the_upstreams_error_if_the_upstream_stays_unavailable(
    fast: None, replica: Replica, upstream: ScriptedUpstream
) -> None:
    ours = replica(upstream__overload_timeout=0.05, upstream__status_grace=0)
    for _ in range(100):
        upstream.whole(error("the model is being loaded"), 503)
    done = await ended(ours, (await create(ours))["id"])
    assert (done["status"], done["error"]["code"]) == ("failed", "server_error")
    assert done["error"]["message"] == "the model is being loaded"


async def test_a_job_that_no_other_worker_can_continue_fails_with_the_upstreams_error(
    fast: None, replica: Replica, upstream: ScriptedUpstream, serve: Serve
) -> None:
    ours = replica(
        upstream__overload_timeout=0.1,
        upstream__status_grace=0,
        search__provider="searxng",
        search__url=serve(SearchServer(SEARXNG)),
    )
    upstream.stream(call('{"query": "a"}', name="web_search", call_id="c"), finish("tool_calls"))
    for _ in range(100):
        upstream.whole(error("the model is being loaded"), 503)
    done = await ended(ours, (await create(ours, tools=[{"type": "web_search"}]))["id"])
    assert done["output"][0]["status"] == "completed"  # the log does not contain the search results that the model has seen
    assert (done["status"], done["error"]["message"]) == ("failed", "the model is being loaded")


async def test_the_next_worker_repeats_a_file_search(
    fast: None, monkeypatch: pytest.MonkeyPatch, replica: Replica, upstream: ScriptedUpstream
) -> None:
    monkeypatch.setattr(job_runner, "TIMEOUT_FACTOR", 3000)
    ours = replica(upstream__overload_timeout=0.05, upstream__status_grace=0)
    file = ("a.md", b"Every employee has 28 days of leave.")
    uploaded = (await ours.http.post("/v1/files", files={"file": file}, data={"purpose": "assistants"})).json()
    store = (await ours.http.post("/v1/vector_stores", json={"file_ids": [uploaded["id"]]})).json()
    async with asyncio.timeout(PATIENCE):
        while (await ours.http.get(f"/v1/vector_stores/{store['id']}")).json()["status"] != "completed":
            await asyncio.sleep(0.02)
    upstream.stream(call('{"queries": ["leave"]}', name="file_search", call_id="c"), finish("tool_calls"))
    upstream.whole(error("the model is being loaded"), 503)
    upstream.whole(error("the model is being loaded"), 503)
    upstream.stream(text("It is 28 days【1】."), finish())
    tools = [{"type": "file_search", "vector_store_ids": [store["id"]]}]
    done = await ended(ours, (await create(ours, tools=tools))["id"])
    assert done["status"] == "completed", done
    searched, message = done["output"]
    assert (searched["type"], searched["results"]) == ("file_search_call", None)
    part = message["content"][0]
    assert (part["text"], [one["filename"] for one in part["annotations"]]) == ("It is 28 days.", ["a.md"])
    assert file[1].decode() in upstream.requests[-1].json["messages"][-1]["content"]
    shown = await ours.http.get(f"/v1/responses/{done['id']}", params={"include[]": "file_search_call.results"})
    assert shown.json()["output"][0]["results"][0]["text"] == file[1].decode()


async def test_without_an_overload_timeout_the_first_error_fails_the_job(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica(upstream__overload_timeout=0, upstream__status_grace=0)
    upstream.whole(error("busy"), 429)
    done = await ended(ours, (await create(ours))["id"])
    assert (done["status"], done["error"]["code"]) == ("failed", "rate_limit_exceeded")


async def test_a_job_waits_for_the_retry_after_time(fast: None, replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica(upstream__status_grace=0)
    upstream.whole(error("busy"), 429, headers={"retry-after": "2"})
    upstream.stream(*HELLO)
    began = time.monotonic()
    assert (await ended(ours, (await create(ours))["id"]))["status"] == "completed"
    assert time.monotonic() - began > 1.9


# -- jobs that wait for a retry --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_a_job_that_waits_for_a_retry_can_be_cancelled_or_deleted_at_once(
    replica: Replica, upstream: ScriptedUpstream, redis_url: str, how: str
) -> None:
    ours = replica(upstream__status_grace=0)
    upstream.whole(error("busy"), 429, headers={"retry-after": "500"})
    job = (await create(ours))["id"]
    await retried(redis_url, job)
    if how == "cancel":
        assert (await ours.http.post(f"/v1/responses/{job}/cancel")).json()["status"] == "cancelled"
        assert (await streamed(ours, job))[-1]["response"]["status"] == "cancelled"
    else:
        assert (await ours.http.delete(f"/v1/responses/{job}")).status_code == 200
        assert (await ours.http.get(f"/v1/responses/{job}")).status_code == 404


async def test_rate_limited_jobs_do_not_delay_other_jobs(
    slow: None, replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    ours = replica(upstream__status_grace=0)
    for _ in range(5):
        upstream.whole(error("busy"), 429)
    for _ in range(5):
        await retried(redis_url, (await create(ours))["id"])
    upstream.stream(*HELLO)
    assert (await ended(ours, (await create(ours))["id"]))["status"] == "completed"


async def test_an_unavailable_upstream_is_called_only_by_the_jobs_that_run_when_it_fails(
    fast: None, replica: Replica, upstream: ScriptedUpstream
) -> None:
    front = replica(jobs__concurrency=0)
    jobs = [(await create(front))["id"] for _ in range(12)]
    starting = UnavailableUpstream(upstream, {"retry-after": "500"})
    replica(jobs__concurrency=4, upstream=starting, upstream__status_grace=0, upstream__dialect="openai")
    async with asyncio.timeout(60):
        while not starting.asked:
            await asyncio.sleep(0.02)
    async with asyncio.timeout(PATIENCE):
        while starting.probes < 4:  # one for the job that failed, and those of the pool
            await asyncio.sleep(0.02)
        # a busy machine may not have ended all jobs yet
        while {(await get(front, job))["status"] for job in jobs} != {"queued"}:
            await asyncio.sleep(0.02)
    assert starting.asked <= 4


async def test_jobs_whose_time_for_retries_is_over_fail_together(
    monkeypatch: pytest.MonkeyPatch, replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    monkeypatch.setattr(endpoint, "FIRST_EJECTION", 1000.0)  # seconds without any probe
    front = replica(jobs__concurrency=0)
    jobs = [(await create(front))["id"] for _ in range(20)]
    away = UnavailableUpstream(upstream, together=len(jobs))
    replica(upstream=away, upstream__status_grace=0, upstream__dialect="openai", upstream__overload_timeout=0.05)
    await away.go.wait()
    with redis.Redis.from_url(redis_url) as client:  # a GET would end the job that it reads
        async with asyncio.timeout(PATIENCE):
            while {client.hget(record(job), "status") for job in jobs} != {b"failed"}:
                await asyncio.sleep(0.05)


async def test_a_response_with_a_file_is_queued_while_the_upstream_is_unavailable(
    fast: None, replica: Replica, upstream: ScriptedUpstream
) -> None:
    keys = {"auth__api_keys": [f"alice:sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"]}
    front = replica(jobs__concurrency=0, upstream=f"http://127.0.0.1:{free_port()}", **keys)
    front.http.headers["authorization"] = f"Bearer {KEY}"
    parts = [
        {"type": "input_text", "text": "What?"},
        {"type": "input_file", "filename": "a.html", "file_data": base64.b64encode(b"<html>28 days").decode()},
    ]
    document = await create(front, input=[{"role": "user", "content": parts}])
    assert document["status"] == "queued"
    upstream.stream(*HELLO)
    replica(**keys)
    assert (await ended(front, document["id"]))["status"] == "completed"
    assert upstream.requests[0].json["messages"][0]["content"][1]["text"].strip() == "a.html:\n28 days"


@pytest.mark.parametrize("fault", ["frame", "status"])
async def test_jobs_with_upstream_errors_do_not_delay_other_jobs(
    slow: None, replica: Replica, upstream: ScriptedUpstream, redis_url: str, fault: str
) -> None:
    ours = replica(upstream__status_grace=0)
    for _ in range(5):
        if fault == "frame":
            upstream.stream(frame({"error": {"message": "the grammar", "type": "InternalServerError", "code": 500}}))
        else:
            upstream.whole(error("no such model is loaded"), 503)
    for _ in range(5):
        await retried(redis_url, (await create(ours))["id"])
    upstream.stream(*HELLO)
    assert (await ended(ours, (await create(ours))["id"]))["status"] == "completed"


# -- retry_reason and retry_delay --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (UpstreamError("", status=429, is_overload=True), "429"),
        (UpstreamError("", status=504), "504"),
        (UpstreamError("an exhausted quota", status=429), None),
        (UpstreamError("an error of the model server", status=502), None),
        (UpstreamUnreachable("refused", is_overload=True), "unreachable"),
        (UpstreamUnreachable("reset"), "broken"),
        (UpstreamBrokeOff(""), "broken"),
        (UpstreamTimeout("silent"), None),
        (ValueError(), None),
        (None, None),
    ],
)
def test_a_job_is_retried_after_overloads_and_lost_connections_only(failure: Exception | None, reason: str | None) -> None:
    assert retry.retry_reason(failure) == reason


def test_the_delay_doubles_up_to_a_maximum_and_honours_retry_after() -> None:
    busy = UpstreamError("", status=503, is_overload=True)
    assert 0.5 <= retry.retry_delay(0, busy) <= 1
    assert 4 <= retry.retry_delay(3, busy) <= 8
    assert retry.retry_delay(10_000, busy) <= retry.MAX_DELAY
    busy.retry_after = 90.0
    assert retry.retry_delay(0, busy) == 90
