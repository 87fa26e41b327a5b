"""The two servers that the tour visits: the demo upstream, in a thread, and ours, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import openai
import uvicorn

from .upstream import create_upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OurServer", "ServerFailed", "demo_upstream", "our_server"]

_USUAL_PORT = 8080
_START_SECONDS = 30.0
_END_SECONDS = 5.0


class ServerFailed(Exception):
    """A server did not start; the message says why."""


@dataclass(frozen=True, slots=True)
class OurServer:
    """``responses-mw serve``, and an ``openai`` client that talks to it."""

    url: str
    client: openai.OpenAI
    process: subprocess.Popen[bytes]


@contextmanager
def demo_upstream(pace: float) -> Iterator[str]:
    """The URL of the demo upstream, which serves on a free port until the block ends; a token takes ``pace`` seconds."""
    config = uvicorn.Config(create_upstream(pace), log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(_END_SECONDS)


@contextmanager
def our_server(upstream: str, host: str, port: int | None) -> Iterator[OurServer]:
    """``responses-mw serve`` at ``host`` and ``port`` (0: a free one; None: the usual one if it is free) until the block ends.

    Raises `ServerFailed` when it ends early or does not answer within 30 s.
    """
    port = _free_port(host, port)
    command = [sys.executable, "-m", "responses_mw", "serve", "--upstream", upstream]
    command += ["--host", host, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(  # noqa: S603 (our own command line)
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment()
        )
        try:
            url = f"http://{_reachable(host)}:{port}"
            with openai.DefaultHttpxClient(trust_env=False) as http:  # no proxy stands before this machine itself
                client = openai.OpenAI(base_url=f"{url}/v1", api_key="demo", max_retries=0, http_client=http)
                _wait_until_it_answers(client, process, output)
                yield OurServer(url, client, process)
        finally:
            _end(process)


def _free_port(host: str, port: int | None) -> int:
    """``port`` itself, or any free one for 0; raises `ServerFailed` where another program has it. Nobody minds for None."""
    if port is None:
        with suppress(ServerFailed):
            return _free_port(host, _USUAL_PORT)
        port = 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as listener:
            return int(listener.getsockname()[1])
    except OSError as taken:
        message = f"cannot serve at {host}, port {port}: {taken.strerror}; --port 0 takes any free port"
        raise ServerFailed(message) from taken


def _reachable(host: str) -> str:
    """The host as a client on this machine writes it."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (read, not bound to)
    return f"[{loopback}]" if ":" in loopback else loopback


def _environment() -> dict[str, str]:
    """Ours, without settings that are meant for a real deployment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RESPONSES_MW_")}
    return kept | {"NO_PROXY": "*", "no_proxy": "*"}


def _wait_until_it_answers(client: openai.OpenAI, process: subprocess.Popen[bytes], output: TextIO) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"responses-mw serve ended with status {process.returncode}:\n{_printed(output)}")
        try:
            client.models.list(timeout=2.0)
        except openai.APIError:
            time.sleep(0.1)
        else:
            return
    raise ServerFailed(f"responses-mw serve did not answer within {_START_SECONDS:.0f} s:\n{_printed(output)}")


def _printed(output: TextIO) -> str:
    output.seek(0)
    return output.read()[-4000:].strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    finally:
        process.kill()  # does nothing where it has ended
        process.wait()
