"""Processes that are killed, suspended or terminated while a background response runs."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import redis

from responses_mw.jobs.job_runner import KEY_ROLLOUT_SECONDS
from responses_mw.jobs.worker import Worker
from responses_mw.state.schema import pack, unpack
from tests.jobs.conftest import LEASE
from tests.jobs.test_background import BODY, RUNNING, cancel, create, create_streamed, ended, follow, get, streamed
from tests.support.metrics import sample_value
from tests.support.paths import ROOT
from tests.support.scripted import HELLO, Signal, finish, text
from tests.support.servers import Ours
from tests.support.valkey import Server as Store
from tests.support.valkey import Wire

if TYPE_CHECKING:
    from tests.jobs.conftest import Replica, Run, Server
    from tests.support.scripted import ScriptedUpstream


async def begun(server: Server, upstream: ScriptedUpstream, *, go: Signal | None = None) -> str:
    """Create a response, and wait for its first token."""
    upstream.stream(text("Hel"), go or Signal(), text("lo"), finish())
    async with aclosing(await server.ours()) as ours:
        follower = create_streamed(ours)
        await follower.until(b'"Hel"')
        await follower.leave()
        return str(follower.events[0]["response"]["id"])


def record(response_id: str) -> str:
    """Return the key of the record of a response."""
    return f"rmw:{{{response_id[5:30]}}}:r:{response_id[30:]}"


async def test_the_response_of_a_killed_worker_fails_if_it_cannot_be_continued(
    run: Run, replica: Replica, upstream: ScriptedUpstream
) -> None:
    doomed = run()
    response_id = await begun(doomed, upstream)
    other = replica(jobs__lease=LEASE)
    follower = follow(other, response_id)
    doomed.signal(signal.SIGKILL)
    document = await ended(other, response_id)
    assert document["status"] == "failed"
    assert document["error"]["code"] == "server_error"
    assert "lost" in document["error"]["message"]
    assert (document["output_text"], document["output"][0]["status"]) == ("Hel", "incomplete")
    await asyncio.wait_for(follower.task, 60)
    assert follower.events[-1]["response"] == document
    assert follower.events == await streamed(other, response_id)


async def test_a_worker_that_is_killed_before_the_first_output_is_replaced(
    run: Run, replica: Replica, upstream: ScriptedUpstream
) -> None:
    doomed = run()
    answer = upstream.stream(*HELLO, before=Signal())
    async with aclosing(await doomed.ours()) as ours:
        response_id = (await create(ours))["id"]
    await answer.asked.wait()
    other = replica(jobs__lease=LEASE)
    upstream.stream(*HELLO)
    doomed.signal(signal.SIGKILL)
    assert (await ended(other, response_id))["output_text"] == "Hello"
    events = await streamed(other, response_id)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events].count("response.in_progress") == 1


async def test_a_suspended_worker_cannot_write_after_another_has_settled_its_job(
    run: Run, replica: Replica, upstream: ScriptedUpstream
) -> None:
    stalled = run()
    go = Signal()
    response_id = await begun(stalled, upstream, go=go)
    other = replica(jobs__lease=LEASE)
    stalled.signal(signal.SIGSTOP)
    go.set()
    document = await ended(other, response_id)
    assert document["status"] == "failed"
    stalled.signal(signal.SIGCONT)
    await asyncio.sleep(LEASE)
    assert await get(other, response_id) == document
    assert (await streamed(other, response_id))[-1]["response"] == document


async def test_the_first_replica_that_returns_settles_jobs_lost_with_all_replicas(
    run: Run, replica: Replica, upstream: ScriptedUpstream
) -> None:
    doomed = run()
    response_id = await begun(doomed, upstream)
    doomed.signal(signal.SIGKILL)
    await asyncio.sleep(LEASE)
    assert (await ended(replica(jobs__lease=LEASE), response_id))["status"] == "failed"


async def test_a_get_settles_a_job_whose_lease_expired_long_ago(
    run: Run, replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    doomed = run()
    response_id = await begun(doomed, upstream)
    doomed.signal(signal.SIGKILL)
    doomed.wait()
    with redis.Redis.from_url(redis_url) as client:
        client.hset(record(response_id), "lease_until", 0)
    assert (await get(replica(jobs__concurrency=0, jobs__lease=LEASE), response_id))["status"] == "failed"


async def occupied(ours: Ours, upstream: ScriptedUpstream) -> tuple[str, Signal]:
    """Occupy the only job slot of `ours` until the signal is set. Return the id of the response and the signal."""
    go = Signal()
    busy = upstream.stream(*HELLO, before=go)
    response_id = (await create(ours))["id"]
    await busy.asked.wait()
    return response_id, go


async def test_a_job_of_a_killed_worker_is_settled_once_another_has_a_free_slot(
    run: Run, replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    doomed = run(jobs__concurrency=1)
    lost = await begun(doomed, upstream)
    full = replica(jobs__concurrency=1, jobs__lease=LEASE)
    other, go = await occupied(full, upstream)
    doomed.signal(signal.SIGKILL)
    with redis.Redis.from_url(redis_url) as client:
        async with asyncio.timeout(60):
            while float(client.zscore("rmw:{q2}:leases", lost)) > 1000 * client.time()[0]:
                await asyncio.sleep(0.05)
    go.set()
    assert (await ended(full, other))["status"] == "completed"
    assert (await ended(full, lost))["status"] == "failed"


async def test_a_job_lost_before_its_first_output_runs_once_a_worker_has_a_free_slot(
    run: Run, replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    doomed = run(jobs__concurrency=1)
    answer = upstream.stream(*HELLO, before=Signal())
    async with aclosing(await doomed.ours()) as ours:
        lost = (await create(ours))["id"]
    await answer.asked.wait()
    full = replica(jobs__concurrency=1, jobs__lease=LEASE)
    other, go = await occupied(full, upstream)
    doomed.signal(signal.SIGKILL)
    with redis.Redis.from_url(redis_url) as client:
        async with asyncio.timeout(60):
            while float(client.zscore("rmw:{q2}:leases", lost)) > 1000 * client.time()[0]:
                await asyncio.sleep(0.05)
    upstream.stream(text("again"), finish())
    go.set()
    assert (await ended(full, other))["output_text"] == "Hello"
    assert (await ended(full, lost))["output_text"] == "again"


async def test_a_worker_process_runs_the_jobs_that_servers_accepted(
    run: Run, replica: Replica, upstream: ScriptedUpstream
) -> None:
    ours = replica(jobs__concurrency=0)
    upstream.stream(*HELLO)
    response_id = (await create(ours))["id"]
    worker = run("worker")
    assert (await ended(ours, response_id))["output_text"] == "Hello"
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


# -- draining ------------------------------------------------------------------------------------------------------------


async def test_a_stopping_server_finishes_its_jobs_and_closes_the_followers(
    run: Run, replica: Replica, upstream: ScriptedUpstream
) -> None:
    other, leaving = replica(jobs__concurrency=0), run()
    go = Signal()
    response_id = await begun(leaving, upstream, go=go)
    async with aclosing(await leaving.ours()) as ours:
        follower = follow(ours, response_id)
        await follower.until(b'"Hel"')
        leaving.signal(signal.SIGTERM)
        await asyncio.wait_for(follower.task, 60)
        read = follower.events
    assert read[-1]["type"] == "response.output_text.delta"
    assert b"[DONE]" not in follower.raw
    assert (await get(other, response_id))["status"] == "in_progress"
    go.set()
    assert (await ended(other, response_id))["output_text"] == "Hello"
    leaving.wait()
    assert read + await streamed(other, response_id, len(read) - 1) == await streamed(other, response_id)


async def test_a_stopping_worker_returns_jobs_without_output_to_the_queue(
    run: Run, replica: Replica, upstream: ScriptedUpstream
) -> None:
    leaving = run(jobs__lease=60)
    answer = upstream.stream(*HELLO, before=Signal())
    async with aclosing(await leaving.ours()) as ours:
        response_id = (await create(ours))["id"]
    await answer.asked.wait()
    other = replica(jobs__lease=60)
    upstream.stream(*HELLO)
    leaving.signal(signal.SIGTERM)
    assert (await ended(other, response_id))["output_text"] == "Hello"  # long before the lease is over
    await answer.left.wait()
    leaving.wait()


async def test_a_job_that_is_returned_to_a_damaged_queue_runs_once_the_queue_is_repaired(
    run: Run, replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    leaving = run()
    answer = upstream.stream(*HELLO, before=Signal())
    async with aclosing(await leaving.ours()) as ours:
        response_id = (await create(ours))["id"]
    await answer.asked.wait()
    with redis.Redis.from_url(redis_url) as client:
        client.delete("rmw:{q2}:clock")
        client.rpush("rmw:{q2}:clock", "another program's")
        leaving.signal(signal.SIGTERM)
        assert await asyncio.to_thread(leaving.wait) == 0
        client.delete("rmw:{q2}:clock")
        upstream.stream(*HELLO)
        replica(jobs__lease=LEASE)
        async with asyncio.timeout(60):
            while client.hget(record(response_id), "status") != b"completed":  # a GET would queue it again
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("loop", ["_claim", "_beat", "_watch"])
async def test_a_worker_restarts_a_loop_that_fails_with_an_unexpected_error(
    replica: Replica,
    upstream: ScriptedUpstream,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    loop: str,
) -> None:
    starts, runs, healthy = 0, Signal(), getattr(Worker, loop)

    async def fail_twice(worker: Worker) -> None:
        nonlocal starts
        starts += 1
        if starts <= 2:
            raise KeyError("unexpected")
        runs.set()
        await healthy(worker)

    monkeypatch.setattr(Worker, loop, fail_twice)
    upstream.stream(*HELLO)
    ours = replica(jobs__lease=6)
    assert (await ended(ours, (await create(ours))["id"]))["status"] == "completed"
    await runs.wait()
    assert (starts, caplog.text.count("KeyError: 'unexpected'")) == (3, 2)


async def test_a_job_that_outlasts_the_drain_timeout_fails(run: Run, replica: Replica, upstream: ScriptedUpstream) -> None:
    other, leaving = replica(jobs__concurrency=0), run(server__drain_timeout=0.2, jobs__lease=60)
    response_id = await begun(leaving, upstream)
    leaving.signal(signal.SIGTERM)
    document = await ended(other, response_id)
    assert (document["status"], document["output_text"]) == ("failed", "Hel")
    assert "stopped" in document["error"]["message"]
    leaving.wait()


# -- Redis ---------------------------------------------------------------------------------------------------------------


async def test_flushing_redis_ends_the_run_and_its_followers(
    replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    ours = replica(jobs__lease=LEASE)
    answer = upstream.stream(text("Hel"), Signal(), text("lo"), finish())
    follower = create_streamed(ours)
    await follower.until(b'"Hel"')
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    await answer.left.wait()
    await asyncio.wait_for(follower.task, 60)
    last = follower.events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["sequence_number"] == len(follower.events) - 1


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path, "--maxmemory-policy", "noeviction")
    store.start()
    yield store
    store.kill()


def fill(store: Store) -> None:
    """Make the store refuse every write that needs memory."""
    with store.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)


async def running(ours: Ours, upstream: ScriptedUpstream, go: Signal) -> str:
    """Create a response, and wait for its first token."""
    upstream.stream(text("Hel"), go)
    follower = create_streamed(ours)
    await follower.until(b'"Hel"')
    await follower.leave()
    return str(follower.events[0]["response"]["id"])


async def test_jobs_can_be_cancelled_deleted_and_settled_while_redis_is_full(
    replica: Replica, upstream: ScriptedUpstream, own_store: Store
) -> None:
    worker = replica(redis__url=own_store.url, jobs__lease=120)
    ours = replica(redis__url=own_store.url, jobs__concurrency=0, jobs__lease=120)
    go = Signal()
    cancelled, deleted, lost = [await running(worker, upstream, go) for _ in range(3)]
    fill(own_store)
    answer = await cancel(ours, cancelled)
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert (await get(ours, cancelled))["status"] == "cancelled"
    answer = await ours.http.delete(f"/v1/responses/{deleted}")
    assert (answer.status_code, answer.json().get("deleted")) == (200, True)
    with own_store.client() as client:
        client.config_set("maxmemory", 0)
        client.hset(record(lost), "lease_until", 0)
    fill(own_store)
    document = await get(ours, lost)
    assert (document["status"], document["output_text"]) == ("failed", "Hel")
    go.set()


async def test_a_response_that_cannot_be_settled_because_redis_is_full_can_still_be_read(
    replica: Replica, own_store: Store
) -> None:
    ours = replica(redis__url=own_store.url, jobs__concurrency=0)
    response_id = (await create(ours))["id"]
    with own_store.client() as client:
        client.hset(record(response_id), "looked", 0)  # so that its place in the queue is checked
    fill(own_store)
    assert (await get(ours, response_id))["status"] == "queued"


async def test_a_foreign_entry_in_the_queue_does_not_delay_jobs(
    replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    ours = replica(jobs__concurrency=0, jobs__lease=LEASE)
    response_id = (await create(ours))["id"]
    with redis.Redis.from_url(redis_url) as client:
        client.delete("rmw:{q2}:ready")
        client.zadd("rmw:{q2}:leases", {b"\xff": 0, "junk": 0, response_id: 0})  # as if a worker had been lost
    upstream.stream(*HELLO)
    worker = replica(jobs__lease=LEASE)
    assert (await ended(worker, response_id))["output_text"] == "Hello"


async def test_a_job_in_the_queue_of_an_older_release_runs(
    replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    ours = replica(jobs__concurrency=0)
    response_id = (await create(ours))["id"]
    with redis.Redis.from_url(redis_url) as client:
        for key in client.keys("rmw:{q2}:*"):
            client.rename(key, key.replace(b"q2", b"q1p3"))
    upstream.stream(*HELLO)
    assert (await ended(replica(), response_id))["output_text"] == "Hello"


@pytest.mark.parametrize("entry", [b"junk%d", b"\xff%d"])
async def test_a_queue_full_of_foreign_entries_does_not_keep_workers_busy(
    replica: Replica, redis_url: str, entry: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    def damages() -> float:
        labels = {"error_type": "Damaged"}
        return sample_value("responses_mw_state_errors_total", labels) or 0.0

    before = damages()
    with redis.Redis.from_url(redis_url) as client:
        client.zadd("rmw:{q2}:leases", {entry % number: 0 for number in range(1000)})
        replica(jobs__concurrency=4, jobs__lease=LEASE)
        async with asyncio.timeout(60):
            while client.zcard("rmw:{q2}:leases") > 995:
                await asyncio.sleep(0.01)
        began = time.monotonic()
        await asyncio.sleep(0.5)
        dropped = 1000 - client.zcard("rmw:{q2}:leases")
        assert dropped <= 20 + 5 * (time.monotonic() - began)
    assert damages() >= before + 5
    assert "the queue at rmw:{q2}:ready is damaged: an entry is not the id of a response" in caplog.text


@pytest.mark.parametrize("looks", [get, follow])
async def test_a_job_that_is_missing_from_the_queue_runs_once_it_is_retrieved_or_followed(
    replica: Replica, upstream: ScriptedUpstream, redis_url: str, looks: Any
) -> None:
    ours = replica(jobs__concurrency=0)
    response_id = (await create(ours))["id"]
    with redis.Redis.from_url(redis_url) as client:
        client.delete(*client.keys("rmw:{q2}*"))
        client.hset(record(response_id), "looked", 0)  # as if that was long ago
    upstream.stream(*HELLO)
    worker = replica()
    looking = looks(ours, response_id)
    if looks is get:
        await looking
        assert (await ended(worker, response_id))["output_text"] == "Hello"
    else:
        await asyncio.wait_for(looking.task, 60)
        assert looking.events[-1]["response"]["output_text"] == "Hello"


@pytest.mark.parametrize("others", [["a secret that belongs to somebody else"], []], ids=["another key", "no key"])
async def test_a_job_of_another_key_waits_for_a_replica_that_has_the_key(
    replica: Replica, upstream: ScriptedUpstream, others: list[str]
) -> None:
    ours = replica(jobs__concurrency=0)
    response_id = (await create(ours))["id"]
    strange = replica(auth__secret_keys=others, jobs__lease=0.3)
    await asyncio.sleep(0.5)
    assert (await get(strange, response_id))["status"] in RUNNING
    upstream.stream(*HELLO)
    assert (await ended(replica(jobs__lease=0.6), response_id))["output_text"] == "Hello"
    assert len(upstream.requests) == 1


async def test_a_job_whose_key_is_not_rolled_out_in_time_fails(
    replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    response_id = (await create(replica(jobs__concurrency=0)))["id"]
    with redis.Redis.from_url(redis_url) as client:
        document = unpack(client.hget(record(response_id), "document"))
        document["created_at"] -= int(KEY_ROLLOUT_SECONDS)
        client.hset(record(response_id), "document", pack(orjson.dumps(document)))
    strange = replica(auth__secret_keys=["a secret that belongs to somebody else"], jobs__lease=0.3)
    document = await ended(strange, response_id)
    assert document["status"] == "failed"
    assert document["error"]["code"] == "server_error"
    assert "secret_keys" in document["error"]["message"]
    assert upstream.requests == []


async def test_a_create_that_takes_so_long_that_its_job_is_given_up_is_a_503_with_retry_after(
    replica: Replica, upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    class Slow(Wire):
        """Write the tombstone of a worker that finds the job without a record, before the record arrives."""

        async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                for tombstone in re.findall(rb"rmw:{[a-z0-9]+}:x:[a-z0-9]+", data):
                    with store.client() as client:
                        client.set(tombstone, b"given up")
                writer.write(data)
            writer.close()

    store = Store(tmp_path)
    store.start()
    line = Slow(store.port)
    listener = await asyncio.start_server(line.accept, "127.0.0.1", 0)
    try:
        url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ours = await asyncio.to_thread(replica, redis__url=url, jobs__concurrency=0)
        answer = await ours.http.post("/v1/responses", json=BODY)
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert upstream.requests == []
    finally:
        listener.close()
        await line.aclose()
        store.kill()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_short_chaos_run_succeeds() -> None:
    """The script checks the responses, the logs and the followers.

    All responses end, logs are contiguous with one final event, and followers read the events of the logs.
    """
    command = [sys.executable, "-m", "tests.chaos", "--jobs", "24", "--seconds", "8", "--patience", "60"]
    faults = ["--faults", "kill", "stall", "restart_valkey"]  # other faults need longer runs of scripts/chaos
    played = subprocess.run([*command, *faults], capture_output=True, text=True, timeout=220, check=False, cwd=ROOT)
    assert played.returncode == 0, played.stdout + played.stderr


async def test_a_credential_that_no_replica_can_decrypt_fails_the_job(
    run: Run, upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    embedded = {"redis__url": None, "auth__secret_keys": None, "redis__data_dir": str(tmp_path)}
    before = run(jobs__concurrency=0, **embedded)
    async with aclosing(await before.ours()) as ours:
        response_id = (await create(ours))["id"]
    before.signal(signal.SIGTERM)
    before.wait()
    async with aclosing(await run(**embedded).ours()) as ours:
        document = await ended(ours, response_id)
    assert document["status"] == "failed"
    assert "secret_keys" in document["error"]["message"]
    assert upstream.requests == []
