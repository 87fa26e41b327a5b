"""The metrics of endpoints: their values, and the number of series."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import httpx
import orjson
import pytest

from responses_mw.errors import UpstreamError
from responses_mw.settings.upstreams import UpstreamSettings
from responses_mw.tasks import in_background
from responses_mw.telemetry import endpoints, instruments
from responses_mw.telemetry.endpoints import MAX_ENDPOINTS
from responses_mw.telemetry.instruments import OTHER, REGISTRY
from responses_mw.upstream import Caller, Upstream
from responses_mw.upstream.affinity import session_key
from responses_mw.upstream.discovery import Address
from responses_mw.upstream.pool import Lease, Pool, choose
from tests.support.leases import lease
from tests.support.metrics import sample_value

NAME = "measured"
KEYS = [session_key("chain", str(number)) for number in range(200)]
ANSWER = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\ndata: [DONE]\n\n'


class Network(httpx.AsyncBaseTransport):
    """Hosts that refuse connections if they are in `away`, and otherwise answer with their status."""

    def __init__(self) -> None:
        self.away: set[str] = set()
        self.statuses: dict[str, int] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host in self.away:
            raise httpx.ConnectError("refused")
        status = self.statuses.get(request.url.host, 200)
        if request.method == "GET":
            return httpx.Response(status, stream=httpx.ByteStream(orjson.dumps({"object": "list", "data": [{"id": "m"}]})))
        return httpx.Response(status, headers={"content-type": "text/event-stream"}, stream=httpx.ByteStream(ANSWER))


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore endpoints left over from other tests in this process."""
    monkeypatch.setattr(endpoints, "USED", Counter())
    monkeypatch.setattr(instruments, "MAX_SERIES", 100_000)


@pytest.fixture
def network() -> Network:
    return Network()


def addresses(*hosts: str) -> list[Address]:
    return [Address(f"http://{host}:8000", host, "") for host in hosts]


@pytest.fixture
def upstream(network: Network) -> Iterator[Upstream]:
    with closing(Pool("vllm", NAME)) as pool:
        pool.update(addresses("a", "b"))
        yield Upstream(network, pool, UpstreamSettings(status_grace=0.0), NAME)


def value(name: str, **labels: str) -> float | None:
    return sample_value(f"responses_mw_upstream_{name}", {"upstream": NAME, **labels})


def change(before: dict[str, float | None], name: str, label: str) -> dict[str, float]:
    now = {key: value(name, **{label: key}) for key in before}
    return {key: (now[key] or 0.0) - (before[key] or 0.0) for key in before}


async def chat(upstream: Upstream, session: str = "") -> None:
    body: Any = {"model": "m", "messages": [], "stream": True}
    with suppress(UpstreamError):
        stream = await upstream.chat(body, Caller(session=session))
        await stream.aclose()


def key_for(upstream: Upstream, host: str) -> str:
    """Return a session that prefers `host`."""
    return next(key for key in KEYS if choose(upstream.pool.endpoints, key).address.host == host)


async def test_requests_are_counted_by_endpoint_and_outcome(network: Network, upstream: Upstream) -> None:
    outcomes = {"a": 200, "b": 404}
    for status, outcome in [(200, "success"), (404, "client_error"), (429, "overloaded"), (500, "server_error")]:
        network.statuses = dict.fromkeys(outcomes, status)
        await chat(upstream, key_for(upstream, "a"))
        assert value("requests_total", endpoint="a:8000", outcome=outcome) == 1
    network.statuses = {}
    network.away = {"a"}
    await chat(upstream, key_for(upstream, "a"))
    assert value("requests_total", endpoint="a:8000", outcome="failed") == 1
    assert value("requests_total", endpoint="b:8000", outcome="success") == 1


def test_requests_in_flight_are_counted_by_endpoint(upstream: Upstream) -> None:
    request = lease(upstream.pool, key_for(upstream, "a"))
    assert value("endpoint_active_requests", endpoint="a:8000") == 1
    assert value("endpoint_active_requests", endpoint="b:8000") == 0
    request.release()
    request.release()
    assert value("endpoint_active_requests", endpoint="a:8000") == 0
    assert value("requests_total", endpoint="a:8000", outcome="cancelled") == 1


async def test_an_ejection_is_counted_and_reported_until_the_endpoint_answers(network: Network, upstream: Upstream) -> None:
    network.away = {"a"}
    async with in_background(upstream.pool.watch(upstream.answers)):
        await asyncio.sleep(0)
        await chat(upstream, key_for(upstream, "a"))
        assert value("ejections_total", endpoint="a:8000") == 1
        assert value("endpoint_ejected", endpoint="a:8000") == 1
        upstream.pool.endpoints[0].succeed()
        assert value("endpoint_ejected", endpoint="a:8000") == 0
        assert value("endpoint_ejected", endpoint="b:8000") == 0


async def test_a_request_that_goes_to_another_endpoint_is_counted_as_failover(network: Network, upstream: Upstream) -> None:
    before = {"endpoint": value("failovers_total", to="endpoint")}
    await chat(upstream, key_for(upstream, "a"))
    assert change(before, "failovers_total", "to") == {"endpoint": 0}
    network.away = {"a"}
    await chat(upstream, key_for(upstream, "a"))
    assert change(before, "failovers_total", "to") == {"endpoint": 1}


async def test_turns_are_counted_by_whether_they_reach_the_preferred_endpoint(network: Network, upstream: Upstream) -> None:
    before = {result: value("affinity_total", result=result) for result in ("hit", "moved", "none")}
    await chat(upstream)
    await chat(upstream, key_for(upstream, "a"))
    assert change(before, "affinity_total", "result") == {"hit": 1, "moved": 0, "none": 1}
    network.away = {"a"}
    await chat(upstream, key_for(upstream, "a"))
    assert change(before, "affinity_total", "result")["moved"] == 1
    preferring = key_for(upstream, "a")
    upstream.pool.endpoints[0].fail("away")
    await chat(upstream, preferring)
    assert change(before, "affinity_total", "result")["moved"] == 2
    upstream.pool.endpoints[0].succeed()
    network.away = set()
    leases = [Lease(upstream.pool, upstream.pool.endpoints[0]) for _ in range(50)]
    await chat(upstream, preferring)
    assert change(before, "affinity_total", "result") == {"hit": 1, "moved": 3, "none": 1}
    for request in leases:
        request.release()


def series_of(name: str) -> set[str]:
    return {
        sample.labels.get("endpoint", "")
        for family in REGISTRY.collect()
        for sample in family.samples
        if "endpoint" in sample.labels and sample.labels.get("upstream") == name
    }


def test_the_series_of_removed_endpoints_are_removed() -> None:
    with closing(Pool("vllm", "churning")) as pool:
        for number in range(3 * MAX_ENDPOINTS):
            pool.update(addresses(f"10.0.{number // 250}.{number % 250 + 1}"))
            if number % 100 == 0:  # all metrics of the process are read
                assert len(series_of("churning")) == 1
        assert OTHER not in series_of("churning")
    assert not series_of("churning")


def test_endpoints_above_the_maximum_share_a_series() -> None:
    with closing(Pool("vllm", "huge")) as pool:
        pool.update(addresses(*(f"host-{number}" for number in range(1000))))
        assert len(series_of("huge")) <= MAX_ENDPOINTS
        for endpoint in pool.endpoints:
            endpoint.meter.begin()
        found = sample_value("responses_mw_upstream_endpoint_active_requests", {"upstream": OTHER, "endpoint": OTHER})
        assert found is not None
        assert found >= 1000 - MAX_ENDPOINTS
        for endpoint in pool.endpoints:
            endpoint.meter.end("success")
    assert not series_of("huge")
