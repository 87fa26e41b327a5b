"""The server that is started when no Redis is configured. It ends with its process, and keeps its data if it has a directory."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import redis.exceptions

from responses_mw.errors import StartupError
from responses_mw.state import Chain, Client, State, StateUnavailable, open_embedded
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
    async with open_embedded() as client:
        await assert_works(State(client))
        health = await State(client).check()
        assert (health.policy, health.errors) == ("noeviction", ())
        process = await process_of(client)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


async def test_data_in_a_directory_is_available_after_a_restart(tmp_path: Path) -> None:
    async with open_embedded(tmp_path / "data") as client:
        response = await respond(State(client), Chain.new(), "one")
    async with open_embedded(tmp_path / "data") as client:
        assert await history(State(client), response) == ["one", "one!"]
        assert not any("appendonly" in warning for warning in (await State(client).check()).warnings)


async def test_data_in_a_directory_survives_sigkill_of_the_server(tmp_path: Path) -> None:
    async with open_embedded(tmp_path) as client:
        assert await client.redis.config_get("appendfsync") == {
            "appendfsync": "always"
        }  # otherwise, a slow disk loses the last writes
        response = await respond(State(client), Chain.new(), "one")
        os.kill(await process_of(client), signal.SIGKILL)
    async with open_embedded(tmp_path) as client:
        assert await history(State(client), response) == ["one", "one!"]


async def test_a_second_server_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    async with open_embedded(tmp_path):
        with pytest.raises(StartupError, match="in use"):
            async with open_embedded(tmp_path):
                pytest.fail("two servers would write one file")


async def test_the_startup_error_for_an_unreadable_directory_quotes_the_server(tmp_path: Path) -> None:
    broken = tmp_path / "appendonlydir"
    broken.mkdir()
    (broken / "appendonly.aof.manifest").write_text("this is no manifest\n")
    with pytest.raises(StartupError, match="manifest"):
        async with open_embedded(tmp_path):
            pytest.fail("it started with a broken file")


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_an_embedded_server_without_a_directory_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with open_embedded() as client:
        await respond(State(client), Chain.new(), "one")
    assert names(tmp_path) == []


HOST = """
import asyncio, sys
from responses_mw.state import open_embedded
async def main():
    async with open_embedded() as client:
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


@pytest.mark.parametrize("keeps_data", [True, False])
async def test_a_killed_server_is_started_again_and_this_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keeps_data: bool
) -> None:
    async with open_embedded(tmp_path if keeps_data else None) as client:
        response = await respond(State(client), Chain.new(), "one")
        for _ in range(2):
            killed = await process_of(client)
            os.kill(killed, signal.SIGKILL)
            async with asyncio.timeout(60):
                while True:
                    with suppress(StateUnavailable, redis.exceptions.ConnectionError):
                        if await client.command("PING") and await process_of(client) != killed:
                            break
                    await asyncio.sleep(0.02)
        if keeps_data:
            assert await history(State(client), response) == ["one", "one!"]
    ends = [message for message in caplog.messages if "ended unexpectedly (SIGKILL); starting it again" in message]
    assert len(ends) == 2
    assert all(("all stored data is lost" in end) is not keeps_data for end in ends)


def modes(folder: Path) -> dict[Path, int]:
    return {path: stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}


@pytest.mark.parametrize("umask", [0o000, 0o777])
async def test_only_the_user_can_access_the_files_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    data, temporary = tmp_path / "data", tmp_path / "t"
    temporary.mkdir()
    (data / "appendonlydir").mkdir(parents=True)  # written by an older release
    (data / "appendonlydir").chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = os.umask(umask)
    try:
        async with open_embedded(data) as client, open_embedded(tmp_path / "new"):
            await respond(State(client), Chain.new(), "one")
            await client.command("PING")
            found = modes(tmp_path)
    finally:
        os.umask(before)
    own = {path: mode for path, mode in found.items() if path not in (data, temporary)}
    assert {path.name for path in own} >= {"new", "lock", "appendonlydir", "socket", "log", "appendonly.aof.manifest"}
    assert {mode & 0o077 for mode in own.values()} == {0}
    assert all(mode & 0o600 == 0o600 for mode in own.values())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
async def test_a_lock_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    os.chown(tmp_path / "lock", 12345, -1)
    with pytest.raises(StartupError, match="lock belongs to another user"):
        async with open_embedded(tmp_path):
            pytest.fail("the other user could hold the lock for ever")


async def test_a_lock_that_is_a_link_is_refused_and_its_target_unchanged(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch(0o644)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "lock").symlink_to(target)
    with pytest.raises(StartupError, match="cannot be used"):
        async with open_embedded(tmp_path / "data"):
            pytest.fail("it followed the link")
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


async def test_an_unusable_temporary_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(StartupError, match=r"needs a temporary directory .* \(see TMPDIR\).*: No such file or directory\.$"):
        async with open_embedded():
            pytest.fail("it started")


async def test_without_a_binary_of_valkey_the_store_is_fakeredis_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("responses_mw.state.embedded.binary.files", lambda _: ())
    async with open_embedded() as client:
        await client.command("SET", "key", "value")
        assert await client.command("GET", "key") == b"value"
    assert "the embedded store is fakeredis" in caplog.text
    with pytest.raises(StartupError, match="needs Valkey"):
        async with open_embedded(tmp_path):
            pass
