"""Requests for embeddings go to the configured server with the right credential, and failures raise `NoEmbedding`."""

from __future__ import annotations

import gzip
import time
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import orjson
import pytest

from responses_mw.cache_models import create_embedder
from responses_mw.embedding_models import open_file_embedder
from responses_mw.embeddings import Embedder, NoEmbedding
from responses_mw.upstream import Caller, Upstream
from responses_mw.upstream.pool import Pool
from tests.cache.asking import settings
from tests.support.embeddings import EmbeddingServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.servers import Serve


@pytest.fixture
async def transport() -> AsyncIterator[httpx.AsyncHTTPTransport]:
    async with httpx.AsyncHTTPTransport() as transport:
        yield transport


CALLER = Caller(headers={"authorization": "Bearer the caller's", "x-session-id": "7"})


def client(transport: httpx.AsyncHTTPTransport, upstream: str = "http://upstream", **given: Any) -> Embedder:
    chosen = settings(upstream__url=upstream, **given)
    embedder = create_embedder(transport, Pool.of(chosen.cache.embedding_url or upstream), chosen)
    assert embedder is not None
    return embedder


async def test_the_upstream_is_called_with_the_credential_of_the_caller(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer
) -> None:
    embedder = client(transport, serve(embedding_server, lifespan="off"))
    [vector] = await embedder.embed(["Hi"], CALLER)
    assert float(np.linalg.norm(vector)) == pytest.approx(1)
    ((headers, body),) = embedding_server.requests
    assert body == {"model": "embed", "input": "Hi"}
    assert headers["authorization"] == "Bearer the caller's"


async def test_the_configured_api_key_replaces_the_credential_of_the_caller(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer
) -> None:
    await client(transport, serve(embedding_server, lifespan="off"), upstream__api_key="operator").embed(["Hi"], CALLER)
    assert embedding_server.requests[0][0]["authorization"] == "Bearer operator"


async def test_vectors_are_matched_to_texts_by_their_index(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer
) -> None:
    embedder = client(transport, serve(embedding_server, lifespan="off"))
    assert embedder.dimension is None
    texts = ["one", "two", "three"]
    together = await embedder.embed(texts)
    assert len(embedding_server.requests) == 1
    for text, vector in zip(texts, together, strict=True):
        [alone] = await embedder.embed([text])
        assert vector == pytest.approx(alone)
    assert embedder.dimension == embedding_server.dimensions


@pytest.mark.parametrize("data", [[[1, 0]], [[1, 0], [1, 0], [1, 0]], [[1, 0], [1, 0, 0]]])
async def test_fewer_more_or_unequal_vectors_raise_no_embedding(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer, data: list[list[int]]
) -> None:
    embedding_server.answer = orjson.dumps({"data": [{"embedding": vector} for vector in data]})
    with pytest.raises(NoEmbedding):
        await client(transport, serve(embedding_server, lifespan="off")).embed(["one", "two"])


@pytest.mark.parametrize("key", [None, "own"])
async def test_a_separate_embedding_server_receives_no_headers_of_the_caller(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer, key: str | None
) -> None:
    embedder = client(
        transport,
        cache__embedding_url=serve(embedding_server, lifespan="off") + "/v1/",
        cache__embedding_api_key=key,
        upstream__api_key="for the upstream",
    )
    await embedder.embed(["Hi"], CALLER)
    headers, _ = embedding_server.requests[0]
    assert headers.get("authorization") == ("Bearer own" if key else None)
    assert "x-session-id" not in headers


@pytest.mark.parametrize(
    "answer",
    [b"", b"{}", b"[]", b'{"data": []}', b'{"data": [{}]}', b'{"data": [{"embedding": "AAAA"}]}', b'{"data": [{"embedding": []}]}',
     b'{"data": [{"embedding": [0, 0]}]}', b'{"data": [{"embedding": [1e300, 1]}]}',
     b'{"data": [{"embedding": [3e38, 3e38]}]}', b'{"data": [{"embedding": [NaN, 1]}]}',
     b'{"data": [{"embedding": [1e999, 0]}]}', b'{"data": [{"embedding": [null, 1]}]}',
     b'{"data": [{"embedding": [[1], [2]]}]}', b'{"data": {"embedding": 1}}', b'{"data": ["x", "y"]}'],
)  # fmt: skip
async def test_an_answer_without_a_valid_vector_raises_no_embedding(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer, answer: bytes
) -> None:
    embedding_server.answer = answer
    for texts in (["Hi"], ["Hi", "there"]):
        with pytest.raises(NoEmbedding):
            await client(transport, serve(embedding_server, lifespan="off")).embed(texts)


async def test_an_oversized_answer_raises_no_embedding(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer
) -> None:
    embedding_server.answer = b'{"data": [{"embedding": [' + b"1," * 3_000_000 + b"1]}]}"
    with pytest.raises(NoEmbedding, match="more than"):
        await client(transport, serve(embedding_server, lifespan="off"), cache__timeout=20).embed(["Hi"])


async def test_a_compressed_answer_raises_no_embedding(transport: httpx.AsyncHTTPTransport, serve: Serve) -> None:
    async def compressed(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": gzip.compress(b" " * 100)})

    with pytest.raises(NoEmbedding, match="gzip"):
        await client(transport, serve(compressed, lifespan="off"), cache__timeout=20).embed(["Hi"])


async def test_an_error_status_an_unreachable_server_and_a_timeout_raise_no_embedding(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer
) -> None:
    embedding_server.status = 503
    with pytest.raises(NoEmbedding, match="503"):
        await client(transport, serve(embedding_server, lifespan="off")).embed(["Hi"])
    assert len(embedding_server.requests) == 1
    with pytest.raises(NoEmbedding):
        await client(transport, "http://127.0.0.1:1").embed(["Hi"])

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    begun = time.monotonic()
    with pytest.raises(NoEmbedding, match="did not answer within"):
        await client(transport, serve(silent, lifespan="off"), cache__timeout=0.05).embed(["Hi"])
    assert time.monotonic() - begun < 5


def test_vector_spaces_differ_by_server_model_and_namespace() -> None:
    transport = httpx.AsyncHTTPTransport()
    given: list[dict[str, Any]] = [
        {}, {"cache__embedding_model": "other"}, {"cache__namespace": "b"},
        {"cache__embedding_url": "http://another"},
    ]  # fmt: skip
    spaces = {client(transport, **one).space for one in given}
    assert len(spaces) == 4


async def test_the_embedder_of_vector_stores_has_the_space_of_its_own_model(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer
) -> None:
    async def embed(url: str, **given: Any) -> str:
        chosen = settings(upstream__url=url, files__embedding_model="embed", **given)
        upstream = Upstream(transport, Pool.of(url), chosen.upstream)
        async with open_file_embedder(upstream, chosen) as embedder:
            assert embedder is not None
            assert len(await embedder.embed(["Hi", "there"])) == 2
            return embedder.space

    url = serve(embedding_server, lifespan="off")
    space = await embed("http://unused", files__embedding_url=url, files__embedding_api_key="its own")
    assert await embed(url, upstream__api_key="operator") == space
    assert [headers["authorization"] for headers, _ in embedding_server.requests] == ["Bearer its own", "Bearer operator"]
