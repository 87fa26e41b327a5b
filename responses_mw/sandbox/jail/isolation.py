"""What separates a container from the machine: namespaces, a root directory of its own, a user, limits.

Every function raises OSError where the kernel refuses; nothing is left out silently but the process file system, which
containers around us often forbid to mount.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path
from typing import TypedDict

libc = ctypes.CDLL(None, use_errno=True)


class ResourceLimits(TypedDict):
    """What a container may use. Sizes in bytes."""

    cpu_seconds: int
    memory_bytes: int
    disk_bytes: int
    file_bytes: int
    max_processes: int
    max_open_files: int


WORKING_DIRECTORY = "/mnt/data"
_MOST_INODES = 16_384
_INIT_PROCESSES = 2  # our own that count beside the code's, where all have one user
_INSIDE = 1000  # what our user is called in a user namespace: not 0, which the kernel treats apart

_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC = 1, 2, 4, 8, 32, 4096, 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522

# Of the machine's files, a container sees these, read-only, beside the packages: libraries, programs, the interpreter.
VISIBLE = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", sys.base_prefix)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def checked(result: int) -> None:
    """Raises the OSError of a C function that answered -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def enter_process_namespace(*, as_user: bool) -> None:
    """The next child is the first process of a new process namespace. ``as_user``: by way of a user namespace."""
    if not as_user:
        checked(libc.unshare(_CLONE_NEWPID))
        return
    uid, gid = os.getuid(), os.getgid()
    checked(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID))
    Path("/proc/self/setgroups").write_text("deny", "ascii")
    Path("/proc/self/uid_map").write_text(f"{_INSIDE} {uid} 1", "ascii")
    Path("/proc/self/gid_map").write_text(f"{_INSIDE} {gid} 1", "ascii")


def enter_root(uid: int | None, disk_bytes: int, packages: list[str]) -> None:
    """Leaves the machine's files, network and names for new ones.

    The new root is a file system in memory of at most ``disk_bytes``, with the working directory and the temporary ones, which
    belong to ``uid`` (None: to the user that we are). All else in it is read-only.
    """
    checked(libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWCGROUP))
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    root = "/mnt"  # any directory will do: what is mounted on it is seen by this process alone
    options = f"size={disk_bytes},nr_inodes={_MOST_INODES},mode=755"
    _mount("container", root, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in (WORKING_DIRECTORY, "/tmp", "/dev/shm"):  # noqa: S108 (they are the container's own)
        Path(root + path).mkdir(parents=True)
        if uid is not None:
            os.chown(root + path, uid, uid)
        _mount(root + path, root + path, None, _MS_BIND)  # a mount of its own, which stays writable
    for path in (*VISIBLE, *packages):
        _show(path, root, _MS_NODEV)
    for path in _DEVICES:
        _show(path, root, _MS_NOEXEC)
    Path(root + "/proc").mkdir()
    with contextlib.suppress(OSError):  # where /proc is masked, as in most containers, no other may be mounted
        _mount("proc", root + "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "subset=pid")
    _mount("none", root, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir(root)
    checked(libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."))
    checked(libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    checked(libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode()))


def _show(path: str, root: str, flags: int) -> None:
    """Makes ``path`` of the machine visible, read-only, at the same place below ``root``."""
    source, target = Path(path), Path(root + path)
    if target.exists() or not source.exists():  # a prefix below /usr is there already
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink() and source.resolve().is_relative_to("/usr"):
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    _mount(path, str(target), None, _MS_BIND | _MS_REC)
    kept = os.statvfs(target).f_flag & (_MS_NODEV | _MS_NOEXEC)  # a user namespace may not take these away
    _mount("none", str(target), None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | flags | kept)


def hide() -> None:
    """Lets no other process of the same user look into this one."""
    checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def limit(limits: ResourceLimits, *, own_count: bool, own_user: bool) -> None:
    """Sets the limits of each process. ``own_count``: the kernel counts the processes of this container apart."""
    bounds = {
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["max_open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if own_count:
        bounds[resource.RLIMIT_NPROC] = limits["max_processes"] + (0 if own_user else _INIT_PROCESSES)
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        least = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (least, least))


def drop_privileges(uid: int | None) -> None:
    """Becomes ``uid`` (None: stays the user that we are), without any capability, for good."""
    os.umask(0o077)
    checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == -1:
            break  # the kernel has no more of them, or we have no right to any
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    checked(libc.capset(header, (ctypes.c_uint32 * 6)()))
    hide()
