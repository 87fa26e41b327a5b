"""Metrics: recording, limits and exposition."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from responses_mw.asgi.admin import Admin
from responses_mw.telemetry import instruments, metrics
from responses_mw.telemetry.turn import TurnSpan
from tests.support.oracle import whole
from tests.support.queries import EMITTED
from tests.support.scripted import HELLO, Signal, completion, text

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.scripted import ScriptedUpstream
    from tests.telemetry.conftest import Command, Start

USAGE = "gen_ai_client_inference_usage"
TIME_TO_FIRST_CHUNK = "gen_ai_client_inference_time_to_first_chunk_seconds"
TIME_PER_OUTPUT_TOKEN = "responses_mw_time_per_output_token_seconds"
DURATION = "gen_ai_client_inference_duration_seconds"
CHAT = {"model": "m", "stream": True, "messages": []}


def parsed(text: str) -> dict[str, Any]:
    """Return the metric families by name; counters have their suffix."""
    families = text_string_to_metric_families(text)
    return {f"{one.name}_total" if one.type == "counter" else one.name: one for one in families}


# -- instruments -----------------------------------------------------------------------------------------------------------------

RECORDED_TWICE = """
import json
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
set_meter_provider(MeterProvider([reader]))

from responses_mw.telemetry import instruments, metrics

metrics.STATE_ERRORS.add(2, {"error.type": "ConnectionError"})
metrics.ACTIVE_REQUESTS.add(3, {"http.request.method": "GET", "url.scheme": "http"})
metrics.ACTIVE_REQUESTS.add(-1, {"http.request.method": "GET", "url.scheme": "http"})
metrics.QUEUE_DEPTH.set(7)
metrics.REQUEST_DURATION.record(0.2, {"http.request.method": "GET", "http.response.status_code": 200})
points = {}
for scoped in reader.get_metrics_data().resource_metrics[0].scope_metrics:
    for metric in scoped.metrics:
        for point in metric.data.data_points:
            value = getattr(point, "value", None) if hasattr(point, "value") else point.sum
            points[f"{metric.name} {sorted(dict(point.attributes).items())}"] = value
print(json.dumps([points, instruments.exposition("")[0].decode()]))
"""


def run_script(script: str, **environment: str) -> Any:
    """Run `script` in a separate process, and decode the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return json.loads(done.stdout)


def test_a_metric_is_recorded_for_opentelemetry_and_for_prometheus() -> None:
    points, text = run_script(RECORDED_TWICE)
    assert points["responses_mw.state.errors [('error.type', 'ConnectionError')]"] == 2
    assert points["http.server.active_requests [('http.request.method', 'GET'), ('url.scheme', 'http')]"] == 2
    assert points["responses_mw.queue.depth []"] == 7
    assert points["http.server.request.duration [('http.request.method', 'GET'), ('http.response.status_code', 200)]"] == 0.2
    families = parsed(text)
    assert total(families, "responses_mw_state_errors_total", error_type="ConnectionError") == 2
    assert total(families, "http_server_active_requests", http_request_method="GET") == 2
    assert total(families, "responses_mw_queue_depth") == 7
    assert total(families, "http_server_request_duration_seconds_sum", http_response_status_code="200") == 0.2


MULTIPROCESS = """
import json
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from responses_mw.telemetry import instruments, metrics

metrics.STREAMS_OPEN.add(2)
metrics.LEASES_LOST.add()
metrics.QUEUE_DEPTH.set(7)
host = CollectorRegistry()
MultiProcessCollector(host)
print(json.dumps([instruments.exposition("")[0].decode(), generate_latest(host).decode()]))
"""


def test_a_host_in_multiprocess_mode_also_exports_the_metrics_of_responses_mw(tmp_path: Path) -> None:
    """vLLM sets `PROMETHEUS_MULTIPROC_DIR`."""
    ours, hosts = map(parsed, run_script(MULTIPROCESS, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)))
    for families in (ours, hosts):
        assert total(families, "responses_mw_streams_open") == 2
        assert total(families, "responses_mw_leases_lost_total") == 1
        assert total(families, "responses_mw_queue_depth") == 7


def test_the_number_of_series_is_bounded() -> None:
    registry = CollectorRegistry()
    counter = instruments.Counter("bounded", "1", "", {"n": (), "m": ()}, registry=registry)
    for number in range(instruments.MAX_SERIES + 500):
        counter.add(1, {"n": number})
    [family] = registry.collect()
    samples = [sample for sample in family.samples if sample.name == "bounded_total"]
    assert len(samples) == instruments.MAX_SERIES + 1
    assert registry.get_sample_value("bounded_total", {"n": "_OTHER", "m": "_OTHER"}) == 500


def test_an_attribute_that_is_not_a_label_is_an_error() -> None:
    with pytest.raises(ValueError, match="undeclared"):
        metrics.CACHE_LOOKUPS.add(1, {"reason": "x"})


def test_series_whose_labels_are_known_start_at_zero() -> None:
    counter = instruments.Counter("zero", "1", "", {"kind": ["a"]}, registry=(registry := CollectorRegistry()))
    assert registry.get_sample_value("zero_total", {"kind": "a"}) == 0
    counter.add(1, {"kind": "b"})
    assert registry.get_sample_value("zero_total", {"kind": "b"}) == 1


def test_metrics_that_dashboards_and_alerts_query_are_exported() -> None:
    assert set(EMITTED) <= parsed(instruments.exposition("")[0].decode()).keys()


def test_the_memory_limit_is_that_of_the_container_or_else_of_the_machine(tmp_path: Path) -> None:
    machine = metrics.memory_limit(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert metrics.memory_limit(tmp_path) == machine > 100_000_000
    (tmp_path / "memory.max").write_text("67108864\n")
    assert metrics.memory_limit(tmp_path) == 64 * 1024 * 1024
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # version 1 without a limit
    assert metrics.memory_limit(tmp_path) == machine


# -- turns ----------------------------------------------------------------------------------------------------------------------


def document(output_tokens: int | None = None) -> dict[str, Any]:
    usage = None if output_tokens is None else {"input_tokens": 7, "output_tokens": output_tokens}
    return {"id": "resp_1", "output": [], "usage": usage, "conversation": None, "store": True}


def recorded(provider: str, name: str) -> dict[tuple[str, ...], float]:
    """Return the sums recorded for `provider`, by the labels that matter here."""
    families = [one for one in instruments.REGISTRY.collect() if name in (one.name, f"{one.name}_total")]
    wanted = ("gen_ai_request_model", "error_type")
    return {
        tuple(one.labels[name] for name in wanted if one.labels.get(name)): one.value
        for family in families
        for one in family.samples
        if one.name.endswith(("_sum", "_total")) and one.labels["gen_ai_provider_name"] == provider
    }


def test_a_turn_counts_only_its_own_tokens() -> None:
    doc = document(10)
    turn = TurnSpan({**CHAT, "model": "counted"}, doc, "count")
    turn.start_answer({})
    details = {"input_tokens_details": {"cached_tokens": 16}, "output_tokens_details": {"reasoning_tokens": 3}}
    doc["usage"] = {"input_tokens": 27, "output_tokens": 15, **details}
    turn.finish("stop")
    turn.close()
    counted = {kind: recorded("count", f"{USAGE}_{kind}_total") for kind in ("input_tokens", "cache_read_input_tokens")}
    assert counted == {"input_tokens": {("counted",): 20}, "cache_read_input_tokens": {("counted",): 16}}
    counted = {kind: recorded("count", f"{USAGE}_{kind}_total") for kind in ("output_tokens", "reasoning_output_tokens")}
    assert counted == {"output_tokens": {("counted",): 5}, "reasoning_output_tokens": {("counted",): 3}}
    assert recorded("count", TIME_TO_FIRST_CHUNK).keys() == {("counted",)}
    per_token = recorded("count", TIME_PER_OUTPUT_TOKEN)[("counted",)]
    whole = recorded("count", DURATION)[("counted",)]
    assert per_token == pytest.approx((whole - recorded("count", TIME_TO_FIRST_CHUNK)[("counted",)]) / 4)


def test_the_time_per_token_of_a_continued_turn_excludes_tokens_before_the_break() -> None:
    doc = document()
    turn = TurnSpan({**CHAT, "model": "continued"}, doc, "continue")
    turn.continues(100)
    turn.start_answer({})
    doc["usage"] = {"input_tokens": 27, "output_tokens": 105}
    turn.finish("stop")
    per_token = recorded("continue", TIME_PER_OUTPUT_TOKEN)[("continued",)]
    whole = recorded("continue", DURATION)[("continued",)]
    assert per_token == pytest.approx((whole - recorded("continue", TIME_TO_FIRST_CHUNK)[("continued",)]) / 4)


def test_a_failed_turn_is_recorded_with_its_error_type_and_a_cancelled_turn_is_not_recorded() -> None:
    failing, cancelled = (TurnSpan({**CHAT, "model": "a name of the caller's"}, document(), "fail") for _ in range(2))
    failing.fail(ValueError("a secret"))
    failing.close()
    cancelled.start_answer({})
    cancelled.close()
    cancelled.finish("stop")
    assert recorded("fail", DURATION).keys() == {("_OTHER", "ValueError")}


def test_only_models_that_answered_are_label_values_and_their_number_is_bounded() -> None:
    known = instruments.KnownNames(listed=1, unlisted=2)
    assert known.known("a") == "_OTHER"
    for name in ("a", "b", "c"):
        known.admit(name)
    assert [known.known(name) for name in ("a", "b", "c")] == ["a", "b", "_OTHER"]


async def test_listed_models_are_label_values_whatever_names_clients_invent(
    start_at: Any, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some servers answer to any name."""
    monkeypatch.setattr(metrics, "MODELS", instruments.KnownNames(listed=1, unlisted=2))
    ours = start_at("proxy")
    for model in ("a", "b", "c", "tiny"):
        upstream.whole(completion({"content": "Hi"}))
        await whole(ours, model=model)
    assert [metrics.MODELS.known(name) for name in ("a", "b", "c", "tiny")] == ["a", "b", "_OTHER", "tiny"]


def test_a_long_model_name_is_no_label_value() -> None:
    """Each of the many samples of a histogram repeats the name."""
    known = instruments.KnownNames(listed=1, unlisted=2)
    known.admit("x" * 10_000)
    known.add_listed(["x" * 10_000])
    assert known.known("x" * 10_000) == "_OTHER"


# -- the admin port --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def environment() -> dict[str, str]:
    """No variables: nothing is exported."""
    return {}


@pytest.mark.timeout(120)
async def test_the_admin_port_serves_metrics_without_a_collector(upstream: ScriptedUpstream, start: Start) -> None:
    lonely = start("serve", redis__url="redis://127.0.0.1:1", redis__timeout=0.2, limits__requests_per_minute=2)
    front = await start("serve", cache__mode="exact", limits__requests_per_minute=2).is_ready()
    await exercised(front, upstream)
    await lonely.is_ready("/livez")
    upstream.stream(*HELLO)
    await lonely.ours.client.responses.create(model="tiny", input="hi")
    families, of_lonely = await scraped(front), await scraped(lonely)
    assert families.keys() >= EMITTED.keys()
    for name, labels in EMITTED.items():
        if name.startswith(("gen_ai_execute_tool", "gen_ai_client_operation", "responses_mw_ingestion_duration")):
            continue  # this test requests neither a tool nor an embedding, and adds no file to a vector store
        samples = [*families[name].samples, *of_lonely[name].samples]
        assert samples, name
        assert labels <= {label for sample in samples for label in sample.labels}, name

    def value(name: str, **labels: str) -> float:
        return total(families, name, **labels)

    assert value("gen_ai_client_inference_duration_seconds_count", gen_ai_request_model="tiny") == 2
    assert value("gen_ai_client_inference_duration_seconds_count", error_type="500") == 1
    assert value("gen_ai_client_inference_usage_output_tokens_total", gen_ai_token_modality="text") == 2
    assert value("http_server_request_duration_seconds_count", http_route="/v1/responses", http_response_status_code="200") == 2
    assert value("responses_mw_events_appended_total") >= 1
    assert value("responses_mw_streams_open") == value("responses_mw_jobs_running") == 0
    assert value("http_server_active_requests") == 0
    assert value("responses_mw_cache_lookups_total", result="miss") >= 1
    assert value("responses_mw_limits_refused_total", limit="requests") == 1
    assert value("process_resident_memory_bytes") > 10_000_000
    assert total(of_lonely, "responses_mw_limits_unchecked_total", limit="requests") == 1
    assert total(of_lonely, "responses_mw_state_errors_total", error_type="ConnectionError") >= 1


async def exercised(front: Command, upstream: ScriptedUpstream) -> None:
    """Stream a response, run a job that fails, and exceed the server's limit of two requests."""
    upstream.stream(*HELLO)
    stream = await front.ours.client.responses.create(model="tiny", input="hi", stream=True)
    assert [event.type async for event in stream][-1] == "response.completed"
    job = await front.ours.client.responses.create(model="tiny", input="ho", background=True)
    while job.status not in ("completed", "failed"):  # the upstream answers 500
        job = await front.ours.client.responses.retrieve(job.id)
    bearer = {"authorization": f"Bearer {front.ours.client.api_key}"}
    refused = await front.ours.http.post("/v1/responses", json={"model": "tiny", "input": "hi"}, headers=bearer)
    assert refused.status_code == 429


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics-text;version=x"]
)
async def test_openmetrics_is_served_to_a_scraper_that_accepts_it(accept: str) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Admin({})), base_url="http://x") as admin:
        answer = await admin.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in openmetrics_families(answer.text)}  # type: ignore[no-untyped-call]
    [build] = families["responses_mw_build"].samples
    assert build.labels.keys() == {"version", "python_version"}
    assert answer.text.endswith("# EOF\n")


async def scraped(command: Command) -> dict[str, Any]:
    answer = await command.admin.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(answer.text)


def total(families: dict[str, Any], name: str, **labels: str) -> float:
    """Add up the samples with these labels."""
    family = families[name.removesuffix("_count").removesuffix("_sum")]
    return float(sum(one.value for one in family.samples if one.name == name and labels.items() <= one.labels.items()))


@pytest.mark.timeout(120)
async def test_a_worker_process_reports_running_and_waiting_jobs(upstream: ScriptedUpstream, start: Start) -> None:
    front = await start("serve", jobs__concurrency=0).is_ready()
    held = Signal()
    upstream.stream(text("a"), held, *HELLO)
    for _ in range(3):
        await front.ours.client.responses.create(model="tiny", input="hi", background=True)
    worker = await start("worker", jobs__concurrency=1).is_ready()
    try:
        async with asyncio.timeout(60):
            while total(families := await scraped(worker), "responses_mw_queue_depth") < 2:
                await asyncio.sleep(0.05)
            assert total(families, "responses_mw_queue_age_seconds") > 0
            while total(await scraped(worker), "responses_mw_jobs_running") != 1:
                await asyncio.sleep(0.05)
    finally:
        held.set()
