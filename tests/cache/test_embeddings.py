"""Requests for embeddings: the server, the credential, and every failure as `NoEmbedding`."""

from __future__ import annotations

import gzip
import time
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from responses_mw.app import create_embeddings
from responses_mw.cache import Embeddings
from responses_mw.cache.embeddings import NoEmbedding
from responses_mw.cache.vectors import decode_vectors, encode_vector, unit_vector
from responses_mw.upstream import Caller
from tests.cache.asking import EmbeddingServer, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.servers import Serve


@pytest.fixture
async def transport() -> AsyncIterator[httpx.AsyncHTTPTransport]:
    async with httpx.AsyncHTTPTransport() as transport:
        yield transport


CALLER = Caller(headers={"authorization": "Bearer the caller's", "x-session-id": "7"})


def client(transport: httpx.AsyncHTTPTransport, upstream: str = "http://upstream", **given: Any) -> Embeddings:
    embeddings = create_embeddings(transport, settings(upstream__url=upstream, **given))
    assert embeddings is not None
    return embeddings


async def test_the_upstream_is_called_with_the_credential_of_the_caller(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer
) -> None:
    embeddings = client(transport, serve(embedding_server, lifespan="off"))
    vector = await embeddings.embed("Hi", CALLER)
    assert float(np.linalg.norm(vector)) == pytest.approx(1)
    ((headers, body),) = embedding_server.requests
    assert body == {"model": "embed", "input": "Hi"}
    assert headers["authorization"] == "Bearer the caller's"


async def test_the_configured_api_key_replaces_the_credential_of_the_caller(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer
) -> None:
    await client(transport, serve(embedding_server, lifespan="off"), upstream__api_key="operator").embed("Hi", CALLER)
    assert embedding_server.requests[0][0]["authorization"] == "Bearer operator"


@pytest.mark.parametrize("key", [None, "own"])
async def test_a_separate_embedding_server_receives_no_headers_of_the_caller(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer, key: str | None
) -> None:
    embeddings = client(
        transport,
        cache__embedding_url=serve(embedding_server, lifespan="off") + "/v1/",
        cache__embedding_api_key=key,
        upstream__api_key="for the upstream",
    )
    await embeddings.embed("Hi", CALLER)
    headers, _ = embedding_server.requests[0]
    assert headers.get("authorization") == ("Bearer own" if key else None)
    assert "x-session-id" not in headers


@pytest.mark.parametrize(
    "answer",
    [b"", b"{}", b"[]", b'{"data": []}', b'{"data": [{}]}', b'{"data": [{"embedding": "AAAA"}]}', b'{"data": [{"embedding": []}]}',
     b'{"data": [{"embedding": [0, 0]}]}', b'{"data": [{"embedding": [1e300, 1]}]}',
     b'{"data": [{"embedding": [3e38, 3e38]}]}', b'{"data": [{"embedding": [NaN, 1]}]}',
     b'{"data": [{"embedding": [1e999, 0]}]}', b'{"data": [{"embedding": [null, 1]}]}',
     b'{"data": [{"embedding": [[1], [2]]}]}', b'{"data": {"embedding": 1}}'],
)  # fmt: skip
async def test_an_answer_without_a_valid_vector_raises_no_embedding(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer, answer: bytes
) -> None:
    embedding_server.answer = answer
    with pytest.raises(NoEmbedding):
        await client(transport, serve(embedding_server, lifespan="off")).embed("Hi")


async def test_an_oversized_answer_raises_no_embedding(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer
) -> None:
    embedding_server.answer = b'{"data": [{"embedding": [' + b"1," * 3_000_000 + b"1]}]}"
    with pytest.raises(NoEmbedding, match="more than"):
        await client(transport, serve(embedding_server, lifespan="off"), cache__timeout=20).embed("Hi")


async def test_a_compressed_answer_raises_no_embedding(transport: httpx.AsyncHTTPTransport, serve: Serve) -> None:
    async def compressed(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": gzip.compress(b" " * 100)})

    with pytest.raises(NoEmbedding, match="gzip"):
        await client(transport, serve(compressed, lifespan="off"), cache__timeout=20).embed("Hi")


async def test_an_error_status_an_unreachable_server_and_a_timeout_raise_no_embedding(
    transport: httpx.AsyncHTTPTransport, serve: Serve, embedding_server: EmbeddingServer
) -> None:
    embedding_server.status = 503
    with pytest.raises(NoEmbedding, match="503"):
        await client(transport, serve(embedding_server, lifespan="off")).embed("Hi")
    assert len(embedding_server.requests) == 1
    with pytest.raises(NoEmbedding):
        await client(transport, "http://127.0.0.1:1").embed("Hi")

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    begun = time.monotonic()
    with pytest.raises(NoEmbedding, match="did not answer within"):
        await client(transport, serve(silent, lifespan="off"), cache__timeout=0.05).embed("Hi")
    assert time.monotonic() - begun < 5


def test_vector_spaces_differ_by_server_model_and_namespace() -> None:
    transport = httpx.AsyncHTTPTransport()
    given: list[dict[str, Any]] = [
        {}, {"cache__embedding_model": "other"}, {"cache__namespace": "b"},
        {"cache__embedding_url": "http://another"},
    ]  # fmt: skip
    spaces = {client(transport, **one).space for one in given}
    assert len(spaces) == 4


def test_encoding_a_vector_preserves_it_except_for_rounding() -> None:
    vector = unit_vector([0.1, -0.7, 0.3])
    assert decode_vectors([encode_vector(vector)], 3)[0] == pytest.approx(vector, abs=1e-3)
