"""Open the models that the cache uses: the embedder and the judge. Each is built in, at the upstream or at another server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import httpx

from .cache import Judge, create_judge
from .embedding_models import server_embedder
from .embeddings import BUILTIN, Embedder
from .errors import APIError, StartupError
from .protocol.dialects import Dialect
from .settings import Settings
from .upstream import Caller, Upstream
from .upstream.opening import first_of, network_transport, open_upstreams
from .upstream.pool import Pool

_MAX_VERDICT_BYTES = 256 * 1024


class CacheModels(NamedTuple):
    """The models that the cache uses. Without them, it has fewer hits."""

    embedder: Embedder | None = None
    judge: Judge | None = None
    chat_model: str = ""
    """The model that judges for commands: `cache.judge_model`, or the only model of the upstream."""


@asynccontextmanager
async def open_cache_models(
    default: Upstream, upstream_of: Callable[[Caller], Upstream], settings: Settings
) -> AsyncIterator[CacheModels]:
    """Open the models of the cache. Raises the same errors as `create_embedder`.

    The upstream `default` makes embeddings. `upstream_of` returns the upstream that serves the model of a caller's request.
    """
    async with AsyncExitStack() as stack:
        transport, pool = default.transport, default.pool
        if settings.cache.embedding_url is not None:  # the upstream's transport may call the app, or use other certificates
            transport, pool = (
                await stack.enter_async_context(network_transport()),
                Pool.of(settings.cache.embedding_url, upstream="embeddings"),
            )
        if settings.cache.judge_url is not None:
            server = _judge_server(await stack.enter_async_context(network_transport()), settings)
            judge = _create_judge(lambda caller: (server, Caller()), settings)
        else:
            judge = _create_judge(partial(_at_upstream, upstream_of, settings.cache.judge_model), settings)
        yield CacheModels(create_embedder(transport, pool, settings), judge)


@asynccontextmanager
async def open_models_alone(settings: Settings) -> AsyncIterator[CacheModels]:
    """Open the models for other commands than `serve` and `worker`. Without `upstream.url`, models there are missing."""
    cache = settings.cache
    settings = settings.model_copy(update={"cache": cache.model_copy(update={"mode": "semantic"})})
    async with AsyncExitStack() as stack:
        upstream, *_ = await stack.enter_async_context(open_upstreams(_no_app, settings))
        models = await stack.enter_async_context(open_cache_models(upstream, lambda _: upstream, settings))
        has_upstream = bool(first_of(settings).url)
        has_embedder = has_upstream or cache.embedding_url or cache.embedding_model == BUILTIN
        has_judge = has_upstream or cache.judge_url
        model = cache.judge_model or ""
        if has_judge and cache.judge != "off" and not model:
            with suppress(APIError):
                model = await upstream.model(None, Caller())
        yield CacheModels(models.embedder if has_embedder else None, models.judge if has_judge else None, model)


async def _no_app(*_: object) -> None:
    raise httpx.ConnectError("no upstream is set")


def create_embedder(transport: httpx.AsyncBaseTransport, pool: Pool, settings: Settings) -> Embedder | None:
    """Return the embedder of the cache. It sends requests to the endpoints of `pool`, unless the vectors are built in.

    Return None if numpy is not installed, and the settings do not require embeddings.
    Raises `StartupError` if numpy is not installed, and the settings require embeddings.
    """
    cache = settings.cache
    try:
        if cache.embedding_model != BUILTIN:
            server, namespace = cache.embedding_url or "", cache.namespace
            return server_embedder(
                transport, pool, first_of(settings), cache, server=server, namespace=namespace, timeout=cache.timeout
            )
        from .embeddings.static import StaticEmbedder

        return StaticEmbedder()
    except ModuleNotFoundError as missing:
        if cache.embedding_model == BUILTIN and cache.mode != "semantic":
            return None
        raise StartupError(f"the semantic cache needs {missing.name}: install responses-mw with the extra 'cache'") from None


def _judge_server(transport: httpx.AsyncBaseTransport, settings: Settings) -> Upstream:
    """Return a client of the server at `cache.judge_url`. Its requests carry `cache.judge_api_key`."""
    cache = settings.cache
    assert cache.judge_url is not None
    own: dict[str, Any] = {"api_key": cache.judge_api_key, "headers": {}, "status_grace": 0.0, "api": "chat"}
    return Upstream(transport, Pool.of(cache.judge_url, upstream="judge"), first_of(settings).model_copy(update=own))


def _at_upstream(
    upstream_of: Callable[[Caller], Upstream], model: str | None, caller: Caller | None
) -> tuple[Upstream, Caller]:
    """Return the upstream that serves the judge, and the sender of the request.

    Only the upstream of the caller's own request gets the caller's credential.
    """
    caller = caller or Caller()
    own = upstream_of(caller)
    if model is None:
        return own, caller
    upstream = upstream_of(replace(caller, model=model))
    return upstream, replace(caller if upstream is own else caller.at_another_upstream(), model=model)


def _create_judge(server_of: Callable[[Caller | None], tuple[Upstream, Caller]], settings: Settings) -> Judge | None:
    """Return the judge, or None if `cache.judge` is off. `server_of` returns the server and the sender of a request."""
    if settings.cache.judge == "off":
        return None

    async def post(path: str, body: dict[str, Any], caller: Caller | None) -> Any:
        server, sender = server_of(caller)
        return await server.post(path, body, sender, max_bytes=_MAX_VERDICT_BYTES)

    async def dialect(caller: Caller | None) -> Dialect:
        server, sender = server_of(caller)
        return await server.dialect(sender)

    return create_judge(post, dialect, settings.cache)
