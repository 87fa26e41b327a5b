"""A server reranks results, and its failures are reported."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from responses_mw.embedding_models import open_reranker
from responses_mw.files.reranking import NoScores, Reranker
from responses_mw.upstream import Caller, Upstream
from responses_mw.upstream.opening import first_of
from responses_mw.upstream.pool import Pool
from tests.cache.asking import settings
from tests.support.reranking import PATHS, RerankingServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.support.servers import Serve

    Open = Callable[..., Awaitable[Reranker | None]]

TEXTS = ["the dog", "annual leave", "leave"]
CALLER = Caller(headers={"authorization": "Bearer the caller's"})


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Return a function that opens a reranker with the given settings."""
    async with AsyncExitStack() as stack:

        async def opened(upstream: str = "http://upstream", **given: Any) -> Reranker | None:
            chosen = settings(upstream__url=upstream, **given)
            transport = await stack.enter_async_context(httpx.AsyncHTTPTransport())
            one = Upstream(transport, Pool.of(upstream), first_of(chosen))
            return await stack.enter_async_context(open_reranker(one, chosen))

        yield opened


async def test_without_a_setting_nothing_is_reranked(opened: Open) -> None:
    assert await opened() is None


@pytest.mark.parametrize("path", PATHS)
async def test_the_first_supported_path_of_the_server_gives_the_scores(serve: Serve, opened: Open, path: str) -> None:
    server = RerankingServer((path,))
    reranker = await opened(files__rerank_url=serve(server, lifespan="off"), files__rerank_model="m")
    assert reranker is not None
    for _ in range(2):
        assert await reranker.scores("annual leave", TEXTS, CALLER) == [0, 1, 0.5]
    assert [one for one, _, _ in server.requests].count(path) == 2
    assert len(server.requests) == 2 + [*PATHS].index(path)


async def test_the_upstream_gets_the_credential_of_the_caller(serve: Serve, opened: Open) -> None:
    server = RerankingServer()
    reranker = await opened(serve(server, lifespan="off"), files__rerank_model="m")
    assert reranker is not None
    assert await reranker.scores("dog", TEXTS, CALLER) == [1, 0, 0]
    [(_, headers, body)] = server.requests
    assert headers["authorization"] == "Bearer the caller's"
    assert (body["model"], body["documents"]) == ("m", TEXTS)


async def test_a_separate_server_gets_only_its_own_key(serve: Serve, opened: Open) -> None:
    server = RerankingServer()
    url = serve(server, lifespan="off")
    reranker = await opened(files__rerank_url=url, files__rerank_api_key="own", upstream__api_key="for the upstream")
    assert reranker is not None
    await reranker.scores("dog", TEXTS, CALLER)
    [(_, headers, body)] = server.requests
    assert headers["authorization"] == "Bearer own"
    assert "model" not in body


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        {"results": [{"index": 0, "relevance_score": 1}]},
        {"results": [{"index": place, "relevance_score": 2} for place in range(3)]},
        {"results": [{"index": 0, "relevance_score": 1}] * 3},
        {"results": [{"index": place, "relevance_score": None} for place in range(3)]},
        {"results": "abc"},
        {"data": [{"index": place} for place in range(3)]},
    ],
)
async def test_an_answer_without_a_valid_score_for_each_text_raises_no_scores(serve: Serve, opened: Open, answer: Any) -> None:
    reranker = await opened(files__rerank_url=serve(RerankingServer(answer=answer), lifespan="off"))
    assert reranker is not None
    with pytest.raises(NoScores, match="score between 0 and 1 for each text"):
        await reranker.scores("dog", TEXTS, CALLER)


@pytest.mark.parametrize(
    ("server", "message"),
    [(RerankingServer(status=500), "answered 500"), (RerankingServer(()), "supports none of /v1/rerank, /v1/score, /rerank")],
)
async def test_a_failing_server_raises_no_scores(serve: Serve, opened: Open, server: RerankingServer, message: str) -> None:
    reranker = await opened(files__rerank_url=serve(server, lifespan="off"))
    assert reranker is not None
    with pytest.raises(NoScores, match=message):
        await reranker.scores("dog", TEXTS, CALLER)


async def test_an_unreachable_server_raises_no_scores(opened: Open) -> None:
    reranker = await opened(files__rerank_url="http://127.0.0.1:9")
    assert reranker is not None
    with pytest.raises(NoScores, match="did not answer"):
        await reranker.scores("dog", TEXTS, CALLER)
