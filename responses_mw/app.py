"""From settings to objects that work together: the only place that names concrete classes; it opens them and closes them.

The standalone server's application: the middleware round a reverse proxy, so that one address serves every path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from .asgi.access import APIKeyMiddleware, PassablePaths
from .asgi.admin import checks, open_admin
from .asgi.limits import RateLimitMiddleware, RateLimits
from .asgi.middleware import Application, Dispatcher
from .asgi.proxy import ReverseProxy
from .asgi.routes import Routes
from .asgi.telemetry import TelemetryMiddleware
from .auth import APIKeys
from .cache import Cache, Embeddings
from .crypto import Sealer
from .engine.history import History
from .engine.runner import Runner
from .errors import APIError, StartupError
from .jobs import Background, Followers, JobService, Worker
from .settings import Settings
from .state import Bounds, Client, State, StateUnavailable, connect
from .tools import ForwardedTools, ToolConfig, Tools
from .upstream import Caller, Upstream
from .upstream.backend import Backend
from .upstream.chat_backend import ChatBackend
from .upstream.client import CONNECT_TIMEOUT
from .upstream.responses_backend import ResponsesBackend
from .upstream.transports.asgi import ASGITransport

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 10_000
"""Maximum connections to the upstream, which limits its concurrency itself. Proxied requests have as many of their own."""

COMMIT_TIMEOUTS = 5
"""How many timeouts of a Redis call (`redis.timeout`) a finished response waits until it is stored."""

_GETTING_TO_KNOW = 2.0
IN_PROCESS = "http://localhost"  # what a call tells the application that no request stands behind


class UnfitState(StartupError):
    """The Redis that is configured cannot keep what is stored; the message says why."""


class UnfitCache(StartupError):
    """The cache cannot be as it is configured; the message says why."""


def network_transport() -> httpx.AsyncBaseTransport:
    """To the upstream over the network: by our own where httptools is installed, at a third of the cost of httpx's."""
    try:
        from .upstream.transports.http11 import NetworkTransport
    except ModuleNotFoundError:
        return httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
        )
    return NetworkTransport(MAX_CONNECTIONS)


@asynccontextmanager
async def open_upstream(
    app: ASGIApp, settings: Settings, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[Upstream]:
    """The upstream over the network, or ``app`` itself where no URL is set. A given ``transport`` is closed in the end."""
    if settings.upstream.url is None:
        transport, base = transport or ASGITransport(app), IN_PROCESS + settings.server.base_path
    else:
        transport, base = transport or network_transport(), settings.upstream.url
    async with transport:
        upstream = Upstream(transport, base, settings.upstream)
        if settings.upstream.url is not None:  # an application that we are mounted in has not started yet
            await _get_to_know(upstream, settings.upstream.url)
        yield upstream


async def _get_to_know(upstream: Upstream, url: str) -> None:
    """Asks for its dialect, so that no request need wait for that. It may be away: then the first one will."""
    try:
        async with asyncio.timeout(_GETTING_TO_KNOW):
            await upstream.dialect(Caller())
    except (APIError, TimeoutError):
        logger.warning("the upstream %s does not answer yet", url)


@asynccontextmanager
async def open_state(settings: Settings) -> AsyncIterator[State | None]:
    """The state in the Redis that is set, or in an embedded one; None where there is neither.

    Raises ``UnfitState`` where it would lose what it is given. It may be away: then it is used when it comes.
    """
    async with AsyncExitStack() as stack:
        client = await _state_client(settings, stack)
        if client is None:
            yield None
            return
        bounds = Bounds(
            response_bytes=settings.limits.max_request_bytes,
            chain_bytes=2 * settings.limits.max_request_bytes,
            recent_bytes=settings.limits.memory_bytes // 4,
        )
        state = State(
            client,
            ttl_seconds=settings.state.ttl,
            log_ttl_seconds=settings.jobs.log_ttl,
            bounds=bounds,
            patience=COMMIT_TIMEOUTS * settings.redis.timeout,
            owner_bytes=settings.limits.stored_bytes,
        )
        stack.push_async_callback(state.end)
        if settings.redis.url is not None:
            await _check_fitness(state, settings)
        yield state


async def _state_client(settings: Settings, stack: AsyncExitStack) -> Client | None:
    if settings.redis.url is not None:
        client = connect(settings.redis.url.get_secret_value(), timeout=settings.redis.timeout)
        stack.push_async_callback(client.aclose)
        return client
    from .state.embedded import embedded

    data_dir = Path(settings.redis.data_dir) if settings.redis.data_dir else None
    try:
        return await stack.enter_async_context(embedded(data_dir, timeout=settings.redis.timeout))
    except ModuleNotFoundError:
        logger.warning("nothing is stored: no redis is set, and the extra responses-mw[embedded] is not installed")
        return None


async def _check_fitness(state: State, settings: Settings) -> None:
    try:
        health = await state.check()
    except StateUnavailable as error:
        logger.warning("%s It is used when it comes.", error.message)
        return
    for warning in health.warnings:
        logger.warning("%s: %s", health.server, warning)
    faults = list(health.errors)
    if health.policy != "noeviction" and not settings.redis.allow_eviction:
        faults.append(f"maxmemory-policy is {health.policy}: set it to noeviction, or set redis.allow_eviction.")
    if faults:
        raise UnfitState(f"{health.server}: {' '.join(faults)}")


class Core(NamedTuple):
    """What makes responses, in front of an application or in a worker alone."""

    upstream: Upstream
    state: State | None
    sealer: Sealer
    runner: Runner
    cache: Cache | None


@asynccontextmanager
async def open_core(app: ASGIApp, settings: Settings, transport: httpx.AsyncBaseTransport | None = None) -> AsyncIterator[Core]:
    """Opens the upstream (see ``open_upstream``), the state (see ``open_state``) and the runner on top of them."""
    sealer = Sealer([secret.get_secret_value() for secret in settings.auth.secret_keys])
    async with (
        open_upstream(app, settings, transport) as upstream,
        open_state(settings) as state,
        open_cache(upstream, state, sealer, settings) as cache,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        history = History(state, required=settings.state.required)
        backend, tools = _backend_and_tools(upstream, sealer, settings, http)
        runner = Runner(
            upstream,
            backend,
            history,
            tools,
            sealer,
            settings.compaction,
            cache,
            status_grace=settings.upstream.status_grace,
            max_turns=settings.tools.max_turns,
        )
        yield Core(upstream, state, sealer, runner, cache)


def _backend_and_tools(
    upstream: Upstream, sealer: Sealer, settings: Settings, http: httpx.AsyncClient
) -> tuple[Backend, Tools]:
    """Create the backend for the upstream's API. An upstream with a Responses API runs the tools itself."""
    config = ToolConfig(settings.tools, settings.search)
    is_open = settings.server.reasoning_events == "open_responses"
    if settings.upstream.api == "responses":
        tools = ForwardedTools(config, http, sealer)
        return ResponsesBackend(upstream, sealer, settings.upstream, tools.echo, open_reasoning=is_open), tools
    return ChatBackend(upstream, sealer, settings.upstream, open_reasoning=is_open), Tools(config, http, sealer)


@asynccontextmanager
async def open_cache(
    upstream: Upstream, state: State | None, sealer: Sealer, settings: Settings
) -> AsyncIterator[Cache | None]:
    """The cache in the state's Redis; None where there is no state. Embeddings come over the upstream's transport, unless that
    leads into an application that we are mounted in, and they are another server's. Raises ``UnfitCache``."""
    async with AsyncExitStack() as stack:
        if state is None:
            yield None
            return
        transport = upstream.transport
        if settings.upstream.url is None and settings.cache.embedding_url is not None:
            transport = await stack.enter_async_context(network_transport())
        try:
            embeddings = None
            if settings.cache.embedding_model:
                embeddings = Embeddings(transport, upstream.base, settings.cache, settings.upstream.api_key)
        except ModuleNotFoundError as missing:
            raise UnfitCache(f"cache.embedding_model needs {missing.name}: pip install 'responses-mw[cache]'") from None
        cache = Cache(
            state.client,
            embeddings,
            sealer,
            settings.cache,
            deployment=f"{settings.upstream.url}\0{settings.upstream.think_tag}",
            memory_bytes=settings.limits.memory_bytes,
        )
        try:
            yield cache
        finally:
            await cache.aclose()


@asynccontextmanager
async def open_application(
    app: ASGIApp,
    settings: Settings,
    transport: httpx.AsyncBaseTransport | None = None,
    scope: MutableMapping[str, Any] | None = None,
) -> AsyncIterator[Application]:
    """Opens all that stands in front of ``app`` and behind it. Background responses call it with what ``scope`` offers.

    The crew does not work yet: whoever opens this knows when the upstream can be called."""
    async with open_core(app, settings, transport) as (upstream, state, sealer, runner, cache), AsyncExitStack() as stack:
        limits = RateLimits(state.usage if state is not None else None, settings.limits)
        if limits.are_set:
            await stack.enter_async_context(limits.renewing())
        if state is None:
            await stack.enter_async_context(open_admin(settings.server, checks(upstream, None, None), None))
            yield Application(_around(Routes(runner, upstream, None, None, settings), limits, settings), None)
            return
        followers = Followers(state)
        background = Background(state, followers, sealer, settings.jobs, settings.redis)
        worker = None
        if settings.jobs.concurrency:
            drain_timeout = settings.server.drain_timeout
            worker = Worker(runner, state, sealer, settings.jobs, settings.redis, scope, drain_timeout=drain_timeout)
        async with aclosing(JobService(background, followers, worker)) as crew:
            crew.start()
            is_working = (lambda: crew.is_working) if worker is not None else None
            async with open_admin(settings.server, checks(upstream, state, is_working), state):
                routes = Routes(runner, upstream, state, background, settings, cache)
                yield Application(_around(routes, limits, settings), crew)


def _around(routes: ASGIApp, limits: RateLimits, settings: Settings) -> ASGIApp:
    """What a request passes before it comes to the ``routes``."""
    if limits.are_set:
        routes = RateLimitMiddleware(routes, limits)
    keys = APIKeys.of(settings.auth)
    if keys is not None:
        routes = APIKeyMiddleware(routes, keys)
    if settings.server.cors_origins:
        origins = settings.server.cors_origins
        routes = CORSMiddleware(routes, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"])
    return TelemetryMiddleware(routes)


class ResponsesMiddleware(Dispatcher):
    """ASGI middleware that serves ``/v1/responses`` and ``/v1/conversations``, and passes everything else to ``app``.

    Chat Completions go to ``settings.upstream.url``, or to ``app`` itself if that is not set. Without ``settings`` they are
    read from the environment, as ``vllm serve --middleware responses_mw.ResponsesMiddleware`` needs. A given
    ``transport`` is used for the upstream, and closed at the end.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.settings = settings = settings or Settings()
        super().__init__(app, settings.server, partial(open_application, app, settings, transport))


def create_app(settings: Settings | None = None) -> ResponsesMiddleware:
    """The application for ``settings`` (default: the environment). Raises ``ValueError`` where no upstream is set,
    ``InvalidKeys`` for API keys that are none."""
    settings = settings or Settings()
    if settings.upstream.url is None:
        raise ValueError("no upstream is set: use --upstream or RESPONSES_MW_UPSTREAM_URL")
    client = httpx.AsyncClient(
        transport=network_transport(),  # not that of our own calls: no request that passes comes near their connections
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # one caller's are not another's
        trust_env=False,
    )
    keys = APIKeys.of(settings.auth)
    passable = PassablePaths(settings.auth.proxy_paths) if keys is not None else None
    proxy: ASGIApp = ReverseProxy(client, settings.upstream.url, settings.server.base_path, passable=passable)
    if keys is not None:
        key = settings.upstream.api_key
        proxy = APIKeyMiddleware(proxy, keys, upstream_key=key.get_secret_value() if key else None)
    return ResponsesMiddleware(TelemetryMiddleware(proxy, "*", traced=False), settings)
