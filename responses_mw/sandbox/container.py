"""One container, seen from the service: a process that is believed nothing.

What it prints goes to files in memory, which are read up to a bound and can neither block nor overrun us. What it reports comes
in frames of bounded length that must answer the question asked; anything else ends it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .jail.launch import Plan
    from .settings import SandboxSettings

_BOOT = (
    "import sys, json; sys.path.insert(0, sys.argv[1]); from jail.launch import main; sys.path.pop(0); "
    "main(json.loads(sys.argv[2]))"
)
_LENGTH = 4
_ESCAPED = 12  # characters of JSON for one that it must escape: two surrogates
_FRAME_OVERHEAD = 2 * 1024 * 1024  # the names of the files, and all else
_MOST_FILES = 100
_LARGEST = 2**63 - 1
_END_TIMEOUT = 5.0
_NEEDED = ("LD_LIBRARY_PATH",)  # to load the interpreter; the code does not see it


class SandboxError(Exception):
    """Something that the caller is told in these words."""


class NotStarted(SandboxError):
    """A container could not be made."""


class _BadReply(Exception):
    """What came is no answer to what was asked."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """A way to make containers. The strong ones have namespaces."""

    name: str
    namespaces: bool
    user_namespace: bool
    own_user: bool
    landlock: bool


@dataclass(frozen=True, slots=True)
class File:
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cell did. ``ended`` says why the container was lost with it, and is None while it lives."""

    stdout: str
    stderr: str
    result: str | None = None
    error: str | None = None
    files: tuple[File, ...] = ()
    ended: str | None = None


class Container:
    """A running container. Made by ``start``; ``end`` must be called, also after it ended by itself."""

    def __init__(
        self,
        id: str,  # noqa: A002 (the field's name)
        slot: int,
        settings: SandboxSettings,
        isolation: Isolation,
        owner: str = "",
    ) -> None:
        self.id = id
        self.owner = owner
        self.slot = slot
        self.calls = 0  # that run or wait
        self.last_used = 0.0
        self.ended = False
        self._settings = settings
        self._isolation = isolation
        self._lock = asyncio.Lock()
        self._outputs: list[int] = []  # files for what is printed: stdout, stderr
        self._said = b""  # by the init, last
        self._directory: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self, first_cell: str = "") -> None:
        """Raises NotStarted, with what the kernel or the interpreter said, or if ``first_cell`` fails."""
        self._outputs += [_output_file(), _output_file()]
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            plan = self._plan(theirs.fileno())
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-u", "-c", _BOOT, str(Path(__file__).parent), json.dumps(plan)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._outputs[1],
                pass_fds=(theirs.fileno(), *self._outputs),
                env={name: os.environ[name] for name in _NEEDED if name in os.environ},
                cwd="/",
            )
        hello = await self.run(first_cell)
        if hello.ended or hello.error:
            said = (hello.error or hello.stderr).strip().splitlines()
            raise NotStarted(said[-1] if said else hello.ended)

    def _plan(self, channel: int) -> Plan:
        settings, isolation = self._settings, self._isolation
        uid = settings.first_uid + self.slot if isolation.own_user else None
        if not isolation.namespaces:
            self._directory = tempfile.mkdtemp(prefix="container-")
            if uid is not None:
                os.chown(self._directory, uid, uid)
        return {
            "namespaces": isolation.namespaces,
            "user_namespace": isolation.user_namespace,
            "landlock": isolation.landlock,
            "uid": uid,
            "directory": self._directory,
            "packages": settings.packages,
            "limits": {
                "cpu_seconds": settings.cpu_seconds,
                "memory_bytes": settings.memory_bytes,
                "disk_bytes": settings.disk_bytes,
                "file_bytes": settings.file_bytes,
                "max_processes": settings.max_processes,
                "max_open_files": settings.max_open_files,
            },
            "channel": channel,
            "stdout": self._outputs[0],
            "stderr": self._outputs[1],
            "output_bytes": settings.output_bytes,
        }

    async def run(self, code: str) -> Outcome:
        """Runs a cell, after those that wait before it. If it is cancelled, the container is lost."""
        async with self._lock:
            if self.ended:
                return Outcome("", "", ended="it ended during an earlier call")
            for output in self._outputs:
                os.ftruncate(output, 0)
            reply, ended = None, None
            try:
                async with asyncio.timeout(self._settings.call_timeout):
                    reply = await self._exchange(code)
                    await self._sweep()
            except TimeoutError:
                ended = f"the call took longer than {self._settings.call_timeout:g} seconds"
            except _BadReply as error:
                ended = f"its reports could not be understood ({error})"
            except (EOFError, ConnectionError):
                ended = await self._cause()
            except BaseException:
                self.cut()
                raise
            if ended is not None:
                self.cut()
            return self._outcome(reply, ended)

    async def _exchange(self, code: str) -> dict[str, Any]:
        assert self._writer is not None
        nonce = secrets.token_hex(16)
        request = json.dumps({"nonce": nonce, "code": code}).encode("ascii")
        self._writer.write(len(request).to_bytes(_LENGTH, "big") + request)
        await self._writer.drain()
        size = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
        if size > _ESCAPED * 2 * self._settings.output_bytes + _FRAME_OVERHEAD:
            raise _BadReply("too long")
        return _checked(await self._reader.readexactly(size), nonce)

    async def _sweep(self) -> None:
        """Has the init end the processes that the cell left behind."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b".")
        self._said = await self._process.stdout.readline()
        if self._said != b"swept\n":
            raise EOFError

    async def _cause(self) -> str:
        """Why the container ended, as its init tells."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_END_TIMEOUT):
                self._said += await self._process.stdout.read()
        except TimeoutError:
            return "its process stopped answering"
        return _explained(self._said.decode("ascii").split()[-2:], self._settings)

    def _outcome(self, reply: dict[str, Any] | None, ended: str | None) -> Outcome:
        stdout, stderr = (_printed(output, self._settings.output_bytes) for output in self._outputs)
        if reply is None:
            return Outcome(stdout, stderr, ended=ended)
        files = tuple(File(_clean(name), size) for name, size in reply["files"])
        return Outcome(stdout, stderr, _clean(reply.get("result")), _clean(reply.get("error")), files, ended)

    def cut(self) -> None:
        """Ends the container's processes, without waiting for their end: the init does so when its orders cease."""
        self.ended = True
        if self._writer is not None:
            self._writer.transport.abort()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def end(self) -> None:
        """Ends the container, waits for the end of its processes, and removes its files."""
        self.cut()
        if self._process is not None:
            try:
                async with asyncio.timeout(_END_TIMEOUT):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        for output in self._outputs:
            os.close(output)
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)


def _output_file() -> int:
    """A file in memory that is written at its end, however often we empty it."""
    output = os.memfd_create("output")
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
    return output


def _printed(output: int, most: int) -> str:
    size = os.fstat(output).st_size
    text = os.pread(output, most, 0).decode("utf-8", "replace")
    return text if size <= most else f"{text}\n... ({size} bytes in all)\n"


def _clean(text: str | None) -> Any:
    """Text that can be sent: a lone surrogate cannot."""
    return text if text is None else text.encode("utf-8", "replace").decode()


def _checked(frame: bytes, nonce: str) -> dict[str, Any]:
    """The reply in a frame; raises _BadReply for whatever is not one."""
    try:
        reply = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise _BadReply("not JSON") from error
    if not (isinstance(reply, dict) and reply.get("nonce") == nonce):
        raise _BadReply("not the answer")
    texts = (reply.get("result"), reply.get("error"))
    files = reply.get("files")
    if not all(text is None or isinstance(text, str) for text in texts) or not isinstance(files, list):
        raise _BadReply("malformed")
    if len(files) > _MOST_FILES or not all(map(_is_file, files)):
        raise _BadReply("malformed")
    return reply


def _is_file(entry: object) -> bool:
    match entry:
        case [str(), int(size)] if not isinstance(size, bool):
            return 0 <= size <= _LARGEST
        case _:
            return False


def _explained(said: list[str], settings: SandboxSettings) -> str:
    match said:
        case ["exit", status]:
            return f"its process ended with exit status {status}"
        case ["signal", number]:
            names = {known.value: known.name for known in signal.Signals}
            return f"its process was ended by {names.get(int(number), f'signal {number}')}"
        case [*_, "memory"]:
            return f"it used more than {settings.memory_bytes} bytes of memory"
        case [*_, "processes"]:
            return "it left processes behind that could not be ended"
        case _:
            return "its processes ended"
