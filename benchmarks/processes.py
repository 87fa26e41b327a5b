"""Starting, awaiting, observing and surely ending the processes of a benchmark."""

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
# What of a process's clocks is asked for (include/linux/posix-timers.h): the time that its threads ran.
CPUCLOCK_SCHED = 2


_reservations: deque[socket.socket] = deque()


@atexit.register
def _release() -> None:
    """Close what is left: a socket that is collected open gives a warning."""
    while _reservations:
        _reservations.pop().close()


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers on 127.0.0.1."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its descendants have used so far, by the kernel's own accounting."""

    cpu_seconds: float
    rss_bytes: int


@contextlib.contextmanager
def running(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run `python -m module *arguments --port <a free one>` as a server until the block ends; `environment` adds to ours.

    The block begins when `GET /v1/models` answers 200. Raises `RuntimeError`, with what the process wrote, when that
    takes over `START_SECONDS` or the process exits.
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
    """Whether `GET /v1/models` answered 200 in time, and the process still lives."""
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
    """End the process by SIGTERM; what is left of its session after `STOP_SECONDS` by SIGKILL."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def usage(pid: int) -> Usage:
    """What the process `pid` and its living descendants use, and its dead and awaited ones did.

    CPU time is that of the processes' own clocks, to the nanosecond. `/proc/<pid>/stat` counts ticks of 10 ms: whom a tick
    finds at work gets all of it, and work that a timer begins is found too often, or never.
    """
    tree = descendants(pid)
    seconds = ticks = pages = 0.0
    for process, fields in tree.items():
        with contextlib.suppress(OSError):  # it ended just now
            seconds += time.clock_gettime(~process << 3 | CPUCLOCK_SCHED)
        ticks += sum(int(field) for field in fields[13:15])  # of awaited children
        pages += int(fields[21])
    return Usage(seconds + ticks / CLOCK_TICKS, int(pages) * resource.getpagesize())


def machine_cpu_seconds() -> float:
    """The CPU time that the whole machine has used so far; what a hypervisor took away counts as used."""
    user, nice, system, _idle, _iowait, *rest = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(map(int, (user, nice, system, *rest))) / CLOCK_TICKS


def descendants(pid: int) -> dict[int, Sequence[bytes]]:
    """The fields of `/proc/<pid>/stat` after the name, of the process and all that descend from it, by their pids."""
    processes: dict[int, Sequence[bytes]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            processes[int(path.parent.name)] = path.read_bytes().rpartition(b")")[2].split()
    tree = [pid]
    for parent in tree:
        tree += [child for child, fields in processes.items() if int(fields[1]) == parent]
    return {member: processes[member] for member in tree if member in processes}


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on, and that stays free until a process that is slow to start gets there.

    It is none that the system gives to connections. No other caller gets it, in whatever process: a UDP socket with the same
    number stays open.
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
    """Let this process and its children open as many files as the system allows: each stream takes a socket or two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
