"""Where the bytes of files are stored: an object store or a directory (`files.url`), or Redis for small files.

obstore is an optional dependency. It is imported only if `files.url` is set.
"""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import StartupError, TooLarge, Unavailable
from ..ids import random_part
from ..state import Missing
from ..state.files import File, Files

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger(__name__)

MAX_IN_REDIS = 1024 * 1024
"""Maximum size in bytes of a file in Redis."""
_PART = 5 * 1024 * 1024  # the smallest part that S3 accepts
_CHUNK = 256 * 1024
_RETRIES = {"retry_timeout": timedelta(seconds=30)}
_TIMEOUTS = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "10m"}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}
"""The variables of the environment that replace the address of an object store, by the scheme of `files.url`."""
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified bucket does not exist")
_REMEDIES = [
    (_NO_BUCKET, "Create the bucket, or correct files.url."),
    (re.compile(r"//(169\.254\.169\.254|metadata\.google)"), "Set the credentials of the object store in the environment."),
    (re.compile(r" 40[13] |Unauth|Permission"), "Check the credentials of the storage, and their permissions."),
]


class StorageUnavailable(Unavailable):
    """The storage failed. `reason` is for the operator only."""

    def __init__(self, reason: str) -> None:
        super().__init__("The file storage is unavailable.")
        self.reason = reason


class Storage(ABC):
    """Stores the bytes of files. Every coroutine raises `Unavailable` if the storage fails."""

    @abstractmethod
    async def write(self, file_id: str, owner: str, chunks: AsyncIterator[bytes]) -> None:
        """Store all `chunks`, or nothing if iterating over them raises. Raises `TooLarge` if the file is too large."""

    @abstractmethod
    async def read(self, file: File, owner: str) -> AsyncIterator[bytes]:
        """Return the bytes of a file in chunks. Raises `Missing` if it is not stored."""

    @abstractmethod
    async def erase(self, file_id: str, owner: str) -> None:
        """Erase the bytes, if they exist."""


class RedisStorage(Storage):
    """Small files in Redis. Deleting the record of such a file erases its bytes."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def write(self, file_id: str, owner: str, chunks: AsyncIterator[bytes]) -> None:
        data = bytearray()
        async for chunk in chunks:
            data += chunk
            if len(data) > MAX_IN_REDIS:
                message = f"The file is larger than {MAX_IN_REDIS} bytes. For larger files, the operator must set 'files.url'."
                raise TooLarge(message, param="file")
        await self._files.write_data(file_id, owner, bytes(data))

    async def read(self, file: File, owner: str) -> AsyncIterator[bytes]:
        return _one(await self._files.read_data(file.id, owner))

    async def erase(self, file_id: str, owner: str) -> None:
        await self._files.delete(file_id, owner)


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


class ObjectStorage(Storage):
    """Files in a directory or in an object store. A file is stored as `<owner>/<file id>`."""

    def __init__(self, url: str) -> None:
        """Raises `StartupError` if obstore is not installed, or if the URL cannot be used."""
        try:
            from obstore.store import from_url
        except ModuleNotFoundError:
            raise StartupError("files.url needs obstore: install responses-mw with the extra 'files'") from None
        try:
            self._store: ObjectStore = from_url(url, **_options(url.partition(":")[0]))
        except Exception as error:  # noqa: BLE001 -- obstore also raises ValueError and OSError
            raise StartupError(f"files.url cannot be used: {_reason(error)}") from None

    async def write(self, file_id: str, owner: str, chunks: AsyncIterator[bytes]) -> None:
        import obstore

        writer = obstore.open_writer_async(self._store, _path(file_id, owner), buffer_size=_PART, max_concurrency=1)
        async for chunk in chunks:
            with _failures(_is_any):
                await writer.write(chunk)
        with _failures(_is_any):
            await writer.close()  # publishes the object

    async def read(self, file: File, owner: str) -> AsyncIterator[bytes]:
        import obstore

        try:
            with _failures():
                result = await obstore.get_async(self._store, _path(file.id, owner))
        except FileNotFoundError:
            logger.warning("file %s is missing from the storage", file.id)
            raise Missing("File", file.id) from None
        return _chunks(result.stream(min_chunk_size=_CHUNK))

    async def erase(self, file_id: str, owner: str) -> None:
        import obstore

        try:
            with _failures():
                await obstore.delete_async(self._store, _path(file_id, owner))
        except FileNotFoundError:
            pass

    async def check(self) -> None:
        """Write, read and erase an object. Raises `StorageUnavailable` if this is not possible."""
        file = File(f"check-{random_part()}", "", "", 0, 0, None, "")
        await self.write(file.id, "check", _one(b"Hello"))
        try:
            read = [bytes(chunk) async for chunk in await self.read(file, "check")]
        finally:
            await self.erase(file.id, "check")
        if b"".join(read) != b"Hello":
            raise StorageUnavailable("it returned other bytes than were written")


def _options(scheme: str) -> dict[str, Any]:
    if scheme == "file":
        return {"mkdir": True}
    if scheme not in _ENDPOINTS:
        return {}
    is_plain = any(os.environ.get(name, "").startswith("http:") for name in _ENDPOINTS[scheme])
    return {"retry_config": _RETRIES, "client_options": {**_TIMEOUTS, **({"allow_http": True} if is_plain else {})}}


async def _chunks(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    with _failures(_is_any):
        async for chunk in stream:
            yield chunk


def _is_any(error: Exception) -> bool:
    return True


def _is_failure(error: Exception) -> bool:
    """Return whether the storage failed, rather than that an object is missing. A missing bucket is a failure."""
    return not isinstance(error, FileNotFoundError) or _NO_BUCKET.search(str(error)) is not None


@contextmanager
def _failures(is_failure: Callable[[Exception], bool] = _is_failure) -> Iterator[None]:
    """Log the errors of the storage for which `is_failure` is true, and convert them to `StorageUnavailable`."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        if not is_failure(error):
            raise
        reason = _reason(error)
        logger.warning("file storage (files.url) failed: %s", reason)
        raise StorageUnavailable(reason) from None


def _reason(error: Exception) -> str:
    """Return one line for the operator: what failed, the cause or the object store's error code, and the remedy if known."""
    text = str(error)
    reason, _, details = (text or type(error).__name__).partition("\n")
    reason = reason.partition("<?xml")[0].rstrip("\ufeff: ")
    if (code := re.search(r"<Code>(\w+)</Code>", text)) is not None:
        reason = f"{reason}: {code[1]}"
    elif "HTTP error" in reason and (causes := re.findall(r'"([^"]{4,200})"|: ([A-Z][a-z]+[A-Z]\w+)[,( ]', details)):
        reason = f"{reason}: {causes[-1][0] or causes[-1][1]}"
    remedies = [remedy for pattern, remedy in _REMEDIES if pattern.search(text)]
    return f"{reason}. {remedies[0]}" if remedies else reason


def _path(file_id: str, owner: str) -> str:
    return f"{owner}/{file_id}"
