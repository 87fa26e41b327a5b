"""Remove the directories of ended containers, whatever modes their code has set, and try again if that fails."""

from __future__ import annotations

import asyncio
import logging
import os

logger = logging.getLogger(__name__)

RETRY_INTERVAL = 60.0
"""Minimum number of seconds between two attempts to remove the directories that are left."""


class Removal:
    """Removes directories, and remembers those that could not be removed."""

    def __init__(self) -> None:
        self.left: dict[str, int | None] = {}
        """The directories that could not be removed, and the users that own their files."""
        self.next_attempt = 0.0

    async def remove(self, directory: str, user: int | None) -> None:
        """Remove `directory`. All processes with access to it must have ended. `user` owns the files, or None for this user."""
        await _remove(directory, user)
        if not _exists(directory):
            self.left.pop(directory, None)
            return
        is_new = directory not in self.left
        self.left[directory] = user
        if is_new:
            message = (
                "the directory %s of an ended container could not be removed (%d in all are left): trying again every %.0f s"
            )
            logger.error(message, directory, len(self.left), RETRY_INTERVAL)

    async def retry(self) -> None:
        """Try again to remove the directories that are left, but at most once per `RETRY_INTERVAL`."""
        now = asyncio.get_running_loop().time()
        if self.left and now >= self.next_attempt:
            self.next_attempt = now + RETRY_INTERVAL
            for directory, user in list(self.left.items()):
                await self.remove(directory, user)


async def _remove(directory: str, user: int | None) -> None:
    # Without write permission for a directory, its files cannot be removed. Even root needs the owner's rights for `chmod` if
    # the service lacks the capabilities DAC_OVERRIDE and FOWNER.
    # `shutil.rmtree` fails if the code has nested directories deeper than Python's recursion limit.
    await _run("chmod", "-R", "u+rwx", directory, user=user)
    await _run("rm", "-rf", directory, user=user)
    if user is not None and _exists(directory):  # the owner may not write to the parent directory
        await _run("rm", "-rf", directory)


async def _run(*command: str, user: int | None = None) -> None:
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet, user=user, cwd="/")
    await process.wait()


def _exists(directory: str) -> bool:
    return os.path.lexists(directory)
