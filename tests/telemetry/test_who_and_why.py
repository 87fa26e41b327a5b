"""Access lines and spans say who sent a request, and the failed turn shows why it failed."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support.scripted import HELLO, BrokenOff, Signal, error, text
from tests.telemetry.test_failed_runs import Watched

if TYPE_CHECKING:
    from tests.support.scripted import ScriptedUpstream
    from tests.telemetry.conftest import Collector, Span, Start

KEY = "sk-of-alice-0123456789"
KEYS = f"alice:sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
AUTHORIZED = {
    "authorization": f"Bearer {KEY}",
    "user-agent": "curl/8 " + "x" * 300,
    "x-forwarded-for": "203.0.113.7, 10.0.0.9",
}
QUESTION = {"model": "tiny", "input": "hi"}


@pytest.mark.timeout(120)
async def test_every_access_line_and_span_identifies_the_caller(
    start: Start, collector: Collector, upstream: ScriptedUpstream, upstream_url: str
) -> None:
    settings = {"auth__api_keys": KEYS, "server__trusted_proxies": "127.0.0.1,10.0.0.0/8", "server__log_format": "json"}
    watched = Watched(await start("serve", **settings).is_ready(), collector)
    http = watched.front.ours.http
    upstream.stream(*HELLO)
    answered = {"request": "answered", "path": "/v1/responses", "content": json.dumps({**QUESTION, "stream": True})}
    refused = {"request": "refused", "path": "/v1/responses", "content": "{"}
    passed = {"request": "passed", "path": "/v1/models"}
    for one in (answered, refused, passed):
        headers = {**AUTHORIZED, "x-request-id": one["request"]}
        await http.request("POST" if "content" in one else "GET", one["path"], content=one.get("content"), headers=headers)
        line = await watched.record("responses_mw.access", request=one["request"])
        assert (line["key"], line["client"], len(line["user_agent"])) == ("alice", "203.0.113.7", 128), one
    line = await watched.record("responses_mw.access", request="answered")
    assert line["upstream_request"] == upstream.requests[-1].headers["x-request-id"]
    assert (line["upstream"], line["endpoint"]) == ("default", upstream_url)
    span = await watched.span("POST /v1/responses", line["trace_id"])
    who = {
        "responses_mw.upstream.name": "default",
        "client.address": "203.0.113.7",
        "responses_mw.key": "alice",
        "responses_mw.request.id": "answered",
        "responses_mw.upstream.request.id": line["upstream_request"],
    }
    assert who.items() <= span.attributes.items()
    assert span.attributes["responses_mw.owner"].startswith(line["owner"])
    await http.post("/v1/responses", json=QUESTION, headers={"x-request-id": "unknown", "authorization": "Bearer no"})
    line = await watched.record("responses_mw.access", request="unknown")
    assert (line["status"], line["client"], "key" in line) == (401, "127.0.0.1", False)


@pytest.mark.timeout(120)
async def test_a_client_that_disconnected_before_the_answer_is_reported(
    start: Start, collector: Collector, upstream: ScriptedUpstream
) -> None:
    watched = Watched(await start("serve", server__log_format="json").is_ready(), collector)
    upstream.whole(error("late", 500), 500, before=Signal())
    with suppress(httpx.ReadTimeout):
        await watched.front.ours.http.post(
            "/v1/responses",
            json=QUESTION,
            headers={"x-request-id": "left", "user-agent": "curl/8", "x-forwarded-for": "203.0.113.7"},
            timeout=httpx.Timeout(60, read=1),
        )
    line = await watched.record("responses_mw.access", request="left")
    assert (line["status"], line["user_agent"]) == (499, "curl/8")
    assert line["upstream_request"] == upstream.requests[-1].headers["x-request-id"]


async def span_of(watched: Watched, request: str) -> Span:
    line = await watched.record("responses_mw.access", request=request)
    return await watched.span("chat tiny", line["trace_id"])


@pytest.mark.timeout(120)
async def test_failed_cut_and_cancelled_turns_show_their_content(
    start: Start, collector: Collector, upstream: ScriptedUpstream
) -> None:
    variables = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    watched = Watched(await start("serve", variables, upstream__overload_timeout=0).is_ready(), collector)
    upstream.whole(error("out of memory", 500), 500)
    await watched.post("failed")
    upstream.stream(text("Hel"), BrokenOff(), done=False)
    await watched.post("cut", stream=True)
    upstream.stream(text("Hel"), Signal())
    with suppress(httpx.ReadTimeout):
        await watched.front.ours.http.post(
            "/v1/responses",
            json={**QUESTION, "input": "a secret question", "stream": True},
            headers={"x-request-id": "cancelled"},
            timeout=httpx.Timeout(60, read=1),
        )
    for request, output in (("failed", ""), ("cut", "Hel"), ("cancelled", "Hel")):
        attributes = (await span_of(watched, request)).attributes
        assert "a secret question" in attributes["gen_ai.input.messages"], request
        [message] = json.loads(attributes["gen_ai.output.messages"])
        assert message["finish_reason"] == "error", request
        assert output in json.dumps(message["parts"]), request
    [(name, event)] = (await span_of(watched, "failed")).events
    assert name == "gen_ai.client.operation.exception"
    assert event == {"exception.type": "500", "exception.message": "out of memory"}
    [(_, event)] = (await span_of(watched, "cut")).events
    assert event["exception.type"] == "UpstreamBrokeOff"


@pytest.mark.timeout(120)
async def test_the_warning_has_the_bounded_text_of_the_upstreams_error(
    start: Start, collector: Collector, upstream: ScriptedUpstream
) -> None:
    watched = Watched(
        await start("serve", server__log_format="json", upstream__api_key="sk-operator-key").is_ready(), collector
    )
    upstream.whole(error("out of memory: sk-operator-key\n" + "x" * 1000, 500), 500)
    await watched.post("stored")
    upstream.whole(error("out of memory", 500), 500)
    await watched.post("unstored", store=False)
    warning = await watched.record("responses_mw.runs", request="stored")
    assert warning["error"] == ("out of memory: <redacted>\n" + "x" * 1000)[:500]
    assert "error" not in await watched.record("responses_mw.runs", request="unstored")
