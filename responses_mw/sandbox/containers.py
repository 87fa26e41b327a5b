"""Run untrusted code in containers, which are groups of separate processes.

A container cannot block the service, because calls have a timeout. It cannot exhaust the service's memory, because the service
reads only a limited part of the output. A reply is a frame of limited length with the nonce of the request. After an invalid
reply, the container is stopped.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import socket
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..ids import random_part
from ..tasks import background_task
from . import SandboxSettings
from .jail.isolation import LEVELS, LIMITS, Isolation
from .jail.launch import MAX_FILES, RESUME, SWEEP, Plan
from .removal import Removal

_BOOT = (
    "import sys, json; sys.path.insert(0, sys.argv[1]); from jail.launch import main; sys.path.pop(0); "
    "main(json.loads(sys.argv[2]))"
)
_LENGTH = 4
_MAX_ESCAPE = 12  # maximum length of one character in JSON: two escaped surrogates
_FRAME_OVERHEAD = 2 * 1024 * 1024  # file names and the other members
_END_TIMEOUT = 5.0
_SWEPT = b"swept\n"
_UNEXPLAINED = "its processes ended"
_INHERITED = ("LD_LIBRARY_PATH",)  # needed to load the interpreter; removed before the code runs


class SandboxError(Exception):
    """Raised if isolation is too weak, or if a container is unavailable or fails. Users of the sandbox see the message."""


class _NotebookReply(BaseModel):
    model_config = ConfigDict(strict=True)

    nonce: str
    result: str | None = None
    error: str | None = None
    files: list[tuple[str, Annotated[int, Field(ge=0, lt=2**63)]]] = Field(max_length=MAX_FILES)


class WrittenFile(BaseModel):
    name: str = Field(description="path below the working directory")
    size: int = Field(description="bytes")


class PythonResult(BaseModel):
    """The result of one call of the tool `python`. It is sent as the structured content of the MCP result."""

    container_id: str = Field(description="pass it to the next call to continue in the same container")
    stdout: str
    stderr: str
    result: str | None = Field(description="repr of the last expression; null if there is none or it is None")
    error: str | None = Field(description="traceback, if the code raised")
    files: list[WrittenFile] = Field(description="files that the code wrote or changed")
    ended: str | None = Field(description="why the container and its variables are lost; null while it exists")


async def strongest_isolation(settings: SandboxSettings) -> Isolation:
    """Return the strongest isolation that the kernel grants and `settings` permit. Raises `SandboxError` if there is none."""
    refused = []
    for isolation in LEVELS:
        if isolation.own_user and os.geteuid() != 0:
            continue
        if not isolation.namespaces and not settings.allow_weak_isolation:
            break
        trial = Container("trial", 0, settings, isolation, "")
        try:
            await trial.start("import ctypes, decimal")  # fails if a library directory is hidden
        except SandboxError as error:
            refused.append(f"{isolation.name}: {error}")
        else:
            return isolation
        finally:
            await trial.end(Removal())
    raise SandboxError(
        f"the kernel does not grant sufficient isolation ({'; '.join(refused)}). If this service already runs in a "
        "sandbox, set allow_weak_isolation to start anyway (see docs/guides/sandbox.md)."
    )


class Containers:
    """Async context manager that runs containers with `isolation`. Idle containers expire, and all are stopped on exit."""

    def __init__(self, settings: SandboxSettings, isolation: Isolation) -> None:
        self._settings, self._isolation = settings, isolation
        self._live: dict[str, Container] = {}
        self._slots = set(range(settings.max_containers))
        self._ending: set[asyncio.Task[None]] = set()
        self._removal = Removal()

    async def __aenter__(self) -> Self:
        self._expiry = background_task(self._expire())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._expiry.cancel()
        for container in list(self._live.values()):
            self._discard(container)
        await asyncio.gather(*self._ending)

    async def run(self, code: str, container_id: str | None, memory_bytes: int | None, owner: str) -> PythonResult:
        """Run `code` in the container `container_id` of `owner`, or in a new container if `container_id` is None.

        `memory_bytes` can lower the memory limit of a new container; None keeps the limit. Raises `SandboxError` if `owner` has
        no such container, or if no new container can be started.
        """
        if container_id is None:
            container = await self._create(memory_bytes, owner)
        else:
            container = self._find(container_id, owner)
            container.calls += 1
        try:
            return await container.run(code)
        finally:
            container.calls -= 1
            container.last_used = asyncio.get_running_loop().time()
            if container.ended:
                self._discard(container)

    def _find(self, container_id: str, owner: str) -> Container:
        container = self._live.get(container_id)
        if container is None or container.owner != owner or container.ended:
            raise SandboxError(f"Container with id '{container_id}' not found: it expired, ended, or never existed.")
        return container

    async def _create(self, memory_bytes: int | None, owner: str) -> Container:
        limit = self._settings.memory_bytes
        settings = self._settings.model_copy(update={"memory_bytes": min(memory_bytes or limit, limit)})
        container = Container(f"cntr_{random_part()}", await self._free_slot(), settings, self._isolation, owner)
        self._live[container.id] = container
        try:
            await container.start()
        except BaseException:
            self._discard(container)
            raise
        return container

    async def _free_slot(self) -> int:
        """Return a free slot. If there is none, stop an idle container and wait for its slot.

        Of the owners with idle containers, the one with the most containers loses the container that has been idle for longest.
        Raises `SandboxError` if all containers are in use.
        """
        while not self._slots:
            if idle := [container for container in self._live.values() if not container.calls]:
                counts = Counter(container.owner for container in self._live.values())
                self._discard(min(idle, key=lambda container: (-counts[container.owner], container.last_used)))
            if not self._ending:
                raise SandboxError(f"All {self._settings.max_containers} containers are in use. Try again later.")
            await asyncio.wait(self._ending, return_when=asyncio.FIRST_COMPLETED)
        return self._slots.pop()

    def _discard(self, container: Container) -> None:
        """Stop a container in the background. Its slot and its user can be used again when its last process has ended."""

        async def end() -> None:
            try:
                await container.end(self._removal)
            finally:
                self._slots.add(container.slot)

        if self._live.pop(container.id, None) is not None:
            container.cut()
            task = asyncio.create_task(end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._settings.keep / 4))
            await self._removal.retry()
            expired = asyncio.get_running_loop().time() - self._settings.keep
            for container in list(self._live.values()):
                if not container.calls and container.last_used < expired:
                    self._discard(container)


@dataclass(eq=False)
class Container:
    """A container. Call `start` before `run`, and always call `end`, even if the container has already ended."""

    id: str
    slot: int
    settings: SandboxSettings
    isolation: Isolation
    owner: str
    calls: int = 1  # running or waiting, including the call that creates the container
    last_used: float = 0.0
    ended: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _outputs: list[int] = field(default_factory=list)  # descriptors of stdout and stderr
    _directory: str | None = None
    _process: asyncio.subprocess.Process | None = None
    _writer: asyncio.StreamWriter | None = None

    @property
    def _uid(self) -> int | None:
        """The container's user, or None if it has the user of the service."""
        return self.settings.first_uid + self.slot if self.isolation.own_user else None

    async def start(self, first_cell: str = "") -> None:
        """Start the processes and run `first_cell`. Raises `SandboxError` if a process cannot be started or the cell fails."""
        try:
            await self._launch()
            first = await self.run(first_cell)
        except OSError as error:
            raise SandboxError(f"No container could be started: {error}") from error
        if first.ended or first.error:
            lines = (first.error or first.stderr).strip().splitlines()
            raise SandboxError(lines[-1] if lines else first.ended)

    async def _launch(self) -> None:
        self._outputs += [_output_file(), _output_file()]
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            if not self.isolation.namespaces:
                self._make_directory()
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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._reports = self._process.stdin, self._process.stdout  # the input and the output of the init process

    def _make_directory(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="container-")
        if self._uid is not None:
            os.chown(self._directory, self._uid, self._uid)

    def _plan(self, channel: int) -> Plan:
        settings, isolation = self.settings, self.isolation
        return {
            "namespaces": isolation.namespaces,
            "user_namespace": isolation.user_namespace,
            "landlock": isolation.landlock,
            "uid": self._uid,
            "directory": self._directory,
            "packages": settings.packages,
            "limits": settings.model_dump(include=LIMITS),
            "channel": channel,
            "stdout": self._outputs[0],
            "stderr": self._outputs[1],
            "output_bytes": settings.output_bytes,
        }

    async def run(self, code: str) -> PythonResult:
        """Run a cell and return its outcome. Concurrent calls run in order. Cancelling a running cell stops the container."""
        async with self._lock:
            if self.ended:
                return self._outcome("", "", None, "it ended in an earlier call")
            for output in self._outputs:
                os.ftruncate(output, 0)
            reply, ended = await self._execute(code)
            stdout, stderr = (_printed(output, self.settings.output_bytes) for output in self._outputs)
            return self._outcome(stdout, stderr, reply, ended)

    async def _execute(self, code: str) -> tuple[_NotebookReply | None, str | None]:
        """Run a cell. Return its reply and the reason why the container ended. Each is None if there is none."""
        reply = None
        try:
            async with asyncio.timeout(self.settings.call_timeout):
                reply = await self._exchange(code)
                await self._sweep()
                return reply, None
        except TimeoutError:
            ended = f"the call took longer than {self.settings.call_timeout:g} seconds"
        except SandboxError as error:
            ended = str(error)
        except (EOFError, ConnectionError):
            ended = await self._cause()
        except BaseException:
            self.cut()
            raise
        self.cut()
        return reply, ended

    async def _exchange(self, code: str) -> _NotebookReply:
        assert self._writer is not None
        nonce = secrets.token_hex(16)
        request = json.dumps({"nonce": nonce, "code": code}).encode("ascii")
        self._orders.write(RESUME)
        self._writer.write(len(request).to_bytes(_LENGTH, "big") + request)
        await self._writer.drain()
        reply = await self._read_reply()
        if reply.nonce != nonce:
            raise SandboxError("its reply was invalid (wrong nonce)")
        return reply

    async def _read_reply(self) -> _NotebookReply:
        size = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
        if size > _MAX_ESCAPE * 2 * self.settings.output_bytes + _FRAME_OVERHEAD:
            raise SandboxError("its reply was invalid (too long)")
        try:
            return _NotebookReply.model_validate_json(await self._reader.readexactly(size))
        except ValidationError:
            raise SandboxError("its reply was invalid (malformed)") from None

    async def _sweep(self) -> None:
        """Make the init process freeze the container, and kill what the cell left behind. Raises `SandboxError` if it ends."""
        self._orders.write(SWEEP)
        report = await self._reports.readline()
        if report != _SWEPT:
            raise SandboxError(report.decode("ascii") or _UNEXPLAINED)

    async def _cause(self) -> str:
        """Return why the container ended, as reported by its init process."""
        try:
            async with asyncio.timeout(_END_TIMEOUT):
                report = await self._reports.read()
        except TimeoutError:
            return "its process stopped answering"
        return report.decode("ascii") or _UNEXPLAINED

    def _outcome(self, stdout: str, stderr: str, reply: _NotebookReply | None, ended: str | None) -> PythonResult:
        result, error, files = (reply.result, reply.error, reply.files) if reply else (None, None, [])
        written = [WrittenFile(name=name, size=size) for name, size in files]
        return PythonResult(
            container_id=self.id, stdout=stdout, stderr=stderr, result=result, error=error, files=written, ended=ended
        )

    def cut(self) -> None:
        """Stop the container without waiting for its processes. The init process kills them when its input is closed."""
        self.ended = True
        if self._writer is not None:
            self._writer.transport.abort()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def end(self, removal: Removal) -> None:
        """Stop the container, wait for its processes, and remove its files."""
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
            await removal.remove(self._directory, self._uid)


def _output_file() -> int:
    output = os.memfd_create("output")
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)  # because the file is truncated before each cell
    return output


def _printed(output: int, max_bytes: int) -> str:
    size = os.fstat(output).st_size
    text = os.pread(output, max_bytes, 0).decode("utf-8", "replace")
    return text if size <= max_bytes else f"{text}\n... ({size} bytes in all)\n"
