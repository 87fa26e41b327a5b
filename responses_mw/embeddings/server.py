"""Request embeddings from an OpenAI-compatible `/v1/embeddings` endpoint (OpenAI reference, "Create embeddings")."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from ..errors import UpstreamError
from ..network import failure_reason
from ..telemetry.tracing import measured_embedding
from .base import Embedder, NoEmbedding
from .vector import Vector, unit_vector

_VERSION = 1
_REFUSALS = frozenset({400, 413, 422})
"""Statuses of a refused request. One possible reason is that a text is too long."""
_REFUSED = ": it refused the API key"
_MEANINGS = {401: _REFUSED, 403: _REFUSED, 404: ": it does not know the model, or lacks /v1/embeddings"}
_PERMANENT = _REFUSALS | {404, 405}

Post: TypeAlias = Callable[[dict[str, Any], Any], Awaitable[Any]]
"""Posts a body to the endpoint for a caller, and returns the decoded response. The caller is None on the command line.

The function decides whether the caller's credential is sent. Raises `UpstreamError` if the request fails.
"""


class ServerEmbedder(Embedder):
    """A client of an embeddings server."""

    def __init__(self, post: Post, model: str, *, server: str = "", namespace: str = "", timeout: float) -> None:
        """`server` distinguishes servers that use the same name for different models. `timeout` is in seconds."""
        self.model = model
        self.dimension = None
        self.space = hashlib.sha256(f"{_VERSION}\0{server}\0{model}\0{namespace}".encode()).hexdigest()[:16]
        self._post = post
        self._timeout = timeout

    async def embed(self, texts: Sequence[str], caller: Any = None) -> list[Vector]:
        with measured_embedding(self.model):
            try:
                async with asyncio.timeout(self._timeout):
                    answer = await self._post({"model": self.model, "input": _input(texts)}, caller)
                return self._vectors(answer["data"], len(texts))
            except TimeoutError as error:
                message = f"the embeddings server did not answer within {self._timeout:g} seconds"
                raise NoEmbedding(message, is_temporary=True) from error
            except UpstreamError as error:
                kind = {
                    "is_temporary": error.upstream_status not in _PERMANENT,
                    "is_refusal": error.upstream_status in _REFUSALS,
                }
                raise NoEmbedding(f"the embeddings server {_failure(error)}", **kind) from error.__cause__
            except (ValueError, LookupError, TypeError, AttributeError):
                raise NoEmbedding("the embeddings server sent no embedding") from None

    def _vectors(self, data: Any, count: int) -> list[Vector]:
        """Return the vectors in `data` in the order of their `index`, which some servers omit."""
        ordered = sorted(data, key=lambda one: one.get("index", 0)) if count > 1 else data
        vectors = [unit_vector(one["embedding"]) for one in ordered]
        if len(vectors) != count or len({len(vector) for vector in vectors}) != 1:
            raise ValueError("the vectors differ in number or size from what was requested")
        self.dimension = len(vectors[0])
        return vectors


def _input(texts: Sequence[str]) -> str | list[str]:
    return texts[0] if len(texts) == 1 else list(texts)


def _failure(error: UpstreamError) -> str:
    if error.upstream_status is not None:
        # Without the message, which may quote a text.
        return f"answered {error.upstream_status}{_MEANINGS.get(error.upstream_status, '')}"
    reason = failure_reason(error)
    return f"did not answer: {reason}" if reason else f"failed: {error.message}"
