"""Build the application from the settings: choose the concrete classes, and open and close their objects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from .asgi.access import APIKeyMiddleware, Origins, RateLimits
from .asgi.admin import checks, open_admin
from .asgi.middleware import Application, Dispatcher
from .asgi.proxy import PassablePaths, ReverseProxy
from .asgi.requests import EndpointContext, Reader
from .asgi.routes import DescriptionMiddleware, Routes
from .asgi.telemetry import TelemetryMiddleware
from .auth import APIKeys
from .cache import Cache, Embeddings
from .crypto import Sealer
from .engine.history import History
from .engine.runner import Runner
from .errors import APIError, StartupError
from .jobs import JobService, Worker
from .network import system_tls
from .settings import Settings
from .state import Client, State, StateOptions, StateUnavailable, connect, embedded
from .threads import in_background
from .tools.toolbox import ForwardedTools, Tools
from .upstream import Caller, Upstream
from .upstream.backend import Backend
from .upstream.backends import ChatBackend, ResponsesBackend
from .upstream.transports.asgi import ASGITransport

logger = logging.getLogger(__name__)

COMMIT_TIMEOUTS = 5
"""Maximum time to retry a write of a response or conversation to Redis, in multiples of `redis.timeout`."""

IN_PROCESS = "http://localhost"
"""Base URL for calls to the wrapped application in this process."""

_MAX_EMBEDDING_BYTES = 4 * 1024 * 1024
"""Maximum size in bytes of an embeddings response, about fifty times that of the largest vectors in use."""

_DETECTION_TIMEOUT = 2.0
"""Timeout in seconds for detecting the upstream's dialect at startup."""


def network_transport() -> httpx.AsyncBaseTransport:
    """Return a `NetworkTransport`. If httptools is missing, return httpx's transport, which takes three times the CPU time."""
    try:
        from .upstream.transports.http11 import NetworkTransport
    except ModuleNotFoundError:
        return httpx.AsyncHTTPTransport(limits=httpx.Limits())  # no limit, because the upstream limits its own concurrency
    return NetworkTransport()


@asynccontextmanager
async def open_upstream(
    app: ASGIApp, settings: Settings, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[Upstream]:
    """Open a client of the upstream: the server at `upstream.url` or, if no URL is set, `app`.

    If a URL is set and `upstream.dialect` is `auto`, detect the dialect. Log a warning if the server is not available yet.
    `transport` replaces the default transport. It is closed on exit.
    """
    url = settings.upstream.url
    transport = transport or (network_transport() if url else ASGITransport(app))
    async with transport:
        upstream = Upstream(transport, _base(settings), settings.upstream)
        if url is not None:  # otherwise, the wrapped application has not started yet
            await _detect(upstream, url)
        yield upstream


def _base(settings: Settings) -> str:
    return settings.upstream.url or IN_PROCESS + settings.server.base_path


async def _detect(upstream: Upstream, url: str) -> None:
    try:
        async with asyncio.timeout(_DETECTION_TIMEOUT):
            await upstream.dialect(Caller())
    except (APIError, TimeoutError):  # the first request detects the dialect
        logger.warning("the upstream %s does not answer yet", url)


@asynccontextmanager
async def open_state(settings: Settings) -> AsyncIterator[State | None]:
    """Open the state in Redis. Without `redis.url`, open the embedded store. If none is installed, yield None.

    Raises `StartupError` if `redis.url` is invalid, or if the embedded store cannot start or cannot use `redis.data_dir`.
    """
    async with AsyncExitStack() as stack:
        client = await _state_client(settings, stack)
        if client is None:
            yield None
            return
        options = StateOptions(
            ttl_seconds=settings.state.ttl,
            response_bytes=settings.limits.max_request_bytes,
            chain_bytes=2 * settings.limits.max_request_bytes,
            chain_memory=16 * settings.limits.max_request_bytes,
            owner_bytes=settings.limits.stored_bytes,
            patience=COMMIT_TIMEOUTS * settings.redis.timeout,
        )
        state = State(client, options)
        stack.push_async_callback(state.aclose)
        yield state


async def _state_client(settings: Settings, stack: AsyncExitStack) -> Client | None:
    if settings.redis.url is not None:
        try:
            return connect(settings.redis.url.get_secret_value(), timeout=settings.redis.timeout)
        except ValueError as error:
            raise StartupError(f"redis.url is not valid: {error}") from None
    data_dir = Path(settings.redis.data_dir) if settings.redis.data_dir else None
    try:
        return await stack.enter_async_context(embedded(data_dir, timeout=settings.redis.timeout))
    except ModuleNotFoundError:
        logger.warning("nothing is stored: redis.url is not set, and the extra responses-mw[embedded] is not installed")
        return None


async def check_fitness(state: State, settings: Settings) -> None:
    """Check whether the Redis at `redis.url` is suitable. If it is not available yet, log a warning.

    Raises `StartupError` if it is unsuitable, such as a replica, or if it may evict data without `redis.allow_eviction`.
    """
    if settings.redis.url is None:
        return
    try:
        health = await state.inspect()
    except StateUnavailable as error:
        logger.warning("%s It is used as soon as it is available.", error.message)
        return
    faults = list(health.errors)
    if health.policy != "noeviction" and not settings.redis.allow_eviction:
        remedy = "permit INFO" if health.policy == "unknown" else "set it to noeviction"
        faults.append(f"maxmemory-policy is {health.policy}: {remedy}, or set redis.allow_eviction.")
    if faults:
        raise StartupError(f"{health.server}: {' '.join(faults)}")


class Core(NamedTuple):
    """The objects that a server or a worker needs to make responses. Without stored state, `state` and `cache` are None."""

    upstream: Upstream
    state: State | None
    sealer: Sealer
    runner: Runner
    cache: Cache | None


@asynccontextmanager
async def open_core(app: ASGIApp, settings: Settings, transport: httpx.AsyncBaseTransport | None = None) -> AsyncIterator[Core]:
    """Open the upstream, state, cache and runner. Raises what `open_state`, `check_fitness` and `create_embeddings` raise."""
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(open_upstream(app, settings, transport))
        state = await stack.enter_async_context(open_state(settings))
        if state is not None:
            await check_fitness(state, settings)
            await stack.enter_async_context(state.ledger.recording())
        secrets = [secret.get_secret_value() for secret in settings.auth.secret_keys]
        sealer = Sealer(secrets, default=state.client.shared_secret if state is not None else None)
        cache = await _open_cache(stack, upstream, state, sealer, settings) if state is not None else None
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, verify=system_tls()))
        backend, tools = _backend_and_tools(upstream, sealer, settings, http)
        stack.push_async_callback(tools.aclose)
        history = History(state, required=settings.state.required)
        runner = Runner(upstream, backend, history, tools, sealer, settings.compaction, settings.upstream, cache)
        yield Core(upstream, state, sealer, runner, cache)


@asynccontextmanager
async def open_tools(settings: Settings) -> AsyncIterator[Tools]:
    """Open the tools for `serve --check`, without an upstream or state."""
    async with httpx.AsyncClient(trust_env=False, verify=system_tls()) as http:
        yield Tools(settings.tools, settings.search, http, Sealer([]))


def _backend_and_tools(
    upstream: Upstream, sealer: Sealer, settings: Settings, http: httpx.AsyncClient
) -> tuple[Backend, Tools]:
    is_open = settings.server.reasoning_events == "open_responses"
    if settings.upstream.api == "responses":
        tools = ForwardedTools(settings.tools, settings.search, http, sealer)
        return ResponsesBackend(upstream, sealer, settings.upstream, tools.echo, open_reasoning=is_open), tools
    backend = ChatBackend(upstream, sealer, settings.upstream, open_reasoning=is_open)
    return backend, Tools(settings.tools, settings.search, http, sealer)


async def _open_cache(stack: AsyncExitStack, upstream: Upstream, state: State, sealer: Sealer, settings: Settings) -> Cache:
    transport = upstream.transport
    if settings.upstream.url is None and settings.cache.embedding_url is not None:  # the upstream's transport calls the app
        transport = await stack.enter_async_context(network_transport())
    cache = Cache(
        state.client,
        create_embeddings(transport, settings),
        sealer,
        settings.cache,
        deployment=f"{settings.upstream.url}\0{settings.upstream.think_tag}",
        memory_bytes=settings.limits.memory_bytes,
    )
    return await stack.enter_async_context(aclosing(cache))


@asynccontextmanager
async def open_embeddings(settings: Settings) -> AsyncIterator[Embeddings | None]:
    """Open a client of the embeddings server for `cache explain` and `serve --check`.

    Yield None if `cache.embedding_model` is not set, or if neither `cache.embedding_url` nor `upstream.url` is set. Raises
    `StartupError` if numpy is not installed.
    """
    async with network_transport() as transport:
        has_server = settings.cache.embedding_url or settings.upstream.url
        yield create_embeddings(transport, settings) if has_server else None


def create_embeddings(transport: httpx.AsyncBaseTransport, settings: Settings) -> Embeddings | None:
    """Return a client of the embeddings server, or None if `cache.embedding_model` is not set.

    If `cache.embedding_url` is not set, the server is the upstream. Requests carry `cache.embedding_api_key`. Without this key,
    requests to the upstream carry `upstream.api_key` or, if that is not set either, the caller's credential. Requests to
    `cache.embedding_url` never carry the caller's headers. Raises `StartupError` if numpy is not installed.
    """
    cache = settings.cache
    if not cache.embedding_model:
        return None
    is_foreign = cache.embedding_url is not None
    key = cache.embedding_api_key or (None if is_foreign else settings.upstream.api_key)
    chosen = settings.upstream.model_copy(update={"api_key": key, "status_grace": 0.0})  # a failed embedding is not repeated
    server = Upstream(transport, cache.embedding_url or _base(settings), chosen)

    async def post(body: dict[str, Any], caller: Caller | None) -> Any:
        sender = Caller() if is_foreign or caller is None else caller
        return await server.post("/v1/embeddings", body, sender, max_bytes=_MAX_EMBEDDING_BYTES)

    try:
        return Embeddings(post, cache)
    except ModuleNotFoundError as missing:
        raise StartupError(f"cache.embedding_model needs {missing.name}: install responses-mw with the extra 'cache'") from None


@asynccontextmanager
async def open_application(
    app: ASGIApp,
    settings: Settings,
    transport: httpx.AsyncBaseTransport | None = None,
    scope: MutableMapping[str, Any] | None = None,
    is_listening: Callable[[], bool] = lambda: True,
) -> AsyncIterator[Application]:
    """Open the application that serves the Responses API in front of `app`.

    If `app` is the upstream, background responses and the readiness check call it with the members of `scope`. The readiness
    check fails until `is_listening` returns true. The caller must start the worker with `jobs.work()` after `app` has started.

    Raises the same errors as `open_core` and `open_admin`. Raises `StartupError` if the API keys or prompt files are invalid.
    """
    async with open_core(app, settings, transport) as core, AsyncExitStack() as stack:
        upstream, state, _, runner, cache = core
        limits = RateLimits(state.usage if state is not None else None, settings.limits, upstream.verify)
        if limits.are_set:
            await stack.enter_async_context(in_background(limits.renew_streams()))
        jobs = is_working = None
        if state is not None:
            worker = create_worker(core, settings, scope) if settings.jobs.concurrency else None
            jobs = JobService(state, core.sealer, settings.jobs, settings.redis, worker)
            await stack.enter_async_context(aclosing(jobs))
            is_working = jobs.is_working if worker is not None else None
        probe = partial(upstream.probe, Caller(scope=scope))
        readiness = checks(probe, state, is_working, runner.drain, is_listening)
        await stack.enter_async_context(open_admin(settings.server, readiness, state))
        reader = Reader(settings.limits, settings.auth, settings.server, settings.upstream.forward_headers)
        origins = Origins(settings.server.cors_origins)
        context = EndpointContext(runner, upstream, state, jobs, cache, reader, origins, limits, settings)
        yield Application(_around(Routes(context), settings), runner.drain, jobs, upstream)


def create_worker(core: Core, settings: Settings, scope: MutableMapping[str, Any] | None = None) -> Worker:
    """Create a worker for background responses. `core.state` must not be None.

    `scope` has the members of the host's scope for calls to an upstream in this process.
    """
    assert core.state is not None
    drain_timeout = settings.server.drain_timeout
    return Worker(core.runner, core.state, core.sealer, settings.jobs, settings.redis, scope, drain_timeout=drain_timeout)


def _around(routes: ASGIApp, settings: Settings) -> ASGIApp:
    keys = APIKeys.of(settings.auth)
    if keys is not None:
        routes = APIKeyMiddleware(routes, keys)
    if settings.server.cors_origins:
        origins = settings.server.cors_origins
        routes = CORSMiddleware(routes, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"])
    return TelemetryMiddleware(routes)


class ResponsesMiddleware(Dispatcher):
    """ASGI middleware that serves `/v1/responses` and `/v1/conversations`. Requests for other paths are passed to `app`.

    The upstream is the server at `settings.upstream.url` or, without a URL, `app`. If `settings` is None, as under
    `vllm serve --middleware`, they are read with `Settings.from_environment`, which raises an error if they are invalid.
    `transport` replaces the default transport for requests to the upstream. It is closed at shutdown.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.settings = settings = settings or Settings.from_environment()
        opening = partial(open_application, app, settings, transport, is_listening=lambda: self.is_listening)
        super().__init__(app, settings.server, opening)


def create_app(settings: Settings | None = None) -> ResponsesMiddleware:
    """Return the application of the standalone server: the middleware around a reverse proxy.

    If `settings` is None, they are read with `Settings.from_environment`, which raises an error if they are invalid. Raises
    `ValueError` if `upstream.url` is not set, and `StartupError` if the API keys are invalid.
    """
    settings = settings or Settings.from_environment()
    if settings.upstream.url is None:
        raise ValueError("no upstream is set: use --upstream or RESPONSES_MW_UPSTREAM_URL")
    transport = network_transport()  # a separate pool: proxied requests must not share connections with our own calls
    keys = APIKeys.of(settings.auth)
    passable = PassablePaths(settings.auth.proxy_paths) if keys is not None else None
    proxy: ASGIApp = ReverseProxy(transport, settings.upstream.url, settings.server.base_path, passable=passable)
    proxy = DescriptionMiddleware(proxy, settings.server, needs_key=keys is not None)
    if keys is not None:
        key = settings.upstream.api_key
        proxy = APIKeyMiddleware(proxy, keys, upstream_key=key.get_secret_value() if key else None)
    return ResponsesMiddleware(TelemetryMiddleware(proxy, "*", traced=False), settings)
