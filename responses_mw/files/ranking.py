"""Options and results of searches in vector stores. This module does not need numpy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ..protocol import checks

MAX_RESULTS = 50


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the rankings by vectors and by words. A ranking with weight 0 is not computed."""

    vectors: float = 1.0
    words: float = 1.0


DEFAULT_WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class Ranking:
    """How results are ranked. Results with a score below `threshold` are omitted.

    With `rerank`, a reranking model scores the results if one is configured. `weights` then only select the candidates.
    """

    threshold: float = 0.0
    weights: Weights = DEFAULT_WEIGHTS
    rerank: bool = True


DEFAULT_RANKING = Ranking()


@dataclass(frozen=True, slots=True)
class Found:
    """A result of a search. `score` is between 0 and 1."""

    file_id: str
    filename: str
    attributes: dict[str, str | float | bool]
    score: float
    text: str


_weight = partial(checks.number, minimum=0, maximum=1)
_options = checks.closed_object(
    ranker=checks.among("none", "auto", "default-2024-11-15"),
    score_threshold=partial(checks.number, minimum=0, maximum=1),
    hybrid_search=checks.closed_object({"embedding_weight": _weight, "text_weight": _weight}),
)


def parse_ranking(value: Any, path: str) -> Ranking:
    """Parse the `ranking_options` of a request. Raises `BadRequest` if they are invalid."""
    options, weights = _options(value, path), DEFAULT_WEIGHTS
    if hybrid := options.get("hybrid_search"):
        weights = Weights(hybrid["embedding_weight"], hybrid["text_weight"])
        if not (weights.vectors or weights.words):
            checks.invalid(f"{path}.hybrid_search", "one of the weights must be positive.")
    return Ranking(options.get("score_threshold", 0.0), weights, options.get("ranker") != "none")
