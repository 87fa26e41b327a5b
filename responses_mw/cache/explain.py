"""Explain whether one text is a hit for another: the decision of a lookup, without a stored answer."""

from __future__ import annotations

from dataclasses import dataclass

from ..settings import CacheSettings
from .embeddings import MAX_TEXT_LENGTH, Embeddings, NoEmbedding
from .guard import RULES, difference, signature


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whether the answer to one text serves another, and ``lines`` that say why."""

    is_hit: bool
    lines: tuple[str, ...]


async def explain(one: str, other: str, embeddings: Embeddings | None, settings: CacheSettings) -> Explanation:
    """Compare two texts, as the last user texts of otherwise equal requests."""
    similarity, compared = await _compare(one, other, embeddings, settings)
    rule = difference(signature(one), signature(other), strict=settings.guard == "strict")
    guarded = f"guard ({settings.guard}): " + (f'refuses by "{rule}": {RULES[rule]}' if rule else "accepts")
    is_hit = one == other or (similarity is not None and similarity >= settings.threshold and rule is None)
    verdict = "hit: exact, the texts are equal" if one == other else f"hit: {'semantic' if is_hit else 'none'}"
    return Explanation(is_hit, (f"similarity: {compared}", guarded, verdict))


async def _compare(one: str, other: str, embeddings: Embeddings | None, settings: CacheSettings) -> tuple[float | None, str]:
    """Return the similarity (None if it is unknown), and a description of it."""
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
