"""Run a Valkey process until a server's main process and all its workers have ended.

This module is also run as a script, so it imports only the standard library. The script detaches itself from the worker that
started it, because that worker may end before the other workers.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
STOP_SECONDS = 10.0


class DieWithParent:
    """A `preexec_fn` for Linux: the kernel kills the child process when the thread that started it ends."""

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None).prctl
        self._parent = os.getpid()

    def __call__(self) -> None:
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._parent:  # the parent ended before that call
            os._exit(1)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Ended(Exception):
    """Valkey has ended without being stopped."""


def _raise_ended(*_: object) -> None:
    raise _Ended


def _wait_for_end(pid: int) -> None:
    """Wait until a process that is not a child of this one has ended."""
    with suppress(ProcessLookupError):
        if sys.platform == "linux":
            poll = select.poll()
            poll.register(os.pidfd_open(pid), select.POLLIN)
            poll.poll()
        else:
            while True:
                os.kill(pid, 0)
                time.sleep(1)


def main(server: int, folder: Path, command: list[str]) -> None:
    with (folder / "keeper").open("w") as running, (folder / "users").open() as users:
        fcntl.flock(running, fcntl.LOCK_EX)  # the forked process inherits the lock
        if os.fork():
            os._exit(0)
        os.setsid()
        # Valkey inherits the descriptor that holds the lock on redis.data_dir, if there is one.
        process = subprocess.Popen(  # noqa: S603 (the binary of our own dependency)
            command,
            close_fds=False,
            preexec_fn=DieWithParent() if sys.platform == "linux" else None,  # noqa: PLW1509 (there are no threads)
        )
        try:
            signal.signal(signal.SIGCHLD, _raise_ended)
            if process.poll() is not None:
                return
            _wait_for_end(server)
            fcntl.flock(users, fcntl.LOCK_EX)
        except _Ended:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stop(process)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
