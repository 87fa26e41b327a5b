"""Start, monitor and reliably end the processes of a benchmark."""

import atexit
import contextlib
import http.client
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 30.0
STOP_SECONDS = 5.0
RESERVATIONS = 100
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# The type of a process's clock (include/linux/posix-timers.h) that measures how long its threads have run.
CPUCLOCK_SCHED = 2


_reservations: deque[socket.socket] = deque()


@atexit.register
def _release() -> None:
    """Close the remaining sockets, because Python warns when an open socket is garbage-collected."""
    while _reservations:
        _reservations.pop().close()


@dataclass(frozen=True, slots=True)
class Server:
    """A server that listens on 127.0.0.1."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        """The base URL, without a path."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Usage:
    """The CPU time that a process and its descendants have used so far, and their resident memory."""

    cpu_seconds: float
    rss_bytes: int


@contextlib.contextmanager
def running(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run `python -m module *arguments --port <free port>` as a server until the context exits.

    `environment` is added to the current environment. Wait until `GET /v1/models` returns 200. Raises `RuntimeError` with the
    output of the process if that takes longer than `START_SECONDS` or if the process exits.
    """
    port = free_port()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, f"--port={port}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            if not await_ready(process, port):
                output.seek(0)
                raise RuntimeError(f"{module} did not start:\n{output.read().decode(errors='replace')[-4000:]}")
            yield Server(process.pid, port)
        finally:
            end(process)


def await_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until `GET /v1/models` returns 200. Return False if the process exits first, or after `START_SECONDS`."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/v1/models")
            if connection.getresponse().status == 200:
                return True
        time.sleep(0.05)
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the process, wait for it for up to `STOP_SECONDS`, then send SIGKILL to its whole session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def usage(pid: int) -> Usage:
    """Return the usage of the process `pid` and its descendants, including the CPU time of ended and awaited children.

    CPU times of running processes are read from their own clocks, in nanoseconds. `/proc/<pid>/stat` would be too coarse. It
    assigns each tick of 10 ms to the process that happens to run, so work started by a timer may be counted too often or not at
    all.
    """
    tree = descendants(pid)
    seconds = ticks = pages = 0.0
    for process, fields in tree.items():
        with contextlib.suppress(OSError):  # it has just ended
            seconds += time.clock_gettime(~process << 3 | CPUCLOCK_SCHED)
        ticks += sum(int(field) for field in fields[13:15])  # of awaited children
        pages += int(fields[21])
    return Usage(seconds + ticks / CLOCK_TICKS, int(pages) * resource.getpagesize())


def machine_cpu_seconds() -> float:
    """Return the CPU seconds that the whole machine has used so far, including time taken by a hypervisor."""
    user, nice, system, _idle, _iowait, *rest = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(map(int, (user, nice, system, *rest))) / CLOCK_TICKS


def descendants(pid: int) -> dict[int, Sequence[bytes]]:
    """Return the fields of `/proc/<pid>/stat` after the name, by pid, for the process and its descendants."""
    processes: dict[int, Sequence[bytes]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            processes[int(path.parent.name)] = path.read_bytes().rpartition(b")")[2].split()
    tree = [pid]
    for parent in tree:
        tree += [child for child, fields in processes.items() if int(fields[1]) == parent]
    return {member: processes[member] for member in tree if member in processes}


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that no process listens on, and that is not returned again while a process starts slowly.

    The port is outside the range that the system assigns to connections. A UDP socket with the same number stays open, so that
    no other caller gets the port, not even in another process.
    """
    while True:
        port = random.randrange(10_000, 30_000)
        reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
                reservation.bind(("127.0.0.1", port))
            except OSError:
                reservation.close()
                continue
        _reservations.append(reservation)
        if len(_reservations) > RESERVATIONS:
            _reservations.popleft().close()
        return port


def raise_open_files() -> None:
    """Raise the limit of open files for this process and its children to the maximum. Each stream needs one or two sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
