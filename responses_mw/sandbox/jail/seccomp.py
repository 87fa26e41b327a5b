"""The system calls that a container is refused, as a seccomp filter.

The filter is there whatever the kernel grants besides, and namespaces are the first line where there are any: then it keeps
the code from the kernel's rarely used parts. Without them it is what keeps the code from the network and from processes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from .isolation import checked, libc

# name: number on x86_64 (None: it has no such call), on aarch64
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # the network; socketpair stays, event loops need it
    "socket": (41, 198),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # memory that no limit counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # parts of the kernel that no such code needs, and that had faults
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "personality": (135, 92),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
}

# Where there is no process namespace: no other process can be made (it would outlive the container), or reached.
_NUMBERS_ALONE: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    # sockets of the machine: one of a socketpair reaches them by their names where there is no network namespace
    "connect": (42, 203),
    "bind": (49, 200),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
}

# machine: column of the tables, AUDIT_ARCH, clone, prlimit64, sendto
_MACHINES = {"x86_64": (0, 0xC000003E, 56, 302, 44), "aarch64": (1, 0xC00000B7, 220, 261, 206)}
_CLONE3 = 435
_X32 = 0x40000000  # x86_64 has every call a second time, with this bit
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT, _FIFTH_ARGUMENT = 0, 4, 16, 48  # offsets in struct seccomp_data
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install(*, alone: bool) -> None:
    """Refuses the calls from now on, for good, in this process and its children. Needs no_new_privs.

    ``alone`` is for where there is no process namespace: it refuses new processes and signals too. Raises OSError where the
    kernel has no seccomp or the machine is not one of those known.
    """
    program = _program(os.uname().machine, alone=alone)
    checked(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(_Program(len(program) // 8, program)), 0, 0))


def _program(machine: str, *, alone: bool) -> bytes:
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column, arch, clone, prlimit, sendto = _MACHINES[machine]
    table = _NUMBERS | _NUMBERS_ALONE if alone else _NUMBERS
    refused = [numbers[column] for numbers in table.values()]
    lines = [
        _line(_LOAD, _ARCH),
        _line(_EQUAL, arch, 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        *_answer(_AT_LEAST, _X32, _REFUSE),
        *_answer(_EQUAL, _CLONE3, _UNKNOWN),  # its flags lie in memory, where a filter cannot look; libc then takes clone
        *(line for number in refused if number is not None for line in _answer(_EQUAL, number, _REFUSE)),
    ]
    if alone:
        lines += [*_if_called(clone, _ANY_BIT, _CLONE_THREAD), *_if_called(prlimit, _EQUAL, 0), *_without_address(sendto)]
    else:
        lines += _if_called(clone, _ANY_BIT, _CLONE_NAMESPACES, _REFUSE, _ALLOW)
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _answer(test: int, value: int, answer: int) -> list[bytes]:
    return [_line(test, value, 0, 1), _line(_RETURN, answer)]


def _if_called(number: int, test: int, value: int, then: int = _ALLOW, otherwise: int = _REFUSE) -> list[bytes]:
    """What becomes of a call whose first argument decides."""
    return [
        _line(_EQUAL, number, 0, 4),
        _line(_LOAD, _FIRST_ARGUMENT),
        _line(test, value, 0, 1),
        _line(_RETURN, then),
        _line(_RETURN, otherwise),
    ]


def _without_address(sendto: int) -> list[bytes]:
    """``sendto`` is how ``send`` is called as well: then its fifth argument, the address, is null in both halves."""
    return [
        _line(_EQUAL, sendto, 0, 6),
        _line(_LOAD, _FIFTH_ARGUMENT),
        _line(_EQUAL, 0, 0, 2),
        _line(_LOAD, _FIFTH_ARGUMENT + 4),
        _line(_EQUAL, 0, 1, 0),
        _line(_RETURN, _REFUSE),
        _line(_RETURN, _ALLOW),
    ]
