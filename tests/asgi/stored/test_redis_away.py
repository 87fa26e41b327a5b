"""Redis unavailable, slow, full, read-only or restarted; and a killed server."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.processes import free_port
from tests.asgi.stored.test_owners import REQUESTS, asked, things_of
from tests.support import oracle
from tests.support.echo import said
from tests.support.garbage import nothing_left
from tests.support.scripted import Signal, finish, text, usage
from tests.support.servers import Ours
from tests.support.stored import everything
from tests.support.valkey import SURVIVES_A_KILL, Plain, Server, wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.asgi.stored.conftest import StartProcess, StartServer
    from tests.support.echo import Echo
    from tests.support.forkserver import Forked
    from tests.support.servers import Start

TIMEOUT = 0.5
"""Of a round trip to Redis, where it goes away."""

LONGEST = 5 * TIMEOUT + 1.0
"""Of any answer: a request makes few round trips, and the machine may be busy."""

KEY = {"authorization": "Bearer key"}


@pytest.fixture
def valkey(start_valkey: StartServer) -> Server:
    return start_valkey(*SURVIVES_A_KILL)


@pytest.fixture
def ours(start_at: Start, valkey: Server) -> Ours:
    return start_at("proxy", redis__url=valkey.url, redis__timeout=TIMEOUT)


def stop(valkey: Server) -> None:
    """Make it accept connections and requests, and answer none."""
    valkey.signal(signal.SIGSTOP)


def kill(valkey: Server) -> None:
    """Make its port refuse connections."""
    valkey.kill()


def bring_back(valkey: Server) -> None:
    assert valkey.process is not None
    if valkey.process.poll() is None:
        valkey.signal(signal.SIGCONT)
        valkey.wait_until_ready()
    else:
        valkey.start()


def make_read_only(valkey: Server) -> None:
    with valkey.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))


async def timely(answer: Any) -> Any:
    """Await `answer`, which must not hang."""
    async with asyncio.timeout(LONGEST):
        return await answer


async def recovered(ours: Ours) -> dict[str, Any]:
    """Wait until responses are stored again, without a restart of the server; return one."""
    for _ in range(50):
        answer = await timely(ours.http.post("/v1/responses", json={"model": "tiny", "input": "again"}))
        document = answer.json()
        if document.get("store"):
            got = await timely(ours.http.get(f"/v1/responses/{document['id']}"))
            assert got.json() == document
            return dict(document)
        if answer.status_code != 200:
            assert_unavailable(answer)  # until a probe of the server is answered
        await asyncio.sleep(0.1)
    raise AssertionError("it does not come back")


def assert_unavailable(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "state_unavailable"


# -- unavailable, slow, read-only ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [stop, kill, make_read_only])
async def test_without_redis_requests_that_need_no_state_are_served_unstored_and_logged(
    ours: Ours, valkey: Server, fault: Callable[[Server], None], caplog: pytest.LogCaptureFixture
) -> None:
    fault(valkey)
    with caplog.at_level(logging.WARNING, "responses_mw"):
        whole = await timely(oracle.whole(ours, input="Hi"))
        streamed = (await timely(oracle.stream(ours, input="Hi"))).response
    for document in (whole, streamed):
        assert (document["status"], document["output_text"], document["store"]) == ("completed", "Hi!", False)
        assert any(document["id"] in line and "not stored" in line for line in caplog.messages)


@pytest.mark.parametrize("fault", [stop, kill])
async def test_without_redis_requests_that_need_state_are_503_until_it_recovers(
    ours: Ours, valkey: Server, fault: Callable[[Server], None], upstream: Echo
) -> None:
    ids = await things_of(ours, KEY)
    before = len(upstream.requests)
    fault(valkey)
    answers = await timely(asyncio.gather(*(asked(ours, request, ids, KEY) for request in REQUESTS)))
    for answer in answers:
        assert_unavailable(answer)
    assert len(upstream.requests) == before
    bring_back(valkey)
    await recovered(ours)
    assert (await ours.http.get(f"/v1/responses/{ids['response']}", headers=KEY)).status_code == 200
    chained = {"model": "tiny", "input": "on", "previous_response_id": ids["response"]}
    assert (await ours.http.post("/v1/responses", json=chained, headers=KEY)).status_code == 200
    assert said(upstream.messages) == ["secret", "secret!", "on"]


async def test_with_a_read_only_redis_reads_succeed_and_writes_are_503(ours: Ours, valkey: Server) -> None:
    ids = await things_of(ours, KEY)
    make_read_only(valkey)
    assert (await ours.http.get(f"/v1/responses/{ids['response']}", headers=KEY)).status_code == 200
    assert_unavailable(await timely(ours.http.delete(f"/v1/responses/{ids['response']}", headers=KEY)))
    assert_unavailable(await timely(ours.http.post("/v1/conversations", json={}, headers=KEY)))
    with valkey.client() as client:
        client.execute_command("REPLICAOF", "NO", "ONE")
    await recovered(ours)
    assert (await ours.http.delete(f"/v1/responses/{ids['response']}", headers=KEY)).status_code == 200


async def test_a_redis_unavailable_at_startup_is_used_once_it_is_available(start_at: Start, tmp_path: Path) -> None:
    valkey = Server(tmp_path / "late")
    ours = start_at("proxy", redis__url=valkey.url, redis__timeout=TIMEOUT)
    assert (await timely(oracle.whole(ours, input="Hi")))["store"] is False
    valkey.start()
    try:
        await recovered(ours)
    finally:
        valkey.kill()


@pytest.mark.parametrize("fault", [stop, kill])
async def test_with_state_required_a_stored_create_without_redis_is_a_503(
    start_at: Start, valkey: Server, upstream: Echo, fault: Callable[[Server], None]
) -> None:
    ours = start_at("proxy", redis__url=valkey.url, redis__timeout=TIMEOUT, state__required=True)
    fault(valkey)
    for _ in range(3):
        for extra in ({}, {"stream": True}):
            body = {"model": "tiny", "input": "Hi", **extra}
            assert_unavailable(await timely(ours.http.post("/v1/responses", json=body)))
    assert upstream.requests == []
    assert (await timely(oracle.whole(ours, input="Hi", store=False)))["output_text"] == "Hi!"
    bring_back(valkey)
    await recovered(ours)


async def test_losing_redis_during_a_run_does_not_fail_the_response(ours: Ours, valkey: Server, upstream: Echo) -> None:
    go_on = Signal()
    upstream.stream(text("Hel"), go_on, text("lo"), finish(), usage())
    streaming = asyncio.create_task(oracle.stream(ours, input="Hi"))
    await wait_for(lambda: bool(upstream.requests))
    valkey.kill()
    go_on.set()
    streamed = await timely(streaming)
    assert streamed.events[0]["response"]["store"] is True
    assert (streamed.terminal, streamed.response["store"]) == ("response.completed", False)


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_response_is_stored_if_redis_restarts_during_its_run(start_at: Start, valkey: Server, upstream: Echo) -> None:
    ours = start_at("proxy", redis__url=valkey.url, redis__timeout=5)
    go_on = Signal()
    upstream.stream(text("Hel"), go_on, text("lo"), finish(), usage())
    streaming = asyncio.create_task(oracle.stream(ours, input="Hi"))
    await wait_for(lambda: bool(upstream.requests))
    valkey.kill()
    go_on.set()
    await asyncio.sleep(0.2)
    await asyncio.to_thread(valkey.start)
    response = (await streaming).response
    assert response["store"] is True
    assert (await ours.http.get(f"/v1/responses/{response['id']}")).json() == response


async def test_a_commit_whose_reply_is_lost_is_retried_and_written_once(start_at: Start, valkey: Server) -> None:
    async with wire(valkey.port) as between:
        ours = start_at("proxy", redis__url=between.url, redis__timeout=2)
        await oracle.whole(ours, input="one")  # from now on a create is one round trip
        with valkey.client() as client:
            before = pushes(client)
            between.cut_replies = 1
            document = await oracle.whole(ours, input="two")
            assert between.cut_replies == 0
            assert document["store"] is True
            assert pushes(client) == before + 1
        assert (await ours.http.get(f"/v1/responses/{document['id']}")).json() == document


def pushes(client: Plain) -> int:
    return int(client.info("commandstats")["cmdstat_rpush"]["calls"])


# -- full ----------------------------------------------------------------------------------------------------------------


async def test_with_a_full_redis_reads_succeed_and_responses_have_store_false(
    start_at: Start, valkey: Server, upstream: Echo
) -> None:
    ours = start_at("proxy", redis__url=valkey.url)
    ids = await things_of(ours, KEY)
    with valkey.client() as client:
        client.config_set("maxmemory", "1")
    whole = await oracle.whole(ours, input="Hi")
    assert (whole["status"], whole["store"]) == ("completed", False)
    chained = {"model": "tiny", "input": "on", "previous_response_id": ids["response"]}
    answer = await ours.http.post("/v1/responses", json=chained, headers=KEY)
    assert (answer.status_code, answer.json()["store"]) == (200, False)
    assert said(upstream.messages) == ["secret", "secret!", "on"]
    assert_unavailable(await ours.http.post("/v1/conversations", json={}, headers=KEY))
    assert (await ours.http.delete(f"/v1/responses/{ids['response']}", headers=KEY)).status_code == 200
    with valkey.client() as client:
        client.config_set("maxmemory", "0")
    ours = await recovered_after_full(ours)


async def recovered_after_full(ours: Ours) -> Ours:
    """Wait until responses are stored again: the server checks the memory of Redis every 5 s."""
    deadline = time.monotonic() + 60
    while not (await oracle.whole(ours, input="again"))["store"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    return ours


async def test_with_state_required_a_full_redis_is_a_503(start_at: Start, valkey: Server) -> None:
    ours = start_at("proxy", redis__url=valkey.url, redis__timeout=TIMEOUT, state__required=True)
    with valkey.client() as client:
        client.config_set("maxmemory", "1")
    answer = await timely(ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi"}))
    assert answer.status_code == 503
    assert "retry-after" in answer.headers


async def test_with_a_full_redis_a_background_response_is_a_503(start_at: Start, valkey: Server) -> None:
    ours = start_at("proxy", redis__url=valkey.url, auth__secret_keys="k" * 32)
    with valkey.client() as client:
        client.config_set("maxmemory", "1")
    for _ in range(2):  # the first one finds that Redis refuses writes
        async with nothing_left():
            answer = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "background": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_unavailable")
        assert "retry-after" in answer.headers


# -- killed processes ----------------------------------------------------------------------------------------------------


async def test_killing_the_server_during_a_run_leaves_no_partial_write(
    start_process: StartProcess,
    start_at: Start,
    valkey: Server,
    upstream: Echo,
    upstream_url: str,
) -> None:
    ours, process = start_process(upstream_url, redis__url=valkey.url)
    other = start_at("proxy", redis__url=valkey.url)
    first = await oracle.whole(ours, input="one")
    with valkey.client() as client:
        before = everything(client)
        go_on = Signal()
        upstream.stream(text("Hel"), go_on, text("lo"), finish(), usage())
        body = {"model": "tiny", "input": "two", "previous_response_id": first["id"], "stream": True}
        with pytest.raises(httpx.TransportError):
            await kill_in_the_middle(ours, process, body)
        go_on.set()
        assert everything(client) == before
    await oracle.whole(other, input="two", previous_response_id=first["id"])
    assert said(upstream.messages) == ["one", "one!", "two"]
    await ours.aclose()


async def kill_in_the_middle(ours: Ours, process: Forked, body: dict[str, Any]) -> None:
    async with ours.http.stream("POST", "/v1/responses", json=body) as response:
        async for line in response.aiter_lines():
            if "output_text.delta" in line:
                process.kill()


async def test_completed_responses_survive_a_kill_of_the_store(ours: Ours, valkey: Server) -> None:
    for number in range(3):
        document = await oracle.whole(ours, input=str(number))
        valkey.kill()
        await asyncio.to_thread(valkey.start)
        assert (await ours.http.get(f"/v1/responses/{document['id']}")).json() == document
