"""Well-known clients run against responses-mw and a scripted model, and must complete every case.

They are openai, the OpenAI Agents SDK, LangChain, Pydantic AI; and of npm openai and the AI SDK. Each case is run in several
ways: with all items sent again, with previous_response_id, and with store=False and encrypted reasoning; streamed and not. pip
and npm install the clients, at pinned versions, into a cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import openai
import pytest

from benchmarks.processes import end, free_port, running
from tests.e2e.clients.cases import KEY
from tests.e2e.clients.model import Model
from tests.support.mcp_servers import weather
from tests.support.paths import ROOT
from tests.support.search_servers import SEARXNG, SearchServer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import Serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PYTHON = (
    "langchain-openai==1.7.3",
    "openai==3.54.0",
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai]==2.68.0",
)
NPM = ("@ai-sdk/openai@4.0.118", "ai@7.0.173", "openai@7.55.0", "zod@4.6.7")
PROGRAMS = {
    "openai": ("openai_sdk", 16),
    "openai-agents": ("agents_sdk", 19),
    "langchain": ("langchain", 10),
    "pydantic-ai": ("pydantic_agents", 7),
}
"""Each client's program, and the number of its cases."""
JAVASCRIPT_CASES = 18
QUIET = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false", "PYTHONWARNINGS": "ignore"}
SECONDS = 300.0


def folder(cache: Path, kind: str, pins: tuple[str, ...]) -> Path:
    """Return the directory of clients of these versions."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(" ".join([python, *pins]).encode()).hexdigest()[:12]
    return cache / f"clients-{kind}-{digest}"


@pytest.fixture(scope="module")
def python(cache: Path) -> Path:
    """Return the Python interpreter of an environment that has the clients."""
    path = folder(cache, "python", PYTHON)
    python = path / "bin" / "python"
    if not (path / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(path)], check=True)
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([str(python), "-m", "pip", "install", *quiet, *PYTHON], check=True)
        (path / "ready").touch()
    return python


@pytest.fixture(scope="module")
def node_folder(cache: Path) -> Path:
    """Return a directory that has the packages in its `node_modules`."""
    if missing := [program for program in ("node", "npm") if not shutil.which(program)]:
        pytest.skip(f"there is no {' and no '.join(missing)} here")
    path = folder(cache, "node", NPM)
    if not (path / "ready").exists():
        path.mkdir(parents=True, exist_ok=True)
        options = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", "--prefix", str(path)]
        subprocess.run(["npm", "install", *options, *NPM], check=True, stdout=subprocess.DEVNULL)
        (path / "ready").touch()
    return path


@contextmanager
def sandbox() -> Iterator[str]:
    """The URL of the sandbox's service. It runs only code of the cases, so weak isolation is sufficient."""
    port, quiet = free_port(), subprocess.DEVNULL
    command = [sys.executable, "-m", "responses_mw", "sandbox", f"--port={port}", "--allow-weak-isolation"]
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not listens(port):
            assert process.poll() is None, "the sandbox did not start"
            assert time.monotonic() < until, "the sandbox did not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        end(process)


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def urls(serve_module: Serve, model: Model) -> Iterator[list[str]]:
    """Start our server and the services that it needs, and yield the URLs for the programs."""
    with ExitStack() as stack:
        settings = {
            "UPSTREAM_URL": serve_module(model),
            "TOOLS_ALLOW_PRIVATE_URLS": "true",  # the MCP server is on this machine
            "TOOLS_SANDBOX_URL": stack.enter_context(sandbox()),
            "SEARCH_PROVIDER": "searxng",
            "SEARCH_URL": serve_module(SearchServer(SEARXNG), lifespan="off"),
            "AUTH_SECRET_KEYS": os.urandom(32).hex(),
            "SERVER_LOG_LEVEL": "error",
        }
        environment = {f"RESPONSES_MW_{name}": value for name, value in settings.items()}
        ours = stack.enter_context(running("responses_mw", "serve", environment=environment))
        mcp = serve_module(weather().streamable_http_app())
        yield [f"{ours.url}/v1", f"{mcp}/mcp", f"{serve_module(weather().sse_app())}/sse", handbook(f"{ours.url}/v1")]


def handbook(url: str) -> str:
    """Create a vector store with one file, and return its id."""
    with openai.OpenAI(base_url=url, api_key=KEY) as client:
        store = client.vector_stores.create(name="handbook")
        file = ("handbook.md", b"# Leave\nEvery employee has 28 days of annual leave.")
        added = client.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=file)
        assert added.status == "completed", added.last_error
        return store.id


def check(command: list[str], cases: int, model: Model) -> None:
    """Run a client's program, which prints a line for each of its cases."""
    model.faults.clear()
    environment = {key: value for key, value in os.environ.items() if not key.upper().endswith("_PROXY")} | QUIET
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=SECONDS, stdout=-1, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert sum(line.startswith("ok ") for line in done.stdout.splitlines()) == cases
    assert model.faults == [], "the model was asked what a strict server refuses"


@pytest.mark.parametrize("client", PROGRAMS)
def test_python_clients_complete_every_case(client: str, urls: list[str], model: Model, python: Path) -> None:
    program, cases = PROGRAMS[client]
    check([str(python), "-m", f"tests.e2e.clients.{program}", *urls], cases, model)


def test_javascript_clients_complete_every_case(urls: list[str], model: Model, node_folder: Path) -> None:
    program = node_folder / "clients.mjs"  # packages are looked for beside it
    shutil.copyfile(ROOT / "tests" / "e2e" / "clients" / "javascript.mjs", program)
    check(["node", str(program), *urls], JAVASCRIPT_CASES, model)
