"""Nothing fails silently: each failure leaves a line in the log and a metric, from which an alert follows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.processes import free_port
from responses_mw import create_app
from responses_mw.cli.check import check
from responses_mw.telemetry import REGISTRY
from tests.support.alerts import assert_fires, scrape
from tests.support.configured import make_settings
from tests.support.scripted import completion
from tests.support.servers import lifespan
from tests.support.valkey import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve


UNSTORED = "new responses are answered, but not stored"


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "valkey", "--maxmemory-policy", "noeviction")
    server.start()
    yield server
    server.kill()


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def create(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await http.post("/v1/responses", json={"model": "tiny", "input": "hi", **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_redis_that_is_nearly_full_is_reported_wherever_an_operator_looks(
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
            async with httpx.AsyncClient(trust_env=False) as admin:
                ready = await admin.get(f"http://127.0.0.1:{port}/readyz")
            assert await check(app.settings, [], lambda: None) == 1
    assert not any(document["store"] for document in documents)
    [warning] = [one for one in caplog.records if one.name == "responses_mw.state.health"]
    assert (warning.levelno, UNSTORED in warning.getMessage()) == (logging.WARNING, True)
    assert UNSTORED in capsys.readouterr().err
    assert ready.status_code == 200
    assert any(UNSTORED in one for one in ready.json()["warnings"])
    after = scrape()
    name = 'responses_mw_responses_unstored_total{job="responses-mw", instance="one", reason="redis_full"}'
    assert after[name][1] - before[name][1] == 3
    used = value("responses_mw_redis_memory_used_bytes") / value("responses_mw_redis_memory_max_bytes")
    assert used > 0.9
    assert_fires("ResponsesUnstored", before, after)
    assert_fires("ResponsesRedisMemory", before, after)
