"""The cache over HTTP: hits as JSON and as streams, which are stored and can be continued like any other response."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest
import redis

from benchmarks.processes import free_port
from tests.support import oracle
from tests.support.embeddings import EmbeddingServer
from tests.support.scripted import Signal, completion, finish, reasoning, text, usage

if TYPE_CHECKING:
    import httpx
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Serve, Start

SAME = "What is the capital-city of France?"
QUESTION = {"model": "tiny", "input": "What is the capital city of France?"}


async def post(ours: Ours, body: dict[str, Any], **headers: str) -> httpx.Response:
    response = await ours.http.post("/v1/responses", json=body, headers={"authorization": "Bearer key", **headers})
    assert response.status_code == 200, response.text
    return response


def told(response: httpx.Response) -> str:
    return str(response.headers.get("x-responses-cache"))


async def test_a_hit_encrypts_reasoning_again(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(cache__mode="exact", auth__secret_keys=["s" * 40])
    upstream.whole(completion({"reasoning_content": "Easy.", "content": "Paris."}))
    asked = {**QUESTION, "include": ["reasoning.encrypted_content"]}
    first, again = await post(ours, asked), await post(ours, asked)
    assert told(again).startswith("exact")
    (one, _), (other, message) = first.json()["output"], again.json()["output"]
    assert one["encrypted_content"] != other["encrypted_content"]
    thought = {"type": "reasoning", "id": other["id"], "summary": [], "encrypted_content": other["encrypted_content"]}
    upstream.whole(completion({"content": "Yes."}))
    follow_up = {"model": "tiny", "input": [thought, message, {"role": "user", "content": "Sure?"}]}
    await post(ours, {**follow_up, "reasoning": {"context": "all_turns"}})
    assert "Easy." in str(upstream.requests[-1].json["messages"])


@pytest.mark.both_mounts
async def test_a_repeated_question_is_answered_without_the_upstream(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(cache__mode="exact")
    upstream.whole(completion({"content": "Paris."}))
    first = await post(ours, QUESTION)
    again = await post(ours, QUESTION)
    assert (told(first), told(again).partition(";")[0]) == ("miss; reason=not_found", "exact")
    one, other = first.json(), again.json()
    assert one["output_text"] == other["output_text"] == "Paris."
    assert one["id"] != other["id"]
    assert other["usage"] == {**one["usage"], "cache": "exact"}


async def test_a_hit_is_a_complete_stream_that_is_stored_and_can_be_continued(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start()
    upstream.stream(reasoning("Easy."), text("Par"), text("is."), finish(), usage())
    asked = {**QUESTION, "stream": True, "cache": "exact"}
    first = oracle.check((await post(ours, asked)).content)
    response = await post(ours, asked)
    assert told(response).startswith("exact; similarity=1.0000; age=")
    again = oracle.check(response.content)
    assert [kind for kind, _ in groupby(again.types)] == [kind for kind, _ in groupby(first.types)]
    assert again.terminal == "response.completed"
    assert [item["type"] for item in again.response["output"]] == [item["type"] for item in first.response["output"]]
    stored = await ours.client.responses.retrieve(again.response["id"])
    assert stored.output_text == "Paris."
    upstream.whole(completion({"content": "About two million."}))
    chained = await ours.client.responses.create(model="tiny", input="And how many live there?", previous_response_id=stored.id)
    assert chained.output_text == "About two million."


async def test_header_and_body_turn_the_cache_on_and_off_and_invalid_values_are_a_400(
    start: Start, upstream: ScriptedUpstream
) -> None:
    ours = start()
    for n in range(3):
        upstream.whole(completion({"content": str(n)}))
    await post(ours, QUESTION, **{"x-responses-cache": "exact"})
    assert told(await post(ours, QUESTION, **{"x-responses-cache": "exact"})).startswith("exact")
    assert told(await post(ours, QUESTION)) == "None"
    assert told(await post(ours, {**QUESTION, "cache": "off"}, **{"x-responses-cache": "exact"})) == "None"
    assert all("cache" not in asked.json for asked in upstream.requests)
    for members in ({}, {"stream": True}, {"background": True}):
        refused = await ours.http.post("/v1/responses", json={**QUESTION, "cache": {"ttl": 0}, **members})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache.ttl")


async def test_callers_with_different_credentials_do_not_share_answers(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(cache__mode="exact")
    for name in ("alice", "bob"):
        upstream.whole(completion({"content": f"{name}'s"}))
        for _ in range(2):
            assert (await post(ours, QUESTION, authorization=f"Bearer {name}")).json()["output_text"] == f"{name}'s"


async def test_a_similar_question_is_a_semantic_hit(
    start: Start, serve: Serve, upstream: ScriptedUpstream, embedding_server: EmbeddingServer
) -> None:
    embedding_server.near(QUESTION["input"], SAME, 0.97)
    ours = start(
        cache__mode="semantic",
        cache__embedding_model="embed",
        cache__embedding_url=serve(embedding_server, lifespan="off"),
        cache__timeout=20,
    )
    upstream.whole(completion({"content": "Paris."}))
    await post(ours, QUESTION)
    again = await post(ours, {**QUESTION, "input": SAME})
    assert told(again).startswith("semantic; similarity=0.97")
    assert again.json()["usage"]["cache"] == "semantic"


async def test_the_upstream_embeds_texts_while_one_of_its_endpoints_is_down(
    start_at: Start, serve: Serve, upstream: ScriptedUpstream, embedding_server: EmbeddingServer
) -> None:
    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        chosen: ASGIApp = embedding_server if scope.get("path") == "/v1/embeddings" else upstream
        await chosen(scope, receive, send)

    embedding_server.near(QUESTION["input"], SAME, 0.97)
    urls = f"http://127.0.0.1:{free_port()},{serve(both)}"
    embedding = {"cache__mode": "semantic", "cache__embedding_model": "embed", "cache__timeout": 20}
    ours = start_at("proxy", upstream=urls, **embedding)
    upstream.whole(completion({"content": "Paris."}))
    await post(ours, QUESTION)
    assert told(await post(ours, {**QUESTION, "input": SAME})).startswith("semantic; similarity=0.97")


async def test_concurrent_equal_requests_make_one_upstream_request(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(cache__mode="exact")
    go = Signal()
    answer = upstream.whole(completion({"content": "Paris."}), before=go)
    asking = [asyncio.create_task(post(ours, QUESTION)) for _ in range(5)]
    await answer.asked.wait()
    go.set()
    answers = await asyncio.gather(*asking)
    assert {answer.json()["output_text"] for answer in answers} == {"Paris."}
    assert sorted(told(answer).partition(";")[0] for answer in answers) == ["exact"] * 4 + ["miss"]


async def test_a_deleted_response_is_not_a_hit(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(cache__mode="exact")
    upstream.whole(completion({"content": "Paris."}))
    first = (await post(ours, QUESTION)).json()
    await ours.client.responses.delete(first["id"])
    upstream.whole(completion({"content": "Lyon."}))
    assert (await post(ours, QUESTION)).json()["output_text"] == "Lyon."


async def test_a_response_is_not_deleted_if_its_cache_entry_cannot_be(
    start: Start, upstream: ScriptedUpstream, redis_url: str
) -> None:
    ours = start(cache__mode="exact")
    upstream.whole(completion({"content": "Paris."}))
    path = f"/v1/responses/{(await post(ours, QUESTION)).json()['id']}"
    key = {"authorization": "Bearer key"}
    with redis.Redis.from_url(redis_url) as state:
        kept = [name for name in state.keys("rmw:{c:*}:r") if state.hexists(name, path.rpartition("/")[2])]
        state.rename(kept[0], "aside")
        state.set(kept[0], "not a hash")
        assert (await ours.http.delete(path, headers=key)).status_code == 500
        assert (await ours.http.get(path, headers=key)).status_code == 200
        state.rename("aside", kept[0])
    assert (await ours.http.delete(path, headers=key)).status_code == 200
    upstream.whole(completion({"content": "Lyon."}))
    assert (await post(ours, QUESTION)).json()["output_text"] == "Lyon."


async def test_requests_with_tools_and_truncated_answers_are_not_cached(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(cache__mode="exact")
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]
    for n in range(2):
        upstream.whole(completion({"content": str(n)}))
        response = await post(ours, {**QUESTION, "tools": tools})
        assert (response.json()["output_text"], told(response)) == (str(n), "miss; reason=uncacheable:tools")
    for n in range(2):
        upstream.whole(completion({"content": str(n)}, finish_reason="length"))
        response = await post(ours, QUESTION)
        assert (response.json()["output_text"], told(response)) == (str(n), "miss; reason=not_found")


@pytest.mark.parametrize("end", [{"finish_reason": "unheard_of"}, {"finish_reason": None}])
@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_without_a_known_finish_reason_is_not_cached(
    start: Start, upstream: ScriptedUpstream, end: dict[str, Any], streamed: bool
) -> None:
    ours = start(cache__mode="exact")
    for _ in range(2):
        if streamed:
            upstream.stream(text("Paris."), {"choices": [{"index": 0, "delta": {}, **end}]})
        else:
            upstream.whole({"choices": [{"index": 0, "message": {"content": "Paris."}, **end}]})
        response = await post(ours, {**QUESTION, "stream": streamed})
        assert told(response) == "miss; reason=not_found"
        assert "completed" in response.text
