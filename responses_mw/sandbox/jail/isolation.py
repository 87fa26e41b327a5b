"""Isolate a container from the machine with namespaces, a root directory, a user, limits, and Landlock.

The functions raise `OSError` if the kernel refuses an operation. Failures to mount `/proc` or to empty the capability bounding
set are ignored.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys
from pathlib import Path
from typing import NamedTuple

libc = ctypes.CDLL(None, use_errno=True)


class Isolation(NamedTuple):
    """A level of isolation. Levels without namespaces are weak."""

    name: str
    namespaces: bool = False
    user_namespace: bool = False
    own_user: bool = False
    landlock: bool = False


LEVELS = (
    Isolation("namespaces, and one user per container", namespaces=True, own_user=True),
    Isolation("namespaces, inside a user namespace", namespaces=True, user_namespace=True),
    Isolation("weak: Landlock, and one user per container", own_user=True, landlock=True),
    Isolation("weak: Landlock", landlock=True),
    Isolation("weak: one user per container", own_user=True),
    Isolation("weak: all containers share this process's user and files"),
)
"""All levels, from the strongest to the weakest. The first level that the kernel and the settings permit is used."""


LIMITS = {"cpu_seconds", "memory_bytes", "disk_bytes", "file_bytes", "max_processes", "max_open_files"}
"""The settings that limit the resources of a container."""
_RESOURCES = {
    resource.RLIMIT_CPU: "cpu_seconds",
    resource.RLIMIT_AS: "memory_bytes",
    resource.RLIMIT_FSIZE: "file_bytes",
    resource.RLIMIT_NOFILE: "max_open_files",
}
"""The settings that `limit` applies to each process, by resource."""

WORKING_DIRECTORY = "/mnt/data"
_MAX_INODES = 16_384
_INIT_PROCESSES = 2  # the waiting process and the init process, which count if they run as the same user as the code
_INSIDE = 1000  # our user id inside a user namespace; not 0, which the kernel treats differently

_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2, 4, 8, 32, 4096, 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522

# The machine's files that a container can read, in addition to the packages: libraries, programs and the interpreter.
VISIBLE = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", sys.base_prefix)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def checked(result: int) -> int:
    """Return the `result` of a C function. If it is -1, raise `OSError` with the C library's errno."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def enter_process_namespace(*, as_user: bool) -> None:
    """Create a PID namespace for the next child process. If `as_user` is true, also create and enter a user namespace."""
    if not as_user:
        checked(libc.unshare(_CLONE_NEWPID))
        return
    uid, gid = os.getuid(), os.getgid()
    checked(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID))
    Path("/proc/self/setgroups").write_text("deny", "ascii")
    Path("/proc/self/uid_map").write_text(f"{_INSIDE} {uid} 1", "ascii")
    Path("/proc/self/gid_map").write_text(f"{_INSIDE} {gid} 1", "ascii")


def enter_root(uid: int | None, disk_bytes: int, packages: list[str]) -> None:
    """Enter new namespaces for mounts, network, IPC, host name and cgroups, and replace the root with a file system in memory.

    Only the working and temporary directories are writable. They belong to `uid`, or to the current user if `uid` is None. The
    paths in `VISIBLE` and `packages` are readable.
    """
    checked(libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWCGROUP))
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    root = "/mnt"  # any existing directory, because only this process sees the mount
    options = f"size={disk_bytes},nr_inodes={_MAX_INODES},mode=755"
    _mount("container", root, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in (WORKING_DIRECTORY, "/tmp", "/dev/shm"):  # noqa: S108 (the container has its own)
        Path(root + path).mkdir(parents=True)
        if uid is not None:
            os.chown(root + path, uid, uid)
        _mount(root + path, root + path, None, _MS_BIND)  # a separate mount, which stays writable
    for path in (*VISIBLE, *packages):
        _show(path, root, _MS_NODEV)
    for path in _DEVICES:
        _show(path, root, _MS_NOEXEC)
    Path(root + "/proc").mkdir()
    with contextlib.suppress(OSError):  # cannot be mounted where /proc is masked, as in most containers
        _mount("proc", root + "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "subset=pid")
    _mount("none", root, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir(root)
    checked(libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."))
    checked(libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    checked(libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode()))


def _show(path: str, root: str, flags: int) -> None:
    """Mount the machine's `path`, if it exists, read-only at the same path below `root`."""
    source, target = Path(path), Path(root + path)
    if target.exists() or not source.exists():  # a path below /usr already exists
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink() and source.resolve().is_relative_to("/usr"):
        target.symlink_to(source.readlink())
        return
    make = target.mkdir if source.is_dir() else target.touch
    make()
    _mount(path, str(target), None, _MS_BIND | _MS_REC)
    kept = os.statvfs(target).f_flag & (_MS_NODEV | _MS_NOEXEC)  # a user namespace cannot remove these
    _mount("none", str(target), None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | flags | kept)


def hide() -> None:
    """Prevent other processes of the same user from inspecting this process."""
    checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def limit(limits: dict[str, int], *, own_count: bool, own_user: bool) -> None:
    """Set the resource limits of this process and its children. `limits` maps the names in `LIMITS` to values.

    If `own_count` is false, `max_processes` is not applied, because the kernel would also count the user's other processes. If
    `own_user` is false, it is increased by 2, because the container's other two processes (see `launch`) run as that user too.
    `disk_bytes` is applied by `enter_root`, not here.
    """
    bounds = {kind: limits[name] for kind, name in _RESOURCES.items()} | {resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 0}
    if own_count:
        bounds[resource.RLIMIT_NPROC] = limits["max_processes"] + (0 if own_user else _INIT_PROCESSES)
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        lower = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (lower, lower))


def drop_privileges(uid: int | None) -> None:
    """Permanently drop all capabilities, set `no_new_privs` and umask 077, and call `hide`. If `uid` is set, switch to it."""
    os.umask(0o077)
    checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == -1:
            break  # there are no more capabilities, or this process may not drop any
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    checked(libc.capset(header, (ctypes.c_uint32 * 6)()))
    hide()


# -- Landlock ----------------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_ASK_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_DIRECTORY, _WRITE_FILE, _TRUNCATE = 1 << 0, 1 << 2, 1 << 3, 1 << 1, 1 << 14
_KNOWN_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of rights by version; 16 from version 5 on
_EVERY_PORT = 0b11  # binding and connecting
_EVERY_SCOPE = 0b11  # abstract sockets and signals
_NETWORK_SINCE, _SCOPES_SINCE = 4, 6
_RIGHTS_OF_FILES = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE


def restrict_files(directory: str, packages: list[str]) -> None:
    """Permanently restrict file access with Landlock. `no_new_privs` must be set.

    Only `directory` and `/dev/null` are writable. `packages`, some devices, and the system's libraries and programs are
    readable. If the kernel supports it, Landlock also forbids TCP, and signals and abstract sockets to other processes.
    """
    version = landlock_version()
    every_right = (1 << _KNOWN_RIGHTS.get(version, 16)) - 1
    handled = [every_right]
    if version >= _NETWORK_SINCE:
        handled.append(_EVERY_PORT)
    if version >= _SCOPES_SINCE:
        handled.append(_EVERY_SCOPE)
    ruleset = _syscall(_CREATE_RULESET, struct.pack(f"={len(handled)}Q", *handled), 8 * len(handled), 0)
    reading = _EXECUTE | _READ_FILE | _READ_DIRECTORY
    for path in (*VISIBLE, *packages):
        _allow(ruleset, path, reading)
    for path in ("/dev/zero", "/dev/random", "/dev/urandom"):
        _allow(ruleset, path, _READ_FILE)
    _allow(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
    _allow(ruleset, directory, every_right)
    _syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def landlock_version() -> int:
    """Return the kernel's Landlock ABI version. Raises `OSError` if Landlock is not available."""
    return _syscall(_CREATE_RULESET, None, 0, _ASK_VERSION)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return  # some machines do not have all paths
    if not os.path.isdir(path):  # noqa: PTH112
        rights &= _RIGHTS_OF_FILES
    _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, beneath), 0)
    os.close(beneath)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    return checked(libc.syscall(ctypes.c_long(number), *arguments))
