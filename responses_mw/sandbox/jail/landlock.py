"""Landlock: which files code may read and write, where it has no root directory of its own.

From the kernel's version 4 on also no TCP port, and from 6 on no signal to a process and no abstract socket outside: a second
line behind the filter of system calls.
"""

from __future__ import annotations

import ctypes
import os
import struct

from .isolation import VISIBLE, checked, libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every machine
_ASK_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_DIRECTORY, _WRITE_FILE, _TRUNCATE = 1 << 0, 1 << 2, 1 << 3, 1 << 1, 1 << 14
_KNOWN_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # version: how many; 16 from the fifth on
_EVERY_PORT = 0b11  # binding and connecting
_EVERY_SCOPE = 0b11  # abstract sockets and signals
_NETWORK_SINCE, _SCOPES_SINCE = 4, 6
_RIGHTS_OF_FILES = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE


def restrict(directory: str, packages: list[str]) -> None:
    """From now on, for good: ``directory`` may be written, the system's libraries and programs read, and nothing else.

    Needs no_new_privs. Raises OSError where the kernel has no Landlock.
    """
    known = version()
    every_right = (1 << _KNOWN_RIGHTS.get(known, 16)) - 1
    handled = [every_right]
    if known >= _NETWORK_SINCE:
        handled.append(_EVERY_PORT)
    if known >= _SCOPES_SINCE:
        handled.append(_EVERY_SCOPE)
    ruleset = _called(_CREATE_RULESET, struct.pack(f"={len(handled)}Q", *handled), 8 * len(handled), 0)
    reading = _EXECUTE | _READ_FILE | _READ_DIRECTORY
    for path in (*VISIBLE, *packages):
        _allow(ruleset, path, reading)
    for path in ("/dev/zero", "/dev/random", "/dev/urandom"):
        _allow(ruleset, path, _READ_FILE)
    _allow(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
    _allow(ruleset, directory, every_right)
    _called(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def version() -> int:
    """The kernel's version of Landlock. Raises OSError where it has none."""
    return _called(_CREATE_RULESET, None, 0, _ASK_VERSION)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return  # not every machine has them all
    if not os.path.isdir(path):  # noqa: PTH112
        rights &= _RIGHTS_OF_FILES
    _called(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, beneath), 0)
    os.close(beneath)


def _called(number: int, *arguments: int | bytes | None) -> int:
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    checked(result)
    return result
