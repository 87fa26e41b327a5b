"""Run Valkey behind a unix socket, for one process (`running`) or for all workers of a server (`shared`).

The temporary directory `rmw-<user id>-<server's process id>` of a shared Valkey contains the socket, the log and these files:

- `users`: each worker holds a shared lock on this file until the worker ends.
- `start`: locked by a worker while it starts the keeper.
- `keeper`: locked by `keeper.py` while Valkey runs.
- `secret`: a random secret for `Sealer`, which all workers use.

If Valkey ends unexpectedly, it is started again. Only the user of this process can access its files, whatever the umask.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from ...backoff import Backoff
from ...errors import StartupError
from ...tasks import in_background
from ..client import Client
from ..errors import StateUnavailable
from .binary import find_valkey
from .keeper import DieWithParent, stop

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0  # Valkey first replays its append-only file
_INTERVAL = 0.02
_WATCH_INTERVAL = 0.5  # seconds between two checks whether Valkey is running
_LONGEST_PAUSE = 30.0  # maximum number of seconds between two failed attempts to start it again; the first pause is an interval
_UMASK = 0o077
_NO_TEMPORARY = "The embedded Valkey needs a temporary directory that can be written (see TMPDIR), or set redis.url"
_KEEPER = Path(__file__).with_name("keeper.py")
# With `appendfsync everysec`, a slow disk also delays writing, so a kill loses up to two seconds of acknowledged writes.
_SETTINGS = {"port": "0", "unixsocketperm": "700", "save": "", "appendfsync": "always", "maxmemory-policy": "noeviction"}


@asynccontextmanager
async def run_valkey(data_dir: Path | None, connect: Callable[[str], Client]) -> AsyncIterator[Client]:
    """Start a Valkey process and yield a client for it, which `connect` makes from a URL. Stop Valkey on exit.

    On Linux, Valkey is killed when the calling thread ends, even if this process is killed. Raises StartupError if Valkey
    does not start, or if `data_dir` cannot be used.
    """
    # The path of a unix socket is limited to 107 bytes, so the socket cannot be in an arbitrary data directory.
    with _temporary_directory() as name, _lock_directory(data_dir) as lock:
        folder = Path(name)
        process = _start(folder, data_dir, lock)

        def is_running() -> bool:
            return process.poll() is None

        async def restart() -> None:
            nonlocal process
            _report_end(data_dir, process.returncode)
            process = _start(folder, data_dir, lock)
            await _ready(client, folder, is_running)

        try:
            async with aclosing(connect(f"unix://{name}/socket")) as client:
                await _ready(client, folder, is_running)
                async with in_background(_keep_running(is_running, restart)):
                    yield client
        finally:
            await asyncio.to_thread(stop, process)


@asynccontextmanager
async def share_valkey(group: int, data_dir: Path | None, connect: Callable[[str], Client]) -> AsyncIterator[Client]:
    """Yield a client for the Valkey that the workers of one server share. Start Valkey if it is not running.

    `connect` makes the client from a URL. `group` is the server's process id.

    Raises StartupError if Valkey does not start, or if a directory cannot be used.
    """
    with ExitStack() as stack:
        folder = await _join(group, stack)
        async with aclosing(connect(f"unix://{folder / 'socket'}")) as client:

            async def start(report: Callable[[], None]) -> None:
                with _open_private(folder / "start") as lock:
                    await _lock(lock, fcntl.LOCK_EX)
                    if not _is_kept(folder):
                        report()
                        await asyncio.to_thread(_start_keeper, group, folder, data_dir)
                    await _ready(client, folder, lambda: _is_kept(folder))
                    client.shared_secret = _secret(folder)

            await start(lambda: None)
            restart = partial(start, partial(_report_end, data_dir))
            async with in_background(_keep_running(lambda: _is_kept(folder), restart)):
                yield client


async def _keep_running(is_running: Callable[[], bool], restart: Callable[[], Awaitable[None]]) -> None:
    """Call `restart` whenever Valkey is not running. Log failures and retry."""
    backoff = Backoff(2 * _WATCH_INTERVAL, _LONGEST_PAUSE)
    pause = _WATCH_INTERVAL
    while True:
        await asyncio.sleep(pause)
        try:
            if not is_running():
                await restart()
            backoff.reset()
            pause = _WATCH_INTERVAL
        except (StartupError, OSError, subprocess.SubprocessError) as error:
            pause = backoff.next()
            logger.warning("cannot start the embedded Valkey; retrying in %g s: %s", pause, error)


def _report_end(data_dir: Path | None, status: int | None = None) -> None:
    """Log that Valkey has ended. `status` is its exit status, or None if it is unknown."""
    cause = "" if status is None else f" ({signal.Signals(-status).name if status < 0 else f'status {status}'})"
    data = "all stored data is lost" if data_dir is None else f"it reads its data from {data_dir}"
    logger.error("the embedded Valkey ended unexpectedly%s; starting it again: %s", cause, data)


def _start(folder: Path, data_dir: Path | None, lock: tuple[int, ...]) -> subprocess.Popen[bytes]:
    folder.chmod(0o700)  # the umask may have withdrawn the user's own permissions
    # The package's own ValkeyServer runs the same binary, but leaves an orphaned server when this process is killed.
    return subprocess.Popen(  # noqa: S603 (the binary of our own dependency)
        _server_command(folder, data_dir),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=lock,
        umask=_UMASK,
        process_group=0,  # Ctrl-C must not reach Valkey, because we stop it ourselves
        preexec_fn=DieWithParent() if sys.platform == "linux" else None,  # noqa: PLW1509 (calls nothing that locks)
    )


def _server_command(folder: Path, data_dir: Path | None) -> list[str]:
    binary = find_valkey()
    assert binary is not None, "otherwise, fakeredis is the embedded server"
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
def _lock_directory(data_dir: Path | None) -> Iterator[tuple[int, ...]]:
    """Lock the directory, and yield the descriptors that Valkey must inherit. The lock lasts until Valkey has ended.

    If `data_dir` is None, nothing is locked. Raises StartupError if the directory is in use or cannot be used.
    """
    if data_dir is None:
        yield ()
        return
    try:
        _make_private(data_dir)
        lock = _open_private(data_dir / "lock")
    except OSError as error:
        raise StartupError(f"redis.data_dir {data_dir} cannot be used: {error.strerror}.") from None
    with lock:
        if not _try_lock(lock, fcntl.LOCK_EX):
            raise StartupError(f"{data_dir} is in use by another server; several servers need a shared Redis.")
        yield (lock.fileno(),)


@contextmanager
def _temporary_directory() -> Iterator[str]:
    try:
        directory = tempfile.TemporaryDirectory(prefix="rmw-")
    except OSError as error:
        raise StartupError(f"{_NO_TEMPORARY}: {error.strerror}.") from None
    with directory as name:
        yield name


async def _join(group: int, stack: ExitStack) -> Path:
    """Create the group's directory if necessary, lock its file `users` until `stack` is closed, and return the directory."""
    while True:
        try:
            folder = Path(tempfile.gettempdir()) / f"rmw-{os.getuid()}-{group}"
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        except OSError as error:
            raise StartupError(f"{_NO_TEMPORARY}: {error.strerror}.") from None
        try:
            _check_owner(folder)
            folder.chmod(0o700)
            users = stack.enter_context(_open_private(folder / "users"))
            await _lock(users, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(users.fileno()), (folder / "users").stat()):
                return folder
        except FileNotFoundError:  # a keeper has just removed the directory
            await asyncio.sleep(_INTERVAL)


def _check_owner(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StartupError(f"{folder} is not a directory that only this user can access: remove it, or set redis.url.")


def _make_private(data_dir: Path) -> None:
    """Create the directory, or only withdraw the permissions of others for what Valkey has written there."""
    if not data_dir.exists():
        data_dir.mkdir(parents=True)
        data_dir.chmod(0o700)
    folder = data_dir / "appendonlydir"
    for path in (folder, *folder.glob("*")):
        if path.exists() and path.lstat().st_uid == os.geteuid():
            path.chmod(0o700 if path.is_dir() else 0o600)


def _open_private(path: Path) -> IO[str]:
    """Open a file for writing that only this user can access. Raises OSError if it is a link or belongs to another user."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
    if os.fstat(file.fileno()).st_uid != os.geteuid():
        file.close()
        raise PermissionError(errno.EPERM, f"{path.name} belongs to another user")
    os.fchmod(file.fileno(), 0o600)
    return file


def _secret(folder: Path) -> str:
    """Return the secret of the group. If there is none, create it."""
    with _open_private(folder / "secret") as file:
        secret = file.read()
        if not secret:
            secret = secrets.token_hex(32)
            file.write(secret)
    return secret


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
    with _open_private(folder / "keeper") as keeper:
        return not _try_lock(keeper, fcntl.LOCK_EX)


def _start_keeper(group: int, folder: Path, data_dir: Path | None) -> None:
    with _lock_directory(data_dir) as lock:
        command = [sys.executable, "-I", str(_KEEPER), str(group), str(folder), *_server_command(folder, data_dir)]
        silent = subprocess.DEVNULL
        options: dict[str, Any] = {"stdin": silent, "stdout": silent, "stderr": silent, "pass_fds": lock, "umask": _UMASK}
        subprocess.run(command, check=True, **options)  # noqa: S603 (our own script)
