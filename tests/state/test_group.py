"""Workers of one server without a configured Redis: they share an embedded one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import redis

from benchmarks.processes import free_port
from tests.support.scripted import completion
from tests.support.servers import PATIENCE, wait_until_serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.scripted import ScriptedUpstream
    from tests.support.servers import Serve

    Launch = Callable[..., tuple[str, subprocess.Popen[bytes]]]

BODY = {"model": "tiny", "input": "Hi"}


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary directory with a short path, because the length of unix socket paths is limited."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)


@pytest.fixture
def launch(serve: Serve, upstream: ScriptedUpstream, temporary: Path) -> Iterator[Launch]:
    """Return a function that starts uvicorn with two workers in a separate process group."""
    with ExitStack() as stack:

        def launch(**variables: str) -> tuple[str, subprocess.Popen[bytes]]:
            port = free_port()
            variables = {**os.environ, "RESPONSES_MW_UPSTREAM_URL": serve(upstream), "TMPDIR": str(temporary), **variables}
            arguments = ["--workers", "2", "--factory", "responses_mw:create_app", "--port", str(port), "--log-level", "error"]
            process = subprocess.Popen([sys.executable, "-m", "uvicorn", *arguments], env=variables, process_group=0)
            stack.callback(process.wait)
            stack.callback(end, process)
            url = f"http://127.0.0.1:{port}"
            wait_until_serving(url, process)
            return url, process

        yield launch


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request on a new connection, which any worker may accept."""
    with httpx.Client(verify=False, trust_env=False, timeout=PATIENCE) as client:
        answer = client.request("GET" if body is None else "POST", f"{url}/v1{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_worker_can_read_the_responses_of_the_other(launch: Launch, upstream: ScriptedUpstream, temporary: Path) -> None:
    url, process = launch()
    for _ in range(12):
        upstream.whole(completion({"content": "Hello"}))
    responses = [ask(url, "/responses", BODY) for _ in range(6)]
    queued = [ask(url, "/responses", {**BODY, "background": True}) for _ in range(6)]
    for response in [*responses, *queued]:
        until(lambda: ask(url, f"/responses/{response['id']}")["status"] == "completed")  # noqa: B023 (it is called immediately)
    [folder] = temporary.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    process.terminate()
    process.wait(PATIENCE)
    until(lambda: not any(temporary.iterdir()))


def test_the_shared_redis_outlives_the_workers_and_ends_with_their_parent(
    launch: Launch, upstream: ScriptedUpstream, temporary: Path, tmp_path: Path
) -> None:
    url, process = launch(RESPONSES_MW_REDIS_DATA_DIR=str(tmp_path))
    upstream.whole(completion({"content": "Hello"}))
    response = ask(url, "/responses", BODY)
    workers = workers_of(process)
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    until(lambda: set(workers).isdisjoint(workers_of(process)))  # uvicorn replaces them
    assert ask(url, f"/responses/{response['id']}") == response
    end(process)
    until(lambda: not any(temporary.iterdir()))


@pytest.mark.parametrize("killed", [0, 1], ids=["redis", "keeper"])
def test_a_killed_redis_or_keeper_is_started_again(
    launch: Launch, upstream: ScriptedUpstream, temporary: Path, tmp_path: Path, killed: int
) -> None:
    url, _ = launch(RESPONSES_MW_REDIS_DATA_DIR=str(tmp_path))
    upstream.whole(completion({"content": "Hello"}))
    response = ask(url, "/responses", BODY)

    def is_stored() -> bool:
        with httpx.Client(verify=False, trust_env=False, timeout=PATIENCE) as client:
            return client.get(f"{url}/v1/responses/{response['id']}").status_code == 200

    processes = processes_of(temporary)
    os.kill(processes[killed], signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    until(is_stored)


def processes_of(temporary: Path) -> tuple[int, int]:
    """Return the ids of the shared Redis and of its keeper."""
    [folder] = temporary.iterdir()
    with redis.Redis(unix_socket_path=str(folder / "socket")) as client:
        pid = client.info("server")["process_id"]
    return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the ids of the worker processes, without the resource tracker of multiprocessing."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    "made",
    [
        pytest.param("folder.mkdir(); folder.chmod(0o755)", id="a directory that others can access"),
        pytest.param("folder.touch()", id="a file"),
        pytest.param("folder.symlink_to('nowhere')", id="a dangling link"),
    ],
)
def test_a_path_that_is_not_a_private_directory_of_this_user_is_refused(temporary: Path, made: str) -> None:
    script = _OPENED_BY_A_WORKER.replace("MADE", made)
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(temporary)})
    assert process.wait(PATIENCE) == 0


_OPENED_BY_A_WORKER = """
import asyncio, multiprocessing, os, tempfile
from pathlib import Path
from responses_mw.errors import StartupError
from responses_mw.state import open_embedded

async def refused():
    try:
        async with open_embedded():
            pass
    except StartupError as error:
        assert f"{folder} is not a directory that only this user can access" in str(error)
        os._exit(0)

def work():
    asyncio.run(refused())
    os._exit(1)

if __name__ == "__main__":
    folder = Path(tempfile.gettempdir()) / f"rmw-{os.getuid()}-{os.getpid()}"
    MADE
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    os._exit(process.exitcode)
"""
