"""Run a command with fewer privileges: `confine.py LEVEL COMMAND...`, as root.

    user            an ordinary user, who may create user namespaces
    restricted      an ordinary user, where user namespaces are disabled: the chart's default
    weak            root without capabilities, where user namespaces are disabled
    weak-users      the same, but with the capability to change its user, like root in a hardened container

The interpreter's files are mounted at /media too, since other users cannot read an interpreter below /root.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER, MS_BIND, MS_REC, MS_PRIVATE = 0x00020000, 0x10000000, 4096, 16384, 1 << 18
USERS = {"user": 65432, "restricted": 65532}
libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> None:
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def show_interpreter() -> None:
    checked(libc.unshare(CLONE_NEWNS))
    checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    checked(libc.mount(sys.base_prefix.encode(), b"/media", None, MS_BIND | MS_REC, None))


def enter_user_namespace() -> None:
    """Enter a user namespace that maps all users, and in which no other can be created."""
    entered, entered_end = os.pipe()
    mapped, mapped_end = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        os.read(entered, 1)
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{parent}/{kind}").write_text("0 0 65536")
        os.write(mapped_end, b".")
        os._exit(0)
    checked(libc.unshare(CLONE_NEWUSER))
    os.write(entered_end, b".")
    os.read(mapped, 1)
    os.wait()
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def main(level: str, *command: str) -> None:
    show_interpreter()
    rights = [
        "setpriv",
        "--inh-caps=-all",
        "--bounding-set=-sys_admin,-kill" if level == "weak-users" else "--bounding-set=-all",
    ]
    if level != "user":
        enter_user_namespace()
    if level in USERS:
        rights = ["setpriv", f"--reuid={USERS[level]}", f"--regid={USERS[level]}", "--clear-groups", "--bounding-set=-all"]
    os.execvp("setpriv", [*rights, *command])


main(*sys.argv[1:])
