"""Background responses with `store: false`: kept encrypted for a short time, and usable meanwhile."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
import redis

from responses_mw.crypto import Sealer
from responses_mw.ids import RunIds
from responses_mw.state import Batch, Chain, Fenced, Missing, State, TakeReason
from responses_mw.state.connection import connect
from responses_mw.state.errors import Damaged
from responses_mw.state.schema import response_address
from responses_mw.state.temporary import KEPT_SECONDS, Vault
from tests.jobs.test_background import RUNNING, create, create_streamed, ended, follow, get, streamed
from tests.support.cluster import cluster_url
from tests.support.scripted import HELLO, Signal, call, error, finish, json_answer, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.jobs.conftest import Replica
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours

SECRETS = ("zebra-question", "zebra-rule", "zebra-answer", "zebra-tool", "zebra-note")
BODY: dict[str, Any] = {
    "store": False,
    "input": SECRETS[0],
    "instructions": SECRETS[1],
    "tools": [{"type": "function", "name": SECRETS[3]}],
    "metadata": {"note": SECRETS[4]},
}
ANSWER = (text(SECRETS[2]), finish())


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as server:
        yield server


def content(server: Any) -> bytes:
    """Return everything that is stored, as one string."""
    read: dict[bytes, Any] = {
        b"hash": server.hgetall,
        b"string": server.get,
        b"list": lambda key: server.lrange(key, 0, -1),
        b"set": server.smembers,
        b"zset": lambda key: server.zrange(key, 0, -1),
        b"stream": server.xrange,
    }
    return repr({key: read[server.type(key)](key) for key in server.keys("*")}).encode()


def keys_of(server: Any, response_id: str) -> list[bytes]:
    return sorted(server.keys(f"rmw:{{{response_id[5:30]}}}:*"))


def holds_secrets(data: bytes) -> bool:
    return any(secret.encode() in data for secret in SECRETS)


def expire(server: redis.Redis, response_id: str) -> None:
    """Let the time pass after which the keys of the response expire."""
    for key in keys_of(server, response_id):
        assert 0 < server.ttl(key) <= KEPT_SECONDS, key
        server.delete(key)


async def status(ours: Ours, response_id: str, path: str = "") -> int:
    return (await ours.http.get(f"/v1/responses/{response_id}{path}")).status_code


@pytest.mark.both_mounts
async def test_a_temporary_response_can_be_polled_streamed_and_listed_on_any_replica_until_it_expires(
    replica: Replica, upstream: ScriptedUpstream, server: redis.Redis
) -> None:
    a, b, go = replica(), replica(), Signal()
    upstream.stream(*ANSWER, before=go)
    document = await create(a, **BODY)
    assert (document["status"], document["store"], document["background"]) == ("queued", False, True)
    assert (await get(b, document["id"]))["status"] in RUNNING
    assert await status(b, document["id"], "/input_items") == 200
    go.set()
    done = await ended(b, document["id"])
    assert (done["status"], done["output_text"], done["store"]) == ("completed", SECRETS[2], False)
    assert done["instructions"] == SECRETS[1]
    events = await streamed(a, document["id"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == done
    assert (await streamed(b, document["id"], 3))[0]["sequence_number"] == 4
    items = (await b.http.get(f"/v1/responses/{document['id']}/input_items")).json()["data"]
    assert items[0]["content"][0]["text"] == SECRETS[0]
    expire(server, document["id"])
    for path in ("", "?stream=true", "/input_items"):
        assert await status(a, document["id"], path) == 404
    assert keys_of(server, document["id"]) == []


@pytest.mark.both_mounts
async def test_no_text_of_a_temporary_response_is_readable_in_redis(
    replica: Replica, upstream: ScriptedUpstream, server: redis.Redis
) -> None:
    ours, go = replica(), Signal()
    upstream.stream(text(SECRETS[2]), go, text("!" * 5000), finish())
    document = await create(ours, **BODY)
    follower = follow(ours, document["id"])
    await follower.until(SECRETS[2].encode())
    assert not holds_secrets(content(server))
    assert len(keys_of(server, document["id"])) == 3  # record, log and credential
    go.set()
    await ended(ours, document["id"])
    await follower.task
    async with asyncio.timeout(60):
        while len(keys_of(server, document["id"])) > 2:
            await asyncio.sleep(0.02)
    assert not holds_secrets(content(server))


async def test_a_stored_response_is_readable_in_redis(
    replica: Replica, upstream: ScriptedUpstream, server: redis.Redis
) -> None:
    """Show that the previous test can fail."""
    ours = replica()
    upstream.stream(*ANSWER)
    await ended(ours, (await create(ours, **{**BODY, "store": True}))["id"])
    assert holds_secrets(content(server))


async def test_a_stream_can_be_resumed(replica: Replica, upstream: ScriptedUpstream) -> None:
    a, b, go = replica(), replica(), Signal()
    upstream.stream(text("Hel"), go, text("lo"), finish())
    first = create_streamed(a, **BODY)
    await first.until(b"Hel")
    await first.leave()
    response_id, last = first.events[0]["response"]["id"], first.events[-1]["sequence_number"]
    second = follow(b, response_id, after=last)
    go.set()
    await asyncio.wait_for(second.task, 60)
    assert second.events[0]["sequence_number"] == last + 1
    assert second.events[-1]["response"]["output_text"] == "Hello"


async def test_a_temporary_job_can_be_cancelled(replica: Replica, upstream: ScriptedUpstream, server: redis.Redis) -> None:
    a, b = replica(), replica()
    answer = upstream.stream(text(SECRETS[2]), Signal())
    response_id = (await create(a, **BODY))["id"]
    follower = follow(b, response_id)
    await follower.until(SECRETS[2].encode())
    cancelled = (await b.http.post(f"/v1/responses/{response_id}/cancel")).json()
    assert (cancelled["status"], cancelled["output_text"]) == ("cancelled", SECRETS[2])
    await answer.left.wait()
    assert (await get(a, response_id))["status"] == "cancelled"
    assert not holds_secrets(content(server))
    expire(server, response_id)
    assert await status(a, response_id) == 404


@pytest.mark.parametrize("is_running", [True, False])
async def test_a_deleted_temporary_response_leaves_only_a_tombstone(
    replica: Replica, upstream: ScriptedUpstream, server: redis.Redis, is_running: bool
) -> None:
    ours, go = replica(), Signal()
    answer = upstream.stream(text(SECRETS[2]), *([go] if is_running else []), finish())
    response_id = (await create(ours, **BODY))["id"]
    await answer.asked.wait()
    if not is_running:
        await ended(ours, response_id)
    assert (await ours.http.delete(f"/v1/responses/{response_id}")).status_code == 200
    assert await status(ours, response_id) == 404
    address = response_address(response_id)
    assert set(keys_of(server, response_id)) <= {address.tombstone.encode(), address.log.encode()}
    expire(server, response_id)


@pytest.mark.parametrize("is_running", [True, False])
async def test_a_temporary_response_cannot_be_continued_and_its_items_cannot_be_referenced(
    replica: Replica, upstream: ScriptedUpstream, is_running: bool
) -> None:
    ours, go = replica(), Signal()
    upstream.stream(text("Hel"), *([go] if is_running else []), finish())
    response_id = (await create(ours, store=False))["id"]
    if is_running:
        await follow(ours, response_id).until(b"Hel")
        item_id = "msg_" + response_id[5:] + "1"
    else:
        item_id = (await ended(ours, response_id))["output"][0]["id"]
    for body, code in (
        ({"previous_response_id": response_id, "input": "x"}, "previous_response_not_found"),
        ({"input": [{"type": "item_reference", "id": item_id}]}, "item_not_found"),
    ):
        for background in (False, True):
            answer = await ours.http.post("/v1/responses", json={"model": "tiny", "background": background, **body})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    go.set()


async def test_a_temporary_response_can_continue_a_stored_response_or_conversation_without_changing_it(
    replica: Replica, upstream: ScriptedUpstream
) -> None:
    ours = replica()
    upstream.stream(*HELLO)
    stored = await ended(ours, (await create(ours, input="First"))["id"])
    conversation = (await ours.http.post("/v1/conversations", json={"items": [{"role": "user", "content": "Before"}]})).json()[
        "id"
    ]
    for body, earlier in (
        ({"previous_response_id": stored["id"]}, "First"),
        ({"conversation": conversation}, "Before"),
    ):
        upstream.stream(*HELLO)
        response_id = (await create(ours, store=False, **body))["id"]
        assert (await ended(ours, response_id))["status"] == "completed"
        assert upstream.requests[-1].json["messages"][0]["content"] == earlier
        listed = await ours.http.get(f"/v1/responses/{response_id}/input_items", params={"order": "asc"})
        assert listed.json()["data"][0]["content"][0]["text"] == earlier
    items = (await ours.http.get(f"/v1/conversations/{conversation}/items")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["Before"]


async def test_a_temporary_response_is_never_cached(replica: Replica, upstream: ScriptedUpstream, server: redis.Redis) -> None:
    ours = replica(cache__mode="exact")
    for _ in range(2):
        upstream.stream(*ANSWER)
        await ended(ours, (await create(ours, store=False, input=SECRETS[0], cache="exact"))["id"])
    assert len(upstream.requests) == 2
    assert not holds_secrets(content(server))


async def test_the_errors_of_the_upstream_are_sealed_while_it_is_retried(
    replica: Replica, upstream: ScriptedUpstream, server: redis.Redis
) -> None:
    ours = replica(upstream__status_grace=0)
    upstream.queue(json_answer(error(SECRETS[2], 503), 503))
    response_id = (await create(ours, **BODY))["id"]
    record = response_address(response_id).record
    async with asyncio.timeout(60):
        while not server.hget(record, "error"):
            await asyncio.sleep(0.02)
    assert not holds_secrets(content(server))
    upstream.stream(*ANSWER)
    assert (await ended(ours, response_id))["output_text"] == SECRETS[2]


async def test_a_failed_temporary_response_reports_its_error(
    replica: Replica, upstream: ScriptedUpstream, server: redis.Redis
) -> None:
    ours = replica()
    upstream.queue(json_answer(error(SECRETS[2]), 400))
    response_id = (await create(ours, **BODY))["id"]
    failed = await ended(ours, response_id)
    assert (failed["status"], SECRETS[2] in failed["error"]["message"]) == ("failed", True)
    assert (await streamed(ours, response_id))[-1]["type"] == "response.failed"
    assert not holds_secrets(content(server))
    expire(server, response_id)


async def test_another_worker_takes_over_a_temporary_job(
    replica: Replica, upstream: ScriptedUpstream, server: redis.Redis
) -> None:
    a = replica(jobs__lease=1.0)
    upstream.stream(call("", name=SECRETS[3], call_id="c"), call('{"a": 1}'), Signal())
    response_id = (await create(a, **BODY))["id"]
    await follow(a, response_id).until(b"arguments.delta")
    server.hset(response_address(response_id).record, mapping={"lease_until": 0, "token": "another worker's"})
    upstream.stream(call("", name=SECRETS[3], call_id="c"), call('{"a": 1}'), finish("tool_calls"))
    async with asyncio.timeout(60):
        while (await get(a, response_id))["status"] in RUNNING:
            await asyncio.sleep(0.1)
    assert not holds_secrets(content(server))
    assert (await get(a, response_id))["store"] is False


async def test_the_keys_of_a_temporary_job_expire_ten_minutes_after_the_last_sign_of_life(
    replica: Replica, upstream: ScriptedUpstream, server: redis.Redis
) -> None:
    ours, go = replica(), Signal()
    upstream.stream(text("Hel"), go, text("lo"), finish())
    response_id = (await create(ours, **BODY))["id"]
    await follow(ours, response_id).until(b"Hel")
    keys = keys_of(server, response_id)
    assert len(keys) == 3
    for key in keys:
        server.expire(key, 60)
    go.set()
    await ended(ours, response_id)
    for key in keys_of(server, response_id):
        assert KEPT_SECONDS - 60 < server.ttl(key) <= KEPT_SECONDS


async def test_a_temporary_job_that_no_worker_claims_expires(
    replica: Replica, server: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    ours = replica(jobs__concurrency=0)
    response_id = (await create(ours, **BODY))["id"]
    assert not holds_secrets(content(server))
    expire(server, response_id)
    assert await status(ours, response_id) == 404
    with caplog.at_level(logging.ERROR, "responses_mw"):
        worker = replica()
        async with asyncio.timeout(60):
            while server.zcard("rmw:{q2}:ready") + server.zcard("rmw:{q3}:ready") + len(server.keys("rmw:{q*}:jobs")):
                await asyncio.sleep(0.05)
        assert await status(worker, response_id) == 404
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_an_idempotency_key_still_needs_a_stored_response(replica: Replica) -> None:
    body = {"model": "tiny", "input": "Hi", "background": True, "store": False}
    answer = await replica().http.post("/v1/responses", json=body, headers={"idempotency-key": "k"})
    assert answer.json()["error"]["code"] == "idempotency_key_not_supported"


async def test_a_temporary_job_needs_the_secret_keys_like_any_background_response(start: Any) -> None:
    answer = await start().http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "background": True, "store": False})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")


# -- the state store -----------------------------------------------------------------------------------------------------


def vault(*keys: str) -> Vault:
    made = Vault()
    made.sealer = Sealer(keys)
    return made


def test_a_vault_opens_what_it_has_sealed_for_the_same_response_only() -> None:
    ours, rotated, foreign = vault("a" * 32), vault("b" * 32, "a" * 32), vault("c" * 32)
    sealed = ours.seal("resp_1", b"J{}")
    assert b"J{}" not in sealed
    assert ours.open("resp_1", sealed) == rotated.open("resp_1", sealed) == b"J{}"
    assert ours.open("resp_1", b"J{}") == b"J{}"
    for other, response_id in ((foreign, "resp_1"), (ours, "resp_2")):
        with pytest.raises(Damaged):
            other.open(response_id, sealed)


@pytest.mark.parametrize("kind", ["valkey", "cluster"])
async def test_a_repeated_end_changes_nothing_and_a_late_one_is_refused(request: pytest.FixtureRequest, kind: str) -> None:
    url = request.getfixturevalue("redis_url") if kind == "valkey" else cluster_url(request.getfixturevalue("cluster"))
    state, ids = State(connect(url, timeout=20.0)), RunIds()
    state.vault.sealer = Sealer(["k" * 32])
    events = b"event: e\ndata: {}\n\n"
    head = {"id": ids.response, "store": False, "status": "queued", "background": True, "output": []}
    head |= {"previous_response_id": None, "conversation": None}
    await state.jobs.create(head, {}, [], "o" * 64, "sealed", Batch(0, 0, events))
    job = (await state.jobs.take(ids.response, TakeReason.RUN, worker="w", lease=60)).job
    assert job is not None
    assert job.document == head
    batch = state.jobs.protected(job, Batch(1, 1, events))
    for _ in range(2):
        assert await state.jobs.append([(ids.response, job.token, batch)], 60) == [True]
    assert await state.jobs.log(ids.response, 0) == [Batch(1, 1, events)]
    assert await state.jobs.renew([(ids.response, job.token)], 60) == [True]
    done = {**head, "status": "completed", "output": [{"type": "message", "id": ids.item("msg")}]}
    for _ in range(2):
        await state.responses.commit(Chain.new(), done, [], "o" * 64, job.token, last=Batch(2, 2, events, final=True))
        assert (await state.responses.get(ids.response, "o" * 64)).document == done
    with pytest.raises(Fenced):
        await state.responses.commit(Chain.new(), done, [], "o" * 64, "another", last=Batch(2, 2, events, final=True))
    assert not await state.jobs.compress(ids.response)
    with pytest.raises(Missing):
        await state.responses.chain(ids.response, "o" * 64)
    with pytest.raises(Missing):
        await state.responses.get(ids.response, "another owner")
    await state.aclose()
