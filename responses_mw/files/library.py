"""Create, read and delete files, and erase the bytes of files that have expired or whose upload was not completed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ..errors import RateLimited, RequestTimeout, TooLarge, Unavailable
from ..state import Damaged, Missing, StateFull, StateUnavailable
from ..state.due import DAMAGED_SECONDS
from ..state.files import UPLOAD_SECONDS, File, Files, new_file_id
from ..state.store_files import StoreFiles
from .storage import ObjectStorage, RedisStorage, Storage

logger = logging.getLogger(__name__)

MAX_UPLOADS = 32
"""Maximum number of concurrent uploads. Each one takes up to 10 MiB of memory."""
MAX_OWNER_UPLOADS = MAX_UPLOADS // 2
"""Maximum number of concurrent uploads of an owner."""
_SWEEP_INTERVAL = 60.0
_SWEEP_BATCH = 100


class UploadedData(NamedTuple):
    """The bytes of an upload that are stored but do not belong to a file yet."""

    file_id: str
    size: int
    digest: str


class FileLibrary:
    """The files of all owners. Every coroutine raises `Unavailable` if Redis or the storage fails."""

    def __init__(self, files: Files, store_files: StoreFiles, url: str | None, max_bytes: int) -> None:
        """Raises the same errors as `ObjectStorage`."""
        self.records = files
        self._store_files = store_files
        self._storage: Storage = ObjectStorage(url) if url is not None else RedisStorage(files)
        self._max_bytes = max_bytes
        self._uploads = Counter[str]()  # in progress, by owner

    async def upload(self, chunks: AsyncIterator[bytes], owner: str) -> UploadedData:
        """Store the bytes of a new file. Pass the result to `create`, or its id to `discard`.

        Raises the errors of `chunks`, `TooLarge` if there are too many bytes, `RateLimited` or `Unavailable` if
        there are too many uploads.
        """
        with self._counted(owner):
            return await self._upload(chunks, owner)

    @contextmanager
    def _counted(self, owner: str) -> Iterator[None]:
        """Count an upload. An owner who sends slowly must not keep all others from uploading."""
        if self._uploads[owner] >= MAX_OWNER_UPLOADS:
            raise RateLimited(f"You are uploading {MAX_OWNER_UPLOADS} files already.")
        if self._uploads.total() >= MAX_UPLOADS:
            raise Unavailable("The server is receiving too many files.")
        self._uploads[owner] += 1
        try:
            yield
        finally:
            self._uploads[owner] -= 1
            if not self._uploads[owner]:
                del self._uploads[owner]

    async def _upload(self, chunks: AsyncIterator[bytes], owner: str) -> UploadedData:
        file_id, received = new_file_id(), _Received(chunks, self._max_bytes)
        await self.records.schedule(file_id, owner, int(time.time()) + UPLOAD_SECONDS)
        try:
            async with asyncio.timeout(UPLOAD_SECONDS * 0.9):
                await self._storage.write(file_id, owner, received.chunks())
        except BaseException as error:
            await self.discard(file_id, owner)
            if isinstance(error, TimeoutError):
                raise RequestTimeout("The upload takes too long.") from None
            raise
        return UploadedData(file_id, received.size, received.hash.hexdigest())

    async def discard(self, file_id: str, owner: str) -> None:
        """Erase uploaded bytes. If this fails, they are erased later."""
        try:
            await self._erase(file_id, owner)
        except Unavailable as error:
            logger.warning("cannot erase the bytes of an upload, will retry: %s", error.message)

    async def create(self, data: UploadedData, filename: str, purpose: str, lifetime: int | None, owner: str) -> File:
        """Create a file from uploaded bytes. It expires after `lifetime` seconds, unless that is None.

        Raises `OverQuota` or `OverBound` if the owner has stored too much.
        """
        now = int(time.time())
        expires_at = None if lifetime is None else now + lifetime
        file = File(data.file_id, filename, purpose, data.size, now, expires_at, data.digest)
        try:
            await self.records.create(file, owner)
        except BaseException:
            await self.discard(data.file_id, owner)
            raise
        await self._reschedule(file, owner)
        return file

    async def _reschedule(self, file: File, owner: str) -> None:
        try:
            await self.records.schedule(file.id, owner, file.expires_at)
        except StateUnavailable as error:  # the check scheduled by the upload retries this
            logger.debug("cannot schedule the expiry of a file, will retry: %s", error.message)

    async def find(self, file_id: str, owner: str) -> File:
        """Return the record of a file. Raises `Missing` if the owner has no such file."""
        return await self.records.get(file_id, owner)

    async def chunks(self, file_id: str, owner: str) -> AsyncIterator[bytes]:
        """Return the bytes of a file in chunks. Raises `Missing` if the owner has no such file."""
        return await self.read(await self.find(file_id, owner), owner)

    async def read(self, file: File, owner: str) -> AsyncIterator[bytes]:
        """Return the bytes of a file in chunks. Raises `Missing` if they are lost."""
        return await self._storage.read(file, owner)

    async def delete(self, file_id: str, owner: str) -> None:
        """Delete a file and remove it from all vector stores. Raises `Missing` if the owner has no such file."""
        await self.records.get(file_id, owner)
        with suppress(StateFull):  # deleting frees memory
            await self.records.schedule(file_id, owner, int(time.time()))  # if this process dies, another one erases the bytes
        await self._erase(file_id, owner)

    async def _erase(self, file_id: str, owner: str) -> None:
        await self.records.delete(file_id, owner)
        await self._store_files.detach_everywhere(file_id, owner)
        await self._storage.erase(file_id, owner)
        await self.records.schedule(file_id, owner, None)

    async def sweep(self) -> None:
        """Call `erase_due` periodically, until cancelled. Several processes may do this at the same time."""
        while True:
            try:
                await self.erase_due()
            except Unavailable as error:
                logger.debug("cannot erase files, will retry: %s", error.message)
            await asyncio.sleep(_SWEEP_INTERVAL)

    async def erase_due(self) -> None:
        """Erase expired files, files whose deletion was interrupted, and uploads that never became a file."""
        for file_id, owner in await self.records.due(_SWEEP_BATCH):
            try:
                await self._check(file_id, owner)
            except Damaged:  # already logged by the Redis client
                await self.records.schedule(file_id, owner, int(time.time()) + DAMAGED_SECONDS)

    async def _check(self, file_id: str, owner: str) -> None:
        try:
            file = await self.records.get(file_id, owner)
        except Missing:
            await self._erase(file_id, owner)
        else:
            await self.records.schedule(file_id, owner, file.expires_at)


class _Received:
    """Counts and hashes the bytes of an upload while they are read."""

    def __init__(self, chunks: AsyncIterator[bytes], maximum: int) -> None:
        self._chunks = chunks
        self._maximum = maximum
        self.size = 0
        self.hash = hashlib.sha256()

    async def chunks(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            self.size += len(chunk)
            if self.size > self._maximum:
                raise TooLarge(f"The file is larger than {self._maximum} bytes.", param="file")
            self.hash.update(chunk)
            yield chunk
