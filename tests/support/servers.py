"""Servers for tests: any application under uvicorn, and `responses-mw` with clients or as a bare application."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import openai
import uvicorn

from responses_mw import ResponsesMiddleware, create_app
from responses_mw.asgi.proxy import ReverseProxy
from responses_mw.crypto import Sealer
from responses_mw.server.protocols import HTTPProtocol
from responses_mw.upstream import Upstream
from responses_mw.upstream.backends.chat import ChatBackend
from responses_mw.upstream.pool import Pool
from responses_mw.upstream.routing import Upstreams
from tests.support.configured import make_settings

if TYPE_CHECKING:
    from concurrent.futures import Future

    from anyio.abc import TaskStatus
    from anyio.from_thread import BlockingPortal
    from starlette.types import ASGIApp, Message, Scope

    from tests.support.forkserver import Process
    from tests.support.scripted import ScriptedUpstream

    Serve = Callable[..., str]
    Start = Callable[..., "Ours"]
    Several = Callable[..., "Ours"]


PATIENCE = 60.0
"""Seconds to wait for what must happen: more than a busy machine needs. Waits end as soon as it happens."""


class _Server(uvicorn.Server):
    """uvicorn, stopped by an event. Its own loop polls a flag ten times a second."""

    def __init__(self, config: uvicorn.Config, task_status: TaskStatus[anyio.Event]) -> None:
        super().__init__(config)
        self._stop = anyio.Event()
        self._task_status = task_status

    async def main_loop(self) -> None:
        await self.on_tick(0)
        self._task_status.started(self._stop)
        await self._stop.wait()


async def _run(config: uvicorn.Config, listener: socket.socket, *, task_status: TaskStatus[anyio.Event]) -> None:
    with listener:
        server = _Server(config, task_status)
        try:
            await server.serve(sockets=[listener])
        except SystemExit:  # uvicorn expects to own its process
            raise RuntimeError("the application did not start") from None


@contextmanager
def serving(portal: BlockingPortal, ending: list[Future[None]]) -> Iterator[Serve]:
    """Start servers in the portal's event loop, and ask them to stop at the end. Append their futures to `ending`."""
    with ExitStack() as stack:

        def start(app: ASGIApp, port: int = 0, **options: Any) -> str:
            listener = socket.create_server(("127.0.0.1", port))
            port = listener.getsockname()[1]
            defaults = {
                "http": HTTPProtocol,
                "log_config": None,
                "lifespan": "on",
                "ws": "none",
                "timeout_graceful_shutdown": 1,
            }
            config = uvicorn.Config(app, **{**defaults, **options})
            future, stop = portal.start_task(_run, config, listener)
            ending.append(future)
            stack.callback(portal.call, stop.set)
            return f"http://127.0.0.1:{port}"

        yield start


def proxy_to(transport: httpx.AsyncBaseTransport, url: str, base_path: str = "", **options: Any) -> ReverseProxy:
    """Return a reverse proxy in front of one server, with a transport that it does not close."""
    settings = make_settings(upstream__url=url).upstream
    upstream = Upstream(transport, Pool.of(url), settings)
    upstreams = Upstreams({upstream: ChatBackend(upstream, Sealer([]), settings, open_reasoning=False)})

    async def opened(_: Scope) -> Upstreams:
        return upstreams

    return ReverseProxy(opened, base_path, **options)


@dataclass
class Ours:
    """A `responses-mw` server at `url`, and clients of it."""

    url: str

    @cached_property
    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, verify=False, trust_env=False, timeout=PATIENCE)

    @cached_property
    def client(self) -> openai.AsyncOpenAI:
        """The official client; the key is `key`."""
        http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, timeout=PATIENCE, http_client=http)

    @cached_property
    def sync_client(self) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False, trust_env=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, timeout=PATIENCE, http_client=http)

    async def aclose(self) -> None:
        made = vars(self)
        if "http" in made:
            await self.http.aclose()
        if "client" in made:
            await self.client.close()
        if "sync_client" in made:
            self.sync_client.close()


class Apps:
    """The application in the event loop of the test, for behaviour that is visible only at the ASGI level."""

    def __init__(self, mount: str, serve: Serve, upstream: ScriptedUpstream, redis_url: str) -> None:
        self._mount = mount
        self._serve = serve
        self._upstream = upstream
        self._redis_url = redis_url

    @asynccontextmanager
    async def open(self, **settings: Any) -> AsyncIterator[ASGIApp]:
        settings = {"redis__url": self._redis_url, **settings}
        if self._mount == "proxy":
            app = create_app(make_settings(upstream__url=self._serve(self._upstream), **settings))
        else:
            app = ResponsesMiddleware(self._upstream, make_settings(**settings))
        async with lifespan(app):
            yield app


@asynccontextmanager
async def lifespan(app: ASGIApp) -> AsyncIterator[None]:
    """Start and stop an application as a server does."""
    stop, started = asyncio.Event(), asyncio.Event()
    messages = iter(["lifespan.startup", "lifespan.shutdown"])
    sent: list[Message] = []

    async def receive() -> Message:
        kind = next(messages)
        if kind == "lifespan.shutdown":
            await stop.wait()
        return {"type": kind}

    async def send(message: Message) -> None:
        sent.append(message)
        started.set()

    async def run() -> None:
        await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)

    task = asyncio.create_task(run())
    await asyncio.wait({task, asyncio.create_task(started.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert sent == [{"type": "lifespan.startup.complete"}]
    try:
        yield
    finally:
        stop.set()
        await task
        assert sent[-1] == {"type": "lifespan.shutdown.complete"}


def wait_until_serving(url: str, process: Process) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None
        try:
            httpx.get(f"{url}/v1/models", verify=False, trust_env=False, timeout=PATIENCE)
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return
