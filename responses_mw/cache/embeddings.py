"""Request embeddings from an OpenAI-compatible `/v1/embeddings` endpoint (OpenAI reference, "Create embeddings")."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import UpstreamError
from ..network import failure_reason
from ..settings.groups import CacheSettings
from ..telemetry.context import WarningLimit
from ..telemetry.tracing import measured_embedding
from .guard import RULES, difference, signature

if TYPE_CHECKING:
    from .vectors import Vector

logger = logging.getLogger(__name__)

VERSION = 1
MAX_TEXT_LENGTH = 1000
"""Maximum length in characters of a text for semantic lookup. A single vector cannot distinguish longer texts."""

Post: TypeAlias = Callable[[dict[str, Any], Any], Awaitable[Any]]
"""Posts a body to the endpoint for a caller, and returns the decoded response. The caller is None on the command line.

The function decides whether the caller's credential is sent. Raises `UpstreamError` if the request fails.
"""


class NoEmbedding(Exception):
    """The text could not be embedded. The message gives the reason without quoting the text."""


class Embeddings:
    """A client of the embeddings server. The constructor raises `ModuleNotFoundError` if numpy is missing."""

    def __init__(self, post: Post, settings: CacheSettings) -> None:
        from .vectors import unit_vector

        assert settings.embedding_model is not None
        self._unit_vector = unit_vector
        self._post = post
        self._timeout = settings.timeout
        self._model = settings.embedding_model
        server = settings.embedding_url or ""  # another server may use the same name for another model
        space = f"{VERSION}\0{server}\0{settings.embedding_model}\0{settings.namespace}"
        self.space = hashlib.sha256(space.encode()).hexdigest()[:16]
        """The id of the vector space. Only vectors of the same space are comparable."""
        self._warnings = WarningLimit()

    async def embed(self, text: str, caller: Any = None) -> Vector:
        """Request the vector of `text`, and scale it to length 1. Raises `NoEmbedding` on every failure."""
        with measured_embedding(self._model):
            try:
                async with asyncio.timeout(self._timeout):
                    answer = await self._post({"model": self._model, "input": text}, caller)
                return self._unit_vector(answer["data"][0]["embedding"])
            except TimeoutError as error:
                raise NoEmbedding(f"the embeddings server did not answer within {self._timeout:g} seconds") from error
            except UpstreamError as error:
                raise NoEmbedding(f"the embeddings server {_failure(error)}") from error.__cause__
            except (ValueError, LookupError, TypeError):
                raise NoEmbedding("the embeddings server sent no embedding") from None

    async def embed_or_warn(self, text: str, caller: Any) -> Vector | None:
        """Like `embed`, but log a failure and return None."""
        try:
            return await self.embed(text, caller)
        except NoEmbedding as error:
            # Without embeddings, the semantic cache has no hits, which nobody would notice without a warning.
            level = logging.WARNING if self._warnings.is_due() else logging.DEBUG
            logger.log(level, "no semantic cache: %s", error)
            return None


def _failure(error: UpstreamError) -> str:
    if error.upstream_status is not None:
        return f"answered {error.upstream_status}"  # without the message, which may quote the text
    reason = failure_reason(error)
    return f"did not answer: {reason}" if reason else f"failed: {error.message}"


async def explain(
    one: str, other: str, embeddings: Embeddings | None, settings: CacheSettings
) -> tuple[bool, tuple[str, str, str]]:
    """Return whether a cached answer to `one` is a hit for `other`, and three lines that explain the result.

    `one` and `other` are the last user texts of two requests that are otherwise identical.
    """
    similarity, compared = await _compare(one, other, embeddings, settings)
    rule = difference(signature(one), signature(other), strict=settings.guard == "strict")
    guarded = f"guard ({settings.guard}): " + (f'refuses by "{rule}": {RULES[rule]}' if rule else "accepts")
    is_hit = one == other or (similarity is not None and similarity >= settings.threshold and rule is None)
    verdict = "hit: exact, the texts are equal" if one == other else f"hit: {'semantic' if is_hit else 'none'}"
    return is_hit, (f"similarity: {compared}", guarded, verdict)


async def _compare(one: str, other: str, embeddings: Embeddings | None, settings: CacheSettings) -> tuple[float | None, str]:
    """Return the cosine similarity, or None if it is unknown, and a description of the comparison."""
    if embeddings is None:
        return None, "unknown: cache.embedding_model and a server for it are not set"
    if max(len(one), len(other)) > MAX_TEXT_LENGTH:
        return None, f"not compared: a text has more than {MAX_TEXT_LENGTH:,} characters"
    try:
        vectors = [await embeddings.embed(text) for text in (one, other)]
    except NoEmbedding as error:
        return None, f"unknown: {error}"
    if len(vectors[0]) != len(vectors[1]):
        return None, "unknown: the vectors differ in size"
    similarity = float(vectors[0] @ vectors[1])
    relation = "reaches" if similarity >= settings.threshold else "is below"
    return similarity, f"{similarity:.4f} {relation} cache.threshold ({settings.threshold:g})"
