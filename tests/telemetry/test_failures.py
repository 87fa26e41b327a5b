"""No failure is silent: each produces a log line, and a metric that fires an alert."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.processes import free_port
from responses_mw import create_app
from responses_mw.cli.check import check
from responses_mw.cli.serve import ServeSettings
from responses_mw.telemetry.metrics import UPSTREAM_UP
from tests.support.alerts import Samples, assert_fires, scrape
from tests.support.configured import make_settings
from tests.support.metrics import sample_value
from tests.support.scripted import completion, error, json_answer, text
from tests.support.servers import lifespan
from tests.support.valkey import Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve


SECRET = "a secret that all the replicas of the deployment have"
UNSTORED = "new responses are answered, but not stored"


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "valkey", "--maxmemory-policy", "noeviction")
    server.start()
    yield server
    server.kill()


def value(name: str, **labels: str) -> float:
    return sample_value(name, labels) or 0.0


async def create(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await http.post("/v1/responses", json={"model": "tiny", "input": "hi", **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def warned(caplog: pytest.LogCaptureFixture, **facts: Any) -> bool:
    """Return whether the only warning about a failed run has these facts."""
    [found] = [one for one in caplog.records if one.name == "responses_mw.runs" and one.levelno == logging.WARNING]
    known: dict[str, Any] = vars(found)["facts"]
    return facts.items() <= known.items()


def grown(before: Samples, after: Samples, name: str, **labels: str) -> float:
    """Return by how much all series with these labels have grown."""
    shown = [f"{label}={json.dumps(value)}" for label, value in labels.items()]
    series = [one for one in after if one.startswith(f"{name}{{") and all(label in one for label in shown)]
    return sum(after[one][1] - before.get(one, ("", 0.0))[1] for one in series)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(make_settings(**{"redis__timeout": 20, **settings}))
    transport = httpx.ASGITransport(app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as http:
        yield http


@pytest.mark.parametrize("streams", [True, False])
async def test_a_failed_run_is_reported_by_a_warning_a_metric_and_alerts(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str, caplog: pytest.LogCaptureFixture, streams: bool
) -> None:
    before = scrape()
    if streams:
        upstream.stream(text("Hel"), {"error": {"message": "out of memory", "code": 500}}, done=False)
    else:
        upstream.queue(json_answer(error("out of memory", 500), 500))
    async with serving(upstream__url=serve(upstream), redis__url=redis_url) as http:
        answer = await http.post("/v1/responses", json={"model": "tiny", "input": "hi", "stream": streams})
    assert (answer.status_code == 200) == streams
    after, kind = scrape(), "stream" if streams else "json"
    assert warned(caplog, outcome="failed", model="tiny", stream=streams)
    assert grown(before, after, "responses_mw_responses_total", status="failed", kind=kind) == 1
    requests = partial(grown, before, after, "http_server_request_duration_seconds_count", http_route="/v1/responses")
    assert (requests(), requests(error_type="")) == (1, 0)
    for alert in ("ResponsesFailing", "ResponsesUpstreamFailing", *(() if streams else ("ResponsesErrorRate",))):
        assert_fires(alert, before, after)


async def test_a_failed_background_response_is_reported_by_a_warning_a_metric_and_an_alert(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = scrape()
    upstream.queue(json_answer(error("out of memory", 500), 500))
    async with serving(upstream__url=serve(upstream), redis__url=redis_url, auth__secret_keys=[SECRET]) as http:
        job = await create(http, background=True)
        async with asyncio.timeout(60):
            while job["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.02)
                job = (await http.get(f"/v1/responses/{job['id']}")).json()
            while not [one for one in caplog.records if one.name == "responses_mw.runs"]:
                await asyncio.sleep(0.02)
    after = scrape()
    assert job["status"] == "failed"
    assert warned(caplog, outcome="failed", response=job["id"], upstream_status=500)
    assert grown(before, after, "responses_mw_responses_total", status="failed", kind="background") == 1
    assert_fires("ResponsesFailing", before, after)


async def test_an_unreachable_upstream_is_reported_by_a_metric_and_an_alert(redis_url: str) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    UPSTREAM_UP.set(1, {"upstream": "default"})
    before = scrape()
    async with serving(upstream__url=nobody, redis__url=redis_url, server__admin_port=free_port()):
        async with asyncio.timeout(60):
            while sample_value("responses_mw_upstream_up", {"upstream": "default"}) != 0:
                await asyncio.sleep(0.02)
    assert_fires("ResponsesUpstreamDown", before, scrape())


async def test_an_endpoint_that_is_left_out_while_others_answer_is_reported_by_a_metric_and_an_alert(
    serve: Serve, upstream: ScriptedUpstream, redis_url: str
) -> None:
    before, dead = scrape(), f"127.0.0.1:{free_port()}"
    labels = {"upstream": "default", "endpoint": dead}
    urls = f"{serve(upstream)},http://{dead}"
    async with serving(upstream__url=urls, redis__url=redis_url, server__admin_port=free_port()):
        async with asyncio.timeout(60):
            while sample_value("responses_mw_upstream_endpoint_ejected", labels) != 1:
                await asyncio.sleep(0.02)
            while sample_value("responses_mw_upstream_up", {"upstream": "default"}) != 1:
                await asyncio.sleep(0.02)
        assert_fires("ResponsesEndpointEjected", before, scrape())


async def test_an_unavailable_redis_is_reported_by_a_warning_metrics_and_alerts(
    serve: Serve, upstream: ScriptedUpstream, valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.whole(completion({"role": "assistant", "content": "hello"}))
    async with serving(upstream__url=serve(upstream), redis__url=valkey.url, redis__timeout=1) as http:
        before = scrape()
        valkey.kill()
        document = await create(http)
    after = scrape()
    assert not document["store"]
    assert f"response {document['id']} is not stored" in caplog.text
    assert grown(before, after, "responses_mw_responses_unstored_total", reason="redis_unavailable") == 1
    for alert in ("ResponsesUnstored", "ResponsesStateErrors"):
        assert_fires(alert, before, after)


async def test_a_full_redis_is_reported_by_the_log_readyz_the_check_metrics_and_alerts(
    serve: Serve,
    upstream: ScriptedUpstream,
    valkey: Server,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    port, before = free_port(), scrape()
    for _ in range(3):
        upstream.whole(completion({"role": "assistant", "content": "hello"}))
    app = create_app(
        make_settings(upstream__url=serve(upstream), redis__url=valkey.url, server__admin_port=port, redis__timeout=20)
    )
    transport = httpx.ASGITransport(app)
    with caplog.at_level(logging.INFO, "responses_mw"):
        async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            with valkey.client() as client:
                client.config_set("maxmemory", client.info("memory")["used_memory"])
            documents = [await create(http) for _ in range(3)]
            async with httpx.AsyncClient(verify=False, trust_env=False) as admin:
                ready = await admin.get(f"http://127.0.0.1:{port}/readyz")
            settings = ServeSettings(port=0, upstream=app.settings.upstream, redis=app.settings.redis)
            assert await check(settings, []) == 1
    assert not any(document["store"] for document in documents)
    [warning] = [one for one in caplog.records if one.name == "responses_mw.state.store" and UNSTORED in one.getMessage()]
    assert warning.levelno == logging.WARNING
    lines = [one.getMessage() for one in caplog.records if one.name == "responses_mw.access"]
    assert sum("outcome=completed" in line and "stored=false unstored=redis_full" in line for line in lines) == 3
    assert UNSTORED in capsys.readouterr().err
    assert ready.status_code == 200
    assert any(UNSTORED in one for one in ready.json()["warnings"])
    after = scrape()
    assert grown(before, after, "responses_mw_responses_unstored_total", reason="redis_full") == 3
    used = value("responses_mw_redis_memory_used_bytes") / value("responses_mw_redis_memory_max_bytes")
    assert used > 0.9
    assert_fires("ResponsesUnstored", before, after)
    assert_fires("ResponsesRedisMemory", before, after)
