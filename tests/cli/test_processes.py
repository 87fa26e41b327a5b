"""`responses-mw serve --processes`: several processes on one port."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.processes import free_port
from tests.support.scripted import Signal, completion, finish, text
from tests.support.servers import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Command, Launch
    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="needs SO_REUSEPORT")
BODY = {"model": "tiny", "input": "Hi"}


@pytest.fixture
def start(launch: Launch, serve: Serve, upstream: ScriptedUpstream) -> Callable[..., tuple[Command, str]]:
    def start(*flags: str) -> tuple[Command, str]:
        server = launch("serve", f"--upstream={serve(upstream)}", "--port=0", "--processes=2", *flags)
        url = server.wait_for(r"listens on (\S+)/v1\n  processes +2\n")[1]
        return server, url

    return start


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """Send a request on a new connection, which any process may accept."""
    with httpx.Client(verify=False, trust_env=False, timeout=PATIENCE) as client:
        return client.request("GET" if body is None else "POST", url + path, json=body)


def children(server: Command) -> set[int]:
    """Return the ids of the server processes, without the resource tracker of multiprocessing."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has exited
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server.process.pid and "spawn_main" in (process / "cmdline").read_text():
                found.add(int(process.name))
    return found


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def requests_counted(admin: str) -> float:
    pattern = r'^http_server_request_duration_seconds_count{.*http_route="/v1/responses".*} (\S+)$'
    return sum(float(count) for count in re.findall(pattern, ask(admin, "/metrics").text, re.MULTILINE))


def test_processes_share_the_port_the_store_and_the_metrics(
    start: Callable[..., tuple[Command, str]], upstream: ScriptedUpstream
) -> None:
    admin = f"http://127.0.0.1:{free_port()}"
    server, url = start(f"--server.admin-port={admin.rpartition(':')[2]}")
    assert len(children(server)) == 2
    for _ in range(16):
        upstream.whole(completion({"content": "Hello"}))
    made = [ask(url, "/v1/responses", BODY).json() for _ in range(16)]
    assert all(ask(url, f"/v1/responses/{one['id']}").json() == one for one in made)
    metrics = ask(admin, "/metrics").text
    assert requests_counted(admin) == 16
    assert "responses_mw_build_info{" in metrics
    memory = re.search(r"^process_resident_memory_bytes (\S+)$", metrics, re.MULTILINE)
    assert memory is not None
    assert float(memory[1]) > 100e6
    assert ask(admin, "/readyz").json()["ready"]
    assert server.end() == 0
    with pytest.raises(httpx.ConnectError):
        ask(url, "/v1/responses")


def test_a_killed_process_is_restarted_and_logged_and_counters_do_not_decrease(
    start: Callable[..., tuple[Command, str]], upstream: ScriptedUpstream
) -> None:
    admin = f"http://127.0.0.1:{free_port()}"
    server, url = start(f"--server.admin-port={admin.rpartition(':')[2]}")
    for _ in range(6):
        upstream.whole(completion({"content": "Hello"}))
        ask(url, "/v1/responses", BODY)
    before = children(server)
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    server.wait_for(rf"process {killed} exited \(SIGKILL\); restarting it")
    until(lambda: len(children(server)) == 2 and killed not in children(server))
    until(lambda: ask(admin, "/readyz").status_code == 200)
    assert requests_counted(admin) == 6
    assert server.end() == 0


def test_a_failure_to_restart_a_process_does_not_affect_the_others(start: Callable[..., tuple[Command, str]]) -> None:
    server, url = start()
    before = children(server)
    killed = min(before)
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    os.kill(killed, signal.SIGKILL)
    server.wait_for(r"cannot start a process \(Too many open files\)")
    assert ask(url, "/v1/responses").status_code == 405
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
    until(lambda: len(children(server)) == 2 and killed not in children(server))
    assert server.end() == 0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_drains_every_process_and_the_exit_status_is_0(
    start: Callable[..., tuple[Command, str]], upstream: ScriptedUpstream, number: int
) -> None:
    server, url = start("--server.drain-timeout=600")
    go = Signal()
    answers = [upstream.stream(text("Hel"), go, text("lo"), finish()) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, url, "/v1/responses", {**BODY, "stream": True}) for _ in answers]
        until(lambda: all(answer.asked.is_set() for answer in answers))
        server.process.send_signal(number)
        server.wait_for("stopping: waiting up to 600 s for")
        go.set()
        assert all('"lo"' in one.result().text and "response.completed" in one.result().text for one in asked)
    assert server.process.wait(PATIENCE) == 0


def test_processes_exit_if_their_parent_is_killed(start: Callable[..., tuple[Command, str]]) -> None:
    server, _ = start()
    processes = children(server)
    server.process.kill()
    server.process.wait(PATIENCE)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))


def test_a_startup_failure_is_reported_once(launch: Launch, redis_url: str) -> None:
    flags = [f"--redis={redis_url}", "--server.prompts-dir=/nowhere", "--port=0"]
    server = launch("serve", "--upstream=http://127.0.0.1:1", "--processes=3", *flags)
    assert server.process.wait(PATIENCE) == 3
    assert server.output.count("No such file or directory: /nowhere") == 1
    assert "Traceback" not in server.output


@pytest.mark.parametrize("flag", ["--port", "--server.admin-port"])
def test_a_port_of_another_server_is_not_shared(launch: Launch, flag: str) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = launch("serve", "--upstream=http://127.0.0.1:1", "--processes=2", "--port=0", f"{flag}={port}")
        assert server.process.wait(PATIENCE) == 3
    assert f"127.0.0.1:{port} cannot be opened: Address already in use" in server.output


def test_the_admin_port_cannot_be_the_port_of_the_server(launch: Launch) -> None:
    port = free_port()
    flags = [f"--port={port}", f"--server.admin-port={port}"]
    server = launch("serve", "--upstream=http://127.0.0.1:1", "--processes=2", *flags)
    assert server.process.wait(PATIENCE) == 3
    assert f"127.0.0.1:{port} cannot be opened: Address already in use" in server.output
