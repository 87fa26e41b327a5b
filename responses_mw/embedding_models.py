"""Open embedders, and the other clients that vector stores use: the reranker and docling-serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Protocol

import httpx
from pydantic import SecretStr

from .embeddings import BUILTIN, Embedder
from .files.docling import Docling
from .files.reranking import Reranker
from .settings import Settings
from .settings.upstreams import UpstreamSettings
from .upstream import Caller, Upstream
from .upstream.opening import first_of, network_transport
from .upstream.pool import Pool

_MAX_BYTES = 4 * 1024 * 1024
"""Maximum size in bytes of an embeddings response: that of 32 of the largest vectors in use."""


class EmbeddingServer(Protocol):
    """The settings of a model at a server. Without a URL, the server is the first upstream."""

    @property
    def embedding_model(self) -> str: ...

    @property
    def embedding_url(self) -> str | None: ...

    @property
    def embedding_api_key(self) -> SecretStr | None: ...


def server_embedder(
    transport: httpx.AsyncBaseTransport,
    pool: Pool,
    upstream: UpstreamSettings,
    chosen: EmbeddingServer,
    *,
    server: str = "",
    namespace: str = "",
    timeout: float,
) -> Embedder:
    """Return a client of the server at `chosen.embedding_url` or, if that is not set, of the first `upstream`.

    Requests carry `embedding_api_key`. Without this key, requests to the upstream carry `upstream.api_key` or, if that is not
    set either, the caller's credential. Requests to `embedding_url` never carry the caller's headers. `server` and `namespace`
    distinguish vector spaces.
    """
    from .embeddings.server import ServerEmbedder

    is_foreign = chosen.embedding_url is not None
    key = chosen.embedding_api_key or (None if is_foreign else upstream.api_key)
    own = {} if is_foreign else upstream.headers
    # A failed embedding is not repeated.
    client = Upstream(transport, pool, upstream.model_copy(update={"api_key": key, "headers": own, "status_grace": 0.0}))

    async def post(body: dict[str, Any], caller: Caller | None) -> Any:
        sender = Caller() if is_foreign or caller is None else caller
        return await client.post("/v1/embeddings", body, sender, max_bytes=_MAX_BYTES)

    return ServerEmbedder(post, chosen.embedding_model, server=server, namespace=namespace, timeout=timeout)


@asynccontextmanager
async def open_file_embedder(upstream: Upstream, settings: Settings) -> AsyncIterator[Embedder | None]:
    """Open the embedder of vector stores. Without `files.embedding_url`, `upstream` makes embeddings.

    Yield None if numpy is not installed. The vector space depends only on the model, so its server may move.
    """
    files = settings.files
    async with AsyncExitStack() as stack:
        transport, pool = upstream.transport, upstream.pool
        if files.embedding_url is not None:  # the upstream's transport may call the app, or use other certificates
            transport = await stack.enter_async_context(network_transport())
            pool = Pool.of(files.embedding_url, upstream="embeddings")
        try:
            embedder: Embedder | None
            if files.embedding_model != BUILTIN:
                embedder = server_embedder(transport, pool, first_of(settings), files, timeout=files.embedding_timeout)
            else:
                from .embeddings.static import StaticEmbedder

                embedder = StaticEmbedder()
        except ModuleNotFoundError:
            embedder = None
        yield embedder


@asynccontextmanager
async def open_docling(settings: Settings) -> AsyncIterator[Docling | None]:
    """Open the client of the server at `files.docling_url`, or yield None if it is not set. It gets no caller's headers."""
    files = settings.files
    if files.docling_url is None:
        yield None
        return
    headers = {"x-api-key": files.docling_api_key} if files.docling_api_key is not None else {}
    own: dict[str, Any] = {"api_key": None, "headers": headers, "status_grace": 0.0, "timeout": files.docling_timeout}
    async with network_transport() as transport:
        pool = Pool.of(files.docling_url, upstream="docling")
        client = Upstream(transport, pool, first_of(settings).model_copy(update=own))
        post, get = partial(client.post, caller=Caller()), partial(client.get, caller=Caller())
        yield Docling(post, get, timeout=files.docling_timeout)


@asynccontextmanager
async def open_reranker(upstream: Upstream, settings: Settings) -> AsyncIterator[Reranker | None]:
    """Open the client of the server at `files.rerank_url` or, if only `files.rerank_model` is set, of `upstream`.

    Yield None if neither is set. Requests to `files.rerank_url` never carry the caller's headers.
    """
    files, is_foreign = settings.files, settings.files.rerank_url is not None
    async with AsyncExitStack() as stack:
        if not is_foreign and files.rerank_model is None:
            yield None
            return
        transport, pool = upstream.transport, upstream.pool
        if files.rerank_url is not None:
            transport = await stack.enter_async_context(network_transport())
            pool = Pool.of(files.rerank_url, upstream="reranking")
        first = first_of(settings)
        key = files.rerank_api_key or (None if is_foreign else first.api_key)
        own: dict[str, Any] = {"api_key": key, "headers": {} if is_foreign else first.headers, "status_grace": 0.0}
        client = Upstream(transport, pool, first.model_copy(update=own))

        async def post(path: str, body: dict[str, Any], caller: Caller | None) -> Any:
            sender = Caller() if is_foreign or caller is None else caller
            return await client.post(path, body, sender, max_bytes=_MAX_BYTES)

        yield Reranker(post, files.rerank_model or "", timeout=files.rerank_timeout)
