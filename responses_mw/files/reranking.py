"""Score the results of a search with a model that reads the query together with each text (a cross-encoder).

The request goes to the first of these paths that the server supports:

    /v1/rerank   vLLM, SGLang, llama.cpp and others, as Jina and Cohere describe it
    /v1/score    vLLM
    /rerank      text-embeddings-inference

Servers that support it are asked to truncate texts that are too long for the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from ..errors import UpstreamError
from ..network import failure_reason

Post: TypeAlias = Callable[[str, dict[str, Any], Any], Awaitable[Any]]
"""Posts a body to a path of the server for a caller, and returns the decoded response. Raises `UpstreamError` on failure."""

CANDIDATES = 50
"""Number of results that are reranked. A search returns the best of them."""
_MISSING = (404, 405)


class NoScores(Exception):
    """The results could not be reranked. The message gives the reason without quoting a text."""


class Reranker:
    """A client of a server with a reranking model."""

    def __init__(self, post: Post, model: str, *, timeout: float) -> None:
        """`timeout` is in seconds. `model` is "" if the server has only one."""
        self._post = post
        self._model = model
        self._timeout = timeout
        self._path: str | None = None

    async def scores(self, query: str, texts: Sequence[str], caller: Any) -> list[float]:
        """Return how well each text answers the query, from 0 to 1. Raises `NoScores` on every failure."""
        try:
            async with asyncio.timeout(self._timeout):
                return _read(await self._ask(query, texts, caller), len(texts))
        except TimeoutError as error:
            raise NoScores(f"the reranking server did not answer within {self._timeout:g} seconds") from error
        except UpstreamError as error:
            raise NoScores(f"the reranking server {_failure(error)}") from error
        except (LookupError, TypeError, ValueError, AttributeError):
            raise NoScores("the reranking server did not send a score between 0 and 1 for each text") from None

    async def _ask(self, query: str, texts: Sequence[str], caller: Any) -> Any:
        bodies = self._bodies(query, texts)
        for path in bodies if self._path is None else (self._path,):
            try:
                answer = await self._post(path, bodies[path], caller)
            except UpstreamError as error:
                if self._path is None and error.upstream_status in _MISSING:
                    continue
                raise
            self._path = path
            return answer
        raise NoScores("the reranking server supports none of " + ", ".join(bodies))

    def _bodies(self, query: str, texts: Sequence[str]) -> dict[str, dict[str, Any]]:
        documents, vllm = [*texts], {"truncate_prompt_tokens": -1, **({"model": self._model} if self._model else {})}
        return {
            "/v1/rerank": {**vllm, "query": query, "documents": documents, "top_n": len(documents)},
            "/v1/score": {**vllm, "text_1": query, "text_2": documents},
            "/rerank": {"query": query, "texts": documents, "truncate": True},
        }


def _read(answer: Any, count: int) -> list[float]:
    """Return the scores in the order of the texts. Raises ValueError, LookupError or TypeError if the answer is malformed."""
    rows = answer if isinstance(answer, list) else answer.get("results") or answer["data"]
    found = {int(row["index"]): float(row["relevance_score"] if "relevance_score" in row else row["score"]) for row in rows}
    if len(rows) != count or not all(0 <= score <= 1 for score in found.values()):
        raise ValueError("the scores differ in number or range from what was requested")
    return [found[place] for place in range(count)]


def _failure(error: UpstreamError) -> str:
    if error.upstream_status is not None:
        return f"answered {error.upstream_status}"  # without the message, which may quote a text
    reason = failure_reason(error)
    return f"did not answer: {reason}" if reason else f"failed: {error.message}"
