"""An embedded Valkey that the processes of one server share: workers of uvicorn and gunicorn, API servers of vLLM.

The directory `rmw-<user id>-<parent's process id>` in the system's temporary directory contains

- `users`: each process holds a shared lock on it until it ends;
- `start`: locked by a process while it starts Valkey;
- `keeper`: locked while Valkey runs. `keeper.py` starts Valkey, waits until the parent has ended and `users` is no longer
  locked, stops Valkey and removes the directory. So Valkey outlives all workers, but not the server, however that ends;
- `secret`: a random secret for `Sealer`, because each process must be able to open what another sealed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import stat
import subprocess
import sys
import tempfile
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .connection import connect
from .errors import EmbeddedFailed, StateUnavailable
from .valkey import START_SECONDS, last_lines, locked, server_command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .client import Client

__all__ = ["shared"]

_KEEPER = Path(__file__).with_name("keeper.py")
_INTERVAL = 0.02


@asynccontextmanager
async def shared(group: int, data_dir: Path | None, redis_timeout: float) -> AsyncIterator[Client]:
    """Yield a client of the group's Valkey, which the first process of the group starts. Raises EmbeddedFailed."""
    with ExitStack() as stack:
        folder = await _join(group, stack)
        async with aclosing(connect(f"unix://{folder / 'socket'}", timeout=redis_timeout)) as client:
            with (folder / "start").open("w") as start:
                await _lock(start, fcntl.LOCK_EX)
                if not _is_running(folder):
                    await asyncio.to_thread(_start, group, folder, data_dir)
                await _ready(client, folder)
                client.shared_secret = _secret(folder)
            yield client


async def _join(group: int, stack: ExitStack) -> Path:
    """Create the group's directory and hold a shared lock on `users`. Retry if a keeper removes the directory meanwhile."""
    folder = Path(tempfile.gettempdir()) / f"rmw-{os.getuid()}-{group}"
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            _check_owner(folder)
            users = stack.enter_context((folder / "users").open("a"))
            await _lock(users, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(users.fileno()), (folder / "users").stat()):
                return folder
        except FileNotFoundError:
            await asyncio.sleep(_INTERVAL)


def _check_owner(folder: Path) -> None:
    """Raise EmbeddedFailed unless `folder` is a directory that only this user can access."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EmbeddedFailed(f"{folder} is not a directory that only this user can access: remove it, or set redis.url.")


async def _lock(file: IO[str], operation: int) -> None:
    while not _try_lock(file, operation):  # noqa: ASYNC110 (there is no event)
        await asyncio.sleep(_INTERVAL)


def _try_lock(file: IO[str], operation: int) -> bool:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_running(folder: Path) -> bool:
    with (folder / "keeper").open("w") as keeper:
        return not _try_lock(keeper, fcntl.LOCK_EX)


def _start(group: int, folder: Path, data_dir: Path | None) -> None:
    with locked(data_dir) as lock:
        command = [sys.executable, "-I", str(_KEEPER), str(group), str(folder), *server_command(folder, data_dir)]
        silent = subprocess.DEVNULL
        subprocess.run(command, stdin=silent, stdout=silent, stderr=silent, pass_fds=lock, check=True)  # noqa: S603 (our own script)


async def _ready(client: Client, folder: Path) -> None:
    """Wait until the server answers."""
    deadline = asyncio.get_running_loop().time() + START_SECONDS
    while True:
        try:
            await client.command("PING")
        except StateUnavailable as error:
            if not _is_running(folder) or asyncio.get_running_loop().time() > deadline:
                raise EmbeddedFailed(f"The embedded Valkey did not start:\n{last_lines(folder / 'log')}") from error
            await asyncio.sleep(_INTERVAL)
        else:
            return


def _secret(folder: Path) -> str:
    """Return the group's secret. The caller must hold the lock `start`."""
    path = folder / "secret"
    if not path.exists():
        path.write_text(secrets.token_hex(32))
    return path.read_text()
