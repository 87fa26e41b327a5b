"""When the text of a request is embedded: beside the exact lookup, and not at all where an exact hit is likely."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

from ..config import Settings
from .embeddings import Embeddings, NoEmbedding
from .key import Key
from .policy import Policy

if TYPE_CHECKING:
    from .vectors import Vector

logger = logging.getLogger(__name__)

Headers: TypeAlias = Mapping[str, str] | None
Scope: TypeAlias = MutableMapping[str, Any] | None
Computing: TypeAlias = "asyncio.Task[Vector | None]"
"""A vector that is computed; None where the text has none."""

_QUIET = 60.0
_MOST_EXPECTED = 10_000


class Embedder:
    """Begins embeddings; ``headers`` and ``scope`` are the caller's. ``counts`` are the cache's."""

    def __init__(self, embeddings: Embeddings | None, counts: Counter[str], settings: Settings) -> None:
        self._embeddings = embeddings
        self._counts = counts
        self._longest = settings.cache_longest_text
        self._expected: OrderedDict[int, None] = OrderedDict()
        """Hashes of owners and texts that had an answer when this process last looked: it will be an exact hit, most likely."""
        self._quiet_until = 0.0

    def compares(self, text: str, policy: Policy) -> bool:
        """Whether the nearest of ``text`` is to be found."""
        return policy.mode == "semantic" and self._embeddings is not None and len(text) <= self._longest

    def begin(self, text: str, owner: str, policy: Policy, headers: Headers, scope: Scope) -> Computing | None:
        """Begins the embedding of ``text``, unless it is most likely not needed."""
        expected = policy.read and hash((owner, text)) in self._expected
        return self.compute(text, headers, scope) if self.compares(text, policy) and not expected else None

    def compute(self, text: str, headers: Headers, scope: Scope) -> Computing:
        """Begins the embedding of ``text``."""
        return asyncio.create_task(self._vector(text, headers, scope))

    def expect(self, key: Key, *, answered: bool) -> None:
        """Notes whether there was an exact answer."""
        told = hash((key.owner, key.text))
        self._expected.pop(told, None)
        if answered:
            self._expected[told] = None
        if len(self._expected) > _MOST_EXPECTED:
            self._expected.popitem(last=False)

    async def _vector(self, text: str, headers: Headers, scope: Scope) -> Vector | None:
        assert self._embeddings is not None
        try:
            return await self._embeddings.embed(text, headers, scope)
        except NoEmbedding as error:
            self._warn(error)
            self._counts["failed"] += 1
            return None

    def _warn(self, error: NoEmbedding) -> None:
        """Once in a while: without embeddings there is no semantic cache, and nobody would see it."""
        now = asyncio.get_running_loop().time()
        is_due = now >= self._quiet_until
        logger.log(logging.WARNING if is_due else logging.DEBUG, "no semantic cache: %s", error)
        if is_due:
            self._quiet_until = now + _QUIET
