"""The sandbox as a process, at the levels of isolation that this machine supports, and an MCP client of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from benchmarks.processes import free_port
from responses_mw.auth import CONTAINER_OWNER_HEADER
from tests.support.forkserver import ForkServer, Process
from tests.support.paths import ROOT

CONFINE = Path(__file__).with_name("confine.py")
SERVE = "from responses_mw.sandbox.app import SandboxSettings, serve; serve(SandboxSettings())"
SECRET = "a-secret-of-the-service"
STRONG = ("root", "user")
WEAK = ("weak", "weak-users", "restricted")


@dataclass
class Sandbox:
    """A running sandbox service, with helpers that call it."""

    level: str
    url: str
    process: Process

    @property
    def strong(self) -> bool:
        return self.level in STRONG

    @asynccontextmanager
    async def client(self, owner: str = "") -> AsyncIterator[Client]:
        """Open an MCP client for an owner. It does not load public certificates, which takes longer than a call."""
        timeout = httpx2.Timeout(60, read=300)
        async with (
            httpx2.AsyncClient(headers={CONTAINER_OWNER_HEADER: owner}, verify=False, trust_env=False, timeout=timeout) as http,
            Client(streamable_http_client(f"{self.url}/mcp", http_client=http)) as client,
        ):
            yield client

    async def run(self, code: str, container_id: str = "auto", owner: str = "") -> dict[str, Any]:
        """Run a cell, and return the structured result."""
        result = await self.call(code, container_id, owner)
        assert result.structured_content is not None, result.content
        structured: dict[str, Any] = result.structured_content
        return structured

    async def call(self, code: str, container_id: str = "auto", owner: str = "") -> Any:
        async with self.client(owner) as client:
            return await client.call_tool("python", {"code": code, "container_id": container_id})

    async def value(self, code: str, container_id: str = "auto") -> str | None:
        """Return the result of a cell, which must succeed."""
        outcome = await self.run(code, container_id)
        assert outcome["error"] is None
        assert outcome["ended"] is None
        result: str | None = outcome["result"]
        return result

    async def is_well(self) -> bool:
        """Return whether a new container works."""
        return await self.value("6 * 7") == "42"


def command(level: str) -> list[str]:
    if os.geteuid() != 0 or level == "root":
        return [sys.executable, "-c", SERVE]
    return [sys.executable, str(CONFINE), level, "/media/bin/python3", "-c", SERVE]


def environment(level: str, settings: dict[str, Any]) -> dict[str, str]:
    given = {f"RESPONSES_MW_SANDBOX_{name.upper()}": str(value) for name, value in settings.items()}
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    paths = {"PYTHONPATH": f"{ROOT}:{packages}", "LD_LIBRARY_PATH": "/media/lib", "PATH": os.environ["PATH"]}
    if level == "root":
        del paths["LD_LIBRARY_PATH"]
    return {**paths, **given, "A_SECRET": SECRET}


Launch = Callable[..., Sandbox]


def launcher(stack: ExitStack, fork_server: ForkServer | None = None) -> Launch:
    """Return a function that starts sandboxes. Unconfined ones are forked if a fork server is given."""

    def launch(level: str, **settings: Any) -> Sandbox:
        port = free_port()
        given = {"port": port, "allow_weak_isolation": level in WEAK, "call_timeout": 60, "memory_bytes": 256 << 20, **settings}
        process: Process
        if fork_server is not None and level == "root":
            process = fork_server.start("sandbox", env=environment(level, given))
        else:
            process = stack.enter_context(subprocess.Popen(command(level), env=environment(level, given), cwd="/"))
        stack.callback(stop, process)
        sandbox = Sandbox(level, f"http://127.0.0.1:{port}", process)
        wait_until_up(sandbox)
        return sandbox

    return launch


def stop(process: Process) -> None:
    """Stop the service, which ends its containers; some tests have already killed it."""
    process.terminate()
    try:
        process.wait(60)
    finally:
        process.kill()


def wait_until_up(sandbox: Sandbox) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert sandbox.process.poll() is None, "the sandbox did not start"
        try:
            httpx.get(f"{sandbox.url}/health", verify=False, trust_env=False)
        except httpx.ConnectError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError


def descendants_of(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    children = [child for child, parent in parents.items() if parent == pid]
    return children + [below for child in children for below in descendants_of(child)]


async def until_descendants(sandbox: Sandbox, minimum: int) -> list[int]:
    """Wait until the service has at least `minimum` processes, which it starts for containers."""
    with anyio.fail_after(60):
        while len(descendants := descendants_of(sandbox.process.pid)) < minimum:
            await anyio.sleep(0.05)
    return descendants


def time_of(pid: int) -> int:
    """Return the CPU time of the threads of a process in nanoseconds."""
    return sum(int(times.read_text().split()[0]) for times in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def levels() -> list[str]:
    """Return the levels of isolation to test: for an ordinary user, only the one that the kernel provides.

    By default, root tests the strongest level. `RESPONSES_MW_TEST_LEVELS=all` tests all, which takes three minutes.
    """
    if os.geteuid() != 0:
        return ["user"]
    return [*STRONG, *WEAK] if os.environ.get("RESPONSES_MW_TEST_LEVELS") == "all" else ["root"]
