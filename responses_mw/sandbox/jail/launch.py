"""The processes of a container: one that waits outside it, its init process, and the process that runs the code.

The other processes in the container cannot send signals to the init process. When the init process exits, they are killed. The
service controls the init process through its standard input and output:

- Before a call, the service writes `RESUME`. The init process resumes the code.
- After a call, the service writes `SWEEP`. The init process freezes the code, kills the processes that the call left, and
  writes the line `swept`. If `/proc` cannot be mounted, it does not know these processes, and only freezes them. It repeats
  this until the next call, because the code may have set a timer that resumes it.
- When the input is closed, for example because the service crashed, the init process exits.
- If the init process exits for another reason, it first writes the reason, for example `its process was killed by SIGKILL`. The
  service includes this text in its reply.

The service and the process that runs the code exchange frames on the channel, a socket. A frame is a length (four bytes,
big-endian) followed by JSON. Requests are `{"nonce", "code"}`, and replies are `{"nonce", "result", "error", "files"}`. The
code can forge replies, but a forged reply can only misreport the code's own results.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import linecache
import os
import select
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NoReturn, TypedDict

from . import isolation, seccomp

RESUME, SWEEP = b"r", b"s"
_TICK, _IDLE_TICK = 0.1, 1.0  # seconds between two checks of the memory during a call, and between calls
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CHANNEL = 3  # file descriptor of the channel in the process that runs the code
_MAX_DESCRIPTORS = 65_536
_SWEEPS, _SWEEP_PAUSE = 100, 0.01

MAX_FILES = 100
_MAX_SCANNED = 20_000
_MAX_NAME = 1024
_LENGTH = 4


class Plan(TypedDict):
    """The configuration of a container, which the service passes as JSON."""

    namespaces: bool
    user_namespace: bool
    landlock: bool
    uid: int | None  # the container's own user
    directory: str | None  # the working directory without namespaces
    packages: list[str]
    limits: dict[str, int]  # by their names in `isolation.LIMITS`
    channel: int  # file descriptors
    stdout: int
    stderr: int
    output_bytes: int


def main(plan: Plan) -> NoReturn:
    """Start a container, wait until it has ended, and exit."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:  # noqa: PTH123
        score.write("1000")  # if the machine runs out of memory, the kernel kills containers first
    if plan["namespaces"]:
        isolation.enter_process_namespace(as_user=plan["user_namespace"])
    isolation.hide()
    init = _fork(lambda: _init(plan))
    os.close(plan["channel"])
    os.close(0)  # only the init process reads it
    os.waitpid(init, 0)
    os._exit(0)


def _fork(child: Callable[[], None]) -> int:
    """Run `child` in a child process, and return its process id."""
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
        reason = _watch(code, plan["limits"]["memory_bytes"], namespaces=plan["namespaces"])
        os.write(1, reason.encode("ascii"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(code, signal.SIGKILL)


def _run_code(plan: Plan) -> None:
    _replace_descriptors(plan)
    os.setsid()
    os.nice(10)
    own_user = plan["uid"] is not None
    directory = plan["directory"] or isolation.WORKING_DIRECTORY
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(HOME=directory, PATH="/usr/local/bin:/usr/bin:/bin", LANG="C.UTF-8", USER="sandbox")
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)] + plan["packages"]
    sys.argv[:] = [""]
    isolation.limit(plan["limits"], own_count=own_user or plan["namespaces"], own_user=own_user)
    isolation.drop_privileges(plan["uid"])
    if plan["landlock"]:
        isolation.restrict_files(directory, plan["packages"])
    seccomp.install(alone=not plan["namespaces"])
    _serve(_CHANNEL, directory, plan["output_bytes"])


def _replace_descriptors(plan: Plan) -> None:
    for number, descriptor in enumerate((os.open("/dev/null", os.O_RDONLY), plan["stdout"], plan["stderr"])):
        os.dup2(descriptor, number)
    os.dup2(plan["channel"], _CHANNEL)
    os.closerange(_CHANNEL + 1, _MAX_DESCRIPTORS)


def _watch(code: int, memory_bytes: int, *, namespaces: bool) -> str:
    """Answer the service, and monitor the process `code` and the memory. Return the reason why the container must end.

    The reason is empty if the service has closed the input.
    """
    tick = _TICK
    while True:
        order = os.read(0, 1) if select.select([0], [], [], tick)[0] else None
        if order == b"":
            return ""
        if reason := _fault(code, memory_bytes, namespaces=namespaces):
            return reason
        if order == RESUME:
            tick = _TICK
            with contextlib.suppress(PermissionError):  # without namespaces, where the code is not frozen
                os.kill(code, signal.SIGCONT)
        elif order == SWEEP or tick == _IDLE_TICK:
            tick = _IDLE_TICK
            if not _sweep(code, namespaces=namespaces):
                return "it started processes that could not be ended"
            if order == SWEEP:
                os.write(1, b"swept\n")


def _fault(code: int, memory_bytes: int, *, namespaces: bool) -> str | None:
    """Return the reason if the process `code` has ended or the container uses too much memory."""
    _reap_orphans(code)
    pid, status = os.waitpid(code, os.WNOHANG)
    if pid:
        return _explained(os.waitstatus_to_exitcode(status))
    if sum(map(_resident, _processes(code, namespaces=namespaces))) > memory_bytes:
        return f"it used more than {memory_bytes} bytes of memory"
    return None


def _explained(status: int) -> str:
    """Return a clause for the exit status of the process that runs the code. A negative status is the number of a signal."""
    if status >= 0:
        return f"its process ended with exit status {status}"
    names = {known.value: known.name for known in signal.Signals}
    return f"its process was killed by {names.get(-status, f'signal {-status}')}"


def _processes(code: int, *, namespaces: bool) -> list[int]:
    """Return the ids of all processes except the init process. Without namespaces or `/proc`, return only `code`."""
    if not namespaces:
        return [code]
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"] or [code]  # noqa: PTH208


def _resident(pid: int) -> int:
    """Return the resident memory of a process in bytes, including shared pages, or 0 if the process has ended.

    All threads of a process have the same memory, but a thread that has ended reports 0, even if it is the main thread.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 (ten times a second)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(filter(None, (_pages(f"/proc/{pid}/task/{thread}/statm") for thread in threads)), 0) * _PAGE


def _pages(path: str) -> int:
    try:
        with open(path, encoding="ascii") as statm:  # noqa: PTH123
            return int(statm.read().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _sweep(code: int, *, namespaces: bool) -> bool:
    """Freeze all processes, and kill those except `code` that are known. Return whether all of them have ended."""
    if not namespaces:
        return True  # the code cannot start processes
    for _ in range(_SWEEPS):
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)  # stop all processes, so that none can fork or wake another in the meantime
        others = [pid for pid in _processes(code, namespaces=namespaces) if pid != code and _resident(pid)]
        if not others:
            return True
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SWEEP_PAUSE)
        _reap_orphans(code)
    return False


def _reap_orphans(code: int) -> None:
    """Reap ended processes whose parents have ended. Until then, they count against the limit of processes."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == code:
            return
        os.waitpid(ended.si_pid, 0)


# -- the notebook --------------------------------------------------------------------------------------------------------


def _serve(channel: int, directory: str, output_bytes: int) -> None:
    os.set_inheritable(channel, False)
    process = os.getpid()
    notebook = _Notebook(output_bytes)
    with open(channel, "rb") as requests, open(channel, "wb", closefd=False) as replies:
        while size := int.from_bytes(requests.read(_LENGTH), "big"):
            request = json.loads(requests.read(size))
            before = dict(_files(directory))
            result, error = notebook.run(request["code"])
            if os.getpid() != process:  # a child forked by the code has reached the end of the cell
                os._exit(0)
            files = [(_clean(name), seen[0]) for name, seen in _files(directory) if before.get(name) != seen]
            reply = {"nonce": request["nonce"], "result": _clean(result), "error": _clean(error), "files": files[:MAX_FILES]}
            frame = json.dumps(reply).encode("ascii")
            replies.write(len(frame).to_bytes(_LENGTH, "big") + frame)
            replies.flush()
    os._exit(0)


def _clean(text: str | None) -> str | None:
    """Replace lone surrogates, which a reply must not contain, with `?`."""
    return text if text is None else text.encode("utf-8", "replace").decode()


class _Notebook:
    """Runs the cells of a container. All cells share their global variables."""

    def __init__(self, output_bytes: int) -> None:
        self._output_bytes = output_bytes
        self._cells = 0
        builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # normally set by the site module
        self._module = ModuleType("__main__")  # pickle looks here for the classes of cells
        self._module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self._module

    def run(self, code: str) -> tuple[str | None, str | None]:
        """Run a cell. Return the `repr` of its last expression and the traceback of its exception. Both may be None."""
        self._cells += 1
        name = f"<cell {self._cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        try:
            return self._evaluate(code, name), None
        except BaseException as error:  # noqa: BLE001 (including SystemExit and KeyboardInterrupt: the notebook continues)
            return None, self._explained(error)

    def _evaluate(self, code: str, name: str) -> str | None:
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        expression = None
        if isinstance(last, ast.Expr):
            tree.body.pop()
            expression = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
        exec(compile(tree, name, "exec", dont_inherit=True), self._module.__dict__)  # noqa: S102 (its purpose)
        if expression is None:
            return None
        value = eval(expression, self._module.__dict__)  # noqa: S307
        self._module.__dict__["_"] = value
        return None if value is None else repr(value)[: self._output_bytes]

    def _explained(self, error: BaseException) -> str:
        try:
            trace = error.__traceback__
            while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
                trace = trace.tb_next
            text = "".join(traceback.format_exception(type(error), error, trace))
        except BaseException:  # noqa: BLE001 (the methods of the code's exception run here)
            text = f"{type(error).__name__} (it cannot be shown)\n"
        text = text.replace(os.path.dirname(os.__file__), "<python>")  # noqa: PTH120 (hide the machine's paths)
        return text if len(text) <= self._output_bytes else "...\n" + text[-self._output_bytes :]


def _files(directory: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the relative path, size and modification time of each regular file below `directory`.

    Symbolic links are neither followed nor listed. The scan ends early if there are too many files or a path is too long.
    """
    scanned = 0
    folders = [directory]
    while folders:
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError):  # the code may have removed the directory or made it unreadable
            entries += os.scandir(folders.pop())
        for entry in entries:
            scanned += 1
            if scanned > _MAX_SCANNED or len(entry.path) > _MAX_NAME:
                return
            with contextlib.suppress(OSError):  # a thread of the code may have removed the file
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    folders.append(entry.path)
                elif stat.S_ISREG(found.st_mode):
                    yield os.path.relpath(entry.path, directory), (found.st_size, found.st_mtime_ns)
