"""Open the objects for files that clients upload, and for vector stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .embedding_models import open_docling, open_file_embedder, open_reranker
from .embeddings import Embedder
from .files import FileLibrary
from .files.extraction import Extractor
from .files.ingestion import Ingestion
from .files.reranking import Reranker
from .files.tool_search import ToolSearch
from .files.vector_stores import VectorStores
from .settings import Settings
from .state import State
from .state.queue import IngestionJob
from .tasks import in_background
from .upstream import Upstream

if TYPE_CHECKING:
    from .files.indexing import Indexing
    from .files.retrieval import Retrieval


@dataclass(frozen=True, eq=False)
class FileParts:
    """The objects for files and vector stores. `embedder`, `retrieval` and `indexing` are None if numpy is not installed."""

    library: FileLibrary
    stores: VectorStores
    ingestion: Ingestion
    embedder: Embedder | None
    retrieval: Retrieval | None
    indexing: Indexing | None

    @property
    def tool_search(self) -> ToolSearch | None:
        """The searches of the tool `file_search`."""
        return ToolSearch(self.stores.records, self.retrieval) if self.retrieval is not None else None


@asynccontextmanager
async def open_file_parts(upstream: Upstream, state: State, settings: Settings) -> AsyncIterator[FileParts]:
    """Open the objects for files. Without `files.embedding_url`, `upstream` makes embeddings."""
    files = settings.files

    library = FileLibrary(state.files, state.store_files, files.url, files.max_bytes)
    stores = create_stores(state)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(in_background(library.sweep()))
        await stack.enter_async_context(in_background(stores.sweep()))
        embedder = await stack.enter_async_context(open_file_embedder(upstream, settings))
        reranker = await stack.enter_async_context(open_reranker(upstream, settings))
        retrieval = create_retrieval(state, embedder, settings, reranker)
        if retrieval is not None:
            await stack.enter_async_context(in_background(retrieval.memory.review()))
        indexing = _create_indexing(state) if embedder is not None else None
        docling = await stack.enter_async_context(open_docling(settings))
        ingestion = Ingestion(library, Extractor(docling.read if docling is not None else None), embedder)
        yield FileParts(library, stores, ingestion, embedder, retrieval, indexing)


def create_stores(state: State) -> VectorStores:
    async def enqueue(store_id: str, owner: str, file_ids: Sequence[str], generation: str) -> None:
        await state.ingestion_queue.enqueue([IngestionJob(owner, store_id, one, generation) for one in file_ids])

    return VectorStores(state, enqueue)


def create_retrieval(
    state: State, embedder: Embedder | None, settings: Settings, reranker: Reranker | None = None
) -> Retrieval | None:
    """Return what searches vector stores, or None without an embedder."""
    if embedder is None:
        return None
    from .files.retrieval import Retrieval

    return Retrieval(state, embedder, settings.files.search_memory_bytes, reranker)


def _create_indexing(state: State) -> Indexing:
    from .files.indexing import Indexing

    return Indexing(state)
