"""Limits of an owner, counted by all replicas together."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect as connect_websocket

from responses_mw.ids import random_part
from responses_mw.state import connect
from responses_mw.state.usage import Usage
from responses_mw.telemetry.instruments import REGISTRY
from tests.support.scripted import HELLO, Signal, text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

SECRET = "a secret that all the replicas of the deployment have"
BODY = {"model": "tiny", "input": "hi"}


@pytest.fixture
async def usage(redis_url: str) -> AsyncIterator[Usage]:
    client = connect(redis_url)
    yield Usage(client)
    await client.aclose()


# -- counted in Redis --------------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(most=st.integers(1, 40), more=st.integers(1, 5))
async def test_a_minutes_worth_may_come_at_once_and_then_no_more(usage: Usage, most: int, more: int) -> None:
    owner = random_part()
    rates = [await usage.request(owner, most) for _ in range(most + more)]
    assert [rate.passes for rate in rates[:most]] == [True] * most
    assert [rate.remaining for rate in rates[:most]] == list(reversed(range(most)))
    assert not any(rate.passes for rate in rates[most:])
    assert rates[0].reset == pytest.approx(60 / most, abs=0.05)
    assert 0 < rates[-1].retry_after <= 60 / most + 0.001  # rounded up to whole milliseconds
    assert rates[-1].reset == pytest.approx(60, abs=2)


async def test_what_was_used_comes_back_evenly(usage: Usage) -> None:
    owner = random_part()
    for _ in range(600):
        await usage.request(owner, 600)
    refused = await usage.request(owner, 600)
    while not refused.passes:
        assert refused.retry_after <= 0.1
        await asyncio.sleep(refused.retry_after)
        refused = await usage.request(owner, 600)


async def test_after_a_failover_to_a_clock_that_is_behind_requests_pass(usage: Usage, redis_url: str) -> None:
    owner = random_part()
    ahead = (time.time() + 360) * 1000  # a minute's worth was used on a clock that was 5 minutes ahead
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"rmw:{{l{owner}}}:rate", f"{ahead:.6f}", px=360_000)
    assert (await usage.request(owner, 600)).passes


async def test_owners_do_not_count_for_one_another(usage: Usage) -> None:
    assert all([(await usage.request(random_part(), 1)).passes for _ in range(5)])


async def test_so_many_may_be_under_way_until_they_leave_or_are_not_renewed(usage: Usage) -> None:
    owner = random_part()
    assert [await usage.enter("streams", owner, name, maximum=2, seconds=60) for name in "abc"] == [True, True, False]
    assert await usage.enter("streams", owner, "a", maximum=2, seconds=60)  # a repeat
    assert await usage.enter("background", owner, "x", maximum=1, seconds=0.05)
    await usage.leave("streams", owner, "a")
    assert await usage.enter("streams", owner, "c", maximum=2, seconds=60)
    await usage.renew("streams", {owner: ["b", "gone"]}, 60)
    assert not await usage.enter("streams", owner, "d", maximum=2, seconds=60)
    while not await usage.enter("background", owner, "y", maximum=1, seconds=60):
        await asyncio.sleep(0.01)


async def test_nothing_of_it_stays_in_redis(usage: Usage, redis_url: str) -> None:
    owner = random_part()
    await usage.request(owner, 60)
    await usage.enter("streams", owner, "a", maximum=2, seconds=60)
    with redis.Redis.from_url(redis_url) as client:
        keys = list(client.scan_iter(f"rmw:{{l{owner}}}:*"))
        assert len(keys) == 2
        assert all(0 < client.pttl(key) <= 60_000 for key in keys)


# -- as a client sees it -----------------------------------------------------------------------------------------------------------


async def post(ours: Ours, owner: str, **body: Any) -> Any:
    return await ours.http.post("/v1/responses", json={**BODY, **body}, headers={"authorization": f"Bearer {owner}"})


async def test_requests_beyond_the_rate_are_refused_in_openais_shape_on_any_replica(
    start: Start, upstream: ScriptedUpstream
) -> None:
    replicas, owner = [start(limits__requests_per_minute=2) for _ in range(2)], random_part()
    for left, replica in zip((1, 0), replicas, strict=True):
        upstream.stream(*HELLO)
        answer = await post(replica, owner)
        assert answer.status_code == 200
        told = {name: answer.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")}
        assert told == {"limit": "2", "remaining": str(left)}
    for replica in replicas:
        refused = await post(replica, owner)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    assert len(upstream.requests) == 2
    assert (await replicas[0].http.get("/v1/responses/x")).status_code == 404  # reading is free
    upstream.stream(*HELLO)
    assert (await post(replicas[0], random_part())).status_code == 200


@pytest.mark.parametrize("path", ["compact", "input_tokens"])
async def test_whatever_the_upstream_works_for_is_a_request(start: Start, upstream: ScriptedUpstream, path: str) -> None:
    ours, owner = start(limits__requests_per_minute=1), random_part()
    upstream.stream(*HELLO)
    assert (await post(ours, owner)).status_code == 200
    asked = len(upstream.requests)
    refused = await ours.http.post(f"/v1/responses/{path}", json=BODY, headers={"authorization": f"Bearer {owner}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(upstream.requests) == asked


async def test_nothing_is_limited_unless_it_is_asked_for(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start()
    upstream.stream(*HELLO)
    answer = await post(ours, random_part())
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit-")]


async def test_a_stream_counts_on_every_replica_while_it_is_open(start: Start, upstream: ScriptedUpstream) -> None:
    ours, other = (start(limits__streams=1) for _ in range(2))
    owner = random_part()
    held = Signal()
    upstream.stream(text("a"), held, *HELLO)
    async with ours.http.stream(
        "POST", "/v1/responses", json={**BODY, "stream": True}, headers={"authorization": f"Bearer {owner}"}
    ):
        refused = await post(other, owner, stream=True)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        told = {name: value for name, value in refused.headers.items() if name.startswith("x-ratelimit-")}
        assert told == {"x-ratelimit-limit-streams": "1", "x-ratelimit-remaining-streams": "0"}
        upstream.stream(*HELLO)
        assert (await post(ours, owner)).status_code == 200  # it is no stream
    held.set()
    upstream.stream(*HELLO)
    async with asyncio.timeout(60):
        while (await post(other, owner, stream=True)).status_code == 429:
            await asyncio.sleep(0.02)


async def test_a_background_response_counts_until_it_has_ended_whoever_ends_it(
    start: Start, upstream: ScriptedUpstream
) -> None:
    ours, owner = start(limits__background=1, auth__secret_keys=[SECRET]), random_part()
    bearer = {"authorization": f"Bearer {owner}"}
    for end in ("finish", "cancel"):
        held = Signal()
        upstream.stream(text("a"), held, *HELLO)
        called = len(upstream.requests)
        created = await post(ours, owner, background=True)
        assert created.status_code == 200, end
        assert (await post(ours, owner, background=True)).status_code == 429
        await upstream.received(called + 1)  # a job cancelled while queued leaves its script to the next one
        path = f"/v1/responses/{created.json()['id']}"
        if end == "cancel":
            assert (await ours.http.post(f"{path}/cancel", headers=bearer)).json()["status"] == "cancelled"
        else:
            held.set()
            async with asyncio.timeout(60):
                while (await ours.http.get(path, headers=bearer)).json()["status"] != "completed":
                    await asyncio.sleep(0.02)
        async with asyncio.timeout(60):
            upstream.stream(*HELLO)
            while (again := await post(ours, owner, background=True)).status_code == 429:
                await asyncio.sleep(0.02)
            while (await ours.http.get(f"/v1/responses/{again.json()['id']}", headers=bearer)).json()["status"] != "completed":
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.05)
        held.set()


async def test_a_response_over_a_websocket_is_a_request_too(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(limits__requests_per_minute=1, uvicorn={"ws": "websockets-sansio"})
    url, bearer = ours.url.replace("http", "ws") + "/v1/responses", {"authorization": f"Bearer {random_part()}"}
    upstream.stream(*HELLO)
    async with connect_websocket(url, additional_headers=bearer) as connection:
        ends = []
        for _ in range(2):
            await connection.send(json.dumps({"type": "response.create", **BODY}))
            while (event := json.loads(await connection.recv()))["type"] not in ("response.completed", "error"):
                pass
            ends.append(event)
    assert [event["type"] for event in ends] == ["response.completed", "error"]
    assert (ends[1]["status"], ends[1]["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_a_creation_that_fails_does_not_count(start: Start, upstream: ScriptedUpstream) -> None:
    ours, owner = start(limits__background=1, auth__secret_keys=[SECRET], limits__max_request_bytes=6000), random_part()
    assert (await post(ours, owner, background=True, input="x" * 5800)).status_code == 413
    upstream.stream(*HELLO)
    assert (await post(ours, owner, background=True)).status_code == 200


async def test_everything_passes_while_redis_is_away_and_a_metric_tells(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(limits__requests_per_minute=1, limits__streams=1, redis__url="redis://127.0.0.1:1", redis__timeout=0.2)
    sample = ("responses_mw_limits_unchecked_total", {"limit": "requests"})
    before = REGISTRY.get_sample_value(*sample) or 0
    for _ in range(3):
        upstream.stream(*HELLO)
        assert (await post(ours, "o", stream=True)).status_code == 200
    assert REGISTRY.get_sample_value(*sample) == before + 3
