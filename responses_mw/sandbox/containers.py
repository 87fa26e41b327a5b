"""The containers of a sandbox: found by id, limited in number, and kept for some time after their last use."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from ..ids import mint
from .container import Container, Isolation, NotStarted, Outcome, SandboxError

if TYPE_CHECKING:
    from .settings import SandboxSettings

logger = logging.getLogger(__name__)

_NONE = Isolation("weak: all containers share this process's user and files", False, False, False, False)
# From the strongest to the weakest. The first that the kernel grants is used.
_LEVELS = (
    replace(_NONE, name="namespaces, and one user per container", namespaces=True, own_user=True),
    replace(_NONE, name="namespaces, inside a user namespace", namespaces=True, user_namespace=True),
    replace(_NONE, name="weak: Landlock, and one user per container", own_user=True, landlock=True),
    replace(_NONE, name="weak: Landlock", landlock=True),
    replace(_NONE, name="weak: one user per container", own_user=True),
    _NONE,
)


class UnknownContainer(SandboxError):
    """The owner has no container with this id, or no longer has it."""


class NoRoom(SandboxError):
    """Every container is in use."""


class WeakIsolation(SandboxError):
    """The kernel does not grant sufficient isolation."""


class Containers:
    """All containers, as an async context manager. Exiting it ends every container.

    Entering it selects the strongest isolation available. Without namespaces, it raises ``WeakIsolation`` unless
    ``allow_weak_isolation`` is set.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._isolation: Isolation | None = None
        self._live: dict[str, Container] = {}  # the least recently used comes first
        self._slots = set(range(settings.max_containers))
        self._ending: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.Task[None] | None = None

    @property
    def isolation(self) -> Isolation:
        """The isolation of each container. Available once entered."""
        assert self._isolation is not None
        return self._isolation

    async def __aenter__(self) -> Self:
        self._isolation = await self._strongest()
        self._expiry = asyncio.create_task(self._expire())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._expiry is not None
        self._expiry.cancel()
        for container in list(self._live.values()):
            self._discard(container)
        await asyncio.gather(*self._ending)

    async def run(
        self,
        code: str,
        id: str | None = None,  # noqa: A002 (the field's name)
        memory_bytes: int | None = None,
        owner: str = "",
    ) -> tuple[str, Outcome]:
        """Run ``code`` in the ``owner``'s container ``id``, or in a new one (None). Return the container's id and the outcome.

        The memory of a new container is limited to ``memory_bytes`` or the setting, whichever is lower. Raises
        ``UnknownContainer`` (including for another owner's container), ``NoRoom`` or ``NotStarted``.
        """
        container = await self._create(memory_bytes, owner) if id is None else self._find(id, owner)
        container.calls += 1
        try:
            return container.id, await container.run(code)
        finally:
            container.calls -= 1
            self._used(container)

    def _find(self, id: str, owner: str) -> Container:  # noqa: A002
        container = self._live.get(id)
        if container is None or container.ended or container.owner != owner:
            raise UnknownContainer(f"Container with id '{id}' not found: it expired, ended, or never existed.")
        return container

    def _used(self, container: Container) -> None:
        if container.ended:
            self._discard(container)
        elif container.id in self._live:
            container.last_used = asyncio.get_running_loop().time()
            self._live[container.id] = self._live.pop(container.id)

    async def _create(self, memory_bytes: int | None, owner: str) -> Container:
        settings = self._settings
        if memory_bytes is not None and memory_bytes < settings.memory_bytes:
            settings = settings.model_copy(update={"memory_bytes": memory_bytes})
        container = Container(mint("cntr"), await self._free_slot(), settings, self.isolation, owner)
        self._live[container.id] = container
        container.calls += 1
        try:
            await container.start()
        except BaseException as error:
            self._discard(container)
            if isinstance(error, OSError):
                raise NotStarted(f"No container could be started: {error}") from error
            raise
        finally:
            container.calls -= 1
        return container

    async def _free_slot(self) -> int:
        """Return a free slot. If there is none, end the container idle for longest. Raises ``NoRoom``."""
        while not self._slots:
            idle = next((container for container in self._live.values() if not container.calls), None)
            if idle is not None:
                self._discard(idle)
            if not self._ending:
                raise NoRoom(f"All {self._settings.max_containers} containers are in use. Try again later.")
            await asyncio.wait(self._ending, return_when=asyncio.FIRST_COMPLETED)
        return self._slots.pop()

    def _discard(self, container: Container) -> None:
        """End a container in the background. Its slot and user become free once its last process has ended."""
        if self._live.pop(container.id, None) is None:
            return
        container.cut()
        task = asyncio.create_task(self._end(container))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, container: Container) -> None:
        await container.end()
        self._slots.add(container.slot)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._settings.keep / 4))
            expired = asyncio.get_running_loop().time() - self._settings.keep
            for container in list(self._live.values()):
                if not container.calls and container.last_used < expired:
                    self._discard(container)

    async def _strongest(self) -> Isolation:
        refused = []
        for isolation in _LEVELS:
            if isolation.own_user and os.geteuid() != 0:
                continue
            if not isolation.namespaces and not self._settings.allow_weak_isolation:
                break
            trial = Container("trial", 0, self._settings, isolation)
            try:
                await trial.start("import ctypes, decimal")  # fails if a library directory is hidden
            except (NotStarted, OSError) as error:
                refused.append(f"{isolation.name}: {error}")
            else:
                return isolation
            finally:
                await trial.end()
        raise WeakIsolation(
            "the kernel does not grant sufficient isolation ("
            + "; ".join(refused)
            + "). If this service already runs in a sandbox, "
            "set allow_weak_isolation to start anyway (see docs/sandbox.md)."
        )
