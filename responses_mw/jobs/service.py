"""The tasks of a process that background responses need: the followers' reader, and the worker."""

from __future__ import annotations

import asyncio

from .background import Background
from .follower import Followers
from .worker import Worker


class JobService:
    """In order: ``start``, ``work``, ``stop``, ``drain``, ``aclose``. Each may be called again, and the first ones left out."""

    def __init__(self, background: Background, followers: Followers, worker: Worker | None) -> None:
        """Without a ``worker`` jobs are left to other processes."""
        self._background = background
        self._followers = followers
        self._worker = worker
        self._following: asyncio.Task[None] | None = None
        self._working: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Serves followers from now on."""
        self._following = self._following or asyncio.create_task(self._followers.run(self._background.settle))

    def work(self) -> None:
        """Claims jobs from now on: the upstream is up."""
        if self._worker is not None and not self._stopped:
            self._working = self._working or asyncio.create_task(self._worker.run())

    @property
    def is_working(self) -> bool:
        """Whether jobs are claimed here now."""
        return self._working is not None and not self._working.done() and not self._stopped

    def stop(self) -> None:
        """Claims no more, and ends the followers, who go on at another replica: the server is about to stop."""
        self._stopped = True
        self._followers.close()
        if self._worker is not None:
            self._worker.stop()

    async def drain(self) -> None:
        """Stops, and waits until the worker has ended its jobs or handed them back."""
        self.stop()
        if self._working is not None:
            await asyncio.shield(self._working)

    async def aclose(self) -> None:
        try:
            await self.drain()
        finally:
            tasks = [task for task in (self._following, self._working) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
