"""The seccomp filter, interpreted as the kernel does, for both architectures."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from responses_mw.sandbox.jail.seccomp import program

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}
ALLOWED, KILLED, REFUSED, UNKNOWN = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
SUCCESS_WITHOUT_EFFECT = 0x50000
HIGH = 0xDEAD << 32  # bits that the kernel ignores in an int argument

ALWAYS = [
    "socket",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_open",
    "pidfd_getfd",
    "pidfd_send_signal",
    "process_madvise",
    "process_mrelease",
    "kcmp",
    "migrate_pages",
    "move_pages",
    "get_robust_list",
    "unshare",
    "setns",
    "mount",
    "umount2",
    "chroot",
    "memfd_create",
    "shmget",
    "shmat",
    "shmctl",
    "msgget",
    "msgsnd",
    "msgrcv",
    "msgctl",
    "semget",
    "semop",
    "semtimedop",
    "semctl",
    "mq_open",
    "mq_unlink",
    "mq_timedsend",
    "mq_timedreceive",
    "mq_notify",
    "mq_getsetattr",
    "inotify_init1",
    "inotify_add_watch",
    "fanotify_init",
    "fanotify_mark",
    "io_setup",
    "io_uring_setup",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "add_key",
    "request_key",
    "keyctl",
    "quotactl",
    "quotactl_fd",
    "personality",
]
ALONE = [
    "kill",
    "tkill",
    "tgkill",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "setpriority",
    "sched_setparam",
    "sched_setscheduler",
    "sched_setattr",
    "sched_setaffinity",
    "ioprio_set",
    "timer_create",
    "execve",
    "execveat",
    "connect",
    "bind",
    "sendmsg",
    "sendmmsg",
    "truncate",
    "setxattr",
    "lsetxattr",
    "fsetxattr",
    "removexattr",
    "lremovexattr",
    "fremovexattr",
]
ORDINARY = [
    "read",
    "write",
    "openat",
    "close",
    "mmap",
    "munmap",
    "futex",
    "getpid",
    "clock_gettime",
    "epoll_ctl",
    "getrandom",
    "rt_sigaction",
    "recvmsg",
]


def verdict(machine: str, number: int, *arguments: int, alone: bool = True, arch: int | None = None) -> int:
    """Run the filter on a system call and return its verdict."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, ARCHES[machine] if arch is None else arch, 0, *padded)
    lines = list(struct.iter_unpack("=HBBI", program(machine, alone=alone)))
    at = accumulator = 0
    while True:
        code, if_true, if_false, value = lines[at]
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x54:
                accumulator &= value
            case 0x15:
                at += if_true if accumulator == value else if_false
            case 0x35:
                at += if_true if accumulator >= value else if_false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(code)


def numbers(machine: str) -> dict[str, int]:
    """Return the numbers of the system calls of a machine, from the kernel headers."""
    for header in map(Path, HEADERS[machine]):
        if header.exists():
            found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.MULTILINE)
            return {name: int(number) for name, number in found}
    pytest.skip("the kernel's headers are not installed")


both = pytest.mark.parametrize("machine", ARCHES)


@both
def test_forbidden_calls_are_refused_by_their_numbers_in_the_kernel_headers(machine: str) -> None:
    known = numbers(machine)
    assert {name for name in ALWAYS + ALONE if verdict(machine, known[name]) != REFUSED} == set()
    assert {name for name in ALWAYS if verdict(machine, known[name], alone=False) != REFUSED} == set()
    assert {
        name for name in ORDINARY for alone in (True, False) if verdict(machine, known[name], alone=alone) != ALLOWED
    } == set()


@both
def test_calls_that_change_modes_owners_or_times_succeed_without_effect(machine: str) -> None:
    known = numbers(machine)
    for name in ("fchmod", "fchmodat", "fchown", "fchownat", "utimensat"):
        assert verdict(machine, known[name]) == SUCCESS_WITHOUT_EFFECT
        assert verdict(machine, known[name], alone=False) == ALLOWED


@both
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("high", [0, HIGH])
def test_arguments_that_decide_are_compared_by_the_half_that_the_kernel_reads(machine: str, alone: bool, high: int) -> None:
    known = numbers(machine)

    def of(name: str, *arguments: int) -> int:
        return verdict(machine, known[name], *arguments, alone=alone)

    for command in (8, 10, 15, 1024, 1026):  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY
        assert of("fcntl", 3, command | high) == REFUSED
    for command in (0, 1, 2, 3, 4, 6, 1030):  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_SETLK, F_DUPFD_CLOEXEC
        assert of("fcntl", 3, command | high) == ALLOWED
    for command in (0x8901, 0x8902, 0x8912, 0x8927, 0x80108906):  # FIOSETOWN, SIOCSPGRP, SIOCGIFCONF, SIOCGIFHWADDR, ...
        assert of("ioctl", 3, command | high) == REFUSED
    for command in (0x5401, 0x5413, 0x541B, 0x5421, 0x5451):  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX
        assert of("ioctl", 3, command | high) == ALLOWED
    assert (of("socketpair", 1 | high), of("socketpair", 2 | high)) == (ALLOWED, REFUSED)
    assert (of("prctl", 62 | high), of("prctl", 15 | high)) == (REFUSED, ALLOWED)


@both
def test_without_namespaces_only_threads_and_own_limits_are_allowed(machine: str) -> None:
    known = numbers(machine)
    thread, child = 0x3D0F00, 0x1200011
    assert (verdict(machine, known["clone"], thread), verdict(machine, known["clone"], child)) == (ALLOWED, REFUSED)
    assert (verdict(machine, known["prlimit64"], HIGH), verdict(machine, known["prlimit64"], 7)) == (ALLOWED, REFUSED)
    assert verdict(machine, known["clone"], child, alone=False) == ALLOWED
    assert verdict(machine, known["clone"], child | 0x10000000, alone=False) == REFUSED
    for address, expected in ((0, ALLOWED), (1, REFUSED), (1 << 32, REFUSED)):
        assert verdict(machine, known["sendto"], 3, 0, 0, 0, address) == expected


@both
@pytest.mark.parametrize("alone", [True, False])
def test_other_ways_into_the_kernel_are_closed(machine: str, alone: bool) -> None:
    assert verdict(machine, 20, alone=alone, arch=0x40000003) == KILLED  # i386
    assert verdict(machine, 20, alone=alone, arch=0x40000028) == KILLED  # 32-bit ARM
    assert verdict(machine, 0x40000000 | 39, alone=alone) == REFUSED  # x32
    for newer in (435, 457, 463, 467, 469, 500, 10_000):  # clone3, statmount, setxattrat, open_tree_attr, file_setattr
        assert verdict(machine, newer, alone=alone) == UNKNOWN
