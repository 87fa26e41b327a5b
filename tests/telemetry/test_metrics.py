"""Instruments, and the text that Prometheus reads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from deploy.queries import EMITTED
from responses_mw.telemetry import INSTRUMENTS, Server, Turn, exposition, metrics, names
from scripted import HELLO, Signal, text

if TYPE_CHECKING:
    from scripted import ScriptedUpstream

    from .conftest import Command, Start

CHAT = {"model": "m", "stream": True, "messages": []}


def parsed(text: str) -> dict[str, Any]:
    """The families by name, a counter's with its suffix."""
    families = text_string_to_metric_families(text)
    return {f"{one.name}_total" if one.type == "counter" else one.name: one for one in families}


def shown(*instruments: metrics.Instrument) -> dict[str, Any]:
    return parsed(exposition(instruments).decode())


# -- the text --------------------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.text(min_size=1), st.lists(st.integers(0, 10**6), min_size=1))
def test_a_counter_is_read_as_it_was_counted_whatever_its_labels_hold(value: str, amounts: list[int]) -> None:
    counter = metrics.Counter("a.b", "{thing}", "Things.")
    for amount in amounts:
        counter.add(amount, {"of.kind": value})
    [sample] = shown(counter)["a_b_total"].samples
    assert (sample.labels, sample.value) == ({"of_kind": value}, sum(amounts))


@settings(max_examples=25)
@given(st.lists(st.floats(0, 20), min_size=1))
def test_a_histogram_counts_each_value_in_every_bucket_that_it_is_not_above(values: list[float]) -> None:
    histogram = metrics.Histogram("a.b", "s", "Times.", (0.0, 1.0, 2.5, 10.0))
    for value in values:
        histogram.record(value, {})
    samples = shown(histogram)["a_b_seconds"].samples
    buckets = {float(one.labels["le"]): one.value for one in samples if one.name.endswith("_bucket")}
    assert buckets == {bound: sum(value <= bound for value in values) for bound in (0.0, 1.0, 2.5, 10.0, float("inf"))}
    [total] = [one.value for one in samples if one.name.endswith("_sum")]
    assert total == pytest.approx(sum(values))


def test_attributes_without_end_end_in_one_series() -> None:
    counter = metrics.Counter("a", "1", "")
    for number in range(metrics.MOST_SERIES + 500):
        counter.add(1, {"n": number})
    samples = shown(counter)["a_total"].samples
    assert len(samples) == metrics.MOST_SERIES + 1
    assert samples[-1].labels == {"otel_metric_overflow": "true"}
    assert samples[-1].value == 500


def test_what_dashboards_and_alerts_ask_for_is_there() -> None:
    assert set(EMITTED) <= {instrument.prometheus for instrument in INSTRUMENTS}


# -- what a turn tells -----------------------------------------------------------------------------------------------------------


def document(output_tokens: int | None = None) -> dict[str, Any]:
    usage = None if output_tokens is None else {"input_tokens": 7, "output_tokens": output_tokens}
    return {"id": "resp_1", "output": [], "usage": usage, "conversation": None, "store": True}


def recorded(provider: str, instrument: metrics.Histogram) -> dict[tuple[str, ...], float]:
    """Sums by the labels that matter here, of one provider."""
    samples = shown(instrument)[instrument.prometheus].samples
    wanted = ("gen_ai_request_model", "gen_ai_token_type", "error_type")
    return {
        tuple(one.labels[name] for name in wanted if name in one.labels): one.value
        for one in samples
        if one.name.endswith("_sum") and one.labels["gen_ai_provider_name"] == provider
    }


def test_a_turn_counts_its_own_tokens_only() -> None:
    doc = document(10)
    turn = Turn({**CHAT, "model": "counted"}, doc, Server("count"))
    turn.began({})
    doc["usage"] = {"input_tokens": 27, "output_tokens": 15}
    turn.ended("stop")
    turn.close()
    assert recorded("count", names.TOKEN_USAGE) == {("counted", "input"): 20, ("counted", "output"): 5}
    assert recorded("count", names.TIME_TO_FIRST_TOKEN).keys() == {("counted",)}
    per_token = recorded("count", names.TIME_PER_OUTPUT_TOKEN)[("counted",)]
    whole = recorded("count", names.OPERATION_DURATION)[("counted",)]
    assert per_token == pytest.approx((whole - recorded("count", names.TIME_TO_FIRST_TOKEN)[("counted",)]) / 4)


def test_a_turn_that_failed_is_told_by_the_kind_of_its_error_and_one_that_was_cancelled_is_not() -> None:
    failing, cancelled = (Turn({**CHAT, "model": "a name of the caller's"}, document(), Server("fail")) for _ in range(2))
    failing.failed(ValueError("a secret"))
    failing.close()
    cancelled.began({})
    cancelled.close()
    cancelled.ended("stop")
    assert recorded("fail", names.OPERATION_DURATION).keys() == {("_OTHER", "ValueError")}


def test_models_are_told_apart_once_they_have_answered_and_only_so_many() -> None:
    known = metrics.KnownNames(2)
    assert known.known("a") == "_OTHER"
    for name in ("a", "b", "c"):
        known.admit(name)
    assert [known.known(name) for name in ("a", "b", "c")] == ["a", "b", "_OTHER"]


# -- the port --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def environment() -> dict[str, str]:
    """Nothing is sent anywhere."""
    return {}


@pytest.mark.timeout(120)
async def test_metrics_are_read_from_the_admin_port_without_any_collector(upstream: ScriptedUpstream, start: Start) -> None:
    lonely = start("serve", redis="redis://127.0.0.1:1", limit_requests_per_minute=2)
    front = await start("serve", cache="exact", limit_requests_per_minute=2).is_ready()
    await exercised(front, upstream)
    await lonely.is_ready("/livez")
    upstream.stream(*HELLO)
    await lonely.ours.client.responses.create(model="tiny", input="hi")
    families, of_lonely = await scraped(front), await scraped(lonely)
    assert families.keys() >= EMITTED.keys()
    for name, labels in EMITTED.items():
        samples = [*families[name].samples, *of_lonely[name].samples]
        assert samples, name
        assert labels <= {label for sample in samples for label in sample.labels}, name

    def value(name: str, **labels: str) -> float:
        return total(families, name, **labels)

    assert value("gen_ai_client_operation_duration_seconds_count", gen_ai_request_model="tiny") == 2
    assert value("gen_ai_client_operation_duration_seconds_count", error_type="502") == 1
    assert value("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == 2
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
    """Has a server that lets two requests pass stream, run a job that fails, and refuse."""
    upstream.stream(*HELLO)
    stream = await front.ours.client.responses.create(model="tiny", input="hi", stream=True)
    assert [event.type async for event in stream][-1] == "response.completed"
    job = await front.ours.client.responses.create(model="tiny", input="ho", background=True)
    while job.status not in ("completed", "failed"):  # the upstream answers 500
        job = await front.ours.client.responses.retrieve(job.id)
    bearer = {"authorization": f"Bearer {front.ours.client.api_key}"}
    refused = await front.ours.http.post("/v1/responses", json={"model": "tiny", "input": "hi"}, headers=bearer)
    assert refused.status_code == 429


async def scraped(command: Command) -> dict[str, Any]:
    answer = await command.admin.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(answer.text)


def total(families: dict[str, Any], name: str, **labels: str) -> float:
    """The sum of the samples of that name that have these labels."""
    family = families[name.removesuffix("_count").removesuffix("_sum")]
    return float(sum(one.value for one in family.samples if one.name == name and labels.items() <= one.labels.items()))


@pytest.mark.timeout(120)
async def test_a_worker_alone_tells_what_it_runs_and_what_waits(upstream: ScriptedUpstream, start: Start) -> None:
    front = await start("serve", workers=0).is_ready()
    held = Signal()
    upstream.stream(text("a"), held, *HELLO)
    for _ in range(3):
        await front.ours.client.responses.create(model="tiny", input="hi", background=True)
    worker = await start("worker", workers=1).is_ready()
    try:
        async with asyncio.timeout(30):
            while total(families := await scraped(worker), "responses_mw_queue_depth") < 2:
                await asyncio.sleep(0.05)
            assert total(families, "responses_mw_queue_age_seconds") > 0
            while total(await scraped(worker), "responses_mw_jobs_running") != 1:
                await asyncio.sleep(0.05)
    finally:
        held.set()
