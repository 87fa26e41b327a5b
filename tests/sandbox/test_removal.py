"""The directories of ended containers are removed whatever modes their files have, and a failure is reported and retried."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from responses_mw.sandbox import removal
from responses_mw.sandbox.removal import Removal

OTHER = 54_321
SCRIPT = """
import asyncio, os, sys
from responses_mw.sandbox.removal import Removal

async def main():
    removal = Removal()
    await removal.remove(sys.argv[1], int(sys.argv[2]) if sys.argv[2] else None)
    print(sorted(removal.left))

asyncio.run(main())
"""


def hostile(directory: Path, owner: int | None = None) -> Path:
    """Create nested directories of `owner` without any permissions."""
    inner = directory / "a" / "b" / "c"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    (directory / "a" / "link").symlink_to("/etc")
    for path in (inner / "file", inner, inner.parent, inner.parent.parent, directory):
        if owner is not None:
            os.chown(path, owner, owner)
        path.chmod(0)
    return directory


async def test_directories_without_any_permissions_are_removed(tmp_path: Path) -> None:
    directory = hostile(tmp_path / "container")
    await Removal().remove(str(directory), None)
    assert not directory.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to another user")
@pytest.mark.parametrize("owner", [None, OTHER], ids=["the user of the service", "the user of the container"])
def test_a_service_without_capabilities_over_files_removes_such_directories(owner: int | None) -> None:
    """`DAC_OVERRIDE` and `FOWNER` are dropped, as in a container with few capabilities."""
    directory = hostile(Path(tempfile.mkdtemp()), owner)  # as the service does, where other users may go
    drop = "-dac_override,-dac_read_search,-fowner"
    command = ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}", sys.executable, "-c", SCRIPT]
    run = subprocess.run([*command, str(directory), str(owner or "")], capture_output=True, text=True, check=False)
    assert run.stdout == "[]\n", run.stderr
    assert not directory.exists()


async def test_a_directory_that_cannot_be_removed_is_reported_once_and_removed_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "container"
    directory.mkdir()
    removals = Removal()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path / "bin"))  # neither chmod nor rm can remove anything
        (tmp_path / "bin").mkdir()
        for name in ("chmod", "rm"):
            (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
            (tmp_path / "bin" / name).chmod(0o755)
        await removals.remove(str(directory), None)
        await removals.retry()
    assert list(removals.left) == [str(directory)]
    assert [record.levelname for record in caplog.records if record.name == removal.logger.name] == ["ERROR"]
    removals.next_attempt = 0.0
    await removals.retry()
    assert not removals.left
    assert not directory.exists()
