"""The embedding of a request's text is under way before the request is prepared, and ends with it."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest

from responses_mw.cache import Miss
from scripted import Signal, completion

from .asking import ALICE, EXACT, SEMANTIC, ask, asked, key

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from conftest import Serve, Start
    from responses_mw.cache import Cache
    from scripted import ScriptedUpstream
    from state.servers import Plain, Server

    from .asking import EmbeddingServer
    from .conftest import OpenCache

Q = "What is the capital of France?"


class Slow:
    """An embedding server that never answers, and sees who leaves."""

    def __init__(self) -> None:
        self.came, self.left = Signal(), Signal()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.came.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


async def test_the_history_is_read_while_the_text_is_embedded(
    start: Start, serve: Serve, upstream: ScriptedUpstream, plain_server: Server, server: Plain
) -> None:
    assert server.dbsize() == 0
    slow = Slow()
    embeddings = {"cache_embedding_url": serve(slow, lifespan="off"), "cache_embedding_timeout": 60}
    ours = start(redis=plain_server.url, cache_embedding_model="m", **embeddings)
    upstream.whole(completion({"content": "Paris."}))
    first = (await ours.http.post("/v1/responses", json={"model": "tiny", "input": Q})).json()
    body = {"model": "tiny", "input": "And of Spain?", "previous_response_id": first["id"], "cache": "semantic"}
    plain_server.signal(signal.SIGSTOP)
    try:
        asking = asyncio.create_task(ours.http.post("/v1/responses", json=body))
        await slow.came.wait()
    finally:
        plain_server.signal(signal.SIGCONT)
    asking.cancel()
    await asyncio.wait({asking})
    await slow.left.wait()


async def test_an_embedding_that_nobody_takes_ends(open_cache: OpenCache, url: str, serve: Serve) -> None:
    slow = Slow()
    cache = open_cache(url, upstream=serve(slow, lifespan="off"), cache_embedding_timeout=60)

    async def prepared() -> None:
        async with cache.embedder.ahead(asked(Q), ALICE, SEMANTIC, {}, None) as ahead:
            assert ahead is not None
            await slow.came.wait()
            raise LookupError("there is no such response")

    with pytest.raises(LookupError):
        await prepared()
    await slow.left.wait()


async def test_a_look_up_takes_the_embedding_that_was_begun(cache: Cache, embedding_server: EmbeddingServer) -> None:
    async with cache.embedder.ahead(asked(Q), ALICE, SEMANTIC, {}, None) as ahead:
        found = await cache.lookup(key(cache), SEMANTIC, ahead=ahead)
    assert isinstance(found, Miss)
    assert found.vector is not None
    assert (await found.vector) is not None
    assert len(embedding_server.requests) == 1
    async with cache.flight(found):
        pass


async def test_a_look_up_of_another_text_embeds_that(cache: Cache, embedding_server: EmbeddingServer) -> None:
    async with cache.embedder.ahead(asked("What was it before?"), ALICE, SEMANTIC, {}, None) as ahead:
        await ask(cache, key(cache), SEMANTIC, answer="Paris.", ahead=ahead)
    assert embedding_server.requests[-1][1]["input"] == Q


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        ({}, EXACT),
        ({"tools": [{"type": "function", "name": "f", "parameters": None}]}, SEMANTIC),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x.example/i.png"}]}]}, SEMANTIC),
        ({"input": "long " * 5000}, SEMANTIC),
    ],
    ids=["an exact look-up", "tools", "an image", "a long text"],
)
async def test_what_cannot_be_semantic_is_not_embedded(
    cache: Cache, embedding_server: EmbeddingServer, fields: dict[str, Any], policy: Any
) -> None:
    async with cache.embedder.ahead(asked(**{"question": Q, **fields}), ALICE, policy, {}, None) as ahead:
        assert ahead is None
    assert embedding_server.requests == []


async def test_where_an_exact_answer_is_expected_nothing_is_embedded(cache: Cache, embedding_server: EmbeddingServer) -> None:
    await ask(cache, key(cache), SEMANTIC, answer="Paris.")
    before = len(embedding_server.requests)
    async with cache.embedder.ahead(asked(Q), ALICE, SEMANTIC, {}, None) as ahead:
        assert ahead is None
    async with cache.embedder.ahead(asked(Q), "b" * 32, SEMANTIC, {}, None) as ahead:
        assert ahead is not None, "another owner's answer is no reason"
    assert len(embedding_server.requests) <= before + 1
