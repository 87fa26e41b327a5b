"""The API of vector stores, their files and batches, with the official client as oracle. No file is ingested."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest
import redis

from responses_mw.asgi import vector_stores
from responses_mw.embeddings.static import StaticEmbedder
from responses_mw.ids import random_part
from responses_mw.state import State, connect
from responses_mw.state.blocks import StoredBlock
from tests.support.scripted import completion, error

from .test_errors import fault
from .test_passable import BEARER, KEYS

if TYPE_CHECKING:
    from openai.types import VectorStore

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Ours, Start

STORES = "/v1/vector_stores"


@pytest.fixture
def ours(start: Start) -> Ours:
    return start(files__ingestion_concurrency=0)


async def upload(ours: Ours, name: str = "a.txt") -> str:
    return (await ours.client.files.create(file=(name, b"Leave is 30 days."), purpose="assistants")).id


def age(redis_url: str, store_id: str) -> None:
    """Set the last use of a store to two days ago."""
    with redis.Redis.from_url(redis_url) as server:
        [key] = server.keys(f"rmw:{{f*}}:vs:{store_id.removeprefix('vs_')}")
        server.hset(key, "active", int(time.time()) - 2 * 24 * 3600)


async def create(ours: Ours, files: int = 0, **members: Any) -> VectorStore:
    ids = [await upload(ours) for _ in range(files)]
    return await ours.client.vector_stores.create(name="handbook", file_ids=ids, **members)


@pytest.mark.both_mounts
async def test_a_store_is_created_retrieved_updated_listed_and_deleted(ours: Ours) -> None:
    stores = ours.client.vector_stores
    created = await create(ours, metadata={"team": "hr"}, expires_after={"anchor": "last_active_at", "days": 2})
    assert (created.name, created.status, created.usage_bytes) == ("handbook", "completed", 0)
    assert created.expires_at == (created.last_active_at or 0) + 2 * 24 * 3600
    assert created.file_counts.to_dict() == {"cancelled": 0, "completed": 0, "failed": 0, "in_progress": 0, "total": 0}
    assert await stores.retrieve(created.id) == created
    updated = await stores.update(created.id, name="rules", metadata=None, expires_after=None)
    assert (updated.name, updated.metadata, updated.expires_after, updated.expires_at) == ("rules", {}, None, None)
    assert (await stores.update(created.id, name=None)).name == "rules"
    assert [one.id async for one in stores.list()] == [created.id]
    deleted = await stores.delete(created.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (created.id, True, "vector_store.deleted")
    for call in (stores.retrieve, stores.delete):
        with pytest.raises(openai.NotFoundError, match=created.id):
            await call(created.id)


async def test_stores_and_files_are_listed_in_pages(ours: Ours) -> None:
    made = [(await create(ours)).id for _ in range(3)]
    assert [one.id async for one in ours.client.vector_stores.list(limit=1, order="asc")] == made
    assert [one.id async for one in ours.client.vector_stores.list(limit=2)] == made[::-1]
    page = await ours.client.vector_stores.list(before=made[2], limit=1, order="asc")
    assert ([one.id for one in page.data], page.has_more) == ([made[1]], True)
    store = await create(ours, files=3)
    listed = [one.id async for one in ours.client.vector_stores.files.list(store.id, limit=2, order="asc")]
    assert len(set(listed)) == 3
    assert [one.id async for one in ours.client.vector_stores.files.list(store.id, limit=2)] == listed[::-1]


async def test_files_are_added_described_and_removed(ours: Ours) -> None:
    store, file_id, files = await create(ours), await upload(ours), ours.client.vector_stores.files
    static: Any = {"type": "static", "static": {"max_chunk_size_tokens": 200, "chunk_overlap_tokens": 100}}
    added = await files.create(store.id, file_id=file_id, attributes={"year": 2026, "draft": True}, chunking_strategy=static)
    assert (added.id, added.status, added.vector_store_id, added.last_error) == (file_id, "in_progress", store.id, None)
    assert (added.attributes, added.chunking_strategy and added.chunking_strategy.to_dict()) == (
        {"year": 2026, "draft": True}, static
    )  # fmt: skip
    assert await files.retrieve(file_id, vector_store_id=store.id) == added
    found = await ours.client.vector_stores.retrieve(store.id)
    assert (found.status, found.file_counts.in_progress, found.file_counts.total) == ("in_progress", 1, 1)
    assert (await files.update(file_id, vector_store_id=store.id, attributes={"year": 2027})).attributes == {"year": 2027}
    assert (await files.update(file_id, vector_store_id=store.id, attributes=None)).attributes == {}
    assert (await files.content(file_id, vector_store_id=store.id)).data == []
    assert [one.id async for one in files.list(store.id, filter="in_progress")] == [file_id]
    assert [one async for one in files.list(store.id, filter="failed")] == []
    removed = await files.delete(file_id, vector_store_id=store.id)
    assert (removed.id, removed.deleted, removed.object) == (file_id, True, "vector_store.file.deleted")
    with pytest.raises(openai.NotFoundError, match=file_id):
        await files.retrieve(file_id, vector_store_id=store.id)
    assert (await ours.client.files.retrieve(file_id)).id == file_id


async def test_the_default_chunking_strategy_is_returned_with_its_numbers(ours: Ours) -> None:
    store = await create(ours)
    added = await ours.client.vector_stores.files.create(
        store.id, file_id=await upload(ours), chunking_strategy={"type": "auto"}
    )
    assert added.chunking_strategy is not None
    assert added.chunking_strategy.to_dict() == {
        "type": "static", "static": {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 400}
    }  # fmt: skip


async def test_a_response_header_sets_the_polling_interval(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_stores, "_YOUNG", 3600)  # on a busy machine, a file is soon an old one
    store, files = await create(ours), ours.client.vector_stores.files.with_raw_response
    added = await files.create(store.id, file_id=await upload(ours))
    assert added.headers["openai-poll-after-ms"] == "200"
    batches = ours.client.vector_stores.file_batches.with_raw_response
    batch = await batches.create(store.id, file_ids=[await upload(ours)])
    assert batch.headers["openai-poll-after-ms"] == "200"
    cancelled = await batches.cancel(batch.parse().id, vector_store_id=store.id)
    assert "openai-poll-after-ms" not in cancelled.headers


async def test_a_batch_is_created_listed_and_cancelled(ours: Ours) -> None:
    store, ids, batches = await create(ours), [await upload(ours) for _ in range(3)], ours.client.vector_stores.file_batches
    batch = await batches.create(store.id, file_ids=[*ids, ids[0]], attributes={"year": 2026})
    assert (batch.status, batch.file_counts.in_progress, batch.file_counts.total) == ("in_progress", 3, 3)
    assert await batches.retrieve(batch.id, vector_store_id=store.id) == batch
    listed = [one async for one in batches.list_files(batch.id, vector_store_id=store.id, limit=2, order="asc")]
    assert ([one.id for one in listed], listed[0].attributes) == (ids, {"year": 2026})
    cancelled = await batches.cancel(batch.id, vector_store_id=store.id)
    assert (cancelled.status, cancelled.file_counts.cancelled) == ("cancelled", 3)
    assert (await ours.client.vector_stores.files.retrieve(ids[0], vector_store_id=store.id)).status == "cancelled"
    assert (await ours.client.vector_stores.retrieve(store.id)).status == "completed"


async def test_each_file_of_a_batch_can_have_its_own_attributes(ours: Ours) -> None:
    store, one, two = await create(ours), await upload(ours), await upload(ours)
    files: Any = [{"file_id": one, "attributes": {"n": 1}}, {"file_id": two, "chunking_strategy": {"type": "auto"}}]
    batch = await ours.client.vector_stores.file_batches.create(store.id, files=files)
    listed = ours.client.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id, order="asc")
    assert [(file.id, file.attributes) async for file in listed] == [(one, {"n": 1}), (two, {})]


async def test_a_deleted_file_is_removed_from_its_stores(ours: Ours) -> None:
    store = await create(ours, files=1)
    [file] = [one async for one in ours.client.vector_stores.files.list(store.id)]
    await ours.client.files.delete(file.id)
    assert [one async for one in ours.client.vector_stores.files.list(store.id)] == []
    assert (await ours.client.vector_stores.retrieve(store.id)).file_counts.total == 0


async def test_deleting_a_store_erases_all_its_keys(ours: Ours, redis_url: str) -> None:
    store = await create(ours, files=2)
    await ours.client.vector_stores.delete(store.id)
    with redis.Redis.from_url(redis_url) as server:
        assert [*server.keys("rmw:{f*}:vs*"), *server.keys("rmw:{f*}:of:*"), *server.keys("rmw:{v*")] == []


async def test_stores_of_another_owner_are_not_found(ours: Ours) -> None:
    store = await create(ours, files=1)
    [file] = [one async for one in ours.client.vector_stores.files.list(store.id)]
    batch = await ours.client.vector_stores.file_batches.create(store.id, file_ids=[file.id])
    foreign, one = {"authorization": "Bearer other"}, f"{STORES}/{store.id}"
    assert (await ours.http.get(STORES, headers=foreign)).json()["data"] == []
    for method, path, body in (
        ("GET", one, None),
        ("POST", one, {"name": "mine"}),
        ("DELETE", one, None),
        ("GET", f"{one}/files", None),
        ("POST", f"{one}/files", {"file_id": file.id}),
        ("GET", f"{one}/files/{file.id}", None),
        ("POST", f"{one}/files/{file.id}", {"attributes": {}}),
        ("DELETE", f"{one}/files/{file.id}", None),
        ("GET", f"{one}/files/{file.id}/content", None),
        ("POST", f"{one}/file_batches", {"file_ids": [file.id]}),
        ("GET", f"{one}/file_batches/{batch.id}", None),
        ("POST", f"{one}/file_batches/{batch.id}/cancel", None),
        ("GET", f"{one}/file_batches/{batch.id}/files", None),
    ):
        fault(await ours.http.request(method, path, json=body, headers=foreign), 404)
    assert (await ours.client.vector_stores.retrieve(store.id)).file_counts.in_progress == 1


async def test_a_file_of_another_owner_cannot_be_added(ours: Ours) -> None:
    other = ours.client.with_options(api_key="other")
    store, file_id = await other.vector_stores.create(), await upload(ours)
    for call, param in (
        (other.vector_stores.create(file_ids=[file_id]), "file_ids"),
        (other.vector_stores.files.create(store.id, file_id=file_id), "file_id"),
        (other.vector_stores.file_batches.create(store.id, file_ids=[file_id]), "file_ids"),
        (other.vector_stores.file_batches.create(store.id, files=[{"file_id": file_id}]), "files"),
    ):
        with pytest.raises(openai.NotFoundError, match=file_id) as raised:
            await call
        assert raised.value.param == param
    assert [one.id async for one in other.vector_stores.list()] == [store.id]


TOO_MANY = {str(number): 1 for number in range(17)}
STATIC = {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 400}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"colour": 1}, "colour"),
        ("", {"name": 1}, "name"),
        ("", {"name": "x" * 257}, "name"),
        ("", {"metadata": {"a": 1}}, "metadata.a"),
        ("", {"file_ids": "x"}, "file_ids"),
        ("", {"file_ids": ["x"] * 2001}, "file_ids"),
        ("", {"expires_after": {"days": 1}}, "expires_after.anchor"),
        ("", {"expires_after": {"anchor": "created_at", "days": 1}}, "expires_after.anchor"),
        ("", {"expires_after": {"anchor": "last_active_at", "days": 0}}, "expires_after.days"),
        ("", {"expires_after": {"anchor": "last_active_at", "days": 366}}, "expires_after.days"),
        ("/STORE", {"file_ids": []}, "file_ids"),
        ("/STORE/search", {}, "query"),
        ("/STORE/search", {"query": 1}, "query"),
        ("/STORE/search", {"query": []}, "query"),
        ("/STORE/search", {"query": ["x"] * 17}, "query"),
        ("/STORE/search", {"query": "x" * 8193}, "query"),
        ("/STORE/search", {"query": "x", "rewrite_query": True}, "rewrite_query"),
        ("/STORE/search", {"query": "x", "max_num_results": 51}, "max_num_results"),
        ("/STORE/search", {"query": "x", "filters": {"type": "like", "key": "a", "value": 1}}, "filters.type"),
        ("/STORE/search", {"query": "x", "ranking_options": {"ranker": "best"}}, "ranking_options.ranker"),
        ("/STORE/search", {"query": "x", "ranking_options": {"score_threshold": 2}}, "ranking_options.score_threshold"),
        (
            "/STORE/search",
            {"query": "x", "ranking_options": {"hybrid_search": {"embedding_weight": 0, "text_weight": 0}}},
            "ranking_options.hybrid_search",
        ),
        ("/STORE/files", {}, "file_id"),
        ("/STORE/files", {"file_id": "x", "attributes": TOO_MANY}, "attributes"),
        ("/STORE/files", {"file_id": "x", "attributes": {"a": ["x"]}}, "attributes.a"),
        ("/STORE/files", {"file_id": "x", "attributes": {"a": "x" * 513}}, "attributes.a"),
        ("/STORE/files", {"file_id": "x", "attributes": {"x" * 65: 1}}, "attributes"),
        ("/STORE/files", {"file_id": "x", "chunking_strategy": {"type": "magic"}}, "chunking_strategy.type"),
        ("/STORE/files", {"file_id": "x", "chunking_strategy": {"type": "auto", "static": STATIC}}, "chunking_strategy.static"),
        ("/STORE/files", {"file_id": "x", "chunking_strategy": {"type": "static"}}, "chunking_strategy.static"),
        (
            "/STORE/files",
            {"file_id": "x", "chunking_strategy": {"type": "static", "static": STATIC | {"max_chunk_size_tokens": 99}}},
            "chunking_strategy.static.max_chunk_size_tokens",
        ),
        (
            "/STORE/files",
            {"file_id": "x", "chunking_strategy": {"type": "static", "static": STATIC | {"max_chunk_size_tokens": 4097}}},
            "chunking_strategy.static.max_chunk_size_tokens",
        ),
        (
            "/STORE/files",
            {"file_id": "x", "chunking_strategy": {"type": "static", "static": STATIC | {"chunk_overlap_tokens": 401}}},
            "chunking_strategy.static.chunk_overlap_tokens",
        ),
        ("/STORE/files/FILE", {}, "attributes"),
        ("/STORE/file_batches", {}, "file_ids"),
        ("/STORE/file_batches", {"file_ids": []}, "file_ids"),
        ("/STORE/file_batches", {"file_ids": ["x"], "files": [{"file_id": "x"}]}, "file_ids"),
        ("/STORE/file_batches", {"attributes": {}, "files": [{"file_id": "x"}]}, "attributes"),
        ("/STORE/file_batches", {"files": [{"attributes": {}}]}, "files[0].file_id"),
        ("/STORE/file_batches", {"files": [{"file_id": "x", "name": "y"}]}, "files[0].name"),
    ],
)
async def test_an_invalid_member_is_refused(ours: Ours, path: str, body: dict[str, Any], param: str) -> None:
    path = path.replace("STORE", f"vs_{random_part()}").replace("FILE", f"file-{random_part()}")
    assert fault(await ours.http.post(STORES + path, json=body), 400)["param"] == param


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "order=up", "filter=done", f"after=file-{'0' * 25}"])
async def test_an_invalid_parameter_is_refused(ours: Ours, query: str) -> None:
    store_id = (await ours.http.post(STORES, json={})).json()["id"]
    answer = await ours.http.get(f"{STORES}/{store_id}/files?{query}")
    assert fault(answer, 400)["param"] == query.partition("=")[0]


async def test_using_an_expired_store_is_an_error(ours: Ours, redis_url: str) -> None:
    store = await create(ours, files=1, expires_after={"anchor": "last_active_at", "days": 1})
    age(redis_url, store.id)
    assert (await ours.client.vector_stores.retrieve(store.id)).status == "expired"


@pytest.mark.parametrize("settings", [{"files__enabled": False}, {"upstream__api": "responses"}])
async def test_the_upstream_gets_the_paths_if_we_do_not_serve_files(
    start: Start, upstream: ScriptedUpstream, settings: dict[str, Any]
) -> None:
    ours = start(**settings)
    assert "vector stores" in fault(await ours.http.get(f"{STORES}/vs_1"), 404)["message"]
    upstream.pages[STORES] = {"served": True}
    assert (await ours.http.get(STORES)).json() == {"served": True}


async def test_requests_without_an_accepted_key_are_refused(start: Start) -> None:
    ours = start(**KEYS)
    fault(await ours.http.get(STORES), 401)
    assert (await ours.http.get(STORES, headers=BEARER)).status_code == 200


# -- search ------------------------------------------------------------------------------------------------------------


LEAVE = "Every employee has 28 days of annual leave."
PAY = "Salaries are paid at the end of the month."
DOG = "The office dog is called Rex."


@pytest.fixture
async def filled(ours: Ours, redis_url: str) -> VectorStore:
    """A store with two files, whose chunks are published as a worker would do it."""
    return await fill(ours, redis_url)


async def fill(ours: Ours, redis_url: str) -> VectorStore:
    store = await create(ours)
    for texts, year in (([LEAVE, PAY], 2026), ([DOG], 2025)):
        file_id = await upload(ours, texts[0][:8])
        await ours.client.vector_stores.files.create(store.id, file_id=file_id, attributes={"year": year})
        await publish(redis_url, store.id, file_id, texts)
    return store


async def publish(redis_url: str, store_id: str, file_id: str, texts: list[str]) -> None:
    embedder = StaticEmbedder()
    vectors = np.stack(await embedder.embed(texts)).astype("<f2")
    state = State(connect(redis_url, timeout=20))
    try:
        [key] = await state.client.command("KEYS", f"rmw:{{f*}}:vs:{store_id.removeprefix('vs_')}")
        owner = key.decode().partition("{f")[2].partition("}")[0]
        file = await state.store_files.get(store_id, owner, file_id)
        block = StoredBlock(embedder.space, vectors.shape[1], texts, [0] * len(texts), vectors.tobytes())
        assert await state.store_files.publish(file, owner, block)
    finally:
        await state.aclose()


async def test_a_search_finds_the_best_chunks(ours: Ours, filled: VectorStore) -> None:
    page = await ours.client.vector_stores.search(filled.id, query="How many days of leave do I have?")
    best = page.data[0]
    assert (best.filename, best.attributes, best.content[0].text) == (LEAVE[:8], {"year": 2026}, LEAVE)
    assert len(page.data) == 3
    assert [one.score for one in page.data] == sorted((one.score for one in page.data), reverse=True)
    assert page.model_extra is not None
    assert page.model_extra["search_query"] == ["How many days of leave do I have?"]


async def test_a_search_can_have_several_queries_filters_and_a_maximum(ours: Ours, filled: VectorStore) -> None:
    search, queries = ours.client.vector_stores.search, ["When is the salary paid?", "What is the dog called?"]
    page = await search(filled.id, query=queries, max_num_results=2)
    assert {one.content[0].text for one in page.data} == {PAY, DOG}
    page = await search(filled.id, query=queries, filters={"type": "eq", "key": "year", "value": 2025})
    assert [one.content[0].text for one in page.data] == [DOG]
    page = await search(filled.id, query=queries[0], ranking_options={"score_threshold": 0.3, "ranker": "auto"})
    assert [one.content[0].text for one in page.data] == [PAY]


async def test_a_search_of_a_foreign_or_an_expired_store_is_refused(ours: Ours, filled: VectorStore, redis_url: str) -> None:
    foreign, body = {"authorization": "Bearer other"}, {"query": "leave"}
    fault(await ours.http.post(f"{STORES}/{filled.id}/search", json=body, headers=foreign), 404)
    await ours.client.vector_stores.update(filled.id, expires_after={"anchor": "last_active_at", "days": 1})
    age(redis_url, filled.id)
    with pytest.raises(openai.BadRequestError, match="has expired"):
        await ours.client.vector_stores.search(filled.id, query="leave")


async def test_a_search_counts_as_activity(ours: Ours, filled: VectorStore, redis_url: str) -> None:
    age(redis_url, filled.id)
    await ours.client.vector_stores.search(filled.id, query="leave")
    assert ((await ours.client.vector_stores.retrieve(filled.id)).last_active_at or 0) >= filled.created_at


async def test_a_change_is_found_by_the_next_search(ours: Ours, filled: VectorStore) -> None:
    async def found() -> set[str]:
        return {one.content[0].text for one in (await ours.client.vector_stores.search(filled.id, query="leave")).data}

    assert await found() == {LEAVE, PAY, DOG}
    files = [one.id async for one in ours.client.vector_stores.files.list(filled.id, order="asc")]
    await ours.client.files.delete(files[0])
    assert await found() == {DOG}
    await ours.client.vector_stores.files.delete(files[1], vector_store_id=filled.id)
    assert await found() == set()


async def test_the_text_of_a_file_can_be_read(ours: Ours, filled: VectorStore) -> None:
    [first, *_] = [one.id async for one in ours.client.vector_stores.files.list(filled.id, order="asc")]
    content = await ours.client.vector_stores.files.content(first, vector_store_id=filled.id)
    assert [one.type for one in content.data] == ["text", "text"]
    assert content.data[-1].text == PAY


REWRITING = {"files__rewrite_model": "small", "files__ingestion_concurrency": 0}


async def test_a_model_rewrites_each_query_if_the_search_asks_for_it(
    start: Start, upstream: ScriptedUpstream, redis_url: str
) -> None:
    upstream.models.append({**upstream.models[0], "id": "small"})
    ours = start(**REWRITING, upstream__think_tag="think")
    store = await fill(ours, redis_url)
    for answer in ("<think>\nThe dog?\n</think>\n'office  dog name'\n", "salary payment date"):
        upstream.whole(completion({"content": answer}))
    queries = ["Hi, who is that furry colleague?", "When do I get money?"]
    page = await ours.client.vector_stores.search(store.id, query=queries, rewrite_query=True, max_num_results=2)
    assert {one.content[0].text for one in page.data} == {DOG, PAY}
    assert {*(page.model_extra or {})["search_query"]} == {"office dog name", "salary payment date"}
    asked = [request.json for request in upstream.requests]
    assert [one["model"] for one in asked] == ["small", "small"]
    assert {one["messages"][-1]["content"] for one in asked} == {*queries}
    await ours.client.vector_stores.search(store.id, query="leave", rewrite_query=False)
    assert len(upstream.requests) == 2


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (error("<the query>", 500), 500, "the request to the model failed with status 500"),
        (completion({"content": None}), 200, "the model did not send a query"),
        (completion({"content": " ''\n"}), 200, "the model did not send a query"),
        ({"choices": []}, 200, "the model did not send a query"),
        ([], 200, "the model did not send a query"),
    ],
)
async def test_a_query_that_cannot_be_rewritten_fails_the_search(
    start: Start, upstream: ScriptedUpstream, redis_url: str, answer: Any, status: int, message: str
) -> None:
    ours = start(**REWRITING)
    store = await fill(ours, redis_url)
    upstream.whole(answer, status)
    client = ours.client.with_options(max_retries=0)
    with pytest.raises(openai.InternalServerError, match=f"The query could not be rewritten: {message}\\.") as caught:
        await client.vector_stores.search(store.id, query="leave", rewrite_query=True)
    assert caught.value.status_code == 503


async def test_no_model_is_asked_to_rewrite_a_query_for_an_unknown_store(start: Start, upstream: ScriptedUpstream) -> None:
    ours = start(**REWRITING)
    body = {"query": "leave", "rewrite_query": True}
    fault(await ours.http.post(f"{STORES}/vs_unknown/search", json=body), 404)
    assert upstream.requests == []


async def test_an_idempotency_key_is_refused_where_a_request_would_be_executed_again(ours: Ours) -> None:
    client = ours.client.with_options(default_headers={"Idempotency-Key": "k"})
    store, file_id = await create(ours), await upload(ours)
    for call in (
        client.files.create(file=("a.txt", b"text"), purpose="user_data"),
        client.vector_stores.create(name="a"),
        client.vector_stores.files.create(store.id, file_id=file_id),
        client.vector_stores.file_batches.create(store.id, file_ids=[file_id]),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            await call
        assert (raised.value.code, raised.value.param) == ("idempotency_key_not_supported", "Idempotency-Key")
    assert [one.id async for one in ours.client.vector_stores.list()] == [store.id]
    assert [one.id async for one in ours.client.files.list()] == [file_id]
