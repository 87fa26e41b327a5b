"""Real servers on free ports, the scripted upstream, and ours in front of it: as a proxy, or mounted round it."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import openai
import pytest
import uvicorn
from anyio.from_thread import start_blocking_portal

from responses_mw import ResponsesMiddleware, Settings, create_app
from scripted import ScriptedUpstream

if TYPE_CHECKING:
    from anyio.abc import TaskStatus
    from anyio.from_thread import BlockingPortal
    from starlette.types import ASGIApp

    Serve = Callable[..., str]
    Start = Callable[..., "Ours"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


# -- servers -------------------------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """uvicorn, told to stop by an event: its own loop looks at a flag ten times a second."""

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
        await server.serve(sockets=[listener])
        if not server.started:
            raise RuntimeError("the application did not start")


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """The event loop of all the servers, in a thread of its own."""
    with start_blocking_portal("asyncio", {"use_uvloop": sys.platform != "win32"}) as portal:
        yield portal


@pytest.fixture(scope="session")
def _ending() -> Iterator[list[Future[None]]]:
    """The servers that have been told to stop: it takes them 0.1 s, for which no test need wait."""
    ending: list[Future[None]] = []
    yield ending
    for server in ending:
        server.result(10)


@pytest.fixture
def serve(portal: BlockingPortal, _ending: list[Future[None]]) -> Iterator[Serve]:
    """Serves an ASGI application on a free port until the test ends, and gives its URL. Options are uvicorn's."""
    with ExitStack() as stack:

        def start(app: ASGIApp, **options: Any) -> str:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            defaults = {"log_config": None, "lifespan": "on", "ws": "none", "timeout_graceful_shutdown": 1}
            config = uvicorn.Config(app, **{**defaults, **options})
            future, stop = portal.start_task(_run, config, listener)
            _ending.append(future)
            stack.callback(portal.call, stop.set)
            return f"http://127.0.0.1:{port}"

        yield start


# -- ours ----------------------------------------------------------------------------------------------------------------


@dataclass
class Ours:
    """Our server at ``url``, and clients of it."""

    url: str

    @cached_property
    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, verify=False, trust_env=False, timeout=10)

    @cached_property
    def client(self) -> openai.AsyncOpenAI:
        """The official client; the key is ``key``."""
        http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, timeout=10, http_client=http)

    @cached_property
    def sync_client(self) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False, trust_env=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, timeout=10, http_client=http)

    async def aclose(self) -> None:
        made = vars(self)
        if "http" in made:
            await self.http.aclose()
        if "client" in made:
            await self.client.close()
        if "sync_client" in made:
            self.sync_client.close()


@pytest.fixture
def upstream() -> ScriptedUpstream:
    return ScriptedUpstream()


@pytest.fixture(params=["proxy", "mounted"])
def mount(request: pytest.FixtureRequest) -> str:
    """How ours reaches the upstream: over the network, or in its own process."""
    return str(request.param)


@pytest.fixture
async def clients() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def start_at(serve: Serve, upstream: ScriptedUpstream, clients: AsyncExitStack) -> Start:
    """Starts ours at a mount, with the settings that are given."""

    def start(mount: str, uvicorn: dict[str, Any] | None = None, **settings: Any) -> Ours:
        if mount == "proxy":
            app = create_app(Settings(upstream=settings.pop("upstream", None) or serve(upstream), **settings))
        else:
            app = ResponsesMiddleware(upstream, Settings(**settings))
        ours = Ours(serve(app, **(uvicorn or {})))
        clients.push_async_callback(ours.aclose)
        return ours

    return start


@pytest.fixture
def start(start_at: Start, mount: str) -> Start:
    """Starts ours at either mount, with the settings that are given."""
    return lambda **settings: start_at(mount, **settings)


@pytest.fixture
def ours(start: Start) -> Ours:
    """Ours with the settings that it has by itself, at either mount."""
    return start()
