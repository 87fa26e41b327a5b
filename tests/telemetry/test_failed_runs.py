"""Every failure of a run produces an access line, a warning, a metric and a failed span."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from responses_mw.ids import RunIds
from tests.support.mcp_servers import weather
from tests.support.scripted import HELLO, BrokenOff, Signal, call, completion, error, finish, text
from tests.support.websocket import opened

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve
    from tests.telemetry.conftest import Collector, Command, Span, Start

SECRET = "a secret question"
FAULT = "out of memory"
TOOLS = [{"type": "mcp", "server_label": "weather", "require_approval": "never"}]
Facts = dict[str, Any]


@dataclass
class Watched:
    """A server, with its log, metrics and spans."""

    front: Command
    collector: Collector
    before: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def records(self) -> list[Facts]:
        return [json.loads(line) for line in self.front.log.splitlines()]

    async def record(self, logger: str, **facts: Any) -> Facts:
        """Wait for the only record of `logger` with these facts."""
        async with asyncio.timeout(60):
            while True:
                with suppress(json.JSONDecodeError):  # the last line may be half written
                    found = [one for one in self.records if one["logger"] == logger and facts.items() <= one.items()]
                    if found:
                        assert len(found) == 1, found
                        return found[0]
                await asyncio.sleep(0.02)

    def warnings(self, **facts: Any) -> list[Facts]:
        return [one for one in self.records if one["level"] == "warning" and facts.items() <= one.items()]

    async def span(self, name: str, trace_id: str) -> Span:
        async with asyncio.timeout(60):
            while True:
                found = [span for span in self.collector.spans if (span.name, span.trace_id) == (name, trace_id)]
                if found:
                    return found[-1]
                await asyncio.sleep(0.02)

    async def counted(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels."""
        answer = await self.front.admin.http.get("/metrics")
        samples = [one for family in text_string_to_metric_families(answer.text) for one in family.samples]
        return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())

    async def post(self, request: str, path: str = "/v1/responses", key: str = "", **body: Any) -> httpx.Response:
        """Send a request; `key` is its idempotency key."""
        body = {"model": "tiny", "input": SECRET, **body}
        headers = {"x-request-id": request, **({"idempotency-key": key} if key else {})}
        return await self.front.ours.http.post(path, json=body, headers=headers)


@dataclass(frozen=True)
class Case:
    """A request, the answer of the upstream that fails it, and the expected telemetry."""

    script: Callable[[ScriptedUpstream], object]
    status: int
    seen: Facts
    """Facts in the access line and in the warning."""
    span_error: str
    """`error.type` of the request's span and metric; empty for a 4xx."""
    body: Facts = field(default_factory=dict)
    path: str = "/v1/responses"
    turn_error: str = ""
    """`error.type` of the turn's span and metric, if it is another one."""


STREAM: Facts = {"stream": True}


def tool_turn_then_overload(upstream: ScriptedUpstream) -> None:
    upstream.stream(call("{}", name="get_weather", call_id="c1"), finish("tool_calls"))
    upstream.whole(error(FAULT, 429), 429, headers={"retry-after": "60"})  # longer than the server waits


CASES = {
    "upstream 500": Case(
        lambda upstream: upstream.whole(error(FAULT, 500), 500),
        502,
        {"outcome": "failed", "error_code": "server_error", "error_type": "500", "upstream_status": 500, "cause": "upstream"},
        "502",
        turn_error="500",
    ),
    "upstream 400": Case(
        lambda upstream: upstream.whole(error(FAULT), 400),
        400,
        {"outcome": "failed", "error_type": "400", "upstream_status": 400, "cause": "client"},
        "",
        turn_error="400",
    ),
    "stream broken off": Case(
        lambda upstream: upstream.stream(*HELLO[:2], BrokenOff(), done=False),
        200,
        {"outcome": "failed", "error_code": "server_error", "error_type": "UpstreamBrokeOff", "stream": True, "turns": 1},
        "UpstreamBrokeOff",
        STREAM,
    ),
    "answer broken off": Case(
        lambda upstream: upstream.stream(*HELLO[:2], done=False),
        502,
        {"outcome": "failed", "error_type": "UpstreamBrokeOff"},
        "502",
        turn_error="UpstreamBrokeOff",
    ),
    "error within the stream": Case(
        lambda upstream: upstream.stream(*HELLO[:2], error(FAULT, 500)),
        200,
        {"outcome": "failed", "error_type": "500", "upstream_status": 500},
        "500",
        STREAM,
    ),
    "no JSON": Case(
        lambda upstream: upstream.stream(*HELLO[:2], b"data: {\n\n"),
        200,
        {"outcome": "failed", "error_type": "NotJSON"},
        "NotJSON",
        STREAM,
    ),
    "overload given up": Case(
        tool_turn_then_overload,
        200,
        {"outcome": "failed", "error_code": "rate_limit_exceeded", "error_type": "429", "turns": 2, "tool_calls": 1},
        "429",
        {**STREAM, "tools": TOOLS},
    ),
    "compaction": Case(
        lambda upstream: upstream.whole(error(FAULT, 500), 500),
        502,
        {"outcome": "failed", "error_type": "500", "upstream_status": 500},
        "502",
        path="/v1/responses/compact",
        turn_error="500",
    ),
}


@pytest.fixture
async def watched(serve: Serve, start: Start, collector: Collector) -> Watched:
    tools = json.dumps({"weather": {"url": serve(weather().streamable_http_app(stateless_http=True)) + "/mcp"}})
    settings: Facts = {"upstream__overload_timeout": 0, "cache__max_mode": "semantic"}
    settings["cache__embedding_model"] = "no-such-model"
    return Watched(await start("serve", tools__mcp_servers=tools, **settings).is_ready(), collector)


@pytest.mark.timeout(120)
async def test_every_failed_run_appears_in_the_log_metrics_and_spans(watched: Watched, upstream: ScriptedUpstream) -> None:
    for number, (name, case) in enumerate(CASES.items()):
        request = f"failure-{number}"
        http = {"http_route": case.path, "http_response_status_code": str(case.status), "error_type": case.span_error}
        turn = {"error_type": case.turn_error or case.span_error}
        counters = {
            "http_server_request_duration_seconds_count": http,
            "gen_ai_client_inference_duration_seconds_count": turn,
        }
        before = [await watched.counted(metric, **labels) for metric, labels in counters.items()]
        case.script(upstream)
        answer = await watched.post(request, case.path, **case.body)
        assert answer.status_code == case.status, (name, answer.text)

        line = await watched.record("responses_mw.access", request=request)
        assert case.seen.items() <= line.items(), name
        warning = await watched.record("responses_mw.runs", request=request)
        level = "info" if warning["cause"] == "client" else "warning"
        assert (warning["level"], case.seen.items() <= warning.items()) == (level, True), name
        after = [await watched.counted(metric, **labels) for metric, labels in counters.items()]
        assert [one - other for one, other in zip(after, before, strict=True)] == [1, 1], name
        span = await watched.span(f"POST {case.path}", line["trace_id"])
        assert (span.failed, span.attributes.get("error.type", "")) == (bool(case.span_error), case.span_error), name
        assert span.attributes["responses_mw.outcome"] == "failed"
        assert span.attributes["responses_mw.cause"] == line["cause"]
        failed = await watched.span("chat tiny", line["trace_id"])
        assert (failed.failed, failed.attributes["error.type"]) == (True, case.turn_error or case.span_error), name
        assert failed.attributes["responses_mw.cause"] == line["cause"]
    assert SECRET not in watched.front.log
    assert SECRET not in repr(watched.collector.spans)


@pytest.mark.timeout(120)
async def test_requests_without_a_failed_run_are_logged_without_a_warning(watched: Watched, upstream: ScriptedUpstream) -> None:
    upstream.whole(error(FAULT, 401), 401)
    await watched.post("refused-by-upstream")
    await watched.post("refused", tools=7)
    upstream.stream(call('{"why": "secret"}', name="fail", call_id="c1"), finish("tool_calls"))
    upstream.stream(*HELLO)
    await watched.post("failed-tool", **STREAM, tools=TOOLS)
    upstream.stream(text("a"), Signal())
    with pytest.raises(httpx.ReadTimeout):
        await watched.front.ours.http.post(
            "/v1/responses",
            json={"model": "tiny", "input": SECRET, **STREAM},
            headers={"x-request-id": "left"},
            timeout=httpx.Timeout(60, read=1),
        )
    upstream.whole(completion({"content": "yes"}))
    for request in ("missed", "hit"):
        await watched.post(request, input="hi", cache="exact")

    upstream.whole(completion({"content": "yes"}))
    await watched.post("unembedded", input="How high is the highest mountain?", cache="semantic")

    upstream.whole(completion({"content": "yes"}))
    once, again = [(await watched.post(request, key="k")).json()["id"] for request in ("once", "again")]

    async def line(request: str) -> Facts:
        return await watched.record("responses_mw.access", request=request)

    refused = {"outcome": "refused", "error_code": "invalid_api_key", "error_type": "401", "upstream_status": 401}
    assert refused.items() <= (await line("refused-by-upstream")).items()
    assert {"outcome": "refused", "error_type": "BadRequest"}.items() <= (await line("refused")).items()
    tool = await line("failed-tool")
    assert {"outcome": "completed", "tool_calls": 1, "tool_errors": 1, "turns": 2, "stored": True}.items() <= tool.items()
    assert (await watched.span("execute_tool fail", tool["trace_id"])).attributes["error.type"] == "tool_error"
    assert await watched.counted("gen_ai_execute_tool_duration_seconds_count", error_type="tool_error") == 1
    assert {"outcome": "cancelled", "left": True, "status": 200}.items() <= (await line("left")).items()
    cancelled = await watched.span("chat tiny", (await line("left"))["trace_id"])
    assert (cancelled.failed, cancelled.attributes["error.type"]) == (False, "cancelled")
    assert cancelled.attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert {"outcome": "completed", "cache": "miss", "turns": 1, "tokens_out": 2}.items() <= (await line("missed")).items()
    assert {"outcome": "repeated", "response": once} == {"outcome": (await line("again"))["outcome"], "response": again}
    unembedded = {"outcome": "completed", "cache": "miss", "cache_reason": "embedding_failed"}
    assert unembedded.items() <= (await line("unembedded")).items()
    assert await watched.counted("responses_mw_cache_misses_total", reason="embedding_failed") == 1
    assert {"outcome": "completed", "cache": "exact", "turns": 0}.items() <= (await line("hit")).items()
    assert [one for one in watched.warnings() if one["logger"] == "responses_mw.runs"] == []


@pytest.mark.timeout(120)
async def test_failed_jobs_and_websocket_responses_appear_in_the_log_and_spans(
    watched: Watched, upstream: ScriptedUpstream
) -> None:
    upstream.whole(error(FAULT, 500), 500)
    job = (await watched.post("queued", background=True)).json()
    assert (await watched.record("responses_mw.access", request="queued"))["outcome"] == "queued"
    started = await watched.record("responses_mw.jobs.worker", message=f"job {job['id']} starts")
    ended = await watched.record("responses_mw.jobs.worker", message=f"job {job['id']} ends")
    assert (started["attempt"], started["worker"]) == (1, ended["worker"])
    failed = {"outcome": "failed", "error_type": "500", "upstream_status": 500, "response": job["id"], "attempt": 1}
    assert failed.items() <= ended.items()
    assert ended["seconds"] >= 0
    assert failed.items() <= (await watched.record("responses_mw.runs", response=job["id"])).items()
    span = await watched.span("process responses", ended["trace_id"])
    assert (span.failed, span.attributes["error.type"]) == (True, "500")
    assert await watched.counted("responses_mw_responses_total", status="failed", kind="background") == 1

    upstream.stream(*HELLO[:2], BrokenOff(), done=False)
    async with opened(watched.front.ours) as socket:
        await socket.create(SECRET)
        assert (await socket.events())[-1]["type"] == "response.failed"
    line = await watched.record("responses_mw.access", method="WS")
    broken = {"outcome": "failed", "error_type": "UpstreamBrokeOff", "request": line["request"]}
    assert broken.items() <= line.items()
    assert broken.items() <= (await watched.record("responses_mw.runs", request=line["request"])).items()
    span = await watched.span("websocket response.create", line["trace_id"])
    assert (span.failed, span.attributes["error.type"]) == (True, "UpstreamBrokeOff")
    assert SECRET not in watched.front.log


@pytest.mark.timeout(120)
async def test_a_run_that_is_ended_by_a_shutdown_appears_in_the_log_and_spans(
    start: Start, collector: Collector, upstream: ScriptedUpstream
) -> None:
    watched = Watched(await start("serve", server__drain_timeout=1).is_ready(), collector)
    answer = upstream.stream(text("a"), Signal())
    asking = asyncio.create_task(watched.post("drained", **STREAM))
    await answer.asked.wait()
    watched.front.process.send_signal(signal.SIGTERM)
    assert '"response.failed"' in (await asking).text
    line = await watched.record("responses_mw.access", request="drained")
    ended = {"outcome": "failed", "error_code": "server_error", "error_type": "Unavailable", "status": 200}
    assert ended.items() <= line.items()
    assert (await watched.record("responses_mw.runs", request="drained"))["level"] == "warning"
    span = await watched.span("POST /v1/responses", line["trace_id"])
    assert (span.failed, span.attributes["error.type"]) == (True, "Unavailable")


@pytest.mark.timeout(120)
async def test_an_upstream_timeout_and_an_unavailable_redis_appear_in_the_log(
    start: Start, collector: Collector, upstream: ScriptedUpstream
) -> None:
    settings = {"upstream__timeout": 1, "redis__url": "redis://127.0.0.1:1", "redis__timeout": 0.5}
    watched = Watched(await start("serve", **settings).is_ready("/livez"), collector)
    never = Signal()
    upstream.stream(*HELLO, before=never)
    assert (await watched.post("late")).status_code == 504
    never.set()
    line = await watched.record("responses_mw.access", request="late")
    assert {"outcome": "failed", "error_code": "upstream_timeout", "error_type": "UpstreamTimeout"}.items() <= line.items()
    assert "upstream_status" not in line
    assert (await watched.span("POST /v1/responses", line["trace_id"])).attributes["error.type"] == "504"

    upstream.stream(*HELLO)
    assert (await watched.post("unstored", **STREAM)).status_code == 200
    line = await watched.record("responses_mw.access", request="unstored")
    assert {"outcome": "completed", "stored": False, "unstored": "redis_unavailable"}.items() <= line.items()
    assert await watched.counted("responses_mw_responses_unstored_total", reason="redis_unavailable") == 1

    before = await watched.counted("http_server_request_duration_seconds_count", error_type="503")
    upstream.stream(*HELLO)
    assert (await watched.post("unread", previous_response_id=RunIds().response)).status_code == 503
    line = await watched.record("responses_mw.access", request="unread")
    assert {"outcome": "failed", "error_code": "state_unavailable", "error_type": "StateUnavailable"}.items() <= line.items()
    assert (await watched.record("responses_mw.runs", request="unread"))["level"] == "warning"
    assert await watched.counted("http_server_request_duration_seconds_count", error_type="503") == before + 1


@pytest.mark.timeout(120)
async def test_texts_of_unstored_responses_are_not_logged_even_at_debug(
    start: Start, collector: Collector, upstream: ScriptedUpstream
) -> None:
    capture = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    watched = Watched(await start("serve", capture, server__log_level="debug").is_ready(), collector)

    async def fail(request: str, *, store: bool) -> None:
        upstream.whole(error(SECRET, 500), 500)
        upstream.stream(text(SECRET), error(SECRET, 500))
        await watched.post(request, store=store)
        await watched.post(f"{request}-streamed", **STREAM, store=store)
        line = await watched.record("responses_mw.access", request=f"{request}-streamed")
        await watched.span("POST /v1/responses", line["trace_id"])

    await fail("private", store=False)
    assert SECRET not in watched.front.log
    assert SECRET not in repr(collector.spans)
    await fail("stored", store=True)
    assert watched.front.log.count(f'"error": "{SECRET}"') == 2
