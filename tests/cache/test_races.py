"""Races of the judge against the upstream: a hit cancels the upstream's request, and a miss does not wait for the judge."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import oracle
from tests.support.judges import JudgingUpstream
from tests.support.metrics import sample_value
from tests.support.scripted import Answer, Signal, completion, error, finish, text, usage

if TYPE_CHECKING:
    import httpx

    from tests.support.servers import Ours, Start

Q, OTHER = "How do I reset my password?", "I forgot my password, how do I reset it?"
CACHED, FRESH = "Click here.", "Open the settings."
KEY = {"authorization": "Bearer key"}


@pytest.fixture
def upstream() -> JudgingUpstream:
    return JudgingUpstream()


@pytest.fixture
async def ours(start: Start, upstream: JudgingUpstream) -> Ours:
    """A server whose cache has the answer to `Q`."""
    return await warmed(start, upstream)


async def warmed(start: Start, upstream: JudgingUpstream, **settings: Any) -> Ours:
    chosen = {"cache__timeout": 20, "cache__judge_timeout": 20, "cache__audit": 0, "upstream__dialect": "vllm", **settings}
    ours = start(cache__mode="semantic", upstream=upstream, **chosen)
    upstream.whole(completion({"content": CACHED}))
    await post(ours, Q)
    return ours


async def post(ours: Ours, question: str, *, status: int = 200, **members: Any) -> httpx.Response:
    response = await ours.http.post("/v1/responses", json={"model": "tiny", "input": question, **members}, headers=KEY)
    assert response.status_code == status, response.text
    return response


def answer_of(response: httpx.Response, streamed: bool) -> dict[str, Any]:
    return oracle.check(response.content).response if streamed else response.json()


def slow_answer(upstream: JudgingUpstream, streamed: bool, before: Signal) -> Answer:
    if streamed:
        return upstream.stream(text("Open "), text("the settings."), finish(), usage(), before=before)
    return upstream.whole(completion({"content": FRESH}), before=before)


def races(result: str) -> float:
    return sample_value("responses_mw_cache_races_total", {"result": result}) or 0.0


@pytest.mark.both_mounts
@pytest.mark.parametrize("streamed", [True, False])
async def test_an_approval_before_the_first_token_serves_the_cached_answer_and_cancels_the_upstream(
    ours: Ours, upstream: JudgingUpstream, streamed: bool
) -> None:
    won, asked = races("won"), Signal()
    upstream.judge("yes", before=asked)
    slow = slow_answer(upstream, streamed, Signal())
    posting = asyncio.create_task(post(ours, OTHER, stream=streamed))
    await slow.asked.wait()  # the upstream has the request while the judge still decides
    asked.set()
    response = await posting
    await slow.left.wait()
    document = answer_of(response, streamed)
    assert document["output"][0]["content"][0]["text"] == CACHED
    assert document["usage"]["cache"] == "semantic"
    assert response.headers["x-responses-cache"].startswith(
        "race; similarity=0.88" if streamed else "semantic; similarity=0.88"
    )
    assert slow.sent == 0
    assert races("won") == won + 1
    stored = await ours.client.responses.retrieve(document["id"])
    assert stored.output_text == CACHED
    again = await post(ours, OTHER)
    assert again.headers["x-responses-cache"].startswith("alias; similarity=0.88")
    assert (len(upstream.judged), len(upstream.requests)) == (1, 2)


@pytest.mark.both_mounts
async def test_a_stream_that_begins_before_the_verdict_is_served_whole(ours: Ours, upstream: JudgingUpstream) -> None:
    lost, later = races("lost"), Signal()
    verdict = upstream.judge("yes", before=later)
    upstream.stream(text("Open "), later, text("the settings."), finish(), usage())
    deltas: list[str] = []
    async for event in await ours.client.responses.create(model="tiny", input=OTHER, stream=True):
        if event.type == "response.output_text.delta":
            deltas.append(event.delta)
            later.set()
            await verdict.played.wait()  # the approval comes between the first and the second delta
    assert "".join(deltas) == FRESH
    assert races("lost") == lost + 1


@pytest.mark.both_mounts
async def test_a_whole_answer_that_comes_before_the_verdict_is_served(ours: Ours, upstream: JudgingUpstream) -> None:
    later = Signal()
    upstream.judge("yes", before=later)
    upstream.whole(completion({"content": FRESH}))
    response = await post(ours, OTHER)
    later.set()
    assert response.json()["output_text"] == FRESH
    assert response.headers["x-responses-cache"].startswith("miss; reason=not_approved; similarity=0.88")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_refusal_leaves_the_answer_to_the_upstream_and_is_asked_only_once(
    ours: Ours, upstream: JudgingUpstream, streamed: bool
) -> None:
    for _ in range(2):
        go = Signal()
        slow = slow_answer(upstream, streamed, go)
        posting = asyncio.create_task(post(ours, OTHER, stream=streamed, cache={"no_store": True}))
        await slow.asked.wait()
        go.set()
        assert answer_of(await posting, streamed)["output"][0]["content"][0]["text"] == FRESH
    assert len(upstream.judged) == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_before_does_not_call_the_upstream_if_the_judge_approves(
    start: Start, upstream: JudgingUpstream, streamed: bool
) -> None:
    ours = await warmed(start, upstream, cache__judge="before")
    upstream.judge("yes")
    response = await post(ours, OTHER, stream=streamed)
    assert answer_of(response, streamed)["output"][0]["content"][0]["text"] == CACHED
    assert response.headers["x-responses-cache"].startswith("semantic; similarity=0.88")
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_error_of_the_upstream_does_not_wait_for_the_judge(
    start: Start, upstream: JudgingUpstream, streamed: bool
) -> None:
    ours, never = await warmed(start, upstream, upstream__status_grace=60), Signal()
    upstream.judge("yes", before=never)
    upstream.whole(error("The temperature is too high."), 400)
    response = await post(ours, OTHER, stream=streamed, status=400)
    assert response.json()["error"]["message"] == "The temperature is too high."
    never.set()


async def test_a_client_that_leaves_during_a_race_cancels_the_upstream_but_not_the_verdict(
    ours: Ours, upstream: JudgingUpstream
) -> None:
    later = Signal()
    verdict = upstream.judge("yes", before=later)
    slow = slow_answer(upstream, True, Signal())
    posting = asyncio.create_task(post(ours, OTHER, stream=True))
    await slow.asked.wait()
    await verdict.asked.wait()
    posting.cancel()
    await slow.left.wait()
    later.set()
    await verdict.played.wait()
    while not (await post_if_cached(ours)):
        await asyncio.sleep(0.01)
    assert len(upstream.judged) == 1


async def post_if_cached(ours: Ours) -> bool:
    response = await ours.http.post(
        "/v1/responses", json={"model": "tiny", "input": OTHER, "cache": {"no_store": True}}, headers=KEY
    )
    return str(response.headers.get("x-responses-cache")).startswith("alias")


async def test_the_judge_has_the_credential_of_the_caller(ours: Ours, upstream: JudgingUpstream) -> None:
    upstream.whole(completion({"content": FRESH}))
    await post(ours, OTHER)
    assert [asked.headers["authorization"] for asked in upstream.judged] == ["Bearer key"]


async def test_a_judge_at_another_server_gets_its_own_key_and_no_headers_of_the_caller(
    start: Start, upstream: JudgingUpstream, serve: Any
) -> None:
    judge = JudgingUpstream()
    ours = await warmed(
        start,
        upstream,
        cache__judge="before",
        cache__judge_url=serve(judge),
        cache__judge_model="small",
        cache__judge_api_key="the judge's",
        upstream__api_key="the upstream's",
    )
    judge.judge("yes")
    assert (await post(ours, OTHER)).json()["output_text"] == CACHED
    [asked] = judge.judged
    assert (asked.headers["authorization"], asked.json["model"]) == ("Bearer the judge's", "small")
    assert not upstream.judged


async def test_the_judge_is_not_asked_while_the_upstream_is_overloaded(ours: Ours, upstream: JudgingUpstream) -> None:
    upstream.whole(error("Too many requests.", 429), 429)
    await post(ours, "An unrelated question about cooking", status=429)
    upstream.whole(completion({"content": FRESH}))
    response = await post(ours, OTHER)
    assert response.headers["x-responses-cache"].startswith("miss; reason=not_judged; similarity=0.88")
    assert not upstream.judged


# -- audits ----------------------------------------------------------------------------------------------------------------


def audits(verdict: str) -> float:
    return sample_value("responses_mw_cache_audit_total", {"verdict": verdict}) or 0.0


async def counted(verdict: str, before: float) -> None:
    async with asyncio.timeout(60):
        while audits(verdict) == before:
            await asyncio.sleep(0.01)


async def test_a_hit_whose_answer_differs_from_a_new_one_is_removed_with_its_aliases(
    start: Start, upstream: JudgingUpstream
) -> None:
    ours = await warmed(start, upstream, cache__judge="before", cache__audit=1)
    same, different = audits("same"), audits("different")
    for said in ("yes", "yes"):  # about the questions, then about the answers
        upstream.judge(said)
    upstream.whole(completion({"content": FRESH}))
    assert (await post(ours, OTHER)).json()["output_text"] == CACHED
    await counted("same", same)
    upstream.whole(completion({"content": FRESH}))
    upstream.judge("no")
    again = await post(ours, OTHER)
    assert again.headers["x-responses-cache"].startswith("alias")
    await counted("different", different)
    for question in (OTHER, Q):
        upstream.whole(completion({"content": FRESH}))
        response = await post(ours, question, cache={"no_store": True})
        assert response.headers["x-responses-cache"].startswith("miss; reason=not_found")
    data = upstream.judged[-1].json["messages"][1]["content"]
    assert all(text in data for text in (OTHER, CACHED, FRESH))


async def test_an_audit_stores_nothing_and_repeats_the_history(start: Start, upstream: JudgingUpstream) -> None:
    ours = await warmed(start, upstream, cache__judge="before", cache__audit=1)
    talks = [(await ours.client.conversations.create()).id for _ in range(2)]
    for talk in talks:
        upstream.whole(completion({"content": "Hello."}))
        await post(ours, "Hello", conversation=talk, cache="off")
    upstream.whole(completion({"content": CACHED}))
    await post(ours, Q, conversation=talks[0])
    same, requests = audits("same"), len(upstream.requests)
    upstream.judge("yes")
    upstream.whole(completion({"content": FRESH}))
    upstream.judge("yes")
    again = await post(ours, OTHER, conversation=talks[1])
    assert again.headers["x-responses-cache"].startswith("semantic")
    await counted("same", same)
    messages = upstream.requests[requests].json["messages"]
    assert [message["content"] for message in messages] == ["Hello", "Hello.", OTHER]
    items = await ours.client.conversations.items.list(talks[1])
    assert len(items.data) == 4


async def test_a_failed_audit_keeps_the_entry(start: Start, upstream: JudgingUpstream) -> None:
    ours = await warmed(start, upstream, cache__judge="before", cache__audit=1)
    failed = audits("failed")
    upstream.judge("yes")
    upstream.whole(error("Broken.", 500), 500)
    assert (await post(ours, OTHER)).json()["output_text"] == CACHED
    await counted("failed", failed)
    upstream.whole(error("Broken.", 500), 500)
    assert (await post(ours, OTHER)).headers["x-responses-cache"].startswith("alias")


async def test_only_the_configured_share_of_hits_is_audited(start: Start, upstream: JudgingUpstream) -> None:
    ours = await warmed(start, upstream, cache__judge="before", cache__audit=0.5)
    upstream.judge("yes")
    same, requests = audits("same"), len(upstream.requests)
    for number in range(4):
        if number % 2:
            upstream.whole(completion({"content": FRESH}))
            upstream.judge("yes")
        assert (await post(ours, OTHER)).json()["output_text"] == CACHED
        if number % 2:
            await counted("same", same + number // 2)
    assert len(upstream.requests) == requests + 2
