"""Build, extend and drop the indexes of vector stores in a Redis server with a search module."""

from __future__ import annotations

import logging

from ..errors import NotSupported
from ..state import Missing, State, StateUnavailable
from .indexed_search import IndexedSearch

logger = logging.getLogger(__name__)


class Indexing:
    """The indexes of all stores."""

    def __init__(self, state: State) -> None:
        self._stores = state.vector_stores
        self._index = state.chunk_index
        self._indexed = IndexedSearch(state.store_files, state.store_blocks, state.chunk_index)

    async def build(self, store_id: str, owner: str) -> int:
        """Build the index of a store, and let searches use it. Return the number of chunks in it.

        Raises Missing if the owner has no such store, and NotSupported if the Redis server has no search module.
        """
        store = await self._stores.get(store_id, owner)
        if not await self._index.is_supported():
            raise NotSupported("The Redis server has no search module, or is a cluster.")
        count = await self._indexed.update(store, owner) if store.space else 0
        await self._stores.update(store_id, owner, {"indexed": 1})
        return count

    async def drop(self, store_id: str, owner: str) -> None:
        """Drop the index of a store, which is then searched in memory. Raises Missing if the owner has no such store."""
        await self._stores.get(store_id, owner)
        await self._stores.update(store_id, owner, {"indexed": None})
        await self._index.drop(store_id)

    async def add(self, store_id: str, owner: str, file_id: str) -> None:
        """Add a newly ingested file to the index of its store, if there is one. If this fails, the next search adds it."""
        try:
            await self._indexed.add_file(await self._stores.get(store_id, owner), owner, file_id)
        except Missing:
            logger.debug("a file was removed before it was indexed")
        except StateUnavailable as error:
            logger.warning("cannot index a file, the next search will do it: %s", error.message)
