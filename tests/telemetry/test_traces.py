"""Traces and metrics that processes export over OTLP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from responses_mw.telemetry.conventions import SCHEMA_URL
from responses_mw.telemetry.setup import set_up_sdk
from responses_mw.version import VERSION
from tests.support.mcp_servers import weather
from tests.support.paths import ROOT
from tests.support.scripted import HELLO, ScriptedUpstream, call, completion, delta, finish, text, usage
from tests.support.scripted_responses import ScriptedResponses, item, response
from tests.support.websocket import opened

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tests.support.forkserver import ForkServer
    from tests.support.servers import Serve
    from tests.telemetry.conftest import Collector, Start

INTERNAL, SERVER, CLIENT, PRODUCER, CONSUMER = 1, 2, 3, 4, 5
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}
PROMPT, ANSWER = "a secret question", "a secret answer"
KEY = "sk-operator-0123456789"


def answered(*texts: str) -> list[dict[str, Any]]:
    return [{**delta(role="assistant", content=""), "id": "chatcmpl-9", "model": "tiny-1"}, *map(text, texts), finish()]


@pytest.mark.timeout(90)
async def test_a_background_response_with_a_tool_is_two_linked_traces_over_two_processes(
    serve: Serve, upstream: ScriptedUpstream, start: Start, collector: Collector, redis_url: str
) -> None:
    app, told = remembering(weather().streamable_http_app(stateless_http=True))
    tools = json.dumps({"weather": {"url": serve(app) + "/mcp", "require_approval": "never"}})
    front = start("serve", jobs__concurrency=0, tools__mcp_servers=tools)
    worker = start("worker", {"OTEL_SERVICE_NAME": "the-worker"}, tools__mcp_servers=tools)
    await front.is_ready()
    await worker.is_ready()
    upstream.stream(call('{"city": "Paris"}', name="get_weather", call_id="c1"), finish("tool_calls"), usage(30, 10))
    upstream.stream(*answered("Sunny", "."), usage(50, 5))

    conversation = await front.ours.client.conversations.create()
    stream = await front.ours.client.responses.create(
        model="tiny",
        input=PROMPT,
        background=True,
        stream=True,
        conversation=conversation.id,
        tools=[{"type": "mcp", "server_label": "weather", "require_approval": "never"}],
        extra_headers=TRACEPARENT,
    )
    events = [event async for event in stream]
    response = events[-1].response  # type: ignore[union-attr]
    assert response.status == "completed"
    await collector.until("POST /v1/responses", "process responses", "chat tiny", "EVALSHA commit")

    request, job = collector.one("POST /v1/responses"), collector.one("process responses")
    assert (request.kind, request.trace_id, request.parent_id) == (SERVER, TRACE, PARENT)
    assert (request.service, job.service) == ("responses-mw", "the-worker")
    assert request.attributes["gen_ai.response.id"] == job.attributes["gen_ai.response.id"] == response.id
    assert request.attributes["gen_ai.conversation.id"] == conversation.id
    queued = collector.one("send responses")
    assert (queued.kind, queued.parent_id) == (PRODUCER, request.span_id)
    assert (job.kind, job.parent_id, job.links) == (CONSUMER, "", [f"{TRACE}/{queued.span_id}"])
    message = {
        "messaging.system": "redis",
        "messaging.destination.name": "responses",
        "messaging.message.id": response.id,
    }
    assert message.items() | {("messaging.operation.name", "send")} <= queued.attributes.items()
    assert message.items() | {("messaging.operation.name", "process")} <= job.attributes.items()
    assert request.attributes["url.path"] == "/v1/responses"
    assert request.attributes["client.address"] == "127.0.0.1"
    assert request.attributes["gen_ai.request.model"] == "tiny"
    assert request.attributes["gen_ai.request.stream"] is True
    assert job.trace_id != TRACE

    first, second = collector.all("chat tiny")
    assert {first.parent_id, second.parent_id} == {job.span_id}
    assert first.kind == CLIENT
    assert first.attributes["gen_ai.response.finish_reasons"] == ["tool_calls"]
    host, port = front_address(upstream)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny-1",
        "gen_ai.response.id": "chatcmpl-9",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.conversation.id": conversation.id,
        "responses_mw.response.id": response.id,
        "responses_mw.upstream.name": "default",
        "server.address": host,
        "server.port": port,
    }
    assert expected.items() <= second.attributes.items()
    assert [asked.headers["traceparent"][:-2] for asked in upstream.requests] == [first.context, second.context]
    assert {asked.headers.get("tracestate") for asked in upstream.requests} == {None}  # it is another trace

    tool = collector.one("execute_tool get_weather")
    assert (tool.kind, tool.parent_id, tool.failed) == (INTERNAL, job.span_id, False)
    described = {"gen_ai.tool.name": "get_weather", "gen_ai.tool.call.id": "c1", "responses_mw.mcp.server": "weather"}
    assert described.items() <= tool.attributes.items()
    assert any(span.parent_id == tool.span_id for span in collector.spans)  # of MCP's SDK
    listed, called = (told[method] for method in ("tools/list", "tools/call"))
    assert {header.split("-")[1] for header, _ in (listed, called)} == {job.trace_id}
    assert called[0].startswith(job.context)
    assert called[1]["traceparent"].split("-")[2] in {
        span.span_id for span in collector.spans if span.parent_id == tool.span_id
    }

    created, committed = collector.one("EVALSHA job_create"), collector.one("EVALSHA commit")
    assert (created.parent_id, committed.parent_id) == (queued.span_id, job.span_id)
    assert committed.kind == CLIENT
    of_redis = {
        "db.system.name": "redis",
        "db.operation.name": "EVALSHA",
        "db.stored_procedure.name": "commit",
        "db.namespace": urlsplit(redis_url).query.removeprefix("db="),
        "server.address": urlsplit(redis_url).path,
    }
    assert of_redis.items() <= committed.attributes.items()
    assert collector.all("EVALSHA log_append") == []  # periodic work is not traced
    written = repr([(span.name, span.attributes) for span in collector.spans])
    assert PROMPT not in written
    assert "Sunny" not in written
    assert "Paris" not in written
    assert "Bearer" not in written


def remembering(app: ASGIApp) -> tuple[ASGIApp, dict[str, tuple[str, dict[str, Any]]]]:
    """Wrap an MCP server to record, by method, the last `traceparent` header and `_meta` that it received."""
    told: dict[str, tuple[str, dict[str, Any]]] = {}

    async def remembering(scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_and_look() -> Message:
            message = await receive()
            if message["type"] == "http.request" and message.get("body"):
                call = json.loads(message["body"])
                headers = {name.decode(): value.decode() for name, value in scope["headers"]}
                told[call["method"]] = (headers.get("traceparent", ""), call.get("params", {}).get("_meta", {}))
            return message

        await app(scope, receive_and_look if scope["type"] == "http" else receive, send)

    return remembering, told


def front_address(upstream: ScriptedUpstream) -> tuple[str, int]:
    host, _, port = upstream.requests[0].headers["host"].partition(":")
    return host, int(port)


@pytest.mark.timeout(90)
async def test_a_request_is_one_trace_and_its_failed_spans_are_marked_as_failed(
    upstream: ScriptedUpstream, start: Start, collector: Collector
) -> None:
    front = await start("serve").is_ready()
    upstream.stream(*answered(ANSWER))
    for _ in range(2):
        await front.ours.client.responses.create(
            model="tiny", input=PROMPT, extra_body={"cache": "exact"}, extra_headers=TRACEPARENT
        )
    upstream.whole({"error": {"message": f"overloaded: {PROMPT}"}}, 500)
    upstream.stream(text("half"), done=False)
    for _ in range(2):
        await front.ours.http.post("/v1/responses", json={"model": "tiny", "input": PROMPT})
    await front.ours.http.get("/v1/responses/resp_unknown?a=secret")
    await collector.until("GET /v1/responses/{response_id}")

    turns, requests = collector.all("chat tiny"), collector.all("POST /v1/responses")
    assert [request.attributes.get("responses_mw.cache.result") for request in requests] == ["miss", "exact", None, None]
    del requests[1]  # the upstream was not asked
    assert [turn.parent_id for turn in turns] == [request.span_id for request in requests]
    assert upstream.requests[0].headers["traceparent"] == turns[0].context + "01"
    assert upstream.requests[0].headers["tracestate"] == "vendor=value"
    assert [turn.failed for turn in turns] == [False, True, True]
    assert "error.type" not in turns[0].attributes
    assert [request.attributes["http.response.status_code"] for request in requests] == [200, 502, 502]
    assert [request.failed for request in requests] == [False, True, True]
    written = repr([(span.name, span.attributes) for span in collector.spans])
    assert PROMPT not in written
    assert "secret" not in written


@pytest.mark.timeout(90)
async def test_a_response_on_a_websocket_belongs_to_the_callers_trace(
    upstream: ScriptedUpstream, start: Start, collector: Collector
) -> None:
    front = await start("serve", upstream__forward_headers="x-mine").is_ready()
    upstream.stream(*HELLO)
    async with opened(front.ours, headers=TRACEPARENT) as socket:
        await socket.response()
    await collector.until("websocket response.create")
    span = collector.one("websocket response.create")
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)


@pytest.mark.timeout(90)
async def test_the_span_of_a_turn_follows_the_semantic_conventions(
    upstream: ScriptedUpstream, start: Start, collector: Collector
) -> None:
    front = await start("serve").is_ready()
    upstream.stream(*HELLO)
    first = await front.ours.client.responses.create(model="tiny", input="hi", stream=True)
    [*_, ended] = [event async for event in first]
    before = ended.response.id  # type: ignore[union-attr]
    details = {"prompt_tokens_details": {"cached_tokens": 16}, "completion_tokens_details": {"reasoning_tokens": 4}}
    counts = {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42, **details}
    upstream.whole(completion({"content": "{}"}, counts=counts))
    body = {"previous_response_id": before, "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}}}
    bearer = {"authorization": f"Bearer {front.ours.client.api_key}"}
    answer = await front.ours.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **body}, headers=bearer)
    assert answer.status_code == 200, answer.text
    await front.ours.http.get("/v1/responses/x")
    await collector.until("GET /v1/responses/{response_id}")
    streamed, whole = collector.all("chat tiny")
    assert streamed.attributes["gen_ai.request.stream"] is True
    assert streamed.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert "gen_ai.request.stream" not in whole.attributes
    expected = {
        "gen_ai.output.type": "json",
        "gen_ai.request.reasoning.level": "low",
        "gen_ai.request.previous_response.id": before,
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.reasoning.output_tokens": 4,
    }
    assert expected.items() <= whole.attributes.items()
    request = collector.all("POST /v1/responses")[1]
    assert request.attributes["gen_ai.request.previous_response.id"] == before
    assert {span.scope for span in (*collector.all("chat tiny"), request)} == {("responses_mw", VERSION, SCHEMA_URL)}


@pytest.mark.timeout(90)
async def test_values_that_exporters_do_not_accept_are_omitted_from_spans(
    upstream: ScriptedUpstream, start: Start, collector: Collector
) -> None:
    front = await start("serve").is_ready()
    accepted = {"seed": -(2**63), "max_output_tokens": 2**63 - 1, "top_k": 0.5, "stop": ["a", "b"], "temperature": 0}
    refused = {"seed": 2**63, "max_output_tokens": 2**64 - 1, "top_k": {"a": 1}, "stop": ["a", {"b": 2}]}
    for body in (accepted, refused):
        upstream.whole(completion({"content": "Hello"}))
        answer = await front.ours.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **body})
        assert answer.status_code == 200, answer.text
    await front.ours.http.get("/v1/responses/x")
    await collector.until("GET /v1/responses/{response_id}")
    names = {f"gen_ai.request.{name}" for name in ("seed", "max_tokens", "top_k", "stop_sequences", "temperature")}
    first, second = (span.attributes for span in collector.all("chat tiny"))
    assert [first[name] for name in sorted(names)] == [2**63 - 1, -(2**63), ["a", "b"], 0, 0.5]
    assert not names & second.keys()
    assert "Failed to encode" not in front.log


@pytest.mark.timeout(90)
async def test_spans_have_texts_only_if_enabled_and_never_of_unstored_responses(
    upstream: ScriptedUpstream, start: Start, collector: Collector
) -> None:
    opt_in = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    front = await start("serve", opt_in).is_ready()
    for store in (True, False):
        upstream.stream(*answered(ANSWER))
        await front.ours.client.responses.create(model="tiny", input=PROMPT, store=store)
    await front.ours.http.get("/v1/responses/x")
    await collector.until("GET /v1/responses/{response_id}")

    stored, other = collector.all("chat tiny")
    assert json.loads(stored.attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": PROMPT}]}
    ]
    assert json.loads(stored.attributes["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": ANSWER}], "finish_reason": "stop"}
    ]
    assert PROMPT not in repr(other)
    assert ANSWER not in repr(other)


@pytest.mark.timeout(90)
async def test_spans_contain_the_texts_of_an_upstream_with_a_responses_api(
    serve: Serve, start: Start, collector: Collector
) -> None:
    upstream, opt_in = ScriptedResponses(), {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    front = await start("serve", opt_in, upstream__url=serve(upstream), upstream__api="responses").is_ready()
    thought = {"id": "rs_1", "type": "reasoning", "summary": ["malformed", {"type": "summary_text", "text": "Hm."}]}
    call = {"id": "fc_1", "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"}
    upstream.whole(response(thought, call))
    upstream.whole(response(item(ANSWER)))
    first = (await front.ours.http.post("/v1/responses", json={"model": "tiny", "input": PROMPT})).json()
    result = {"type": "function_call_output", "call_id": "c1", "output": "7"}
    body = {"model": "tiny", "input": [result], "previous_response_id": first["id"]}
    assert (await front.ours.http.post("/v1/responses", json=body)).status_code == 200
    await front.ours.http.get("/v1/responses/x")
    await collector.until("GET /v1/responses/{response_id}")

    turns = [json.loads(span.attributes["gen_ai.output.messages"]) for span in collector.all("chat tiny")]
    reasoning = {"type": "reasoning", "content": "Hm."}
    called = {"type": "tool_call", "id": "c1", "name": "f", "arguments": "{}"}
    assert [message["parts"] for [message] in turns] == [[reasoning, called], [{"type": "text", "content": ANSWER}]]
    given = json.loads(collector.all("chat tiny")[1].attributes["gen_ai.input.messages"])
    assert [(message["role"], message["parts"]) for message in given] == [
        ("user", [{"type": "text", "content": PROMPT}]),
        ("assistant", [reasoning]),
        ("assistant", [called]),
        ("tool", [{"type": "tool_call_response", "id": "c1", "response": "7"}]),
    ]


def repeating() -> MCPServer[None]:
    server = MCPServer("repeating", log_level="CRITICAL")

    @server.tool(structured_output=False, description=KEY)
    def repeat(fails: bool) -> str:
        if fails:
            raise ToolError(KEY)
        return KEY

    return server


@pytest.mark.timeout(90)
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_spans_contain_no_secret_that_another_server_repeats(
    serve: Serve, start: Start, collector: Collector, api: str
) -> None:
    upstream = ScriptedResponses() if api == "responses" else ScriptedUpstream()
    opt_in = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    mcp = {"url": serve(repeating().streamable_http_app(stateless_http=True)) + "/mcp", "require_approval": "never"}
    settings = {"upstream__url": serve(upstream), "upstream__api": api, "upstream__api_key": KEY}
    front = await start("serve", opt_in, tools__mcp_servers=json.dumps({"repeating": mcp}), **settings).is_ready()
    upstream.whole({"error": {"message": KEY, "code": KEY}}, 500)
    upstream.stream({"error": {"message": KEY, "code": KEY}})
    for fails in ("true", "false"):
        made = f'{{"fails": {fails}}}'
        if api == "chat":
            upstream.stream(call(made, name="repeat", call_id="c"), finish("tool_calls"))
            upstream.stream({**HELLO[0], "id": KEY, "model": KEY}, *HELLO[1:-1], finish(KEY))
        else:
            called = {"type": "mcp_call", "server_label": "s", "name": KEY, "arguments": made, "output": KEY, "error": KEY}
            upstream.whole(response({"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": KEY}]}, called))
            upstream.whole(response(status="failed", error={"message": KEY, "code": KEY}))
    tools = [{"type": "mcp", "server_label": "repeating"}] if api == "chat" else []
    for _ in range(4):
        body = {"model": "tiny", "input": PROMPT, "tools": tools, "stream": api == "chat"}
        await front.ours.http.post("/v1/responses", json=body)
    await front.ours.http.get("/v1/responses/x")
    spans = await collector.until("GET /v1/responses/{response_id}")
    assert len(collector.all("chat tiny")) >= 4
    assert [(span.name, name) for span in spans for name, value in span.attributes.items() if KEY in repr(value)] == []
    assert KEY not in repr([(span.name, span.events) for span in spans])


@pytest.mark.timeout(90)
async def test_the_callers_decision_not_to_sample_is_respected_and_propagated(
    upstream: ScriptedUpstream, start: Start, collector: Collector
) -> None:
    front = await start("serve").is_ready()
    upstream.stream(*HELLO)
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    await front.ours.client.responses.create(model="tiny", input="hi", extra_headers=unsampled)
    await front.ours.http.get("/v1/responses/x")
    await collector.until("GET /v1/responses/{response_id}")
    assert collector.all("chat tiny") == []
    sent = upstream.requests[0].headers["traceparent"].split("-")
    assert (sent[1], sent[3]) == (TRACE, "00")


@pytest.mark.timeout(90)
async def test_a_disabled_sdk_exports_nothing_and_passes_the_callers_context_on(
    upstream: ScriptedUpstream, start: Start, collector: Collector
) -> None:
    front = await start("serve", {"OTEL_SDK_DISABLED": "true"}).is_ready()
    upstream.stream(*HELLO)
    await front.ours.client.responses.create(model="tiny", input="hi", extra_headers=TRACEPARENT)
    front.end()  # what was recorded would be sent now
    assert TRACEPARENT.items() <= upstream.requests[0].headers.items()
    assert collector.spans == []


def test_names_of_the_conventions_are_in_one_module() -> None:
    name = re.compile(r'"((gen_ai|messaging|db)\.[a-z_.]+|(client|server)\.address|url\.path|http\.route|error\.type)"')
    package = ROOT / "responses_mw"
    found = {path.relative_to(package) for path in package.rglob("*.py") if name.search(path.read_text())}
    assert found == {Path("telemetry/conventions.py")}


FLAGS = ["--upstream=http://127.0.0.1:9", "--redis=redis://127.0.0.1:9", f"--auth.secret-keys={'s' * 32}"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER=console is not supported: run"),
        ({"OTEL_METRICS_EXPORTER": "otlp,console"}, "OTEL_METRICS_EXPORTER=otlp,console is not supported"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "the OTLP protocol grpc is not supported"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "worker"])
def test_an_export_that_cannot_be_set_up_is_a_one_line_error_at_startup(
    fork_server: ForkServer, command: str, variables: dict[str, str], said: str
) -> None:
    ended = fork_server.run(command, *FLAGS, env=variables)
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"responses-mw: {said}")
    assert ended.returncode == 1


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_variable_that_opentelemetry_cannot_import_with_is_a_one_line_error_at_startup(command: str) -> None:
    variables = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SPAN_EVENT_COUNT_LIMIT": "x"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    ended = subprocess.run(
        [sys.executable, "-m", "responses_mw", command, *FLAGS], env=environment, capture_output=True, text=True, check=False
    )
    [line] = ended.stderr.splitlines()
    assert line.startswith("responses-mw: an OTEL_* variable is invalid")
    assert ended.returncode == 1


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_nothing_is_exported_without_the_otel_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    set_up_sdk()
    assert "the extra responses-mw[otel] is not installed: nothing is exported" in caplog.text


@pytest.mark.timeout(90)
async def test_metrics_are_exported_to_the_same_endpoint_as_traces(
    upstream: ScriptedUpstream, start: Start, collector: Collector
) -> None:
    front = await start("serve").is_ready()
    upstream.stream(*HELLO)
    stream = await front.ours.client.responses.create(model="tiny", input="hi", stream=True)
    assert [event.type async for event in stream][-1] == "response.completed"
    await collector.until("chat tiny")
    front.end()
    names = {"gen_ai.client.inference.duration", "http.server.request.duration", "responses_mw.queue.depth"}
    names |= {"http.server.active_requests", "responses_mw.streams.open"}
    assert names <= collector.metrics


@pytest.mark.timeout(150)
@pytest.mark.parametrize("command", ["serve", "worker"])
async def test_a_collector_that_does_not_answer_does_not_delay_the_exit(start: Start, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_TIMEOUT": "600"}
        process = await start(command, variables).is_ready()
        began = time.monotonic()
        process.end()
        assert time.monotonic() - began < 20  # without a limit, 30 s for each of traces and metrics
    assert "does not answer: the last traces or metrics are lost" in process.log


def test_at_exit_metrics_do_not_wait_until_traces_are_exported(serve: Serve, collector: Collector) -> None:
    async def traces(scope: Scope, receive: Receive, send: Send) -> None:
        while scope["type"] == "http" and not collector.metrics:
            await asyncio.sleep(0.02)
        await collector(scope, receive, send)

    program = (
        "from opentelemetry import trace\nfrom responses_mw.telemetry import metrics, setup\n"
        "setup._EXIT_TIMEOUT = 20\nsetup.set_up_sdk()\nmetrics.STREAMS_OPEN.add(1)\n"
        "trace.get_tracer('test').start_span('last').end()"
    )
    endpoints = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{serve(traces)}/v1/traces",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{serve(collector)}/v1/metrics",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "600",
    }
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **endpoints, "PYTHONPATH": str(ROOT)}, check=True)
    assert "responses_mw.streams.open" in collector.metrics
    assert [span.name for span in collector.spans] == ["last"]
