"""The endpoints of an upstream: the choice of one for a request, failover, and ejection."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import httpx
import orjson
import pytest

from responses_mw.errors import UpstreamError, UpstreamUnreachable
from responses_mw.settings.upstreams import UpstreamSettings
from responses_mw.tasks import in_background
from responses_mw.upstream import Caller, Upstream
from responses_mw.upstream.affinity import session_key
from responses_mw.upstream.client import MAX_MODELS
from responses_mw.upstream.discovery import Address
from responses_mw.upstream.pool import Pool, Wanted, choose
from tests.support.leases import lease


class Network(httpx.AsyncBaseTransport):
    """Hosts that answer, refuse connections (if they are in `away`), do not answer (`silent`), or break off (`broken`)."""

    def __init__(self) -> None:
        self.away: set[str] = set()
        self.broken: set[str] = set()
        self.silent: set[str] = set()
        self.statuses: dict[str, int] = {}
        self.models: list[str] = []
        self.asked: list[str] = []
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        self.asked.append(host)
        self.requests.append(request)
        if host in self.away:
            raise httpx.ConnectError("refused")
        if host in self.silent:
            raise httpx.ConnectTimeout("silent")
        if host in self.broken:
            raise httpx.ReadError("reset")
        names = self.models or [f"model-of-{host}"]
        listed = orjson.dumps({"object": "list", "data": [{"id": name} for name in names]})
        return httpx.Response(self.statuses.get(host, 200), stream=httpx.ByteStream(listed))


def pool_of(*hosts: str) -> Pool:
    pool = Pool("vllm")
    pool.update([Address(f"http://{host}", host, "") for host in hosts])
    return pool


def upstream_of(network: Network, *hosts: str) -> Upstream:
    return Upstream(network, pool_of(*hosts), UpstreamSettings(status_grace=0.0))


@pytest.fixture
def network() -> Network:
    return Network()


KEYS = [session_key(str(number)) for number in range(200)]


def test_a_session_prefers_the_same_endpoint_in_every_process() -> None:
    one, other = pool_of("a", "b", "c"), pool_of("c", "a", "b")
    for key in KEYS:
        assert choose(one.endpoints, key).address == choose(other.endpoints, key).address


def test_a_removed_endpoint_moves_only_its_own_sessions() -> None:
    pool = pool_of("a", "b", "c")
    before = {key: choose(pool.endpoints, key) for key in KEYS}
    kept = [one.address for one in pool.endpoints if one.address.host != "b"]
    [removed] = pool.update(kept)
    assert removed.address.host == "b"
    for key in KEYS:
        assert before[key] is removed or choose(pool.endpoints, key) is before[key]


def test_parallel_requests_of_a_session_stay_together_while_there_is_little_to_do() -> None:
    pool = pool_of("a", "b", "c")
    assert len({lease(pool, KEYS[0]).endpoint for _ in range(4)}) == 1


def test_an_overloaded_endpoint_is_skipped() -> None:
    pool = pool_of("a", "b", "c")
    used = Counter(lease(pool, KEYS[0]).endpoint for _ in range(300))
    assert max(used.values()) <= 1.25 * 100 + 1


def test_without_a_session_the_less_loaded_endpoint_is_chosen() -> None:
    pool = pool_of("a", "b")
    used = Counter(lease(pool).endpoint for _ in range(100))
    assert sorted(used.values()) == [50, 50]


def test_a_released_request_no_longer_counts_as_load() -> None:
    pool = pool_of("a")
    request = lease(pool)
    request.release()
    request.release()
    assert pool.endpoints[0].in_flight == 0


def test_an_endpoint_is_chosen_by_the_model_that_it_serves() -> None:
    pool = pool_of("a", "b")
    pool.endpoints[0].models, pool.endpoints[1].models = {"llama": {}}, {"qwen": {}}
    assert {lease(pool, key, Wanted("qwen")).endpoint.address.host for key in KEYS} == {"b"}
    assert {lease(pool, key, Wanted("unlisted")).endpoint.address.host for key in KEYS} == {"a", "b"}


async def test_the_number_of_remembered_models_is_limited(network: Network) -> None:
    network.models = [str(number) for number in range(MAX_MODELS + 1)]
    upstream = upstream_of(network, "a")
    await upstream.list_models()
    assert len(upstream.known_models) == MAX_MODELS


async def test_an_upstream_without_endpoints_is_unreachable(network: Network) -> None:
    with pytest.raises(UpstreamUnreachable, match="no endpoints") as caught:
        await upstream_of(network).get("/v1/models", Caller())
    assert caught.value.is_overload


async def test_a_failed_connection_is_retried_at_the_next_endpoint(network: Network) -> None:
    network.away = {"a"}
    upstream = upstream_of(network, "a", "b")
    for key in KEYS[:20]:
        assert await upstream.models(Caller(session=key)) == [{"id": "model-of-b"}]


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_a_refused_request_is_retried_at_the_next_endpoint(network: Network, status: int) -> None:
    network.statuses = {"a": status}
    upstream = upstream_of(network, "a", "b")
    for key in KEYS[:20]:
        assert await upstream.models(Caller(session=key)) == [{"id": "model-of-b"}]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 500, 504])
async def test_a_request_with_an_error_answer_is_not_retried(network: Network, status: int) -> None:
    network.statuses = {"a": status, "b": status}
    with pytest.raises(UpstreamError):
        await upstream_of(network, "a", "b").models(Caller(session=KEYS[0]))
    assert len(network.asked) == 1


async def test_a_request_that_may_have_been_processed_is_not_sent_again(network: Network) -> None:
    network.broken = {"a", "b"}
    with pytest.raises(UpstreamUnreachable):
        await upstream_of(network, "a", "b").models(Caller(session=KEYS[0]))
    assert len(network.asked) == 1


async def test_if_all_endpoints_refuse_the_last_answer_is_returned(network: Network) -> None:
    network.statuses = dict.fromkeys("abc", 429)
    with pytest.raises(UpstreamError) as caught:
        await upstream_of(network, "a", "b", "c").models(Caller(session=KEYS[0]))
    assert caught.value.status == 429
    assert sorted(network.asked) == ["a", "b", "c"]


async def test_a_dead_endpoint_gets_no_requests_until_it_answers_a_probe(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.upstream.endpoint.FIRST_EJECTION", 0.05)
    monkeypatch.setattr("responses_mw.upstream.pool.PROBE_INTERVAL", 0.01)
    network.away = {"a"}
    upstream = upstream_of(network, "a", "b")
    async with in_background(upstream.pool.watch(upstream.answers)):
        await asyncio.sleep(0)
        for key in KEYS[:20]:
            await upstream.models(Caller(session=key))
        first, second = upstream.pool.endpoints
        assert first.is_ejected
        assert not second.is_ejected
        assert network.asked.count("a") <= 3  # the first request, and probes
        network.away.clear()
        async with asyncio.timeout(10):
            while any(one.is_ejected for one in upstream.pool.endpoints):
                await asyncio.sleep(0.01)
        network.asked.clear()
        for key in KEYS[:20]:
            await upstream.models(Caller(session=key))
        assert set(network.asked) == {"a", "b"}


async def test_statuses_never_eject_more_than_half_of_the_endpoints(network: Network) -> None:
    network.statuses = dict.fromkeys("abc", 503)
    upstream = upstream_of(network, "a", "b", "c")
    async with in_background(upstream.pool.watch(upstream.answers)):
        await asyncio.sleep(0)
        for key in KEYS[:20]:
            with pytest.raises(UpstreamError):
                await upstream.models(Caller(session=key))
        assert sum(one.is_ejected for one in upstream.pool.endpoints) == 1


async def test_if_all_endpoints_are_dead_one_of_them_is_still_tried(network: Network) -> None:
    network.away = set("abc")
    upstream = upstream_of(network, "a", "b", "c")
    async with in_background(upstream.pool.watch(upstream.answers)):
        await asyncio.sleep(0)
        for key in KEYS[:5]:
            with pytest.raises(UpstreamUnreachable):
                await upstream.models(Caller(session=key))
        assert all(one.is_ejected for one in upstream.pool.endpoints)
        network.away.clear()
        assert await upstream.models(Caller(session=KEYS[0]))
        assert upstream.pool.is_available


async def test_if_all_endpoints_are_ejected_each_of_them_is_tried(network: Network) -> None:
    upstream = upstream_of(network, "a", "b", "c")
    for endpoint in upstream.pool.endpoints:
        endpoint.fail("away")
    network.away = {"a", "b"}
    assert await upstream.models(Caller(session=KEYS[0])) == [{"id": "model-of-c"}]


async def test_one_slow_connection_does_not_eject_an_endpoint(network: Network) -> None:
    network.silent = {"a"}
    upstream = upstream_of(network, "a", "b")
    async with in_background(upstream.pool.watch(upstream.answers)):
        await asyncio.sleep(0)
        first = upstream.pool.endpoints[0]
        key = next(key for key in KEYS if choose(upstream.pool.endpoints, key) is first)
        ejected = []
        for _ in range(2):
            assert await upstream.models(Caller(session=key)) == [{"id": "model-of-b"}]
            ejected.append(first.is_ejected)
        assert ejected == [False, True]


async def test_an_ejection_doubles_with_each_failed_probe(network: Network) -> None:
    pool = pool_of("a", "b")
    endpoint, pauses = pool.endpoints[0], []
    for _ in range(8):
        began = time.monotonic()
        endpoint.readmitted_from = 0.0
        endpoint.fail("away")
        pauses.append(round(endpoint.readmitted_from - began))
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    endpoint.succeed()
    endpoint.fail("away")
    assert round(endpoint.readmitted_from - time.monotonic()) == 1
