"""The first processes of a container: one that waits outside, an init inside, and the one that runs the code.

The init is the first process of the container's process namespace: it cannot be signalled from inside, and when it ends, the
kernel ends all others. For each byte on its standard input, it ends the processes that the last call left behind and writes the
line ``swept``. When its input closes, as it does if the service crashes, the init ends the container. If the container ends for
another reason, the init writes that reason: ``exit 3``, ``signal 9``, ``memory``, or ``processes`` (some could not be ended).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TypedDict

from . import isolation, notebook, seccomp

TICK = 0.1  # seconds between two checks of the memory
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CHANNEL = 3  # its descriptor in the process that runs the code
_MAX_DESCRIPTORS = 65_536
_SWEEPS, _SWEEP_PAUSE = 100, 0.01


class Plan(TypedDict):
    """The description of a container, sent by the service as JSON."""

    namespaces: bool
    user_namespace: bool
    landlock: bool
    uid: int | None  # the container's own user
    directory: str | None  # the working directory without namespaces
    packages: list[str]
    limits: isolation.ResourceLimits
    channel: int  # file descriptors
    stdout: int
    stderr: int
    output_bytes: int


def main(plan: Plan) -> NoReturn:
    """Start a container and wait until it has ended."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:  # noqa: PTH123
        score.write("1000")  # if the machine runs out of memory, the kernel kills containers first
    if plan["namespaces"]:
        isolation.enter_process_namespace(as_user=plan["user_namespace"])
    isolation.hide()
    init = _fork(lambda: _init(plan))
    os.close(plan["channel"])
    os.close(0)  # only the init reads it
    os.waitpid(init, 0)
    os._exit(0)


def _fork(child: Callable[[], None]) -> int:
    """Run ``child`` in a child process, which exits when it returns."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException:  # noqa: BLE001 (the outer edge of a process; the service reads this)
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def _init(plan: Plan) -> None:
    if plan["namespaces"]:
        isolation.enter_root(plan["uid"], plan["limits"]["disk_bytes"], plan["packages"])
    code = _fork(lambda: _run_code(plan))
    os.close(plan["channel"])
    try:
        _watch(code, plan["limits"]["memory_bytes"], namespaces=plan["namespaces"])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(code, signal.SIGKILL)


def _run_code(plan: Plan) -> None:
    for number, descriptor in enumerate((os.open("/dev/null", os.O_RDONLY), plan["stdout"], plan["stderr"])):
        os.dup2(descriptor, number)
    os.dup2(plan["channel"], _CHANNEL)
    os.closerange(_CHANNEL + 1, _MAX_DESCRIPTORS)
    os.setsid()
    os.nice(10)
    own_user = plan["uid"] is not None
    directory = plan["directory"] or isolation.WORKING_DIRECTORY
    os.chdir(directory)
    notebook.prepare(directory, plan["packages"])
    isolation.limit(plan["limits"], own_count=own_user or plan["namespaces"], own_user=own_user)
    isolation.drop_privileges(plan["uid"])
    if plan["landlock"]:
        isolation.restrict_files(directory, plan["packages"])
    seccomp.install(alone=not plan["namespaces"])
    notebook.serve(_CHANNEL, directory, plan["output_bytes"])


def _watch(code: int, memory_bytes: int, *, namespaces: bool) -> None:
    """Watch the container until it must end."""
    while True:
        ordered, _, _ = select.select([0], [], [], TICK)
        if ordered and not os.read(0, 1):
            return
        if ordered:
            swept = _sweep(code, namespaces=namespaces)
            os.write(1, b"swept\n" if swept else b"processes\n")
            if not swept:
                return
        ended = _reap(code)
        if ended is not None:
            os.write(1, ended.encode("ascii") + b"\n")
            return
        if sum(map(_resident, _processes(code, namespaces=namespaces))) > memory_bytes:
            os.write(1, b"memory\n")
            return


def _processes(code: int, *, namespaces: bool) -> list[int]:
    """Return the container's processes: only ``code`` if there is no namespace or no process file system."""
    if not namespaces:
        return [code]
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"] or [code]  # noqa: PTH208


def _resident(pid: int) -> int:
    """Return the resident memory in bytes, including shared pages; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:  # noqa: PTH123 (ten times a second)
            return int(statm.read().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _sweep(code: int, *, namespaces: bool) -> bool:
    """End every process except the one that runs the code. Return False if some remain."""
    if not namespaces:
        return True  # the code cannot start processes
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)  # all at once, so that none can fork in the meantime
    for _ in range(_SWEEPS):
        others = [pid for pid in _processes(code, namespaces=namespaces) if pid != code and _resident(pid)]
        if not others:
            break
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SWEEP_PAUSE)
        _reap_orphans(code)
    os.kill(code, signal.SIGCONT)
    return not others


def _reap(code: int) -> str | None:
    """Return how the process that runs the code ended, or None while it runs."""
    _reap_orphans(code)
    pid, status = os.waitpid(code, os.WNOHANG)
    if pid == 0:
        return None
    ended = os.waitstatus_to_exitcode(status)
    return f"signal {-ended}" if ended < 0 else f"exit {ended}"


def _reap_orphans(code: int) -> None:
    """Reap processes that outlived their parents. Until then, they count against the limit."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == code:
            return
        os.waitpid(ended.si_pid, 0)
