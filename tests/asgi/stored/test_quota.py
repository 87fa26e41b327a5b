"""The storage quota of an owner: requests are refused early, or answered without being stored."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from websockets.asyncio.client import connect as connect_websocket

from responses_mw.ids import random_part
from tests.support.metrics import sample_value
from tests.support.scripted import HELLO, completion, finish, text, usage

if TYPE_CHECKING:
    import httpx

    from tests.support.echo import Echo
    from tests.support.servers import Ours, Start
    from tests.support.valkey import Plain

SECRET = "a secret that all the replicas of the deployment have"
BODY = {"model": "tiny", "input": "hi"}
FILLING = {"model": "tiny", "input": "x" * 7_000}


@pytest.fixture
def ours(start: Start, keys: Plain) -> Ours:
    return start(limits__stored_bytes=15_000, auth__secret_keys=[SECRET], uvicorn={"ws": "websockets-sansio"})


def refusals() -> float:
    return sample_value("responses_mw_limits_refused_total", {"limit": "storage"}) or 0


def unstored() -> float:
    return sample_value("responses_mw_responses_unstored_total", {"reason": "quota"}) or 0


def bearer(owner: str) -> dict[str, str]:
    return {"authorization": f"Bearer {owner}"}


async def post(ours: Ours, owner: str, path: str = "/v1/responses", **body: Any) -> httpx.Response:
    return await ours.http.post(path, json=body, headers=bearer(owner))


async def fill(ours: Ours, owner: str) -> str:
    """Store responses until the quota is reached; return the id of one."""
    ids: list[str] = []
    for _ in range(8):
        answer = await post(ours, owner, **BODY)
        if answer.status_code == 429:
            return ids[0]
        ids.append(answer.json()["id"])
    raise AssertionError("there is no quota")


def assert_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("insufficient_quota", "storage_quota_exceeded", None)
    assert "15000 bytes" in error["message"]
    assert answer.headers["x-should-retry"] == "false"


async def test_an_owner_at_the_quota_is_refused_on_any_replica_before_the_upstream_is_called(
    ours: Ours, start: Start, upstream: Echo
) -> None:
    owner, other = random_part(), start(limits__stored_bytes=15_000, auth__secret_keys=[SECRET])
    response = await fill(ours, owner)
    asked, refused = len(upstream.requests), refusals()
    for replica in (ours, other):
        assert_refused(await post(replica, owner, **BODY))
        assert_refused(await post(replica, owner, **BODY, stream=True))
        assert_refused(await post(replica, owner, **BODY, background=True))
        assert_refused(await post(replica, owner, **BODY, previous_response_id=response))
        assert_refused(await post(replica, owner, "/v1/conversations", items=[{"role": "user", "content": "x" * 3_000}]))
    assert len(upstream.requests) == asked
    assert refusals() == refused + 10
    for body in ({"store": False}, {"store": False, "previous_response_id": response}):
        assert (await post(other, owner, **BODY, **body)).status_code == 200
    assert (await post(other, owner, "/v1/responses/input_tokens", **BODY)).status_code != 429
    assert (await other.http.get(f"/v1/responses/{response}", headers=bearer(owner))).status_code == 200
    assert (await post(other, random_part(), **BODY)).status_code == 200


async def test_deleting_a_response_frees_quota(ours: Ours) -> None:
    owner = random_part()
    response = await fill(ours, owner)
    assert (await ours.http.delete(f"/v1/responses/{response}", headers=bearer(owner))).status_code == 200
    answer = await post(ours, owner, **BODY)
    assert (answer.status_code, answer.json()["store"]) == (200, True)


async def test_items_are_not_added_to_a_conversation_beyond_the_quota(ours: Ours, upstream: Echo) -> None:
    owner = random_part()
    conversation = (await post(ours, owner, "/v1/conversations")).json()["id"]
    item = {"role": "user", "content": "x" * 5_000}
    path = f"/v1/conversations/{conversation}"
    assert (await post(ours, owner, f"{path}/items", items=[item])).status_code == 200
    assert_refused(await post(ours, owner, f"{path}/items", items=[item, item]))
    assert_refused(await post(ours, owner, **FILLING, conversation=conversation))
    upstream.whole(completion({"content": "y" * 4_000}))  # twice: in the turn, and in the conversation
    answer = await post(ours, owner, **BODY, conversation=conversation)
    assert answer.json()["store"] is False
    listed = await ours.http.get(f"{path}/items", headers=bearer(owner))
    assert len(listed.json()["data"]) == 1
    assert (await ours.http.delete(path, headers=bearer(owner))).status_code == 200
    assert (await post(ours, owner, **BODY)).json()["store"] is True


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_exceeds_the_quota_when_it_ends_is_answered_with_store_false(
    ours: Ours, upstream: Echo, keys: Plain, stream: bool
) -> None:
    owner, before = random_part(), unstored()
    if stream:
        upstream.stream(text("y" * 20_000), finish(), usage())
        answer = await post(ours, owner, **BODY, stream=True)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert events[-1]["type"] == "response.completed"
        document = events[-1]["response"]
    else:
        upstream.whole(completion({"content": "y" * 20_000}))
        document = (await post(ours, owner, **BODY)).json()
    assert (document["status"], document["store"]) == ("completed", False)
    async with asyncio.timeout(60):
        while unstored() != before + 1:  # it is counted after the last byte has been sent
            await asyncio.sleep(0.01)
    path = f"/v1/responses/{document['id']}"
    assert (await ours.http.get(path, headers=bearer(owner))).status_code == 404
    assert (await post(ours, owner, **BODY)).json()["store"] is True


async def test_at_the_quota_a_websocket_refuses_stored_responses_and_runs_unstored_ones(ours: Ours) -> None:
    owner = random_part()
    await fill(ours, owner)
    url = ours.url.replace("http", "ws") + "/v1/responses"
    async with connect_websocket(url, additional_headers=bearer(owner), proxy=None) as connection:
        ends = []
        for store in (True, False):
            await connection.send(json.dumps({"type": "response.create", **BODY, "store": store}))
            while (event := json.loads(await connection.recv()))["type"] not in ("response.completed", "error"):
                pass
            ends.append(event)
    assert (ends[0]["status"], ends[0]["error"]["code"]) == (429, "storage_quota_exceeded")
    assert ends[1]["type"] == "response.completed"


async def test_a_background_response_whose_event_log_exceeds_the_quota_fails(start: Start, keys: Plain, upstream: Echo) -> None:
    ours, owner = start(limits__stored_bytes=1_500_000, auth__secret_keys=[SECRET]), random_part()
    upstream.stream(*[text("y" * 100_000)] * 40, *HELLO)
    created = await post(ours, owner, **BODY, background=True)
    path = f"/v1/responses/{created.json()['id']}"
    async with asyncio.timeout(60):
        while (found := (await ours.http.get(path, headers=bearer(owner))).json())["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    assert found["status"] == "failed"
    assert "quota" in found["error"]["message"]
    async with asyncio.timeout(60):  # the event log is counted shortly after the status is visible
        while (await post(ours, owner, **BODY)).status_code != 429:
            await asyncio.sleep(0.02)
    assert (await ours.http.delete(path, headers=bearer(owner))).status_code == 200
    assert (await post(ours, owner, **BODY)).status_code == 200
