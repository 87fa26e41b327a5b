"""Two containers with the same user, as in the default of the chart: neither can affect the other or the service."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from responses_mw.sandbox.jail import isolation
from tests.sandbox.test_escapes import ATTEMPT
from tests.support.paths import ROOT
from tests.support.sandbox import Sandbox

# Bare system calls, by their numbers on x86_64 and aarch64. Each returns the name of its error or its result.
CALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
column = ("x86_64", "aarch64").index(os.uname().machine)
def call(numbers, *arguments):
    result = libc.syscall(ctypes.c_long(numbers[column]), *arguments)
    return errno.errorcode[ctypes.get_errno()] if result == -1 else result
"""
REFUSED = {"EPERM", "ENOSYS", "PermissionError"}


@pytest.fixture
async def victim(restricted: Sandbox) -> AsyncIterator[tuple[str, int]]:
    """The container of another tenant and its process id. Assert that the test does not change its state."""
    state = "os.getpriority(0, 0), os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_CPU), x"
    container = (await restricted.run("import os, resource; x = 1"))["container_id"]
    before = await restricted.value(state, container)
    assert await restricted.value("os.getuid()", container) == await restricted.value("import os; os.getuid()") == "65532"
    pid = await restricted.value("os.getpid()", container)
    assert pid is not None
    yield container, int(pid)
    assert await restricted.value(state, container) == before
    assert restricted.process.poll() is None


async def outcomes(sandbox: Sandbox, code: str) -> list[object]:
    got = await sandbox.value(code)
    assert got is not None
    found: list[object] = eval(got)  # a list of names of errors and numbers
    return found


# -- signals and processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["another tenant's", "the service's"])
async def test_the_owner_of_a_descriptor_is_no_way_to_signal_a_process(
    restricted: Sandbox, victim: tuple[str, int], whose: str
) -> None:
    pid = victim[1] if whose == "another tenant's" else restricted.process.pid
    code = f"""
import fcntl, os, signal, socket, struct
{ATTEMPT}
F_SETOWN_EX, FIOSETOWN, SIOCSPGRP, HIGH = 15, 0x8901, 0x8902, 1 << 40
def signalled(own):
    one, other = socket.socketpair()
    try:
        own(one)
        fcntl.fcntl(one, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        other.send(b"now")
    finally:
        one.close(); other.close()
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def bare(number, command, argument):
    def own(one):
        if libc.syscall(*map(ctypes.c_long, (number, one.fileno(), command, argument))) == -1:
            raise OSError(ctypes.get_errno(), "")
    return own
fcntl_number, ioctl_number = dict(x86_64=(72, 16), aarch64=(25, 29))[os.uname().machine]
address = ctypes.c_int({pid})
attempt(
    lambda: signalled(lambda one: fcntl.fcntl(one, fcntl.F_SETOWN, {pid})),
    lambda: signalled(lambda one: fcntl.fcntl(one, F_SETOWN_EX, struct.pack("ii", 1, {pid}))),
    lambda: signalled(lambda one: fcntl.ioctl(one, FIOSETOWN, struct.pack("i", {pid}))),
    lambda: signalled(lambda one: fcntl.ioctl(one, SIOCSPGRP, struct.pack("i", {pid}))),
    lambda: signalled(bare(fcntl_number, fcntl.F_SETOWN | HIGH, {pid})),
    lambda: signalled(bare(ioctl_number, FIOSETOWN | HIGH, ctypes.addressof(address))),
)
"""
    assert await outcomes(restricted, code) == ["PermissionError"] * 6


async def test_no_call_signals_reads_or_changes_a_process_of_the_same_user(
    restricted: Sandbox, victim: tuple[str, int]
) -> None:
    pid = victim[1]
    code = f"""
{CALL}
buffer = (ctypes.c_uint64 * 16)(*[0] * 16)
affinity = (ctypes.c_uint64 * 16)(*[0] * 15, 1)
event = (ctypes.c_int32 * 16)(0, 0, 9, 4, {pid})  # SIGKILL by SIGEV_THREAD_ID
timer = ctypes.c_int()
[
    call((62, 129), {pid}, 0),                        # kill
    call((62, 129), -1, 9),
    call((200, 130), {pid}, 9),                       # tkill
    call((234, 131), {pid}, {pid}, 9),                # tgkill
    call((129, 138), {pid}, 9, buffer),               # rt_sigqueueinfo
    call((297, 240), {pid}, {pid}, 9, buffer),        # rt_tgsigqueueinfo
    call((434, 434), {pid}, 0),                       # pidfd_open
    call((424, 424), 3, 9, None, 0),                  # pidfd_send_signal
    call((222, 107), 0, event, ctypes.byref(timer)),  # timer_create
    call((101, 117), 16, {pid}, 0, 0),                # ptrace
    call((310, 270), {pid}, buffer, 1, buffer, 1, 0), # process_vm_readv
    call((311, 271), {pid}, buffer, 1, buffer, 1, 0), # process_vm_writev
    call((440, 440), 3, buffer, 1, 4, 0),             # process_madvise
    call((448, 448), 3, 0),                           # process_mrelease
    call((438, 438), 3, 0, 0),                        # pidfd_getfd
    call((312, 272), {pid}, os.getpid(), 0, 0, 0),    # kcmp
    call((279, 239), {pid}, 0, None, None, None, 0),  # move_pages
    call((256, 238), {pid}, 0, None, None),           # migrate_pages
    call((274, 100), {pid}, buffer, buffer),          # get_robust_list
    call((157, 167), 62, 2, {pid}, 0, 0),             # prctl(PR_SCHED_CORE, PR_SCHED_CORE_SHARE_TO)
    call((141, 140), 0, {pid}, 19),                   # setpriority
    call((203, 122), {pid}, 128, affinity),           # sched_setaffinity
    call((142, 118), {pid}, buffer),                  # sched_setparam
    call((144, 119), {pid}, 3, buffer),               # sched_setscheduler
    call((314, 274), {pid}, buffer, 0),               # sched_setattr
    call((251, 30), 1, {pid}, 3 << 13),               # ioprio_set
    call((302, 261), {pid}, 0, buffer, None),         # prlimit64
]
"""
    assert set(await outcomes(restricted, code)) == {"EPERM"}


async def test_a_container_may_set_its_own_parent_death_signal(restricted: Sandbox, victim: tuple[str, int]) -> None:
    code = f"{CALL}\nimport signal\ncall((157, 167), 1, signal.SIGKILL, 0, 0, 0)"
    assert await restricted.value(code) == "0"


async def test_the_process_file_system_shows_nothing_of_others(restricted: Sandbox, victim: tuple[str, int]) -> None:
    pids = (victim[1], restricted.process.pid)
    names = ("mem", "environ", "cmdline", "maps", "fd", "task", "root", "cwd", "exe")
    code = f"""
import os
{ATTEMPT}
paths = [f"/proc/{{pid}}/{{name}}" for pid in {pids} for name in {names}]
attempt(*[lambda path=path: open(path).read(1) for path in paths], *[lambda path=path: os.listdir(path) for path in paths],
    *[lambda path=path: os.readlink(path) for path in paths if path.endswith(("root", "cwd", "exe"))])
"""
    assert set(await outcomes(restricted, code)) <= {"PermissionError", "NotADirectoryError"}


async def test_a_container_cannot_execute_another_program(restricted: Sandbox) -> None:
    code = f"import os\n{ATTEMPT}\nattempt(lambda: os.execv('/bin/true', ['true']))"
    assert await outcomes(restricted, code) == ["PermissionError"]


# -- shared kernel objects -----------------------------------------------------------------------------------------------


@pytest.fixture
def segment() -> Iterator[int]:
    """A world-accessible System V shared memory segment of another program on the host."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.shmget(0, 4096, 0o1666)
    assert found >= 0
    yield found
    libc.shmctl(found, 0, None)


async def test_memory_queues_and_semaphores_of_others_cannot_be_used_by_their_ids(restricted: Sandbox, segment: int) -> None:
    code = f"""
{CALL}
buffer = ctypes.create_string_buffer(4096)
[
    call((29, 194), 0, 4096, 0o1600), call((30, 196), {segment}, None, 0), call((31, 195), {segment}, 2, buffer),
    call((68, 186), 0, 0o1600), call((69, 189), 0, buffer, 1, 0), call((70, 188), 0, buffer, 1, 0, 0),
    call((71, 187), 0, 2, buffer), call((64, 190), 0, 1, 0o1600), call((65, 193), 0, buffer, 1),
    call((220, 192), 0, buffer, 1, None), call((66, 191), 0, 0, 2, buffer),
    call((240, 180), b"queue", 0o102, 0o600, None), call((241, 181), b"queue"), call((244, 184), 3, buffer),
]
"""
    assert set(await outcomes(restricted, code)) == {"EPERM"}


async def test_shared_memory_of_others_cannot_be_used_with_an_ipc_namespace_either(best: Sandbox, segment: int) -> None:
    code = f"{CALL}\n[call((30, 196), {segment}, None, 0)]"
    assert set(await outcomes(best, code)) == {"EPERM"}


async def test_file_events_caused_by_others_cannot_be_watched(restricted: Sandbox, best: Sandbox) -> None:
    code = f"""
{CALL}
import fcntl
{ATTEMPT}
[
    call((253, 26), 0), call((294, 26), 0), call((254, 27), 3, b"/tmp", 0x100), call((300, 262), 0x200, 0),
    *attempt(lambda: fcntl.fcntl(os.open("/usr", os.O_RDONLY), fcntl.F_NOTIFY, 1)),
]
"""
    for sandbox in (restricted, best):
        assert set(await outcomes(sandbox, code)) == {"EPERM", "PermissionError"}


async def test_calls_with_kernel_wide_quotas_and_network_interfaces_are_refused(restricted: Sandbox, best: Sandbox) -> None:
    code = f"""
{CALL}
import fcntl, socket
{ATTEMPT}
AF_TIPC, SIOCGIFCONF, F_SETLEASE = 30, 0x8912, 1024
one, other = socket.socketpair()
[
    call((206, 0), 1000, (ctypes.c_uint64 * 1)(0)),  # io_setup
    call((53, 199), AF_TIPC, 1, 0, (ctypes.c_int * 2)()),
    *attempt(
        lambda: fcntl.ioctl(one, SIOCGIFCONF, bytes(16)),
        lambda: fcntl.fcntl(open("f", "w"), F_SETLEASE, fcntl.F_WRLCK),
        lambda: os.memfd_create("x"),
        lambda: open("/dev/shm/x", "w") if call((157, 167), 39, 0, 0, 0, 0) else None,
    )[:3],
    call((425, 425), 8, (ctypes.c_uint64 * 16)()), call((323, 282), 1), call((298, 241), None, 0, -1, -1, 0),
    call((321, 280), 0, None, 0), call((248, 217), b"user", b"x", b"x", 1, -5), call((250, 219), 0, -5, 0),
    call((457, 457), None, None, 0, 0), call((467, 467), -1, b"/", 0, None, 0), call((469, 469), -1, b"/tmp", None, 0, 0),
]
"""
    for sandbox in (restricted, best):
        assert set(await outcomes(sandbox, code)) <= REFUSED


# -- files of the same user, with calls that Landlock does not restrict -------------------------------------------------


async def test_files_of_the_same_user_keep_their_mode_times_attributes_and_length(
    restricted: Sandbox, victim: tuple[str, int]
) -> None:
    container = victim[0]
    state = "(lambda s: (s.st_mode, s.st_mtime_ns, s.st_size, s.st_uid))(os.stat('kept')), os.stat('.').st_mode, os.listxattr('kept')"
    directory = await restricted.value("written = open('kept', 'w').write('kept'); os.getcwd()", container)
    before = await restricted.value(state, container)
    code = f"""
{CALL}
{ATTEMPT}
path = os.path.join({directory}, "kept")
got = attempt(
    lambda: os.truncate(path, 0), lambda: os.setxattr(path, "user.x", b"x"), lambda: os.removexattr(path, "user.x"),
)
os.chmod(path, 0); os.utime(path, (1, 1)); os.chown(path, os.getuid(), os.getgid()); os.chmod({directory}, 0o777)
call((452, 452), -100, path.encode(), 0, 0)
got
"""
    assert set(await outcomes(restricted, code)) == {"PermissionError"}
    assert await restricted.value(state, container) == before


async def test_copying_files_and_unpacking_archives_work_although_modes_cannot_be_changed(restricted: Sandbox) -> None:
    code = """
import pathlib, shutil, tarfile, zipfile
written = pathlib.Path("a").write_text("text")
shutil.copy("a", "b"); shutil.copy2("a", "c"); pathlib.Path("a").touch()
shutil.make_archive("archive", "gztar", ".", "a"); shutil.make_archive("archive", "zip", ".", "a")
shutil.unpack_archive("archive.tar.gz", "one"); shutil.unpack_archive("archive.zip", "two")
[pathlib.Path(name).read_text() for name in ("b", "c", "one/a", "two/a")]
"""
    assert await restricted.value(code) == "['text', 'text', 'text', 'text']"


# -- Landlock without the other mechanisms -------------------------------------------------------------------------------


ALONE = """
import ctypes, fcntl, os, signal, socket, sys
from responses_mw.sandbox.jail import isolation
isolation.checked(isolation.libc.prctl(38, 1, 0, 0, 0))
isolation.restrict_files(sys.argv[1], [])
for reach in (
    lambda: os.kill(os.getppid(), 0),
    lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", "\\0" + sys.argv[2]),
):
    try:
        print(reach())
    except OSError as error:
        print(type(error).__name__)
one, other = socket.socketpair()
fcntl.fcntl(one, fcntl.F_SETOWN, os.getppid())
fcntl.fcntl(one, fcntl.F_SETSIG, signal.SIGKILL)
fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
other.send(b"now")
"""


PARENT = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"


def has_scopes() -> bool:
    try:
        return isolation.landlock_version() >= 6
    except OSError:
        return False


@pytest.mark.skipif("not has_scopes()", reason="this kernel's Landlock knows no scopes")
def test_landlock_keeps_signals_and_abstract_sockets_within_the_container(tmp_path: Path) -> None:
    name = f"responses-mw-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        done = subprocess.run(
            [sys.executable, "-c", PARENT, sys.executable, "-c", ALONE, str(tmp_path), name],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["PermissionError", "PermissionError"], "")
