"""Limits per owner, counted by all replicas together."""

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
from tests.support.metrics import sample_value
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
async def test_a_burst_of_one_minutes_requests_passes_and_more_are_refused(usage: Usage, most: int, more: int) -> None:
    owner = random_part()
    rates = [await usage.request(owner, most) for _ in range(most + more)]
    assert [rate.passes for rate in rates[:most]] == [True] * most
    assert [rate.remaining for rate in rates[:most]] == list(reversed(range(most)))
    assert not any(rate.passes for rate in rates[most:])
    assert rates[0].reset == pytest.approx(60 / most, abs=0.05)
    assert 0 < rates[-1].retry_after <= 60 / most + 0.001  # rounded up to whole milliseconds
    assert rates[-1].reset == pytest.approx(60, abs=2)


async def test_the_request_rate_is_refilled_evenly(usage: Usage) -> None:
    owner = random_part()
    for _ in range(600):
        await usage.request(owner, 600)
    refused = await usage.request(owner, 600)
    while not refused.passes:
        assert refused.retry_after <= 0.1
        await asyncio.sleep(refused.retry_after)
        refused = await usage.request(owner, 600)


async def test_requests_pass_after_a_failover_to_a_server_with_an_earlier_clock(usage: Usage, redis_url: str) -> None:
    owner = random_part()
    ahead = (time.time() + 360) * 1000  # a minute's worth was used on a clock that was 5 minutes ahead
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"rmw:{{l{owner}}}:rate", f"{ahead:.6f}", px=360_000)
    assert (await usage.request(owner, 600)).passes


async def test_owners_are_counted_separately(usage: Usage) -> None:
    assert all([(await usage.request(random_part(), 1)).passes for _ in range(5)])


async def test_the_number_of_active_responses_is_limited_until_they_leave_or_expire(usage: Usage) -> None:
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


async def test_the_keys_in_redis_expire_within_a_minute(usage: Usage, redis_url: str) -> None:
    owner = random_part()
    await usage.request(owner, 60)
    await usage.enter("streams", owner, "a", maximum=2, seconds=60)
    with redis.Redis.from_url(redis_url) as client:
        keys = list(client.scan_iter(f"rmw:{{l{owner}}}:*"))
        assert len(keys) == 2
        assert all(0 < client.pttl(key) <= 60_000 for key in keys)


# -- over HTTP and WebSocket -------------------------------------------------------------------------------------------------------


async def post(ours: Ours, owner: str, **body: Any) -> Any:
    return await ours.http.post("/v1/responses", json={**BODY, **body}, headers={"authorization": f"Bearer {owner}"})


async def test_requests_over_the_rate_are_a_429_with_openais_headers_on_any_replica(
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
async def test_compactions_and_token_counts_count_as_requests(start: Start, upstream: ScriptedUpstream, path: str) -> None:
    ours, owner = start(limits__requests_per_minute=1), random_part()
    upstream.stream(*HELLO)
    assert (await post(ours, owner)).status_code == 200
    asked = len(upstream.requests)
    refused = await ours.http.post(f"/v1/responses/{path}", json=BODY, headers={"authorization": f"Bearer {owner}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(upstream.requests) == asked


async def test_there_are_no_limits_by_default(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start()
    upstream.stream(*HELLO)
    answer = await post(ours, random_part())
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit-")]


async def test_an_open_stream_counts_on_every_replica(start: Start, upstream: ScriptedUpstream) -> None:
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
        assert (await post(ours, owner)).status_code == 200  # this is not a stream
    held.set()
    upstream.stream(*HELLO)
    async with asyncio.timeout(60):
        while (await post(other, owner, stream=True)).status_code == 429:
            await asyncio.sleep(0.02)


async def test_a_background_response_counts_until_it_is_completed_or_cancelled(
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


async def test_a_response_on_a_websocket_counts_as_a_request(start: Start, upstream: ScriptedUpstream) -> None:
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


async def test_a_background_create_that_fails_is_not_counted(start: Start, upstream: ScriptedUpstream) -> None:
    ours, owner = start(limits__background=1, auth__secret_keys=[SECRET], limits__max_request_bytes=6000), random_part()
    assert (await post(ours, owner, background=True, input="x" * 5800)).status_code == 413
    upstream.stream(*HELLO)
    assert (await post(ours, owner, background=True)).status_code == 200


async def test_without_redis_all_requests_pass_and_are_counted_as_unchecked(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(limits__requests_per_minute=1, limits__streams=1, redis__url="redis://127.0.0.1:1", redis__timeout=0.2)
    sample = ("responses_mw_limits_unchecked_total", {"limit": "requests"})
    before = sample_value(*sample) or 0
    for _ in range(3):
        upstream.stream(*HELLO)
        assert (await post(ours, "o", stream=True)).status_code == 200
    assert sample_value(*sample) == before + 3
