"""Print the files and vector stores of all owners, search a store, and let its files be ingested again."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict

from ..embedding_models import open_file_embedder, open_reranker
from ..file_parts import create_retrieval, create_stores
from ..settings import Settings
from ..state import State
from ..state.files import File
from ..state.store_keys import Range
from ..state.vector_stores import VectorStore
from ..upstream.opening import open_upstreams
from .inspection import NOT_FOUND, printable, show, time_text
from .serve import no_app

_PAGE = 100


async def list_files(state: State, owner: str | None, *, as_json: bool) -> int:
    """Print the files of an owner, or of all owners if it is None. Return the exit status."""
    async for name, file in _files(state, owner):
        if as_json:
            show({"owner": name, **asdict(file)})
        else:
            facts = f"{file.size} bytes  {time_text(file.created_at)}  {file.purpose}  owner {name}"
            print(printable(f"{file.id}  {facts}  {file.filename}"))
    return 0


async def _files(state: State, owner: str | None) -> AsyncIterator[tuple[str, File]]:
    for name in [owner] if owner is not None else await state.files.owners():
        after, has_more = None, True
        while has_more:
            found, has_more = await state.files.page(name, after=after, limit=_PAGE, order="asc", purpose=None)
            for file in found:
                yield name, file
                after = file.id


async def list_stores(state: State, owner: str | None, *, as_json: bool) -> int:
    """Print the vector stores of an owner, or of all owners if it is None. Return the exit status."""
    async for name, store in _stores(state, owner):
        if as_json:
            show({"owner": name, **asdict(store)})
        else:
            print(printable(_store_line(store, name)))
    return 0


async def _stores(state: State, owner: str | None) -> AsyncIterator[tuple[str, VectorStore]]:
    for name in [owner] if owner is not None else await state.vector_stores.owners():
        after, has_more = None, True
        while has_more:
            found, has_more = await state.vector_stores.page(name, Range(after, limit=_PAGE, order="asc"))
            for store in found:
                yield name, store
                after = store.id


def _store_line(store: VectorStore, owner: str) -> str:
    counts = [f"{number} {status.replace('_', ' ')}" for status, number in store.counts._asdict().items() if number]
    files = ", ".join(counts) or "no files"
    expired = "  expired" if store.is_expired else ""
    return f"{store.id}  {files}  {store.size} bytes  {time_text(store.created_at)}  owner {owner}  {store.name}{expired}"


async def search_store(
    state: State, settings: Settings, store_id: str, query: str, *, owner: str | None, number: int, as_json: bool
) -> int:
    """Print the chunks that a search finds. Return the exit status."""
    owner = await _owner_of(state, store_id, owner)
    if owner is None:
        return _unknown(store_id)
    async with AsyncExitStack() as stack:
        upstream, *_ = await stack.enter_async_context(open_upstreams(no_app, settings))
        embedder = await stack.enter_async_context(open_file_embedder(upstream, settings))
        reranker = await stack.enter_async_context(open_reranker(upstream, settings))
        retrieval = create_retrieval(state, embedder, settings, reranker)
        if retrieval is None:
            raise ModuleNotFoundError(name="numpy")
        for found in await retrieval.search([store_id], owner, [query], maximum=number):
            if as_json:
                show(asdict(found))
            else:
                print(printable(f"{found.score:.3f}  {found.file_id}  {found.filename}"))
                print("".join(f"    {line}\n" for line in printable(found.text, lines=True).splitlines()))
    return 0


async def index_store(state: State, store_id: str, owner: str | None, *, is_dropped: bool) -> int:
    """Build or drop the index of a store in the Redis server. Return the exit status."""
    from ..files.indexing import Indexing

    owner = await _owner_of(state, store_id, owner)
    if owner is None:
        return _unknown(store_id)
    indexing = Indexing(state)
    if is_dropped:
        await indexing.drop(store_id, owner)
        print("stores: the index is dropped")
    else:
        print(f"stores: {await indexing.build(store_id, owner)} chunks are indexed")
    return 0


async def rebuild_store(state: State, store_id: str, owner: str | None) -> int:
    """Let all files of a store be ingested again by the servers and workers. Return the exit status."""
    owner = await _owner_of(state, store_id, owner)
    if owner is None:
        return _unknown(store_id)
    print(f"stores: {await create_stores(state).rebuild(store_id, owner)} files wait to be ingested")
    return 0


async def _owner_of(state: State, store_id: str, owner: str | None) -> str | None:
    """Return the owner of a store, or None if it does not exist or does not belong to `owner`."""
    for one in [owner] if owner is not None else await state.vector_stores.owners():
        if await state.vector_stores.exists(store_id, one):
            return one
    return None


def _unknown(store_id: str) -> int:
    print(f"stores: there is no vector store {printable(store_id)}", file=sys.stderr)
    return NOT_FOUND
