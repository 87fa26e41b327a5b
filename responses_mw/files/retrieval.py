"""Search vector stores for the chunks that answer queries."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..embeddings import Embedder, NoEmbedding
from ..errors import BadRequest, Unavailable
from ..state import Damaged, State
from ..state.blocks import BlockName
from ..state.store_file_records import StoreFile
from ..state.vector_stores import VectorStore
from ..tasks import by_size, concurrently
from ..telemetry.context import WarningLimit
from .filters import Filter
from .indexed_search import IndexedSearch
from .ranking import DEFAULT_RANKING, Found, Ranking, Weights
from .reranking import CANDIDATES, NoScores, Reranker
from .search import Hit, Query, search
from .store_memory import Content, StoreMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class _Hit:
    """A chunk that a search has found. `piece` and `place` locate its text (`SearchedBlock.place_of`)."""

    file: StoreFile
    score: float
    piece: int
    place: int


class Retrieval:
    """Searches the vector stores of all owners. Caches the contents of stores in up to `memory_bytes` of memory."""

    def __init__(self, state: State, embedder: Embedder, memory_bytes: int, reranker: Reranker | None = None) -> None:
        self._stores = state.vector_stores
        self._blocks = state.store_blocks
        self._files = state.store_files
        self._embedder = embedder
        self._reranker = reranker
        self._indexed = IndexedSearch(state.store_files, state.store_blocks, state.chunk_index)
        self._warnings = WarningLimit()
        self.memory = StoreMemory(state.vector_stores, state.store_files, state.store_blocks, memory_bytes)

    async def search(
        self,
        store_ids: Sequence[str],
        owner: str,
        queries: Sequence[str],
        *,
        filters: Filter | None = None,
        maximum: int = 10,
        ranking: Ranking = DEFAULT_RANKING,
        caller: Any = None,
    ) -> list[Found]:
        """Return up to `maximum` chunks of the stores that match any of the queries, best first.

        Only files whose attributes pass `filters` are searched. Requests for embeddings are made on behalf of `caller`. Raises:

        - Missing if the owner has no such store
        - BadRequest if a query is blank, or a store has expired or was made with another embedding model
        - TooLarge if the search needs too much memory
        - Unavailable if the queries cannot be embedded, the results cannot be reranked, or Redis fails
        """
        ids = list(dict.fromkeys(store_ids))
        stores = [await self._stores.use(store_id, owner) for store_id in ids]
        filled = [store for store in stores if store.space]
        if not filled:
            return []
        for store in filled:
            self._check_space(store)
        wanted = await self._queries(queries, ranking.weights, caller)
        for store in filled:
            _check_dimension(store, wanted)
        reranker = self._reranker if ranking.rerank else None
        count = maximum if reranker is None else max(maximum, CANDIDATES)
        hits = await self._hits(filled, owner, wanted, filters, count * min(2, len(filled)), ranking.weights)
        found = (await self._read_texts(hits, owner))[:count]
        if reranker is not None and found:
            found = await _rerank(reranker, queries, found, caller)
        return [one for one in found if one.score >= ranking.threshold][:maximum]

    async def _hits(
        self,
        stores: Sequence[VectorStore],
        owner: str,
        queries: Sequence[Query],
        filters: Filter | None,
        k: int,
        weights: Weights,
    ) -> list[_Hit]:
        """Return the best `k` chunks, best first. Stores without an index are searched in memory."""
        hits, others = list[_Hit](), list[VectorStore]()
        for store in stores:
            if await self._indexed.can_search(store):
                found = await self._indexed.search(store, owner, queries, filters, k, weights)
                hits += [_Hit(*one) for one in found]
            else:
                others.append(store)
        async with self.memory.using(others, owner) as contents:
            for hit in await _search(contents, queries, filters, k, weights):
                content = contents[hit.store]
                hits.append(_Hit(content.files[hit.block], hit.score, *content.blocks[hit.block].place_of(hit.chunk)))
        return sorted(hits, key=lambda hit: -hit.score)[:k]

    def _check_space(self, store: VectorStore) -> None:
        if store.space != self._embedder.space:
            raise _other_model(store, f"the embedding model of this server is {self._embedder.model}")

    async def _queries(self, texts: Sequence[str], weights: Weights, caller: Any) -> list[Query]:
        if not all(text.strip() for text in texts):
            raise BadRequest("The query must not be blank.", param="query")
        if not weights.vectors:
            return [Query(None, text) for text in texts]
        try:
            vectors = await self._embedder.embed(texts, caller)
        except NoEmbedding as error:
            level = logging.WARNING if self._warnings.is_due() else logging.DEBUG
            logger.log(level, "vector stores cannot be searched: %s", error)
            raise Unavailable(f"The query could not be embedded: {error}.") from error
        return [Query(vector, text) for vector, text in zip(vectors, texts, strict=True)]

    async def _read_texts(self, hits: Sequence[_Hit], owner: str) -> list[Found]:
        """Read the texts of hits. Omit chunks that were erased meanwhile or are damaged, and repeated chunks of a file."""
        texts = dict[_Hit, str | Damaged | None]()
        for store_id in dict.fromkeys(hit.file.store_id for hit in hits):
            own = [hit for hit in hits if hit.file.store_id == store_id]
            places = [(BlockName(hit.file.id, hit.file.block), hit.piece, hit.place) for hit in own]
            texts |= zip(own, await self._blocks.read_texts(store_id, places), strict=True)
        found = dict[tuple[str, str], Found]()
        damaged = {(hit.file.store_id, hit.file.id): hit.file for hit in hits if isinstance(texts[hit], Damaged)}
        for file in damaged.values():
            await self._files.leave_out(file, owner)
        for hit in hits:
            file, text = hit.file, texts[hit]
            if isinstance(text, str):
                one = Found(file.id, file.filename, file.attributes, hit.score, text)
                found.setdefault((file.id, text), one)
        return [*found.values()]


async def _rerank(reranker: Reranker, queries: Sequence[str], found: Sequence[Found], caller: Any) -> list[Found]:
    """Return the chunks with their best scores by the reranking model for any of the queries, best first."""
    texts = [one.text for one in found]
    try:
        scores = await concurrently(reranker.scores(query, texts, caller) for query in queries)
    except NoScores as error:
        raise Unavailable(f"The results could not be reranked: {error}.") from error
    best = [max(scores_of_one) for scores_of_one in zip(*scores, strict=True)]
    scored = [replace(one, score=score) for one, score in zip(found, best, strict=True)]
    return sorted(scored, key=lambda one: -one.score)


async def _search(
    contents: Sequence[Content], queries: Sequence[Query], filters: Filter | None, maximum: int, weights: Weights
) -> list[Hit]:
    def work() -> list[Hit]:
        return search([(content.index, _admitted(content, filters)) for content in contents], queries, maximum, weights)

    return await by_size(sum(content.nbytes for content in contents), work)


def _admitted(content: Content, filters: Filter | None) -> frozenset[str]:
    if filters is None:
        return content.index.blocks
    return frozenset(name for name in content.index.blocks if filters(content.files[name].attributes))


def _check_dimension(store: VectorStore, queries: Sequence[Query]) -> None:
    for vector, _ in queries:
        if vector is not None and len(vector) != store.dimension:
            raise _other_model(store, f"its vectors have dimension {store.dimension}, those of the query {len(vector)}")


def _other_model(store: VectorStore, reason: str) -> BadRequest:
    return BadRequest(
        f"Vector store with id '{store.id}' was made with another embedding model: {reason}. Run 'responses-mw stores "
        "rebuild', add its files to a new vector store, or configure its model again.",
        code="embedding_model_mismatch",
    )
