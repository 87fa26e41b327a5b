"""Store the records of files and the bytes of small files, and schedule the erasure of bytes.

All records of an owner are in one slot, so the id of another owner's file is simply not found. The bytes are stored before the
record, perhaps in another store. `due` has the time of the next check of each file whose bytes may have to be erased: of an
incomplete upload, a file that expires, or one that is being deleted. If a process dies, another one erases the bytes.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from ..ids import RANDOM_LENGTH, random_part
from ..lua import load
from .client import Args, Client
from .due import OWNER, due_checks
from .errors import Missing, NewerRecord, OverBound, Reply
from .models import no_such_cursor
from .schema import VERSION, Address, reading
from .writes import UNDONE_SECONDS, Write, Writer

_CREATE, _DELETE, _LIST = load("state", "file_create", "file_delete", "file_list")

MAX_FILES = 100_000
"""Maximum number of files of an owner."""
FOREVER = 10 * 365 * 24 * 3600
"""Lifetime in seconds that counts for the owner's quota if a file does not expire."""
UPLOAD_SECONDS = 3600
"""Maximum duration of an upload. Bytes without a record are erased after this time."""
RECORD_BYTES = 512  # overhead of a file in Redis, in bytes
_BATCH = 500  # number of records that one script call reads
_DUE = "rmw:{files}:due"
_ID = re.compile(rf"file-([a-z0-9]{{{RANDOM_LENGTH}}})")
_CHECK = re.compile(rf"({OWNER}):([a-z0-9]{{{RANDOM_LENGTH}}})")


def new_file_id() -> str:
    return f"file-{random_part()}"


@dataclass(frozen=True, slots=True)
class File:
    """The record of a file. `expires_at` is None if the file does not expire. `digest` is the SHA-256 hash of its bytes."""

    id: str
    filename: str
    purpose: str
    size: int
    created_at: int
    expires_at: int | None
    digest: str

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()


class FilePage(NamedTuple):
    files: list[File]
    has_more: bool


class _Keys(NamedTuple):
    """The keys of an owner's files, and those of the file `name`."""

    records: str
    order: str
    tombstone: str
    data: str

    @classmethod
    def of(cls, owner: str, name: str = "") -> _Keys:
        slot, records = f"rmw:{{f{owner}}}", files_of(owner)
        return cls(records, f"{records}:order", f"{slot}:x:{name}", f"{slot}:d:{name}")


def files_of(owner: str) -> str:
    """Return the key of the records of an owner's files."""
    return f"rmw:{{f{owner}}}:files"


class Files:
    """The files of all owners. Every coroutine raises StateUnavailable if Redis fails."""

    def __init__(self, client: Client, writer: Writer) -> None:
        self._client = client
        self._writer = writer

    async def create(self, file: File, owner: str) -> None:
        """Store the record of a new file. Raises OverQuota or OverBound if the owner has stored too much."""
        name, keys = _name(file.id), _Keys.of(owner, _name(file.id))
        size = file.size + len(file.filename.encode()) + RECORD_BYTES
        ttl = 1000 * (FOREVER if file.expires_at is None else max(1, file.expires_at - int(time.time())))
        args: Args = [name, _packed(file), time.time_ns() // 1000, size, ttl, MAX_FILES]
        undo: Args = [name, UNDONE_SECONDS * 1000]
        write = Write(_CREATE, Address(f"f{owner}", name), keys, args, owner, name, size, ttl=ttl, undo=(_DELETE, undo))
        verdict = await self._writer.write(write)
        if verdict == Reply.BOUND:
            raise OverBound(f"You have reached the maximum of {MAX_FILES} files. Delete some.")
        if verdict == Reply.MISSING:
            raise Missing("File", file.id)

    async def get(self, file_id: str, owner: str) -> File:
        """Return a file. Raises Missing if the owner has no such file, or if it has expired."""
        return _file(file_id, await self._client.command("HGET", _Keys.of(owner).records, _name(file_id)))

    async def get_all(self, file_ids: Sequence[str], owner: str) -> list[File]:
        """Return files. Raises Missing if the owner does not have one of them, or if it has expired."""
        if not file_ids:
            return []
        stored = await self._client.command("HMGET", _Keys.of(owner).records, *map(_name, file_ids))
        return [_file(file_id, record) for file_id, record in zip(file_ids, stored, strict=True)]

    async def known(self, file_ids: Sequence[str], owner: str) -> frozenset[str]:
        """Return which files the owner has. They may have expired."""
        names = {match[1]: one for one in file_ids if (match := _ID.fullmatch(one))}
        if not names:
            return frozenset()
        stored = await self._client.command("HMGET", _Keys.of(owner).records, *names)
        return frozenset(one for one, record in zip(names.values(), stored, strict=True) if record is not None)

    async def page(self, owner: str, *, after: str | None, limit: int, order: str, purpose: str | None) -> FilePage:
        """Return up to `limit` files, with this `purpose` unless it is None. Raises BadRequest if `after` is unknown."""
        found: list[File] = []
        async for file in self._each(owner, after, order):
            if not file.is_expired and purpose in (None, file.purpose):
                if len(found) == limit:
                    return FilePage(found, has_more=True)
                found.append(file)
        return FilePage(found, has_more=False)

    async def _each(self, owner: str, after: str | None, order: str) -> AsyncIterator[File]:
        last = _cursor(after) if after else ""
        while True:
            reply = await self._client.script(_LIST, _Keys.of(owner)[:2], [last, _BATCH, order])
            if reply is None:
                raise no_such_cursor("after", str(after))
            for name, record in zip(reply[::2], reply[1::2], strict=True):
                if record is not None:  # Redis has evicted the records, but not the index
                    yield _unpacked(f"file-{name.decode()}", record)
            if len(reply) < 2 * _BATCH:
                return
            last = reply[-2]

    async def delete(self, file_id: str, owner: str) -> bool:
        """Delete a record and, if they are in Redis, the file's bytes. Return whether there was a record."""
        name = _name(file_id)
        verdict, *report = await self._client.script(_DELETE, _Keys.of(owner, name), [name, 0])
        await self._writer.quota.settle(owner, f"f{owner}", report)
        return bool(verdict == Reply.DELETED)

    # -- bytes in Redis ------------------------------------------------------------------------------------------------

    async def write_data(self, file_id: str, owner: str, data: bytes) -> None:
        await self._client.command("SET", _Keys.of(owner, _name(file_id)).data, data)

    async def read_data(self, file_id: str, owner: str) -> bytes:
        """Return the bytes of a file. Raises Missing if they are not in Redis."""
        data: bytes | None = await self._client.command("GET", _Keys.of(owner, _name(file_id)).data)
        if data is None:
            raise Missing("File", file_id)
        return data

    # -- files to erase ------------------------------------------------------------------------------------------------

    async def schedule(self, file_id: str, owner: str, at: int | None) -> None:
        """Schedule the check of a file for the time `at` in Unix seconds. If it is None, remove it from the schedule."""
        member = f"{owner}:{_name(file_id)}"
        await self._client.command(*(("ZADD", _DUE, at, member) if at is not None else ("ZREM", _DUE, member)))

    async def owners(self) -> list[str]:
        """Return the owners that have files. This scans all keys."""
        return [key.split("{f")[1].split("}")[0] for key in await self._client.scan("rmw:{f*}:files")]

    async def due(self, maximum: int) -> list[tuple[str, str]]:
        """Return the id and the owner of up to `maximum` files whose check is due."""
        return [(f"file-{match[2]}", match[1]) for match in await due_checks(self._client, _DUE, _CHECK, maximum)]


def _name(file_id: str) -> str:
    match = _ID.fullmatch(file_id)
    if match is None:
        raise Missing("File", file_id)
    return match[1]


def _cursor(file_id: str) -> str:
    try:
        return _name(file_id)
    except Missing:
        raise no_such_cursor("after", file_id) from None


def _packed(file: File) -> bytes:
    members = {"filename": file.filename, "purpose": file.purpose, "bytes": file.size, "digest": file.digest}
    times = {"created_at": file.created_at, "expires_at": file.expires_at}
    return orjson.dumps({"v": VERSION, **members, **times})


def _file(file_id: str, record: bytes | None) -> File:
    if record is None or (file := _unpacked(file_id, record)).is_expired:
        raise Missing("File", file_id)
    return file


def _unpacked(file_id: str, record: bytes) -> File:
    with reading("file"):
        fields: dict[str, Any] = orjson.loads(record)
        if fields["v"] > VERSION:
            raise NewerRecord
        names = ("filename", "purpose", "bytes", "created_at", "expires_at", "digest")
        return File(file_id, *(fields[name] for name in names))
