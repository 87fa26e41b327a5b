"""Background responses from end to end, at both mounts, on one replica and on two."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest
import redis
from openai.types.responses import Response

from responses_mw.state import Batch, Jobs, responses
from tests.jobs.conftest import SECRET
from tests.support.echo import Echo
from tests.support.garbage import nothing_left
from tests.support.scripted import HELLO, Answer, Signal, completion, error, finish, text

if TYPE_CHECKING:
    from tests.jobs.conftest import Replica
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

BODY = {"input": "Hi", "model": "tiny", "background": True}
TYPES = ["response.created", "response.queued", "response.in_progress", "response.output_item.added"]
RUNNING = {"queued", "in_progress"}
Event = dict[str, Any]


async def create(ours: Ours, **body: Any) -> dict[str, Any]:
    answer = await ours.http.post("/v1/responses", json={**BODY, **body})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


async def get(ours: Ours, response_id: str) -> dict[str, Any]:
    answer = await ours.http.get(f"/v1/responses/{response_id}")
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    Response.model_validate(document, strict=True)
    return document


async def ended(ours: Ours, response_id: str) -> dict[str, Any]:
    """Wait until the response has ended, and return it."""
    async with asyncio.timeout(60):
        while (document := await get(ours, response_id))["status"] in RUNNING:
            await asyncio.sleep(0.02)
    return document


async def streamed(ours: Ours, response_id: str, after: int | None = None) -> list[Event]:
    params = {"stream": "true"} | ({"starting_after": str(after)} if after is not None else {})
    answer = await ours.http.get(f"/v1/responses/{response_id}", params=params)
    assert answer.status_code == 200, answer.text
    assert answer.content.endswith(b"data: [DONE]\n\n")
    return events_in(answer.content)


def events_in(raw: bytes) -> list[Event]:
    frames = [frame.partition(b"\ndata: ")[2] for frame in raw.split(b"\n\n") if frame.startswith(b"event: ")]
    return [orjson.loads(frame) for frame in frames]


class Follower:
    """Reads a stream until it ends, or until `leave` is called."""

    def __init__(self, request: Any) -> None:
        self.raw = b""
        self._request = request
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    @property
    def events(self) -> list[Event]:
        return events_in(self.raw)

    async def _read(self) -> None:
        async with self._request as answer:
            assert answer.status_code == 200
            async for data in answer.aiter_raw():
                self.raw += data
                self._news.set()

    async def until(self, awaited: bytes) -> None:
        async with asyncio.timeout(60):
            while awaited not in self.raw:
                self._news.clear()
                await self._news.wait()

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def follow(ours: Ours, response_id: str, after: int = -1) -> Follower:
    params = {"stream": "true"} | ({"starting_after": str(after)} if after >= 0 else {})
    return Follower(ours.http.stream("GET", f"/v1/responses/{response_id}", params=params))


def create_streamed(ours: Ours, **body: Any) -> Follower:
    return Follower(ours.http.stream("POST", "/v1/responses", json={**BODY, "stream": True, **body}))


# -- create and retrieve -------------------------------------------------------------------------------------------------


@pytest.mark.both_mounts
async def test_a_background_response_is_queued_at_once_and_then_completed(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    go = Signal()
    upstream.stream(*HELLO, before=go)
    document = await create(ours, metadata={"a": "b"})
    assert (document["status"], document["output"], document["background"]) == ("queued", [], True)
    go.set()
    done = await ended(ours, document["id"])
    assert upstream.requests[0].json["stream"] is True  # a client may follow it later
    assert done["status"] == "completed"
    assert done["output_text"] == "Hello"
    assert done["usage"]["total_tokens"] == 5
    assert (done["created_at"], done["metadata"]) == (document["created_at"], {"a": "b"})


@pytest.mark.both_mounts
async def test_the_stream_of_a_create_equals_the_log_and_ends_with_the_stored_response(
    replica: Replica, upstream: ScriptedUpstream
) -> None:
    ours = replica()
    upstream.stream(*HELLO)
    follower = create_streamed(ours)
    await follower.task
    assert [event["type"] for event in follower.events[:4]] == TYPES
    assert [event["sequence_number"] for event in follower.events] == list(range(len(follower.events)))
    document = follower.events[-1]["response"]
    assert document == await get(ours, document["id"])
    assert await streamed(ours, document["id"]) == follower.events


async def test_the_official_client_creates_polls_and_streams(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    upstream.stream(*HELLO)
    response = await ours.client.responses.create(model="tiny", input="Hi", background=True)
    while response.status in RUNNING:
        response = await ours.client.responses.retrieve(response.id)
    assert response.output_text == "Hello"
    stream = await ours.client.responses.retrieve(response.id, stream=True, starting_after=5, include_obfuscation=True)
    assert [event.sequence_number async for event in stream][:2] == [6, 7]


async def test_a_background_response_can_be_continued(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    upstream.stream(*HELLO)
    first = await create(ours)
    await ended(ours, first["id"])
    upstream.stream(*HELLO)
    second = await create(ours, previous_response_id=first["id"], input="More")
    assert (await ended(ours, second["id"]))["status"] == "completed"
    assert [message["content"] for message in upstream.requests[-1].json["messages"]] == ["Hi", "Hello", "More"]


async def test_a_background_response_is_added_to_its_conversation(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    conversation = (await ours.http.post("/v1/conversations", json={})).json()["id"]
    upstream.stream(*HELLO)
    await ended(ours, (await create(ours, conversation=conversation))["id"])
    items = (await ours.http.get(f"/v1/conversations/{conversation}/items")).json()["data"]
    assert [item["role"] for item in items] == ["assistant", "user"]


async def test_a_running_response_cannot_be_continued_but_lists_its_input_items(
    replica: Replica, upstream: ScriptedUpstream
) -> None:
    ours = replica()
    go = Signal()
    upstream.stream(*HELLO, before=go)
    first = await create(ours)
    answer = await ours.http.post("/v1/responses", json={"input": "x", "model": "tiny", "previous_response_id": first["id"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
    items = (await ours.http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["Hi"]
    go.set()
    await ended(ours, first["id"])


async def test_an_upstream_error_fails_the_response(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    upstream.whole(error("too much"), 400)
    document = await create(ours)
    done = await ended(ours, document["id"])
    assert done["status"] == "failed"
    assert "too much" in done["error"]["message"]
    assert (await streamed(ours, document["id"]))[-1]["type"] == "response.failed"


CALLED = [
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_output_without_its_call_is_a_400_and_nothing_is_stored(
    replica: Replica, redis_url: str, stream: bool
) -> None:
    answer = await replica().http.post("/v1/responses", json={**BODY, "input": CALLED[1:], "stream": stream})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0]")
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys("rmw:*:r:*") == []


async def test_a_queued_job_whose_tool_call_is_deleted_fails_without_an_upstream_call(
    replica: Replica, upstream: ScriptedUpstream
) -> None:
    ours = replica(jobs__concurrency=0)
    conversation = (await ours.http.post("/v1/conversations", json={"items": CALLED})).json()["id"]
    response_id = (await create(ours, conversation=conversation))["id"]
    items = (await ours.http.get(f"/v1/conversations/{conversation}/items?order=asc")).json()["data"]
    await ours.http.delete(f"/v1/conversations/{conversation}/items/{items[0]['id']}")
    document = await ended(replica(jobs__lease=60), response_id)
    assert (document["status"], document["error"]["code"]) == ("failed", "invalid_prompt")
    assert "No tool call found" in document["error"]["message"]
    assert [event["type"] for event in await streamed(ours, response_id)] == [*TYPES[:3], "response.failed"]
    assert upstream.requests == []


async def test_a_job_whose_history_is_damaged_while_it_is_queued_fails(
    replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    ours = replica(jobs__concurrency=0)
    conversation = (await ours.http.post("/v1/conversations", json={"items": CALLED})).json()["id"]
    response_id = (await create(ours, conversation=conversation))["id"]
    damage(redis_url, f"rmw:{{{conversation.removeprefix('conv_')}}}:c:items")
    document = await ended(replica(jobs__lease=60), response_id)
    assert (document["status"], document["error"]["code"]) == ("failed", "server_error")
    assert upstream.requests == []


async def test_a_job_whose_credential_is_damaged_fails(replica: Replica, upstream: ScriptedUpstream, redis_url: str) -> None:
    response_id = (await create(replica(jobs__concurrency=0)))["id"]
    with redis.Redis.from_url(redis_url) as client:
        key = f"rmw:{{{response_id[5:30]}}}:k:{response_id[30:]}"
        client.delete(key)
        client.rpush(key, "another program's")
    document = await ended(replica(jobs__lease=60), response_id)
    assert (document["status"], document["error"]["code"]) == ("failed", "server_error")
    assert upstream.requests == []


@pytest.mark.parametrize("how", ["the record is lost", "the record has another type", "the document is no JSON"])
async def test_the_credential_of_a_job_with_a_lost_or_damaged_record_is_deleted(
    replica: Replica, redis_url: str, how: str
) -> None:
    response_id = (await create(replica(jobs__concurrency=0)))["id"]
    record = f"rmw:{{{response_id[5:30]}}}:r:{response_id[30:]}"
    with redis.Redis.from_url(redis_url) as client:
        assert client.exists(record.replace(":r:", ":k:"))
        if how == "the document is no JSON":
            client.hset(record, "document", "Jx")
        else:
            client.delete(record)
        if how == "the record has another type":
            client.set(record, "another program's")
        replica()
        async with asyncio.timeout(60):
            while client.exists(record.replace(":r:", ":k:")) or client.keys("rmw:{q2}:jobs"):
                await asyncio.sleep(0.05)


async def test_a_damaged_queue_refuses_new_jobs_but_running_jobs_can_be_cancelled(
    replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    ours = replica(jobs__lease=60)
    answer = upstream.stream(text("Hello"), Signal(), finish())
    response_id = (await create(ours))["id"]
    await answer.asked.wait()
    damage(redis_url, "rmw:{q2}:leases")
    refused = await ours.http.post("/v1/responses", json={"model": "m", "input": "Hi", "background": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "state_damaged")
    assert (await cancel(ours, response_id)).json()["status"] == "cancelled"
    await answer.left.wait()


async def test_a_job_whose_conversation_is_damaged_while_it_runs_fails_and_is_stored(
    replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    ours = replica(jobs__lease=60)
    conversation = (await ours.http.post("/v1/conversations", json={"items": CALLED})).json()["id"]
    go = Signal()
    answer = upstream.stream(text("Hello"), go, finish())
    response_id = (await create(ours, conversation=conversation))["id"]
    await answer.asked.wait()
    damage(redis_url, f"rmw:{{{conversation.removeprefix('conv_')}}}:c:items")
    go.set()
    document = await ended(ours, response_id)
    assert (document["status"], document["output_text"]) == ("failed", "Hello")
    assert (await streamed(ours, response_id))[-1]["response"] == document


def damage(redis_url: str, key: str) -> None:
    """Put a value of the wrong type under a key."""
    with redis.Redis.from_url(redis_url) as client:
        client.set(key, "another program's")


async def test_a_prompt_that_is_too_long_for_the_model_fails_with_context_length_exceeded(
    replica: Replica, upstream: ScriptedUpstream
) -> None:
    upstream.whole(error("The engine prompt length 9 exceeds the max_model_len 5. Please reduce prompt."), 400)
    ours = replica()
    response_id = (await create(ours))["id"]
    failed = (await streamed(ours, response_id))[-1]
    assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "context_length_exceeded")
    document = (await ours.http.get(f"/v1/responses/{response_id}")).json()
    assert (document["status"], document["error"]) == ("failed", failed["response"]["error"])


async def test_an_answer_that_is_too_long_to_be_stored_fails(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica(limits__max_request_bytes=20_000)
    upstream.stream(text("x" * 30_000), finish())
    document = await ended(ours, (await create(ours))["id"])
    assert (document["status"], document["completed_at"]) == ("failed", None)
    assert "the maximum is 20000" in document["error"]["message"]
    assert (await streamed(ours, document["id"]))[-1]["response"] == document


async def test_an_answer_with_finish_reason_length_is_incomplete(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    upstream.whole(completion({"content": "Hel"}, "length"))
    assert (await ended(ours, (await create(ours))["id"]))["status"] == "incomplete"


@pytest.mark.both_mounts
async def test_a_job_runs_with_the_credential_of_its_caller(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    upstream.stream(*HELLO)
    headers = {"authorization": "Bearer mine", "x-session-id": "s1"}
    answer = await ours.http.post("/v1/responses", json=BODY, headers=headers)
    while upstream.requests == []:
        await asyncio.sleep(0.02)
    assert {name: upstream.requests[0].headers[name] for name in headers} == headers
    assert (await ours.http.get(f"/v1/responses/{answer.json()['id']}")).status_code == 404
    assert (await ours.http.get(f"/v1/responses/{answer.json()['id']}", headers=headers)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_stored_for_a_credential_that_the_upstream_refuses(
    start_at: Start, serve: Serve, redis_url: str, stream: bool
) -> None:
    locked = Echo()
    locked.keys = {"good"}
    ours = start_at("proxy", upstream=serve(locked), auth__secret_keys=[SECRET])
    headers = {"authorization": "Bearer bad"}
    answer = await ours.http.post("/v1/responses", json={**BODY, "stream": stream}, headers=headers)
    assert answer.status_code == 401
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys() == []


async def test_background_without_a_shared_secret_is_a_400_naming_the_setting(start_at: Start, mount: str) -> None:
    answer = await start_at(mount).http.post("/v1/responses", json=BODY)
    assert answer.status_code == 400
    assert "secret_keys" in answer.json()["error"]["message"]


@pytest.mark.both_mounts
async def test_the_embedded_store_needs_no_shared_secret(start_at: Start, mount: str, upstream: ScriptedUpstream) -> None:
    ours = start_at(mount, redis__url=None)
    upstream.stream(*HELLO)
    assert (await ended(ours, (await create(ours))["id"]))["output_text"] == "Hello"


# -- following -----------------------------------------------------------------------------------------------------------


async def test_a_broken_stream_can_be_resumed_at_another_replica(replica: Replica, upstream: ScriptedUpstream) -> None:
    here, there = replica(), replica()
    go = Signal()
    upstream.stream(text("Hel"), go, text("lo"), finish())
    first = create_streamed(here)
    await first.until(b'"Hel"')
    await first.leave()
    read = first.events
    second = follow(there, read[0]["response"]["id"], read[-1]["sequence_number"])
    go.set()
    await second.task
    assert read + second.events == await streamed(here, read[0]["response"]["id"])
    assert second.events[-1]["response"]["output_text"] == "Hello"


@pytest.mark.both_mounts
async def test_a_client_that_leaves_does_not_stop_the_run(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    go = Signal()
    answer = upstream.stream(text("Hel"), go, text("lo"), finish())
    follower = create_streamed(ours)
    await follower.until(b'"Hel"')
    await follower.leave()
    go.set()
    assert (await ended(ours, follower.events[0]["response"]["id"]))["status"] == "completed"
    assert not answer.left.is_set()


@pytest.mark.parametrize("after", [0, 1, 4, 8, 9, 10, 11, 5000])
async def test_starting_after_returns_only_events_with_a_greater_sequence_number(
    replica: Replica, upstream: ScriptedUpstream, after: int
) -> None:
    ours = replica()
    upstream.stream(*HELLO)
    response_id = (await create(ours))["id"]
    await ended(ours, response_id)
    events = await streamed(ours, response_id)
    assert await streamed(ours, response_id, after) == events[after + 1 :]


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "", "1_0", " 1", "null", "99999999999999999999"])
async def test_an_invalid_starting_after_is_a_400(replica: Replica, value: str) -> None:
    answer = await replica().http.get(f"/v1/responses/resp_{'a' * 50}?stream=true&starting_after={value}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")


async def test_many_followers_of_one_response_share_one_subscription(
    replica: Replica, upstream: ScriptedUpstream, redis_url: str
) -> None:
    ours = replica()
    go = Signal()
    upstream.stream(text("Hel"), go, text("lo"), finish())
    response_id = (await create(ours))["id"]
    followers = [follow(ours, response_id) for _ in range(50)]
    for follower in followers:
        await follower.until(b'"Hel"')
    with redis.Redis.from_url(redis_url) as client:
        channel = f"rmw:{{{response_id[5:30]}}}:ev:{response_id[30:]}"
        assert client.execute_command("PUBSUB", "SHARDNUMSUB", channel) == [channel.encode(), 1]
    go.set()
    await asyncio.gather(*(follower.task for follower in followers))
    assert all(follower.events == followers[0].events for follower in followers)


async def test_a_follower_that_does_not_read_does_not_delay_the_response(
    replica: Replica, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("responses_mw.upstream.stream.MAX_TEXT", 1 << 30)
    ours = replica()
    go = Signal()
    upstream.stream(text("a"), go, *[text("x" * 10_000) for _ in range(1500)], finish())
    response_id = (await create(ours))["id"]
    async with ours.http.stream("GET", f"/v1/responses/{response_id}?stream=true") as slow:
        go.set()
        assert (await ended(ours, response_id))["status"] == "completed"
        assert events_in(await slow.aread()) == await streamed(ours, response_id)


async def test_streaming_an_expired_log_is_a_400_with_code_stream_expired(
    replica: Replica, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "LOG_TTL_SECONDS", 1)
    ours = replica()
    upstream.stream(*HELLO)
    response_id = (await create(ours))["id"]
    await ended(ours, response_id)
    await asyncio.sleep(1.1)
    answer = await ours.http.get(f"/v1/responses/{response_id}?stream=true")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "stream_expired")
    assert (await get(ours, response_id))["output_text"] == "Hello"


async def test_a_foreground_response_cannot_be_streamed_again(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    upstream.whole(completion({"content": "Hello"}))
    response_id = (await create(ours, background=False))["id"]
    answer = await ours.http.get(f"/v1/responses/{response_id}?stream=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


# -- cancelling ----------------------------------------------------------------------------------------------------------


async def cancel(ours: Ours, response_id: str) -> httpx.Response:
    return await ours.http.post(f"/v1/responses/{response_id}/cancel")


def prefill(upstream: ScriptedUpstream) -> Answer:
    return upstream.stream(*HELLO, before=Signal())


def mid_answer(upstream: ScriptedUpstream) -> Answer:
    return upstream.stream(text("Hel"), Signal(), text("lo"), finish())


@pytest.mark.parametrize("script", [prefill, mid_answer])
@pytest.mark.both_mounts
async def test_a_cancel_from_another_replica_ends_the_upstream_call_at_once(
    replica: Replica, upstream: ScriptedUpstream, script: Any
) -> None:
    here, there = replica(jobs__lease=120), replica(jobs__concurrency=0)  # a heartbeat would come too late
    answer = script(upstream)
    follower = create_streamed(there)
    await follower.until(b"output_text.delta" if script is mid_answer else b"response.in_progress")
    await answer.asked.wait()
    response_id = follower.events[0]["response"]["id"]
    cancelled = await cancel(there, response_id)
    await answer.left.wait()
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    await follower.task
    assert follower.events[-1]["type"] == "response.failed"
    assert follower.events[-1]["response"] == cancelled.json() == await get(here, response_id)
    assert cancelled.json()["output_text"] == ("Hel" if script is mid_answer else "")
    assert await streamed(here, response_id) == follower.events
    assert (await cancel(here, response_id)).json() == cancelled.json()


@pytest.mark.parametrize("script", [prefill, mid_answer])
async def test_a_cancelled_response_leaves_nothing_to_the_garbage_collector(
    replica: Replica, upstream: ScriptedUpstream, script: Any
) -> None:
    ours, answer = replica(), script(upstream)
    async with nothing_left():
        response_id = (await create(ours))["id"]
        await answer.asked.wait()
        await cancel(ours, response_id)
        await answer.left.wait()


async def test_a_queued_response_that_is_cancelled_never_runs(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica(jobs__concurrency=0)
    response_id = (await create(ours))["id"]
    assert (await cancel(ours, response_id)).json()["status"] == "cancelled"
    assert [event["type"] for event in await streamed(ours, response_id)] == [
        "response.created",
        "response.queued",
        "response.failed",
    ]
    other = replica()
    upstream.stream(*HELLO)
    await ended(other, (await create(other))["id"])
    assert len(upstream.requests) == 1


async def test_concurrent_cancels_write_one_final_event(replica: Replica, upstream: ScriptedUpstream) -> None:
    here, there = replica(), replica()
    answer = mid_answer(upstream)
    response_id = (await create(here))["id"]
    await answer.asked.wait()
    answers = await asyncio.gather(*(cancel(one, response_id) for one in (here, there) * 4))
    assert [one.json() for one in answers] == [await get(here, response_id)] * 8
    assert [event["type"] for event in await streamed(here, response_id)].count("response.failed") == 1


async def test_cancelling_a_finished_response_does_not_change_it(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    upstream.stream(*HELLO)
    document = await ended(ours, (await create(ours))["id"])
    assert (await cancel(ours, document["id"])).json() == document


async def test_only_one_of_several_concurrent_cancels_reads_the_log(
    replica: Replica, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, log = list[str](), Jobs.log

    async def slow(jobs: Jobs, response_id: str, number: int) -> list[Batch]:
        reads.append(response_id)
        await asyncio.sleep(0.3)
        return await log(jobs, response_id, number)

    ours = replica()
    mid_answer(upstream)
    follower = create_streamed(ours)
    await follower.until(b'"Hel"')
    await follower.leave()
    response_id = follower.events[0]["response"]["id"]
    monkeypatch.setattr(Jobs, "log", slow)
    answers = await asyncio.gather(*(cancel(ours, response_id) for _ in range(8)))
    assert {(answer.status_code, answer.json()["status"]) for answer in answers} == {(200, "cancelled")}
    assert reads == [response_id]


async def test_a_synchronous_response_cannot_be_cancelled(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    upstream.whole(completion({"content": "Hello"}))
    answer = await cancel(ours, (await create(ours, background=False))["id"])
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "Cannot cancel a synchronous response.")


async def test_deleting_a_running_response_cancels_it(replica: Replica, upstream: ScriptedUpstream) -> None:
    ours = replica()
    answer = mid_answer(upstream)
    follower = create_streamed(ours)
    await follower.until(b'"Hel"')
    response_id = follower.events[0]["response"]["id"]
    assert (await ours.http.delete(f"/v1/responses/{response_id}")).json()["deleted"]
    await answer.left.wait()
    await follower.task
    assert follower.events[-1]["type"] == "response.failed"
    assert (await ours.http.get(f"/v1/responses/{response_id}")).status_code == 404
    assert (await ours.http.get(f"/v1/responses/{response_id}?stream=true")).status_code == 404


async def test_a_replica_with_other_secrets_refuses_background_responses(replica: Replica, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    await ended(one := replica(), (await create(one))["id"])
    answer = await replica(auth__secret_keys=["another secret than all the other replicas have"]).http.post(
        "/v1/responses", json={"model": "tiny", "input": "Hi", "background": True}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")
    assert "the same on every replica" in answer.json()["error"]["message"]
