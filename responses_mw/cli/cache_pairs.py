"""`cache explain` and `cache eval`: compare pairs of questions as the cache does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from ..cache.explain import Comparer, Comparison, describe, summarize
from ..cache_models import open_models_alone
from ..errors import StartupError
from ..settings import Settings


class Pair(BaseModel):
    """A line of a file of pairs. `same` is whether the cached answer to `one` should be a hit for `other`."""

    one: str
    other: str
    same: bool
    answer: str = ""


async def explain(settings: Settings, texts: Sequence[str]) -> int:
    """Print the result of every stage for two questions. Return 0 for a hit, 1 for a miss, or 2 for an error."""
    if len(texts) not in (2, 3):
        return _fail("explain needs two questions, and may get the answer to the first one")
    answer = texts[2] if len(texts) == 3 else ""
    try:
        async with open_models_alone(settings) as models:
            comparer = Comparer(models.embedder, models.judge, settings.cache)
            found = await comparer.compare(texts[0], texts[1], answer=answer, model=models.chat_model)
    except StartupError as error:
        return _fail(str(error))
    print("\n".join(describe(found, settings.cache)))
    return 0 if found.is_hit else 1


async def evaluate(settings: Settings, file: Path | None) -> int:
    """Print precision, recall, latency and cost for the pairs in `file`. Return 0, 1 if a hit is wrong, or 2 for an error."""
    if file is None:
        return _fail("eval needs a file: --pairs FILE")
    results: list[tuple[Any, Comparison]] = []
    try:
        pairs = _read(file)
        async with open_models_alone(settings) as models:
            comparer = Comparer(models.embedder, models.judge, settings.cache)
            for pair in pairs:
                found = await comparer.compare(pair.one, pair.other, answer=pair.answer, model=models.chat_model)
                results.append((pair.same, found))
                if found.is_hit and not pair.same:
                    print(f"wrong: {pair.one!r} / {pair.other!r}")
    except (OSError, StartupError, orjson.JSONDecodeError, ValidationError) as error:
        return _fail(str(error))
    print("\n".join(summarize(results, settings.cache)))
    return 1 if any(found.is_hit and not same for same, found in results) else 0


def _read(file: Path) -> list[Pair]:
    return [Pair.model_validate(orjson.loads(line)) for line in file.read_bytes().splitlines() if line.strip()]


def _fail(reason: str) -> int:
    print(f"cache: {reason}", file=sys.stderr)
    return 2
