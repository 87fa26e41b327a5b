"""The server that is started when no Redis is configured. It ends with its process, and keeps its data if it has a directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from responses_mw.errors import StartupError
from responses_mw.state import Chain, Client, State, embedded
from tests.state.test_topologies import assert_works
from tests.support.stored import history, respond


async def process_of(client: Client) -> int:
    pid: int = (await client.redis.info("server"))["process_id"]
    return pid


def runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_an_embedded_server_supports_every_operation_and_ends_with_its_context() -> None:
    async with embedded() as client:
        await assert_works(State(client))
        health = await State(client).check()
        assert (health.policy, health.errors) == ("noeviction", ())
        process = await process_of(client)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


async def test_data_in_a_directory_is_available_after_a_restart(tmp_path: Path) -> None:
    async with embedded(tmp_path / "data") as client:
        response = await respond(State(client), Chain.new(), "one")
    async with embedded(tmp_path / "data") as client:
        assert await history(State(client), response) == ["one", "one!"]
        assert not any("appendonly" in warning for warning in (await State(client).check()).warnings)


async def test_data_in_a_directory_survives_sigkill_of_the_server(tmp_path: Path) -> None:
    async with embedded(tmp_path) as client:
        assert await client.redis.config_get("appendfsync") == {
            "appendfsync": "always"
        }  # otherwise, a slow disk loses the last writes
        response = await respond(State(client), Chain.new(), "one")
        os.kill(await process_of(client), signal.SIGKILL)
    async with embedded(tmp_path) as client:
        assert await history(State(client), response) == ["one", "one!"]


async def test_a_second_server_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    async with embedded(tmp_path):
        with pytest.raises(StartupError, match="in use"):
            async with embedded(tmp_path):
                pytest.fail("two servers would write one file")


async def test_the_startup_error_for_an_unreadable_directory_quotes_the_server(tmp_path: Path) -> None:
    broken = tmp_path / "appendonlydir"
    broken.mkdir()
    (broken / "appendonly.aof.manifest").write_text("this is no manifest\n")
    with pytest.raises(StartupError, match="manifest"):
        async with embedded(tmp_path):
            pytest.fail("it started with a broken file")


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_an_embedded_server_without_a_directory_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with embedded() as client:
        await respond(State(client), Chain.new(), "one")
    assert names(tmp_path) == []


HOST = """
import asyncio, sys
from responses_mw.state import embedded
async def main():
    async with embedded() as client:
        print((await client.redis.info("server"))["process_id"], flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_the_embedded_server_ends_when_its_process_is_killed(ending: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        server = int(host.stdout.readline())
        assert runs(server)
        os.kill(host.pid, ending)
        host.wait()
    deadline = time.monotonic() + 60
    while runs(server):
        assert time.monotonic() < deadline
        time.sleep(0.02)
