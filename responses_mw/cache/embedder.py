"""When the text of a request is embedded: as early as can be, and not at all where an exact hit is likely."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from ..config import Settings
from ..protocol.request import CreateResponse
from .embeddings import Embeddings, NoEmbedding
from .key import Key, text_of
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


class Ahead:
    """The vector of a ``text``, computed while the request is prepared, until somebody takes it."""

    __slots__ = ("computing", "text")

    def __init__(self, text: str, computing: Computing) -> None:
        self.text = text
        self.computing: Computing | None = computing

    def take(self, text: str) -> Computing | None:
        """It is the taker's from now on; None where it is not of that text."""
        if text != self.text:
            return None
        computing, self.computing = self.computing, None
        return computing


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

    @asynccontextmanager
    async def ahead(
        self, request: CreateResponse, owner: str, policy: Policy, headers: Headers, scope: Scope
    ) -> AsyncIterator[Ahead | None]:
        """While a request is prepared: the embedding of its text is under way, where it is likely to be needed. It ends here,
        unless somebody takes it."""
        text = text_of(request)
        computing = None if text is None else self.begin(text, owner, policy, headers, scope)
        if text is None or computing is None:
            yield None
            return
        ahead = Ahead(text, computing)
        try:
            await asyncio.sleep(0)  # it is sent before anything else is
            yield ahead
        finally:
            if ahead.computing is not None:
                computing.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait({computing})

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
