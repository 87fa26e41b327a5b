"""Requests with an Idempotency-Key: a repeat gets the response of the first one."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
import redis

from responses_mw.asgi import idempotency
from responses_mw.asgi.idempotency import OnceOnly
from responses_mw.engine.run_checks import RunChecks
from responses_mw.errors import BadRequest, Conflict, Unauthorized
from responses_mw.protocol.request.create import parse
from responses_mw.protocol.types import Event
from responses_mw.state import State, StateUnavailable, connect
from responses_mw.state_opening import open_state
from tests.support.configured import make_settings
from tests.support.echo import Echo
from tests.support.oracle import check
from tests.support.scripted import HELLO, Signal, completion, finish, text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

    import httpx

    from responses_mw.engine.run import Run
    from responses_mw.protocol.types import Event
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

BODY = {"model": "tiny", "input": "Hi"}


SECRET = "a secret that all the replicas of the deployment have"


async def accept() -> None:
    """Let every caller pass."""


def ended(response_id: str, *, store: bool) -> Event:
    return Event("response.completed", {"type": "response.completed", "response": {"id": response_id, "store": store}})


@pytest.fixture
def ours(start: Start) -> Ours:
    return start(auth__secret_keys=[SECRET])


async def ask(ours: Ours, name: str = "1", **body: Any) -> httpx.Response:
    return await ours.http.post("/v1/responses", json={**BODY, **body}, headers={"Idempotency-Key": name})


def error(answer: httpx.Response) -> tuple[int, str, str]:
    told = answer.json()["error"]
    return answer.status_code, told["param"], told["code"]


@pytest.mark.both_mounts
async def test_a_repeated_request_gets_the_first_response(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    first = await ask(ours)
    repeated = await ours.http.post(
        "/v1/responses", content=b'{"input":  "Hi", "model": "tiny"}', headers={"Idempotency-Key": "1"}
    )
    assert (first.status_code, first.json()) == (200, repeated.json())
    assert len(upstream.requests) == 1


async def test_the_official_client_sends_the_key_as_an_extra_header(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    asked = [
        await ours.client.responses.create(model="tiny", input="Hi", extra_headers={"Idempotency-Key": "1"}) for _ in range(2)
    ]
    assert asked[0] == asked[1]


async def test_a_repeated_stream_is_replayed_when_it_has_ended(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.stream(*HELLO)
    first = check((await ask(ours, stream=True)).content)
    again = check((await ask(ours, stream=True)).content)
    assert again.response == first.response
    assert again.deltas == ["Hello"]
    assert len(upstream.requests) == 1


async def test_a_repeat_of_a_running_request_is_a_409_if_streamed_and_waits_if_json(
    ours: Ours, upstream: ScriptedUpstream
) -> None:
    go = Signal()
    answer = upstream.stream(text("Hel"), go, text("lo"), finish())
    streaming = asyncio.create_task(ask(ours, stream=True))
    await answer.asked.wait()
    refused = await ask(ours, stream=True)
    assert error(refused) == (409, "Idempotency-Key", "idempotency_key_in_use")
    assert int(refused.headers["retry-after"]) >= 1
    go.set()
    first = check((await streaming).content)
    upstream.whole(completion({"content": "Hello"}), before=(slow := Signal()))
    running = [asyncio.create_task(ask(ours, "2")) for _ in range(3)]
    await asyncio.sleep(0.2)
    slow.set()
    documents = [(await one).json() for one in running]
    assert documents[0] == documents[1] == documents[2]
    assert documents[0]["id"] != first.response["id"]
    assert len(upstream.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_background_request_gets_the_same_response(
    ours: Ours, upstream: ScriptedUpstream, *, stream: bool
) -> None:
    upstream.stream(*HELLO)
    first, again = await asyncio.gather(*(ask(ours, background=True, stream=stream) for _ in range(2)))
    if stream:
        assert first.content == again.content
    else:
        assert first.json()["id"] == again.json()["id"]
    async with asyncio.timeout(60):
        while not upstream.requests:
            await asyncio.sleep(0.02)
    assert len(upstream.requests) == 1


async def test_a_different_body_with_the_same_key_is_a_400(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    await ask(ours)
    for other in ({"input": "Bye"}, {"stream": True}, {"background": True}):
        assert error(await ask(ours, **other)) == (400, "Idempotency-Key", "idempotency_key_reused")


async def test_the_same_key_of_two_owners_is_two_requests(ours: Ours, upstream: ScriptedUpstream) -> None:
    ids = set()
    for name in ("alice", "bob"):
        upstream.whole(completion({"content": "Hello"}))
        headers = {"Idempotency-Key": "1", "authorization": f"Bearer {name}"}
        ids.add((await ours.http.post("/v1/responses", json=BODY, headers=headers)).json()["id"])
    assert len(ids) == 2


@pytest.mark.parametrize("background", [False, True])
async def test_a_request_that_fails_without_a_response_frees_its_key(
    ours: Ours, upstream: ScriptedUpstream, *, background: bool
) -> None:
    body: dict[str, Any] = {"background": background, "previous_response_id": "resp_" + "0" * 50}
    assert (await ask(ours, **body)).status_code == 400
    assert (await ask(ours, **body)).json()["error"]["code"] == "previous_response_not_found"
    if not background:
        upstream.whole({"error": {"message": "no"}}, 400)
        assert (await ask(ours)).status_code == 400
        upstream.whole(completion({"content": "Hello"}))
        assert (await ask(ours)).status_code == 200


async def test_a_client_that_disconnects_frees_its_key(ours: Ours, upstream: ScriptedUpstream) -> None:
    answer = upstream.stream(text("Hel"), Signal())
    streaming = asyncio.create_task(ask(ours, stream=True))
    await answer.asked.wait()
    streaming.cancel()
    await asyncio.gather(streaming, return_exceptions=True)
    await answer.left.wait()
    upstream.stream(*HELLO)
    async with asyncio.timeout(60):
        while (again := await ask(ours, stream=True)).status_code == 409:
            await asyncio.sleep(0.02)
    assert check(again.content).response["output_text"] == "Hello"


async def test_cancelling_a_request_while_it_reserves_its_key_frees_the_key(redis_url: str) -> None:
    async def answer() -> AsyncGenerator[list[Event], None]:
        await asyncio.Event().wait()
        yield []

    request = parse(BODY)
    async with open_state(make_settings(redis__url=redis_url)) as state:
        assert state is not None
        for steps in range(100):  # of the loop before the cancellation, which hits some point of the reservation
            guard = OnceOnly(state, "owner", str(steps), b"{}", accept)
            running = asyncio.create_task(anext(guard.run(answer(), request, open_reasoning=False)))
            for _ in range(steps % 25):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait({running})
            assert await OnceOnly(state, "owner", str(steps), b"{}", accept).find_earlier(wait=False) is None


@pytest.fixture
async def guard(redis_url: str) -> AsyncIterator[Callable[..., OnceOnly]]:
    """Create guards of repeated requests with one key."""
    async with open_state(make_settings(redis__url=redis_url)) as state:
        assert state is not None
        yield lambda key="1": OnceOnly(state, "owner", key, b"{}", accept)


async def batch_of(*events: Event) -> AsyncGenerator[list[Event], None]:
    yield list(events)


@pytest.mark.parametrize("events", [[], [ended("resp_1", store=False)]], ids=["no response", "unstored response"])
async def test_a_run_without_a_stored_response_frees_its_key(guard: Callable[..., OnceOnly], events: list[Event]) -> None:
    batches = guard().run(batch_of(*events), parse(BODY), open_reasoning=False)
    assert [batch async for batch in batches] == [events]
    assert await guard().find_earlier(wait=False) is None


async def test_the_key_of_a_stored_response_is_kept_for_a_day(
    guard: Callable[..., OnceOnly], running_key: Callable[[], tuple[redis.Redis, bytes]]
) -> None:
    started = Event("response.in_progress", {"type": "response.in_progress"})
    batches = guard().run(batch_of(started, ended("resp_1", store=True)), parse(BODY), open_reasoning=False)
    assert len(await anext(batches)) == 2
    await batches.aclose()
    client = running_key()[0]
    [key] = client.keys("rmw:{i*")
    assert client.hget(key, "done") is not None
    assert 23 < client.ttl(key) / 3600 <= 24


async def hold_and_fail(guard: OnceOnly, error: Exception) -> None:
    async with guard.hold_key():
        assert await guard.find_earlier(wait=False) is None
        await guard.name("resp_" + "0" * 50)
        raise error


async def test_an_error_after_the_response_was_named_frees_the_key_unless_the_response_may_be_stored(
    guard: Callable[..., OnceOnly],
) -> None:
    for key, error, is_free in (("1", StateUnavailable("away"), False), ("2", BadRequest("no"), True)):
        with pytest.raises(type(error)):
            await hold_and_fail(guard(key), error)
        if is_free:
            assert await guard(key).find_earlier(wait=False) is None
        else:
            with pytest.raises(Conflict):
                await guard(key).find_earlier(wait=False)


async def test_redis_is_not_used_for_a_refused_caller(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse() -> None:
        raise Unauthorized("no")

    async def answer() -> AsyncGenerator[list[Event], None]:
        yield []

    caplog.set_level(logging.DEBUG, "responses_mw")
    async with aclosing(State(connect("redis://127.0.0.1:1"))) as state:
        guard = OnceOnly(state, "owner", "1", b"{}", refuse)
        with pytest.raises(Unauthorized):
            await anext(guard.run(answer(), parse(BODY), open_reasoning=False))
    assert "could not release" not in caplog.text


async def test_a_repeat_whose_response_was_deleted_is_a_404(ours: Ours, upstream: ScriptedUpstream) -> None:
    upstream.whole(completion({"content": "Hello"}))
    response_id = (await ask(ours)).json()["id"]
    await ours.http.delete(f"/v1/responses/{response_id}")
    assert (await ask(ours)).status_code == 404


async def test_the_key_of_a_lost_replica_is_free_when_its_lease_expires(
    ours: Ours, upstream: ScriptedUpstream, redis_url: str
) -> None:
    go = Signal()
    answer = upstream.stream(text("Hel"), go, finish())
    streaming = asyncio.create_task(ask(ours, stream=True))
    await answer.asked.wait()
    with redis.Redis.from_url(redis_url) as client:
        (key,) = [key for key in client.keys("rmw:{i*") if client.hget(key, "done") is None]
        assert 0 < client.pttl(key) <= 30_000
        client.delete(key)  # as if it had expired
    upstream.stream(*HELLO)
    assert check((await ask(ours, stream=True)).content).response["output_text"] == "Hello"
    go.set()
    await streaming


class SlowCheck:
    """Make the first check of a background response wait for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.go = Signal(), Signal()
        check = RunChecks.check

        async def slow(checks: RunChecks, run: Run) -> None:
            if not self.held.is_set():
                self.held.set()
                await self.go.wait()
            await check(checks, run)

        monkeypatch.setattr(RunChecks, "check", slow)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowCheck:
    return SlowCheck(monkeypatch)


@pytest.fixture
def running_key(redis_url: str) -> Iterator[Callable[[], tuple[redis.Redis, bytes]]]:
    """Find the key of the running request."""
    with redis.Redis.from_url(redis_url) as client:
        yield lambda: (client, *[key for key in client.keys("rmw:{i*") if client.hget(key, "done") is None])


async def test_the_key_of_a_slow_background_create_is_renewed(
    ours: Ours, slow: SlowCheck, running_key: Callable[[], tuple[redis.Redis, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "RENEWAL_INTERVAL", 0.01)
    creating = asyncio.create_task(ask(ours, background=True))
    await slow.held.wait()
    client, key = running_key()
    client.pexpire(key, 20_000)
    async with asyncio.timeout(15):
        while client.pttl(key) <= 20_000:
            await asyncio.sleep(0.01)
    slow.go.set()
    assert (await creating).status_code == 200
    assert client.pttl(key) > 30_000


async def test_a_background_create_that_lost_its_key_to_another_request_is_a_409(
    ours: Ours, slow: SlowCheck, running_key: Callable[[], tuple[redis.Redis, bytes]]
) -> None:
    creating = asyncio.create_task(ask(ours, background=True))
    await slow.held.wait()
    client, key = running_key()
    client.delete(key)  # as if it had expired
    created = await ask(ours, background=True)
    slow.go.set()
    refused = await creating
    assert error(refused) == (409, "Idempotency-Key", "idempotency_key_in_use")
    assert (await ask(ours, background=True)).json()["id"] == created.json()["id"]
    assert len(client.keys("rmw:*:r:*")) == 1


@pytest.mark.parametrize("key", ["", "a b", "ä", "x" * 256])
async def test_an_invalid_key_is_refused(ours: Ours, key: str) -> None:
    answer = await ours.http.post("/v1/responses", json=BODY, headers=[(b"Idempotency-Key", key.encode("latin-1"))])
    assert error(answer) == (400, "Idempotency-Key", "invalid_idempotency_key")


async def test_two_keys_are_refused(ours: Ours) -> None:
    headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "a")]
    answer = await ours.http.post("/v1/responses", json=BODY, headers=headers)
    assert error(answer) == (400, "Idempotency-Key", "invalid_idempotency_key")


async def test_a_key_with_store_false_is_a_400(ours: Ours) -> None:
    assert error(await ask(ours, store=False)) == (400, "Idempotency-Key", "idempotency_key_not_supported")


async def test_a_credential_that_the_upstream_rejects_reserves_no_key(start_at: Start, serve: Serve, redis_url: str) -> None:
    locked = Echo()
    locked.keys = {"good"}
    ours = start_at("proxy", upstream=serve(locked), auth__secret_keys=[SECRET])
    headers = {"authorization": "Bearer bad", "Idempotency-Key": "k"}
    with redis.Redis.from_url(redis_url) as client:
        for body in ({}, {"stream": True}, {"background": True}):
            answer = await ours.http.post("/v1/responses", json={**BODY, **body}, headers=headers)
            assert answer.status_code == 401
        assert client.keys() == []
