"""The seccomp filter for containers. It blocks network access, access to other processes, and rarely used parts of the kernel.

The kernel reads only the lower 32 bits of an int argument, so the filter compares only these. The caller may set the upper bits
to any value. The filter cannot follow pointers, so it cannot check paths or structures.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import NamedTuple

from .isolation import checked, libc

_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_WITHOUT_EFFECT = 0x00050000  # errno 0: the call does nothing and reports success

_Numbers = tuple[int | None, ...]


def _numbers(table: str) -> list[_Numbers]:
    """Parse a table of system calls with their numbers on x86_64 and aarch64. `-` means that a call has no number there."""
    calls = [call.split() for line in table.splitlines() for call in line.partition("#")[0].split(",") if call.strip()]
    return [tuple(None if number == "-" else int(number) for number in numbers) for _, *numbers in calls]


_REFUSED = _numbers("""
    # the network; socketpair is allowed, because event loops need it
    socket 41 198
    # other processes
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, pidfd_open 434 434, pidfd_getfd 438 438,
    pidfd_send_signal 424 424, process_madvise 440 440, process_mrelease 448 448, kcmp 312 272, migrate_pages 256 238,
    move_pages 279 239, get_robust_list 274 100
    # namespaces and mounts
    unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428,
    move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442,
    name_to_handle_at 303 264, open_by_handle_at 304 265
    # memory that no limit counts
    memfd_create 319 279, memfd_secret 447 447
    # System V and POSIX objects: other processes' objects can be used and removed by id, without being opened
    shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, semget 64 190,
    semop 65 193, semtimedop 220 192, semctl 66 191, mq_open 240 180, mq_unlink 241 181, mq_timedsend 242 182,
    mq_timedreceive 243 183, mq_notify 244 184, mq_getsetattr 245 185
    # reveals what other processes do with shared files; Landlock does not check these calls
    inotify_init 253 -, inotify_init1 294 26, inotify_add_watch 254 27, fanotify_init 300 262, fanotify_mark 301 263
    # counts against a quota of the whole machine
    io_setup 206 0
    # parts of the kernel that the code does not need, and that have had vulnerabilities
    io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, bpf 321 280, perf_event_open 298 241,
    userfaultfd 323 282, add_key 248 217, request_key 249 218, keyctl 250 219, personality 135 92, quotactl 179 60,
    quotactl_fd 443 443, modify_ldt 154 -, uselib 134 -, acct 163 89, syslog 103 116, swapon 167 224, swapoff 168 225,
    reboot 169 142, kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273,
    delete_module 176 106
""")

# Refused without a PID namespace. The code must not start processes, which would outlive the container. It must not access
# other processes, or change files outside the container with calls that Landlock does not check.
_REFUSED_ALONE = _numbers("""
    fork 57 -, vfork 58 -
    execve 59 221  # makes the process dumpable again, so that other processes of the same user could inspect the process
    execveat 322 281, kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
    setpriority 141 140, sched_setparam 142 118, sched_setscheduler 144 119, sched_setattr 314 274,
    sched_setaffinity 203 122, ioprio_set 251 30
    timer_create 222 107  # counts against the user's quota of signals
    # without a network namespace, a socket of a socketpair can reach the machine's named sockets
    connect 42 203, bind 49 200, sendmsg 46 211, sendmmsg 307 269
    # files
    truncate 76 45  # Landlock checks this call since version 3
    setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16
""")

# Without a PID namespace, these calls do nothing and report success, because programs that copy files or unpack archives
# expect them to succeed. Nothing in a container depends on their effects.
_WITHOUT_EFFECT_ALONE = _numbers("""
    chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
    utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88
""")


class _Rule(NamedTuple):
    """A rule for a system call whose permission depends on an argument.

    The filter combines the argument's lower 32 bits with `mask`. It returns `listed` if the result is in `values`, otherwise
    `others`.
    """

    numbers: tuple[int, int]
    argument: int
    values: tuple[int, ...]
    listed: int = _REFUSE
    others: int = _ALLOW
    mask: int = 0xFFFFFFFF


_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY = 8, 10, 15, 1024, 1026
_SOCKET_IOCTLS = 0x8900  # FIOSETOWN, SIOCSPGRP; the machine's network interfaces
_AF_UNIX = 1
_PR_SCHED_CORE = 62
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
_CLONE, _PRLIMIT64 = (56, 220), (302, 261)

_RULES = (
    # the kernel sends signals to the owner of a descriptor, which may be any process of the same user
    _Rule((72, 25), 1, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY)),  # fcntl
    _Rule((16, 29), 1, (_SOCKET_IOCTLS,), mask=0xFF00),  # ioctl
    _Rule((53, 199), 0, (_AF_UNIX,), _ALLOW, _REFUSE),  # socketpair
    _Rule((157, 167), 0, (_PR_SCHED_CORE,)),  # prctl: takes the id of a process
)
_RULES_NAMESPACES = (_Rule(_CLONE, 0, (0,), _ALLOW, _REFUSE, mask=_CLONE_NAMESPACES),)
_RULES_ALONE = (
    _Rule(_CLONE, 0, (0,), mask=_CLONE_THREAD),  # threads only
    _Rule(_PRLIMIT64, 0, (0,), _ALLOW, _REFUSE),  # only its own limits
)

# machine: column of the tables, AUDIT_ARCH, sendto
_MACHINES = {"x86_64": (0, 0xC000003E, 44), "aarch64": (1, 0xC00000B7, 206)}
_CLONE3 = 435
_FIRST_UNKNOWN = 457  # calls with this or a higher number are newer than this table
_X32 = 0x40000000  # on x86_64, every call also exists with this bit set

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ARGUMENT_BYTES = 8  # little-endian: the lower half comes first

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install(*, alone: bool) -> None:
    """Install the filter permanently in this process and its children. `no_new_privs` must be set.

    Set `alone` if the container has no namespaces of its own. The filter then also refuses to create processes, execute
    programs, send signals, and connect or bind sockets (see `_REFUSED_ALONE` and `_RULES_ALONE`). Raises `OSError` if seccomp
    is not available or the architecture is unknown.
    """
    filtered = program(os.uname().machine, alone=alone)
    checked(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(_Program(len(filtered) // 8, filtered)), 0, 0))


def program(machine: str, *, alone: bool) -> bytes:
    """Return the filter for `machine` as classic BPF instructions. `alone` is as in `install`.

    `machine` is `x86_64` or `aarch64`. Raises `OSError` for any other machine.
    """
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column, arch, sendto = _MACHINES[machine]
    refused = _REFUSED + _REFUSED_ALONE if alone else _REFUSED
    lines = [
        _line(_LOAD, _ARCH),
        _line(_EQUAL, arch, 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        *_answer(_AT_LEAST, _X32, _REFUSE),
        *_answer(_AT_LEAST, _FIRST_UNKNOWN, _UNKNOWN),
        *_answer(_EQUAL, _CLONE3, _UNKNOWN),  # its flags are in memory, which a filter cannot read; libc falls back to clone
        *_answers(refused, column, _REFUSE),
    ]
    if alone:
        lines += [*_answers(_WITHOUT_EFFECT_ALONE, column, _WITHOUT_EFFECT), *_without_address(sendto)]
    for rule in (*_RULES, *(_RULES_ALONE if alone else _RULES_NAMESPACES)):
        lines += _decided(rule, column)
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _answer(test: int, value: int, answer: int) -> list[bytes]:
    return [_line(test, value, 0, 1), _line(_RETURN, answer)]


def _answers(calls: list[_Numbers], column: int, answer: int) -> list[bytes]:
    numbers = [call[column] for call in calls]
    return [line for number in numbers if number is not None for line in _answer(_EQUAL, number, answer)]


def _decided(rule: _Rule, column: int) -> list[bytes]:
    body = [
        _line(_LOAD, _ARGUMENTS + _ARGUMENT_BYTES * rule.argument),
        _line(_AND, rule.mask),
        *(line for value in rule.values for line in _answer(_EQUAL, value, rule.listed)),
        _line(_RETURN, rule.others),
    ]
    return [_line(_EQUAL, rule.numbers[column], 0, len(body)), *body]


def _without_address(sendto: int) -> list[bytes]:
    """Return the instructions that refuse `sendto` with an address. Both halves of the fifth argument must be zero."""
    fifth = _ARGUMENTS + _ARGUMENT_BYTES * 4
    return [
        _line(_EQUAL, sendto, 0, 6),
        _line(_LOAD, fifth),
        _line(_EQUAL, 0, 0, 2),
        _line(_LOAD, fifth + 4),
        _line(_EQUAL, 0, 1, 0),
        _line(_RETURN, _REFUSE),
        _line(_RETURN, _ALLOW),
    ]
