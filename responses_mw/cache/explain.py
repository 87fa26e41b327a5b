"""Compare two questions as the cache does, with the result of every stage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..embeddings import Embedder, NoEmbedding
from ..settings.groups import CacheSettings
from .cache import MAX_TEXT_LENGTH
from .guard import RULES, difference
from .judge import Judge, NoVerdict, Opinion
from .normal import normalize, same_words


@dataclass(slots=True)
class Comparison:
    """The result of every stage for a cached question and a new one. A stage that does not matter is None or empty."""

    is_equal: bool
    """Whether both have the same normal form."""
    similarity: float | None = None
    no_similarity: str = ""
    """Why the similarity is unknown."""
    rule: str | None = None
    """The rule of the guard by which the questions differ."""
    has_same_words: bool = False
    opinion: Opinion | None = None
    no_opinion: str = ""
    """Why the judge has no opinion."""
    is_hit: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of the embedding and of the judgement."""


class Comparer:
    """Compares questions with the embedder and the judge of the settings. Each of them may be None."""

    def __init__(self, embedder: Embedder | None, judge: Judge | None, settings: CacheSettings) -> None:
        self._embedder = embedder
        self._judge = judge
        self._settings = settings

    async def compare(self, one: str, other: str, *, answer: str = "", model: str = "", ask_always: bool = False) -> Comparison:
        """Compare `one`, whose cached answer is `answer`, with `other`.

        `model` is the judge, unless `cache.judge_model` is set. With `ask_always`, the judge is also asked if the guard or the
        similarity decides.
        """
        found = Comparison(normalize(one) == normalize(other))
        found.rule = difference(one, other)
        found.has_same_words = same_words(one, other)
        await self._measure(found, one, other)
        is_candidate = found.rule is None and (found.similarity or 0.0) >= self._settings.threshold
        is_decided = found.is_equal or not is_candidate or found.has_same_words
        if self._judge is not None and (ask_always or not is_decided):
            await self._ask(self._judge, found, (one, answer, other), model)
        is_approved = found.opinion is not None and found.opinion.probability >= self._settings.judge_min_probability
        found.is_hit = found.is_equal or (is_candidate and (found.has_same_words or is_approved))
        return found

    async def _measure(self, found: Comparison, one: str, other: str) -> None:
        if self._embedder is None:
            found.no_similarity = "no embedding model is available"
            return
        if max(len(one), len(other)) > MAX_TEXT_LENGTH:
            found.no_similarity = f"a text has more than {MAX_TEXT_LENGTH:,} characters"
            return
        began = time.perf_counter()
        try:
            first, second = await self._embedder.embed([one, other])
        except NoEmbedding as error:
            found.no_similarity = str(error)
            return
        found.seconds["embedding"] = time.perf_counter() - began
        found.similarity = float(first @ second)

    async def _ask(self, judge: Judge, found: Comparison, texts: tuple[str, str, str], model: str) -> None:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._settings.judge_timeout):
                found.opinion = await judge.same_question(*texts, model=model, caller=None)
        except NoVerdict as error:
            found.no_opinion = str(error)
        except TimeoutError:
            found.no_opinion = f"the judge did not answer within {self._settings.judge_timeout:g} seconds"
        found.seconds["judge"] = time.perf_counter() - began


def describe(found: Comparison, settings: CacheSettings) -> list[str]:
    """Return one line about each stage, and one about the result."""
    judged = "not asked" if settings.judge != "off" else "off"
    if found.opinion is not None:
        approves = found.opinion.probability >= settings.judge_min_probability
        judged = f"{'approves' if approves else 'refuses'} with probability {found.opinion.probability:.3f}"
    elif found.no_opinion:
        judged = f"no verdict: {found.no_opinion}"
    kind = "none" if not found.is_hit else "exact" if found.is_equal else "semantic"
    return [
        f"normal form: {'equal' if found.is_equal else 'different'}",
        f"similarity: {_compared(found, settings)}",
        f"guard: {'accepts' if found.rule is None else f'refuses by {found.rule}: {RULES[found.rule]}'}",
        f"words: {'the same' if found.has_same_words else 'different'}",
        f"judge: {judged}",
        f"hit: {kind}",
    ]


def _compared(found: Comparison, settings: CacheSettings) -> str:
    if found.similarity is None:
        return f"unknown: {found.no_similarity}"
    relation = "reaches" if found.similarity >= settings.threshold else "is below"
    return f"{found.similarity:.4f} {relation} cache.threshold ({settings.threshold:g})"


# -- many pairs ------------------------------------------------------------------------------------------------------------


def summarize(results: Sequence[tuple[Any, Comparison]], settings: CacheSettings) -> list[str]:
    """Return lines with the precision, recall, latency and cost for labelled pairs. A label is true if the pair should hit."""
    hits = [bool(same) for same, found in results if found.is_hit]
    wanted = sum(bool(same) for same, _ in results)
    asked = [found for _, found in results if "judge" in found.seconds]
    tokens = sum(found.opinion.tokens for found in asked if found.opinion is not None)
    reasons = {
        "guard": sum(found.rule is not None and not found.is_hit for same, found in results if same),
        "similarity": sum((found.similarity or 0) < settings.threshold for same, found in results if same and not found.is_hit),
    }
    return [
        f"pairs: {len(results)}, of which {wanted} should be hits",
        f"hits: {len(hits)}, of which {len(hits) - sum(hits)} are wrong",
        f"precision: {_share(sum(hits), len(hits))}",
        f"recall: {_share(sum(hits), wanted)}",
        f"missed by the guard: {reasons['guard']}, by the similarity: {reasons['similarity']}",
        f"embedding: {_latency(found.seconds.get('embedding') for _, found in results)}",
        f"judge: {_latency(found.seconds.get('judge') for _, found in results)}",
        f"judge requests: {len(asked)}, of which {sum(found.opinion is None for found in asked)} failed; tokens: {tokens}",
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "unknown"


def _latency(seconds: Iterable[float | None]) -> str:
    known = sorted(1000 * one for one in seconds if one is not None)
    if not known:
        return "not used"
    return f"median {known[len(known) // 2]:.2f} ms, 95 % within {known[int(0.95 * (len(known) - 1))]:.2f} ms"
