"""Codex CLI runs against responses-mw and a scripted model, and must complete every case.

npm installs the pinned Codex into a cache; `--codex PATH` is another one to run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from benchmarks.processes import await_ready, end, free_port
from tests.e2e.codex.cases import CASES, LITE, Case
from tests.e2e.codex.model import LONG, Model
from tests.e2e.codex.wire import Wire
from tests.support.paths import ROOT
from tests.support.search_servers import SEARXNG, SearchServer

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from tests.support.servers import Serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

CODEX = "0.171.0"
SECONDS = 90.0
LOOKS_EVERY = 0.05
RETRIES = {"connection breaks": 1, "server is killed": 20}
BREAKS_AT = b"response.output_text.delta"
MOST_SHOWN = 1500


@pytest.fixture(scope="module")
def codex(cache: Path, request: pytest.FixtureRequest) -> Path:
    """Return the path of Codex. Install the pinned version if it is missing."""
    if given := request.config.getoption("--codex"):
        return Path(given).absolute()
    folder = cache / f"codex-{CODEX}"
    path = folder / "node_modules" / ".bin" / "codex"
    if not path.exists():
        if not shutil.which("npm"):
            pytest.skip("there is no npm here")
        folder.mkdir(exist_ok=True)
        options = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder)]
        subprocess.run(["npm", "install", *options, f"@openai/codex@{CODEX}"], check=True, stdout=subprocess.DEVNULL)
    return path


class Ours:
    """Our server in front of `upstream`, always on the same `port`. It can be killed and started again."""

    def __init__(self, upstream: str, *options: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "responses_mw", "serve", f"--upstream={upstream}", f"--port={self.port}", *options]
        self._command = [*command, "--server.log-level=error"]
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdin=quiet, stdout=quiet, start_new_session=True)
        if not await_ready(self._process, self.port):
            end(self._process)
            raise RuntimeError("responses-mw did not start")

    def restart(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.start()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@dataclass
class Server:
    """Our server, and the relay between it and Codex."""

    ours: Ours
    wire: Wire


@pytest.fixture(scope="module")
def servers(serve_module: Serve, model: Model, portal: BlockingPortal) -> Iterator[dict[bool, Server]]:
    """Servers with and without a search provider."""
    search = serve_module(SearchServer(SEARXNG), lifespan="off")
    options = {False: (), True: ("--search.provider=searxng", f"--search.url={search}")}
    with ExitStack() as stack:
        servers = {}
        for searches, given in options.items():
            ours = stack.enter_context(Ours(serve_module(model), *given))
            wire = Wire(ours.port)
            stack.enter_context(portal.wrap_async_context_manager(wire.open()))
            servers[searches] = Server(ours, wire)
        yield servers


def config(case: Case, url: str) -> str:
    """Codex's config.toml: what it sends by default, web search too. The sandbox is off: the commands are those of the cases, in
    a directory of their own.
    """
    lines = [
        f'model = "{case.model}"',
        'model_provider = "ours"',
        'approval_policy = "never"',
        'sandbox_mode = "danger-full-access"',
        "check_for_update_on_startup = false",
        *([f"model_auto_compact_token_limit = {LONG // 2}"] if case.summed_up else []),
        "[analytics]",
        "enabled = false",
        "[features]",
        "plugins = false",  # it would fetch them
        "[model_providers.ours]",
        f'name = "{case.provider}"',
        f'base_url = "{url}/v1"',
        'wire_api = "responses"',
        'env_key = "OURS_KEY"',
        f"supports_websockets = {str(case.websocket).lower()}",
        "request_max_retries = 0",
        f"stream_max_retries = {RETRIES.get(case.trouble, 0)}",
    ]
    if case.mcp:
        lines += [
            "[mcp_servers.calculator]",
            f'command = "{sys.executable}"',
            f'args = ["{ROOT / "tests" / "e2e" / "codex" / "calculator.py"}"]',
            "required = true",  # else the first turn begins without it when it is slow to start
            "startup_timeout_sec = 60",
        ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_codex_completes_every_scripted_case(
    name: str, codex: Path, model: Model, servers: dict[bool, Server], cache: Path
) -> None:
    case = CASES[name]
    ours, wire = servers[case.searches].ours, servers[case.searches].wire
    model.begin(case.turns, forgotten=1 if case.summed_up else 0)
    wire.begin(BREAKS_AT if case.trouble else None, holds=case.trouble != "connection breaks")
    with tempfile.TemporaryDirectory(prefix="run-", dir=cache) as folder:  # Codex wants no home under /tmp
        home, work, last = (Path(folder) / name for name in ("home", "work", "last.txt"))
        home.mkdir()
        work.mkdir()
        (home / "config.toml").write_text(config(case, wire.url))
        environment = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
        environment |= {"HOME": str(home), "CODEX_HOME": str(home), "OURS_KEY": "key", "NO_COLOR": "1"}
        command = [str(codex), "exec", "-C", str(work)]
        options = ["--skip-git-repo-check", "--output-last-message", str(last)]
        status, wrote = finished([*command, *options, case.prompt], environment, trouble(case, wire, ours))
        if case.sequel:
            status, more = finished([*command, "resume", *options, "--last", case.sequel], environment)
            wrote += more
        print(wrote)
        said = last.read_text() if last.exists() else ""
        assert [*model.faults, *_faults(case, status, wrote, said, model, work), *_wire_faults(case, wire)] == []


Trouble = Callable[["subprocess.Popen[str]"], None]
"""Gets Codex's process, every now and then."""


def trouble(case: Case, wire: Wire, ours: Ours) -> Trouble:
    """Return what to kill after the relay has interrupted the answer."""

    is_due = bool(case.trouble)

    def look(codex: subprocess.Popen[str]) -> None:
        nonlocal is_due
        if not is_due or wire.breaks_at:
            return
        is_due = False
        if case.trouble == "Codex is killed":
            os.killpg(codex.pid, signal.SIGKILL)
        elif case.trouble == "server is killed":
            ours.restart()

    return look


def finished(command: list[str], environment: dict[str, str], look: Trouble = lambda _: None) -> tuple[int, str]:
    """The exit status and what was written to standard error; nothing of it lives on. Raises `subprocess.TimeoutExpired`."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + SECONDS
    try:
        while True:
            try:
                _, wrote = process.communicate(timeout=LOOKS_EVERY)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > until:
                    raise
                look(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # npm's launcher starts the real one
        process.wait()
    return process.returncode, wrote


def _wire_faults(case: Case, wire: Wire) -> Iterator[str]:
    if bool(wire.websockets) != case.websocket or bool(wire.posts) == case.websocket:
        yield f"Codex opened {wire.websockets} WebSockets, and posted {wire.posts} times"
    if not wire.search and case.model != LITE:
        yield "Codex did not ask for a web search"
    if case.trouble and wire.breaks_at:
        yield "there was no answer to cut"


def _faults(case: Case, status: int, wrote: str, said: str, model: Model, work: Path) -> Iterator[str]:
    missing = sorted(set(range(len(case.turns))) - model.played)
    if missing:
        yield f"turns of the script that did not come about: {missing}"
    if said.strip() != case.answer:
        yield f"Codex's last message should be {case.answer!r}, but is {said!r}"
    if case.summed_up and not any(case.summed_up in words for words in model.summed_up):
        yield f"the model was not asked for a summary in the words expected, but by {model.summed_up or 'none'}"
    if wrong := case.check(work):
        yield wrong
    errors = [line for line in wrote.splitlines() if "ERROR" in line]
    if status or (errors and not case.trouble):  # of a broken connection it tells
        yield f"Codex ended with status {status}: " + (errors[-1] if errors else wrote.strip()[-MOST_SHOWN:])
