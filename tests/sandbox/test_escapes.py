"""Hostile code in the real service: every attack fails, and the service and new containers keep working."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from tests.support.sandbox import SECRET, Launch, Sandbox, levels, until_descendants

BEST = levels()[0]

# Runs functions one by one, and returns for each its result or the name of its exception.
ATTEMPT = """
def attempt(*attempts):
    got = []
    for one in attempts:
        try:
            got.append(one())
        except Exception as error:
            got.append(type(error).__name__)
    return got
"""


@pytest.fixture(autouse=True)
async def _the_service_survives(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    yield
    for name in ("sandbox", "best", "restricted"):
        if name in request.fixturenames:
            survivor = request.getfixturevalue(name)
            assert survivor.process.poll() is None
            assert await survivor.is_well()


# -- network -------------------------------------------------------------------------------------------------------------


async def test_there_is_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        code = f"""
import socket, urllib.request, asyncio
{ATTEMPT}
attempt(
    lambda: socket.create_connection(("127.0.0.1", {port}), 1),
    lambda: socket.create_connection(("8.8.8.8", 53), 1),
    lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW),
    lambda: socket.socket(socket.AF_NETLINK),
    lambda: socket.socket(socket.AF_UNIX),
    lambda: socket.create_server(("127.0.0.1", 0)),
    lambda: socket.gethostbyname("example.com"),
    lambda: urllib.request.urlopen("http://127.0.0.1:{port}", timeout=1),
)
"""
        refusals = ["PermissionError"] * 7 + ["gaierror", "URLError"]
        assert await sandbox.value(code) == repr(refusals)
        with pytest.raises(TimeoutError):
            listener.accept()


async def test_a_bare_system_call_cannot_create_a_socket(best: Sandbox) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 41, "aarch64": 198}[os.uname().machine]
[(libc.syscall(one, 2, 1, 0), ctypes.get_errno()) for one in (number, number | 0x40000000)]
"""
    assert await best.value(code) == "[(-1, 1), (-1, 1)]"


async def test_a_socket_of_a_pair_reaches_no_socket_of_the_machine(sandbox: Sandbox) -> None:
    name = f"\0{SECRET}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name)
        listener.settimeout(0.2)
        code = f"""
import socket
{ATTEMPT}
name = {name!r}
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
one.send(b"still works")
got = attempt(
    lambda: one.sendto(b"hello", name),
    lambda: one.sendmsg([b"hello"], [], 0, name),
    lambda: (one.connect(name), one.send(b"hello")),
)
other.recv(20), all(one in ("PermissionError", "ConnectionRefusedError") for one in got)
"""
        assert await sandbox.value(code) == "(b'still works', True)"
        with pytest.raises(TimeoutError):
            listener.recv(20)


# -- other processes -----------------------------------------------------------------------------------------------------


async def test_other_processes_can_be_neither_seen_nor_signalled_nor_limited(sandbox: Sandbox) -> None:
    pid = sandbox.process.pid
    code = f"""
import os, signal, resource
{ATTEMPT}
attempt(
    lambda: os.kill({pid}, signal.SIGKILL),
    lambda: os.killpg({pid}, signal.SIGKILL),
    lambda: os.listdir("/proc/{pid}"),
    lambda: open("/proc/{pid}/environ").read(),
    lambda: open("/proc/{pid}/mem", "rb").read(1),
    lambda: resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1)),
)
"""
    refused = await sandbox.value(code)
    assert refused is not None
    allowed = {"PermissionError", "ProcessLookupError", "FileNotFoundError"}
    assert set(eval(refused)) <= allowed  # a list of names of exceptions


async def test_killing_all_processes_does_not_affect_other_containers(sandbox: Sandbox) -> None:
    other = (await sandbox.run("x = 1"))["container_id"]
    code = "import os, signal\ntry: os.kill(-1, signal.SIGKILL); os.kill(1, signal.SIGKILL)\nexcept OSError: pass"
    await sandbox.run(code)
    assert await sandbox.value("x", other) == "1"


async def test_processes_left_by_a_call_are_killed_when_it_ends(best: Sandbox) -> None:
    code = "import subprocess\nchild = subprocess.Popen(['sleep', '1000'], start_new_session=True)\nchild.poll()"
    outcome = await best.run(code)
    assert (outcome["result"], outcome["ended"]) == (None, None)
    assert await best.value("child.poll()", outcome["container_id"]) == "-9"


async def test_a_forked_child_at_the_end_of_a_cell_reports_no_result(best: Sandbox) -> None:
    outcome = await best.run("import os\npid = os.fork()\nif pid == 0: x = 'child'\nelse: x = 'parent'; os.wait()\nx")
    assert outcome["result"] == "'parent'"
    assert await best.value("x", outcome["container_id"]) == "'parent'"


async def test_containers_exit_if_the_service_is_killed(launch: Launch) -> None:
    sandbox = launch(BEST, call_timeout=50)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_ignoring_errors, sandbox, "while True: pass")
        descendants = await until_descendants(sandbox, 3)
        sandbox.process.kill()
        sandbox.process.wait()
        deadline = time.monotonic() + 60
        while any(map(_is_alive, descendants)):
            assert time.monotonic() < deadline
            await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()


async def _ignoring_errors(sandbox: Sandbox, code: str) -> None:
    with pytest.raises(BaseException):  # noqa: B017, PT011 (the service is killed meanwhile)
        await sandbox.run(code)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- files ---------------------------------------------------------------------------------------------------------------


async def test_files_outside_can_neither_be_read_nor_written(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    for path in (secret, tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o777)  # so that file permissions do not protect it
    code = f"""
import os
{ATTEMPT}
attempt(
    lambda: open({str(secret)!r}).read(),
    lambda: open({str(secret)!r}, "w"),
    lambda: open("/etc/shadow").read(),
    lambda: open("/etc/passwd").read(),
    lambda: os.listdir("/root/.ssh"),
    lambda: os.listdir("/home"),
    lambda: os.listdir("/var"),
    lambda: open("/usr/lib/x", "w"),
    lambda: open("/etc/x", "w"),
    lambda: open(os.__file__, "a"),
    lambda: os.symlink("/", {str(tmp_path / "link")!r}),
    lambda: os.remove({str(secret)!r}),
    lambda: os.chroot("/tmp"),
    lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)),
)
"""
    refused = await sandbox.value(code)
    assert refused is not None
    assert set(eval(refused)) <= {"PermissionError", "FileNotFoundError", "OSError"}  # OSError: read-only file system
    assert secret.read_text() == SECRET


async def test_the_environment_of_the_service_is_not_visible(sandbox: Sandbox) -> None:
    code = """
import os
seen = list(os.environ.values())
for name in os.listdir("/proc") if os.access("/proc", os.R_OK) else []:
    for file in ("environ", "cmdline"):
        try:
            seen.append(open(f"/proc/{name}/{file}").read())
        except OSError:
            pass
"""
    outcome = await sandbox.run(f"{code}\n{SECRET!r} in str(seen)")
    assert outcome["result"] in ("False", None)
    assert SECRET not in str(outcome["stdout"])


async def test_the_files_of_another_container_are_not_accessible(sandbox: Sandbox) -> None:
    outcome = await sandbox.run("import os\nopen('mine', 'w').write('x')\nos.path.abspath('mine'), os.getcwd()")
    path, directory = eval(outcome["result"])
    code = f"import os\n{ATTEMPT}\nattempt(lambda: open({path!r}).read(), lambda: 'mine' in os.listdir({directory!r}))"
    seen = await sandbox.value(code)
    assert seen in ("['FileNotFoundError', False]", "['PermissionError', 'PermissionError']")


async def test_links_and_pipes_are_neither_followed_nor_listed(sandbox: Sandbox) -> None:
    code = """
import os
os.symlink("/etc/passwd", "passwd"); os.symlink("/", "everything"); os.symlink(".", "loop"); os.mkfifo("pipe")
written = open("a", "w").write("a")
"""
    outcome = await sandbox.run(code)
    assert outcome["error"] is None
    assert outcome["files"] == [{"name": "a", "size": 1}]


async def test_at_most_100_files_are_listed_with_many_files_deep_folders_and_invalid_names(best: Sandbox) -> None:
    code = """
import os
for n in range(3000): open(f"f{n}", "w").close()
open(b"\\xff\\xfe\\n", "w").close()
for _ in range(400): os.mkdir("d" * 20); os.chdir("d" * 20)
"""
    outcome = await best.run(code)
    assert outcome["ended"] is None
    assert 0 < len(outcome["files"]) <= 100


SCRIBBLE = "file = open('f', 'wb', 0)\nwhile True: file.write(bytes(2 ** 20))"


async def test_the_file_space_of_a_container_is_limited(best: Sandbox) -> None:
    code = """
for n in range(1000):
    with open(f"f{n}", "wb") as file: file.write(bytes(2 ** 20))
"""
    assert "No space left on device" in (await best.run(code))["error"]
    assert "File too large" in (await best.run(SCRIBBLE))["error"]


FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
DEAF = """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
"""
PRINT_FOREVER = "while True: print('x' * 1000)"
DEEP_IN_C = "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): return [*map(f, [x])]\nf(1)"


# -- resource limits -----------------------------------------------------------------------------------------------------


async def test_a_fork_bomb_ends(sandbox: Sandbox) -> None:
    outcome = await sandbox.run(FORK_BOMB)
    assert outcome["ended"]


async def test_a_fork_bomb_that_outlives_its_cell_is_killed(best: Sandbox) -> None:
    code = """
import os
if os.fork() == 0:
    while True:
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
"""
    outcome = await best.run(code)
    if outcome["ended"] is None:
        living = "[pid for pid in os.listdir('/proc') if pid.isdigit() and open(f'/proc/{pid}/statm').read()[0] != '0']"
        assert await best.value(living, outcome["container_id"]) == "['1', '2']"


async def test_a_thread_bomb_is_stopped(sandbox: Sandbox) -> None:
    code = """
import threading, time
threading.stack_size(32768)
while True:
    threading.Thread(target=time.sleep, args=(1000,)).start()
"""
    outcome = await sandbox.run(code)
    assert outcome["ended"] or "can't start new thread" in outcome["error"]


async def test_exceeding_the_memory_limit_is_a_memory_error_or_ends_the_container(sandbox: Sandbox) -> None:
    outcome = await sandbox.run("kept = bytearray(2 ** 40)")
    assert outcome["error"].endswith("MemoryError\n")
    outcome = await sandbox.run("kept = []\nwhile True: kept.append(bytearray(2 ** 20))", outcome["container_id"])
    assert outcome["ended"] or outcome["error"].endswith("MemoryError\n")


async def test_memory_of_all_processes_over_the_limit_ends_the_container(launch: Launch) -> None:
    sandbox = launch(BEST, call_timeout=50)
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        kept = bytearray(os.urandom(2 ** 20) * 60)
        time.sleep(100)
time.sleep(100)
"""
    assert (await sandbox.run(code))["ended"] == f"it used more than {256 << 20} bytes of memory"


async def test_memory_of_processes_whose_main_thread_has_ended_counts(launch: Launch) -> None:
    sandbox = launch(BEST, call_timeout=50)
    code = """
import ctypes, os, threading, time
def hold():
    kept = bytearray(os.urandom(2 ** 20) * 60)
    time.sleep(100)
for _ in range(8):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).pthread_exit(None)
time.sleep(100)
"""
    assert (await sandbox.run(code))["ended"] == f"it used more than {256 << 20} bytes of memory"


async def test_processes_started_between_calls_are_killed(launch: Launch) -> None:
    sandbox = launch(BEST, call_timeout=50)
    code = """
import ctypes, os, signal, threading, time
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_long), ("signal", ctypes.c_int), ("notify", ctypes.c_int), ("rest", ctypes.c_long * 6)]
libc, timer = ctypes.CDLL(None), ctypes.c_int()
signal.signal(signal.SIGCONT, lambda *_: None)
for tenths in range(1, 500):  # a timer has no effect if it expires while the code is being frozen
    assert libc.timer_create(1, ctypes.byref(Event(0, signal.SIGCONT)), ctypes.byref(timer)) == 0
    assert libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, tenths // 10, tenths % 10 * 10**8), None) == 0
def start():
    while True:
        time.sleep(0.5)
        if os.fork() == 0:
            time.sleep(1000)
threading.Thread(target=start).start()
"""
    assert (await sandbox.run(code))["ended"] is None
    known = await until_descendants(sandbox, 3)
    [started, *_] = set(await until_descendants(sandbox, len(known) + 1)).difference(known)
    with anyio.fail_after(20):
        while await anyio.Path(f"/proc/{started}/cmdline").read_bytes():  # an exited process has an empty command line
            await anyio.sleep(0.1)


@pytest.mark.parametrize("code", ["print('x' * 10_000_000)", PRINT_FOREVER, "import os\nwhile True: os.write(2, b'x' * 65536)"])
async def test_huge_output_is_truncated(best: Sandbox, code: str) -> None:
    outcome = await best.run(code)
    printed = outcome["stdout"] + outcome["stderr"]
    assert 100_000 <= len(printed.strip()) < 110_000
    assert "bytes in all" in printed


async def test_huge_results_and_errors_are_truncated(sandbox: Sandbox) -> None:
    outcome = await sandbox.run("'\\U0001F600' * 10_000_000")
    assert len(outcome["result"]) == 100_000
    outcome = await sandbox.run("raise ValueError('\\U0001F600' * 10_000_000)", outcome["container_id"])
    assert 100_000 <= len(outcome["error"]) < 110_000


async def test_endless_code_is_stopped(hasty: Sandbox) -> None:
    outcomes = []

    async def run(code: str) -> None:
        outcomes.append(await hasty.run(code))

    async with anyio.create_task_group() as tasks:  # together, because each takes all the CPU time that it gets for 3 s
        for code in ("while True: pass", "10 ** 10 ** 10", "input_ = open('/dev/zero').read()", DEAF):
            tasks.start_soon(run, code)
    assert len(outcomes) == 4
    assert all(outcome["ended"] or outcome["error"].endswith("MemoryError\n") for outcome in outcomes)


async def test_exceeding_the_cpu_time_kills_the_process_of_the_container(launch: Launch) -> None:
    sandbox = launch(BEST, cpu_seconds=1, call_timeout=30)
    outcome = await sandbox.run("while True: pass")
    assert outcome["ended"] == "its process was killed by SIGKILL"
    assert await sandbox.is_well()


# -- replies to the service and crashes ----------------------------------------------------------------------------------

FAKE = """
import json, os
def forge(frame, fds=range(3, 64)):
    for fd in fds:
        try: os.write(fd, frame)
        except OSError: pass
def framed(reply):
    data = json.dumps(reply).encode()
    return len(data).to_bytes(4, "big") + data
"""


@pytest.mark.parametrize(
    "frame",
    [
        "b'\\xff' * 100",
        "b'\\x00\\x00\\x00\\x02{}'",
        "b'\\x00\\x00\\x00\\x04\\xff\\xff\\xff\\xff'",
        "(200_000).to_bytes(4, 'big') + b'[' * 200_000",
        "framed({'nonce': 'guessed', 'result': 'fake', 'error': None, 'files': []})",
        "framed([])",
    ],
)
async def test_forged_frames_end_the_container(best: Sandbox, frame: str) -> None:
    outcome = await best.run(f"{FAKE}\nforge({frame})\nwhile True: pass")
    assert outcome["ended"].startswith("its reply was invalid")
    assert outcome["result"] is None


@pytest.mark.parametrize(
    "reply",
    [
        "{'result': 7, 'error': None, 'files': []}",
        "{'result': None, 'error': None, 'files': 'none'}",
        "{'result': None, 'error': None, 'files': [['a']]}",
        "{'result': None, 'error': None, 'files': [['a', True]]}",
        "{'result': None, 'error': None, 'files': [['a', 1]] * 101}",
        "{'result': None, 'error': None}",
    ],
)
async def test_a_malformed_reply_ends_the_container(best: Sandbox, reply: str) -> None:
    code = f"""
{FAKE}
import sys
frame = sys._getframe()
while "request" not in frame.f_locals: frame = frame.f_back
forge(framed({{**{reply}, "nonce": frame.f_locals["request"]["nonce"]}}))
while True: pass
"""
    assert (await best.run(code))["ended"] == "its reply was invalid (malformed)"


async def test_frames_forged_between_calls_do_not_answer_the_next(best: Sandbox) -> None:
    code = f"""{FAKE}
import threading, time
def later():
    time.sleep(0.2)
    forge(framed(dict(nonce="guessed", result="fake", error=None, files=[])))
threading.Thread(target=later).start()
"""
    container = (await best.run(code))["container_id"]
    with anyio.fail_after(60):
        while (outcome := await best.run("1", container))["ended"] is None:
            assert outcome["result"] == "1"
            await anyio.sleep(0.5)
    assert outcome["result"] is None
    assert outcome["ended"].startswith("its reply was invalid")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os\nos._exit(3)", "its process ended with exit status 3"),
        ("import os\nos.closerange(3, 256)", "its process ended with exit status 1"),
        ("import ctypes\nctypes.string_at(0)", "its process was killed by SIGSEGV"),
        (
            DEEP_IN_C,
            None if sys.version_info >= (3, 12) else "its process was killed by SIGSEGV",
        ),
        ("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))\nos", None),
        ("import json\njson.dumps = lambda *_: 1 / 0", "its process ended with exit status 1"),
        ("import os\nos.getpid = lambda: 0", "its process ended with exit status 0"),
    ],
)
async def test_code_that_breaks_its_own_process_ends_only_its_container(best: Sandbox, code: str, reason: str | None) -> None:
    assert (await best.run(code))["ended"] == reason


@pytest.mark.parametrize(
    "name", ["SIGSTOP", "SIGKILL", "SIGTERM", "SIGINT", "SIGABRT", "SIGSEGV", "SIGPIPE", "SIGCHLD", "SIGRTMAX"]
)
async def test_a_signal_to_its_own_process_does_not_affect_other_containers(hasty: Sandbox, name: str) -> None:
    other = (await hasty.run("x = 1"))["container_id"]
    await hasty.run(f"import os, signal\nos.kill(os.getpid(), signal.{name})")
    assert await hasty.value("x", other) == "1"


async def test_a_container_works_after_closing_or_replacing_its_output_streams(sandbox: Sandbox) -> None:
    outcome = await sandbox.run("import os, sys\nsys.stdout = None\nos.ftruncate(1, 0); os.close(1); os.close(2)\n7")
    assert outcome["result"] == "7"
    assert await sandbox.value("8", outcome["container_id"]) == "8"


async def test_a_sparse_output_file_is_truncated(sandbox: Sandbox) -> None:
    outcome = await sandbox.run("import os\nos.ftruncate(1, 60 * 2 ** 20)")
    assert len(outcome["stdout"]) < 110_000


async def test_an_exception_in_repr_or_str_is_an_error_of_the_cell(sandbox: Sandbox) -> None:
    code = """
class Hostile(Exception):
    def __repr__(self): raise SystemExit("repr")
    __str__ = __repr__
"""
    outcome = await sandbox.run(code + "\nHostile()")
    assert outcome["error"].splitlines()[-1] == "SystemExit: repr"
    outcome = await sandbox.run("raise Hostile()", outcome["container_id"])
    assert "Hostile" in outcome["error"]
    assert await sandbox.value("1", outcome["container_id"]) == "1"


async def test_unpickling_can_run_code_only_in_the_container(sandbox: Sandbox) -> None:
    code = """
import os, pickle
class Evil:
    def __reduce__(self): return os.getuid, ()
type(pickle.loads(pickle.dumps(Evil())))
"""
    assert await sandbox.value(code) == "<class 'int'>"


async def test_invalid_unicode_in_output_and_errors_is_replaced(sandbox: Sandbox) -> None:
    outcome = await sandbox.run("import os\nos.write(1, b'\\xff\\xfe')\n'\\ud800'.join('ab')")
    assert outcome["stdout"] == "\ufffd\ufffd"
    outcome = await sandbox.run("raise ValueError('\\udcff')")
    assert outcome["error"].splitlines()[-1] == "ValueError: ?"


async def test_deep_recursion_is_an_error_of_the_cell(sandbox: Sandbox) -> None:
    outcome = await sandbox.run("def f(): f()\nf()")
    assert outcome["error"].splitlines()[-1].startswith("RecursionError")
    assert outcome["ended"] is None


async def test_privileges_cannot_be_regained(sandbox: Sandbox) -> None:
    code = f"""
import ctypes, os, subprocess
{ATTEMPT}
libc = ctypes.CDLL(None, use_errno=True)
capabilities = (ctypes.c_uint32 * 6)(*[7] * 6)
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), capabilities)
calls = [libc.unshare(0x10000000), libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.ptrace(0, 0, 0, 0)]
attempt(lambda: os.setgroups([0]), lambda: os.setresuid(65431, 65431, 65431)), calls, sum(capabilities)
"""
    refused, calls, capabilities = eval(await sandbox.value(code) or "")
    assert set(refused) <= {"PermissionError", "OSError"}  # OSError: a user that is unknown in its namespace
    assert (calls, capabilities) == ([-1, -1, -1], 0)


async def test_a_crowd_of_hostile_containers_leaves_the_service_answering(hasty: Sandbox) -> None:
    async with anyio.create_task_group() as tasks:
        for code in (
            FORK_BOMB,
            PRINT_FOREVER,
            "while True: pass",
        ):
            tasks.start_soon(hasty.run, code)
        await anyio.sleep(1)
        with anyio.fail_after(60):
            assert await hasty.is_well()
