"""A caller refused by the upstream after the status of the answer was sent leaves nothing in Redis."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.auth.conftest import snapshot
from tests.auth.servers import Knowing
from tests.support import oracle
from tests.support.scripted import HELLO, Answer, ScriptedUpstream, Signal, error
from tests.support.scripted import JSON as JSON_HEADERS
from tests.support.websocket import opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.servers import Ours, Start
    from tests.support.valkey import Plain

pytestmark = pytest.mark.both_mounts

WRONG = {"authorization": "Bearer wrong"}


def late(status: int, held: Signal) -> Answer:
    return Answer([b'{"error": {"message": "no"}}'], status, JSON_HEADERS, before=held)


async def streamed(ours: Ours, held: Signal, **members: Any) -> oracle.Event:
    """Return the last event of a stream. Release the upstream when the stream has begun."""
    last: oracle.Event = {}
    body = {"model": "tiny", "input": "Hi", "stream": True, **members}
    async with ours.http.stream("POST", "/v1/responses", json=body, headers=WRONG) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            held.set()
            if line.startswith("data: {"):
                last = orjson.loads(line[6:])
    return last


@pytest.mark.parametrize("status", [401, 403])
async def test_a_stream_that_is_refused_late_is_not_stored(
    start: Start, upstream: ScriptedUpstream, keys: Plain, status: int
) -> None:
    ours, held = start(upstream__status_grace=0), Signal()
    upstream.queue(late(status, held))
    before = snapshot(keys)
    last = await streamed(ours, held)
    assert last["type"] == "response.failed"
    assert last["response"]["store"] is False
    assert snapshot(keys) == before
    assert (await ours.http.get(f"/v1/responses/{last['response']['id']}", headers=WRONG)).status_code == 404


async def test_a_failed_response_of_an_accepted_caller_is_stored(start: Start, upstream: ScriptedUpstream) -> None:
    ours, held = start(upstream__status_grace=0), Signal()
    upstream.queue(late(500, held))
    last = await streamed(ours, held)
    assert (last["type"], last["response"]["store"]) == ("response.failed", True)
    stored = await ours.http.get(f"/v1/responses/{last['response']['id']}", headers=WRONG)
    assert stored.json()["status"] == "failed"


async def test_a_failed_response_of_a_caller_that_was_never_accepted_is_not_stored(
    start_with: Callable[..., Ours], keys: Plain
) -> None:
    """A failure of the upstream does not prove that the caller is valid."""
    upstream, held = Knowing(), Signal()
    upstream.before_refusal = held
    upstream.refusal = 500
    ours = start_with("proxy", upstream, upstream__status_grace=0)
    before = snapshot(keys)
    last = await streamed(ours, held)
    assert (last["type"], last["response"]["store"]) == ("response.failed", False)
    assert snapshot(keys) == before


async def test_a_revoked_credential_is_refused_on_an_open_websocket(start_with: Callable[..., Ours], keys: Plain) -> None:
    upstream = Knowing()
    ours = start_with("proxy", upstream, upstream__status_grace=0)
    async with opened(ours, key="good") as socket:
        first = await socket.response("Hi")
        upstream.keys = set()
        before = snapshot(keys)
        await socket.create("And now?", previous_response_id=first["id"])  # an acceptance is cached for a while
        last = (await socket.events())[-1]
        assert last["type"] in ("response.failed", "error")
        assert snapshot(keys) == before
        told = await socket.error("Hello?", previous_response_id=first["id"], generate=False)
        assert (told["status"], told["error"]["code"]) == (401, "invalid_api_key")
        assert snapshot(keys) == before


async def test_a_plain_request_makes_one_upstream_request(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(upstream__dialect="vllm")  # otherwise, it would be detected
    for stream in (False, True):
        upstream.stream(*HELLO)
        answer = await ours.http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "stream": stream}, headers=WRONG)
        assert answer.status_code == 200
    assert upstream.visits == []
    assert len(upstream.requests) == 2


async def test_an_upstream_refusal_is_a_502_for_a_caller_with_a_configured_api_key(
    start: Start, upstream: ScriptedUpstream
) -> None:
    line = f"alice:sha256:{sha256(b'key-of-alice').hexdigest()}"
    ours = start(auth__api_keys=[line])
    upstream.whole(error("who are you", 401), 401)
    answer = await ours.http.post(
        "/v1/responses", json={"model": "tiny", "input": "Hi"}, headers={"authorization": "Bearer key-of-alice"}
    )
    assert answer.status_code == 502
