"""Usage per owner and day, on the admin port."""

from __future__ import annotations

import asyncio
from dataclasses import astuple
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.processes import free_port
from responses_mw import create_app
from responses_mw.ids import random_part
from responses_mw.state import Damaged, State, StateUnavailable, connect
from responses_mw.telemetry.instruments import exposition
from responses_mw.telemetry.metrics import MAX_MODELS, MAX_OWNERS, MAX_ROWS, USAGE, UsageMeter
from tests.support.configured import make_settings
from tests.support.scripted import call, completion, error, finish, usage
from tests.support.scripted_responses import ScriptedResponses, item, response
from tests.support.servers import lifespan
from tests.support.valkey import Server

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

pytestmark = pytest.mark.usefixtures("nobody_else")

ANSWER = completion({"role": "assistant", "content": "hello"}, counts={"prompt_tokens": 7, "completion_tokens": 5})


def owner_of(key: str) -> str:
    return sha256(f"credential\0Bearer {key}".encode()).hexdigest()[:32]


def taken(owner: str) -> tuple[int, ...]:
    """Take the counts of `owner`, who has used one model."""
    [counts] = USAGE.take()[owner].models.values()
    return astuple(counts)


async def used(settings: dict[str, Any], query: str = "") -> httpx.Response:
    """Get the usage from another replica."""
    port = free_port()
    async with (
        lifespan(create_app(make_settings(**settings, server__admin_port=port))),
        httpx.AsyncClient(verify=False, trust_env=False) as http,
    ):
        return await http.get(f"http://127.0.0.1:{port}/usage{query}")


async def test_usage_is_summed_by_owner_and_day(serve: Serve, upstream: ScriptedUpstream, redis_url: str) -> None:
    alice, bob, failing = (random_part() for _ in range(3))
    settings: dict[str, Any] = {"upstream__url": serve(upstream), "redis__url": redis_url, "cache__mode": "exact"}
    for _ in range(2):  # replicas, one after the other
        app = create_app(make_settings(**settings))
        async with lifespan(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            for key in (alice, bob):
                upstream.whole(ANSWER)
                body = {"model": "tiny", "input": random_part()}
                for _ in range(1 if key == bob else 2):  # the second one is a hit of the cache
                    answer = await http.post("/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})
                    assert answer.status_code == 200
            upstream.whole(error("no", 500), 500)
            await http.post(
                "/v1/responses", json={"model": "tiny", "input": "x"}, headers={"authorization": f"Bearer {failing}"}
            )
    found = (await used(settings)).json()
    assert found["day"] == datetime.now(UTC).date().isoformat()
    for key, responses in ((alice, 4), (bob, 2)):
        counts = {"input_tokens": 14, "cached_tokens": 0, "output_tokens": 10, "requests_without_usage": 0}
        expected = {"responses": responses, **counts}
        assert found["owners"][owner_of(key)] == {**expected, "models": {"tiny": expected}}
    assert owner_of(failing) not in found["owners"]
    assert (await used(settings, "?day=2020-01-01")).json() == {"day": "2020-01-01", "owners": {}}
    for query in ("?day=yesterday", "?owner=x", "?day=2020-01-01&day=2020-01-02"):
        assert (await used(settings, query)).status_code == 400


async def test_tokens_are_counted_if_the_upstreams_usage_has_a_member_cache(serve: Serve) -> None:
    upstream, key = ScriptedResponses(), random_part()
    upstream.whole(response(item(), usage={"input_tokens": 3, "output_tokens": 2, "cache": {"hits": 0}}))
    app = create_app(make_settings(upstream__url=serve(upstream), upstream__api="responses"))
    async with lifespan(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        body = {"model": "tiny", "input": "Hi", "store": False}
        answer = await http.post("/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        assert taken(owner_of(key)) == (1, 3, 0, 2, 0)


def counted() -> float:
    """Return the number of output tokens in the metrics of model turns."""
    lines = exposition("")[0].decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("gen_ai_client_inference_usage_output_tokens_total")
    )


@pytest.mark.parametrize("streams", [False, True], ids=["json", "stream"])
async def test_the_tokens_of_a_failed_turn_are_counted(serve: Serve, upstream: ScriptedUpstream, streams: bool) -> None:
    key, before = random_part(), counted()
    upstream.stream(call("{}"), finish("tool_calls"), usage(prompt=3, completion=2))  # the call has no name
    app = create_app(make_settings(upstream__url=serve(upstream)))
    async with lifespan(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
        body = {"model": "tiny", "input": "Hi", "store": False, "stream": streams}
        answer = await http.post("/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})
        assert "without naming it" in answer.text
        assert taken(owner_of(key)) == (1, 3, 0, 2, 0)
        assert counted() - before == 2


async def test_a_retried_batch_is_added_once(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    state, owner = State(connect(server.url)), random_part()
    try:
        USAGE.take()
        USAGE.count(owner, "tiny", {"input_tokens": 3, "output_tokens": 4})
        server.kill()
        with pytest.raises(StateUnavailable):
            await state.ledger.flush()
        USAGE.count(owner, "tiny", {"input_tokens": 10, "output_tokens": 1})
        server.start()
        for _ in range(2):
            await state.ledger.flush()
        today = datetime.now(UTC).date()
        found = (await state.ledger.read(today))[owner]
        assert [astuple(counts) for counts in found.models.values()] == [(2, 13, 0, 5, 0)]
        assert (found.responses, found.input_tokens, found.output_tokens) == (2, 13, 5)
        with server.client() as client:  # the markers of applied batches expire
            for key in client.scan_iter("rmw:{usage}:batch:*"):
                assert client.ttl(key) > 0
            for key in (f"rmw:{{usage}}:{today}", f"rmw:{{usage}}:{today}:models"):
                assert client.ttl(key) > 30 * 24 * 3600
    finally:
        await state.aclose()
        server.kill()


async def test_a_damaged_key_is_logged_and_recording_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("responses_mw.state.usage.INTERVAL", 0.01)
    server = Server(tmp_path)
    server.start()
    state, owner, today = State(connect(server.url)), random_part(), datetime.now(UTC).date()
    try:
        with server.client() as client:
            client.set(f"rmw:{{usage}}:{today}", "damaged")
            USAGE.take()
            USAGE.count(owner, "tiny", {"input_tokens": 3})
            async with state.ledger.recording(), asyncio.timeout(60):
                while "cannot record usage" not in caplog.text:
                    await asyncio.sleep(0.01)
                client.delete(f"rmw:{{usage}}:{today}")
                while owner not in await state.ledger.read(today):
                    await asyncio.sleep(0.01)
            client.hset(f"rmw:{{usage}}:{today}", owner, "1 2 three")
            with pytest.raises(Damaged):
                await state.ledger.read(today)
    finally:
        await state.aclose()
        server.kill()


async def test_the_number_of_owners_is_limited(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    state = State(connect(server.url))
    try:
        for part in range(2):
            USAGE.take()
            for number in range(MAX_OWNERS - 10):
                USAGE.count(f"owner{part}-{number}", "tiny", {"input_tokens": 1})
            await state.ledger.flush()
        found = await state.ledger.read(datetime.now(UTC).date())
        assert len(found) == MAX_OWNERS + 1
        others = found["_OTHER"]
        assert (others.responses, others.input_tokens) == (MAX_OWNERS - 20, MAX_OWNERS - 20)
        assert astuple(others.models["tiny"]) == (MAX_OWNERS - 20, MAX_OWNERS - 20, 0, 0, 0)
    finally:
        await state.aclose()
        server.kill()


async def test_the_number_of_an_owners_models_is_limited(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    state, owner = State(connect(server.url)), random_part()
    try:
        USAGE.take()
        for part in range(2):
            for number in range(MAX_MODELS - 2):
                USAGE.count(owner, f"model{part}-{number}", {"input_tokens": 1})
            USAGE.count(owner, "", {"input_tokens": 1})
            USAGE.count(owner, "x" * 1000, {"input_tokens": 1})
            USAGE.count(owner, "two words", {"input_tokens": 1})
            await state.ledger.flush()
        found = (await state.ledger.read(datetime.now(UTC).date()))[owner]
        assert found.responses == found.input_tokens == 2 * (MAX_MODELS - 2) + 6
        assert len(found.models) == MAX_MODELS
        assert found.models["_OTHER"].responses == 2 * (MAX_MODELS - 2) + 6 - (MAX_MODELS - 1)
    finally:
        await state.aclose()
        server.kill()


def test_the_models_of_all_owners_are_limited_in_memory() -> None:
    meter = UsageMeter()
    for number in range(MAX_ROWS):
        meter.count(f"owner{number // MAX_MODELS}", f"model{number}", {})
    meter.count("owner0", "one more", None)
    meter.count("another owner", "tiny", None)
    taken = meter.take(MAX_MODELS)
    assert set(taken) == {"owner0"}
    assert meter.take(2 * MAX_ROWS)["another owner"].models.keys() == {"_OTHER"}
    meter.count("another owner", "tiny", None)
    assert meter.take()["another owner"].models.keys() == {"tiny"}


async def test_usage_that_another_version_has_stored_is_kept(tmp_path: Path) -> None:
    server, owner, today = Server(tmp_path), random_part(), datetime.now(UTC).date()
    server.start()
    state = State(connect(server.url))
    try:
        with server.client() as client:
            client.hset(f"rmw:{{usage}}:{today}", owner, "9 8 7 6")  # an older version does not count models
            client.hset(f"rmw:{{usage}}:{today}:models", f"{owner} tiny", "1 1 1 1 1 77")  # a newer one counts more
            USAGE.take()
            USAGE.count(owner, "tiny", {"input_tokens": 3, "output_tokens": 4})
            await state.ledger.flush()
            assert client.hget(f"rmw:{{usage}}:{today}", owner) == b"10 11 7 10"
            assert client.hget(f"rmw:{{usage}}:{today}:models", f"{owner} tiny") == b"2 4 1 5 1 77"
        found = (await state.ledger.read(today))[owner]
        assert (found.responses, found.requests_without_usage, found.models["tiny"].output_tokens) == (10, 1, 5)
    finally:
        await state.aclose()
        server.kill()
