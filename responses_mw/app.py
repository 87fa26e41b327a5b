"""Build the application from the settings: choose the concrete classes, and open and close their objects."""

from __future__ import annotations

import logging
import platform
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import httpx
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from .asgi.access import APIKeyMiddleware, RateLimits
from .asgi.admin import checks, contained, upstream_checks
from .asgi.metering import Metering
from .asgi.middleware import Application, Dispatcher
from .asgi.models import Models
from .asgi.on_behalf import OnBehalf
from .asgi.passable_paths import PassablePaths
from .asgi.passed_bodies import PassedBodies
from .asgi.proxy import OpenUpstreams, ReverseProxy
from .asgi.requests import EndpointContext, Reader, refused_fields
from .asgi.routes import DescriptionMiddleware, Routes
from .asgi.spellings import OurPaths
from .asgi.telemetry import HeaderOptions, TelemetryMiddleware
from .asgi.web_pages import Hosts, OriginMiddleware, Origins
from .auth import APIKeys, owner_of_key
from .cache import Cache
from .cache_models import open_cache_models
from .crypto import Sealer
from .engine.drain import Drain
from .engine.history import History
from .engine.input_files import InputFiles
from .engine.run_factory import RunFactory
from .engine.runner import Runner
from .errors import StartupError
from .file_parts import FileParts, open_file_parts
from .inspector.app import create_inspector
from .inspector.inspector_context import InspectorContext
from .jobs import AnyWorker, IngestionWorker, JobService, Worker
from .network import check_ca_files, system_tls
from .redaction import Redactor, activate
from .server.admin import open_admin
from .server.cancellation import is_shutdown_of_uvicorn
from .settings import Settings
from .state import State
from .state.replicas import replica_name
from .state_opening import check_fitness, open_state
from .tasks import in_background
from .telemetry.process_facts import process_facts
from .telemetry.warning_log import WARNINGS
from .tools.toolbox import ForwardedTools, Tools
from .upstream import Caller, Upstream
from .upstream.backends.base import Backend
from .upstream.backends.chat import ChatBackend
from .upstream.backends.responses import ResponsesBackend
from .upstream.opening import open_upstreams, upstream_tls
from .upstream.routing import Upstreams

logger = logging.getLogger(__name__)


def check_platform() -> None:
    """Log a warning on Windows, which is not tested."""
    if platform.system() == "Windows":
        logger.warning("Windows is not supported: responses-mw is tested only on Linux")


class Core(NamedTuple):
    """The objects that a server or a worker needs to make responses. Without stored state, all that can be None are None.

    If the upstream serves files, `files` is None, too.
    """

    upstreams: Upstreams
    state: State | None
    sealer: Sealer
    runner: Runner
    cache: Cache | None
    files: FileParts | None


@asynccontextmanager
async def open_core(
    app: ASGIApp,
    settings: Settings,
    transport: httpx.AsyncBaseTransport | None = None,
    scope: MutableMapping[str, Any] | None = None,
) -> AsyncIterator[Core]:
    """Open the upstream, state, cache and runner. Raises what `open_state`, `check_fitness` and `create_embedder` raise."""
    activate(Redactor.of(settings))
    try:
        check_ca_files()
    except ValueError as error:
        raise StartupError(str(error)) from None
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_upstreams(app, settings, transport, scope))
        state = await stack.enter_async_context(open_state(settings))
        if state is not None:
            await check_fitness(state, settings)
            await stack.enter_async_context(state.ledger.recording())
            if settings.ui.mode != "off":
                await stack.enter_async_context(_reporting(state, settings, opened))
        secrets = [secret.get_secret_value() for secret in settings.auth.secret_keys]
        sealer = Sealer(secrets, default=state.client.shared_secret if state is not None else None)
        if state is not None:
            state.vault.sealer = sealer
        files = None
        if state is not None and settings.serves_files:
            files = await stack.enter_async_context(open_file_parts(opened[0], state, settings))
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, verify=system_tls()))
        library, search = (files.library, files.tool_search) if files is not None else (None, None)
        tools = Tools(settings.tools, settings.search, http, sealer, search, library)
        stack.push_async_callback(tools.aclose)
        forwarded = ForwardedTools(settings.tools, settings.search, http, sealer, search, library)
        is_open = settings.server.reasoning_events == "open_responses"
        upstreams = Upstreams({one: _backend(one, sealer, forwarded, is_open=is_open) for one in opened})
        cache = await _open_cache(stack, upstreams, state, sealer, settings) if state is not None else None
        history = History(state, required=settings.state.required)
        input_files = InputFiles(library, settings.limits.max_request_bytes, settings.tools.allow_private_urls)
        factory = RunFactory(upstreams, history, tools, forwarded, input_files)
        runner = Runner(factory, upstreams, sealer, settings.compaction, cache, Drain(is_shutdown_of_uvicorn))
        yield Core(upstreams, state, sealer, runner, cache, files)


@asynccontextmanager
async def _reporting(state: State, settings: Settings, upstreams: Sequence[Upstream]) -> AsyncIterator[None]:
    """Report this process and its responses to the inspector until the context exits."""
    name = replica_name()
    state.replicas.describe(lambda: {"endpoints": [fact for one in upstreams for fact in one.pool.facts(one.name)]})
    state.replicas.describe(process_facts)
    state.replicas.describe(lambda: {"warnings": WARNINGS.report()})
    maximum, seconds = settings.ui.responses, settings.state.ttl
    async with AsyncExitStack() as stack:
        stack.enter_context(WARNINGS.collecting(Redactor.of(settings)))
        await stack.enter_async_context(state.replicas.reporting(name))
        await stack.enter_async_context(state.recent.recording(name, maximum=maximum, seconds=seconds))
        if settings.ui.mode == "content" and settings.ui.captures:
            await stack.enter_async_context(state.captures.recording(maximum=settings.ui.captures, seconds=seconds))
        yield


@asynccontextmanager
async def open_tools(settings: Settings) -> AsyncIterator[Tools]:
    """Open the tools for `serve --check`, without an upstream or state."""
    async with httpx.AsyncClient(trust_env=False, verify=system_tls()) as http:
        yield Tools(settings.tools, settings.search, http, Sealer([]))


def _backend(upstream: Upstream, sealer: Sealer, tools: ForwardedTools, *, is_open: bool) -> Backend:
    if upstream.settings.api == "responses":
        return ResponsesBackend(upstream, sealer, upstream.settings, tools.echo, open_reasoning=is_open)
    return ChatBackend(upstream, sealer, upstream.settings, open_reasoning=is_open)


async def _open_cache(stack: AsyncExitStack, upstreams: Upstreams, state: State, sealer: Sealer, settings: Settings) -> Cache:
    models = await stack.enter_async_context(open_cache_models(upstreams.default, upstreams.of, settings))
    cache = Cache(
        state.client,
        models.embedder,
        sealer,
        settings.cache,
        deployment="\0".join(f"{','.join(one.url)}\0{one.think_tag}" for one in settings.named_upstreams.values()),
        memory_bytes=settings.limits.memory_bytes,
        judge=models.judge,
    )
    return await stack.enter_async_context(aclosing(cache))


@asynccontextmanager
async def open_application(
    app: ASGIApp,
    settings: Settings,
    transport: httpx.AsyncBaseTransport | None = None,
    scope: MutableMapping[str, Any] | None = None,
    is_listening: Callable[[], bool] = lambda: True,
) -> AsyncIterator[Application]:
    """Open the application that serves the Responses API in front of `app`.

    If `app` is the upstream, background responses, probes and the readiness check call it with the members of `scope`. The
    readiness check fails until `is_listening` returns true. The caller must start the worker with `jobs.work()` after `app` has
    started.

    Raises the same errors as `open_core` and `open_admin`. Raises `StartupError` if the API keys or prompt files are invalid.
    """
    check_platform()
    async with open_core(app, settings, transport, scope) as core, AsyncExitStack() as stack:
        upstreams, state, _, runner, cache, files = core
        limits = RateLimits(state.usage if state is not None else None, settings.limits, upstreams.verify)
        if limits.are_set:
            await stack.enter_async_context(in_background(limits.renew_streams()))
        jobs = is_working = None
        if state is not None:
            workers = create_workers(core, settings, scope)
            jobs = JobService(state, core.sealer, settings.jobs, settings.redis, workers)
            await stack.enter_async_context(aclosing(jobs))
            is_working = jobs.is_working if workers else None
        probes = {one.name: partial(one.check_key, Caller(scope=scope)) for one in upstreams.all}
        measured = upstream_checks(probes)
        readiness = checks(measured, state, is_working, runner.drain, is_listening)
        reader = Reader(settings.limits, settings.auth, settings.server, [*settings.named_upstreams.values()])
        origins = Origins(settings.server.cors_origins)
        library, stores, retrieval = (files.library, files.stores, files.retrieval) if files is not None else (None,) * 3
        parts = runner, upstreams, state, jobs, cache, library, stores, retrieval
        context = EndpointContext(*parts, reader, origins, limits, settings)
        routes, keys = Routes(context), APIKeys.of(settings.auth)
        owners = {owner_of_key(name): name for name in keys.names} if keys is not None else {}
        on_behalf = OnBehalf(routes, settings.auth, keys, scope)
        seen = settings, owners, jobs, on_behalf, cache, retrieval
        shown = InspectorContext(state, *seen) if state is not None else None
        inspector = create_inspector(shown, settings.server, contained(readiness))
        await stack.enter_async_context(open_admin(settings.server, readiness, state, owners, inspector, measured))
        yield Application(_around(routes, keys, settings), runner.drain, jobs, upstreams, limits)


def create_workers(core: Core, settings: Settings, scope: MutableMapping[str, Any] | None = None) -> list[AnyWorker]:
    """Create the workers of this process. `core.state` must not be None.

    `scope` has the members of the host's scope for calls to an upstream in this process.
    """
    assert core.state is not None
    workers = list[AnyWorker]()
    if settings.jobs.concurrency:
        workers.append(create_worker(core, settings, scope))
    if settings.files.ingestion_concurrency and core.files is not None:
        concurrency, lease = settings.files.ingestion_concurrency, settings.jobs.lease
        workers.append(
            IngestionWorker(core.files.ingestion, core.files.indexing, core.state, concurrency=concurrency, lease=lease)
        )
    return workers


def create_worker(core: Core, settings: Settings, scope: MutableMapping[str, Any] | None = None) -> Worker:
    """Create a worker for background responses. `core.state` must not be None.

    `scope` has the members of the host's scope for calls to an upstream in this process.
    """
    assert core.state is not None
    drain_timeout = settings.server.drain_timeout
    worker = Worker(core.runner, core.state, core.sealer, settings.jobs, settings.redis, scope, drain_timeout=drain_timeout)
    core.state.replicas.describe(lambda: {"worker": worker.name, "running": worker.running, "room": settings.jobs.concurrency})
    return worker


def _around(routes: ASGIApp, keys: APIKeys | None, settings: Settings) -> ASGIApp:
    if keys is not None:
        routes = APIKeyMiddleware(routes, keys)
    if settings.server.cors_origins:
        origins = settings.server.cors_origins
        routes = CORSMiddleware(routes, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"])
    return TelemetryMiddleware(routes, options=HeaderOptions.of(settings))


class ResponsesMiddleware(Dispatcher):
    """ASGI middleware that serves `/v1/responses` and `/v1/conversations`. Requests for other paths are passed to `app`.

    The upstream is the server at `settings.upstream.url` or, without a URL, `app`. If `settings` is None, as under
    `vllm serve --middleware`, they are read with `Settings.from_environment`, which raises an error if they are invalid.
    `transport` replaces the default transport for requests to the upstream. It is closed at shutdown. `hosts` are the accepted
    host names, by default `server.allowed_hosts`.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        hosts: Hosts | None = None,
    ) -> None:
        self.settings = settings = settings or Settings.from_environment()
        opening = partial(open_application, app, settings, transport, is_listening=lambda: self.is_listening)
        hosts = hosts or Hosts(settings.server.allowed_hosts)
        paths = OurPaths(files=settings.serves_files)
        super().__init__(app, settings.server, opening, Redactor.of(settings), hosts, paths, HeaderOptions.of(settings))


def _with_bodies(proxy: ASGIApp, upstreams: OpenUpstreams, settings: Settings, *, has_keys: bool) -> ASGIApp:
    """Return `proxy` with `PassedBodies` around it, unless no request's body has to be read."""
    named = settings.named_upstreams.values()
    is_routed = len(named) > 1 or any(one.aliases for one in named)
    if not (has_keys or is_routed):
        return proxy
    refused = refused_fields(named) if has_keys else frozenset[str]()  # without keys, the callers' own credentials are sent
    groups = settings.limits, settings.auth
    return PassedBodies(proxy, upstreams, *groups, settings.server.base_path, refused=refused, is_routed=is_routed)


def create_app(settings: Settings | None = None, listens_on: str = "") -> ResponsesMiddleware:
    """Return the application of the standalone server: the middleware around a reverse proxy.

    `listens_on` is the address that the server listens on. It determines which host names are accepted (see `Hosts`).

    If `settings` is None, they are read with `Settings.from_environment`, which raises an error if they are invalid. Raises
    `ValueError` if `upstream.url` is not set, and `StartupError` if the API keys are invalid.
    """
    settings = settings or Settings.from_environment()
    if not any(one.url for one in settings.named_upstreams.values()):
        raise ValueError("no upstream is set: use --upstream or RESPONSES_MW_UPSTREAM_URL")
    for name, upstream in settings.named_upstreams.items():
        upstream_tls(upstream, name)  # raises `StartupError`
    keys = APIKeys.of(settings.auth)
    passable = PassablePaths(settings.auth.proxy_paths) if keys is not None else None
    paths = OurPaths(files=settings.serves_files)

    async def opened(scope: Scope) -> Upstreams:
        return (await app.opened(scope)).upstreams

    proxy: ASGIApp = ReverseProxy(opened, settings.server.base_path, passable=passable, paths=paths)
    proxy = _with_bodies(proxy, opened, settings, has_keys=keys is not None)
    proxy = Models(proxy, settings.server.base_path, opened)
    proxy = DescriptionMiddleware(proxy, settings.server, needs_key=keys is not None, files=settings.serves_files)
    if keys is not None:
        proxy = Metering(proxy, settings.auth, lambda: app.application.limits if app.application is not None else None)
        proxy = APIKeyMiddleware(proxy, keys)
    proxy = OriginMiddleware(proxy, Origins(settings.server.cors_origins))
    hosts = Hosts(settings.server.allowed_hosts, listens_on)
    app = ResponsesMiddleware(TelemetryMiddleware(proxy, "*", traced=False), settings, hosts=hosts)
    return app
