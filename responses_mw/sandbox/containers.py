"""A container as the service sees it: an untrusted process.

Its output goes to files in memory, and only a bounded part is read, so it can neither block the service nor exhaust its memory.
Its replies are frames of bounded length that must match the request; anything else ends the container.
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
from typing import TYPE_CHECKING, Any, cast

from .jail.isolation import ResourceLimits

if TYPE_CHECKING:
    from .jail.launch import Plan
    from .settings import SandboxSettings

_BOOT = (
    "import sys, json; sys.path.insert(0, sys.argv[1]); from jail.launch import main; sys.path.pop(0); "
    "main(json.loads(sys.argv[2]))"
)
_LENGTH = 4
_MAX_ESCAPE = 12  # maximum length of one character in JSON: two escaped surrogates
_FRAME_OVERHEAD = 2 * 1024 * 1024  # file names and everything else
_MAX_FILES = 100
_MAX_SIZE = 2**63 - 1
_END_TIMEOUT = 5.0
_INHERITED = ("LD_LIBRARY_PATH",)  # needed to load the interpreter; the code does not see it


class SandboxError(Exception):
    """An error whose message is shown to the caller."""


class NotStarted(SandboxError):
    """A container could not be started."""


class _BadReply(Exception):
    """A reply that is malformed or does not match the request."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """A level of isolation. Strong levels use namespaces."""

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
    """The outcome of a cell. ``ended`` says why the container ended; None while it runs."""

    stdout: str
    stderr: str
    result: str | None = None
    error: str | None = None
    files: tuple[File, ...] = ()
    ended: str | None = None


class Container:
    """A container. Call ``start`` first, and always call ``end``, even if it has ended already."""

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
        self.calls = 0  # running or waiting
        self.last_used = 0.0
        self.ended = False
        self._settings = settings
        self._isolation = isolation
        self._lock = asyncio.Lock()
        self._outputs: list[int] = []  # descriptors of stdout and stderr
        self._last_line = b""  # from the init process
        self._directory: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self, first_cell: str = "") -> None:
        """Start the processes and run ``first_cell``. Raises ``NotStarted`` with the last line of its errors."""
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
                env={name: os.environ[name] for name in _INHERITED if name in os.environ},
                cwd="/",
            )
        first = await self.run(first_cell)
        if first.ended or first.error:
            lines = (first.error or first.stderr).strip().splitlines()
            raise NotStarted(lines[-1] if lines else first.ended)

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
            "limits": cast("ResourceLimits", {name: getattr(settings, name) for name in ResourceLimits.__annotations__}),
            "channel": channel,
            "stdout": self._outputs[0],
            "stderr": self._outputs[1],
            "output_bytes": settings.output_bytes,
        }

    async def run(self, code: str) -> Outcome:
        """Run a cell after those already waiting. Cancellation ends the container."""
        async with self._lock:
            if self.ended:
                return Outcome("", "", ended="it ended in an earlier call")
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
                ended = f"its reply was invalid ({error})"
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
        if size > _MAX_ESCAPE * 2 * self._settings.output_bytes + _FRAME_OVERHEAD:
            raise _BadReply("too long")
        return _checked(await self._reader.readexactly(size), nonce)

    async def _sweep(self) -> None:
        """Make the init end the processes that the cell left behind."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b".")
        self._last_line = await self._process.stdout.readline()
        if self._last_line != b"swept\n":
            raise EOFError

    async def _cause(self) -> str:
        """Return why the container ended, as reported by its init."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_END_TIMEOUT):
                self._last_line += await self._process.stdout.read()
        except TimeoutError:
            return "its process stopped answering"
        return _explained(self._last_line.decode("ascii").split()[-2:], self._settings)

    def _outcome(self, reply: dict[str, Any] | None, ended: str | None) -> Outcome:
        stdout, stderr = (_printed(output, self._settings.output_bytes) for output in self._outputs)
        if reply is None:
            return Outcome(stdout, stderr, ended=ended)
        files = tuple(File(_clean(name), size) for name, size in reply["files"])
        return Outcome(stdout, stderr, _clean(reply.get("result")), _clean(reply.get("error")), files, ended)

    def cut(self) -> None:
        """End the container without waiting for it: the init ends all processes when its input closes."""
        self.ended = True
        if self._writer is not None:
            self._writer.transport.abort()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def end(self) -> None:
        """End the container, wait for its processes, and remove its files."""
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
    """Create a file in memory. Every write appends, even after the file has been truncated."""
    output = os.memfd_create("output")
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
    return output


def _printed(output: int, max_bytes: int) -> str:
    size = os.fstat(output).st_size
    text = os.pread(output, max_bytes, 0).decode("utf-8", "replace")
    return text if size <= max_bytes else f"{text}\n... ({size} bytes in all)\n"


def _clean(text: str | None) -> Any:
    """Replace lone surrogates, which cannot be sent."""
    return text if text is None else text.encode("utf-8", "replace").decode()


def _checked(frame: bytes, nonce: str) -> dict[str, Any]:
    """Decode the reply in a frame. Raises ``_BadReply``."""
    try:
        reply = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise _BadReply("not JSON") from error
    if not (isinstance(reply, dict) and reply.get("nonce") == nonce):
        raise _BadReply("wrong nonce")
    texts = (reply.get("result"), reply.get("error"))
    files = reply.get("files")
    if not all(text is None or isinstance(text, str) for text in texts) or not isinstance(files, list):
        raise _BadReply("malformed")
    if len(files) > _MAX_FILES or not all(map(_is_file, files)):
        raise _BadReply("malformed")
    return reply


def _is_file(entry: object) -> bool:
    match entry:
        case [str(), int(size)] if not isinstance(size, bool):
            return 0 <= size <= _MAX_SIZE
        case _:
            return False


def _explained(report: list[str], settings: SandboxSettings) -> str:
    """Explain the last line of the init to the caller."""
    match report:
        case ["exit", status]:
            return f"its process ended with exit status {status}"
        case ["signal", number]:
            names = {known.value: known.name for known in signal.Signals}
            return f"its process was killed by {names.get(int(number), f'signal {number}')}"
        case [*_, "memory"]:
            return f"it used more than {settings.memory_bytes} bytes of memory"
        case [*_, "processes"]:
            return "it started processes that could not be ended"
        case _:
            return "its processes ended"
